"""A group under Megatron-core's names: tensors by tag, two events, sizes added up by hand (S2-23 to S2-27).

The engine's own path calls none of these methods; callers of the source do. One invariant: they add to a
group and change nothing of what its marks and saves recorded.
"""

from __future__ import annotations

from typing import cast

import torch

from offload.device import Device, Event, Lane
from offload.device.cuda import CudaLane
from offload.engines import default_engine
from offload.groups.group import Group

DYNAMIC_SHAPE_GROUPS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
"""Groups whose shapes change with the routing of tokens: a pool keyed by exact shape would grow with them.
The engine's own path lends blocks by the byte and needs no such rule; `ChunkOffloadHandler.offload`, called
directly, follows it."""


class OffloadTensorGroup(Group):
    """One group of a chunk.

    use_cpu_pool: whether a pool keyed by shape may serve it; None: unless its name is one of
        DYNAMIC_SHAPE_GROUPS. device: whose lanes its events are recorded on; None takes that of the default
        engine. Its methods take lanes of the device, or torch's streams on a GPU.
    total_offload_bytes, total_tensor_count: what was eligible to leave in the last step, one count a storage.
    """

    def __init__(self, name: str, use_cpu_pool: bool | None = None, *, device: Device | None = None) -> None:
        super().__init__(name)
        self.begin_names(use_cpu_pool, device)

    def begin_names(self, use_cpu_pool: bool | None, device: Device | None) -> None:
        """What the sources' names need, beside what every group has."""
        self.use_cpu_pool = self.name not in DYNAMIC_SHAPE_GROUPS if use_cpu_pool is None else use_cpu_pool
        self._device = device
        self._tensors: dict[object, torch.Tensor] = {}
        self._offload_event: Event | None = None
        self._reload_event: Event | None = None

    @property
    def offload(self) -> bool:
        """Whether the group leaves."""
        return not self.stays

    # -- tensors by tag --------------------------------------------------------------------------------------
    def push_tensor(self, tag: object, tensor: torch.Tensor) -> None:
        """Keep `tensor` under `tag`. Raises KeyError if the tag is taken."""
        if tag in self._tensors:
            raise KeyError(f"group {self.name!r} already holds a tensor under tag {tag!r}; pop it first")
        self._tensors[tag] = tensor

    def pop_tensor(self, tag: object) -> torch.Tensor:
        """Remove and return the tensor under `tag`. Raises KeyError if there is none."""
        if tag not in self._tensors:
            raise KeyError(
                f"group {self.name!r} holds no tensor under tag {tag!r}; it holds {len(self._tensors)} others"
            )
        return self._tensors.pop(tag)

    # -- events ----------------------------------------------------------------------------------------------
    def record_offload_event(self, stream: Lane | torch.Stream) -> None:
        """The group's spill is complete at this point of `stream`."""
        self._offload_event = self._on_device().record(_lane(stream))

    def wait_offload_event(self, stream: Lane | torch.Stream) -> None:
        """Order `stream` after the group's spill. Never blocks the host; nothing to wait for where none was
        recorded."""
        if self._offload_event is not None:
            self._on_device().wait(_lane(stream), self._offload_event, "restore")

    def record_reload_event(self, stream: Lane | torch.Stream) -> None:
        """The group's restore is complete at this point of `stream`."""
        self._reload_event = self._on_device().record(_lane(stream))

    def wait_reload_event(self, stream: Lane | torch.Stream) -> None:
        """Order `stream` after the group's restore. Never blocks the host; nothing to wait for where none was
        recorded."""
        if self._reload_event is not None:
            self._on_device().wait(_lane(stream), self._reload_event, "read")

    def _on_device(self) -> Device:
        return self._device or default_engine().device

    # -- sizes -----------------------------------------------------------------------------------------------
    def update_offload_info(self, tensor: torch.Tensor) -> None:
        """Count one more eligible tensor."""
        nbytes = tensor.numel() * tensor.element_size()
        self.total_offload_bytes += nbytes
        self.logical_bytes += nbytes
        self.total_tensor_count += 1

    def __repr__(self) -> str:
        return (
            f"OffloadTensorGroup({self.name!r}, {self.total_offload_bytes:,} bytes, "
            f"{'stays' if self.stays else 'leaves'})"
        )


def _lane(stream: Lane | torch.Stream) -> Lane:
    return CudaLane("by hand", stream) if isinstance(stream, torch.cuda.Stream) else cast(Lane, stream)
