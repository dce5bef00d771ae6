"""Random models, limits and interleavings on simulated lanes: whatever happens, offloading changes no bit and
keeps nothing.

For each program, after each of its actions and steps (tests/property/watch.py has the exact statements): the
gradients are bitwise those of a run without offloading; every saved tensor comes back with its bytes, size,
strides and dtype; no access is unordered; the caps and the device limit hold as far as nothing forced exceeds
them; every block is back, and nothing is held or in flight.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.property.programs import Program, play
from tests.property.strategies import programs
from tests.property.test_edges import TITLES

CHECKS = list(HealthCheck)  # large examples are the point


def test_any_interleaving_gives_the_gradients_of_a_run_without_offloading_and_leaves_nothing() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=60, derandomize=True, suppress_health_check=CHECKS)
    @given(programs())
    def explore(program: Program) -> None:
        said = play(program)
        seen.update(said.watch.seen)
        seen.update(said.device.waits)

    explore()
    happened = (
        # a program computes on one lane
        *(title for title in TITLES if title not in ("read elsewhere", "return")),
        "spilled",
        "kept",
        "restored",
        "prefetched",
        "stalled",
        "refused",
        "over the limit",
        "replayed",
    )
    assert [name for name in happened if not seen[name]] == [], "the programs were all of one kind"


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=CHECKS)
@given(programs())
def test_thousands_of_interleavings(program: Program) -> None:
    play(program)
