"""scripts/bench_conductor.py runs without a GPU, and both arms of each work have the same bits."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

import bench_conductor
from bench.conflicts import CONFLICTS, stalls_ms
from offload.device.sim import SimDevice
from offload.engine import OffloadEngine


@pytest.mark.slow
def test_a_work_is_printed_with_the_same_bits_in_both_arms(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    bench_conductor.main(["--tiny", "--work", "three", "--out", str(out)])
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("| three | "), printed
    (row,) = json.loads(out.read_text())["results"]
    assert row["bits"]
    assert row["ratio"] == pytest.approx(1.0, abs=0.01)  # by the virtual clock
    assert {"forward h2d", "forward d2h", "backward h2d", "optimizer d2h", "optimizer h2d"} <= set(
        row["moved"]
    )


@pytest.mark.req("S1-60")
@pytest.mark.parametrize("conflict", CONFLICTS)
def test_what_is_waited_for_stalls_at_most_half_as_long_as_without(conflict: str) -> None:
    """Each conflict on a simulated link, whose copies of a direction are first in, first out."""
    engine = OffloadEngine(device=SimDevice(executor="clock"))
    found = stalls_ms(engine, conflict, samples=1, scale=1024)
    assert 0 < found[True] <= found[False] / 2


def test_the_law_takes_what_is_longest_in_each_pass() -> None:
    compute = {"forward": 1.0, "backward": 0.0, "optimizer": 0.0}
    moved = Counter({("forward", "h2d"): 10**9, ("backward", "d2h"): 55 * 10**9})
    moved["optimizer", "h2d"] = moved["optimizer", "d2h"] = 55 * 10**9
    assert bench_conductor.law_seconds(compute, moved) == pytest.approx(1.0 + 1.0 + 1.1)
