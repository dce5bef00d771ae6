"""What the tier knows of a block of saved bytes.

One invariant: the two refer to each other only while the block can be read: `DiskTier.forget` and a write
that did not happen part them, so no cycle is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from offload.device.base import Event
    from offload.disk.file import Extent
    from offload.disk.worker import Job
    from offload.memory.arena import Block


class DiskSettings(NamedTuple):
    """What a disk was made with; the fields are those of OffloadConfig."""

    directory: str
    limit_bytes: int | None = None
    ahead_bytes: int | None = None


class Spilled(Protocol):
    """A block of saved bytes that has left the device: what the tier reads and writes of it."""

    nbytes: int
    host: Block | None
    event: Event | None
    stored: Stored | None

    @property
    def label(self) -> object: ...


@dataclass(slots=True, eq=False)
class Stored:
    """What the tier has of one block, from its spill until no job of it is left.

    block: None once it was freed. extent: set by a writer's thread, valid once `write` is None.
    write, read: the jobs under way.
    host: what the read under way fills; of a freed block, what goes back. event: the last use of that.
    is_ahead: it is read soon, so its host bytes stay.
    """

    block: Spilled | None
    nbytes: int
    extent: Extent | None = None
    write: Job[Stored] | None = None
    read: Job[Stored] | None = None
    host: Block | None = None
    event: Event | None = None
    is_ahead: bool = False
