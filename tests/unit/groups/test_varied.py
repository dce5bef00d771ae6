"""Groups under a device limit in steps whose lengths and numbers of microbatches vary: one plan for the
typical step, followed by position."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from offload import ChunkOffloadHandler, OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from offload.groups import timed
from offload.groups.seen import SeenStep
from offload.groups.step_planner import StepPlanner
from offload.groups.timed import TimedPlan
from offload.ids import ChunkId
from offload.policy.actions import Action, GroupKey, GroupSize, Rates, one_f_one_b
from offload.policy.mixture import choose_keeps
from offload.policy.simulate import simulate

KIB = 1024
GROUPS, SLOTS, LIMIT = 8, 4, 400 * KIB
RATES = Rates(d2h_bytes_per_s=40e6, h2d_bytes_per_s=40e6)
SECONDS_A_BYTE = {"F": 1 / 80e6, "B": 2 / 80e6}
"""What a chunk saves takes twice its forward to copy out."""


class Steps:
    """A planner, and steps of chunks of so many units of length each."""

    def __init__(self) -> None:
        config = OffloadConfig(device_limit_bytes=LIMIT, piece_bytes=KIB)
        self.engine = OffloadEngine(config, device=SimDevice())
        self.engine.rates = RATES
        self.planner = StepPlanner(self.engine)
        self.chunks: dict[int, ChunkOffloadHandler] = {}
        self._seconds: dict[Action, float] | None = None

    def chunk(self, microbatch: int, length: int) -> ChunkOffloadHandler:
        chunk = self.chunks.setdefault(
            microbatch, ChunkOffloadHandler(1, engine=self.engine, chunk_id=ChunkId(0, microbatch))
        )
        chunk.reset()
        for letter in "abcdefgh":
            group = chunk.on_group_start_forward(letter)
            group.slot_bytes = tuple((slot, length * KIB) for slot in range(SLOTS))
            group.total_offload_bytes = group.logical_bytes = SLOTS * length * KIB
        return chunk

    def run(self, lengths: Sequence[int]) -> None:
        """A step, whose times are known at the end of the next."""
        chunks = [self.chunk(microbatch, length) for microbatch, length in enumerate(lengths)]
        actions = one_f_one_b(0, 4, len(chunks))
        self.planner.after_step(
            SeenStep(
                chunks=chunks,
                forward_order=chunks,
                backward_order=chunks,
                actions=actions,
                seconds=self._seconds,
            )
        )
        self._seconds = dict(zip(actions, compute_s(actions, lengths), strict=True))


def compute_s(actions: Sequence[Action], lengths: Sequence[int]) -> list[float]:
    chunk_bytes = [GROUPS * SLOTS * length * KIB for length in lengths]
    return [chunk_bytes[action.microbatch] * SECONDS_A_BYTE[action.kind] for action in actions]


def sizes_of(lengths: Sequence[int]) -> dict[tuple[int, int], list[GroupSize]]:
    """By slot."""
    return {
        (0, at): [GroupSize("", length * KIB) for _ in range(GROUPS * SLOTS)]
        for at, length in enumerate(lengths)
    }


def followed(steps: Steps, lengths: Sequence[int]) -> tuple[float, int]:
    """Seconds and peak of a simulated step that follows what the planner says now."""
    actions = one_f_one_b(0, 4, len(lengths))
    keeps = set()
    for at in range(len(lengths)):
        chunk = steps.chunks[at]
        first = {position: 0 for position in chunk.stays} | chunk.stays_from
        keeps |= {
            GroupKey((0, at), position * SLOTS + slot)
            for position, start in first.items()
            for slot in range(start, SLOTS)
        }
    window = steps.engine.limits.max_restoring_bytes
    found = simulate(
        actions,
        sizes_of(lengths),
        compute_s(actions, lengths),
        RATES,
        limit_bytes=LIMIT,
        keeps=frozenset(keeps),
        restoring_room_bytes=window,
    )
    return found.step_s, found.peak_bytes


def drawn(draws: random.Random) -> list[int]:
    return [draws.randint(4, 8) for _ in range(draws.randint(6, 8))]


def test_a_plan_by_position_is_near_hindsight_in_every_step_and_within_the_limit() -> None:
    """And nearer than a plan that knows no times, of the step before."""
    draws, ours, untimed = random.Random(5), Steps(), Steps()
    untimed.engine.rates = None
    ours_s = hindsight_s = untimed_s = 0.0
    for number, lengths in enumerate([[8] * 8, *(drawn(draws) for _ in range(14))]):
        if number > 9:
            step_s, peak_bytes = followed(ours, lengths)
            assert peak_bytes <= LIMIT
            ours_s += step_s
            untimed_s += followed(untimed, lengths)[0]
            actions = one_f_one_b(0, 4, len(lengths))
            hindsight_s += choose_keeps(
                actions, sizes_of(lengths), compute_s(actions, lengths), RATES, LIMIT, max_trials=100
            ).predicted_step_s
        ours.run(lengths)
        untimed.run(lengths)
    assert ours_s <= 1.01 * hindsight_s
    assert ours_s < untimed_s


def test_searches_are_few_and_a_chunk_beyond_the_plan_follows_the_one_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned: list[TimedPlan] = []
    search = timed.timed_plan
    monkeypatch.setattr(timed, "timed_plan", lambda *given: planned.append(search(*given)) or planned[-1])
    draws, steps = random.Random(5), Steps()
    for _ in range(20):
        steps.run(drawn(draws))
    assert 1 <= len(planned) <= 5
    assert len(planned[-1].parts) == 8
    steps.run([*drawn(draws)[:6], 6, 6, 6, 6])
    last = steps.chunks[7]
    assert (steps.chunks[9].stays, steps.chunks[9].stays_from) == (last.stays, last.stays_from)


def test_steps_that_settle_have_a_plan_of_their_own() -> None:
    draws, steps = random.Random(5), Steps()
    for _ in range(6):
        steps.run(drawn(draws))
    assert steps.planner._varied.lengths.vary
    assert not steps.planner._is_last
    for _ in range(12):
        steps.run([6] * 6)
    assert not steps.planner._varied.lengths.vary
    assert steps.planner._is_last


def test_other_groups_forget_what_was_seen() -> None:
    draws, steps = random.Random(5), Steps()
    for _ in range(6):
        steps.run(drawn(draws))
    chunk = steps.chunk(0, 6)
    chunk.groups[0].name = "other"
    seen = SeenStep(
        chunks=[chunk],
        forward_order=[chunk],
        backward_order=[chunk],
        actions=[Action("F", 0, 0), Action("B", 0, 0)],
        seconds=None,
    )
    steps.planner._varied.ended(seen)
    assert not steps.planner._varied.lengths.vary
    assert steps.planner._varied.plan(RATES, LIMIT) is None
