"""Mode "auto" believes steps: as many whole blocks run plain as fit, and what is finer is followed only where
real steps were faster with it."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import PipelineOffloadManager
from offload.auto import controller
from offload.auto.ladder import Ended, Facts, Ladder, State, Tried
from offload.auto.plan import AutoPlan
from offload.errors import DeviceTotalError
from offload.memory.arena import HostArena
from offload.policy.rule import Cost, Rule, Trace, fitting, peak_bytes
from tests.unit.groups.stack import build_manager
from tests.unit.modules.allocated import AllocatedDevice, AllocatedRun, allocated, counting
from tests.unit.modules.linked import RATE
from tests.unit.modules.training import ROWS, WIDTH

__all__ = ["allocated"]

BLOCKS = 4


def trace_of(kinds: str, *, chunks: int = 1, moves: bool = False, head: int = 0) -> Trace:
    """Blocks that hold 100 bytes in their backward beside 1,000 that stay; all forwards before the backwards.
    kinds: a letter for each block."""
    trace = Trace(moves, 1_000, 100, 1_100, head or 1_000)
    for chunk in range(chunks):
        trace.kinds[0, chunk] = list(kinds)
        for place in range(len(kinds)):
            trace.forward_ended((0, chunk), place)
    for chunk in reversed(range(chunks)):
        for place in reversed(range(len(kinds))):
            trace.backward_reads((0, chunk), place, 1_100)
    return trace


COSTS: dict[Hashable, Cost] = {"a": Cost(90, 10, 1.0), "b": Cost(40, 10, 2.0)}


# -- how many fit --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("total", "plain"), [(1_099, 0), (1_100, 1), (1_189, 1), (1_190, 2), (9_999, 4)])
def test_as_many_of_the_last_blocks_run_plain_as_fit_and_the_first_of_them_costs_nothing(
    total: int, plain: int
) -> None:
    rule = fitting(trace_of("aaaa"), COSTS, total, moves=False)
    assert sorted(rule.plain[0]) == [3, 2, 1, 0][:plain][::-1]


def test_what_the_head_needs_is_beside_all_that_plain_blocks_hold() -> None:
    trace = trace_of("aaaa", head=1_150)
    assert peak_bytes(trace, COSTS, Rule({0: frozenset({2, 3})}, moves=False)) == 1_150 + 2 * 90


def test_live_microbatches_hold_as_much_each() -> None:
    """Under 1F1B it is so many blocks of each chunk."""
    rule = Rule({0: frozenset({3})}, moves=False)
    assert peak_bytes(trace_of("aaaa", chunks=3), COSTS, rule) == 1_100 + 2 * 90


def test_inputs_that_leave_make_room_and_those_that_stay_take_it() -> None:
    moved, stayed = trace_of("aaaa", moves=True), trace_of("aaaa")
    nothing = Rule({}, moves=True)
    assert peak_bytes(moved, COSTS, nothing) == 1_100
    assert peak_bytes(moved, COSTS, nothing._replace(moves=False)) == 1_100 + 3 * 10
    # the chunk's first block is read last, when no other one is live: there nothing is gained
    assert peak_bytes(stayed, COSTS, nothing) == 1_100
    assert peak_bytes(stayed, COSTS, Rule({0: frozenset({3})}, moves=True)) == 1_100


def test_kinds_are_chosen_by_the_seconds_that_a_byte_of_them_spares() -> None:
    trace = trace_of("bbaa")
    by_kind = fitting(trace, COSTS, 1_100 + 80, moves=False)
    assert by_kind.plain[0] == {0, 1, 3}, "the b first, and the last a for nothing"
    last = fitting(trace, COSTS, 1_100 + 80, moves=False, by_kind=False)
    assert last.plain[0] == {3}


def test_a_longer_forward_has_fewer_plain_blocks() -> None:
    trace = trace_of("aaaa")
    ladder = Ladder(1_400)
    ladder.trace, ladder.costs = trace, COSTS
    ladder.rule = fitting(trace, COSTS, 1_400 * 0.998, moves=False)
    assert ladder.rule_for(1.0) is ladder.rule
    assert ladder.rule_for(0.5) is ladder.rule
    longer = ladder.rule_for(1.5)
    assert 0 < longer.num_plain < ladder.rule.num_plain
    assert peak_bytes(trace, COSTS, longer, 1.5) <= 1_400


# -- what is followed ----------------------------------------------------------------------------------------
class World:
    """What steps take, by the ways that they run: seconds and bytes that a test says."""

    def __init__(self, total: int = 1_200, *, is_asked: bool = True) -> None:
        self.ladder = Ladder(total, is_asked=is_asked)
        self.ladder.trace, self.ladder.costs = trace_of("bbaa"), COSTS
        self.seconds: Callable[[str], float] = lambda name: 1.0
        self.plan_s: float | None = None
        self.plan_is_final = True
        self.extra_bytes = 0
        self.ways: list[str] = []
        self._before: float | None = None

    def step(self, *, input_bytes: int = 1_000) -> None:
        ladder = self.ladder
        trace = ladder.trace
        assert trace is not None
        if ladder.state is State.MEASURE:
            peak = 1_100
        elif ladder.follows_plan:
            peak = 1_000
        else:
            peak = round(peak_bytes(trace, COSTS, ladder.rule)) + self.extra_bytes
        name = "plan" if ladder.follows_plan else ("moves" if ladder.rule.moves else str(ladder.rule.plain))
        self.ways.append(name)
        took = self.plan_s if ladder.follows_plan else self.seconds(name)
        is_new = name == "plan" and self.ways[-2:-1] != ["plan"]
        step = Ended(peak, input_bytes, self._before, plan_is_new=is_new, plan_is_final=self.plan_is_final)
        self._before = took
        ladder.ended(step, Facts.common([ladder.facts(step)]))
        if ladder.wants_plan:
            if self.plan_s is None:
                ladder.no_plan()
            else:
                ladder.plan_begins()

    def run(self, steps: int = 24) -> str:
        trace = self.ladder.trace
        assert trace is not None
        trace.input_bytes = 1_000
        for _ in range(steps):
            self.step()
        return self.ways[-1]


def test_the_last_blocks_are_followed_first_and_kinds_where_their_steps_are_faster() -> None:
    world = World(1_200)
    world.seconds = lambda name: 0.9 if "0, 1" in name else 1.0
    assert world.run() == "{0: frozenset({0, 1, 3})}"
    assert world.ladder.state is State.SETTLED
    assert world.ways[2] == "{0: frozenset({2, 3})}"
    world = World(1_200)
    world.seconds = lambda name: 1.1 if "0, 1" in name else 1.0
    assert world.run() == "{0: frozenset({2, 3})}"


@pytest.mark.parametrize(("plan_s", "last"), [(0.9, "plan"), (1.0, "rule"), (1.05, "rule"), (1.2, "rule")])
def test_a_plan_is_followed_only_where_its_steps_are_faster_than_those_of_the_rule(
    plan_s: float, last: str
) -> None:
    world = World()
    world.plan_s = plan_s
    assert (world.run() == "plan") == (last == "plan")
    assert world.ladder.state is State.SETTLED
    tried = world.ways.count("plan")
    if plan_s >= 1.0:
        assert tried == 4, "given up once its second and third step are known to be slower"


def test_a_step_that_takes_long_once_does_not_end_a_plan_that_is_faster() -> None:
    """It may have given cached memory back to the device, and taken it anew."""
    world, times = World(), iter([1.3, 0.9, 1.5, 0.9, 1.2] + [0.9] * 40)
    seconds = world.seconds
    world.plan_s = 0.9
    world.run(3)
    while not world.ladder.follows_plan:
        world.step()
    for _ in range(12):
        world.plan_s = next(times)
        world.step()
    assert world.ladder.state is State.SETTLED
    assert world.ladder.follows_plan
    assert seconds is world.seconds


def test_a_plan_that_passes_the_total_says_nothing_of_the_rule() -> None:
    """It was taken for the rule's own peak, so the rule was refused."""
    world = World()
    world.plan_s = 0.9
    world.run(3)
    while not world.ladder.follows_plan:
        world.step()
    before = world.ladder.rule
    world.step()
    world.ladder.plan_fails()
    step = Ended(2 * world.ladder.total_bytes, 1_000, 0.9)
    world.ladder.ended(step, world.ladder.facts(step))
    assert world.ladder.state is State.SETTLED
    assert world.ladder.rule == before
    assert world.ladder.tried["plan"].peak_bytes == step.peak_bytes
    world.run(3)
    assert world.ladder.rule == before


