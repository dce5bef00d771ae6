"""From what a step was seen to do to what stays in the next: the glue; the rules themselves are in
tests/unit/policy/test_keeps.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from offload import ChunkOffloadHandler, OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from offload.groups.seen import SeenStep
from offload.groups.step_planner import StepPlanner
from offload.ids import ChunkId
from offload.memory.arena import HostArena
from offload.policy.actions import Rates
from offload.policy.menu import Block, Level
from offload.policy.mixture import MixedPlan, choose_mixture
from offload.telemetry.records import StepStats
from tests.parsed import parse_action
from tests.unit.groups.stack import Driver, build_manager, build_stages, gpipe, installed, one_f_one_b

KIB = 1024


def engine_of(**config: Any) -> OffloadEngine:
    return OffloadEngine(OffloadConfig(**config), device=SimDevice())


def planner_of(engine: OffloadEngine) -> StepPlanner:
    return StepPlanner(engine)


def chunks_of(engine: OffloadEngine, *names: str, nbytes: int = KIB) -> list[ChunkOffloadHandler]:
    """A chunk for each string, with a group of `nbytes` for each letter."""
    chunks = []
    for microbatch, letters in enumerate(names):
        chunk = ChunkOffloadHandler(1, engine=engine, chunk_id=ChunkId(0, microbatch))
        for letter in letters:
            group = chunk.on_group_start_forward(letter)
            group.total_offload_bytes = group.logical_bytes = nbytes
        chunks.append(chunk)
    return chunks


def seen(chunks: list[ChunkOffloadHandler], order: str) -> SeenStep:
    """`order`: actions such as "F0 F1 B1 B0", by microbatch."""
    actions = [parse_action(f"0{text}") for text in order.split()]
    forwards = [chunks[microbatch] for kind, _, microbatch in actions if kind == "F"]
    backwards = list(dict.fromkeys(chunks[microbatch] for kind, _, microbatch in actions if kind != "F"))
    return SeenStep(
        chunks=chunks, forward_order=forwards, backward_order=backwards, actions=actions, seconds=None
    )


def stays(chunks: list[ChunkOffloadHandler]) -> list[set[int]]:
    return [set(chunk.stays) for chunk in chunks]


@pytest.mark.req("S2-39", "S2-40")
def test_last_group_of_each_name_stays_in_the_first_chunk_to_run_backward() -> None:
    engine = engine_of()
    planner, chunks = planner_of(engine), chunks_of(engine, "abab", "abab")
    assert planner.after_step(seen(chunks, "F0 F1 B1 B0"))
    assert stays(chunks) == [set(), {2, 3}]
    assert not planner.is_warmup


@pytest.mark.req("S2-40")
def test_margin_reaches_into_the_next_chunk_for_a_name_that_the_first_has_not() -> None:
    engine = engine_of()
    planner, chunks = planner_of(engine), chunks_of(engine, "ab", "aa")
    planner.after_step(seen(chunks, "F0 F1 B1 B0"))
    assert stays(chunks) == [{1}, {1}]


@pytest.mark.req("S2-41")
def test_summary_counts_forwards_up_to_the_first_chunk_to_run_backward() -> None:
    engine = engine_of()
    planner, chunks = planner_of(engine), chunks_of(engine, "aab", "aab", "aab")
    planner.after_step(seen(chunks, "F0 F1 B0 F2 B1 B2"))
    assert planner.summary == {"a": KIB, "b": 0}
    planner.after_step(seen(chunks, "F0 F1 F2 B2 B1 B0"))
    assert planner.summary == {"a": 5 * KIB, "b": 2 * KIB}


@pytest.mark.req("S2-33")
def test_step_without_a_backward_plans_nothing() -> None:
    engine = engine_of()
    planner, chunks = planner_of(engine), chunks_of(engine, "ab")
    assert not planner.after_step(seen(chunks, "F0"))
    assert planner.is_warmup
    assert (planner.summary, stays(chunks)) == ({}, [set()])


def test_warm_up_ends_once_and_a_new_shape_or_order_or_setting_is_planned_anew() -> None:
    engine = engine_of()
    planner, chunks = planner_of(engine), chunks_of(engine, "aa", "aa")
    assert planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{1}, set()]
    for chunk in chunks:
        chunk.stays = frozenset({99})
    assert not planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{99}, {99}]  # nothing is new, so nothing is planned
    assert not planner.after_step(seen(chunks, "F0 F1 B1 B0"))
    assert stays(chunks) == [set(), {1}]
    chunks[1].groups[0].logical_bytes += 1
    planner.after_step(seen(chunks[1:], "F0 B0"))
    assert stays(chunks) == [set(), {1}]
    planner.settings = OffloadConfig(activation_offload_fraction=0.0)
    planner.after_step(seen(chunks, "F0 F1 B1 B0"))
    assert stays(chunks) == [{0, 1}, {0, 1}]


@pytest.mark.req("S2-104")
def test_fraction_and_bytes_of_a_rank_are_added_to_the_margin() -> None:
    engine = engine_of(activation_offload_fraction=0.5)
    planner, chunks = planner_of(engine), chunks_of(engine, "aaaa", "aaaa")
    planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{2, 3}, {2, 3}]  # of three and of four eligible groups the first two leave
    engine = engine_of(pp_rank=2, delta_offload_bytes_across_pp_ranks=KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "aaaa", "aaaa")
    planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{1, 2, 3}, set()]


def test_under_a_device_limit_every_chunk_keeps_as_much_of_its_end_as_fits() -> None:
    engine = engine_of(device_limit_bytes=7 * KIB, max_spilling_bytes=KIB, max_restoring_bytes=KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "aaaa", "aaaa")
    planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{1, 2, 3}, {2, 3}]  # five of eight, beside the two rooms
    planner.after_step(seen(chunks, "F0 B0 F1 B1"))
    assert stays(chunks) == [{0, 1, 2, 3}, {0, 1, 2, 3}]  # only one is alive at a time
    # a cap on copies under way that the limit implies has no more room than where there is none
    engine = engine_of(device_limit_bytes=7 * KIB, max_spilling_bytes=7 * KIB, max_restoring_bytes=KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "aaaa", "aaaa")
    planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{2, 3}, {2, 3}]


def test_where_all_fits_the_device_limit_nothing_leaves_and_needs_room() -> None:
    engine = engine_of(device_limit_bytes=8 * KIB, max_spilling_bytes=KIB, max_restoring_bytes=KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "aaaa", "aaaa")
    planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{0, 1, 2, 3}, {0, 1, 2, 3}]


@pytest.mark.parametrize(
    "order",
    [
        "F0 F0 F1 B0 B1",  # a forward run again after an exception
        "F0 F1 B0 B1 B0",  # a backward taken up twice
        "B1 F0 F1 B0 B1",  # a read of what was saved before
        "F0 F1 I0 I1 W0 W1",
        "F0 F1 I0 B0 B1",
        "F0 F1 I0 B1",  # a weight half that never came
        "F0 B0 F0 B0 F1 B1",
    ],
)
def test_any_order_has_a_plan_under_a_limit_and_without(order: str) -> None:
    for limit in (None, 0, 3 * KIB, 100 * KIB):
        engine = engine_of(device_limit_bytes=limit)
        planner, chunks = planner_of(engine), chunks_of(engine, "abab", "ab")
        planner.after_step(seen(chunks, order))
        for chunk, kept in zip(chunks, stays(chunks), strict=True):
            assert kept <= set(range(len(chunk.groups)))


def test_step_that_an_exception_cut_short_is_not_planned_for() -> None:
    """It saved less than a whole step, so a plan for it kept more: the next whole step passed the device
    limit, and where memory had run out once it ran out again."""
    engine = engine_of(device_limit_bytes=8 * KIB, max_spilling_bytes=KIB, max_restoring_bytes=KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "aaaa", "aaaa", "aaaa")
    whole = "F0 F1 F2 B0 B1 B2"
    planner.after_step(seen(chunks, whole))
    planned = stays(chunks)
    assert planned == [{2, 3}] * 3  # six of twelve, beside the two rooms
    for cut in ("F0 F1 F2 B0", "F0 F1 F2 B0 B1", "F0 F1 F2 B0 B1"):  # chunk 2 was never read
        assert not planner.after_step(seen(chunks, cut))
        assert stays(chunks) == planned
    planner.after_step(seen(chunks, whole))
    assert stays(chunks) == planned


def test_step_with_fewer_microbatches_is_planned_for_when_it_comes_again() -> None:
    engine = engine_of(device_limit_bytes=6 * KIB, max_spilling_bytes=KIB, max_restoring_bytes=KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "aaaa", "aaaa")
    planner.after_step(seen(chunks, "F0 B0 F1 B1"))
    fewer = chunks[:1]
    fewer[0].stays = frozenset({99})
    for _ in range(2):
        planner.after_step(seen(fewer, "F0 B0"))
        assert stays(fewer) == [{99}], "it looks like the start of the planned step"
        planner.after_step(seen(chunks, "F0 B0 F1 B1"))
    planner.after_step(seen(fewer, "F0 B0"))
    planner.after_step(seen(fewer, "F0 B0"))
    assert stays(fewer) == [{0, 1, 2, 3}]


class _Held:
    """A planner over an arena of 4 KiB registrations, told of steps that lent and refused so much at most."""

    def __init__(self) -> None:
        self.engine = engine_of()
        self.engine.arena = HostArena(
            self.engine.device,
            budget=self.engine.arena.budget,
            slab_bytes=16 * KIB,
            registration_bytes=4 * KIB,
        )
        self.planner = planner_of(self.engine)
        self.trims = 0
        self.engine.arena.reserve(64 * KIB)

    def run(self, lent_bytes: int, missing_bytes: int = 0, *, steps: int = 6, backward: bool = True) -> int:
        """Equal steps, of which the first lacked `missing_bytes`; what is held after them. backward: False
        for evaluations."""
        arena = self.engine.arena
        chunks = chunks_of(self.engine, "aa", nbytes=lent_bytes)
        for number in range(steps):
            missing = missing_bytes if number == 0 else 0
            arena.reserve(lent_bytes + missing)
            before = arena.held_bytes
            self.engine.last_stats = StepStats(
                step=0,
                refused=int(missing > 0),
                refused_bytes=missing,
                host_bytes_lent_peak=lent_bytes,
                host_bytes_wanted_peak=lent_bytes + missing,
            )
            self.planner.after_step(seen(chunks, "F0 B0" if backward else "F0"))
            self.trims += arena.held_bytes < before
        return arena.held_bytes


def test_host_memory_that_a_longer_step_needs_again_is_not_given_back_a_second_time() -> None:
    """Each run of equal steps trimmed to its own need: short and long sequences in turn unpinned and pinned
    the difference each time, and on a GPU the long ones found no block until the thread that pins had caught
    up."""
    run = _Held().run
    assert run(8 * KIB) == 12 * KIB, "reserved and never used: given back"
    assert run(32 * KIB) == 32 * KIB
    assert run(8 * KIB) == 32 * KIB
    assert run(36 * KIB, missing_bytes=12 * KIB) == 48 * KIB, (
        "its first step, still under the plan of another, wanted more than the others"
    )
    assert run(8 * KIB) == 48 * KIB


def test_host_memory_that_one_odd_step_wanted_goes_back_when_it_has_not_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One evaluation, or one step that was refused a lot, kept its memory pinned to the end of the
    training."""
    monkeypatch.setattr("offload.groups.step_planner.REMEMBERED_STEPS", 20)
    held = _Held()
    assert held.run(8 * KIB) == 12 * KIB
    assert held.run(40 * KIB, steps=1, backward=False) == 40 * KIB
    assert held.run(8 * KIB, steps=20) == 40 * KIB, "remembered"
    assert held.run(8 * KIB, steps=1) == 12 * KIB, "forgotten, in the middle of a run of equal steps"
    assert held.trims == 2


