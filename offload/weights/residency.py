"""Loads, drops and write-backs of blocks: how their bytes cross the link, and in which order.

One invariant: beside the blocks that the plan keeps, at most `window_bytes` of streamed weights are on the
device, unless blocks that are in use, or that somebody else has an alias of, leave no other choice; the
second is said.

# [Order: weights room]
# hazard  allocator reuse: `h2d` writes bytes that work issued to `compute` before still uses.
# edge    h2d waits for an event recorded on the compute lane after the allocation.
# alive   the parameter's storage.
# proof   tests/property/test_weight_edges.py, edge "weights room"
#
# [Order: weights int8]
# hazard  RAW: INT8 weights are expanded before `h2d` has written their bytes.
# edge    the block keeps the event after its way in; the lane that expands waits for it.
# alive   the block holds what is staged until it has issued the expansion, on the lane of its allocation.
# proof   tests/property/test_weight_edges.py, edge "weights int8"
#
# [Order: weights here]
# hazard  RAW: a lane reads a weight before `h2d` has written it, or another lane has expanded it.
# edge    the block keeps the event after its way in, or after its expansion; each lane that uses it waits
#         for it, once.
# alive   the parameter's storage; the master belongs to the weight.
# proof   tests/property/test_weight_edges.py, edge "weights here"
#
# [Order: weights out]
# hazard  RAW: `d2h` copies a trained weight that a lane is still writing.
# edge    an event on each lane that used the block; d2h waits for them.
# alive   the parameter's storage, which is freed behind the copy.
# proof   tests/property/test_weight_edges.py, edge "weights out"
#
# [Order: weights home]
# hazard  RAW: `h2d` reads a master that `d2h` still writes: the lane that fetches ahead need not be the one
#         that gave the block's bytes back.
# edge    the block keeps the event of its last way out; h2d waits for it.
# alive   the weight's master.
# proof   tests/property/test_weight_edges.py, edge "weights home"
#
# [Order: weights again]
# hazard  WAR: `h2d` writes the bytes that a step has made old while a lane still reads them.
# edge    an event on each lane that used the block; h2d waits for them.
# alive   the parameter's storage.
# proof   tests/property/test_weight_edges.py, edge "weights again"
#
# [Order: weights stepped]
# hazard  RAW: `h2d` reads a master that the step of an optimizer still writes, on `d2h`.
# edge    the optimizer's bucket keeps the event of its way out; h2d waits for it.
# alive   the weight's master.
# proof   tests/property/test_weight_edges.py, edge "weights stepped"
#
# [Order: weights gone]
# hazard  allocator reuse: the lane that the bytes came from gets them back while another lane, or a copy,
#         still uses them.
# edge    that lane waits for an event of each other reader, for the block's copies, and for steps in place.
# alive   nothing has to: the bytes are free behind these events.
# proof   tests/property/test_weight_edges.py, edge "weights gone"
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from offload.device import CopyPair, Event, Lane
from offload.device.rows import expand_rows
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.ids import Owner
from offload.sizes import bytes_text
from offload.telemetry.speaker import Once, speaker
from offload.transfer.copier import Direction, Lease, Priority, Stalls
from offload.transfer.limits import Cap
from offload.weights.hooks import Readers
from offload.weights.order import Order
from offload.weights.weight import BlockWeights, Weight

logger = speaker(__name__)


class Policy(Protocol):
    """A runtime of compat, which decides in the plan's place what is fetched ahead and what leaves, for the
    blocks of one model. They have all the room they ask for. It changes when bytes move, never results.
    Called under the engine's lock."""

    def admit(self, block: BlockWeights, priority: Priority) -> bool:
        """Before the block is loaded: make room for it. False refuses one that is not REQUIRED."""

    def loaded(self, block: BlockWeights) -> None:
        """Its way in is issued."""

    def used(self, block: BlockWeights) -> None:
        """The current lane is about to read it. What comes next is fetched afterwards."""

    def dropped(self, block: BlockWeights) -> None:
        """It is off the device. `block.left` tells when what was written is back on the host."""


