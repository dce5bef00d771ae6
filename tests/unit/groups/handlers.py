"""A chunk's handler, called by hand: what the tests of handlers share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from offload import ChunkOffloadHandler, PipelineOffloadManager, init_chunk_handler
from offload.device.sim import SimDevice
from offload.groups.group import Group


def begun(manager: PipelineOffloadManager, min_elements: int = 1) -> ChunkOffloadHandler:
    """The handler of a forward that has just begun."""
    init_chunk_handler(None, None, min_elements)
    handler = manager.cur_forward_chunk()
    assert handler is not None
    return handler


def group_of(handler: ChunkOffloadHandler, name: str, *tensors: Tensor) -> tuple[Group, list[Any]]:
    """A group started, filled and committed by hand; with the tags."""
    group = handler.on_group_start_forward(name)
    tags = [handler.tensor_push(tensor) for tensor in tensors]
    handler.on_group_commit_forward(name=name)
    return group, tags


def settle(manager: PipelineOffloadManager, *groups: Group) -> None:
    """Let the sources of their copies go: until then a read finds them alive and needs no copy back."""
    for group in groups:
        for transfer in group.saved.transfers:
            manager.engine.transfers.settle_spill(transfer)


def states(group: Group) -> list[str]:
    return [record.state.name for record in group.saved.living()]


def device_of(manager: PipelineOffloadManager) -> SimDevice:
    return manager.engine.device  # type: ignore[return-value]
