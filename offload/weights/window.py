"""Device memory of weights that stream by the expert: a buffer for each weight's experts that stay, and slots
that all weights share, which are filled in the order of the coming uses.

    a use     its experts that stay first, then those in slots, then those that are missing, a slot at a time
    ahead     a slot that has been read is filled again at once: with what the use still lacks, then with the
              likely experts of the next uses, before their numbers of rows are known
    which     of the slots, the one whose experts are used last; none that is used before what would come

So the link has work as long as a slot may be overwritten: also from a forward to its backward, and from a
backward to the next step. What the end of a forward has read last is what its backward reads first.

One invariant: the slots and the buffers take `share`'s bytes, whatever is used; nothing is allocated in a use
once they are there.

Only some uses of such a weight need no more than the experts that they name: what `form_of` does not know
needs the whole weight.

# [Order: experts filled]
# hazard  WAR, or allocator reuse: `h2d` fills a slot that work on `compute` still reads, or had before.
# edge    an event after the work that read the slot last, or after its allocation; h2d waits for it.
# alive   the window holds the slots.
# proof   tests/property/test_expert_edges.py, edge "experts filled"
#
# [Order: experts here]
# hazard  RAW: a product reads a slot before `h2d` has filled it.
# edge    the slot keeps the event after its copies; the lane that reads it waits for that.
# alive   the window holds the slots; the master belongs to the weight.
# proof   tests/property/test_expert_edges.py, edge "experts here"
#
# [Order: experts home]
# hazard  RAW: `h2d` reads a master to which `d2h` still returns what was written on the device.
# edge    the weight's block keeps the event of its last way out; h2d waits for it.
# alive   the weight's master.
# proof   tests/property/test_expert_edges.py, edge "experts home"
#
# [Order: experts lanes]
# hazard  RAW, WAR: another lane than the last one reads slots, or overwrites a buffer of experts that stay.
# edge    it waits for all that the last one was given; so one event a slot is enough.
# alive   the window holds both.
# proof   tests/property/test_expert_edges.py, edge "experts lanes"
#
# [Order: experts gone]
# hazard  allocator reuse: the lane that memory came from gets it back while `h2d`, or another lane, uses it.
# edge    that lane waits for both.
# alive   nothing has to: the bytes are free behind these events.
# proof   tests/property/test_expert_edges.py, edge "experts gone"
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload.device import Event, Lane
from offload.ids import Owner
from offload.params.watched import accessors, methods
from offload.transfer.copier import Direction, Priority
from offload.weights.order import Order, Pass, Use
from offload.weights.residency import Residency
from offload.weights.weight import BlockWeights

_SLOTS = 16
_OF_ROOM = 2
"""The slots have half of the bytes. The link fills them while a layer's attention computes and the host waits
for numbers of rows. A backward finds in them what it begins with, and so does the next forward, so they save
as many bytes a step as the buffers do."""

_KEPT = 0.9
"""Of an expert's mean number of tokens, at each use in a forward."""

_LEAST_TOKENS = 0.5
"""Mean below which an expert is not fetched ahead."""

_SOON = 1e9
"""Above the place of every use that is foreseen."""


class Streamed:
    """A weight's matrices on the device.

    | name | | written by |
    |---|---|---|
    | whole | the weight as a block of its own, for uses that need it whole | the constructor |
    | place | in the window's weights | `Window.take` |
    | indexed | it is used by [] and not by products | the constructor |
    | each, number | bytes of an expert's matrix, and how many | the constructor |
    | tokens | an exponential mean of what each expert gets in a forward | `Window` |
    | favoured, stay | the experts that stay, and how many may | `Window` |
    | buffer, kept | memory for those that stay, and which it has | `Window` |
    """

    def __init__(self, whole: BlockWeights, like: Tensor, indexed: bool) -> None:
        self.whole, self.indexed = whole, indexed
        self.weight = whole.weights[0]
        self._dtype, self._device = like.dtype, like.device
        self._shape, self._stride = like.shape[1:], like.stride()
        self.number = like.shape[0]
        self.each = self.weight.nbytes // self.number
        self.tokens = [0.0] * self.number
        self.favoured: set[int] = set()
        self.place = self.stay = 0
        self.buffer: Tensor | None = None
        self.kept: list[int] = []

    def matrices(self, flat: Tensor, number: int) -> Tensor:
        """flat: 1-D, uint8. The first ones in it: (number, out, in), in the weight's order of memory."""
        plain = flat[: number * self.each].view(self._dtype)
        return plain.as_strided((number, *self._shape), self._stride)

    def empty(self, number: int) -> Tensor:
        """Memory for as many: (number, out, in)."""
        shape = number, *self._shape
        return torch.empty_strided(shape, self._stride, dtype=self._dtype, device=self._device)


