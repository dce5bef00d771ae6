"""A named group: the tensors of one module in one chunk, that leave and come back together.

One invariant: a group object is recorded once and used again in every step; what it holds of a step is in
`saved`, which is new each time.
"""

from __future__ import annotations

import torch

from offload.device import Device, Event, Lane
from offload.saved.chunk import SavedGroup

__all__ = ["DYNAMIC_SHAPE_GROUPS", "OffloadTensorGroup"]

DYNAMIC_SHAPE_GROUPS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})
"""Groups whose shapes change with the routing of tokens: a pool keyed by exact shape would grow with them.
The engine's own path lends blocks by the byte and needs no such rule; `ChunkGroups.offload`, called
directly, follows it."""


class OffloadTensorGroup:
    """One group of a chunk.

    total_offload_bytes, total_tensor_count: what was eligible to leave in the last step, one count a storage.
    logical_bytes: the same, one count a saved tensor, so that it does not depend on what shared a copy: a
        partial view does only while its storage has not left.
    slot_bytes: the same tensor by tensor, as (slot, bytes) in the order in which they were saved.
    regions: by slot, the number of the checkpoint region whose recompute reads it. since: autograd's number
    of the first node after its start. replayed: of saved tensors that stay because CUDA graphs of
    torch.compile own their memory, bytes by address.
    stays: the plan keeps it on the device. hooked: its saves were asked for since its start. encloses:
    another group was started in it. committed: its end was marked. sent: what it saved until then has been
    sent, which a delayed commit does later.
    """

    def __init__(self, name: str, use_cpu_pool: bool | None = None, *, device: Device | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a group's name is {name!r}, must be a non-empty string such as 'core_attn'")
        self.name = name
        self.use_cpu_pool = name not in DYNAMIC_SHAPE_GROUPS if use_cpu_pool is None else use_cpu_pool
        self.stays = False
        self.hooked = False
        self.encloses = False
        self.total_offload_bytes = 0
        self.total_tensor_count = 0
        self.logical_bytes = 0
        self.slot_bytes: tuple[tuple[int, int], ...] = ()
        self.regions: dict[int, int] = {}
        self.saved: SavedGroup | None = None
        self.since = 0
        self.replayed: dict[int, int] = {}
        self.committed = False
        self.sent = False
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
    def record_offload_event(self, lane: Lane) -> None:
        """The group's spill is complete at this point of `lane`."""
        self._offload_event = self._on_device().record(lane)

    def wait_offload_event(self, lane: Lane) -> None:
        """Order `lane` after the group's spill. Never blocks the host; nothing to wait for where none was
        recorded."""
        if self._offload_event is not None:
            self._on_device().wait(lane, self._offload_event, "restore")

    def record_reload_event(self, lane: Lane) -> None:
        """The group's restore is complete at this point of `lane`."""
        self._reload_event = self._on_device().record(lane)

    def wait_reload_event(self, lane: Lane) -> None:
        """Order `lane` after the group's restore. Never blocks the host; nothing to wait for where none was
        recorded."""
        if self._reload_event is not None:
            self._on_device().wait(lane, self._reload_event, "read")

    def _on_device(self) -> Device:
        if self._device is None:
            raise ValueError(
                f"group {self.name!r} was built without a device, so it has no lanes; pass device= to "
                "OffloadTensorGroup"
            )
        return self._device

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