def test_without_a_total_a_plan_that_is_hardly_slower_is_followed() -> None:
    world = World(is_asked=False)
    world.plan_s = 1.005
    assert world.run() == "plan"


def test_the_first_step_of_another_split_leaves_what_weights_may_pass_their_share_by() -> None:
    world = World(1_400)
    world.run(6)
    ladder = world.ladder
    before = ladder.rule.num_plain
    ladder.begin_again(0, 0)
    assert ladder.rule.num_plain == before
    ladder.begin_again(0, 150)
    assert 0 < ladder.rule.num_plain < before
    world.run(6)
    assert ladder.rule.num_plain == before, "once that was seen to take no more"


def test_it_is_said_that_no_plan_fits() -> None:
    world = World()
    world.run(12)
    world.ladder.tried["plan"] = Tried("no plan fits", [])
    world.run(3)
    assert "no plan fits" in world.ladder.text()


def test_noise_between_steps_changes_nothing() -> None:
    world, times = World(1_200), iter([1.0, 1.1, 0.95, 1.05] * 20)
    world.seconds = lambda name: next(times) - (0.04 if "0, 1" in name else 0.0)
    assert world.run() == "{0: frozenset({2, 3})}"
    world.seconds = lambda name: 1.0
    world.run(200)
    assert max(len(tried.steps) for tried in world.ladder.tried.values()) == 64, (
        "nor is every step remembered"
    )


