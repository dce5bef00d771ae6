"""`apply(conductor=...)`: real loops with a conductor, bit for bit as without, and the phases in them.

The process-wide manager is over the simulated device.
"""

from __future__ import annotations

import copy
import gc
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import PipelineOffloadManager, marks
from offload.client import Phase
from offload.conductor import Conductor, ConductorConfig
from offload.device.sim import ExecutorName, SimDevice
from offload.transfer.copier import CapsAdmission, Direction
from tests.inside import streams_from
from tests.ticks import counted_time
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import ROWS, WIDTH, Model, adam, squares, streamed

pytestmark = pytest.mark.usefixtures("manager")

WHOLE = [Phase.STEP_BEGIN, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.STEP_END]


def phases_of(conductor: Conductor) -> list[Phase]:
    """From here on every transition is appended."""
    seen: list[Phase] = []
    conductor.coordinator.listen(seen.append)
    return seen


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, microbatches: int = 1) -> None:
    for _ in range(microbatches):
        squares(model, batch()).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- bits ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", ["late", "early", "random"])
@pytest.mark.parametrize("mode", [False, "groups", "hidden_states", "watermark"])
def test_weights_and_activations_at_once_have_the_bits_of_plain_torch(
    mode: Any, executor: ExecutorName
) -> None:
    options: dict[str, Any] = {"high": "2KiB"} if mode == "watermark" else {}
    if mode:
        options["min_numel"] = 1
    with streamed(executor=executor, mode=mode, conductor=True, **options) as pair:
        pair.train(steps=5)
        conductor = pair.handle.conductor
        assert conductor.counts.grants > 0
    assert not conductor._enabled


@pytest.mark.parametrize("frozen", [False, True])
def test_with_memory_enough_every_block_is_found_as_without_a_conductor(frozen: bool) -> None:
    """Also in torch's own step, which reads weights and gradients that wait on the host. On the simulated
    device copies run as late as they can, so that everything is in flight for as long as it can be."""
    with streamed(frozen=frozen, conductor=True) as pair:
        pair.train(steps=4)
        figures = pair.figures
        assert figures.hits > 0
        assert figures.misses == 0


