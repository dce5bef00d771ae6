"""The sources' names cost a process nothing that asks for none of them, and get the manager that it has."""

from __future__ import annotations

import pytest
import torch

import offload
from offload import OffloadConfig, PipelineOffloadManager
from offload.compat.handler import ChunkOffloadHandler, OffloadTensorGroup
from offload.groups.manager import GroupsManager
from tests.forks import forked

_STEP = """
import sys, torch, offload
from torch import nn
{made}
model(torch.randn(4, 1024)).square().mean().backward()
optimizer.step()
{ended}
print([name for name in sys.modules if name.startswith("offload.compat")])
"""
_APPLIED = """
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
handle = offload.apply(model, mode="{mode}"{more})
"""
_MARKED = """
offload.configure(offload.OffloadConfig(min_offloaded_tensor_size=1), device="sim", print_summary=False)
layer = nn.Linear(1024, 1024)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
def model(x):
    offload.init_chunk_handler()
    x = offload.group_start(x, "fc")
    with offload.offload_hooks():
        y = layer(x)
    return offload.group_commit(y, "fc")
"""


@pytest.mark.parametrize(
    ("made", "ended"),
    [
        (_APPLIED.format(mode="groups", more=", min_numel=1, weights='host'"), "handle.remove()"),
        (_APPLIED.format(mode="watermark", more=", high='1MB'"), "handle.remove()"),
        (_MARKED, "assert offload.step_end().spilled == 1"),
    ],
    ids=["groups and weights", "watermark", "marks"],
)
def test_a_training_step_imports_none_of_it(made: str, ended: str) -> None:
    with forked(_STEP.format(made=made, ended=ended)) as process:
        assert process.ended() == (0, "[]\n", "")


def test_a_manager_that_came_first_gets_the_names_in_the_middle_of_a_step() -> None:
    """Whoever holds it, a chunk or a group of it holds the same object, and nothing of the step is lost."""
    manager = offload.configure(OffloadConfig(min_offloaded_tensor_size=1), device="sim", print_summary=False)
    assert type(manager) is GroupsManager
    x = torch.randn(64).requires_grad_()
    offload.init_chunk_handler(2, 0)
    offload.group_commit(offload.group_start(x, "of stage 0") * 1, "of stage 0")
    offload.init_chunk_handler(2, 1)
    started = offload.group_start(x, "a")
    chunk = manager.active_handler()
    assert chunk is not None
    with offload.offload_hooks():
        assert PipelineOffloadManager.OFFLOAD_MGR is PipelineOffloadManager.get_instance() is manager
        y = started * started
    assert manager.cur_forward_chunk() is chunk
    assert isinstance(chunk, ChunkOffloadHandler)
    assert [type(group) for group in chunk.groups] == [OffloadTensorGroup]
    assert manager.front_backward_chunk() is chunk, "the last stage first"
    assert manager.front_backward_chunk("of stage 0") is not chunk
    offload.group_commit(y, "a").sum().backward()
    assert manager.cur_backward_chunk() is chunk
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]
    assert torch.equal(chunk.reload(chunk.offload(torch.ones(4))), torch.ones(4))
    assert manager.step_end().spilled == 1
    assert offload.init_chunk_handler() is None
    assert isinstance(manager.cur_forward_chunk(), ChunkOffloadHandler)
    manager.close()


def test_one_that_was_asked_for_by_the_names_first_is_the_one_that_marks_use() -> None:
    manager = PipelineOffloadManager.get_instance()
    offload.init_chunk_handler(None, None, 1)
    assert manager.cur_forward_chunk() is manager.active_handler() is not None
    assert offload.configure(device="sim", print_summary=False) is PipelineOffloadManager.get_instance()
    assert PipelineOffloadManager.get_instance() is not manager
