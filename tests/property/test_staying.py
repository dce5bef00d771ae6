"""Random programs whose steps come again, under plans that keep: what is taken for known is counted as it was
when it was judged.

The same program runs with every forward judged and with forwards taken for known. Gradients have the bits of
a run without offloading, the statements of tests/property/watch.py hold after each call, and each group looks
to the planner as it does in the other run, byte by byte.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload import OffloadConfig
from offload.groups import chunk as chunk_module
from offload.saved.staying import StayingSaves
from tests.property.layers import NBYTES
from tests.property.programs import Program, Run, Step
from tests.property.speakers import Offloaded, Plain, Settings
from tests.property.strategies import MODELS, legal_order, steps_of

RESERVED = 1 << 20  # no save is refused for want of memory, which grows when it can

configs = st.builds(
    OffloadConfig,
    min_offloaded_tensor_size=st.sampled_from([0, 1]),
    piece_bytes=st.sampled_from([1, 2 * NBYTES + 1, 1 << 20]),
    device_limit_bytes=st.sampled_from([None, None, 40 * NBYTES]),
    activation_offload_fraction=st.sampled_from([0.0, 0.0, 0.5]),
    host_reserve_bytes=st.just(RESERVED),
)


@st.composite
def repeated(draw: st.DrawFn) -> Program:
    stages = draw(MODELS)
    (step,) = draw(steps_of(len(stages), max_steps=1))
    engine = Settings(
        announced=draw(st.booleans()),
        executor=draw(st.sampled_from(["late", "random"])),
        config=draw(configs),
    )
    steps = [replace(step, seed=seed) for seed in range(4)]
    if draw(st.booleans()):
        steps.insert(
            3,
            Step(seed=7, actions=tuple(legal_order(len(stages), 1, "lifo", frozenset(), draw(st.randoms())))),
        )
    return Program(stages, draw(st.booleans()), tuple(steps), engine)


def looks(said: Offloaded) -> list[Any]:
    """How each group looks to the planner."""
    return [
        (
            handler.id,
            group.name,
            group.total_offload_bytes,
            group.logical_bytes,
            group.total_tensor_count,
            group.slot_bytes,
        )
        for handler in said.manager._handlers.values()
        for group in handler.groups
    ]


def run_judging(program: Program, judged_every: int, seen: Counter[str]) -> list[Any]:
    """The steps, bit by bit against those without offloading. Returns what each step looked like."""
    close = StayingSaves.close

    def counting(self: StayingSaves) -> None:
        if self._saves is not None:
            seen["known"] += sum(save is not None for save in self._saves[: len(self._handles)])
        close(self)

    plain = Run(program.stages, Plain(), program.trains_input)
    found = []
    with (
        mock.patch.object(chunk_module, "JUDGED_EVERY", judged_every),
        mock.patch.object(StayingSaves, "close", counting),
        Offloaded(program.settings, len(program.stages)) as said,
    ):
        run = Run(program.stages, said, program.trains_input)
        for step in program.steps:
            plain.step(step)
            run.step(step)
            assert all(one.equal(other) for one, other in zip(plain.results, run.results, strict=True)), (
                "a gradient has other bits"
            )
            plain.results.clear()
            run.results.clear()
            found.append((said.manager.stats.saved, looks(said)))
        del run
    seen.update(said.watch.seen)
    return found


def explore(examples: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(max_examples=examples, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    @given(repeated())
    def run(program: Program) -> None:
        before = seen["known"]
        judged = run_judging(program, 1, seen)
        assert seen["known"] == before
        assert judged == run_judging(program, 1000, seen)

    run()
    return seen


def test_saves_that_are_known_are_counted_as_when_they_were_judged() -> None:
    seen = explore(8)
    assert [name for name in ("known", "kept", "spilled", "restored") if not seen[name]] == []


@pytest.mark.slow
def test_hundreds_of_programs_whose_steps_come_again() -> None:
    explore(600)
