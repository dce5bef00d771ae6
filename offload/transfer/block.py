"""A range of bytes of one device storage that may leave for the host and come back: where its bytes are, and
the event of their last copy.

One invariant: a block's state changes only as `LEGAL_MOVES` lists. `move_to` checks that. The transfer engine
writes the usual moves itself, without the call, after it has compared the state.

    RESIDENT --spill--> SPILLING --settle--> SPILLED --restore--> RESTORING --wait--> RESTORED
       ^                   |                    ^                                        |
       +------ reclaim ----+                    +------- drop: the host copy is clean ---+

reclaim: its reader comes before its spill has been settled, so the block stays on the device. Without a host
block it stays RESIDENT. If its spill is settled under a device limit before anything has read it, it is
RESTORED, and can still be dropped. Every state may end in RELEASED, which `reclaim_freed` writes: its readers
are gone, or the step has ended.

A block holds the device bytes strongly only while RESIDENT, RESTORING or RESTORED. Bytes that leave are held
by the transfer that moves them. A record that dies frees its block, as `free` does, on whichever thread that
happens. Freeing takes no lock. It drops the device bytes and appends the block to a deque of its engine,
which reclaims the counts and the host bytes at its next call.

A CapturedGraph is one capture of a program that copies, and the graph that it became. It names the host
blocks that its replays touch, so that nobody else borrows them before its region is released.

A layout says where the bytes of a tensor lie in its storage, and how to build the same view over other bytes:
with the size, the strides and the dtype of the one that autograd saved, and its place (`place_of`). Others
would choose other kernels and change bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, Protocol

import torch

from offload.device import Event, Lane
from offload.device.cuda import sanitizing
from offload.disk.worker import Stored
from offload.errors import RecordStateError
from offload.ids import GroupId, SlotId
from offload.memory.arena import Block

ALIGNMENT = 16
"""Bytes; the largest item size of a torch dtype. Spans start on it, so that any view over a copied span stays
aligned."""

PLACES = 256
"""Bytes; kernels are chosen by addresses modulo at most this: cuBLASLt's heuristics look at 256, vector loads
at 16 to 64."""

ALLOCATED_AT = 64
"""Bytes; all allocators of torch align to them, so another address is one of memory that others allocated."""


class ViewLayout(NamedTuple):
    """How one tensor looks at its storage. offset: elements of dtype from the start of the storage."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(slots=True, init=False, eq=False, repr=False)
class WeakStorage:
    """A weak reference to a storage. While it lives, the address of the StorageImpl names no other
    storage."""

    key: int = field(init=False)
    _pointer: Any = field(init=False)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.key = storage._cdata
        self._pointer = storage._weak_ref()

    def refer_to(self, storage: torch.UntypedStorage) -> None:
        """From here on to another storage."""
        before, self._pointer = self._pointer, storage._weak_ref()
        self.key = int(storage._cdata)
        _free_weak_ref(before)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if something still holds it."""
        return torch.UntypedStorage._new_with_weak_ptr(self._pointer)

    def __del__(self) -> None:
        try:
            pointer = self._pointer
        except AttributeError:  # an interrupt in its constructor
            return
        _free_weak_ref(pointer)  # bound below: `torch` may be gone when the interpreter exits


_free_weak_ref: Callable[[Any], None] = torch.UntypedStorage._free_weak_ref


class Layouts(dict[tuple[Any, ...], ViewLayout]):
    """One object for all equal layouts, by the equal tuple: a model saves few distinct ones, many times each.

    Whatever else their number is, no more than `_MOST` are remembered; what is forgotten lives on with whom
    it was given to.
    """

    _MOST = 4096

    def __missing__(self, look: tuple[Any, ...]) -> ViewLayout:
        if len(self) >= self._MOST:
            self.clear()
        layout = ViewLayout(*look)
        self[layout] = layout
        return layout


def span_of(tensor: torch.Tensor, storage_bytes: int) -> tuple[int, int]:
    """Start and stop of the bytes from a tensor's first element to its last, widened to `ALIGNMENT` within
    its storage."""
    itemsize = tensor.element_size()
    start = int(tensor.storage_offset()) * itemsize
    if tensor.is_contiguous():
        stop = start + tensor.numel() * itemsize
    else:
        last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        stop = start + (last + 1) * itemsize
    return (start - start % ALIGNMENT, min(storage_bytes, stop + -stop % ALIGNMENT))


def bytes_of(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """These bytes as a 1-D uint8 tensor that shares and holds the storage."""
    if sanitizing():
        return _unseen(storage, torch.uint8, start, (nbytes,), (1,))
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (nbytes,), (1,))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements, in any order, are a range of memory without gaps, each once."""
    like = torch.empty_like(tensor, device="meta") if tensor.layout is torch.strided else None
    return like is not None and like.stride() == tensor.stride()


