"""Plans by parts of groups from timed steps, over random models: other steps come in between, and no bit
changes.

A program runs one kind of step over and over, which is what a timed plan needs, and now and then another: an
evaluation, a step whose backwards do not all come, another number of microbatches. After enough equal steps
the plan has settled, whatever it kept on the way.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import OffloadConfig
from offload.groups import step_planner
from offload.groups.timed import TimedPlan
from offload.policy.actions import Rates
from tests.property.layers import NBYTES
from tests.property.programs import Program, Step, play
from tests.property.speakers import Settings
from tests.property.strategies import STYLES, legal_order, models

CHECKS = list(HealthCheck)
STEADY = models(flips=False)
TO_SETTLE = 12
"""Equal steps: eight until steps count as alike again, two until times are known, a timed one, and one under
its plan."""


def other_step(steady: Step, how: str, stages: int, pick: random.Random) -> Step:
    if how == "evaluation":
        return replace(
            steady,
            actions=tuple(
                ("E", stage, microbatch) for kind, stage, microbatch in steady.actions if kind == "F"
            ),
        )
    if how == "cut short":
        actions = steady.actions[: pick.randint(1, len(steady.actions))]
        read = {action[1:] for action in actions if action[0] in "BW"}
        return replace(
            steady,
            actions=actions,
            leftover=frozenset(action[1:] for action in actions if action[1:] not in read),
        )
    return replace(steady, actions=tuple(legal_order(stages, pick.randint(1, 3), "1f1b", frozenset(), pick)))


@st.composite
def steady_programs(draw: st.DrawFn) -> Program:
    stages = draw(STEADY)
    pick = random.Random(draw(st.integers(0, 1 << 16)))
    style = draw(st.sampled_from(STYLES))
    microbatches = draw(st.integers(1, 3))
    chunks = [(stage, microbatch) for stage in range(len(stages)) for microbatch in range(microbatches)]
    split = frozenset(chunks) if style == "zero-bubble" else frozenset()
    steady = Step(draw(st.integers(0, 7)), tuple(legal_order(len(stages), microbatches, style, split, pick)))
    steps: list[Step] = []
    for how in draw(
        st.lists(
            st.sampled_from(["same", "same", "same", "evaluation", "cut short", "other"]),
            min_size=3,
            max_size=8,
        )
    ):
        steps.append(steady if how == "same" else other_step(steady, how, len(stages), pick))
    config = OffloadConfig(
        min_offloaded_tensor_size=draw(st.sampled_from([0, 64])),
        piece_bytes=draw(st.sampled_from([1, NBYTES, 2 * NBYTES])),
        device_limit_bytes=draw(st.sampled_from([6, 20, 30, 50])) * NBYTES,
        max_spilling_bytes=draw(st.sampled_from([None, NBYTES])),
        max_restoring_bytes=draw(st.sampled_from([None, None, 0, NBYTES, 3 * NBYTES])),
        host_limit_bytes=draw(st.sampled_from([1 << 28, 1 << 28, 8 * 4096])),
        activation_offload_fraction=draw(st.sampled_from([1.0, 1.0, 0.5])),
    )
    bytes_per_s = draw(st.sampled_from([1e8, 1e9, 1e10]))
    engine = Settings(
        executor=draw(st.sampled_from(["clock", "clock", "late", "random", "early"])),
        seed=draw(st.integers(0, 1 << 16)),
        gb_s=bytes_per_s / 1e9,
        compute_s=1e-6,
        rates=Rates(d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s),
        config=config,
    )
    return Program(stages, draw(st.booleans()), (*steps, *[steady] * TO_SETTLE), engine)


def explored(program: Program, seen: Counter[str]) -> None:
    said = play(program)
    seen.update(said.watch.seen)
    planner = said.manager._planner
    assert planner._steady_steps >= 2, "no two steps of one kind looked the same"
    if planner._is_last:
        assert planner.is_settled
        seen["from times"] += 1


def test_steps_under_a_timed_plan_and_others_in_between_have_the_same_bits_and_the_plan_settles() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=4, derandomize=True, suppress_health_check=CHECKS)
    @given(steady_programs())
    def explore(program: Program) -> None:
        explored(program, seen)

    plans: list[TimedPlan] = []
    search = step_planner.timed_plan
    with patch.object(step_planner, "timed_plan", lambda *given: plans.append(search(*given)) or plans[-1]):
        explore()
    assert any(stays.from_slot for plan in plans for stays in plan.parts.values()), "no group stays in part"
    happened = ("from times", "spilled", "kept", "restored", "prefetched")
    assert [name for name in happened if not seen[name]] == [], "the programs were all of one kind"


@pytest.mark.slow
@settings(max_examples=1000, suppress_health_check=CHECKS)
@given(steady_programs())
def test_a_thousand_programs(program: Program) -> None:
    explored(program, Counter())
