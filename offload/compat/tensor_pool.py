"""Tensors of one shape and dtype, lent and taken back: the pool that Megatron and torchtitan users know by
name.

The engine itself borrows blocks from the arena; this pool serves code that wants whole tensors (S2-8 to
S2-22, S3-2 to S3-4). One invariant: a tensor is lent to one borrower at a time, and lent again only once the
event it was freed with has passed.

Allocate and free are dictionary look-ups by the tensor's id; no list is searched.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch

from offload.device.base import Device, Event
from offload.errors import PoolError
from offload.memory.arena import Block, HostArena

__all__ = ["FreeList", "GPUTensorPool", "PoolKey", "TensorPool"]

PoolKey = tuple[tuple[int, ...], torch.dtype]

POLLS_PER_GET = 2
"""How many of the longest pending items are asked about before a caller gets a new one instead."""

T = TypeVar("T")


class FreeList(Generic[T]):
    """Free items, last in first out; one freed with an event stays back until the event has passed."""

    def __init__(self, device: Device | None) -> None:
        self._device = device
        self._ready: list[T] = []
        self._pending: deque[tuple[T, Event]] = deque()

    def __len__(self) -> int:
        return len(self._ready) + len(self._pending)

    def ask(self, device: Device) -> None:
        self._device = device

    def check(self, after: Event | None) -> None:
        """Raise ValueError for an event that nobody here could ask about."""
        if after is not None and self._device is None:
            raise ValueError(
                "a buffer was freed with an event, but the pool has no device to ask about it; give the pool "
                "an arena or event_device"
            )

    def put(self, item: T, after: Event | None = None) -> None:
        if after is None:
            self._ready.append(item)
        else:
            self._pending.append((item, after))

    def get(self) -> T | None:
        """An item that nobody uses any more, or None. Blocks the host: never."""
        for _ in range(min(POLLS_PER_GET, len(self._pending))):
            assert self._device is not None
            item, event = self._pending.popleft()
            if self._device.poll(event):
                self._ready.append(item)
            else:
                self._pending.append((item, event))
        return self._ready.pop() if self._ready else None

    def drain(self) -> list[tuple[T, Event | None]]:
        """Take everything out, with the events still pending."""
        items = [*((item, None) for item in self._ready), *self._pending]
        self._ready.clear()
        self._pending.clear()
        return items


class _SubPool:
    """All tensors of one (shape, dtype), by id; those with their arena block, if they have one."""

    def __init__(self, key: PoolKey, device: Device | None) -> None:
        self.key = key
        self.lent: dict[int, torch.Tensor] = {}
        self.free: FreeList[torch.Tensor] = FreeList(device)
        self.all: dict[int, Block | None] = {}

    def status(self) -> dict[str, Any]:
        shape, dtype = self.key
        return {
            "shape": shape,
            "dtype": dtype,
            "total_count": len(self.all),
            "allocated_count": len(self.lent),
            "free_count": len(self.free),
            "utilization": len(self.lent) / len(self.all) if self.all else 0.0,
        }


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
        self._lock = threading.Lock()
        self._pools: dict[PoolKey, _SubPool] = {}
        self._allocation_requests = self._free_requests = self._hits = self._misses = 0

    def ask(self, device: Device) -> None:
        """Ask `device` about the events that tensors are freed with, unless somebody is asked already."""
        with self._lock:
            if self._event_device is None:
                self._event_device = device
                for pool in self._pools.values():
                    pool.free.ask(device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Lend a tensor; its contents are whatever they are. Reuses a freed one (hit) or makes one (miss)."""
        key = self._get_pool_key(shape, dtype)
        with self._lock:
            self._allocation_requests += 1
            pool = self._pools.get(key)
            if pool is None:
                pool = self._pools[key] = _SubPool(key, self._event_device)
            tensor = pool.free.get()
            if tensor is None:
                self._misses += 1
                tensor, block = self._create(key)
                pool.all[id(tensor)] = block
            else:
                self._hits += 1
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
        if (shape is not None and tuple(shape) != tuple(tensor.shape)) or (
            dtype is not None and dtype != tensor.dtype
        ):
            raise ValueError(
                f"freed {_named(tensor)} as shape {shape} and dtype {dtype}; leave them out, or give the "
                "tensor's own"
            )
        with self._lock:
            self._free_requests += 1
            pool = self._pools.get(self._get_pool_key(tensor.shape, tensor.dtype))
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
            pool.free.check(after)
            del pool.lent[id(tensor)]
            pool.free.put(tensor, after)

    def get_pool_status(
        self, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Any]:
        """Counts of one sub-pool (shape and dtype given), or of all: {'global_stats', 'pools'}."""
        with self._lock:
            if shape is None and dtype is None:
                return {
                    "global_stats": self._stats(),
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
            return self._stats()

    def reset(self) -> None:
        """Take every tensor back. For between steps: no copy of a tensor that is still lent may be in
        flight."""
        with self._lock:
            for pool in self._pools.values():
                for tensor in pool.lent.values():
                    pool.free.put(tensor)
                pool.lent.clear()

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
        if self._arena is None:
            return
        for pool in pools.values():
            for tensor, after in pool.free.drain():
                if (block := pool.all[id(tensor)]) is not None:
                    self._arena.give_back_later(block, after)
            for tensor in pool.lent.values():
                if (block := pool.all[id(tensor)]) is not None:
                    weakref.finalize(tensor, self._arena.give_back_later, block, None).atexit = False

    def _create(self, key: PoolKey) -> tuple[torch.Tensor, Block | None]:
        shape, dtype = key
        nbytes = self._calculate_memory_size(shape, dtype)
        if self._arena is not None and nbytes:
            block = self._arena.contiguous(nbytes)
            return block.extents[0].view(dtype).view(shape), block
        pin = self.pin_memory and self.device.type == "cpu" and torch.accelerator.is_available()
        return torch.empty(shape, dtype=dtype, device=self.device, pin_memory=pin), None

    def _stats(self) -> dict[str, int]:
        return {
            "total_allocated": sum(len(pool.all) for pool in self._pools.values()),
            "current_in_use": sum(len(pool.lent) for pool in self._pools.values()),
            "allocation_requests": self._allocation_requests,
            "free_requests": self._free_requests,
            "pool_hits": self._hits,
            "pool_misses": self._misses,
        }

    @staticmethod
    def _get_pool_key(shape: Sequence[int], dtype: torch.dtype) -> PoolKey:
        return (tuple(shape), dtype)

    @staticmethod
    def _calculate_memory_size(shape: Sequence[int], dtype: torch.dtype) -> int:
        """Bytes of a dense tensor of this shape."""
        return math.prod(shape) * dtype.itemsize


class TensorPool(GPUTensorPool):
    """The same pool under its other name (S3-2), for the host by default."""

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
