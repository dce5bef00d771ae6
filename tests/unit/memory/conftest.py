"""An arena over a device whose pinning costs nothing, for the tests that need no other."""

from __future__ import annotations

import pytest

from offload.memory.arena import HostArena
from tests.unit.memory.fakes import FakeDevice, arena_on


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def arena(device: FakeDevice) -> HostArena:
    return arena_on(device)
