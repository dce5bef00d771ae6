"""Mode "auto" with an optimizer: weights, gradients, state and activations share one total, and change places
between steps without a bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import PipelineOffloadManager
from offload.optim import HybridDeviceOptimizer
from offload.policy.splits import Loads, Split, device_bytes, first_split, shared, step_s
from tests.unit.modules.allocated import AllocatedRun, allocated
from tests.unit.modules.training import ROWS, WIDTH

__all__ = ["allocated"]

LOADS = Loads(400, 100, 400, 400, 100, 800, 60, 10)
STEPS = 14


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.optim.convert.BUCKET_BYTES", 1024)


# -- by arithmetic -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("total", "first"),
    [
        (3220, Split(400, True, 800)),  # everything stays: 1,610 bytes, and half of the total is left
        (3219, Split(400, True, 0)),
        (1620, Split(400, True, 0)),
        (1619, Split(400, False, 0)),
        (1020, Split(400, False, 0)),
        (1018, Split(399, False, 0)),
        (200, Split(100, False, 0)),
    ],
)
def test_kinds_leave_one_after_the_other_until_half_of_the_total_is_free(total: int, first: Split) -> None:
    loads = LOADS._replace(ring=0, resident=10)
    assert first_split(loads, total) == first


def test_a_ring_is_on_the_device_unless_all_state_is_as_torch_has_it() -> None:
    everything = Split(400, True, 800)
    assert device_bytes(LOADS, everything) == 10 + 400 + 400 + 800 + 60, "weights stream, and are stepped"
    alone = LOADS._replace(weights=0, least_weights=0)
    assert device_bytes(alone, Split(0, True, 800)) == 10 + 400 + 800
    assert device_bytes(alone, Split(0, True, 700)) == 10 + 400 + 700 + 60


def test_the_fuller_direction_of_the_link_is_what_a_step_of_the_optimizer_takes() -> None:
    assert step_s(LOADS, Split(400, True, 800), (10.0, 20.0)) == 0.0
    assert step_s(LOADS, Split(400, True, 400), (10.0, 20.0)) == 40.0
    assert step_s(LOADS, Split(400, True, 400), (40.0, 20.0)) == 20.0
    assert step_s(LOADS, Split(400, False, 800), (10.0, 20.0)) == 40.0, "gradients come in alone"
    assert step_s(LOADS, Split(200, True, 800), (10.0, 20.0)) == 20.0, "weights that are away, both ways"


def test_a_byte_goes_to_the_kind_that_spares_most_by_it() -> None:
    loads, now = Loads(state=800, resident=10), Split(0, True, 0)

    def found(per_byte: float, room: int = 400) -> list[tuple[float, Split]]:
        def recompute_s(more: int) -> float | None:
            return None if more > room else per_byte * (more + 1000)

        def weights_at(limits: Sequence[int], longer: float) -> list[tuple[float, int]]:
            return [(0.0, limit) for limit in limits]

        return shared(loads, now, (10.0, 10.0), weights_at, recompute_s, 100.0)

    assert found(0.05)[0] == (0.05 * 1400 + 40.0, Split(0, True, 400)), "0.1 s a byte of state"
    assert found(0.2)[0] == (0.2 * 1000 + 80.0, now)
    assert {split.state for _, split in found(0.05)} == {0, 100, 200, 300, 400}, "and no other one fits"


def test_what_no_recompute_hides_any_more_is_waited_for() -> None:
    """Plain blocks compute 50 s, and all recomputes take as long. Beside both, weights arrive in time."""
    loads, now = Loads(weights=400, least_weights=40, resident=10), Split(40, True, 0)

    def weights_at(limits: Sequence[int], longer: float) -> list[tuple[float, int]]:
        return [(max(0.0, (400 - limit) / 4 - 50.0 * longer), limit) for limit in limits]

    def recompute_s(more: int) -> float:
        return 50.0 * more / 360

    found = shared(loads, now, (1e9, 1e9), weights_at, recompute_s, 50.0)
    assert found[0] == (pytest.approx(6.25 * (1 - 0.375) + 50.0 * 0.375), Split(175, True, 0))
    seconds = {split.weights: of for of, split in found}
    assert seconds[40] == 40.0, "all blocks plain, and weights are waited for"
    assert seconds[400] == 50.0


# -- in steps ------------------------------------------------------------------------------------------------
def trained(
    run: AllocatedRun, loop: Callable[[AllocatedRun, int], object], steps: int = STEPS
) -> list[Tensor]:
    for number in range(steps):
        loop(run, number)
    return run.weights()


def one(run: AllocatedRun, number: int) -> None:
    run.steps(1, seed=number)


def microbatches(run: AllocatedRun, number: int) -> None:
    run.steps(1, rows=(ROWS, ROWS), seed=number)


def evaluates(run: AllocatedRun, number: int) -> None:
    with torch.no_grad():
        run.model(torch.ones(ROWS, WIDTH))
    run.steps(1, seed=number)


def clips_and_reads_state(run: AllocatedRun, number: int) -> None:
    torch.manual_seed(number)
    run.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)
    run.optimizer.step()
    if number % 5 == 2:
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.optimizer.param_groups[0]["lr"] *= 0.9
    run.optimizer.zero_grad()


def breaks_off(run: AllocatedRun, number: int) -> None:
    """A step whose forward, or whose backward, raises; then a whole one."""
    if number % 4 == 3:
        handle = run.model.layers[3].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.model(torch.ones(ROWS, WIDTH))
        handle.remove()
    if number % 4 == 1:
        loss = run.model(torch.ones(ROWS, WIDTH)).sum()
        loss.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        run.optimizer.zero_grad()
    run.steps(1, seed=number)


def accumulates(run: AllocatedRun, number: int) -> None:
    torch.manual_seed(number)
    run.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
    if number % 3 == 2:
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)


LOOPS = (one, microbatches, evaluates, clips_and_reads_state, breaks_off, accumulates)


def plain_run(allocated: Callable[..., AllocatedRun], blocks: int) -> AllocatedRun:
    run = allocated(blocks=blocks)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1, fused=True)
    return run


@pytest.mark.parametrize(("loop", "total"), [*zip(LOOPS, cycle([100_000, 75_000]), strict=False)])
def test_weights_have_the_bits_of_a_run_without_whatever_moves_in_between(
    allocated: Callable[..., AllocatedRun], total: int, loop: Any
) -> None:
    run = allocated(blocks=8, device_total=f"{total}B", gives_optimizer=True)
    assert run.handle is not None
    found, places = trained(run, loop), run.optimizer.state_dict()["state"][0]["exp_avg"]
    run.handle.remove()
    assert type(run.optimizer) is torch.optim.AdamW
    assert torch.equal(run.optimizer.state_dict()["state"][0]["exp_avg"], places)
    other = plain_run(allocated, 8)
    assert all(map(torch.equal, found, trained(other, loop)))


@pytest.mark.parametrize("total", [45_000, 75_000, 100_000, 200_000])
def test_the_total_holds_from_the_first_step_on_and_a_faster_split_is_followed(
    allocated: Callable[..., AllocatedRun], total: int
) -> None:
    run = allocated(blocks=8, device_total=f"{total}B", gives_optimizer=True)
    assert run.handle is not None
    assert run.handle._auto is not None
    kinds = run.handle._auto.kinds
    assert kinds is not None
    first = kinds.now
    trained(run, one, STEPS + 6)
    assert max(run.peaks) <= total
    assert not kinds.is_open
    if total != 75_000:  # where it is by how fast the CPU steps
        assert (kinds.now != first) is (total > 45_000)
    if total == 200_000:  # all of it fits in the end, and nothing is ours any more
        assert type(run.optimizer) is torch.optim.AdamW
        assert run.ladder.keeps_all
        assert "optimizer's state  " in str(run.handle.explain())
    else:
        assert isinstance(run.optimizer, HybridDeviceOptimizer)


def test_a_model_of_which_half_the_total_is_enough_is_left_alone(
    allocated: Callable[..., AllocatedRun],
) -> None:
    run = allocated(blocks=4, device_total="10MB", gives_optimizer=True)
    assert run.handle is not None
    assert run.handle._auto is not None
    assert run.handle._auto.kinds is None
    assert type(run.optimizer) is torch.optim.AdamW
    assert run.handle.weights is run.handle.gradients is None


def test_a_total_that_nothing_fits_is_refused_before_a_step(allocated: Callable[..., AllocatedRun]) -> None:
    with pytest.raises(
        ValueError, match=r"a window of weights 8\.83 kB.*give 31\.\d+ kB or more or quantize"
    ):
        allocated(blocks=8, device_total="20000B", gives_optimizer=True)


def test_state_stays_where_its_kernel_would_be_another_one(
    allocated: Callable[..., AllocatedRun], caplog: pytest.LogCaptureFixture
) -> None:
    """torch's for-each kernel has other bits than the fused one, with which state streams."""
    run = plain_run(allocated, 8)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1)
    handle = offload.apply(run.model, "auto", min_numel=1, device_total="200000B", optimizer=optimizer)
    assert type(optimizer) is torch.optim.AdamW
    assert handle.gradients is not None, "they leave instead"
    assert "the state of AdamW stays on the device, beside device_total=200.00 kB" in caplog.text
    handle.remove()
    with pytest.raises(ValueError, match=r"resident weights, gradients and state .* or fused=True for the"):
        offload.apply(run.model, "auto", min_numel=1, device_total="50000B", optimizer=optimizer)
    of_all = torch.optim.LBFGS(run.model.parameters())
    with offload.apply(run.model, "auto", min_numel=1, device_total="50000B", optimizer=of_all):
        assert type(of_all) is torch.optim.LBFGS, "weights and gradients leave"


