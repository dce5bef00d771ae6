"""The ranges of one storage against a model that keeps every byte's accesses by itself."""

from __future__ import annotations

import random

import pytest
import torch

from offload.device._sim_bytes import TrackedBytes
from offload.device._sim_clock import Operation, SimLanes

SIZE = 40


def tracked_of(storage: torch.UntypedStorage, lanes: SimLanes) -> TrackedBytes:
    return TrackedBytes(storage, lanes.compute, lambda _: None, host=False)


@pytest.mark.parametrize("seed", range(20))
def test_ranges_remember_what_each_byte_remembers(seed: int) -> None:
    rng = random.Random(seed)
    lanes = SimLanes(lags=False)
    storage = torch.UntypedStorage(SIZE)
    tracked = tracked_of(storage, lanes)
    write: list[Operation | None] = [None] * SIZE
    reads: list[dict[str, Operation]] = [{} for _ in range(SIZE)]
    for _ in range(300):
        start = rng.randrange(SIZE)
        end = rng.randint(start, SIZE)
        writing = rng.random() < 0.4
        expected = {(op, True) for op in write[start:end] if op} | {
            (op, False) for r in reads[start:end] for op in r.values() if writing
        }
        assert set(tracked.conflicts(start, end, writing=writing)) == expected
        lane = rng.choice(lanes.all_lanes)
        operation = Operation(lane, "access", end - start)
        lane.clock[lane.index] += 1
        tracked.stamp(start, end, operation, writing=writing, floor=[0, 0, 0, 0])
        for at in range(start, end):
            if writing:
                write[at], reads[at] = operation, {}
            else:
                reads[at][lane.name] = operation


def test_ranges_stay_few_once_the_host_has_seen_them_finish() -> None:
    rng = random.Random(0)
    lanes = SimLanes(lags=False)
    storage = torch.UntypedStorage(1 << 20)
    tracked = tracked_of(storage, lanes)
    most = 0
    for _ in range(5000):
        start = rng.randrange((1 << 20) - 4096)
        operation = Operation(lanes.d2h, "copy", 1)
        lanes.d2h.clock[lanes.d2h.index] += 1
        floor = [0, max(0, lanes.d2h.issued - 10), 0, 0]  # ten are in flight
        tracked.stamp(start, start + rng.randint(1, 4096), operation, writing=rng.random() < 0.5, floor=floor)
        most = max(most, len(tracked.ranges))
    assert most <= 65 + 2  # one look is due above 64, and an access splits at most two ranges


def test_a_range_of_no_bytes_touches_nothing() -> None:
    lanes = SimLanes(lags=False)
    storage = torch.UntypedStorage(SIZE)
    tracked = tracked_of(storage, lanes)
    tracked.stamp(5, 5, Operation(lanes.d2h, "copy", 0), writing=True, floor=[0])
    assert list(tracked.conflicts(0, 1 << 62, writing=True)) == []
