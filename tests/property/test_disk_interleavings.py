"""Random models, limits and interleavings over a disk: whatever its threads do, no bit changes and nothing
stays behind. The statements are those of test_interleavings.py."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.property.layers import NBYTES
from tests.property.programs import Program, play
from tests.property.strategies import programs
from tests.property.test_interleavings import CHECKS

HERE = "."
"""A directory until the test gives its own."""


@st.composite
def over_a_disk(draw: st.DrawFn) -> Program:
    """The programs of test_interleavings.py; host memory holds a few tensors, so most lie in the file."""
    program = draw(programs())
    settings = program.settings
    config = replace(
        settings.config,
        min_offloaded_tensor_size=0,
        activation_offload_fraction=1.0,
        host_limit_bytes=draw(st.sampled_from([4096, 3 * 4096, 8 * 4096, 1 << 28])),
        disk_directory=HERE,
        disk_ahead_bytes=draw(st.sampled_from([None, 0, NBYTES, 10 * NBYTES])),
    )
    mode = draw(st.sampled_from(["late", "early", "random", "random"]))
    return replace(program, settings=replace(settings, config=config, disk=mode))


@pytest.mark.req("S4-22")
def test_over_a_disk_any_interleaving_gives_the_gradients_of_a_run_without_offloading(tmp_path: Path) -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=12, derandomize=True, suppress_health_check=CHECKS)
    @given(over_a_disk())
    def explore(program: Program) -> None:
        config = replace(program.settings.config, disk_directory=str(tmp_path))
        said = play(replace(program, settings=replace(program.settings, config=config)))
        seen.update(said.watch.seen)

    explore()

    happened = ("spilled", "restored", "prefetched", "refused", "written", "read", "on the disk")
    assert [name for name in happened if not seen[name]] == [], "the programs were all of one kind"


def test_over_a_disk_with_its_own_threads_no_bit_changes(tmp_path: Path) -> None:
    @settings(max_examples=4, derandomize=True, suppress_health_check=CHECKS)
    @given(over_a_disk())
    def explore(program: Program) -> None:
        config = replace(program.settings.config, disk_directory=str(tmp_path))
        play(replace(program, settings=replace(program.settings, config=config, disk=None)))

    explore()
    assert [*tmp_path.iterdir()] == []
