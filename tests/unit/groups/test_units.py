"""Cutting groups where their tensors end, and keeping a part of one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from offload import (
    ChunkOffloadHandler,
    OffloadConfig,
    OffloadEngine,
    OffloadTensorGroup,
    group_commit,
    group_start,
    offload_hooks,
)
from offload.device.sim import SimDevice
from offload.groups.seen import SeenStep, StepClock
from offload.groups.step_planner import StepPlanner, Trimmer
from offload.groups.timed import Unit, cut_into_units, stays_of
from offload.policy.actions import Action, GroupSize, Rates
from tests.unit.groups.stack import (
    WIDTH,
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    installed,
    one_f_one_b,
)
from tests.unit.groups.test_step_planner import chunks_of, seen

KIB = 1024


def group_of(name: str, *nbytes: int) -> OffloadTensorGroup:
    group = OffloadTensorGroup(name)
    group.slot_bytes = tuple(enumerate(nbytes))
    group.total_offload_bytes = sum(nbytes)
    return group


def test_group_is_cut_after_tensors_that_reach_the_least_bytes() -> None:
    units = cut_into_units([group_of("a", 3, 3, 9, 1), group_of("b"), group_of("c", 4)], 5)
    assert units == [
        Unit(0, 0, GroupSize("a", 6)),
        Unit(0, 2, GroupSize("a", 9)),
        Unit(0, 3, GroupSize("a", 1)),
        Unit(1, 0, GroupSize("b", 0)),
        Unit(2, 0, GroupSize("c", 4)),
    ]


def test_group_is_cut_where_a_checkpoint_region_ends() -> None:
    group = group_of("a", 3, 3, 3, 3, 3)
    group.regions = {1: 1, 2: 1, 3: 2}
    assert cut_into_units([group], 100) == [
        Unit(0, 0, GroupSize("a", 3)),
        Unit(0, 1, GroupSize("a", 6, 1)),
        Unit(0, 3, GroupSize("a", 3, 2)),
        Unit(0, 4, GroupSize("a", 3)),
    ]


def test_units_of_a_chunk_stay_few_however_many_tensors_it_has() -> None:
    units = cut_into_units([group_of("a", *[1] * 10_000)], 1)
    assert len(units) <= 65
    assert sum(unit.size.nbytes for unit in units) == 10_000


def test_group_counted_by_hand_is_one_unit() -> None:
    group = OffloadTensorGroup("a")
    group.update_offload_info(torch.empty(6))
    assert cut_into_units([group], 1) == [Unit(0, 0, GroupSize("a", 24))]


def test_a_kept_end_is_whole_groups_and_the_last_tensors_of_one_more() -> None:
    units = cut_into_units([group_of("a", 4, 4, 4), group_of("b", 4)], 4)
    stays = stays_of(units, {1, 2, 3})
    assert stays.whole == {1}
    assert stays.from_slot == {0: 1}
    assert stays.part_bytes == {0: 8}
    assert stays_of(units, {0, 1, 2, 3}).whole == {0, 1}
    assert stays_of(units, set()) == (frozenset(), {}, {})


@pytest.mark.parametrize("room", [7, 1])
def test_timed_plan_keeps_part_of_a_group_that_is_too_large_to_stay_whole(
    room: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One chunk of one group of four tensors, and room for three: without units nothing of it could stay.
    With room for none the best plan is said to be above the limit."""
    limit_bytes = room * KIB
    engine = OffloadEngine(OffloadConfig(device_limit_bytes=limit_bytes, piece_bytes=KIB), device=SimDevice())
    engine.rates = Rates(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6)
    planner = StepPlanner(engine)
    (chunk,) = chunks_of(engine, "a", nbytes=8 * KIB)
    chunk.groups[0].slot_bytes = tuple((slot, 2 * KIB) for slot in range(4))
    actions = [Action("F", 0, 0), Action("B", 0, 0)]
    step = SeenStep(
        chunks=[chunk],
        forward_order=[chunk],
        backward_order=[chunk],
        actions=actions,
        seconds=dict.fromkeys(actions, 1e-3),
    )
    for _ in range(3):
        planner.after_step(step)
    assert chunk.stays == frozenset()
    if room == 1:
        assert "no plan keeps saved tensors within device_limit" in caplog.text
        assert "1.02 kB: the best one peaks at" in caplog.text
        return
    assert not caplog.text
    first_kept = chunk.stays_from[0]
    assert 1 <= first_kept <= 3
    assert planner.summary == {"a": first_kept * 2 * KIB}, "the table counts what leaves"


