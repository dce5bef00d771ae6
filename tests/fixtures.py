"""Fixtures that tests of several folders ask for, by name or by `pytest.mark.usefixtures`. conftest.py here
imports them all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from offload import PipelineOffloadManager
from tests.inside import streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.saved.rig import Rig


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    """The process's manager, over a simulated device whose every saved tensor may leave."""
    with installed(build_manager()) as built:
        yield built


@pytest.fixture
def no_manager() -> Iterator[None]:
    """The process has no manager before the test, and none after it."""
    PipelineOffloadManager.close_instance()
    yield
    PipelineOffloadManager.close_instance()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone, for a file's tests."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """torch computes in one thread while a file's tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_streams() -> Iterator[None]:
    """Weights of 64 elements stream already."""
    with streams_from(64):
        yield


@pytest.fixture
def rig() -> Rig:
    """An engine on a simulated device, with chunks and groups opened by hand."""
    return Rig()


@pytest.fixture(autouse=True)
def rigs_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """Behind a test that passes, when it holds nothing any more, each rig that it made ends its step."""
    failed = request.session.testsfailed
    yield
    made, Rig.made = Rig.made, []
    for each in made if request.session.testsfailed == failed else ():
        each.end()