def test_with_a_host_that_is_ahead_every_block_of_three_kinds_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No copy that was issued is seen to pass, as where the device is a step behind."""
    with streamed(mode="hidden_states", min_numel=1, conductor=True) as pair:
        pair.train(steps=3)
        conductor, figures = pair.handle.conductor, pair.figures
        before = conductor.counts.denials, figures.misses
        monkeypatch.setattr(SimDevice, "poll", lambda device, event: False)
        pair.train(steps=2)
        assert (conductor.counts.denials, figures.misses) == before
        monkeypatch.undo()


@pytest.mark.parametrize("bridge", ["v0", "turns"])
@pytest.mark.parametrize("frozen", [False, True])
def test_bits_are_the_same_where_every_rule_acts(bridge: Any, frozen: bool) -> None:
    """A byte of the hard cap is enough for pressure, one slot for full slots. apply() refuses such a cap, and
    who builds a conductor may have it."""
    config = ConductorConfig(
        vram_hard_cap_mb=1e-6,
        vram_soft_cap_mb=1e-6,
        h2d_slots=1,
        d2h_slots=1,
        bridge=bridge,
        telemetry_interval=0,
    )
    with streamed(frozen=frozen, mode="groups", min_numel=1) as pair:
        conductor = Conductor(config, engine=pair.stream._engine)
        pair.train(steps=4)
        assert conductor.counts.denials > 0
        conductor.shutdown()


@pytest.mark.req("S1-59")
def test_the_same_copies_are_issued_in_the_same_order_as_without() -> None:
    """It answers, and decides neither what moves nor when."""

    def copies(**options: Any) -> list[tuple[Any, ...]]:
        issued: list[tuple[Any, ...]] = []
        with counted_time(), streamed(mode="groups", min_numel=1, executor="early", **options) as pair:
            engine = pair.stream._engine
            engine.copier.watch(lambda way, owner, nbytes, *events: issued.append((way, owner, nbytes)))
            pair.train(steps=3)
        return issued

    without = copies()
    assert len(without) > 50
    assert copies(conductor=True) == without


# -- phases that are seen ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "options",
    [
        {"mode": "groups", "min_numel": 1},
        {"mode": "hidden_states", "min_numel": 1},
        {"mode": "watermark", "high": "1KiB", "min_numel": 1},
        {"weights": "host"},
    ],
    ids=["groups", "hidden_states", "watermark", "weights"],
)
def test_the_phases_of_a_plain_loop(options: dict[str, Any]) -> None:
    model = Model()
    with streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, conductor=True, **options)
    optimizer = adam(model)
    train(model, optimizer)
    assert handle.conductor is not None
    seen = phases_of(handle.conductor)
    for _ in range(3):
        train(model, optimizer)
    assert seen == WHOLE * 3
    seen.clear()
    with torch.no_grad():
        model(batch())
    assert seen == []  # an evaluation is no step, and under no rule
    train(model, optimizer, microbatches=2)
    turns = [Phase.FORWARD, Phase.BACKWARD] * 2
    assert seen == [Phase.STEP_BEGIN, *turns, Phase.OPTIMIZER, Phase.STEP_END]
    handle.remove()


def test_the_phases_around_a_hybrid_optimizer_and_its_figures() -> None:
    model = Model()
    handle = offload.apply(model, "groups", min_numel=1, conductor=True)
    optimizer = offload.HybridDeviceOptimizer(
        model.parameters(),
        offload_fraction=1.0,
        lr=1e-3,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
    )
    train(model, optimizer)
    assert handle.conductor is not None
    seen = phases_of(handle.conductor)
    for _ in range(2):
        train(model, optimizer)
    assert seen == WHOLE * 2
    line = handle.conductor.telemetry.last
    assert line["pinned_granted_mb"] > 0
    assert line["runtime_snapshots"]["activation_stagehand"] == {"max_d2h": 2, "max_h2d": 2}
    handle.remove()
    optimizer.close()


def test_a_closure_and_a_step_that_is_skipped() -> None:
    model = Model()
    with offload.apply(model, "groups", min_numel=1, conductor=True) as handle:
        assert handle.conductor is not None
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def closure() -> float:
            loss = squares(model, batch())
            loss.backward()
            return loss.item()

        optimizer.step(closure)
        seen = phases_of(handle.conductor)
        optimizer.step(closure)
        optimizer.zero_grad()
        train(model, optimizer)
        assert seen[-5:] == WHOLE
        assert Phase.BACKWARD in seen[:-5]


def test_a_forward_that_raises_and_the_loop_that_goes_on() -> None:
    model = Model()
    with streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, "groups", min_numel=1, weights="host", conductor=True)
    optimizer = adam(model)
    train(model, optimizer)
    broken = model.layers[3].register_forward_hook(lambda *args: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(batch())
    broken.remove()
    train(model, optimizer)
    conductor = handle.conductor
    assert conductor.phase is Phase.STEP_END
    handle.remove()


@pytest.mark.req("S1-5")
def test_a_pipelines_announced_actions_take_turns() -> None:
    manager = offload.marks.default_manager()
    conductor = Conductor(engine=manager.engine, telemetry_interval=0)
    seen = phases_of(conductor)
    model, losses = Model(), {}
    for kind, microbatch in [("F", 0), ("F", 1), ("B", 0), ("F", 2), ("B", 1), ("B", 2)]:
        if kind == "F":
            manager.begin_chunk(0, microbatch)
            x = offload.group_start(batch(), "all")
            with offload.offload_hooks():
                y = model(x)
            losses[microbatch] = offload.group_commit(y, "all").sum()
            manager.end_forward(0, microbatch)
        else:
            manager.begin_backward(0, microbatch, "B")
            losses.pop(microbatch).backward()
            manager.end_backward(0, microbatch, "B")
    offload.step_end()
    assert seen == [Phase.STEP_BEGIN, *[Phase.FORWARD, Phase.BACKWARD] * 2]
    manager.begin_chunk(0, 0)  # nobody has seen an optimizer: the step ends here
    assert seen[-3:] == [Phase.STEP_END, Phase.STEP_BEGIN, Phase.FORWARD]
    conductor.shutdown()


# -- off, and what it costs ----------------------------------------------------------------------------------
def calls_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Counter[tuple[str, str]]:
    """Python calls of one step, by file and function."""
    found: Counter[tuple[str, str]] = Counter()

    def note(frame: Any, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "/offload/" in file and "/offload/device/" not in file:  # which has finalisers
            found[file, frame.f_code.co_name] += 1

    x = batch()
    gc.collect()
    gc.disable()  # finalisers of other tests' objects
    sys.setprofile(note)
    try:
        squares(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found


@pytest.mark.req("S1-48", "S1-49", "S1-58")
def test_off_there_is_not_one_call_more_and_on_there_are() -> None:
    def counted(**options: Any) -> Counter[tuple[str, str]]:
        torch.manual_seed(0)
        with counted_time(), installed(build_manager()), streams_from(WIDTH * WIDTH):
            model = Model()
            handle = offload.apply(model, "groups", min_numel=1, weights="host", **options)
            optimizer = adam(model)
            for _ in range(6):
                train(model, optimizer)
            found = calls_of(model, optimizer)
            handle.remove()
            assert isinstance(offload.marks.default_manager().engine.copier.admission, CapsAdmission)
        return found

    counted()  # what is done once in a process
    without = counted()
    for given in (None, False, ConductorConfig(enabled=False)):
        off = counted(conductor=given)
        assert off == without, given
        assert not any("/offload/conductor/" in file for file, _ in off), given
    assert any("/offload/conductor/" in file for file, _ in counted(conductor=True))


# -- the argument --------------------------------------------------------------------------------------------
@pytest.mark.req("S1-51")
def test_a_json_file_of_the_source_system_with_its_telemetry(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    fields = {"vram_hard_cap_mb": 1000, "vram_soft_cap_mb": 900, "telemetry_file": str(lines)}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"memory": {"stagehand": {"conductor_config": fields}}}))
    model = Model()
    with streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, "groups", min_numel=1, weights="host", conductor=str(path))
    optimizer = adam(model)
    for _ in range(3):
        train(model, optimizer)
    handle.remove()
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["step_id"] for line in found] == [0, 1, 2]
    assert set(found[-1]["runtime_snapshots"]) == {"stagehand", "activation_stagehand"}
    assert all(line["phase_durations"]["backward"] > 0 for line in found)


def test_handles_share_one_conductor_which_ends_with_the_last(manager: PipelineOffloadManager) -> None:
    models = [Model(), Model()]
    handles = [offload.apply(model, "groups", min_numel=1, conductor=True) for model in models]
    first = handles[0].conductor
    assert first is handles[1].conductor is manager.engine.copier.admission
    handles[0].remove()
    handles[0].remove()
    assert manager.engine.copier.admission is first
    handles[1].remove()
    assert isinstance(manager.engine.copier.admission, CapsAdmission)
    again = offload.apply(models[0], "groups", min_numel=1, conductor=True)
    assert again.conductor is not first
    again.remove()


def test_a_users_own_conductor_is_shared_and_outlives_handles(manager: PipelineOffloadManager) -> None:
    own = Conductor(engine=manager.engine, telemetry_interval=0, h2d_slots=3)
    model = Model()
    with pytest.raises(ValueError, match=r"one arbitrates for all; give the same, give True for the one"):
        offload.apply(model, "groups", conductor=ConductorConfig(h2d_slots=4))
    handle = offload.apply(model, "groups", min_numel=1, conductor=True)
    assert handle.conductor is own
    handle.remove()
    assert manager.engine.copier.admission is own
    own.shutdown()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": False, "conductor": True}, "nothing of Model moves, so there is nothing to arbitrate"),
        ({"conductor": 3}, "conductor is 3, must be True, a ConductorConfig, a JSON file"),
        ({"conductor": {"memory": {}}}, r"no memory\.stagehand; the fields of the conductor are expected"),
        (
            {"conductor": ConductorConfig(telemetry_file="/nowhere/at/all")},
            "telemetry_file is '/nowhere/at/all'",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_has_changed(
    options: dict[str, Any], message: str, manager: PipelineOffloadManager
) -> None:
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        offload.apply(model, **options)
    assert isinstance(manager.engine.copier.admission, CapsAdmission)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    offload.apply(model, "groups").remove()


def test_weights_that_cannot_stream_leave_no_conductor_behind(manager: PipelineOffloadManager) -> None:
    with streams_from(WIDTH * WIDTH), pytest.raises(ValueError, match="one block computes while the next"):
        offload.apply(Model(), weights="1B", conductor=True)
    assert isinstance(manager.engine.copier.admission, CapsAdmission)
    assert offload.marks.default_manager().engine.on_phase is None


@pytest.mark.parametrize("how", ["first use", "configure"])
def test_a_conductor_goes_where_the_process_has_its_next_engine(how: str, monkeypatch: Any) -> None:
    """It would arbitrate an engine that nobody copies with, and the one that is used would have none."""
    monkeypatch.setattr("offload.engine._defaults", {})
    before = offload.configure(device="sim").engine
    model = Model()
    handle = offload.apply(model, "groups", min_numel=1, conductor=True)
    conductor = handle.conductor
    optimizer = adam(model)
    train(model, optimizer)
    marks.close_manager()
    if how == "configure":
        offload.configure(device="sim")
    grants = conductor.counts.grants
    train(model, optimizer)
    engine = offload.marks.default_manager().engine
    assert before.closed
    assert engine is not before
    assert engine.copier.admission is conductor
    assert conductor.counts.grants > grants
    assert conductor.transfers.in_flight(Direction.D2H) <= 1
    assert isinstance(before.copier.admission, CapsAdmission)
    assert before.on_phase is None
    handle.remove()
    assert isinstance(engine.copier.admission, CapsAdmission)
    assert engine.on_phase is None
    assert engine.limits.held_by("max_spilling_bytes") != "conductor"
    marks.close_manager()


def test_without_a_config_the_caps_are_those_of_the_device(monkeypatch: Any) -> None:
    monkeypatch.setattr("offload.conductor.arbiter.device_bytes", lambda device: 80 << 30)
    with streamed() as pair:
        own = Conductor(engine=pair.stream._engine, h2d_slots=3)
        assert own.config == ConductorConfig.of_device(80 << 30, h2d_slots=3)
        assert own.budget.config.hard_bytes == 80 << 30
        assert own.budget.config.soft_bytes == round((80 << 30) * 22000 / 23500)
        assert own.config.telemetry_interval == 0
        own.shutdown()
        less = Conductor(engine=pair.stream._engine, vram_hard_cap_mb=1000)
        assert less.config.vram_soft_cap_mb < less.config.vram_hard_cap_mb == 1000
        less.shutdown()
        with pytest.raises(ValueError, match="must be a number of MiB"):
            Conductor(engine=pair.stream._engine, vram_hard_cap_mb="1GB")
