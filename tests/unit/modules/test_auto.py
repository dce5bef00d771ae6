"""Mode "auto": whatever is kept, moved or recomputed, and however the plan changes from step to step, a model
computes what it computed before; and the plan follows what was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import HostBudgetError, PipelineOffloadManager
from offload.auto.controller import Auto
from offload.device.sim import SimDevice
from offload.errors import DeviceTotalError
from offload.groups import timed
from offload.policy.actions import Rates
from offload.policy.mixture import MixedPlan, choose_keeps
from tests.inside import exactly
from tests.unit.modules.training import CALLS, ROWS, WIDTH, Model, build, equal, train

SLOW_LINK = Rates(d2h_bytes_per_s=1e3, h2d_bytes_per_s=1e3)
"""So slow that moving what these small blocks save costs more than computing it again."""
LAYERS = 4


@pytest.fixture
def follows_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the device has an allocator, the search's plan is followed as it is."""
    monkeypatch.setattr(Auto, "_new_ladder", lambda auto, engine: None)


def train_auto(model: nn.Module, total: Any, *, steps: int = 5, **options: Any) -> tuple[list[Tensor], Any]:
    with offload.activations(model, "auto", min_numel=1, device_total=exactly(total)) as handle:
        seen = train(model, steps=steps, **options)
        return seen, handle.explain()


@pytest.mark.parametrize(
    ("call", "total"),
    [
        *((call, 12_000) for call in sorted(CALLS)),
        ("plain", 10_000),
        ("plain", None),
        ("called twice", None),
    ],
)
def test_gradients_and_weights_have_the_bits_of_a_run_without(
    call: str, total: int | None, manager: PipelineOffloadManager
) -> None:
    manager.engine.rates = SLOW_LINK
    plain = train(build(call, blocks=LAYERS), steps=5)
    ours, explained = train_auto(build(call, blocks=LAYERS), total)
    assert equal(ours, plain)
    assert explained.plan is not None or "checkpoint" in call
    assert len(list(manager.living_blocks())) == 0


def test_a_total_that_is_too_small_for_all_recomputes_and_enough_of_it_recomputes_nothing(
    manager: PipelineOffloadManager,
) -> None:
    manager.engine.rates = SLOW_LINK
    again = []
    for total in (12_000, 1_000_000):
        _, explained = train_auto(build(blocks=LAYERS), total)
        again.append(sum(share.recomputed_bytes for share in explained.shares))
    assert again[0] > again[1] == 0


