"""Host buffers in a few fixed sizes: the pool of the watermark runtime (S0-19 to S0-34). The engine borrows
blocks from the arena and does not use it; it serves callers who know it.

It serves what the exact-shape pool cannot, tensors whose sizes vary: any buffer of a class serves any request
that fits. One invariant: a slab goes back to the class it was made for, whatever it served. The pool never
grows beyond its slab counts.

Slabs are backed when first used, or all at once by `reserve`; after that nothing is pinned in a step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.compat.tensor_pool import FreeList
from offload.device.base import Device, Event
from offload.errors import HostBudgetError, PoolError
from offload.memory.arena import Block, HostArena

__all__ = ["CPUSpillBackend"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Slab:
    size_class: _SizeClass
    tensor: torch.Tensor  # 1-D uint8
    block: Block | None


class _SizeClass:
    def __init__(self, slab_bytes: int, num_slabs: int, device: Device | None) -> None:
        self.slab_bytes = slab_bytes
        self.num_slabs = num_slabs
        self.num_unbacked = num_slabs
        self.free: FreeList[_Slab] = FreeList(device)


class CPUSpillBackend:
    """A fixed number of host slabs in a few sizes, with plain memory behind them when they run out.

    class_sizes_mb: slab sizes in MiB, ascending.
    slabs_per_class: one count for each class, or an int for all.
    arena: where slabs come from, so that they count in the host budget. None: torch.empty, pinned where there
        is an accelerator.
    event_device: who is asked about the events given to `release`; None means the arena's device.
    """

    def __init__(
        self,
        class_sizes_mb: Sequence[int] = (1, 4, 16, 64, 256),
        slabs_per_class: int | Sequence[int] = (512, 2, 2, 2, 2),
        *,
        arena: HostArena | None = None,
        event_device: Device | None = None,
    ) -> None:
        sizes = tuple(class_sizes_mb)
        counts = (
            (slabs_per_class,) * len(sizes) if isinstance(slabs_per_class, int) else tuple(slabs_per_class)
        )
        if len(counts) != len(sizes):
            raise ValueError(
                f"slabs_per_class has {len(counts)} counts for {len(sizes)} class sizes; give one for each, "
                "or an int for all"
            )
        if list(sizes) != sorted(set(sizes)) or any(size <= 0 for size in sizes):
            raise ValueError(f"class_sizes_mb={sizes} must be positive and ascending, each size once")
        if any(count < 0 for count in counts):
            raise ValueError(f"slabs_per_class={counts} has a negative count; 0 switches a class off")
        self._arena = arena
        device = event_device or (arena.device if arena is not None else None)
        self._classes = [
            _SizeClass(size * MIB, count, device) for size, count in zip(sizes, counts, strict=True)
        ]
        self._lent: dict[int, _Slab] = {}  # by data pointer: slabs are the pool's own and never move
        self._unpooled: dict[int, torch.Tensor] = {}
        self._lock = threading.Lock()
        self.pool_hits = 0
        self.pool_misses = 0

    @property
    def total_bytes(self) -> int:
        """What the pool holds once every slab is backed."""
        return sum(size_class.slab_bytes * size_class.num_slabs for size_class in self._classes)

    @property
    def free_slabs(self) -> dict[int, int]:
        """Slab size in bytes -> slabs not on loan, backed or not."""
        with self._lock:
            return {
                size_class.slab_bytes: len(size_class.free) + size_class.num_unbacked
                for size_class in self._classes
            }

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Lend `nbytes` as a 1-D uint8 tensor: of the smallest class that fits, else the next larger one (a
        pool hit), else unpinned memory of its own (a pool miss), whose copies block the host.

        Blocks the host for the pinning where a slab is used for the first time; `reserve` before step 1
        avoids that.
        """
        if nbytes <= 0:
            raise ValueError(f"a buffer of {nbytes:,} bytes was asked for; tensors without bytes need none")
        with self._lock:
            slab = next(
                (
                    slab
                    for size_class in self._classes
                    if size_class.slab_bytes >= nbytes and (slab := self._get(size_class))
                ),
                None,
            )
            if slab is None:
                self.pool_misses += 1
                buffer = torch.empty(nbytes, dtype=torch.uint8)
                self._unpooled[buffer.data_ptr()] = buffer
                return buffer
            self.pool_hits += 1
            self._lent[slab.tensor.data_ptr()] = slab
            return slab.tensor[:nbytes]

    def release(self, buffer: torch.Tensor, *, after: Event | None = None) -> None:
        """End the loan, by the buffer's data pointer. Order: [Order: reuse of a pinned block].

        after: the last copy that was issued from or to the buffer; its slab is not lent again before that has
        passed. Raises PoolError for a buffer that is not on loan. An unpinned one is dropped.
        """
        pointer = buffer.data_ptr()
        with self._lock:
            if self._unpooled.pop(pointer, None) is not None:
                return
            slab = self._lent.get(pointer)
            if slab is None:
                nbytes = buffer.numel() * buffer.element_size()
                raise PoolError(
                    f"a buffer of {nbytes:,} bytes at {pointer:#x} is none of the {len(self._lent)} slabs on "
                    "loan; "
                    f"release each buffer once, as it was allocated"
                )
            slab.size_class.free.check(after)
            del self._lent[pointer]
            slab.size_class.free.put(slab, after)

    def reserve(self) -> None:
        """Back every slab now. Blocks the host for the pinning. Raises HostBudgetError if the arena may not
        hold that much."""
        with self._lock:
            for size_class in self._classes:
                while size_class.num_unbacked:
                    size_class.free.put(self._back(size_class))

    def reset(self) -> None:
        """Take every buffer back. For between steps: no copy of a buffer that is still lent may be in
        flight."""
        with self._lock:
            for slab in self._lent.values():
                slab.size_class.free.put(slab)
            self._lent.clear()
            self._unpooled.clear()

    def clear(self) -> None:
        """Release every slab. Raises PoolError, and frees nothing, while slabs are lent."""
        with self._lock:
            if self._lent:
                lent_bytes = sum(slab.size_class.slab_bytes for slab in self._lent.values())
                raise PoolError(
                    f"{len(self._lent)} slabs of {lent_bytes:,} bytes are lent, of {self.total_bytes:,}; "
                    "release them before clear"
                )
            self._give_back_slabs()

    def __del__(self) -> None:
        # no lock, and only calls that finalisers may make; a slab still lent stays with the arena
        if hasattr(self, "_lent"):
            self._give_back_slabs()

    def _give_back_slabs(self) -> None:
        for size_class in self._classes:
            for slab, after in size_class.free.drain():
                size_class.num_unbacked += 1
                if self._arena is not None and slab.block is not None:
                    self._arena.give_back_later(slab.block, after)

    def _get(self, size_class: _SizeClass) -> _Slab | None:
        slab = size_class.free.get()
        if slab is not None or not size_class.num_unbacked:
            return slab
        try:
            return self._back(size_class)
        except HostBudgetError:  # counted as a miss by the caller
            return None

    def _back(self, size_class: _SizeClass) -> _Slab:
        block = self._arena.contiguous(size_class.slab_bytes) if self._arena is not None else None
        if block is not None:
            tensor = block.extents[0]
        else:
            tensor = torch.empty(
                size_class.slab_bytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available()
            )
        size_class.num_unbacked -= 1
        return _Slab(size_class, tensor, block)
