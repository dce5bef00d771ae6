"""What a new user tried first, and was refused, told about something else, or could not undo."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.fx
import torch.utils.checkpoint
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from offload.errors import OffloadError
from offload.report import Report
from offload.telemetry.figures import Figures
from tests.unit.modules.training import build, train

pytestmark = pytest.mark.usefixtures("manager")


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_handle_that_nobody_has_is_removed_by_its_model() -> None:
    """`offload.apply(model)` without a name for the handle could not be undone."""
    model, other = build(), build()
    offload.apply(model, min_numel=1)
    offload.apply(model, "watermark", high="8GB")
    offload.apply(other, min_numel=1)
    assert hooks_of(model)
    assert hooks_of(other)
    offload.remove(nn.Sequential(model))  # or what holds it
    assert not hooks_of(model)
    assert hooks_of(other)
    offload.remove(model)  # nothing is left to do
    offload.apply(model, "hidden_states", min_numel=1)
    train(model, steps=2)


def test_remove_of_a_part_names_the_model_that_has_the_hooks() -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    part = model.get_submodule(handle.blocks[0])
    with pytest.raises(ValueError, match=r"remove\(\) of a \w+ inside what <offload.apply\("):
        offload.remove(part)
    assert hooks_of(model)
    with pytest.raises(ValueError, match="remove got a Applied, must be"):
        offload.remove(handle)  # type: ignore[arg-type]


def limit_of(manager: PipelineOffloadManager) -> int | None:
    return manager.engine.limits.device_limit_bytes


def test_a_device_limit_goes_with_its_handle(manager: PipelineOffloadManager) -> None:
    """It held for the next handle, also for one in a `with`, and neither showed it."""
    model, other = build(), build()
    with offload.apply(model, device_limit="64kB", min_numel=1) as handle:
        assert "; device_limit 64.00 kB" in repr(handle)
        train(model, steps=3)
    with offload.activations(model, min_numel=1) as handle:
        assert limit_of(manager) is None
        assert "device_limit" not in repr(handle)
        train(model, steps=3)
        assert handle.report().device_limit_bytes is None
    first = offload.apply(model, device_limit="64kB", min_numel=1)
    second = offload.apply(other, device_limit="32kB", min_numel=1)
    assert limit_of(manager) == 32_000
    second.remove()
    second = offload.apply(other, min_numel=1)
    assert limit_of(manager) == 64_000, "of the handle that there is"
    first.remove()
    second.remove()
    offload.apply(other, min_numel=1)
    assert limit_of(manager) is None


def test_a_limit_of_the_config_holds_again_once_the_handle_is_gone() -> None:
    manager = offload.configure(offload.OffloadConfig(device_limit_bytes=1 << 20), device="sim")
    model = build()
    offload.apply(model, device_limit="2MiB", min_numel=1).remove()
    offload.apply(model, host_limit="1GB", min_numel=1).remove()
    assert limit_of(manager) == 1 << 20
    offload.apply(model, device_limit="2MiB", min_numel=1).remove()
    offload.configure(offload.OffloadConfig(device_limit_bytes="4MiB"), device="sim")
    offload.apply(model, min_numel=1)
    assert limit_of(offload.marks.default_manager()) == 4 << 20


def test_a_limit_of_a_removed_handle_holds_while_its_backward_is_to_come(
    manager: PipelineOffloadManager,
) -> None:
    """No new manager: it would not find what is saved."""
    model, other = build(), build()
    with offload.activations(model, device_limit="8B", min_numel=1):
        loss = model(torch.randn(4, 16)).sum()
    with offload.activations(other, min_numel=1):
        assert limit_of(manager) == 8
        with pytest.raises(ValueError, match="wait for their backward"):
            offload.apply(build(), device_limit="16B")
    loss.backward()
    offload.apply(build(), min_numel=1)
    assert limit_of(manager) is None


@pytest.mark.parametrize(
    ("asked", "meant"), [("hiddenstates", "hidden_states"), ("Auto", "auto"), ("disc", "disk")]
)
def test_a_mode_with_a_slip_names_the_nearest(asked: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"; did you mean '{meant}'\\?"):
        offload.apply(build(), asked)  # type: ignore[arg-type]


def test_off_is_the_word_of_apply_the_config_compare_and_plan() -> None:
    """It was False, nothing and none."""
    assert offload.apply(build(), "off").mode is False
    assert offload.OffloadConfig(activation_offloading="off").activation_offloading is False
    table = offload.compare(build(), lambda: None, modes=["off"], budget_s=0.01)
    assert table.best == {"mode": False}
    assert "/ off" in str(table)


def test_a_small_model_is_a_first_try_of_weights_and_gradients() -> None:
    """Parameters below 1 Mi elements stayed whatever `min_numel` was, so no small model could be tried."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(3)))
    with pytest.raises(ValueError, match="lower min_numel"):
        offload.apply(model, weights="host")
    with pytest.raises(ValueError, match="lower min_numel"):
        offload.apply(model, gradients="host")
    with offload.apply(model, weights="host", min_numel=1000) as handle:
        assert handle.weights.streamed_bytes == 3 * 32 * 32 * 4  # no bias
        model(torch.randn(2, 32)).sum().backward()
    with offload.apply(model, gradients="host", min_numel=0) as handle:
        model(torch.randn(2, 32)).sum().backward()
        assert handle.gradients.count == 6


