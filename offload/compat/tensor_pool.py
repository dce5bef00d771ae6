"""Tensors of one shape and dtype, lent and taken back: the pool that Megatron and torchtitan users know by
name.

The engine itself borrows blocks from the arena; this pool serves code that wants whole tensors (S2-8 to
S2-22, S3-2 to S3-4). One invariant: a tensor is lent to one borrower at a time, and lent again only once the
event it was freed with has passed.

Allocate and free are dictionary look-ups by the tensor's id; no list is searched.

What a pool is made of (`SubPool`) has buffers of one shape and dtype, by id: each is on loan, ready, or waits
for the last copy that it was given back with.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from offload.device.base import Device, Event
from offload.errors import PoolError
from offload.memory.arena import Block, HostArena


class GPUTensorPool:
    """Tensors by (shape, dtype), on any device.

    device: "cuda": torch.empty there. "cpu": views over arena blocks, or torch.empty where there is no arena.
    pin_memory: for "cpu" without an arena: pin each tensor, where there is an accelerator. Slow: give an
        arena instead.
    arena: "cpu" only. A miss blocks the host for the pinning if the arena has to grow, and raises
        HostBudgetError if it may not.
    event_device: who is asked about the events given to `free`; None means the arena's device.
    """

    def __init__(
        self,
        device: str | torch.device = "cuda",
        pin_memory: bool = False,
        *,
        arena: HostArena | None = None,
        event_device: Device | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.pin_memory = pin_memory
        if arena is not None and self.device.type != "cpu":
            raise ValueError(
                f"an arena holds host memory and cannot back a pool on {self.device}; leave arena out or use "
                "device='cpu'"
            )
        self._arena = arena
        self._event_device = event_device or (arena.device if arena is not None else None)
        self._lock = threading.RLock()
        self._pools: dict[PoolKey, SubPool] = {}
        self._allocation_requests = self._free_requests = self._misses = 0

    def ask(self, device: Device) -> None:
        """Ask `device` about the events that tensors are freed with, unless somebody is asked already."""
        with self._lock:
            self._event_device = self._event_device or device

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Lend a tensor; its contents are whatever they are. Reuses a freed one (hit) or makes one (miss)."""
        key = self._get_pool_key(shape, dtype)
        with self._lock:
            self._allocation_requests += 1
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = SubPool(key, self._arena, self.device, self.pin_memory)
            tensor = pool.reuse(self._event_device)
            if tensor is None:
                self._misses += 1
                tensor = pool.make()
            pool.lent[id(tensor)] = tensor
            return tensor

    def free(
        self,
        tensor: torch.Tensor,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        after: Event | None = None,
    ) -> None:
        """End the loan. Order: [Order: reuse of a pinned block].

        shape, dtype: optional, only checked against the tensor.
        after: the last copy that was issued from or to the tensor; it is not lent again before that has
        passed. Raises PoolError, which is a ValueError, for a tensor that is not on loan from this pool.
        """
        key = self._get_pool_key(tensor.shape, tensor.dtype)
        if key != self._get_pool_key(tensor.shape if shape is None else shape, dtype or tensor.dtype):
            raise ValueError(
                f"freed {_named(tensor)} as shape {shape} and dtype {dtype}; leave them out, or give the "
                "tensor's own"
            )
        with self._lock:
            self._free_requests += 1
            pool = self._pools.get(key)
            if pool is None:
                raise PoolError(
                    f"No pool for {_named(tensor)} among {len(self._pools)} pools; free only what this pool "
                    "allocated"
                )
            if id(tensor) not in pool.all:
                raise PoolError(
                    f"{_named(tensor)} does not belong to this pool's {len(pool.all)} such tensors; free "
                    "only what it allocated"
                )
            if id(tensor) not in pool.lent:
                raise PoolError(
                    f"{_named(tensor)} was freed twice, or was taken back by reset; free each allocation once"
                )
            pool.free(tensor, after, self._event_device)

    def get_pool_status(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Counts of one sub-pool (shape and dtype given), or of all: {'global_stats', 'pools'}."""
        with self._lock:
            if shape is None and dtype is None:
                return {
                    "global_stats": self.stats,
                    "pools": {key: pool.status() for key, pool in self._pools.items()},
                }
            if shape is None or dtype is None:
                raise ValueError(
                    f"pool status needs both of shape and dtype, or neither; got shape={shape}, dtype={dtype}"
                )
            pool = self._pools.get(self._get_pool_key(shape, dtype))
            if pool is None:
                raise ValueError(
                    f"No pool for shape {tuple(shape)} and dtype {dtype} among {len(self._pools)} pools"
                )
            return pool.status()

    @property
    def stats(self) -> dict[str, int]:
        """total_allocated and current_in_use count tensors."""
        with self._lock:
            return {
                "total_allocated": sum(len(pool.all) for pool in self._pools.values()),
                "current_in_use": sum(len(pool.lent) for pool in self._pools.values()),
                "allocation_requests": self._allocation_requests,
                "free_requests": self._free_requests,
                "pool_hits": self._allocation_requests - self._misses,
                "pool_misses": self._misses,
            }

    def __repr__(self) -> str:
        stats, arena = self.stats, self._arena
        shared = "" if arena is None else f", in an arena of {arena.held_bytes:,} bytes that groups share"
        lent, made = stats["current_in_use"], stats["total_allocated"]
        return f"<{type(self).__name__} on {self.device}: {lent} of {made} tensors lent{shared}>"

    def reset(self) -> None:
        """Take every tensor back. For between steps: no copy of a tensor that is still lent may be in
        flight."""
        with self._lock:
            for pool in self._pools.values():
                pool.reset()

    def clear(self) -> None:
        """Release every tensor; the next allocate is a miss. The arena gets a lent tensor's block back once
        its user drops it."""
        with self._lock:
            self._release()

    def __del__(self) -> None:
        # no lock, and only calls that finalisers may make
        if getattr(self, "_pools", None):
            self._release()

    def _release(self) -> None:
        pools, self._pools = self._pools, {}
        for pool in pools.values() if self._arena is not None else ():
            pool.release_free()
            pool.release_lent()

    @staticmethod
    def _get_pool_key(shape: Sequence[int], dtype: torch.dtype) -> PoolKey:
        return (tuple(shape), dtype)

    @staticmethod
    def _calculate_memory_size(shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of a dense tensor of this shape."""
        return math.prod(shape) * dtype.itemsize


class TensorPool(GPUTensorPool):
    """GPUTensorPool under its other name (S3-2), for the host by default."""

    def __init__(
        self,
        device: str | torch.device = "cpu",
        pin_memory: bool = True,
        *,
        arena: HostArena | None = None,
        event_device: Device | None = None,
    ) -> None:
        super().__init__(device, pin_memory, arena=arena, event_device=event_device)


def _named(tensor: torch.Tensor) -> str:
    return (
        f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} "
        f"({tensor.numel() * tensor.element_size():,} bytes)"
    )


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
