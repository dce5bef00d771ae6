"""Host or device buffers of one shape and dtype, by id: what the pools of whole tensors are made of.

One invariant: a buffer is on loan, ready, or waits for the last copy that it was given back with.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from typing import Any

import torch

from offload.device.base import Device, Event
from offload.memory.arena import Block, HostArena

PoolKey = tuple[tuple[int, ...], torch.dtype]

POLLS_PER_GET = 2
"""How many of the longest pending items are asked about before a caller gets a new one instead."""


class SubPool:
    """Tensors of one (shape, dtype), by id. Its pool holds the lock."""

    def __init__(self, key: PoolKey, arena: HostArena | None, device: torch.device, pin_memory: bool) -> None:
        self.key = key
        self.nbytes = math.prod(key[0]) * key[1].itemsize
        self.all: dict[int, Block | None] = {}  # with their arena block, if they have one
        self.lent: dict[int, torch.Tensor] = {}
        self.ready: list[torch.Tensor] = []  # last in, first out
        self.pending: deque[tuple[torch.Tensor, Event]] = deque()  # freed; the event had not passed
        self._arena = arena
        self._device = device
        self._pin_memory = pin_memory

    def reuse(self, device: Device | None) -> torch.Tensor | None:
        """A tensor that nobody uses any more, or None. device: who is asked about events. Blocks the host:
        never."""
        for _ in range(min(POLLS_PER_GET, len(self.pending))):
            assert device is not None
            tensor, event = self.pending.popleft()
            if device.poll(event):
                self.ready.append(tensor)
            else:
                self.pending.append((tensor, event))
        return self.ready.pop() if self.ready else None

    def make(self) -> torch.Tensor:
        shape, dtype = self.key
        block = self._arena.contiguous(self.nbytes) if self._arena is not None and self.nbytes else None
        if block is not None:
            tensor = block.extents[0].view(dtype).view(shape)
        else:
            pin = self._pin_memory and self._device.type == "cpu" and torch.accelerator.is_available()
            tensor = torch.empty(shape, dtype=dtype, device=self._device, pin_memory=pin)
        self.all[id(tensor)] = block
        return tensor

    def free(self, tensor: torch.Tensor, after: Event | None, device: Device | None) -> None:
        """End the loan. Raises ValueError for an event that nobody here could ask about."""
        if after is None:
            self.ready.append(tensor)
        elif device is not None:
            self.pending.append((tensor, after))
        else:
            raise ValueError(
                "a buffer was freed with an event, but the pool has no device to ask about it; give the pool "
                "an arena or event_device"
            )
        del self.lent[id(tensor)]

    def reset(self) -> None:
        """Take every tensor back."""
        self.ready.extend(self.lent.values())
        self.lent.clear()

    def release_free(self) -> None:
        """Drop the free tensors, of which the arena gets the blocks back. Only calls that finalisers may
        make."""
        for tensor, after in (*((tensor, None) for tensor in self.ready), *self.pending):
            block = self.all.pop(id(tensor))
            if block is not None and self._arena is not None:
                self._arena.give_back_later(block, after)
        self.ready.clear()
        self.pending.clear()

    def release_lent(self) -> None:
        """Give blocks of tensors on loan back to the arena, each once its user drops it."""
        for key, tensor in self.lent.items():
            if (block := self.all[key]) is not None and self._arena is not None:
                weakref.finalize(tensor, self._arena.give_back_later, block, None).atexit = False

    def status(self) -> dict[str, Any]:
        shape, dtype = self.key
        return {
            "shape": shape,
            "dtype": dtype,
            "total_count": len(self.all),
            "allocated_count": len(self.lent),
            "free_count": len(self.ready) + len(self.pending),
            "utilization": len(self.lent) / len(self.all) if self.all else 0.0,
        }