def test_a_step_that_passes_the_total_has_fewer_plain_blocks_from_then_on() -> None:
    world = World(1_300)
    world.run(3)
    before = world.ladder.rule.num_plain
    world.extra_bytes = 60
    world.run(20)
    assert world.ladder.rule.num_plain < before
    trace = world.ladder.trace
    assert trace is not None
    assert peak_bytes(trace, COSTS, world.ladder.rule) + 60 <= 1_300
    assert world.ladder.state is State.SETTLED


def test_inputs_that_leave_for_no_more_plain_blocks_stay_once_a_step_has_passed_the_total() -> None:
    world = World(1_200)
    world.seconds = lambda name: 0.9 if name == "moves" else 1.0
    assert world.run() == "moves"
    world.extra_bytes = 100  # beside which as many blocks fit while inputs stay
    world.run(3)
    assert world.ladder.state is State.SETTLED
    assert not world.ladder.rule.moves


@pytest.mark.parametrize(("longest", "last"), [(900, "plan"), (1_400, "rule")])
def test_a_plan_is_compared_with_steps_as_long_as_its_own_so_without_two_the_rule_stays(
    longest: int, last: str
) -> None:
    """longest: bytes of the inputs of steps under the plan, where those before had 700 to 890."""
    world = World()
    world.plan_s = 0.5
    trace = world.ladder.trace
    assert trace is not None
    trace.input_bytes = 1_000
    for number in range(40):
        least = longest - 200 if world.ladder.follows_plan else 700
        world.step(input_bytes=least + 10 * number % 200)
    assert (world.ways[-1] == "plan") == (last == "plan")
    assert "plan" in world.ways
    assert world.ladder.state is State.SETTLED


@pytest.mark.parametrize(("plan_s", "last"), [(1.05, "plan"), (1.1, "rule")])
def test_a_plan_is_compared_by_the_byte(plan_s: float, last: str) -> None:
    """Its steps have 9% more of them than those of the rule."""
    world = World()
    world.plan_s = plan_s
    trace = world.ladder.trace
    assert trace is not None
    trace.input_bytes = 1_000
    for _ in range(24):
        world.step(input_bytes=1_090 if world.ladder.follows_plan else 1_000)
    assert (world.ways[-1] == "plan") == (last == "plan")
    assert "plan" in world.ways
    assert world.ladder.state is State.SETTLED


@pytest.mark.parametrize(
    ("seconds", "last"),
    [([1.3] + [0.9] * 11 + [1.02] * 2, "plan"), ([1.3, 1.04, 0.97, 0.97] + [1.04, 0.97] * 5, "rule")],
    ids=["a slow one at the end", "two fast ones"],
)
def test_where_lengths_vary_a_plan_is_judged_by_all_of_its_steps(seconds: list[float], last: str) -> None:
    """Two alone say less than their lengths differ by."""
    world = World()
    world.plan_s, world.plan_is_final = 1.0, last == "rule"
    trace = world.ladder.trace
    assert trace is not None
    trace.input_bytes = 1_000
    while not world.ladder.follows_plan:
        world.step()
    for number, took in enumerate(seconds):
        assert world.ladder.follows_plan
        world.plan_s = took
        world.step(input_bytes=1_000 + number % 2)
    world.step()
    assert world.ladder.follows_plan == (last == "plan")


def test_a_plan_is_judged_by_steps_that_ran_as_it_has_settled() -> None:
    """Times are known a step later: it was followed for those of the amounts before the last ones."""
    world = World()
    world.plan_s, world.plan_is_final = 0.9, False
    world.run(3)
    while not world.ladder.follows_plan:
        world.step()
    for _ in range(4):
        world.step()
    world.plan_s, world.plan_is_final = 1.1, True
    for _ in range(4):
        world.step()
    assert not world.ladder.follows_plan


def test_inputs_do_not_leave_over_a_link_that_they_would_fill() -> None:
    world = World()
    world.ladder.bytes_per_s = 10.0
    world.run()
    assert "moves" not in world.ways[1:]