def test_frozen_weights_are_int8_where_they_have_to_leave_and_that_is_allowed(
    allocated: Callable[..., AllocatedRun],
) -> None:
    run = plain_run(allocated, 8)
    for block in run.model.layers:
        block.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [own for own in run.model.parameters() if own.requires_grad], lr=0.1, fused=True
    )
    arguments: Any = {"min_numel": 1, "optimizer": optimizer, "quantize": "auto"}
    with offload.apply(run.model, "auto", device_total="2MB", **arguments) as handle:
        assert handle.weights is None, "all of them fit"
    with offload.apply(run.model, "auto", device_total="60000B", **arguments) as handle:
        assert handle.weights is not None
        assert handle.weights.int8_bytes > 0
        assert type(optimizer) is torch.optim.AdamW, "its state is less than what a ring would take"
    with pytest.raises(ValueError, match=r'quantize="auto" is of weights that mode="auto" places'):
        offload.apply(run.model, "auto", weights="host", quantize="auto")


def test_what_is_placed_by_hand_stays_so(allocated: Callable[..., AllocatedRun]) -> None:
    run = allocated(
        blocks=8, device_total="100000B", gives_optimizer=True, weights="10000B", gradients="device"
    )
    assert run.handle is not None
    trained(run, one)
    assert run.handle._auto is not None
    kinds = run.handle._auto.kinds
    assert kinds is not None
    assert not kinds.is_open
    assert (kinds.loads.weights, kinds.loads.gradients) == (0, 0)
    assert run.handle.weights is not None
    assert run.handle.weights.limit_bytes == 10_000
    assert run.handle.gradients is None


