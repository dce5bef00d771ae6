"""How many Python functions of the engine one trip of a saved tensor runs through.

No clock, so the counts are the same on every machine. A trip is one call from outside: of the pack hook, of
the unpack hook, of a mark, of a commit's hook in the backward. Counted are the calls of functions of
offload/ and of the constructors that its dataclasses generate, in the fifth step; those of offload/device/
are counted beside, and here they are an idle device's. A Python whose comprehensions are no calls may count
fewer.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import (
    OffloadConfig,
    OffloadEngine,
    PipelineOffloadManager,
    group_commit,
    group_start,
    offload_hooks,
)
from offload.saved.filters import TREES
from tests.unit.groups.idle import IdleDevice
from tests.unit.groups.stack import HELD, installed, leaf

AT_MOST = {
    "pack and spill": 25,
    "unpack": 12,
    "commit": 11,
    "backward mark, two restores": 30,
    "pack and spill, four a piece": 19,
    "unpack, four a piece": 9,
    "commit, four a piece": 11,
    "backward mark, two restores, four a piece": 20,
}
DEVICE_AT_MOST = {"pack and spill": 14, "unpack": 5, "commit": 0, "backward mark, two restores": 15}

GROUPS, PER_GROUP = 12, 4
STEPS = 5
FOLDER = os.path.dirname(offload.__file__) + os.sep
DEVICE = FOLDER + "device" + os.sep
IDLE = sys.modules[IdleDevice.__module__].__file__
GENERATED = "<string>"  # of a dataclass's constructor; one that torch calls on the way counts too


@dataclass
class Trip:
    calls: int = 0
    device_calls: int = 0
    spilled: int = 0
    restored: int = 0


class Tracer:
    """The trips of what runs inside `tracing`, by the name of the function that was called from outside."""

    def __init__(self, manager: PipelineOffloadManager) -> None:
        self.trips: dict[str, list[Trip]] = defaultdict(list)
        self._manager = manager
        self._outermost: FrameType | None = None
        self._trip = Trip()

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call":
            own = (path.startswith(FOLDER) and not path.startswith(DEVICE)) or path == GENERATED
            if self._outermost is None:
                if not own or path == GENERATED:
                    return
                self._outermost, self._trip = frame, Trip(0, 0, *self._moved())
            self._trip.calls += own
            self._trip.device_calls += path == IDLE
        elif event == "return" and frame is self._outermost:
            spilled, restored = self._moved()
            trip = Trip(
                self._trip.calls,
                self._trip.device_calls,
                spilled - self._trip.spilled,
                restored - self._trip.restored,
            )
            self.trips[self._name(frame)].append(trip)
            self._outermost = None

    def _moved(self) -> tuple[int, int]:
        counts = self._manager.engine.transfers.counts
        return counts.spilled, counts.restored

    @staticmethod
    def _name(frame: FrameType) -> str:
        function = frame.f_locals.get("function")  # of an untraced mark
        return frame.f_code.co_name if function is None else str(function.__name__)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        sys.setprofile(self._see)
        try:
            yield
        finally:
            sys.setprofile(None)


def trips(piece_tensors: float) -> dict[str, list[Trip]]:
    """Those of the fifth step, of groups of four tensors that leave. piece_tensors: tensors a piece."""
    nbytes = leaf().nbytes
    config = OffloadConfig(
        min_offloaded_tensor_size=1,
        piece_bytes=max(1, int(piece_tensors * nbytes)),
        activation_offload_fraction=1.0,
        max_spilling_bytes=8 * nbytes,
        max_restoring_bytes=8 * nbytes,
        host_reserve_bytes=HELD,
    )
    engine = OffloadEngine(config, device=IdleDevice(passed=False))
    manager = PipelineOffloadManager(engine, print_summary=False)
    with installed(manager):
        tracer = Tracer(manager)
        gc.collect()
        gc.disable()
        try:
            for _ in range(STEPS):
                tracer.trips.clear()
                _step(manager, tracer, two_more=2 * nbytes)
        finally:
            gc.enable()
    return tracer.trips


def _step(manager: PipelineOffloadManager, tracer: Tracer, two_more: int) -> None:
    """One forward and its backward. two_more: bytes by which the window grows before a group is read."""
    limits = manager.engine.limits
    window = limits.max_restoring_bytes

    def widen(grad: Tensor) -> None:
        limits.max_restoring_bytes += two_more

    manager.set_order([("F", 0, 0), ("B", 0, 0)])
    manager.begin_chunk(0, 0)
    x = leaf() * 1.0
    with tracer.tracing():
        for number in range(GROUPS):
            x = group_start(x, "act")
            with offload_hooks():
                for _ in range(PER_GROUP):
                    x = torch.sin(x)
            x = group_commit(x, "act")
            if number == GROUPS // 2:
                x.register_hook(widen)
    manager.end_forward(0, 0)
    manager.begin_backward(0, 0, "B")
    grad = torch.ones_like(x)
    with tracer.tracing():
        x.backward(grad)
    limits.max_restoring_bytes = window
    manager.end_backward(0, 0, "B")
    manager.step_end()


def mean(found: list[Trip]) -> Trip:
    """A trip, on average over a piece."""
    return Trip(
        -(-sum(trip.calls for trip in found) // len(found)),
        -(-sum(trip.device_calls for trip in found) // len(found)),
    )


def measured(piece_tensors: float) -> dict[str, Trip]:
    found = trips(piece_tensors)
    half = GROUPS * PER_GROUP // 2
    middle = slice(half - PER_GROUP, half)  # a whole number of pieces, in a steady state
    packs = found["pack"][middle]
    assert sum(trip.spilled for trip in packs) == len(packs)
    return {
        "pack and spill": mean(packs),
        # what was fetched before, and no more is to be fetched
        "unpack": mean([trip for trip in found["unpack"][-2 * PER_GROUP :] if not trip.restored]),
        "commit": mean(found["group_commit"][GROUPS // 2 :][:1]),
        "backward mark, two restores": mean(
            [trip for trip in found["output_has_gradient"] if trip.restored == 2][:1]
        ),
    }


@pytest.mark.parametrize(("piece_tensors", "suffix"), [(0.0, ""), (4.0, ", four a piece")])
def test_a_trip_takes_no_more_calls_than_it_did(
    piece_tensors: float, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, TREES, raising=False)  # else each save asks whose memory it is
    monkeypatch.delitem(sys.modules, "torch.cuda._sanitizer", raising=False)  # else each copy hides from it
    for name, trip in measured(piece_tensors).items():
        assert trip.calls <= AT_MOST[name + suffix], (name + suffix, trip)
        if not suffix:
            assert trip.device_calls <= DEVICE_AT_MOST[name], (name, trip)
