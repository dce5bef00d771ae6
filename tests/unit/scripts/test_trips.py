"""Paths that run often take no more calls than they did."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

MOST = {
    "pack of a tensor that moves": 29,
    "pack of a tensor that stays": 2,
    "commit of its group": 11,
    "read that fetches": 33,
    "step_end, of two groups": 279,
    "forward of a streamed block": 116,
    "step of HybridDeviceOptimizer, one bucket": 112,
}
"""Calls of each trip, with Python 3.11. Lower a figure with what lowers it; raise one with its reason."""


def test_trips_take_no_more_calls() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "trips.py"), "--json"]
    rows = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    found = {row["trip"]: row["calls"] for row in rows}
    assert found.keys() == MOST.keys()
    assert {trip: calls for trip, calls in found.items() if calls > MOST[trip]} == {}
    assert found["pack of a tensor that moves"] > 10, "it was copied"
    assert all(row["files"] <= row["calls"] for row in rows)
