"""Steps of changing shapes on a GPU, 1,000 without a device limit: device, pinned and host memory stay flat,
and so do the engine's lists.

Nothing is pinned before step 1, in registrations of 1 MiB: the first periods grow the arena beside the steps
and give some of it back, as a real training does in its first minutes. The twin without a GPU is
tests/property/test_soak.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload import PipelineOffloadManager, StepStats
from offload.device import Event, Lane
from offload.device.cuda import CudaDevice
from parallel.transformer import TransformerConfig
from tests.gpu.workbench import DEVICE, assert_same_bits, installed
from tests.soak import PERIOD, Training, build_manager, census, living, resident_bytes, shapes, small_slabs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MIB = 1 << 20
STEPS = {"windows": 1000, "device limit": 500}
SETTLED = 100
"""Steps, after which nothing may grow: two periods."""
RESIDENT_SLACK = 4 * MIB
"""Of 1,000 steps: 4 KiB a step. What CUDA and the C allocator keep moves by less; one small tensor a step,
lost, is more."""

TOKENS = 512
MODEL = TransformerConfig(dim=256, layers=6, heads=4, kv_heads=2, ffn=704, sequence=TOKENS)
CAPS: dict[str, dict[str, Any]] = {
    "windows": {"max_spilling_bytes": 8 * MIB, "max_restoring_bytes": 8 * MIB},
    "device limit": {"device_limit_bytes": 24 * MIB},
}
EVENTS = ("_free_events", "_unpassed", "stalls", "_clock", "_returned")
"""Parts of a path in the census whose length says where the device is, not what was done: they are bounded
apart."""


class CountingDevice(CudaDevice):
    """Counts the host memory and the events that it was asked for."""

    slabs = 0
    recorded = 0

    def host_memory(self, nbytes: int, registration_bytes: int) -> Any:
        self.slabs += 1
        return super().host_memory(nbytes, registration_bytes)

    def record(self, lane: Lane, *, timed: bool = False) -> Event:
        self.recorded += 1
        return super().record(lane, timed=timed)


def growable(manager: PipelineOffloadManager) -> dict[str, int]:
    return {
        path: count for path, count in census(manager).items() if not any(part in path for part in EVENTS)
    }


def allocated() -> tuple[int, int]:
    """(active, reserved) bytes of the allocator."""
    stats = torch.cuda.memory_stats()
    return int(stats["active_bytes.all.current"]), int(stats["reserved_bytes.all.current"])


@pytest.mark.parametrize("caps", CAPS)
def test_many_steps_of_changing_shapes_leave_memory_flat(caps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, total = shapes(TOKENS), STEPS[caps]
    device = CountingDevice()
    with small_slabs(monkeypatch, MIB):
        manager = build_manager(device, piece_bytes=MIB, **CAPS[caps])
    active: list[int] = []
    reserved: list[int] = []
    held: list[int] = []
    refused: list[int] = []
    events_a_step: list[int] = []
    early: list[dict[str, int]] = []  # of the last settled period, to be compared with the last one of all
    with installed(manager):
        training = Training(manager, MODEL, DEVICE)
        for number in range(total):
            recorded = device.recorded
            stats: StepStats | None = training.step(steps[number % PERIOD])
            training.model.zero_grad(set_to_none=True)
            assert stats is not None
            assert manager.engine.transfers.device_bytes == 0
            assert manager.engine.arena.stats().lent == 0
            active.append(allocated()[0])
            reserved.append(allocated()[1])
            held.append(stats.host_bytes_held)
            refused.append(stats.refused)
            events_a_step.append(device.recorded - recorded)
            if number == SETTLED - 1:
                slabs = device.slabs
            if SETTLED <= number < SETTLED + PERIOD:
                early.append(growable(manager))
            if number == SETTLED + PERIOD - 1:
                objects, resident = living(), resident_bytes()
            if number >= total - PERIOD:
                before = early[number % PERIOD]
                grown = {
                    path: (before.get(path, 0), count)
                    for path, count in growable(manager).items()
                    if count > before.get(path, 0)
                }
                assert not grown, f"step {number} against step {SETTLED + number % PERIOD}"
        after, resident_after = living(), resident_bytes()

        assert len(set(active[SETTLED:])) == 1, (
            f"{min(active):,} to {max(active):,} active bytes between steps"
        )
        assert max(reserved[SETTLED:]) <= max(reserved[:SETTLED])
        assert device.slabs == slabs, "pinned anew after the first hundred steps"
        assert held[SETTLED:] == sorted(held[SETTLED:], reverse=True)
        assert len(set(held[SETTLED + PERIOD :])) == 1, sorted(set(held[SETTLED:]))
        assert sum(refused[SETTLED:]) == 0
        # an event lives no longer than to the end of the step after its own, or while nobody asks about the
        # free bytes that wait for it
        events = sum(len(free) for free in device._free_events.values())
        assert events <= 3 * max(events_a_step)
        timely = ("Event", "_Timed")  # as many as there are events
        grown_objects = {
            name: (objects.get(name, 0), count)
            for name, count in after.items()
            if count > objects.get(name, 0)
        }
        assert not {name: counts for name, counts in grown_objects.items() if not name.endswith(timely)}
        grown_bytes = resident_after - resident
        assert grown_bytes < RESIDENT_SLACK, f"{grown_bytes:,} bytes of host memory more"

        training.step(steps[-1])
        found = [gradient.clone() for gradient in training.gradients()]
    plain = Training(None, MODEL, DEVICE)
    plain.step(steps[-1])
    assert_same_bits(plain.gradients(), found)
