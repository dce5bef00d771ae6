"""A process-wide manager over the simulated device for each test, a clock that nothing but the test's own
calls moves on, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload import PipelineOffloadManager
from tests.ticks import counted_time


@pytest.fixture(autouse=True)
def _times_of_their_own() -> Iterator[None]:
    """No plan of mode "auto" depends on how long the machine took."""
    with counted_time():
        yield


@pytest.fixture(autouse=True)
def _a_manager_each(manager: PipelineOffloadManager) -> None: ...
