"""Pipeline schedules announced to the manager, with the order foretold rightly, wrongly, in part or not at
all.

An order is a hint: it may change time, never a bit. And the right one does not cost time: with room enough,
compute waits no longer for copies than it does without any prefetch.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import OffloadConfig
from tests.property.layers import NBYTES, OPS, ActionKey, Op
from tests.property.programs import Program, Step, play
from tests.property.speakers import Settings
from tests.property.strategies import MODELS, STYLES, configs, legal_order, models

CHECKS = list(HealthCheck)
Order = tuple[ActionKey, ...]


def foretold(actions: Order, how: str, pick: random.Random) -> Order | None:
    """An order as a caller may give it. "other" is of another step, with chunks that do not come and without
    some that do."""
    if how == "none":
        return None
    known = list(actions)
    if how == "shuffled":
        pick.shuffle(known)
    elif how == "beginning":
        del known[pick.randint(0, len(known)) :]
    elif how == "holes":
        known = [action for action in known if pick.random() < 0.6]
    elif how == "other":
        known = [(kind, stage, microbatch + pick.randint(0, 2)) for kind, stage, microbatch in known]
    return tuple(known)


@st.composite
def scheduled(
    draw: st.DrawFn, stages: int, hows: tuple[str, ...], styles: tuple[str, ...] = STYLES
) -> tuple[Step, ...]:
    """Steps of one schedule whose number of microbatches changes."""
    style = draw(st.sampled_from(styles))
    steps = []
    for seed in range(draw(st.integers(1, 4))):
        microbatches = draw(st.integers(1, 5))
        pick = random.Random(draw(st.integers(0, 1 << 16)))
        chunks = [(stage, microbatch) for stage in range(stages) for microbatch in range(microbatches)]
        rate = {"zero-bubble": 1.0, "random": 0.3 if "zero-bubble" in styles else 0.0}.get(style, 0.0)
        split = frozenset(chunk for chunk in chunks if pick.random() < rate)
        actions = tuple(legal_order(stages, microbatches, style, split, pick))
        steps.append(Step(seed, actions, foretold=foretold(actions, draw(st.sampled_from(hows)), pick)))
    return tuple(steps)


@st.composite
def schedules(draw: st.DrawFn) -> Program:
    stages = draw(MODELS)
    steps = draw(scheduled(len(stages), ("right", "shuffled", "beginning", "holes", "other", "none")))
    engine = Settings(
        executor=draw(st.sampled_from(["late", "random", "clock", "early"])),
        seed=draw(st.integers(0, 1 << 16)),
        gb_s=draw(st.sampled_from([50.0, 0.1])),
        config=draw(configs),
    )
    return Program(stages, draw(st.booleans()), steps, engine)


@settings(max_examples=32, derandomize=True, suppress_health_check=CHECKS)
@given(schedules())
def test_any_schedule_gives_the_same_gradients_whatever_order_was_foretold(program: Program) -> None:
    play(program)


@pytest.mark.slow
@settings(max_examples=2500, suppress_health_check=CHECKS)
@given(schedules())
def test_thousands_of_schedules(program: Program) -> None:
    play(program)


# -- the right order costs no time ---------------------------------------------------------------------------

# What is fetched ahead and then not read, or read again later, costs link time that a fetch on demand does
# not. Here neither happens: every operation takes the last value, so no branch is dead, and none reads twice.
ONCE = [
    kind
    for kind in OPS
    if kind not in ("twice", "views", "sparse_head", "in_forward", "penalty", "checkpoint")
]
CALM = models(
    st.builds(
        Op, st.sampled_from([*ONCE, "region", "region_wide", "region_head"]), st.just(0), st.integers(0, 3)
    ),
    flips=False,
)


@st.composite
def calm_schedules(draw: st.DrawFn) -> Program:
    """Whole backwards that read every saved tensor once, foretold rightly, with room for all that is fetched
    and little for what leaves."""
    stages = draw(CALM)
    steps = draw(scheduled(len(stages), ("right",), ("gpipe", "1f1b", "lifo", "random")))
    config = OffloadConfig(
        min_offloaded_tensor_size=0,
        piece_bytes=draw(st.sampled_from([1, NBYTES, 3 * NBYTES, 1 << 20])),
        max_spilling_bytes=draw(st.sampled_from([1, NBYTES, 3 * NBYTES])),
        max_restoring_bytes=1 << 30,
        host_limit_bytes=1 << 28,
    )
    engine = Settings(
        executor="clock",
        gb_s=draw(st.sampled_from([0.01, 0.1, 1.0])),
        compute_s=draw(st.sampled_from([1e-7, 1e-6])),
        config=config,
    )
    return Program(stages, draw(st.booleans()), steps, engine)


def stall_s(program: Program, max_restoring_bytes: int) -> float:
    config = replace(program.settings.config, max_restoring_bytes=max_restoring_bytes)
    return play(replace(program, settings=replace(program.settings, config=config))).device.stall_s


def test_with_the_right_order_compute_waits_no_longer_than_without_prefetch() -> None:
    ahead_s, on_demand_s = 0.0, 0.0

    @settings(max_examples=24, derandomize=True, suppress_health_check=CHECKS)
    @given(calm_schedules())
    def explore(program: Program) -> None:
        nonlocal ahead_s, on_demand_s
        ahead, on_demand = stall_s(program, 1 << 30), stall_s(program, 0)
        assert ahead <= on_demand * (1 + 1e-9)  # sums of the same times in another order
        ahead_s += ahead
        on_demand_s += on_demand

    explore()
    assert ahead_s < on_demand_s, "no prefetch ever helped"