@pytest.mark.parametrize("period", [2, 7, 20])
@pytest.mark.parametrize("backward", [False, True])
def test_turns_of_training_and_evaluation_never_give_back_what_the_other_needs(
    period: int, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.groups.step_planner.REMEMBERED_STEPS", 20)
    held = _Held()
    held.run(8 * KIB)
    for _ in range(200 // period):
        held.run(40 * KIB, steps=1, backward=backward)
        assert held.run(8 * KIB, steps=period - 1) == 40 * KIB
    assert held.trims == 1, "the first time"


def test_lengths_that_differ_a_little_give_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of random lengths differ a little: what went back would be refused soon."""
    monkeypatch.setattr("offload.groups.step_planner.REMEMBERED_STEPS", 20)
    held = _Held()
    held.run(56 * KIB)
    assert held.run(64 * KIB, steps=1, backward=False) == 64 * KIB
    assert held.run(56 * KIB, steps=60) == 64 * KIB


def test_plan_by_hand_needs_no_complete_step() -> None:
    engine = engine_of()
    planner, chunks = planner_of(engine), chunks_of(engine, "ab")
    planner.plan_now(seen(chunks, "F0"))
    assert not planner.is_warmup
    assert planner.summary == {}


def test_limit_holds_when_the_order_changes_between_steps() -> None:
    """A plan made for one forward, one backward keeps more of each chunk than fits when all forwards come
    first: what stays is bounded whatever a plan keeps, and the rest leaves."""
    limit = 40 * KIB
    with installed(
        build_manager(device_limit_bytes=limit, max_spilling_bytes=4 * KIB, max_restoring_bytes=4 * KIB)
    ) as manager:
        driver = Driver(build_stages(), announced=True)
        peaks = []
        for order in [one_f_one_b(6, 1)] * 3 + [gpipe(6)] * 2:
            driver.step(order)
            peaks.append(manager.stats.device_bytes_peak)
        assert max(peaks[2:]) <= limit


def known_plan(kept: Mapping[int, int], saved: int = 4 * KIB, *, peak: int = 6 * KIB) -> MixedPlan:
    """Of chunks that save `saved` each: by microbatch, bytes of its end that stay."""
    actions = [parse_action(f"0{text}") for text in ("F0", "F1", "B1", "B0")]
    actions = [action for action in actions if action.microbatch in kept]
    block = Block(menu=(Level("plain", saved, 0.0),), forward_s=1.0, backward_s=1.0)
    rates = Rates(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6)
    plan = choose_mixture(actions, {(0, at): [block] for at in kept}, rates, 2 * saved, max_trials=1)
    return replace(
        plan,
        kept_bytes={(0, at): float(nbytes) for at, nbytes in kept.items()},
        restoring_room_bytes=512,
        half_room_bytes=256,
        predicted=replace(plan.predicted, peak_bytes=peak),
    )


def test_what_another_search_has_found_is_followed_until_times_are_known() -> None:
    engine = engine_of(device_limit_bytes=6 * KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "abab", "abab")
    planner.start_from(known_plan({0: 2 * KIB, 1: 3 * KIB}), 5 * KIB)
    assert (engine.limits.kept_limit_bytes, engine.limits.half_room_bytes) == (5 * KIB, 256)
    planner.after_step(seen(chunks, "F0 F1 B1 B0"))
    assert stays(chunks) == [{2, 3}, {1, 2, 3}]
    assert (engine.limits.max_restoring_bytes, engine.limits.half_room_bytes) == (512, 256)
    # another one, for steps of the same shape
    planner.start_from(known_plan({0: KIB, 1: 4 * KIB}), 5 * KIB)
    planner.after_step(seen(chunks, "F0 F1 B1 B0"))
    assert stays(chunks) == [{3}, {0, 1, 2, 3}]
    # a step of another order holds other chunks at once: what stays leaves room for what comes and goes
    planner.after_step(seen(chunks, "F0 F1 B0 B1"))
    assert stays(chunks) == [{2, 3}, {2, 3}]


def test_where_the_limit_falls_below_what_another_search_has_found_so_much_less_stays() -> None:
    engine = engine_of(device_limit_bytes=6 * KIB)
    planner, chunks = planner_of(engine), chunks_of(engine, "abab", "abab")
    planner.start_from(known_plan({0: 2 * KIB, 1: 3 * KIB}), 5 * KIB)
    step = seen(chunks, "F0 F1 B1 B0")
    planner.after_step(step)
    for limit_bytes, most_bytes in ((7 * KIB, 7 * KIB), (5 * KIB, 4 * KIB)):
        engine.limits.follow(replace(engine.config, device_limit_bytes=limit_bytes))
        planner.limits_changed(step)
        assert engine.limits.kept_limit_bytes == most_bytes
        assert (engine.limits.max_restoring_bytes, engine.limits.half_room_bytes) == (512, 256)
    assert stays(chunks) == [{2, 3}, {1, 2, 3}]


def test_the_first_groups_of_a_chunk_leave_until_what_is_left_stays() -> None:
    """Of a step that nobody has seen: its groups have other names than those of the step before."""
    manager = build_manager(device_limit_bytes=1 << 20)
    with installed(manager):
        driver = Driver(build_stages(layers=4, names=("block",)), announced=True)
        driver.step(gpipe(1))
        saved_bytes = manager.stats.saved_bytes
        plan = known_plan({0: saved_bytes // 2}, saved_bytes, peak=saved_bytes)
        manager.follower.start_from(plan, saved_bytes)
        driver.step(gpipe(1))
        assert (manager.stats.spill_bytes, manager.stats.kept_bytes) == (saved_bytes // 2,) * 2
        manager.follower.start_from(None)
        assert all(chunk.first_leave_bytes is None for chunk in manager.tracker.handlers.values())


def test_nothing_that_a_plan_kept_stays_in_the_step_after_it() -> None:
    """What leaves then is of other blocks, whose groups have the same places."""
    manager = build_manager(device_limit_bytes=1 << 20)
    with installed(manager):
        driver = Driver(build_stages(layers=4, names=("block",)), announced=True)
        driver.step(gpipe(1))
        saved_bytes = manager.stats.saved_bytes
        manager.follower.start_from(known_plan({}, saved_bytes, peak=saved_bytes), saved_bytes)
        driver.step(gpipe(1))
        assert manager.stats.kept_bytes
        limits = manager.engine.limits
        limits.follow(replace(manager.engine.config, device_limit_bytes=None))
        manager.follower.start_from(None)
        assert limits.max_restoring_bytes == 2 * manager.engine.config.piece_bytes, "not a GB ahead"
        driver.step(gpipe(1))
        assert (manager.stats.spill_bytes, manager.stats.kept_bytes) == (saved_bytes, 0)