@pytest.mark.parametrize("stays_from", [0, 1, 2, 3])
def test_what_a_plan_keeps_of_a_group_never_moves_and_the_rest_does(stays_from: int) -> None:
    order = one_f_one_b(2, 1)
    expected = baseline(build_stages(names=("a",)), [order] * 3)
    with installed(build_manager(device_limit_bytes=1 << 30, max_spilling_bytes=KIB)) as manager:
        driver = Driver(build_stages(names=("a",)), announced=True)
        found = [driver.step(order)]
        whole = manager.stats
        for handler in manager.tracker.handlers.values():
            sizes = [dict(group.slot_bytes) for group in handler.groups]
            handler.stays, handler.stays_from = (
                frozenset(),
                dict.fromkeys(range(len(handler.groups)), stays_from),
            )
        found.append(driver.step(order))
        leaving = sum(nbytes for group in sizes for slot, nbytes in group.items() if slot < stays_from) * len(
            manager.tracker.handlers
        )
        assert manager.stats.spill_bytes == leaving
        assert manager.stats.saved == whole.saved
        found.append(driver.step(order))
    assert_same(expected, found)


def timed_planner() -> tuple[OffloadEngine, StepPlanner, list[ChunkOffloadHandler]]:
    """And two chunks of two groups of four tensors."""
    engine = OffloadEngine(OffloadConfig(device_limit_bytes=24 * KIB, piece_bytes=KIB), device=SimDevice())
    engine.rates = Rates(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6)
    planner = StepPlanner(engine)
    chunks = chunks_of(engine, "ab", "ab", nbytes=8 * KIB)
    for chunk in chunks:
        for group in chunk.groups:
            group.slot_bytes = tuple((slot, 2 * KIB) for slot in range(4))
    return engine, planner, chunks


@pytest.mark.parametrize("between", ["nothing", "evaluation", "cut short"])
def test_planner_follows_one_plan_from_times_and_then_gives_back_what_it_does_not_use(
    between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, planner, chunks = timed_planner()
    step = dataclasses.replace(
        seen(chunks, "F0 F1 B0 B1"),
        seconds={("F", 0, 0): 1e-3, ("F", 0, 1): 1e-3, ("B", 0, 0): 2e-3, ("B", 0, 1): 2e-3},
    )
    trims: list[int] = []
    refused = 0
    monkeypatch.setattr(engine.arena, "trim", trims.append)
    evaluation = dataclasses.replace(step, backward_order=[], actions=step.actions[:2])
    cut_short = dataclasses.replace(step, backward_order=step.backward_order[:1], actions=step.actions[:3])

    def end(ended: SeenStep) -> None:
        engine.last_stats = dataclasses.replace(engine.last_stats, refused=refused)
        planner.after_step(ended)

    stays = []
    for _ in range(6):
        end(step)
        stays.append([(chunk.stays, dict(chunk.stays_from)) for chunk in chunks])
        if between != "nothing":
            end(cut_short if between == "cut short" else evaluation)
        if len(stays) < 4:
            assert not trims
    assert stays[1] != stays[2], "times were known"
    assert stays[2:] == [stays[2]] * 4
    assert len(trims) == 1
    planner.trimmer.plan_changed()
    refused = 1  # what a step lacks is not given back
    end(step)
    assert len(trims) == 1


def test_host_memory_goes_back_in_parts_with_steps_between_until_what_is_wanted_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once, a settled step of BERT took 1.25 of those around it."""

    class Arena:
        held_bytes, registration_bytes = 2 << 30, 64 << 20

        def trim(self, target_bytes: int) -> int:
            released = min(free, max(0, self.held_bytes - target_bytes))
            self.held_bytes -= released
            return released

    engine, arena, free = OffloadEngine(OffloadConfig(), device=SimDevice()), Arena(), 2 << 30
    monkeypatch.setattr(engine, "arena", arena)
    engine.last_stats = dataclasses.replace(engine.last_stats, host_bytes_wanted_peak=5 << 27)
    trimmer, held = Trimmer(engine), []
    for _ in range(14):
        trimmer.plan_settled()
        held.append(arena.held_bytes / (1 << 29))
        trimmer.step_ended()
    assert held == [3, 3, 3, 3, 2, 2, 2, 2, *[1.375] * 6]
    arena.held_bytes, free = 2 << 30, 0  # none of it is a whole piece
    trimmer.plan_changed()
    for _ in range(14):
        trimmer.plan_settled()
    free = 2 << 30
    trimmer.plan_settled()
    assert arena.held_bytes == 2 << 30, "it is not looked for in every step"


class _Sliced(torch.nn.Module):
    """Saves a lone eighth of a tensor that nothing else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.randn(WIDTH))
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = group_start(x, "a")
        with offload_hooks():
            wide = torch.cat([self.linear(x)] * 8, 1) * 1.0
            y = wide[:, :WIDTH].sin() * self.scale
        return group_commit(y, "a")


