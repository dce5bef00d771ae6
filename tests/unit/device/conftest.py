"""A simulated device."""

from __future__ import annotations

import pytest

from offload.device.sim import SimDevice


@pytest.fixture
def device() -> SimDevice:
    return SimDevice()
