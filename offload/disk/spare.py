"""Host memory beside the arena, for a reader that finds no host block: one tensor's bytes, until they are on
the device.

One invariant: nothing is unpinned before its last copy has passed, and nothing while a graph is captured.
"""

from __future__ import annotations

from offload.device.base import Device, Event, HostMemory
from offload.memory.arena import Block
from offload.memory.free_ranges import round_up
from offload.memory.growth import PAGE_BYTES


class SpareMemory:
    """Blocks that are no arena's. False while there are none."""

    def __init__(self, device: Device, registration_bytes: int) -> None:
        self._device = device
        self._registration_bytes = registration_bytes
        self._memory: dict[int, HostMemory] = {}  # by the id of the block that was made of it
        self._used: list[tuple[Block, Event | None]] = []  # and the last use

    def __contains__(self, host: Block) -> bool:
        return id(host) in self._memory

    def __bool__(self) -> bool:
        return bool(self._memory)

    def take(self, nbytes: int) -> Block:
        """Pin a block of its own. Blocks the host for that. Raises HostBudgetError if the system refuses."""
        memory = self._device.host_memory(round_up(nbytes, PAGE_BYTES), self._registration_bytes)
        extents, left = [], nbytes
        for piece in memory.pieces:
            extents.append(piece[: min(left, piece.numel())])
            left -= extents[-1].numel()
        host = Block(nbytes, tuple(extents), (), (), ())
        self._memory[id(host)] = memory
        return host

    def give_back(self, host: Block, event: Event | None) -> None:
        """End the loan, as HostArena.give_back does. Blocks the host: never."""
        self._used.append((host, event))

    def release_passed(self) -> None:
        """Unpin what nobody uses any more. Blocks the host for the unpinning."""
        if self._device.is_capturing():
            return
        used, self._used = self._used, []
        for host, event in used:
            if event is None or self._device.poll(event):
                self._memory.pop(id(host)).release()
            else:
                self._used.append((host, event))

    def close(self) -> None:
        """Unpin everything. Blocks the host for the last copies."""
        for _, event in self._used:
            if event is not None:
                self._device.synchronize(event)
        self._used.clear()
        for memory in self._memory.values():
            memory.release()
        self._memory.clear()
