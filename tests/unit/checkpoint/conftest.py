"""The fixtures of groups, and a manager of whose step nothing is left behind a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload import PipelineOffloadManager, step_end
from tests.unit.checkpoint.regions import assert_empty
from tests.unit.groups.conftest import no_manager_left_behind, one_thread
from tests.unit.groups.stack import build_manager, installed

__all__ = ["no_manager_left_behind", "one_thread"]


@pytest.fixture
def manager(request: pytest.FixtureRequest) -> Iterator[PipelineOffloadManager]:
    """As everywhere. Behind a test that passes its step ends, when the test holds nothing any more."""
    failed = request.session.testsfailed
    with installed(build_manager()) as built:
        yield built
        if request.session.testsfailed == failed and PipelineOffloadManager.OFFLOAD_MGR is built:
            step_end()
            assert_empty(built)
