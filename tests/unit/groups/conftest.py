"""A manager over the simulated device for each test, and no process-wide one left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload import PipelineOffloadManager
from tests.unit.groups.stack import build_manager, installed


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Operations this small only lose by threads, above all on a machine that does something else as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_manager_left_behind() -> Iterator[None]:
    with installed(None):
        yield


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    """The process-wide manager: late copies, every saved tensor may leave, nothing printed."""
    with installed(build_manager()) as built:
        yield built
