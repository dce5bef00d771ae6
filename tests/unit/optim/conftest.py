"""The optimizer's small net."""

from __future__ import annotations

import pytest
from torch import nn

from tests.unit.optim.rig import net


@pytest.fixture
def model() -> nn.Sequential:
    return net()