@pytest.mark.parametrize("steps", [3, 100])
def test_inputs_do_not_leave_before_they_have_memory_on_the_host(steps: int) -> None:
    """They would stay on the device, beside what the rule counts on them for."""
    world, asked = World(1_200), list[int]()

    def pins(nbytes: int) -> bool:
        asked.append(nbytes)
        return len(asked) >= steps

    world.ladder.pins = pins
    world.run()
    assert ("moves" in world.ways[1:]) == (steps == 3)
    assert asked[0] == 10, "of one recomputed block"
    if steps == 3:
        assert len(asked) == 3
    assert world.ladder.state is State.SETTLED


def test_ranks_decide_by_the_fullest_and_the_slowest_of_them() -> None:
    few, many = Rule({0: frozenset({3})}), Rule({0: frozenset({2, 3})})
    common = Facts.common(
        [
            Facts(1.0, False, (many, few, many)),
            Facts(2.0, True, (few, many, many)),
            Facts(1.5, False, (many,) * 3),
        ]
    )
    assert common == Facts(2.0, True, (few, few, many))
    assert Facts.common([Facts(1.0, False, None), Facts(None, False, (few,) * 3)]) == Facts(None, False, None)


# -- whole runs ----------------------------------------------------------------------------------------------
def plain_run(new: Callable[..., AllocatedRun], steps: int, **given: Any) -> tuple[int, list[Tensor]]:
    """Of a run without: its peak, and its weights at the end."""
    run = new(BLOCKS)
    run.steps(steps, **given)
    return max(run.peaks), run.weights()


def halfway(new: Callable[..., AllocatedRun], plain_bytes: int, **given: Any) -> str:
    """A total between what a step takes that recomputes every block and a plain one."""
    run = new(BLOCKS, device_total="1GB")
    run.steps(2, **given)
    return f"{(max(run.peaks) + plain_bytes) // 2}B"


@pytest.mark.parametrize("rows", [(ROWS,), (ROWS, ROWS)], ids=["one forward", "two alive"])
def test_weights_have_the_bits_of_a_run_without_and_every_step_keeps_within_the_total(
    rows: tuple[int, ...], allocated: Callable[..., AllocatedRun]
) -> None:
    plain_bytes, weights = plain_run(allocated, 14, rows=rows)
    total = halfway(allocated, plain_bytes, rows=rows)
    run = allocated(BLOCKS, rate=RATE / 100, device_total=total)  # a link too slow for any plan
    run.steps(14, rows=rows)
    assert all(map(torch.equal, run.weights(), weights))
    assert max(run.peaks) <= int(total[:-1]) * 1.01
    assert run.ladder.state is State.SETTLED
    assert 0 < run.ladder.rule.num_plain < BLOCKS
    assert run.seconds[-1] < run.seconds[1], "than where every block is recomputed"
    assert run.seconds[4] <= run.seconds[-1] * 1.001, "from step 5 on it is the rule"
    explained = str(run.handle.explain()) if run.handle else ""
    assert f"{run.ladder.rule.num_plain} plain" in explained
    assert f"{run.seconds[-1] * 1e3:.1f}" in explained


