"""An engine with chunks and groups opened by hand."""

from __future__ import annotations

import pytest

from tests.unit.saved.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