class Alternating(nn.Module):
    """Its recompute saves another number of tensors than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(16, 16), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        y = torch.tanh(self.linear(x))
        return torch.tanh(y) if self.calls[0] % 2 else y


@pytest.mark.parametrize("mode", ["hidden_states", "checkpoint", "selective"])
def test_a_recompute_that_saves_other_tensors_names_its_block(mode: Any) -> None:
    """CheckpointError named none."""
    model = nn.Sequential(*(Alternating() for _ in range(2)))
    with offload.activations(model, mode, min_numel=1):
        loss = model(torch.randn(4, 16)).sum()
        with pytest.raises(torch.utils.checkpoint.CheckpointError) as raised:
            loss.backward()
    assert "raised while 1 was recomputed for its backward" in raised.value.__notes__[0]


@dataclass
class State:
    hidden: Tensor


class OfStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, state: State) -> State:
        return State(torch.tanh(self.linear(state.hidden)))


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OfStates() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        state = State(x)
        for layer in self.layers:
            state = layer(state)
        return state.hidden


def test_inputs_inside_a_dataclass_are_named_and_not_min_numel(caplog: pytest.LogCaptureFixture) -> None:
    """ "hidden_states" moved nothing, and blamed a threshold that every input passed."""
    model = States()
    optimizer = torch.optim.SGD(model.parameters())
    offload.apply(model, "hidden_states", min_numel=16)
    for _ in range(2):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
    (said,) = [text for text in caplog.messages if "moved nothing" in text]
    assert "in an object that is not looked into (a dataclass). Give tensors as arguments" in said
    assert "min_numel" not in said


def test_a_model_whose_blocks_are_recomputed_is_traced_by_fx() -> None:
    """A proxy answers to any name, so it was taken for a cache of keys and values."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)))
    x = torch.randn(2, 16)
    with offload.apply(model, "hidden_states", min_numel=1):
        assert torch.equal(torch.fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn])
