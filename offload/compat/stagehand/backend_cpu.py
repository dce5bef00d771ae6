"""Host buffers in a few fixed sizes: where order="reactive" of the watermark runtime puts what it spills.

It serves tensors whose sizes vary: any buffer of a class serves any request that fits. One invariant: a slab
goes back to the class it was made for, whatever it served. The pool never grows beyond its slab counts;
order="forecast" takes its host bytes from the arena, which grows.

Slabs are backed when first used, or all at once by `reserve`; after that nothing is pinned in a step. The
transfer engine borrows from it by `take` and `give_back`, as it does from the arena.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from offload.compat.tensor_pool import SubPool
from offload.config import MIB
from offload.device.base import Device, Event
from offload.errors import HostBudgetError, PoolError
from offload.memory.arena import Block, HostArena


def checked_classes(
    class_sizes_mb: Sequence[int],
    slabs_per_class: int | Sequence[int],
    *,
    name: str = "class_sizes_mb",
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes, and a count for each. Raises ValueError for what cannot be. name: of the sizes, for that."""
    sizes = _whole_numbers(name, class_sizes_mb)
    if type(slabs_per_class) is int:
        counts = (slabs_per_class,) * len(sizes)
    else:
        counts = _whole_numbers("slabs_per_class", slabs_per_class)
    if len(counts) != len(sizes):
        raise ValueError(
            f"slabs_per_class has {len(counts)} counts for {len(sizes)} class sizes; give one for each, or "
            "an int for all"
        )
    if list(sizes) != sorted(set(sizes)) or any(size <= 0 for size in sizes):
        raise ValueError(f"{name}={sizes} must be positive and ascending, each size once")
    if any(count < 0 for count in counts):
        raise ValueError(f"slabs_per_class={counts} has a negative count; 0 switches a class off")
    return sizes, counts


def _whole_numbers(name: str, given: object) -> tuple[int, ...]:
    if not isinstance(given, (list, tuple)) or not all(type(one) is int for one in given):
        raise ValueError(f"{name}={given!r} must be whole numbers, such as (1, 4, 16)")
    return tuple(given)


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
        sizes, counts = checked_classes(class_sizes_mb, slabs_per_class)
        self._event_device = event_device or (arena.device if arena is not None else None)
        # by size, with the count of slabs
        self._classes = [
            (SubPool(((size * MIB,), torch.uint8), arena, torch.device("cpu"), pin_memory=True), count)
            for size, count in zip(sizes, counts, strict=True)
        ]
        # by data pointer: slabs are the pool's own and never move
        self._lent: dict[int, tuple[SubPool, torch.Tensor]] = {}
        self._unpooled: dict[int, torch.Tensor] = {}
        self._unpooled_in_use: list[tuple[torch.Tensor, Event]] = []  # released; a copy may still read them
        self._lock = threading.Lock()
        self.pool_hits = self.pool_misses = 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the pool once every slab is backed."""
        return sum(pool.nbytes * count for pool, count in self._classes)

    @property
    def free_slabs(self) -> dict[int, int]:
        """Slab size in bytes -> slabs not on loan, backed or not."""
        with self._lock:
            return {pool.nbytes: count - len(pool.lent) for pool, count in self._classes}

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Lend `nbytes` as a 1-D uint8 tensor: of the smallest class that fits, else the next larger one (a
        pool hit), else unpinned memory of its own (a pool miss), whose copies block the host.

        Blocks the host for the pinning where a slab is used for the first time; `reserve` before step 1
        avoids that.
        """
        if nbytes <= 0:
            raise ValueError(f"a buffer of {nbytes:,} bytes was asked for; tensors without bytes need none")
        with self._lock:
            for pool, count in self._classes:
                if pool.nbytes < nbytes:
                    continue
                slab = pool.reuse(self._event_device)
                if slab is None and len(pool.all) < count:
                    with suppress(HostBudgetError):  # as if none were left
                        slab = pool.make()
                if slab is not None:
                    self.pool_hits += 1
                    pool.lent[id(slab)] = slab
                    self._lent[slab.data_ptr()] = pool, slab
                    return slab[:nbytes]
            self.pool_misses += 1
            buffer = self._plain(nbytes)
            self._unpooled[buffer.data_ptr()] = buffer
            return buffer

    def _plain(self, nbytes: int) -> torch.Tensor:
        """Unpinned memory. The simulated device knows host memory by having given it."""
        device = self._event_device
        self._unpooled_in_use = [
            (old, event) for old, event in self._unpooled_in_use if not self._over(event)
        ]
        if device is not None and not device.pins:
            return device.host_memory(nbytes, nbytes).pieces[0]
        return torch.empty(nbytes, dtype=torch.uint8)

    def _over(self, event: Event) -> bool:
        return self._event_device is not None and self._event_device.poll(event)

    def take(self, nbytes: int) -> Block:
        """`allocate` for the transfer engine, as HostLender. Blocks the host: as `allocate`."""
        return Block(nbytes, (self.allocate(nbytes),), (), (), (), self)

    def give_back(self, block: Block, after: Event | None) -> None:
        """`release` for the transfer engine, as HostLender."""
        self.release(block.extents[0], after=after)

    def release(self, buffer: torch.Tensor, *, after: Event | None = None) -> None:
        """End the loan, by the buffer's data pointer. Order: [Order: reuse of a pinned block].

        after: the last copy that was issued from or to the buffer; its slab is not lent again before that has
        passed. Raises PoolError for a buffer that is not on loan. An unpinned one is dropped, once that copy
        has passed.
        """
        pointer = buffer.data_ptr()
        with self._lock:
            unpooled = self._unpooled.pop(pointer, None)
            if unpooled is not None:
                if after is not None and not self._over(after):
                    self._unpooled_in_use.append((unpooled, after))
                return
            if pointer not in self._lent:
                nbytes = buffer.numel() * buffer.element_size()
                raise PoolError(
                    f"a buffer of {nbytes:,} bytes at {pointer:#x} is none of the {len(self._lent)} slabs on "
                    "loan; release each buffer once, as it was allocated"
                )
            pool, slab = self._lent[pointer]
            pool.free(slab, after, self._event_device)
            del self._lent[pointer]

    def reserve(self) -> None:
        """Back every slab now. Blocks the host for the pinning. Raises HostBudgetError if the arena may not
        hold that much."""
        with self._lock:
            for pool, count in self._classes:
                while len(pool.all) < count:
                    pool.ready.append(pool.make())

    def reset(self) -> None:
        """Take every buffer back. For between steps: no copy of a buffer that is still lent may be in
        flight."""
        with self._lock:
            for pool, _ in self._classes:
                pool.reset()
            self._lent.clear()
            self._unpooled.clear()

    def clear(self) -> None:
        """Release every slab. Blocks the host until the last copies of unpinned buffers have ended. Raises
        PoolError, and frees nothing, while slabs are lent."""
        with self._lock:
            if self._lent:
                lent_bytes = sum(pool.nbytes for pool, _ in self._lent.values())
                raise PoolError(
                    f"{len(self._lent)} slabs of {lent_bytes:,} bytes are lent, of {self.total_bytes:,}; "
                    "release them before clear"
                )
            for _, event in self._unpooled_in_use:
                if self._event_device is not None:
                    self._event_device.synchronize(event)
            self._unpooled_in_use.clear()
            for pool, _ in self._classes:
                pool.release_free()

    def __del__(self) -> None:
        # no lock, and only calls that finalisers may make; a slab still lent stays with the arena
        for pool, _ in getattr(self, "_classes", ()):
            pool.release_free()
