"""What a step comes to have beside saved tensors, and keeps, under a plan of mode "auto": gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload.policy.rule import NO_GROWTH, Trace
from tests.unit.modules.allocated import AllocatedRun, allocated
from tests.unit.modules.test_ladder import BLOCKS, RATE, trace_of
from tests.unit.modules.training import ROWS, WIDTH

__all__ = ["allocated"]


def test_what_a_backward_makes_is_known_from_the_step_that_was_measured() -> None:
    """It is the most so far, forwards between two backwards with the first of these. A head has what was made
    before it beside its own."""
    trace, beside = trace_of("aa"), 30
    trace.peak_bytes += beside
    trace.seen, chunks = [], [(0, 0), (0, 1)]
    for chunk, rests in zip(chunks, ([500, 520, 510, 560], [500, 590, 590, 580]), strict=True):
        for place, rest_bytes in enumerate(rests[:2]):
            trace.forward_ended(chunk, place, rest_bytes)
        trace.head_ended(700)
        for place, rest_bytes in zip((1, 0), rests[2:], strict=True):
            trace.backward_reads(chunk, place, 1_100, rest_bytes)
    growth = trace.growth(1_000)
    assert growth.by_call == {((0, 0), 1): 0, ((0, 0), 0): 70, ((0, 1), 1): 70, ((0, 1), 0): 70}
    assert growth.come == {((0, 0), 1): 0, ((0, 0), 0): 70, ((0, 1), 1): 0, ((0, 1), 0): 0}
    assert (growth.most, growth.head) == (70, 700)
    # with 30 bytes that may come at any backward, the rest is never more than it was
    growth = trace.growth(520 + beside + 50)
    assert growth.come == {((0, 0), 1): 0, ((0, 0), 0): 50, ((0, 1), 1): 0, ((0, 1), 0): 0}
    assert (growth.most, trace.growth(500).most) == (50, 0)
    trace.backward_reads((0, 0), 1, 1_100, 600)  # once more: the graph is kept, and frees nothing
    assert trace.growth(1_000) == NO_GROWTH
    assert Trace(moves=False).growth(1_000) == NO_GROWTH


def train(run: AllocatedRun, numbers: range, *, clears: str, microbatches: int = 1) -> None:
    """clears: where a loop clears gradients, "behind the step", "before the backward", or "in place"."""
    for number in numbers:
        run.device.reset_allocator_peak()
        for at in range(microbatches):
            torch.manual_seed(number)
            loss = run.model(torch.randn(ROWS, WIDTH)).square().mean()
            if clears == "before the backward" and at == 0:
                run.optimizer.zero_grad()
            loss.backward()
            del loss
        run.optimizer.step()
        if clears != "before the backward":
            run.optimizer.zero_grad(set_to_none=clears == "behind the step")
        run.peaks.append(run.device.peak)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("clears", ["behind the step", "before the backward"])
def test_before_gradients_are_made_a_plan_has_their_room(
    clears: str, microbatches: int, allocated: Callable[..., AllocatedRun]
) -> None:
    """Where a loop clears those of the step before between forward and backward, they are there through the
    forward and give no room. A plan with one limit for all of a step moved 23.4 kB of one microbatch."""
    plain = allocated(BLOCKS)
    train(plain, range(22), clears=clears, microbatches=microbatches)
    total = int((0.95 if microbatches == 1 else 0.92) * max(plain.peaks))
    run = allocated(BLOCKS, rate=100 * RATE, device_total=f"{total}B")
    train(run, range(22), clears=clears, microbatches=microbatches)
    assert max(run.peaks) <= total
    assert all(map(torch.equal, run.weights(), plain.weights()))
    assert run.ladder.follows_plan
    assert run.handle is not None
    auto, found = run.handle._auto, run.handle.explain()
    assert auto is not None
    assert found.moved_bytes is not None
    planned_bytes, explained = sum(share.moved_bytes for share in found.shares), str(found)
    assert found.moved_bytes <= planned_bytes + 2_000, "what is planned to stay does, beside gradients"
    assert auto.memory.total is not None
    growth, rest_bytes = auto.calls.growth.most, auto.memory.total.rest_bytes
    assert rest_bytes is not None
    assert (growth > 10_000) == (clears == "behind the step")
    assert ("of gradients that its backward makes" in explained) == (growth > 0)
    auto._shift(100, changes_gradients=False)  # other kinds take more
    assert (auto.memory.total.rest_bytes, auto.calls.growth.most) == (rest_bytes + 100, growth)
    auto._shift(100, changes_gradients=True)
    assert (auto.memory.total.rest_bytes, auto.calls.growth.most) == (rest_bytes + 200 + growth, 0)


def test_gradients_that_are_kept_from_some_step_on_have_their_room_from_a_steps_begin(
    allocated: Callable[..., AllocatedRun],
) -> None:
    plain = allocated(8)
    train(plain, range(14), clears="behind the step")
    train(plain, range(14, 22), clears="in place")
    total = max(plain.peaks[:14]) - 6_000
    run = allocated(8, rate=100 * RATE, device_total=f"{total}B")
    train(run, range(14), clears="behind the step")
    assert run.handle is not None
    auto = run.handle._auto
    assert auto is not None
    assert auto.calls.growth.most > 20_000
    assert run.ladder.follows_plan
    train(run, range(14, 22), clears="in place")
    assert all(map(torch.equal, run.weights(), plain.weights()))
    assert run.peaks[15] <= 1.04 * total, "1.21 where they were not counted"
    assert max(run.peaks[16:]) <= total
    assert run.ladder.follows_plan


def test_a_graph_that_is_read_twice_from_some_step_on_ends_a_plan_and_lowers_the_rule(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """What it reads is not freed for gradients. Steps of the rule passed the total again and again, below the
    peak of the plan's, which nobody had reset."""
    run, total = allocated(8, rate=5158081, device_total="161071B"), 161_071
    for number in range(22):
        run.device.reset_allocator_peak()
        torch.manual_seed(number)
        loss = run.model(torch.randn(ROWS, WIDTH)).square().mean()
        if number >= 12 and number % 3 == 0:
            loss.backward(retain_graph=True)
        loss.backward()
        del loss
        run.optimizer.step()
        run.optimizer.zero_grad()
        run.peaks.append(run.device.peak)
        assert run.ladder.follows_plan == (6 <= number < 12) or number == 5
    assert max(run.peaks[:12] + run.peaks[19:]) <= total
    assert run.peaks[12] > 1.05 * total