def test_a_split_for_which_there_is_no_host_memory_is_given_up(
    allocated: Callable[..., AllocatedRun],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = allocated(blocks=8, device_total="100000B", gives_optimizer=True)
    assert run.handle is not None
    assert run.handle._auto is not None
    kinds = run.handle._auto.kinds
    assert kinds is not None
    first, keep = kinds.now, HybridDeviceOptimizer.keep_on_device

    def kept(self: HybridDeviceOptimizer, nbytes: int) -> int:
        if nbytes:
            raise torch.OutOfMemoryError("full")
        return keep(self, nbytes)

    monkeypatch.setattr(HybridDeviceOptimizer, "keep_on_device", kept)
    found = trained(run, one)
    assert "do not fit, and what was there before stays: full" in caplog.text
    assert not kinds.is_open
    assert kinds.now._replace(weights=0) == first._replace(weights=0)
    assert kinds.now.weights <= first.weights  # what their plan leaves is no longer theirs
    run.handle.remove()
    assert all(map(torch.equal, found, trained(plain_run(allocated, 8), one)))


@pytest.mark.parametrize(("total", "rate"), [(45_000, 4e6), (100_000, 2e7)])
def test_what_is_tried_keeps_the_total(
    allocated: Callable[..., AllocatedRun], total: int, rate: float
) -> None:
    """A rival whose recomputes alone have no room is not tried; and weights that arrive in time take less
    than their share, which another split gives away: a later plan of theirs may not take it."""
    run = allocated(blocks=16, rate=rate, device_total=f"{total}B", gives_optimizer=True)
    trained(run, one, 10)
    assert max(run.peaks) <= 1.01 * total


@pytest.mark.parametrize(
    ("blocks", "total", "slow_s"), [(20, 41_000, 0.0), (28, 54_000, 2e-2), (28, 70_000, 2e-2)]
)
def test_the_total_holds_in_the_steps_around_a_move_of_frozen_weights(
    allocated: Callable[..., AllocatedRun], blocks: int, total: int, slow_s: float
) -> None:
    """What a rule takes less than calculated is no room for weights: a split would fill it beside recomputes
    alone. Nor is what weights leave of their share, as here by a plan of steps in which blocks were slower: a
    later plan takes it."""
    run = allocated(blocks=blocks, rate=5e5)
    for block in run.model.layers:
        block.requires_grad_(False)
        block.register_forward_pre_hook(lambda *_: run.device.compute_for(slow_s * (len(run.peaks) < 4)))
    trained_ones = [own for own in run.model.parameters() if own.requires_grad]
    run.optimizer = torch.optim.AdamW(trained_ones, lr=0.1, fused=True)
    arguments: Any = {"min_numel": 1, "optimizer": run.optimizer, "device_total": f"{total}B"}
    with offload.apply(run.model, "auto", **arguments) as run.handle:
        assert run.handle._auto is not None
        kinds = run.handle._auto.kinds
        assert kinds is not None
        first = kinds.now
        trained(run, one, 10)
        assert max(run.peaks) <= total
        assert kinds.now != first


def test_what_the_plan_of_weights_leaves_of_their_share_blocks_have(
    allocated: Callable[..., AllocatedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made anew under the split that is followed, and may take less: that was left unused for good."""
    run = allocated(blocks=20, rate=1.7e6)
    for block in run.model.layers:
        block.requires_grad_(False)
    trained_ones = [own for own in run.model.parameters() if own.requires_grad]
    run.optimizer = torch.optim.AdamW(trained_ones, lr=0.1, fused=True)
    arguments: Any = {"min_numel": 1, "optimizer": run.optimizer, "device_total": "140000B"}
    with offload.apply(run.model, "auto", **arguments) as run.handle:
        assert run.handle._auto is not None
        kinds = run.handle._auto.kinds
        assert kinds is not None
        trained(run, one, 8)
        share, before, weights = kinds.now.weights, run.ladder.rule.num_plain, kinds._streams.weights
        assert weights is not None
        less = share - 2 * kinds.first_bytes
        monkeypatch.setattr(weights, "planned", lambda limits, longer=1.0: [(0.0, less) for _ in limits])
        trained(run, one, 12)
        assert (kinds.now.weights, weights.limit_bytes) == (less, less)
        assert run.ladder.rule.num_plain > before
        assert max(run.peaks) <= 140_000
        assert not kinds.is_open


def test_without_a_total_it_is_what_the_device_has_and_least_is_another_aim(
    allocated: Callable[..., AllocatedRun],
) -> None:
    run = plain_run(allocated, 4)
    device = PipelineOffloadManager.OFFLOAD_MGR.engine.device  # type: ignore[union-attr]
    device.capacity_bytes = 1_000_000
    with offload.apply(run.model, "auto", min_numel=1) as handle:
        assert handle._auto is not None
        assert handle._auto.total_bytes == 950_000
    with offload.apply(
        run.model, "auto", min_numel=1, device_total="least", optimizer=run.optimizer
    ) as handle:
        assert handle._auto is not None
        assert handle._auto.total_bytes is None
        assert isinstance(run.optimizer, HybridDeviceOptimizer), "all of its state is on the host"
    with pytest.raises(ValueError, match="device_total is 'most', must be a whole number of bytes"):
        offload.apply(run.model, "auto", device_total="most")


def test_a_checkpoint_of_one_split_resumes_under_another_with_the_same_bits(
    allocated: Callable[..., AllocatedRun],
) -> None:
    run = allocated(blocks=8, device_total="100000B", gives_optimizer=True)
    trained(run, one, 9)  # some state and all gradients are on the device by now
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    found = {}
    for total in ("60000B", "200000B", None):
        given: dict[str, Any] = {} if total is None else {"device_total": total, "gives_optimizer": True}
        run = allocated(blocks=8, **given) if total else plain_run(allocated, 8)
        run.model.load_state_dict(saved[0])
        run.optimizer.load_state_dict(saved[1])
        found[total] = trained(run, one, 9)
    assert all(map(torch.equal, found["60000B"], found[None]))
    assert all(map(torch.equal, found["200000B"], found[None]))


def test_an_interrupt_in_a_move_leaves_each_kind_in_one_place(
    allocated: Callable[..., AllocatedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = allocated(blocks=8, device_total="100000B", gives_optimizer=True)
    keep, interrupts = HybridDeviceOptimizer.keep_on_device, iter([1])

    def kept(self: HybridDeviceOptimizer, nbytes: int) -> int:
        if next(interrupts, 0):
            raise KeyboardInterrupt
        return keep(self, nbytes)

    monkeypatch.setattr(HybridDeviceOptimizer, "keep_on_device", kept)
    interrupted = 0
    for number in range(STEPS):
        try:
            run.steps(1, seed=number)
        except KeyboardInterrupt:  # after the step, whose gradients the loop has yet to clear
            interrupted += 1
            run.optimizer.zero_grad()
    found = run.weights()
    assert interrupted == 1
    assert run.handle is not None
    run.handle.remove()
    assert all(map(torch.equal, found, trained(plain_run(allocated, 8), one)))
