"""A process-wide manager over the simulated device for each test, and nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload import PipelineOffloadManager
from tests.unit.groups.stack import build_manager, installed


@pytest.fixture(autouse=True)
def manager() -> Iterator[PipelineOffloadManager]:
    """Late copies; every saved tensor may leave; nothing printed."""
    with installed(build_manager()) as built:
        assert built is not None
        yield built