def test_where_all_fits_one_hook_is_left_and_a_longer_forward_brings_all_back(
    allocated: Callable[..., AllocatedRun],
) -> None:
    lengths = [(ROWS,)] * 7 + [(ROWS + ROWS // 2,)] + [(ROWS,)] * 2
    plain = allocated(BLOCKS)
    for number, rows in enumerate(lengths):
        plain.steps(1, rows=rows, seed=number)
    weights, total = plain.weights(), max(plain.peaks[:7]) + 4_000
    assert max(plain.peaks) > total
    run = allocated(BLOCKS, device_total=f"{total}B")
    hooks = []
    for number, rows in enumerate(lengths):
        run.steps(1, rows=rows, seed=number)
        hooks.append(run.num_hooks - run.own_hooks)
    assert hooks[6] == 1
    assert run.seconds[6] == pytest.approx(plain.seconds[6])
    assert run.peaks[7] <= total, "in that very forward fewer blocks ran plain"
    assert all(map(torch.equal, run.weights(), weights))
    assert run.handle is not None
    run.handle.remove()
    assert run.num_hooks == run.own_hooks


def test_blocks_that_run_plain_have_no_hook_and_none_is_missed(
    allocated: Callable[..., AllocatedRun], caplog: pytest.LogCaptureFixture
) -> None:
    plain_bytes, _ = plain_run(allocated, 2)
    run = allocated(BLOCKS, device_total=halfway(allocated, plain_bytes))
    run.steps(14)
    resting = [len(block._forward_hooks) for block in run.model.layers]
    plain = run.ladder.rule.plain[0]
    assert [place for place, count in enumerate(resting) if count == 0] == sorted(plain - {BLOCKS - 1})
    assert not [text for text in caplog.messages if "did not run through their hooks" in text]
    assert run.handle is not None
    run.handle.remove()
    assert run.num_hooks == run.own_hooks


def test_lengths_that_vary_keep_within_the_total_with_the_bits_of_a_run_without(
    allocated: Callable[..., AllocatedRun],
) -> None:
    lengths = [(8 + 3 * number % 11,) for number in range(16)]
    plain = allocated(BLOCKS)
    for number, rows in enumerate(lengths):
        plain.steps(1, rows=rows, seed=number)
    weights = plain.weights()
    total = halfway(allocated, max(plain.peaks), rows=(18,))
    run = allocated(BLOCKS, device_total=total)
    for number, rows in enumerate(lengths):
        run.steps(1, rows=rows, seed=number)
    assert all(map(torch.equal, run.weights(), weights))
    assert max(run.peaks) <= int(total[:-1]) * 1.01


def test_steps_that_are_measured_anew_are_measured_at_their_own_length(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """What plain blocks save was that of the first, shorter call, so a step passed the total, and lengths
    looked new again and again; and gradients of the step before counted as there at the begin of this one."""
    plain = allocated(BLOCKS)
    lengths = [6] * 6 + [12] * 9
    for number, rows in enumerate(lengths):
        plain.steps(1, rows=(rows,), seed=number)
    # of 82.4 and 87.9 kB, all recomputed and all plain; over a link that is too slow for any plan
    run = allocated(BLOCKS, rate=RATE / 100, device_total="86281B")
    for number, rows in enumerate(lengths):
        run.steps(1, rows=(rows,), seed=number)
    assert max(run.peaks) <= 86_281
    assert run.ladder.state is State.SETTLED
    assert run.ladder.rule.num_plain == 3, "as where every step has this length"
    assert all(map(torch.equal, run.weights(), plain.weights()))


def test_where_lengths_vary_a_plan_is_tried_that_is_faster_for_its_own_step(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """Its step is longer than most: it looked slower than a measured one of the rule, and was not tried."""
    lengths = [tuple(8 + (3 * n + 5 * m) % 9 for m in range(2 + n % 2)) for n in range(24)]
    plain = allocated(BLOCKS)
    for number, rows in enumerate(lengths):
        plain.steps(1, rows=rows, seed=number)
    run = allocated(BLOCKS, rate=100 * RATE, device_total=f"{round(0.84 * max(plain.peaks))}B")
    for number, rows in enumerate(lengths):
        run.steps(1, rows=rows, seed=number)
    assert all(map(torch.equal, run.weights(), plain.weights()))
    assert run.ladder.follows_plan


@pytest.mark.parametrize(
    ("most_launches", "wins", "expected"),
    [(0.3, True, [3, 11]), (0.3, False, [3, 11, 25]), (-1.0, False, [3, 8])],
    ids=["a plan", "a plan that loses", "no plan"],
)
def test_cached_device_memory_goes_back_behind_measured_steps_and_once_under_what_is_settled(
    most_launches: float,
    wins: bool,
    expected: list[int],
    allocated: Callable[..., AllocatedRun],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host memory goes back once nothing is to be tried that may want it."""
    plain_bytes, _ = plain_run(allocated, 16)
    run = allocated(BLOCKS, rate=100 * RATE, device_total=halfway(allocated, plain_bytes))
    released: list[int] = []
    monkeypatch.setattr(run.device, "release_cached", lambda _: released.append(len(run.seconds)) or 0)
    trimmed: list[State] = []
    monkeypatch.setattr(HostArena, "trim", lambda *_: trimmed.append(run.ladder.state) or 0)
    monkeypatch.setattr(controller, "_MOST_LAUNCHES", most_launches)
    if not wins:
        monkeypatch.setattr(Ladder, "_wins", lambda ladder, new, old: new != "plan")
    run.steps(28)
    assert run.ladder.state is State.SETTLED
    assert run.ladder.follows_plan == wins
    assert released == expected
    assert trimmed == [State.SETTLED]
    manager = PipelineOffloadManager.OFFLOAD_MGR
    assert manager is not None
    assert run.handle is not None
    trimmer = manager.follower.planner.trimmer
    assert (trimmer.waits, trimmer.keeps_host) == (False, False)
    trimmer.waits = trimmer.keeps_host = True
    PipelineOffloadManager.OFFLOAD_MGR = None
    run.handle.remove()
    assert (trimmer.waits, trimmer.keeps_host) == (False, False)
    assert PipelineOffloadManager.OFFLOAD_MGR is None, "the end of a mode builds no manager"
    manager.close()


def test_no_plan_is_tried_where_the_host_hardly_keeps_ahead_of_the_device(
    allocated: Callable[..., AllocatedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block takes the host 0.4 of what it takes the device."""
    plain_bytes, _ = plain_run(allocated, 4)
    total = halfway(allocated, plain_bytes)
    run, clock = allocated(BLOCKS, rate=100 * RATE, device_total=total), itertools.count(step=4e-4)
    monkeypatch.setattr("offload.auto.calls.perf_counter", lambda: next(clock))
    run.steps(16)
    assert not run.ladder.follows_plan
    assert run.handle is not None
    assert "launch-bound, a block takes the host 0.40 of the device's time" in str(run.handle.explain())


def test_a_forward_that_was_longer_than_the_measured_one_is_not_taken_for_it_once_all_hooks_rest(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """All of the measured length fits, and less of the longer one that came before the hooks rested."""
    lengths = [6, 6, 6, 6, 18, 6, 18, 18]
    plain = allocated(BLOCKS)
    for number, rows in enumerate(lengths):
        plain.steps(1, rows=(rows,), seed=number)
    weights, total = plain.weights(), max(plain.peaks) - 1_500
    run = allocated(BLOCKS, device_total=f"{total}B")
    for number, rows in enumerate(lengths):
        run.steps(1, rows=(rows,), seed=number)
    assert max(run.peaks) <= total
    assert all(map(torch.equal, run.weights(), weights))


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("parts", ["one backward", "two microbatches", "two backwards"])
def test_blocks_that_are_called_without_their_model_have_a_rule_too(
    parts: str, fits: bool, allocated: Callable[..., AllocatedRun]
) -> None:
    """As where a loss calls an inner model. They were a chunk each, so all of them ran plain or none."""

    def forward(run: AllocatedRun) -> Tensor:
        hidden = run.model.embed(torch.randn(ROWS, WIDTH))
        for place, block in enumerate(run.model.layers):
            hidden = block(hidden)
            if parts == "two backwards" and place == BLOCKS // 2:
                hidden.square().mean().backward()
                hidden = hidden.detach().requires_grad_()
        return run.model.head(hidden).square().mean()

    def steps(run: AllocatedRun, count: int) -> None:
        for step in range(count):
            torch.manual_seed(step)
            run.device.reset_allocator_peak()
            losses = [forward(run) for _ in range(1 + (parts == "two microbatches"))]
            for loss in losses:
                loss.backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.peaks.append(run.device.peak)
            del losses, loss

    plain = allocated(BLOCKS)
    steps(plain, 14)
    weights = plain.weights()
    run = allocated(BLOCKS, device_total="1GB")
    steps(run, 2)
    total = (max(run.peaks) + max(plain.peaks)) // 2
    run = allocated(BLOCKS, device_total="1GB" if fits else f"{total}B")
    steps(run, 14)
    assert run.ladder.state is State.SETTLED
    assert all(map(torch.equal, run.weights(), weights))
    assert run.handle is not None
    assert run.handle._auto is not None
    assert len(run.handle._auto.calls.names) == (1 if parts == "one backward" else 2)
    if fits:
        assert run.ladder.keeps_all
        assert run.num_hooks > run.own_hooks + 1, "nobody would see a longer forward"
    else:
        assert not run.ladder.keeps_all
        assert max(run.peaks) <= total * 1.01
        if parts == "one backward":
            assert 0 < run.ladder.rule.num_plain < BLOCKS


def test_a_step_with_fewer_microbatches_rests_as_it_was_measured(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """Names of a chunk that comes no more said that nothing rests, so the first block with hooks was taken
    for the first of all."""
    plain_bytes, _ = plain_run(allocated, 3)
    run = allocated(BLOCKS, device_total=halfway(allocated, plain_bytes))
    run.steps(2, rows=(ROWS, ROWS))
    with pytest.raises(DeviceTotalError):  # of two microbatches none fits
        run.steps(1, rows=(ROWS, ROWS))
    run.steps(2, rows=(ROWS, ROWS))
    run.steps(18)
    assert run.handle is not None
    assert run.handle._auto is not None
    calls, rule = run.handle._auto.calls, run.ladder.rule
    assert run.ladder.state is State.SETTLED
    assert 0 < rule.num_plain < BLOCKS
    assert len(calls.names) == 3, "the forward that was refused was one, too"
    assert calls.resting[0].keys() == rule.plain[0] - {BLOCKS - 1}
    assert len(calls.names[0, 0]) == BLOCKS, "those that rest among them"


def test_a_total_below_what_is_there_between_steps_is_an_error_before_step_2(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """Of Adam's state, which appears with step 1. The loop that catches it goes on with the bits of a run
    without."""
    _, weights = plain_run(allocated, 8)
    run = allocated(BLOCKS, device_total="55kB")
    run.steps(1)
    state_bytes = sum(
        held.nbytes for state in run.optimizer.state.values() for held in state.values() if held.ndim
    )
    with pytest.raises(DeviceTotalError, match="before the first block of step 2") as told:
        run.steps(1)
    weight_bytes = sum(held.nbytes for held in weights)
    named = re.search(r"and ([0-9.]+) kB are on", str(told.value))
    assert named is not None
    least, most = (state_bytes + weight_bytes) / 1e3, 3 * ROWS * WIDTH * 4 / 1e3  # and the batch
    assert least <= float(named[1]) <= least + most
    for number in range(1, 8):
        run.steps(1, seed=number)
    assert all(map(torch.equal, run.weights(), weights))


@pytest.mark.parametrize("limit_bytes", [1 << 30, 8_000], ids=["held", "not held"])
def test_a_plan_is_tried_only_where_the_host_holds_what_it_moves(
    limit_bytes: int, allocated: Callable[..., AllocatedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4.7 kB, over a fast link. What finds no memory there stays on the device, and passes the total."""
    plain_bytes, weights = plain_run(allocated, 16)
    total = halfway(allocated, plain_bytes)
    run = allocated(BLOCKS, rate=100 * RATE, device_total=total)
    manager = PipelineOffloadManager.OFFLOAD_MGR
    assert manager is not None
    monkeypatch.setattr(manager.engine.arena.budget, "limit_bytes", limit_bytes)
    run.steps(16)
    assert run.handle is not None
    assert run.ladder.follows_plan == (limit_bytes > 8_000)
    assert max(run.peaks) <= int(total[:-1])
    explained = run.handle.explain()
    assert ("plan, as it is predicted" in str(explained)) == (explained.plan is None)
    if explained.plan is not None:
        limits = manager.engine.limits
        assert limits.max_spilling_bytes == limits.device_limit_bytes, "or compute waits, as no plan says"
        assert f"Its steps took {run.seconds[-1] * 1e3:.1f} ms." in str(explained)
        slower = replace(explained, step_s=1.06 * explained.plan.predicted_step_s)
        assert "launch-bound" in str(slower)
        assert run.handle._auto is not None
        share = run.handle._auto.memory.share
        run.handle._auto.plan.follow_none()
        assert limits.max_restoring_bytes == 2 * 512, "pieces, until a step was seen"
        assert limits._bounds[share, "max_spilling_bytes"].nbytes == int(total[:-1]) // 8
    assert run.ladder.state is State.SETTLED
    assert all(map(torch.equal, run.weights(), weights))


def test_host_memory_that_is_given_back_during_the_search_is_pinned_again_for_its_plan(
    allocated: Callable[..., AllocatedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is 4.7 kB, and 3.6 kB more than were held at the search's begin may be pinned beside steps."""
    plain_bytes, _ = plain_run(allocated, 16)
    run = allocated(BLOCKS, rate=100 * RATE, device_total=halfway(allocated, plain_bytes))
    manager = PipelineOffloadManager.OFFLOAD_MGR
    assert manager is not None
    arena, ready = manager.engine.arena, AutoPlan.ready
    found: list[object] = []

    def then_given_back(plan: AutoPlan, *given: Any) -> Any:
        found.append(ready(plan, *given))
        if len(found) == 1:
            arena.trim(0)
        return found[-1]

    monkeypatch.setattr(controller, "_pinned_in", lambda step_s: 300)
    monkeypatch.setattr(AutoPlan, "ready", then_given_back)
    run.steps(16)
    assert found
    assert run.ladder.follows_plan


def test_more_and_fewer_microbatches_than_were_measured_keep_the_total(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """They were taken for longer forwards, so one that took no more said that there was room."""
    run = allocated(8, device_total="110kB", gives_optimizer=True)
    peaks = []
    for number in range(24):
        run.device.reset_allocator_peak()
        for _ in range(1 + number % 3):
            torch.manual_seed(number)
            run.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        peaks.append(run.device.peak)
    assert max(peaks) <= 1.01 * 110_000


def test_where_all_of_one_microbatch_fits_two_of_them_alive_keep_the_total_too(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """No block had a hook, so both ran plain, in each such step."""
    one_bytes, _ = plain_run(allocated, 3)
    two_bytes, _ = plain_run(allocated, 3, rows=(ROWS, ROWS))
    total = (one_bytes + two_bytes) // 2
    rows: list[tuple[int, ...]] = [(ROWS,)] * 8 + [(ROWS, ROWS), (ROWS,)] * 3
    run = allocated(BLOCKS, device_total=f"{total}B")
    for number, each in enumerate(rows):
        run.steps(1, rows=each, seed=number)
        if number >= 7:
            assert run.ladder.keeps_all
            assert run.num_hooks == run.own_hooks + 1
    assert one_bytes < max(run.peaks) <= total
    weights = run.weights()
    plain = allocated(BLOCKS)
    for number, each in enumerate(rows):
        plain.steps(1, rows=each, seed=number)
    assert all(map(torch.equal, plain.weights(), weights))


def test_gradients_that_are_added_to_are_not_more_on_the_device(
    allocated: Callable[..., AllocatedRun],
) -> None:
    """Forwards of a step begin with the gradients of those before it, as they did when it was measured."""

    def steps(run: AllocatedRun, count: int) -> None:
        for _ in range(count):
            run.device.reset_allocator_peak()
            for _ in range(3):
                run.model(torch.ones(ROWS, WIDTH)).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.peaks.append(run.device.peak)

    plain = allocated(BLOCKS)
    steps(plain, 3)
    run = allocated(BLOCKS, device_total=f"{max(plain.peaks) + 1_000}B")
    steps(run, 8)
    assert run.ladder.keeps_all
    for _ in range(3):
        steps(run, 1)
        assert run.num_hooks == run.own_hooks + 1


def test_all_fits_where_a_step_of_the_measured_length_has_shown_it() -> None:
    """A shorter one did, and from then on nobody looked."""
    world = World(1_400)
    world.run(1)
    world.step(input_bytes=400)
    world.step(input_bytes=400)
    assert world.ladder.keeps_all
    assert world.ladder.state is State.RULE
    world.extra_bytes = 400
    world.step()
    assert not world.ladder.keeps_all


def test_a_loop_that_catches_the_refusal_trains_on_where_weights_may_move(
    allocated: Callable[..., AllocatedRun],
) -> None:
    run, refusals = allocated(BLOCKS, device_total="40kB"), []
    for number in range(24):
        try:
            run.steps(1, seed=number)
        except DeviceTotalError:
            run.optimizer.zero_grad()
            refusals.append(number)
            run.steps(1, seed=number)
    assert len(refusals) == 1
    assert run.ladder.state is State.REFUSED


def test_a_peak_that_the_loop_resets_behind_its_backward_is_known(
    allocated: Callable[..., AllocatedRun],
) -> None:
    plain_bytes, _ = plain_run(allocated, 2)
    total = halfway(allocated, plain_bytes)
    run = allocated(BLOCKS, device_total=total)
    peaks = []
    for number in range(16):
        run.device.reset_allocator_peak()
        torch.manual_seed(number)
        run.model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        peaks.append(run.device.peak)
        run.device.reset_allocator_peak()
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert max(peaks) <= 1.01 * int(total[:-1])


def test_steps_that_cannot_be_measured_are_one_warning(
    allocated: Callable[..., AllocatedRun], caplog: pytest.LogCaptureFixture
) -> None:
    """The head's optimizer steps before the backward of the blocks, so no step has both."""
    run = allocated(BLOCKS, device_total="1GB")
    model = run.model
    head, body = (
        torch.optim.SGD(weights, lr=0.1) for weights in (model.head.parameters(), model.layers.parameters())
    )
    for number in range(24):
        torch.manual_seed(number)
        hidden = model.embed(torch.randn(ROWS, WIDTH))
        for block in model.layers:
            hidden = block(hidden)
        carried = hidden.detach().requires_grad_()
        model.head(carried).square().mean().backward()
        head.step()
        hidden.backward(carried.grad)
        body.step()
        model.zero_grad()
    said = [text for text in caplog.messages if "has no plan after" in text]
    assert len(said) == (run.ladder.state is State.MEASURE)
    assert run.ladder.state is State.MEASURE


def test_a_handle_that_is_removed_while_hooks_rest_leaves_no_hook_of_optimizers(
    allocated: Callable[..., AllocatedRun],
) -> None:
    run = allocated(BLOCKS, device_total="1GB")
    run.steps(7)
    handle = run.handle
    assert handle is not None
    auto, steps = handle._auto, sys.modules["offload.apply"]._steps
    assert auto is not None
    assert run.num_hooks == run.own_hooks + 1
    assert not steps._hooks
    handle.remove()
    assert len(auto.rests._hooked) == 0
    assert not steps._hooks
    assert not steps.roots()


def test_another_engine_is_measured_anew(allocated: Callable[..., AllocatedRun]) -> None:
    run = allocated(BLOCKS, device_total="1GB")
    run.steps(7)
    assert run.num_hooks == run.own_hooks + 1
    old = PipelineOffloadManager.OFFLOAD_MGR
    assert old is not None
    run.handle._auto.rests.wake()  # type: ignore[union-attr]
    PipelineOffloadManager.OFFLOAD_MGR = None
    device = AllocatedDevice()
    manager = PipelineOffloadManager.OFFLOAD_MGR = build_manager(device=device, piece_bytes=512)
    run.device = device
    with counting(device, manager.engine.at_work):
        run.steps(9)
    assert run.ladder.state is State.SETTLED
    assert old.engine.limits.max_spilling_bytes != 125_000_000, "the cap of the mode went with it"
    old.close()