def overlaps_itself(layout: ViewLayout) -> bool:
    """Whether two of its elements may be the same bytes (an expanded tensor): such a view cannot be written
    element by element."""
    reach = 0
    for stride, size in sorted(zip(layout.stride, layout.size, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def view_of(storage: torch.UntypedStorage, layout: ViewLayout, start: int) -> torch.Tensor:
    """The view that `layout` describes, over a storage whose first byte is byte `start` of the original
    one."""
    size, stride, offset, dtype = layout
    offset, odd = divmod(offset * dtype.itemsize - start, dtype.itemsize)
    if odd:  # an item that lies across its own size, as only memory of others can
        storage = bytes_of(storage, odd, storage.nbytes() - odd).clone().untyped_storage()
    if sanitizing():
        return _unseen(storage, dtype, offset, size, stride)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


def place_of(storage: torch.UntypedStorage, start: int) -> int:
    """How far byte `start` of a storage lies behind where an allocation may begin, modulo `PLACES`."""
    return (storage.data_ptr() % ALLOCATED_AT + start) % PLACES


def empty_at(like: ViewLayout, device: torch.device) -> torch.Tensor:
    """A new tensor of that size, stride and dtype, `like.offset` elements behind the begin of its storage."""
    size, stride, offset, dtype = like
    last = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return torch.empty(offset + last + 1, dtype=dtype, device=device).as_strided(size, stride, offset)


def _unseen(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
) -> torch.Tensor:
    """A tensor over bytes that are there already: the sanitizer would see a kernel that writes all of it,
    beside a copy that still reads it."""
    with torch._C._DisableTorchDispatch():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)


@dataclass(slots=True, eq=False)
class CapturedGraph:
    """One capture, and the graph that it became.

    spill_bytes, restore_bytes: copied by each replay. kept_bytes: should have left at the capture, and stay
        in the graph's memory.
    host_blocks: that its spills write. sources: graphs whose spills its restores read.
    borrowed: host buffers that its copies read, held until the region is released.
    before_replay: what features do before each replay, whether it copies or not.
    """

    name: str
    before_replay: list[Callable[[], None]] = field(default_factory=list)
    host_blocks: list[Block] = field(default_factory=list)
    borrowed: list[object] = field(default_factory=list)
    # copy lanes that are part of the capture: they must be joined
    forked: dict[Lane, None] = field(default_factory=dict)
    sources: dict[CapturedGraph, None] = field(default_factory=dict)
    read_elsewhere: bool = False  # another graph restores what this one spills
    unread: bool = False  # ... and has not done so since the last replay
    spill_bytes: int = 0
    restore_bytes: int = 0
    kept_bytes: int = 0
    replays: int = 0
    last_use: Event | None = None

    @property
    def copies(self) -> bool:
        return bool(self.spill_bytes or self.restore_bytes)

    def reads(self, other: CapturedGraph) -> None:
        """A restore captured here reads what `other` spills."""
        self.sources[other] = None
        if other is not self:
            other.read_elsewhere = True


class BlockState(Enum):
    # members are compared by identity; Enum's own hash is a Python call, two of them a move
    __hash__ = object.__hash__
    RESIDENT = auto()  # on the device, in the storage that was saved
    SPILLING = auto()  # D2H issued; its transfer keeps the device storage alive
    SPILLED = auto()  # the host block holds the only copy that is ours
    RESTORING = auto()  # H2D issued; readers must wait for its event
    RESTORED = auto()  # on the device, the host copy is clean, and the compute lane is ordered after the copy
    RELEASED = auto()  # no more readers: they are gone, or the step has ended


_S = BlockState
LEGAL_MOVES: dict[BlockState, frozenset[BlockState]] = {
    _S.RESIDENT: frozenset({_S.SPILLING, _S.RESTORED, _S.RELEASED}),
    _S.SPILLING: frozenset({_S.SPILLED, _S.RESIDENT, _S.RELEASED}),
    _S.SPILLED: frozenset({_S.RESTORING, _S.RELEASED}),
    _S.RESTORING: frozenset({_S.RESTORED, _S.RELEASED}),
    _S.RESTORED: frozenset({_S.SPILLED, _S.RELEASED}),
    _S.RELEASED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Transfer:
    """A piece in flight. Its bytes stay alive until the event has passed, or until the lane that may reuse
    them waits for the event.

    blocks: what moves. keepalive: device tensors, sources of a spill or destinations of a restore, one a
        block; of both none once it is settled.
    lane: the compute lane whose allocator owns them.
    capture: the graph that its copies are part of, None if they were issued; only the same capture may wait
        for the event.
    """

    blocks: tuple[DeviceBlock, ...]
    keepalive: tuple[torch.Tensor, ...]
    lane: Lane
    event: Event
    nbytes: int
    capture: CapturedGraph | None
    settled: bool = False  # passed, or `lane` waits for it


class Holder(Protocol):
    """Who holds the bytes of a block that stays. probe: an alias of what was saved."""

    probe: torch.Tensor | None


@dataclass(slots=True, eq=False, repr=False)
class DeviceBlock(WeakStorage):
    """Bytes `start` to `stop` of one storage, saved by one chunk: a weak reference to that storage, later to
    the restored one, or to a packed copy.

    It has few objects of its own, because each that lives as long as a saved tensor is one more for Python's
    collector to walk.

    group, slot: the group that saved it, and its number there.
    start, nbytes: the bytes of the saved storage that move. lead: the place of
    the first of them (`place_of`), which it has again after a restore.
    readers: how many times it was saved. unread: how many of these saves have not been read in the current
        pass of a backward. pass_no: the number of that pass.
    touch: the order of its latest save, so of its first read in a backward.
    reread_soon: a second pass follows, for which its restored bytes stay once the first has read them all.
    external: written from outside autograd; that the storage lives does not mean that its bytes are the saved
        ones.
    capture: the graph in which it was saved, and whose replays write its host block; None outside of
        captures.
    holders: for a block that counts what stays by plan, weak references to the handles that hold the bytes;
        the block itself has none to move. storages: how many storages it counts.
    """

    group: GroupId
    slot: int
    start: int
    nbytes: int
    device_bytes: torch.UntypedStorage | None
    freed_blocks: deque[DeviceBlock]  # its engine's
    # byte of the saved storage that is the first of the one referred to: 0, after a restore `start - lead`
    base: int = 0
    lead: int = 0
    is_freed: bool = False
    state: BlockState = BlockState.RESIDENT
    lane: Lane | None = None  # the compute lane that saved it, and so comes after its writer
    capture: CapturedGraph | None = None
    host: Block | None = None
    event: Event | None = None  # last use of the host block: its spill, then each restore
    transfer: Transfer | None = None  # the one under way, or the last
    external: bool = False
    copies: int = 0  # 1: it was copied out, 2: and back
    readers: int = 0
    unread: int = 0
    pass_no: int = 0
    touch: int = 0
    reread_soon: bool = False
    holders: list[Callable[[], Holder | None]] | None = None
    storages: int = 1
    checksum: int | None = None
    refused: bool = False  # it should have left, and found no room on the host
    stored: Stored | None = None  # with a disk, which may have the bytes instead of `host`

    def __post_init__(self) -> None:
        assert self.device_bytes is not None  # the storage that was saved
        self.key = self.device_bytes._cdata  # `WeakStorage`, without a call
        self._pointer = self.device_bytes._weak_ref()

    @property
    def label(self) -> SlotId:
        return SlotId(self.group, self.slot)

    @property
    def stop(self) -> int:
        return self.start + self.nbytes

    def storage_keys(self) -> set[int]:
        """Keys of the storages whose bytes these are."""
        if self.holders is None:
            return {self.key}
        probes = (holder.probe for holder in self.living_holders())
        return {probe.untyped_storage()._cdata for probe in probes if probe is not None}

    def living_holders(self) -> Iterator[Holder]:
        for reference in self.holders or ():
            holder = reference()
            if holder is not None:
                yield holder

    def move_to(self, state: BlockState) -> None:
        legal = LEGAL_MOVES[self.state]
        if state not in legal:
            names = ", ".join(sorted(move.name for move in legal)) or "none"
            raise RecordStateError(
                f"{self.label} ({self.nbytes:,} bytes) cannot move {self.state.name} -> {state.name}; legal "
                f"from here: {names}"
            )
        self.state = state

    def free(self) -> None:
        """End the block: it can no longer be read. Takes no lock, so a finaliser may call it on any thread,
        also during a call of the engine."""
        if not self.is_freed and self.state is not BlockState.RELEASED:
            self.is_freed = True
            self.device_bytes = None
            self.freed_blocks.append(self)

    def __repr__(self) -> str:
        return f"DeviceBlock({self.label}, {self.nbytes:,} bytes, {self.state.name})"


def living(blocks: Iterable[DeviceBlock]) -> Iterator[DeviceBlock]:
    """Blocks that somebody can still read."""
    return (block for block in blocks if not block.is_freed)
