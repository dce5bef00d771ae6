"""The records of a step as the source system names them: a view of the engine's own.

One invariant: nothing here keeps a saved tensor alive, and nothing is copied: states, buffers and events are
those of the engine's blocks at the moment when they are asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from offload.device import Event
from offload.ids import SlotId
from offload.memory.arena import Block
from offload.saved.handles import Handle
from offload.transfer.block import BlockState, DeviceBlock
from offload.transfer.layout import ViewLayout


class ActivationState(Enum):
    """Where a saved tensor's bytes are. Each is a state of the engine's block."""

    KEPT = BlockState.RESIDENT
    SPILLING = BlockState.SPILLING
    SPILLED = BlockState.SPILLED
    RESTORING = BlockState.RESTORING
    RESTORED = BlockState.RESTORED
    RELEASED = BlockState.RELEASED


@dataclass(frozen=True, slots=True)
class ActivationRecord:
    """One saved tensor. Equal to another of the same bytes and layout."""

    block: DeviceBlock
    layout: ViewLayout
    device: torch.device

    @property
    def id(self) -> SlotId:
        return self.block.label

    @property
    def state(self) -> ActivationState:
        return ActivationState.RELEASED if self.block.is_freed else ActivationState(self.block.state)

    @property
    def shape(self) -> torch.Size:
        return self.layout.size

    @property
    def dtype(self) -> torch.dtype:
        return self.layout.dtype

    @property
    def stride(self) -> tuple[int, ...]:
        return self.layout.stride

    @property
    def offset(self) -> int:
        """Place of the first element in its storage, in elements."""
        return self.layout.offset

    @property
    def nbytes(self) -> int:
        """Bytes of the storage range that moves."""
        return self.block.nbytes

    @property
    def logical_bytes(self) -> int:
        """Bytes of the tensor itself."""
        return self.layout.size.numel() * self.layout.dtype.itemsize

    @property
    def buffer(self) -> Block | None:
        """Its host bytes; None while it has none."""
        return self.block.host

    @property
    def event(self) -> Event | None:
        """The last copy from or to those bytes."""
        return self.block.event

    def move_to(self, state: ActivationState) -> None:
        """Raises RecordStateError for a move that its state does not allow."""
        self.block.move_to(state.value)


class ActivationRegistry:
    """The records of a step. The record id is the engine's handle; `SlotId` prints it."""

    def __init__(self) -> None:
        # handles are held by autograd's graph alone
        self._entries: list[tuple[weakref.ref[Handle], torch.device]] = []

    def create(self, handle: Handle, device: torch.device) -> None:
        """Note a save."""
        self._entries.append((weakref.ref(handle), device))

    def __iter__(self) -> Iterator[ActivationRecord]:
        """Those that can still be read, one a block, in the order of their saves."""
        seen: set[int] = set()
        for reference, device in self._entries:
            handle = reference()
            if handle is not None and handle.layout is not None and id(handle.record.block) not in seen:
                seen.add(id(handle.record.block))
                yield ActivationRecord(handle.record.block, handle.layout, device)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, record_id: Handle | SlotId) -> ActivationRecord | None:
        """The record of a handle, or of an id that a record or a message has; None if it is gone."""
        label = record_id.record.label if isinstance(record_id, Handle) else record_id
        return next((record for record in self if record.id == label), None)

    def iter_by_state(self, state: ActivationState) -> Iterator[ActivationRecord]:
        return (record for record in self if record.state is state)

    def iter_spilling(self) -> Iterator[ActivationRecord]:
        """Those whose copy to the host has been issued and not finalized."""
        return self.iter_by_state(ActivationState.SPILLING)

    def clear(self) -> None:
        """Forget all; their graphs keep what they hold."""
        self._entries.clear()

    def forget_dead(self) -> None:
        """Forget those that nothing can read any more."""
        self._entries = [entry for entry in self._entries if entry[0]() is not None]
