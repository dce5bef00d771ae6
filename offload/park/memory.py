"""Host memory of one kind: sections with a place for each storage, kept from one cycle to the next.

One invariant: as long as the storages have the sizes of the last cycle, nothing is pinned or allocated. The
memory goes back with this object, so whoever holds that, such as a state dict, has the bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from offload.device import Event
from offload.errors import HostBudgetError
from offload.memory.arena import HostArena
from offload.params.sections import FlatSpec, HostSection, lay_out

SECTION_BYTES = 1 << 30
"""Of one section, which is one piece of a copy to the host and one registration: 60 ms to pin."""


class KindMemory:
    """Sections of an arena. arrived: the event after the last copy from it, to which wake() writes."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self.sizes: tuple[int, ...] = ()
        self._sections: list[HostSection] = []
        self.slots: list[list[tuple[int, Tensor]]] = []
        """By section: a storage's number in `sizes`, and its place, 1-D, uint8."""
        self.nbytes = self.pageable_bytes = 0
        self.arrived: list[Event] = []
        weakref.finalize(self, _give_back, self._sections, self.arrived, later=True).atexit = False

    def make(self, sizes: Sequence[int], *, pageable: bool) -> None:
        """Have places for storages of these sizes, in bytes. pageable: in ordinary memory where the budget
        has no more. Blocks the host for the pinning. Raises HostBudgetError, and has nothing then."""
        self.close()
        options = {"bucket_numel": SECTION_BYTES, "section_numel": SECTION_BYTES, "whole": True}
        try:
            for layout in lay_out([*enumerate(sizes)], **options):  # type: ignore[arg-type]
                try:
                    section = HostSection(self._arena, layout, [FlatSpec("bytes", 1, pinned=True)])
                except HostBudgetError:
                    if not pageable:
                        raise
                    section = HostSection(self._arena, layout, [FlatSpec("bytes", 1, pinned=False)])
                    self.pageable_bytes += section.nbytes
                self.nbytes += section.nbytes
                self._sections.append(section)
                places = ((at, section.slot("bytes", start, size)) for at, start, size in layout.parameters)
                self.slots.append([*places])
        except BaseException:
            self.close()
            raise
        self.sizes = tuple(sizes)

    def close(self) -> None:
        """Give the memory back. Nothing may use it any more but copies before `arrived`."""
        _give_back(self._sections, self.arrived, later=False)
        self.sizes, self.slots, self.nbytes, self.pageable_bytes = (), [], 0, 0


def _give_back(sections: list[HostSection], arrived: list[Event], *, later: bool) -> None:
    """later: from a finaliser, without a lock."""
    while sections:
        sections.pop().close(after=arrived[-1] if arrived else None, later=later)