@dataclass(eq=False, slots=True)
class _Slot:
    """flat: 1-D, uint8. owner, experts: whose it has, from the first byte on; None: nobody's. read: the event
    after the last work that reads it; None where that may not be issued yet. arrived: after its copies.
    unread: since these."""

    flat: Tensor
    owner: Streamed | None = None
    experts: list[int] = field(default_factory=list)
    read: Event | None = None
    arrived: Event | None = None
    unread: bool = False

    @property
    def nbytes(self) -> int:
        return 0 if self.owner is None else len(self.experts) * self.owner.each


class Window:
    """The device memory of some weights, called under the engine's lock.

    | name | |
    |---|---|
    | weights | those that stream by the expert |
    | order | of their uses |
    | held_bytes, room_bytes | on the device now, and at most |
    | hits, misses | experts that a use found there or on their way, and that it did not |
    | lane | the last one that used any |
    | homes | lanes that the memory was allocated on, by id |
    """

    def __init__(self, residency: Residency) -> None:
        self._residency, self._engine, self._device = residency, residency.engine, residency.device
        self.weights: list[Streamed] = []
        self.hits = self.misses = self.room_bytes = 0
        self.lane: Lane | None = None
        self.homes: dict[int, Lane] = {}
        self._slots: list[_Slot] = []
        self._number = self._slot_bytes = 0
        self._order = Order()
        self._due: dict[Streamed, int] = {}  # the place of each weight's next use; none: not foreseen
        self._pending: list[_Slot] = []  # of the use under way
        self._ahead: deque[tuple[int, Streamed, list[int]]] = deque()

    @property
    def nbytes(self) -> int:
        return sum(each.weight.nbytes for each in self.weights)

    @property
    def held_bytes(self) -> int:
        buffers = [each.buffer for each in self.weights if each.buffer is not None]
        return sum(flat.numel() for flat in (*buffers, *(slot.flat for slot in self._slots)))

    # -- memory ----------------------------------------------------------------------------------------------
    def take(self, weights: Collection[Streamed]) -> None:
        """These are the weights from here on."""
        self.leave()
        self.weights, self._order = [*weights], Order()
        for place, each in enumerate(self.weights):
            each.place = place
        self._due = {}

    def share(self, nbytes: int) -> None:
        """nbytes: of what may be on the device. Half is the slots', the rest the weights' by size.
        Order: [Order: experts gone]."""
        largest = max((each.each for each in self.weights), default=1)
        nbytes -= 2 * largest * any(each.indexed for each in self.weights)  # for two copies that [] gives
        nbytes = min(nbytes, self.nbytes * _OF_ROOM // (_OF_ROOM - 1) + _SLOTS * largest)
        self._slot_bytes = largest * max(1, nbytes // (_OF_ROOM * _SLOTS * largest))
        self._number = min(_SLOTS, max(1, nbytes // self._slot_bytes)) if self.weights else 0
        self.room_bytes = self._number * self._slot_bytes
        rest = max(0, nbytes - self.room_bytes)
        for each in self.weights:
            each.stay = min(each.number, rest * each.weight.nbytes // self.nbytes // each.each)
            each.favoured = set()
            self.room_bytes += each.stay * each.each
        self.leave()

    def leave(self) -> None:
        """Its memory goes, and comes again with the next uses. Order: [Order: experts gone]."""
        device, lane = self._device, self.lane
        for home in self.homes.values():
            device.wait(home, device.record(device.h2d), "experts gone")
            if lane is not None and home is not lane:
                device.wait(home, device.record(lane), "experts gone")
        self._slots, self._pending, self.homes = [], [], {}
        self._ahead.clear()
        for each in self.weights:
            each.buffer, each.kept = None, []

    def _allocate(self, nbytes: int) -> Tensor:
        lane = self._device.compute
        self.homes[id(lane)] = lane
        with torch.inference_mode(False):
            return self._device.empty(nbytes)

    def forget(self, weight: Streamed) -> None:
        """Its matrices on the device are old: its master is to be written, behind what the current lane does
        next. Order: [Order: experts out]."""
        self._device.wait(self.enter(), self._device.record(self._device.h2d), "experts out")
        for slot in self._slots:
            if slot.owner is weight:
                slot.owner = None
        weight.kept = []

    def enter(self) -> Lane:
        """The current lane, after all that the last one was given. Order: [Order: experts lanes]."""
        device, lane = self._device, self._device.compute
        if self.lane is not None and lane is not self.lane:
            device.wait(lane, device.record(self.lane), "experts lanes")
        self.lane = lane
        return lane

    # -- uses ------------------------------------------------------------------------------------------------
    def pieces(
        self, weight: Streamed, counts: Sequence[int], during: Pass
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Experts and their matrices, until all that have a count were there, perhaps among others. The
        current lane may read a piece until the next one is asked for. Order: [Order: experts here]."""
        device, lane = self._device, self.enter()
        self._foresee(weight, counts, during)
        used = {expert for expert, count in enumerate(counts) if count}
        self._pending = [slot for slot in self._slots if slot.owner is weight and used & {*slot.experts}]
        lacking = self._chunks(weight, sorted(used - self._here(weight)))
        number = sum(map(len, lacking))
        self.hits, self.misses = self.hits + len(used) - number, self.misses + number
        pending = self._pending
        if used & {*weight.kept}:
            assert weight.buffer is not None
            kept = weight.matrices(weight.buffer, len(weight.kept))
            device.note_read(lane, kept)
            yield [*weight.kept], kept
        while pending or lacking:
            while lacking and (slot := self._spare(_SOON if pending else 0)) is not None:
                self._fill(slot, weight, lacking.pop(0), Priority.REQUIRED)
                pending.append(slot)
            if not lacking:
                self._fetch_ahead()
            slot = pending.pop(0)
            assert slot.arrived is not None
            self._residency.stalls.wait(lane, slot.arrived, "experts here")
            matrices = weight.matrices(slot.flat, len(slot.experts))
            device.note_read(lane, matrices)
            slot.read, slot.unread = None, False
            self._slots.remove(slot)
            self._slots.append(slot)
            yield slot.experts, matrices
            self._keep(weight, slot.experts, matrices)
            slot.read = device.record(lane)
        self._fetch_ahead()

    def _here(self, weight: Streamed) -> set[int]:
        """Experts that are on the device, or on their way."""
        return {*weight.kept}.union(*(slot.experts for slot in self._slots if slot.owner is weight))

    def _chunks(self, weight: Streamed, experts: list[int]) -> list[list[int]]:
        size = self._slot_bytes // weight.each
        return [experts[start : start + size] for start in range(0, len(experts), size)]

    def _keep(self, weight: Streamed, experts: Sequence[int], matrices: Tensor) -> None:
        """Copy a slot's experts that shall stay to the weight's buffer, in the place of one that shall
        not."""
        kept, device = weight.kept, self._device
        coming = [expert for expert in experts if expert in weight.favoured and expert not in kept]
        if not coming:
            return
        if weight.buffer is None:
            try:
                weight.buffer = self._allocate(weight.stay * weight.each)
            except torch.OutOfMemoryError:
                weight.stay, weight.favoured = 0, set()
                return
        places = []
        for expert in coming:
            leaves = (at for at, other in enumerate(kept) if other not in weight.favoured)
            at = len(kept) if len(kept) < weight.stay else next(leaves)
            kept[at : at + 1] = [expert]
            places.append(at)
        rows = weight.matrices(weight.buffer, weight.stay)
        with torch.no_grad():
            found = [matrices[experts.index(expert)] for expert in coming]
            torch._foreach_copy_([rows[at] for at in places], found)
        device.note_write(device.compute, rows)

    # -- what comes ------------------------------------------------------------------------------------------
    def _foresee(self, weight: Streamed, counts: Sequence[int], during: Pass) -> None:
        """The uses after this one, as far as the slots reach, and what they lack."""
        if during is not Pass.BACKWARD:  # which uses what its forward has used
            pairs = zip(weight.tokens, counts, strict=True)
            weight.tokens = [_KEPT * mean + (1 - _KEPT) * count for mean, count in pairs]
            ranked = sorted(range(weight.number), key=weight.tokens.__getitem__, reverse=True)
            weight.favoured = {*ranked[: weight.stay]}
        self._order.note(Use(weight.place, during))
        self._ahead.clear()
        self._due = {}
        number = 0
        for place, index in enumerate(self._order.coming(), 1):
            each = self.weights[index]
            if each in self._due:
                continue
            self._due[each] = place
            here = self._here(each)
            likely = [at for at, mean in enumerate(each.tokens) if mean >= _LEAST_TOKENS and at not in here]
            chunks = self._chunks(each, likely)
            self._ahead.extend((place, each, chunk) for chunk in chunks)
            number += len(chunks) + sum(slot.owner is each for slot in self._slots)
            if number >= self._number:
                return

    def _fetch_ahead(self) -> None:
        while self._ahead:
            place, weight, experts = self._ahead[0]
            here = self._here(weight)
            experts = [expert for expert in experts if expert not in here]
            if experts and weight.whole.weights and not weight.whole.present:
                unread = ((slot.nbytes, slot.arrived) for slot in self._slots if slot.unread)
                far = self._residency.refuses(len(experts) * weight.each, unread)
                slot = None if far else self._spare(place)
                if slot is None or not self._fill(slot, weight, experts, Priority.SPECULATIVE):
                    return
            self._ahead.popleft()

    # -- slots -----------------------------------------------------------------------------------------------
    def _spare(self, place: float) -> _Slot | None:
        """A slot whose experts are used later than at `place`. Raises torch.OutOfMemoryError where there is
        no memory for a single one."""

        def due(slot: _Slot) -> float:
            if slot.owner is None:
                return math.inf
            return 0 if slot in self._pending else self._due.get(slot.owner, math.inf)

        found = max(self._slots, key=due, default=None)  # of equal ones that which was used first
        if (found is None or found.owner is not None) and len(self._slots) < self._number:
            try:
                self._slots.append(found := _Slot(self._allocate(self._slot_bytes)))
            except torch.OutOfMemoryError:
                self._number = len(self._slots)
                if not self._slots:
                    raise
        return found if found is not None and due(found) > place else None

    def _fill(self, slot: _Slot, weight: Streamed, experts: list[int], priority: Priority) -> bool:
        """Copy these matrices to the slot, neighbours in one piece. False where admission refuses. Order:
        [Order: experts filled], [Order: experts home]."""
        device, copier, owner = self._device, self._engine.copier, Owner("weights", weight.weight.name)
        nbytes, each, master = len(experts) * weight.each, weight.each, weight.weight.master
        lease = copier.ask(nbytes, Direction.H2D, owner, priority)
        if lease is None:
            return False
        assert self.lane is not None  # a use is under way
        device.wait(device.h2d, slot.read or device.record(self.lane), "experts filled")
        if weight.whole.left is not None:
            device.wait(device.h2d, weight.whole.left, "experts home")
        starts = [at for at, expert in enumerate(experts) if not at or experts[at - 1] != expert - 1]
        pairs = [
            (slot.flat[at * each : end * each], master[experts[at] * each : (experts[end - 1] + 1) * each])
            for at, end in zip(starts, [*starts[1:], len(experts)], strict=True)
        ]
        slot.owner = None
        try:
            slot.arrived = copier.copy(lease, Direction.H2D, owner, pairs, nbytes)
        except BaseException:
            lease.done(None)
            raise
        slot.owner, slot.experts, slot.unread = weight, experts, True
        self._residency.in_bytes += nbytes
        return True


_SWAPS = methods("transpose swapaxes swapdims")
_MATRIX_T = accessors("mT", "__get__")


def form_of(func: Any, args: Any, kwargs: Any) -> str | None:
    """The kind of a use: "transpose" of its matrices, "same" for a conversion that changes nothing, "product"
    of rows, "expert" and "rows" for an index of one and of some; None for any other. args[0], or args[1] of a
    product, is the weight or its transpose."""
    if func in _MATRIX_T:
        return "transpose"
    if func in _SWAPS and len(args) == 3:
        return "transpose" if {dim % 3 for dim in args[1:]} == {1, 2} else None
    if func is Tensor.to:
        return "same" if args[1:] == (args[0].dtype,) and not kwargs else None
    if func is torch._grouped_mm:
        plain = len(args) == 2 and kwargs.get("bias") is None and kwargs.get("out_dtype") is None
        rows = args[0]
        fits = plain and kwargs.get("offs") is not None and rows.dim() == 2 and rows.is_contiguous()
        return "product" if fits and rows.numel() else None
    if func is Tensor.__getitem__:
        index = args[1]
        if type(index) is Tensor and index.dtype in (torch.int64, torch.int32):
            return {0: "expert", 1: "rows"}.get(index.dim())
        return "expert" if type(index) is int else None
    return None