def test_int8_says_which_dtypes_it_takes(dtype: torch.dtype) -> None:
    """Frozen weights were to be frozen."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(2))).requires_grad_(False)
    with pytest.raises(
        ValueError, match=f"no frozen float32, .* 4 are frozen and which are of {dtype}; .* cast"
    ):
        offload.apply(model.to(dtype), weights="host", quantize="int8", min_numel=1)


def test_weights_that_do_not_stream_say_why() -> None:
    """Those of inference mode were "not dense in memory"; those that accelerate has offloaded were taken, and
    the forward asked for load_weights(), after which nothing trained."""
    with torch.inference_mode():
        model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(2)))
    with pytest.raises(ValueError, match=r"4 are made under torch.inference_mode\(\)"):
        offload.apply(model, weights="host", min_numel=1)
    given = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(2)))
    vars(given[1][0])["_hf_hook"] = SimpleNamespace(hooks=[SimpleNamespace(offload=True)])
    with pytest.raises(ValueError, match=r"accelerate has offloaded '1.0', .*remove_hook_from_module"):
        offload.apply(given, weights="host", min_numel=1)


WHOLE = {"weights": "host", "optimizer": "its"}
TRIES: dict[str, tuple[dict[str, Any], str]] = {
    "off": ({"mode": "off"}, "mode=False, as it was asked"),
    "checkpoint": (
        {"mode": "checkpoint"},
        "6 forwards of blocks recomputed in 3 steps, no saved tensor moved",
    ),
    "hidden_states": ({"mode": "hidden_states"}, "saved tensors at most "),
    "selective": ({"mode": "selective"}, "saved tensors at most "),
    "groups": ({"mode": "groups"}, "saved tensors at most "),
    "auto": ({"mode": "auto"}, "saved tensors at most "),
    "True": ({"mode": True}, "saved tensors at most "),
    "legacy": ({"mode": "legacy"}, "saved tensors at most "),
    "disk": ({"mode": "disk"}, "saved tensors at most "),
    "watermark": ({"mode": "watermark", "high": "1kB"}, "saved tensors at most "),
    "off, gradients": ({"gradients": "host"}, "gradients: 4.10 kB on the device, 8.19 kB on the host"),
    "off, optimizer": ({"optimizer": "its"}, "optimizer: 16.90 kB on the device, 16.90 kB on the host"),
    "off, weights": (WHOLE, "weights: 8.19 kB on the device, 8.19 kB on the host; gradients: "),
    "checkpoint, weights": (WHOLE | {"mode": "checkpoint"}, "no saved tensor moved; weights: 8.19 kB on "),
    "auto, weights": (WHOLE | {"mode": "auto"}, "; weights: 8.19 kB on the device"),
}


@pytest.mark.parametrize("what", TRIES)
def test_whatever_is_tried_is_explained_and_its_report_says_what_to_do_next(
    what: str, tmp_path: Path
) -> None:
    """`explain()` raised in all modes but "auto", so README's snippet with another `mode=` ended in an error;
    the verdict was empty before a step, and of weights, gradients and an optimizer; with "checkpoint" or
    "hidden_states" beside them it was of saved tensors alone."""
    options, did = TRIES[what]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    if "optimizer" in options:
        options = options | {"optimizer": optimizer}
    with offload.apply(model, min_numel=33, **options) as handle:
        first = handle.report().verdict
        if what != "off":
            assert first.endswith(
                "(forward, backward, optimizer.step(), or step_end() after marks), and ask then"
            )
        assert first in str(handle.report())
        handle.explain()
        for _ in range(3):
            model(torch.randn(64, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        report = handle.report()
        assert did in report.verdict
        assert ("\nnext: " in report.verdict) == (what not in ("off", "checkpoint"))
        explained = str(handle.explain())
        assert explained.startswith(f"{what.partition(',')[0]}: ")
        for line in report.verdict.splitlines() if "auto" not in what else ():
            assert line in explained
        assert ("weights: 2 blocks of 8.19 kB wait on the host" in explained) == ("weights" in what)
        is_known = "saved tensors at most" in report.verdict and what != "watermark"
        assert ("if nothing had left" in str(report)) == is_known
        report.save(tmp_path / "page.html")
        cards_of_nothing = (tmp_path / "page.html").read_text().count('">0 B</data>')
        assert cards_of_nothing == (what == "checkpoint")  # pinned memory


def test_the_most_memory_of_all_kinds_is_what_a_verdict_begins_with() -> None:
    found = Report(since="apply", last=Figures(steps=1), device_peak_bytes=42_600_000_000)
    assert found.verdict.startswith("offload: device memory at most 42.60 GB active; saved tensors at most ")


def test_auto_without_a_total_is_not_told_to_raise_it() -> None:
    """It had planned for less than one block saves, and said "raise device_total", which nobody had given."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
    with offload.apply(model, "auto", min_numel=1) as handle:
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(8):
            model(torch.randn(64, 32)).square().mean().backward()
            optimizer.step()
        last, explained = handle.report().last, handle.explain()
        assert " alike)" in str(handle.report()), "equal groups are one row"
        assert explained.plan is not None
        assert last.over_limit_bytes == 0
        assert explained.plan.problem.limit_bytes >= 2 * 64 * 32 * 4
    last = replace(last, over_limit_bytes=5)
    free = Report(since="apply", total=last, last=last, device_limit_by="auto", explained=explained)
    assert free.verdict.endswith("beyond what mode='auto' planned for (0 B); give device_total=, for a bound")