def test_plan_that_keeps_sparse_views_settles() -> None:
    """They were counted packed where they left and with all that lies between where they stayed, so each plan
    made the next step look like one of a new shape, and the plans of two kinds of step took turns for
    ever."""
    torch.manual_seed(0)
    expected, found = ([torch.nn.Sequential(*(_Sliced() for _ in range(3)))] for _ in range(2))
    found[0].load_state_dict(expected[0].state_dict())
    order = one_f_one_b(3, 1)
    gradients = baseline(expected, [order] * 4)
    with installed(
        build_manager(device_limit_bytes=6 * KIB, max_spilling_bytes=KIB, max_restoring_bytes=KIB)
    ) as manager:
        driver = Driver(found, announced=True)
        kept = []
        for step in range(4):
            assert_same(gradients[step : step + 1], [driver.step(order)])
            kept.append([handler.stays for handler in manager.tracker.handlers.values()])
        assert any(kept[0])
        assert kept == kept[:1] * 4


def test_summary_counts_what_leaves_before_and_after_times_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of two groups of several tensors: the table's bytes are those that the next step sends,
    whichever plan it follows."""
    seconds = {("F", 0, 0): 1e-3, ("B", 0, 0): 2e-3}
    monkeypatch.setattr(StepClock, "end_step", lambda self: seconds)
    order = one_f_one_b(1, 0)
    steps = 8
    expected = baseline(build_stages(names=("block",)), [order] * steps)
    with installed(build_manager(device_limit_bytes=8 * KIB, max_spilling_bytes=KIB)) as manager:
        manager.engine.rates = Rates(d2h_bytes_per_s=4e6, h2d_bytes_per_s=4e6)
        driver = Driver(build_stages(names=("block",)), announced=True)
        found, parts = [], []
        for step in range(steps):
            promised = manager.offload_summary_total_bytes
            parts.append([dict(handler.stays_from) for handler in manager.tracker.handlers.values()])
            found.append(driver.step(order))
            assert step == 0 or manager.stats.spill_bytes == promised
        assert any(any(own) for own in parts), "no plan kept a group in part"
    assert_same(expected, found)


def test_plan_made_by_hand_is_followed_until_the_next_step_has_ended() -> None:
    _, planner, chunks = timed_planner()
    step = seen(chunks, "F0 F1 B0 B1")
    step = dataclasses.replace(step, seconds=dict.fromkeys(step.actions, 1e-3))
    for _ in range(3):
        planner.after_step(step)
    timed = [(chunk.stays, dict(chunk.stays_from)) for chunk in chunks]
    planner.plan_now(step)
    by_hand = [(chunk.stays, dict(chunk.stays_from)) for chunk in chunks]
    assert by_hand != timed
    planner.after_step(step)
    assert [(chunk.stays, dict(chunk.stays_from)) for chunk in chunks] == timed