class Residency:
    """The device's share of some blocks. client: whose copies they are, "weights" or "gradients". policy:
    decides in the plan's place. window_bytes: of blocks that the plan does not keep, on the device at once.
    readers: threads that may read beside a forward. Called under the engine's lock; blocks the host:
    only in `flush`, `drop` and `use`."""

    def __init__(
        self, engine: OffloadEngine, client: str, blocks: Sequence[BlockWeights], policy: Policy | None = None
    ) -> None:
        self.engine, self.device, self.blocks = engine, engine.device, blocks
        self._client, self.policy, self.readers = client, policy, Readers()
        self.share = engine.limits.contributor(client, self)
        self._cap: Cap = "weights_window_bytes" if client == "weights" else "gradients_window_bytes"
        self.window_bytes = self._planned_bytes = self._least_bytes = 0
        self.in_bytes = self.out_bytes = self.hits = self.misses = 0
        self.stalls = Stalls(engine.device)
        self.present_bytes = self.present_bytes_peak = 0
        self._said = Once()
        self._last_waits: dict[tuple[int, str], Event] = {}  # by lane and order
        self._ended = self.counted

    @property
    def counted(self) -> tuple[int, int, int, int]:
        """Bytes to the device and to the host, uses that found their block there or on its way, and uses that
        did not; ever."""
        return self.in_bytes, self.out_bytes, self.hits, self.misses

    def end_step(self) -> tuple[list[int], int, float]:
        """Return what `counted` has counted since the last call; then the number and the ms that
        `Stalls.end_step` gives."""
        self.stalls, count, ms = self.stalls.end_step()
        before, self._ended = self._ended, self.counted
        return [*map(operator.sub, self._ended, before)], count, ms

    # -- the window ------------------------------------------------------------------------------------------
    def bound(self, window_bytes: int, least_bytes: int) -> None:
        """The window of a plan. Others may bound it lower, to `least_bytes`."""
        self._planned_bytes, self._least_bytes = window_bytes, min(window_bytes, least_bytes)
        self.share.bound(self._cap, window_bytes, is_own=True)
        self.follow_limits()

    def follow_limits(self) -> bool:
        """Between steps: take the bounds that others contribute now. Whether the window is smaller."""
        before, bound = self.window_bytes, self.share.least(self._cap)
        self.window_bytes = max(self._least_bytes, self._planned_bytes if bound is None else bound)
        return self.window_bytes < before

    # -- in --------------------------------------------------------------------------------------------------
    def fetch_ahead(
        self, order: Order, stay: Collection[int], ends: Callable[[BlockWeights], bool], piece_bytes: int = 0
    ) -> None:
        """Fetch what comes next, by the piece, as long as it fits beside what comes before it, while that is
        expanded. ends: whether a block is not fetched, nor what comes after it. piece_bytes: at least, but
        for the last one."""
        seen, before, expanding = set(stay), 0, 0  # bytes
        piece: list[BlockWeights] = []
        for index in order.coming():
            if index in seen:
                continue
            block = self.blocks[index]
            if ends(block):
                break
            coming = sum(each.link_bytes for each in piece)
            if not block.present:
                expanding = max(expanding, block.expanded_bytes)
                fits = before + block.link_bytes + expanding <= self.window_bytes
                if not (block.keep or fits or not before) or self.is_far_ahead(block, *piece):
                    break
                if not self.make_room(block, seen, order.coming(), coming):
                    break
                piece.append(block)
                if coming + block.link_bytes >= piece_bytes:
                    if not self.load(piece, Priority.SPECULATIVE):
                        return
                    piece = []
            seen.add(index)
            if not block.keep:
                before += block.held_bytes or block.link_bytes
                expanding = max(expanding, block.expanded_bytes if block.staged else 0)
            if len(seen) == len(self.blocks):
                break
        if piece:
            self.load(piece, Priority.SPECULATIVE)

    def load(self, blocks: Sequence[BlockWeights], priority: Priority) -> bool:
        """Bring the blocks in by one piece, but for weights whose step is not issued: they are stale. False,
        and nothing has moved, where there are such, or the policy, admission or the device's memory refuses,
        and it is not REQUIRED. Order: [Order: weights room]."""
        device, owner = self.device, Owner(self._client, blocks[0].name)
        if self.policy is not None and not all(self.policy.admit(block, priority) for block in blocks):
            return False
        # one whose module dies meanwhile is taken out by a finaliser
        weights = [weight for block in blocks for weight in tuple(block.weights)]
        if priority < Priority.REQUIRED and any(weight.is_under_way for weight in weights):
            return False
        if empty := [weight.name for weight in weights if weight.without_values]:
            raise OffloadError(f"{empty[0]} is on meta, without values; call offload.load_weights() first")
        nbytes = sum(block.link_bytes for block in blocks)
        lease = self.engine.copier.ask(nbytes, Direction.H2D, owner, priority)
        if lease is None:
            return False
        filled = [weight for weight in weights if not weight.int8]
        try:
            staged = [(weight, device.empty(weight.link_bytes)) for weight in weights if weight.int8]
            self._refill(filled)
        except BaseException as error:
            lease.done(None)
            if isinstance(error, torch.OutOfMemoryError) and priority < Priority.REQUIRED:
                return False
            raise
        home = device.compute
        room = device.record(home)
        device.wait(device.h2d, room, "weights room")
        for block in blocks:
            block.present, block.home = True, home
            block.staged = [each for each in staged if each[0].block is block]
        self._count(nbytes)
        for weight in filled:
            weight.stale = True
        try:
            also = [(flat, weight.master) for weight, flat in staged]
            self._copy_in(blocks, filled, lease, also, (room,))
        except BaseException:
            for block in blocks:
                self.drop(block)
            raise
        if self.policy is not None:
            for block in blocks:
                self.policy.loaded(block)
        return True

    def _refill(self, weights: Iterable[Weight]) -> None:
        """Give all of the weights memory on the device, or none of them. Raises torch.OutOfMemoryError."""
        filled: list[Weight] = []
        try:
            for weight in weights:
                self.device.refill(weight.storage, weight.nbytes)
                filled.append(weight)
        except BaseException:
            for weight in filled:
                self.device.free(weight.storage)
            raise

    def _copy_in(
        self,
        blocks: Sequence[BlockWeights],
        stale: Iterable[Weight],
        lease: Lease,
        also: Sequence[CopyPair] = (),
        behind: Sequence[Event] = (),
    ) -> None:
        """Copy in those of the stale weights whose step is issued. behind: what h2d waits for already. Order:
        [Order: weights home], [Order: weights stepped]."""
        device, coming = self.device, [weight for weight in stale if not weight.is_under_way]
        left = [event for event in dict.fromkeys(block.left for block in blocks) if event is not None]
        for event in left:
            device.wait(device.h2d, event, "weights home")
        stepped = [event for weight in coming for event in weight.ends_of_step()]
        for event in stepped:
            device.wait(device.h2d, event, "weights stepped")
        pairs = [*((weight.on_device, weight.master) for weight in coming), *also]
        nbytes = sum(to.numel() for to, _ in pairs)
        for block in blocks:
            block.readers.clear()
        owner = Owner(self._client, blocks[0].name)
        try:
            behind = () if device.is_capturing() else (*behind, *left, *stepped)
            arrived = self.engine.copier.copy(lease, Direction.H2D, owner, pairs, nbytes, behind=behind)
        except BaseException:
            lease.done(None)
            arrived = device.record(device.h2d)
            raise
        finally:
            for block in blocks:
                block.arrived, block.left_unseen = arrived, False
        for weight in coming:
            weight.stale = False
        self.in_bytes += nbytes

    def refresh(self, block: BlockWeights, weights: Iterable[Weight]) -> None:
        """Copy in these weights of a block that is present: they are stale no more. Their steps are issued.
        Order: [Order: weights again]."""
        if stale := [weight for weight in weights if weight.stale]:
            device, nbytes = self.device, sum(weight.nbytes for weight in stale)
            behind = [device.record(lane) for lane in block.readers.values()]
            behind += [] if block.arrived is None else [block.arrived]
            for event in behind:
                device.wait(device.h2d, event, "weights again")
            owner = Owner(self._client, block.name)
            lease = self.engine.copier.ask(nbytes, Direction.H2D, owner, Priority.REQUIRED)
            assert lease is not None  # REQUIRED
            self._copy_in((block,), stale, lease, behind=behind)

    def stays(self, block: BlockWeights, order: Iterable[int]) -> bool:
        """Return True if the block is on the device, for this lane alone, and is used again before others
        need its room."""
        if not block.present or [*block.readers] != [id(self.device.compute)]:
            return False
        before = {block.index}
        for index in order if not block.keep else ():
            if index == block.index:
                others = [self.blocks[other] for other in before]
                return sum(b.nbytes for b in others if not b.keep) <= self.window_bytes
            before.add(index)
        return block.keep

    def is_far_ahead(self, coming: BlockWeights, *piece: BlockWeights) -> bool:
        """Return True if the limits of weights that are fetched ahead refuse one more. piece: to be fetched
        with it."""
        unused = [(each.link_bytes, None) for each in piece]
        here = (each for each in self.blocks if each.present and not each.readers and each is not coming)
        return self.refuses(coming.link_bytes, [*unused, *((each.link_bytes, each.arrived) for each in here)])

    def refuses(self, nbytes: int, unused: Iterable[tuple[int, Event | None]]) -> bool:
        """Predicate: the limits refuse so many bytes beside unused ones, with the events of their arrival."""
        limits, poll = self.engine.limits, self.device.poll
        ahead, in_flight = limits.weights_ahead_bytes, limits.weights_in_flight_bytes
        of_kind = limits.kind_ahead_bytes
        if ahead is None and in_flight is None and of_kind is None:
            return False
        unused = [*unused]
        total = nbytes + sum(size for size, _ in unused)
        if (ahead is not None and total > ahead) or (of_kind is not None and total > of_kind and unused):
            return True
        going = (size for size, event in unused if event is None or not poll(event))
        return in_flight is not None and nbytes + sum(going) > in_flight

    def _count(self, nbytes: int) -> None:
        self.present_bytes += nbytes
        self.present_bytes_peak = max(self.present_bytes_peak, self.present_bytes)

    def expand(self, block: BlockWeights) -> None:
        """The block's INT8 weights become the parameters' elements, on the lane that its bytes come from;
        what was staged is free behind that. Raises torch.OutOfMemoryError; they are staged then. Order:
        [Order: weights int8]."""
        device, lane, arrived = self.device, block.home, block.arrived
        assert lane is not None  # it is present
        assert arrived is not None
        with nullcontext() if lane is device.compute else device.use_lane(lane):
            empty = [weight for weight, _ in block.staged if not weight.storage.nbytes()]
            self._refill(empty)
            self._count(sum(weight.nbytes for weight in empty))
            self.stalls.wait(lane, arrived, "weights int8")
            for weight, flat in block.staged:
                device.note_read(lane, flat)
                parameter = weight.elements(weight.on_device)
                expand_rows(*weight.int8_views(flat), parameter)
                device.note_write(lane, parameter)
            block.arrived = device.record(lane)
        self._count(-sum(flat.numel() for _, flat in block.staged))
        block.staged = []
        block.readers[id(lane)] = lane

    def wait_for(self, lane: Lane, event: Event, order: str) -> None:
        """Make the lane wait for the event (`Stalls.wait`), once for the pieces of one copy."""
        if self._last_waits.get((id(lane), order)) is not event:
            self._last_waits[id(lane), order] = event
            self.stalls.wait(lane, event, order)

    def use(self, block: BlockWeights, order: Iterable[int], weights: Sequence[Weight] | None = None) -> bool:
        """The current lane is about to read these of the block's weights, or all, whose steps are issued.
        Whether the block was there, or on its way. Blocks the host as `_in_room`. Order: [Order: weights
        here]."""
        device, found = self.device, block.present
        order = () if found and not block.staged else [*order]
        if not found:
            self._in_room(block, order, lambda: self.load((block,), Priority.REQUIRED))
        if block.staged:
            self._in_room(block, order, lambda: self.expand(block))
        weights = block.weights if weights is None else weights
        self.refresh(block, weights)
        lane = device.compute
        if id(lane) not in block.readers:
            block.readers[id(lane)] = lane
            assert block.arrived is not None
            self.wait_for(lane, block.arrived, "weights here")
        for weight in weights:
            device.note_read(lane, weight.on_device)
        return found

    def _in_room(self, block: BlockWeights, order: Sequence[int], bring: Callable[[], object]) -> None:
        """Make room, and do it; where the device is full, with nothing else on it that could leave. Blocks
        the host for steps of blocks that have to leave and are not issued."""
        fits = self.make_room(block, (), order)
        for other in () if fits else self.blocks:
            if other is not block and not other.may_leave:
                for weight in other.weights:
                    if weight.stepped_here:
                        weight.await_step()
                if fits := self.make_room(block, (), order):
                    break
        if not fits:
            self._say_over(block)
            self._drop_others(block, kept=False)
        try:
            bring()
        except torch.OutOfMemoryError:
            self._drop_others(block, kept=True)
            bring()

    def _drop_others(self, block: BlockWeights, *, kept: bool) -> None:
        """Drop what was fetched ahead, or, `kept`, what the plan keeps: what is needed now is worth more."""
        for other in self.blocks:
            if other is not block and other.may_leave and (kept or not other.keep):
                self.drop(other)

    # -- out -------------------------------------------------------------------------------------------------
    def write_back(self, *blocks: BlockWeights, only: Weight | None = None) -> None:
        """Send what was written on the device to the masters, as one piece. only: of these blocks. Order:
        [Order: weights out]; who wrote has waited for the way in, so the master is read no more."""
        device = self.device
        weights = (weight for block in blocks for weight in block.weights)
        written = [weight for weight in weights if weight.dirty and only in (None, weight)]
        if not written:
            return
        for weight in written:
            weight.take_host_writes()  # which raises
        lanes = {key: lane for block in blocks for key, lane in block.readers.items()}
        for lane in lanes.values():
            device.wait(device.d2h, device.record(lane), "weights out")
        pairs = [(weight.master, weight.on_device) for weight in written]
        left = self.engine.copier.of(Owner(self._client, blocks[0].name)).send(pairs)
        for weight in written:
            weight.block.left, weight.block.left_unseen = left, True
            weight.dirty = False
            weight.writes += 1
            self.out_bytes += weight.nbytes

    def drop(self, block: BlockWeights) -> None:
        """Take the block off the device: without a copy where the masters are its bytes. Blocks the host for
        another thread's call that reads it. Order: [Order: weights gone]."""
        device, home = self.device, block.home
        assert home is not None  # it is present
        if block.called:
            self.readers.await_calls(block.called)
            block.called = {}
        self.write_back(block)
        for lane in block.readers.values():
            if lane is not home:
                device.wait(home, device.record(lane), "weights gone")
        for event in (event for w in block.weights if w.stepped_here for event in w.ends_of_step()):
            self.stalls.wait(home, event, "weights gone")
        if block.arrived is not None and id(home) not in block.readers:
            self.stalls.wait(home, block.arrived, "weights gone")
        if block.left is not None and block.left_unseen:
            self.wait_for(home, block.left, "weights gone")
        self._count(-block.held_bytes)
        for weight in tuple(block.weights):
            if weight.storage.nbytes():
                device.free(weight.storage)
            weight.stepped_here = False
        block.present, block.staged = False, []
        block.readers.clear()
        if self.policy is not None:
            self.policy.dropped(block)

    def leave(self) -> None:
        """Drop every block that may leave: each comes again when it is used."""
        for block in self.blocks:
            if block.may_leave:
                self.drop(block)

    def flush(self, blocks: Collection[BlockWeights]) -> None:
        """The masters of these blocks are whole. Blocks the host until they are."""
        for block in blocks:
            self.write_back(block)
        for block in blocks:
            for event in (block.left, *(e for w in block.weights for e in w.ends_of_step())):
                if event is not None:
                    self.device.synchronize(event)

    def synchronize(self) -> None:
        """Blocks the host until all copies have ended."""
        for lane in (self.device.h2d, self.device.d2h):
            self.device.synchronize(self.device.record(lane))

    # -- room ------------------------------------------------------------------------------------------------
    def make_room(
        self, coming: BlockWeights, stay: Collection[int], order: Iterable[int], beside: int = 0
    ) -> bool:
        """Drop blocks until `coming` fits, with so many bytes beside it: not those that the plan keeps, nor
        those in `stay`; first the one that comes last in `order`. False, and none has left, where that is not
        enough. A block that the plan keeps has room of its own, but for INT8 weights beside their
        elements."""
        if coming.keep and not coming.staged:
            return True
        here = [block for block in self.blocks if block.present and not block.keep]
        needed = coming.expanded_bytes if coming.staged else coming.link_bytes
        if coming.keep:
            needed = sum(flat.numel() for _, flat in coming.staged)
        excess = sum(block.held_bytes for block in here) + needed + beside - self.window_bytes
        if excess <= 0:
            return True
        able = [each for each in here if each.index not in stay and each.may_leave and each is not coming]
        if sum(block.held_bytes for block in able) < excess:
            return coming.keep
        if len(able) > 1:
            ranks: dict[int, int] = {}
            for rank, index in enumerate(order):
                ranks.setdefault(index, rank)
            able.sort(key=lambda block: -ranks.get(block.index, len(ranks) + len(self.blocks)))
        for block in able:
            if excess > 0:
                excess -= block.held_bytes
                self.drop(block)
        return True

    def trim(self) -> None:
        """Drop what is beyond the window of a new plan."""
        here = [block for block in self.blocks if block.present and not block.keep]
        excess = sum(block.held_bytes for block in here) - self.window_bytes
        for block in here:
            if excess > 0 and block.may_leave:
                excess -= block.held_bytes
                self.drop(block)

    def _say_over(self, coming: BlockWeights) -> None:
        """Once: more is on the device than was asked for."""
        here = [block for block in self.blocks if block.present and not (block.entered or block.keep)]
        weights = [weight for block in here for weight in block.weights if not weight.is_under_way]
        held = [weight.name for weight in weights if weight.is_held_elsewhere]
        if held and self._said.first("held"):
            logger.warning(
                f"more weights are on the device than weights= allows, {bytes_text(coming.link_bytes)} "
                f"beyond a window of {bytes_text(self.window_bytes)}: {len(held)} of them (the first: "
                f"{held[0]}) cannot leave, because something else holds their memory: a tensor made of .data "
                "or .detach() inside a forward, or what was saved for a backward under hooks that hide it. "
                "Drop it, or name fewer blocks"
            )