def test_a_ring_for_the_optimizers_state_is_no_larger_than_what_passes_through_it() -> None:
    """201 MB on the device for 33.6 MB of state: three slots for one bucket."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with offload.apply(model, optimizer=optimizer) as handle:
        for _ in range(2):
            model(torch.randn(4, 64)).sum().backward()
            optimizer.step()
        state = handle.report().kinds["optimizer"]
        assert state.device_bytes == state.host_bytes == 2 * (64 * 64 + 64) * 4


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return x + y


def test_the_picture_has_the_peak_that_the_headline_has() -> None:
    """16.84 and 29.49 MB on one page: bytes were looked at where groups begin and end and copies start."""
    offload.configure(offload.OffloadConfig(), device="sim")
    parts = [(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
    model = nn.Sequential(*(Residual(*part) for part in parts))
    with offload.apply(model, "groups", device_limit="200kB", min_numel=1) as handle:
        for _ in range(4):
            with offload.tracing() as trace:
                for _ in range(2):
                    model(torch.randn(64, 32)).square().mean().backward()
                offload.step_end()
            last = handle.report().last
            assert max(sample.saved_bytes for sample in trace.timeline.memory) == last.peak_bytes


def test_a_mode_that_chooses_nothing_has_no_plan_to_draw(tmp_path: Path) -> None:
    with offload.apply(build(), "groups", min_numel=1) as handle:
        explained = handle.explain()
    with pytest.raises(ValueError, match=r"no plan to draw: what .*; that is mode groups, and 'auto' "):
        offload.plot(tmp_path / "plan.png", explained)


def test_a_loop_that_sets_gradients_is_told_that_they_stay(caplog: pytest.LogCaptureFixture) -> None:
    """It was not: the loop had cleared them before anybody looked."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters())
    with offload.apply(model, gradients="host", min_numel=1):
        for _ in range(2):
            found = torch.autograd.grad(model(torch.randn(4, 64)).sum(), [*model.parameters()])
            for parameter, gradient in zip(model.parameters(), found, strict=True):
                parameter.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
    (said,) = caplog.messages
    assert said.startswith("2 gradients (the first: weight) were set as p.grad, not added to by a backward")


@pytest.mark.usefixtures("one_rank")
def test_replicas_of_one_rank_are_refused_as_those_of_several() -> None:
    """With overlap="backward" the second step raised, a step ahead: DistributedDataParallel writes gradients
    after their hooks whatever the number of ranks."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    with pytest.raises(ValueError, match="DistributedDataParallel, which reduces them later; "):
        offload.HybridDeviceOptimizer(model.parameters(), 1.0, lr=1e-3, overlap="backward", model=model)


class OtherProduct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls = nn.Parameter(torch.randn(16, 16)), [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return torch.tanh(x @ self.weight.repeat(1, 2 - self.calls[0] % 2))[:, :16]


def test_selective_says_how_a_user_without_keep_ops_leaves_the_block_out() -> None:
    """It said "take the operator off keep_ops" alone."""
    model = nn.Sequential(OtherProduct(), OtherProduct())
    with offload.activations(model, "selective", min_numel=1):
        loss = model(torch.randn(4, 16)).sum()
        with pytest.raises(OffloadError, match="off keep_ops, or the block out with no_recompute="):
            loss.backward()
