"""Steps of changing shapes on the simulated device: what an engine holds at a step's end is what it held one
period of shapes before.

The twin on a GPU, with 2,000 steps and the allocator's own figures, is tests/gpu/test_soak.py.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from offload import PipelineOffloadManager
from offload.device.sim import SimDevice
from parallel.transformer import TransformerConfig
from tests.gpu.workbench import assert_same_bits, installed
from tests.soak import PERIOD, Training, build_manager, census, differences, living, shapes, small_slabs

TOKENS = 64
MODEL = TransformerConfig(dim=32, layers=3, heads=4, kv_heads=2, ffn=64, sequence=TOKENS)
PIECE = 4096
REGISTRATION = 8192
WINDOWS = {"max_spilling_bytes": 4 * PIECE, "max_restoring_bytes": 4 * PIECE}


class CountingDevice(SimDevice):
    """Counts the host memory that it was asked for."""

    slabs = 0

    def host_memory(self, nbytes: int, registration_bytes: int) -> Any:
        self.slabs += 1
        return super().host_memory(nbytes, registration_bytes)


@pytest.fixture
def device() -> CountingDevice:
    return CountingDevice()


@pytest.fixture
def manager(device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> PipelineOffloadManager:
    with small_slabs(monkeypatch, REGISTRATION):
        return build_manager(device, piece_bytes=PIECE, device_limit_bytes=16 * PIECE, **WINDOWS)


def test_three_periods_of_changing_shapes_leave_nothing_behind(
    manager: PipelineOffloadManager, device: CountingDevice
) -> None:
    """Counted: entries of every list and table that the manager can reach, living objects of this project by
    type, pinned bytes held and lent, device bytes, and allocations of host memory."""
    steps = shapes(TOKENS)
    held: list[dict[str, int]] = []
    figures: list[tuple[int, int]] = []  # (pinned bytes held, saved bytes on the device at most)
    moved: Counter[str] = Counter()
    objects: list[dict[str, int]] = []
    with installed(manager):
        training = Training(manager, MODEL)
        for number in range(3 * PERIOD):
            stats = training.step(steps[number % PERIOD])
            assert manager.engine.transfers.device_bytes == manager.engine.arena.stats().lent == 0
            training.model.zero_grad(set_to_none=True)
            assert device.active_bytes() == 0
            figures.append((stats.host_bytes_held, stats.device_bytes_peak))
            moved.update(spilled=stats.spilled, restored=stats.restored, refused=stats.refused)
            # the first period is compared with nothing
            held.append(census(manager) if number >= PERIOD else {})
            if number % PERIOD == PERIOD - 1:
                objects.append(living())
            if number == 2 * PERIOD - 1:
                slabs = device.slabs
        assert device.slabs == slabs, "host memory was allocated after the first hundred steps"
        assert not differences(objects[1], objects[2])
        for number in range(2 * PERIOD, 3 * PERIOD):
            before = number - PERIOD
            assert not differences(held[before], held[number]), f"step {number} against step {before}"
            assert figures[number] == figures[before]
        assert min(moved["spilled"], moved["restored"]) > 3 * PERIOD
        assert moved["refused"] == 0

        training.step(steps[-1])
        found = [gradient.clone() for gradient in training.gradients()]
    plain = Training(None, MODEL)
    plain.step(steps[-1])
    assert_same_bits(plain.gradients(), found)


def test_the_census_meets_a_list_that_grows(manager: PipelineOffloadManager) -> None:
    """Or the test above says nothing."""
    before = census(manager)
    manager.engine.transfers.stalls.append((None, None))  # type: ignore[arg-type]
    manager.engine.store._blanks[torch.int8] = torch.empty(0)
    grown = differences(before, census(manager))
    assert {name.rpartition(".")[2]: after - was for name, (was, after) in grown.items()} == {
        "stalls": 1,
        "stalls[]": 2,
        "_blanks": 1,
    }