def test_what_stays_is_searched_for_from_what_the_plan_keeps(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step within a tight limit a search from its own starts may find nothing near it: two stages of a
    rank under ZBV, planned for 2.3 s, took 3.1 s."""
    starts: list[MixedPlan | None] = []

    def spied(*arguments: Any, start: MixedPlan | None, **named: Any) -> MixedPlan:
        starts.append(start)
        return choose_keeps(*arguments, start=start, **named)

    monkeypatch.setattr(timed, "choose_keeps", spied)
    manager.engine.rates = SLOW_LINK
    device = manager.engine.device
    assert isinstance(device, SimDevice)
    model = build(blocks=LAYERS)
    for block in model.layers:
        block.register_forward_pre_hook(lambda *_: device.compute_for(1e-3))
    _, explained = train_auto(model, 20_000, steps=16)
    assert explained.plan is not None
    assert starts
    assert starts[-1] is explained.plan


def test_what_the_plan_keeps_stays_from_its_first_step_on(manager: PipelineOffloadManager) -> None:
    """Times of the simulated device are all 0, so the groups never search. On an H200 W5 moved what its plan
    kept in every step under it but the last ones."""
    manager.engine.rates = SLOW_LINK
    spilled: list[int] = []
    model = build(blocks=LAYERS)
    with offload.activations(model, "auto", min_numel=1, device_total="20000B") as handle:
        planned_at = None
        for step in range(14):
            if planned_at is None and handle.explain().plan is not None:
                planned_at = step
            train(model, steps=1, microbatches=2)
            spilled.append(manager.stats.spilled)
        plan = handle.explain().plan
        window_bytes = manager.engine.limits.max_restoring_bytes
    assert plan is not None
    assert planned_at is not None
    assert plan.predicted.moved_bytes == 0
    assert spilled[planned_at - 1] > 0
    assert set(spilled[planned_at:]) == {0}
    assert window_bytes == plan.restoring_room_bytes


def test_before_there_is_a_plan_that_is_said_and_how_blocks_run_meanwhile() -> None:
    model = build(blocks=LAYERS)
    handle = offload.apply(model, "auto", min_numel=1, device_total="20000B")
    train(model, steps=1, microbatches=1)
    said = str(handle.explain())
    assert "no plan yet: 1 of at least 2 steps" in said
    assert "moved whole if a recompute would give it other bits" in said
    assert handle.explain().shares == []
    handle.remove()


def test_it_says_what_it_chose(manager: PipelineOffloadManager) -> None:
    manager.engine.rates = SLOW_LINK
    _, explained = train_auto(build(blocks=LAYERS), 20_000)
    text = str(explained)
    for name in ("layers.0", "layers.3", "recompute", "A budget larger by 2.00 kB would save"):
        assert name in text
    assert [share.name for share in explained.shares] == [f"layers.{at}" for at in range(LAYERS)]
    for share in explained.shares:
        assert share.saved_bytes == share.kept_bytes + share.moved_bytes + share.recomputed_bytes


def test_a_total_that_leaves_nothing_is_one_error_with_both_numbers(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that catches it trains on, every block recomputed."""
    manager.engine.rates = SLOW_LINK
    monkeypatch.setattr(manager.engine.device, "allocator_bytes", lambda: (10_000_000, 10_000_000))
    model = build(blocks=LAYERS)
    with offload.activations(model, "auto", min_numel=1, device_total="1MB") as handle:
        said = "device_total is 1.00 MB, and a step takes 10.00 MB with every block recomputed"
        with pytest.raises(DeviceTotalError, match=said):
            train(model, steps=5)
        train(model, steps=3)
        assert str(handle.explain()) == (
            "auto: device_total leaves no choice: every block is recomputed, and its input moved"
        )
    assert manager.engine.limits.device_limit_bytes is None


@pytest.mark.parametrize(("before", "after"), [((16,), (4,)), ((28, 32, 36), (4, 6, 5))])
def test_where_there_was_no_room_a_plan_is_made_once_steps_are_shorter(
    follows_plans: None,
    before: tuple[int, ...],
    after: tuple[int, ...],
    manager: PipelineOffloadManager,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For good, or where lengths vary on the whole. A row takes 1,500 bytes beside what the engine counts."""
    engine, rows = manager.engine, before[0]
    engine.rates = SLOW_LINK
    monkeypatch.setattr(
        engine.device,
        "allocator_bytes",
        lambda: (0, rows * 1_500 + engine.transfers.counts.device_bytes_peak),
    )
    model = build(blocks=LAYERS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    refused = 0

    def states(of_steps: tuple[int, ...], steps: int) -> list[str]:
        nonlocal rows, refused
        found = []
        for step in range(steps):
            rows = of_steps[step % len(of_steps)]
            try:
                model(torch.randn(rows, WIDTH)).square().mean().backward()
            except DeviceTotalError:
                refused += 1
                continue
            optimizer.step()
            optimizer.zero_grad()
            found.append(str(handle.explain()).splitlines()[0])
        return found

    with offload.activations(model, "auto", min_numel=1, device_total="20000B") as handle:
        assert "device_total leaves no choice" in states(before, 6)[-1]
        assert engine.limits.device_limit_bytes is None
        later = states(after, 14)
        assert "plan" in later[-1]
        plan = handle.explain().plan
        assert plan is not None
        assert plan.problem.blocks[0, 0][0].menu[-1].saved_bytes <= max(after) * WIDTH * 4
        assert engine.limits.device_limit_bytes is not None
        assert "device_total leaves no choice" in states(before, 12)[-1]
        assert refused == 1, "it is said once"


def test_what_is_left_of_the_total_under_the_last_plan_gets_a_plan_of_its_own(
    follows_plans: None, manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 16 on, when the plan is settled, 7,000 bytes more are in use beside saved tensors. What is
    in use between two steps is of neither."""
    engine, total, since, done, between = manager.engine, 24_000, 16, 0, 0
    engine.rates = SLOW_LINK

    def allocator_bytes() -> tuple[int, int]:
        counted = engine.transfers.counts.device_bytes_peak or engine.last_stats.device_bytes_peak
        return 0, max(between, 2_000 + 7_000 * (done >= since) + counted)

    def reset_allocator_peak() -> None:
        nonlocal between
        between = 0

    monkeypatch.setattr(engine.device, "allocator_bytes", allocator_bytes)
    monkeypatch.setattr(engine.device, "reset_allocator_peak", reset_allocator_peak)
    model = build(blocks=LAYERS)
    recomputed = []
    with offload.activations(model, "auto", min_numel=1, device_total=f"{total}B") as handle:
        for _ in range(since + 12):
            train(model, steps=1)
            done, between = done + 1, total
            explained = handle.explain()
            recomputed.append(sum(share.recomputed_bytes for share in explained.shares))
        limit, plan = engine.limits.device_limit_bytes, explained.plan
    assert explained.is_final
    assert plan is not None
    assert limit is not None
    assert limit <= total - 9_000
    assert 0.95 * plan.problem.limit_bytes <= limit <= 1.1 * plan.problem.limit_bytes
    assert recomputed[-1] > recomputed[since - 1]
    assert manager.stats.device_bytes_peak <= limit


def test_the_report_says_whose_limit_a_plan_of_auto_is(manager: PipelineOffloadManager) -> None:
    """It was "beyond device_limit", which nobody had set."""
    manager.engine.rates = SLOW_LINK
    model = build(blocks=LAYERS)
    with offload.activations(model, "auto", min_numel=1, device_total="20000B") as handle:
        train(model, steps=5)
        report = handle.report()
        assert report.last is not None
        assert handle.explain().moved_bytes == report.last.moved_bytes, "both name the same"
    assert report.device_limit_by == "auto"
    assert not report.follows_no_plan
    assert "beyond what device_total leaves (" in str(report)
    assert offload.report().device_limit_by == "", "the plan has ended, and its limit"


def test_the_next_change_of_a_report_is_none_that_mode_auto_refuses(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a plan was refused, the advice was a lower device_limit, which is an error in this mode."""
    manager.engine.rates = SLOW_LINK
    monkeypatch.setattr(manager.engine.device, "allocator_bytes", lambda: (10_000_000, 10_000_000))
    model = build(blocks=LAYERS)
    with offload.activations(model, "auto", min_numel=1, device_total="1MB") as handle:
        with pytest.raises(DeviceTotalError):
            train(model, steps=5)
        train(model, steps=5)
        assert "leaves no choice" in str(handle.explain())
        report = handle.report()
        assert report.follows_no_plan
        assert report.verdict.splitlines()[1] == (
            "next: mode='auto' follows no plan: explain() of its handle says why, and what is done instead"
        )
    assert not offload.report().follows_no_plan, "no model is left that the mode is applied to"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mode": "groups", "device_total": "1GB"}, "only mode='auto' keeps within a total"),
        ({"mode": "auto", "device_limit": "1GB"}, "give device_total, of everything on the device"),
        ({"mode": "auto", "device_total": "60%"}, "the size that it is a share of is not known here"),
        ({"mode": "auto", "modules": "layers.*.fc1"}, "recomputes whole blocks"),
    ],
)
def test_what_cannot_be_is_an_error_with_the_way_out(arguments: dict[str, Any], text: str) -> None:
    if torch.cuda.is_available() and "60%" in arguments.values():
        pytest.skip("there is a GPU to take a share of")
    with pytest.raises(ValueError, match=text):
        offload.apply(Model(), **arguments)


def test_two_models_share_one_total_and_one_plan(manager: PipelineOffloadManager) -> None:
    """A pipeline has two on a rank. Each with a plan of its own would set the device's limit in turns."""
    manager.engine.rates = SLOW_LINK
    models = [build(blocks=2), build(blocks=3)]
    handles = [offload.apply(model, "auto", min_numel=1, device_total="40000B") for model in models]
    optimizer = torch.optim.SGD([weight for model in models for weight in model.parameters()], lr=0.1)
    for _ in range(5):
        for model in models:
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    plans = [handle.explain().plan for handle in handles]
    assert plans[0] is plans[1] is not None
    assert [len(levels) for levels in plans[0].levels.values()] == [2, 3]
    assert [share.name for share in handles[0].explain().shares] == [
        *(f"layers.{at} of stage 0" for at in range(2)),
        *(f"layers.{at} of stage 1" for at in range(3)),
    ]
    handles[0].remove()
    assert manager.engine.limits.device_limit_bytes is not None
    handles[1].remove()
    assert manager.engine.limits.device_limit_bytes is None


def test_without_announced_ends_ranks_that_communicate_never_plan_and_say_so_once(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end is guessed where nothing is alive, which another rank may find at another moment."""
    manager.engine.rates = SLOW_LINK
    monkeypatch.setattr("offload.auto.calls.peers_of", lambda groups: frozenset({1}))
    model = build(blocks=LAYERS)
    handle = offload.apply(model, "auto", min_numel=1, device_total="20000B")
    for _ in range(8):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert handle.explain().plan is None
    said = [text for text in caplog.messages if text.startswith("blocks communicate with ranks [1]")]
    assert len(said) == 1
    assert "until all of these ranks call offload.step_end() after each step" in said[0]
    handle.remove()


def test_two_totals_for_one_device_are_an_error_with_both() -> None:
    first, second = Model(), Model()
    handle = offload.apply(first, "auto", device_total="3GB")
    with pytest.raises(ValueError, match="3,000,000,000 bytes: the total is of the device") as raised:
        offload.apply(second, "auto", device_total="2GB")
    assert "apply(mode='auto') with device_total=2,000,000,000 bytes beside <offload.apply(Model" in str(
        raised.value
    )
    handle.remove()
    offload.apply(second, "auto", device_total="2GB").remove()


@pytest.mark.parametrize(
    ("methods", "call"),
    [
        ((), r"gradient_checkpointing = False on each module"),
        (("gradient",), r"write gradient_checkpointing_disable\(\) .* gradient_checkpointing=False of"),
        (("gradient", "activation"), r"write activation_checkpointing_disable\(\)"),  # transformers 5.23
    ],
)
def test_a_model_that_checkpoints_its_layers_is_refused(methods: tuple[str, ...], call: str) -> None:
    model = Model()
    model.layers[0].gradient_checkpointing = True
    for name in methods:
        setattr(model, f"{name}_checkpointing_disable", None)
    with pytest.raises(ValueError, match=call):
        offload.apply(model, "auto")


def test_the_head_and_the_loss_have_the_room_that_they_were_measured_to_need(
    follows_plans: None, manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = manager.engine
    engine.rates = SLOW_LINK
    model = build(blocks=LAYERS)
    total = 40_000
    in_head = False

    def allocator_bytes() -> tuple[int, int]:
        """4,000 bytes beside what the engine counts; 14,000 where the head computes."""
        counted = engine.transfers.counts.device_bytes_peak
        return 0, (14_000 + engine.transfers.device_bytes) if in_head else 4_000 + counted

    monkeypatch.setattr(engine.device, "allocator_bytes", allocator_bytes)
    held: list[tuple[int, int]] = []

    def in_the_loss() -> None:
        held.append((engine.limits.claimed_bytes, engine.transfers.device_bytes))

    def head_begins(*_: object) -> None:
        nonlocal in_head
        in_head = True

    def backward_begins(*_: object) -> None:
        nonlocal in_head
        in_head = False

    model.head.register_forward_pre_hook(head_begins)
    with offload.activations(model, "auto", min_numel=1, device_total=f"{total}B"):
        model.layers[-1].register_full_backward_hook(backward_begins)
        plain = train(build(blocks=LAYERS), steps=7)
        assert equal(train(model, steps=7, after_forward=in_the_loss), plain)
        limit = engine.limits.device_limit_bytes
    claims = [claim for claim, _ in held]
    assert claims[:4] == [0] * 4  # two steps measure
    # what the head needs more; one block's input may have come back before the head's phase was over
    assert 10_000 <= claims[-1] <= 10_000 + ROWS * WIDTH * 4
    assert limit is not None
    assert all(bytes_held <= limit for _, bytes_held in held[4:])


@pytest.mark.parametrize("modes", [("auto", "watermark"), ("watermark", "auto")])
def test_a_watermark_does_not_go_around_it(modes: tuple[str, str]) -> None:
    model = Model()
    first, second = modes
    marks = {"watermark": {"high": "1GB"}, "auto": {}}
    with (
        offload.activations(model, first, **marks[first]),
        pytest.raises(ValueError, match="use one of the two"),
    ):
        offload.apply(model, second, **marks[second])


def test_while_offload_is_switched_off_blocks_are_recomputed_and_no_plan_is_made_of_it(
    manager: PipelineOffloadManager,
) -> None:
    manager.engine.rates = SLOW_LINK
    plain = train(build(blocks=LAYERS), steps=2)
    model = build(blocks=LAYERS)
    with offload.activations(model, "auto", min_numel=1, device_total="20000B") as handle:
        manager.disable_offload()
        assert equal(train(model, steps=2), plain)
        assert handle.explain().plan is None
        manager.enable_offload()
        train(model, steps=4)
        assert handle.explain().plan is not None


def test_a_host_without_room_for_a_plan_does_not_end_the_training(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = manager.engine
    engine.rates = Rates(d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12)
    asked: list[int] = []

    def reserve_host(nbytes: int, *, measure: bool = True) -> None:
        asked.append(nbytes)
        raise HostBudgetError("other ranks hold it")

    monkeypatch.setattr(engine, "reserve_host", reserve_host)
    with offload.activations(build(blocks=LAYERS), "auto", min_numel=1, device_total="20000B") as handle:
        auto = handle._auto
        assert auto is not None
        pin = auto.plan.pin

        def on_a_device_that_pins(engine: Any, plan: Any, most_bytes: int) -> bool:
            with monkeypatch.context() as patch:
                patch.setattr(type(engine.device), "pins", True)
                patch.setattr(type(engine.arena), "held_bytes", 0)
                return pin(engine, plan, most_bytes)

        monkeypatch.setattr(auto.plan, "pin", on_a_device_that_pins)
        train(handle._model(), steps=4)  # type: ignore[arg-type]
        assert handle.explain().plan is not None
    assert asked
