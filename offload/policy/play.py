"""What a step would cost: items and ops of any kind, played by the engine's rules, in program order.

    item    bytes that are on the device, on the host, or both: a group of saved tensors, a block of weights
    need    an op's of an item: so many bytes come, if they are away, and so many stay behind it
    op      seconds of compute, with the items that it needs, makes and frees

The host never learns where the device is. So room on the device can only be made by letting compute wait for
the oldest copy out, and a copy in can only start when compute has got to the point that issued it. One
invariant: bytes on the device, in any state, stay within the limit unless a single make or need cannot go on
otherwise; `peaks_bytes` says so.

    make      an item takes its room when its op's compute starts; one that leaves is queued on d2h when the
              compute ends
    room      while a make, a need or a fetch ahead would pass the limit, compute waits for the oldest copy
              out in flight and its bytes are dropped
    window    at each op's end, what is needed within the next `window_bytes` of needs is brought back, in
              order, once the op that made it is over. Items that are on the device count too: with a whole
              window at hand nothing is fetched early
    need      waits for the item's own copy in, which is issued now if it was not; an item still on its way
              out is read where it is
    claim     what an op makes for a while takes room within the limit until another op claims less, and with
              it what has been freed meanwhile: it is the graph's, while something is computed again
    drop      while a make, a need or a claim still does not fit, what the window holds and nobody has read
              makes room: what is still on its way out, the first that the window took first, then what was
              fetched, the latest first. It is fetched ahead again only in an op of its own reader
    free      after the last need, at the end of the compute; if it was on its way out, when room is needed
              and the copy has ended
    home      what lives on the host and is not in use is dropped without a copy once no copy out is in
              flight: what is needed last first, and for a fetch ahead only what is needed after it

The link is two queues on a clock, one a direction, each in order, slower while both are busy. Its clock only
moves forward, and what is issued at a moment changes nothing before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from offload.policy.actions import Rates


class Item(NamedTuple):
    """nbytes: on the device, once made. leaves: as soon as it is made. reader: of its needs, the ops that
    fetch ahead again what of it was dropped. home: it begins on the host, whose bytes stay the newest."""

    nbytes: int
    leaves: bool
    reader: Hashable = None
    home: bool = False


class Need(NamedTuple):
    """Need of one item by one op.

    nbytes: that come, if it is away. left: that stay on the device behind the need, if it came; more than
        that where it grows as it is used, for which so much more room is needed; None where it is freed.
    after: the op that ends before it is fetched ahead. since: from the begin of that op on another need is to
        leave it there, so the window goes past it.
    """

    item: int
    nbytes: int
    left: int | None = None
    after: int = -1
    since: float = inf


class Op(NamedTuple):
    """seconds: of compute. makes: items.

    reads_first: needs come, and are let go, one after the other before the compute; else all behind it.
    frees: items, at its end. claims: bytes that are made beside items from here on; None for as many as
        before. reader: whose dropped items are fetched ahead again. looks: ahead, at its end.
    """

    seconds: float
    needs: Sequence[Need] = ()
    makes: Sequence[int] = ()
    reader: Hashable = None
    claims: int | None = None
    reads_first: bool = False
    frees: Sequence[int] = ()
    looks: bool = True


# where an item's bytes are, as the host knows it; plain numbers, since most of the time of a search is here
_AWAY, _HERE, _LEAVING, _WANTED, _BACK = range(5)
"""AWAY: not on the device: dropped, dead, or not made. HERE: on the device, and never left. LEAVING: queued
on d2h, or there; dead ones, too. WANTED: as LEAVING, but read before its room is needed: not dropped any
more. BACK: a copy in was issued; the host copy is clean."""


class Player:
    """One step: the clock of compute, the link, and where every item is.

    limit_bytes: of items on the device, and claims. window_bytes: how far ahead of the reader the window
    goes; 0 fetches only what is being read.

    ends_s, peaks_bytes: of each op, its end and the most on the device, with claims. stall_s, moved_bytes: by
    direction, compute waiting for copies and what they copied.
    """

    def __init__(
        self, items: Sequence[Item], ops: Sequence[Op], rates: Rates, limit_bytes: int, window_bytes: float
    ) -> None:
        self.now_s = 0.0
        self.ends_s, self.peaks_bytes = list[float](), list[int]()
        self.stall_s, self.moved_bytes = [0.0, 0.0], [0, 0]  # by direction
        self._items, self._ops = items, ops
        self._limit_bytes = limit_bytes
        self._window_bytes = window_bytes
        self._link = Link(rates)
        self._needs = [need for op in ops for need in op.needs]
        self._ahead_bytes = [0, *accumulate([need.nbytes for need in self._needs])]
        self._num_begun = self._num_ended = self._next_need = self._next_fetch = 0
        self._device_bytes = self._claimed_bytes = self._peak_bytes = 0
        self._at = [_AWAY] * len(items)
        self._here = [0] * len(items)  # bytes on the device
        self._spills: deque[int] = deque()
        self._unread: dict[int, int] = {}  # what the window holds, with the places of the needs
        self._dropped: dict[Hashable, int] = {}  # the first of those of each reader that made room
        # of what has its home on the host: the places of its needs, and the next one of what is here, beyond
        # the window and not in use
        self._places: dict[int, deque[int]] = {at: deque() for at, item in enumerate(items) if item.home}
        self._later: dict[int, int] = {}
        self._grows = any([(need.left or 0) > need.nbytes for need in self._needs])
        if self._places:
            for place, need in enumerate(self._needs):
                if need.item in self._places:
                    self._places[need.item].append(place)

    def play(self, most_s: float = inf) -> bool:
        """All ops; False as soon as they are seen to take longer than `most_s` seconds."""
        left_s = sum([op.seconds for op in self._ops])
        for op in self._ops:
            self._do(op)
            left_s -= op.seconds
            if self.now_s + left_s > most_s:
                return False
        return True

    def _do(self, op: Op) -> None:
        seconds, needs, makes, reader, claims, reads_first, frees, looks = op
        self._num_begun += 1
        self._peak_bytes = self._device_bytes + self._claimed_bytes
        if claims is not None:
            self._claimed_bytes = claims
            if claims:
                self._make_room(0)
                self._take(0)
        for need in needs:
            self._bring(need)
            if reads_first:
                self._let_go(need)
                self._look_ahead(reader)
        for item in makes:
            nbytes = self._here[item] = self._items[item].nbytes
            self._make_room(nbytes)
            self._take(nbytes)
            self._at[item] = _HERE
        self.now_s += seconds
        if not reads_first:
            for need in needs:
                self._let_go(need)
        for item in makes:
            if self._items[item].leaves:
                self._at[item] = _LEAVING
                self._spills.append(item)
                self._issue(D2H, item, self._here[item])
        for item in frees:
            self._free(item)
        self._num_ended += 1
        if looks:
            self._look_ahead(reader)
        self.ends_s.append(self.now_s)
        self.peaks_bytes.append(self._peak_bytes)

    def _bring(self, need: Need) -> None:
        """Compute waits until the item is on the device."""
        item, left_bytes = need.item, need.left
        self._unread.pop(item, None)
        self._later.pop(item, None)
        if self._at[item] == _AWAY:
            self._make_room(need.nbytes)
            self._fetch(need)
        if self._at[item] == _BACK:
            self._wait(H2D, item)
            if left_bytes is not None and left_bytes > self._here[item]:
                self._make_room(left_bytes)
                self._take(left_bytes - self._here[item])
                self._here[item] = left_bytes

    def _let_go(self, need: Need) -> None:
        item, left_bytes = need.item, need.left
        if left_bytes is None:
            self._free(item)
        elif self._at[item] == _BACK and left_bytes < self._here[item]:
            self._keep(item, left_bytes)
        self._next_need += 1
        if self._next_fetch < self._next_need:
            self._next_fetch = self._next_need

    def _keep(self, item: int, nbytes: int) -> None:
        """So much of the item stays on the device. What goes is the graph's while something is claimed."""
        freed_bytes = self._here[item] - nbytes
        self._here[item] = nbytes
        self._device_bytes -= freed_bytes
        if self._claimed_bytes:
            self._claimed_bytes += freed_bytes
        if nbytes == 0:
            self._at[item] = _AWAY

    def _free(self, item: int) -> None:
        where = self._at[item]
        if item in self._places:
            places = self._places[item]
            while places and places[0] < self._next_need:
                places.popleft()
            place = places[0] if places else len(self._needs)
            (self._unread if place < self._next_fetch else self._later)[item] = place
        elif where in (_HERE, _BACK):
            self._keep(item, 0)
        elif where in (_LEAVING, _WANTED):
            self._at[item] = _LEAVING
            # twice in the queue if still there: the earlier one frees it, the later one finds it gone
            self._spills.append(item)

    def _look_ahead(self, reader: Hashable) -> None:
        """Bring back what the window holds, as far as there is room."""
        at, needs, ahead_bytes, fetch = self._at, self._needs, self._ahead_bytes, self._next_fetch
        if self._dropped and reader in self._dropped:
            fetch = max(self._next_need, min(fetch, self._dropped.pop(reader)))
        most_bytes = ahead_bytes[self._next_need] + self._window_bytes
        while fetch < len(needs) and ahead_bytes[fetch + 1] <= most_bytes:
            item, _, _, after, since = need = needs[fetch]
            if after >= self._num_ended:
                if since >= self._num_begun:
                    break  # as most do: while forwards run
            elif at[item] == _LEAVING:
                at[item] = _WANTED
                self._unread[item] = fetch
            elif at[item] == _AWAY:
                if not self._make_room(need.nbytes, need):
                    break
                self._fetch(need)
                self._unread[item] = fetch
            elif item in self._later:
                self._unread[item] = self._later.pop(item)
            fetch += 1
        self._next_fetch = fetch

    def _has_room_to_grow(self, need: Need) -> bool:
        """Return True if what is needed first, and is here or comes, fits beside what one of it grows by."""
        coming = [(need.nbytes, need.left or 0)]
        for item, place in self._unread.items():
            coming.append((self._here[item], self._needs[place].left or 0))
        grown_bytes = max([grown if grown > nbytes else 0 for nbytes, grown in coming])
        return sum([nbytes for nbytes, _ in coming]) + grown_bytes <= self._limit_bytes

    def _fetch(self, need: Need) -> None:
        self._take(need.nbytes)
        self._here[need.item], self._at[need.item] = need.nbytes, _BACK
        self._issue(H2D, need.item, need.nbytes)

    def _make_room(self, nbytes: int, ahead: Need | None = None) -> bool:
        """Compute waits for the oldest spills until `nbytes` fit; False if they do not although nothing is in
        flight. ahead: for this need, before its op; so nothing that is needed sooner is dropped."""
        limit_bytes = self._limit_bytes - self._claimed_bytes - nbytes
        if self._device_bytes <= limit_bytes and not (ahead and self._grows):
            return True
        while self._device_bytes > limit_bytes and self._spills:
            item = self._spills.popleft()
            if self._at[item] == _LEAVING:
                self._wait(D2H, item)
                self._device_bytes -= self._here[item]
                self._at[item] = _AWAY
        later = self._later
        if ahead is not None:
            enough = self._device_bytes - sum([self._here[item] for item in later]) <= limit_bytes
            if not enough or (self._grows and not self._has_room_to_grow(ahead)):
                return False
        while later and self._device_bytes > limit_bytes:
            item = max(later, key=later.__getitem__)
            self._drop(item, later.pop(item))
        unread = self._unread
        while ahead is None and unread and self._device_bytes > limit_bytes:
            wanted = next((item for item in unread if self._at[item] == _WANTED), None)
            if wanted is not None:
                item = wanted
            else:
                item = max(unread, key=unread.__getitem__) if self._places else next(reversed(unread))
            if not self._items[item].home:
                self._wait(H2D if wanted is None else D2H, item)
            self._drop(item, unread.pop(item))
        return self._device_bytes <= limit_bytes

    def _drop(self, item: int, place: int) -> None:
        self._at[item] = _AWAY
        self._device_bytes -= self._here[item]
        reader = self._items[item].reader
        self._dropped[reader] = min(place, self._dropped.get(reader, place))

    def _issue(self, lane: int, item: int, nbytes: int) -> None:
        self.moved_bytes[lane] += nbytes
        self._link.issue(lane, item, nbytes, self.now_s)

    def _wait(self, lane: int, item: int) -> None:
        waited_s = self._link.finish(lane, item) - self.now_s
        if waited_s > 0:
            self.stall_s[lane] += waited_s
            self.now_s += waited_s

    def _take(self, nbytes: int) -> None:
        self._device_bytes += nbytes
        if self._device_bytes + self._claimed_bytes > self._peak_bytes:
            self._peak_bytes = self._device_bytes + self._claimed_bytes


D2H, H2D = 0, 1
_FOR_EVER = float("inf")


class Link:
    """Copies are issued with a time and asked for their end; in between the two queues run dry at the rates
    of `Rates`."""

    def __init__(self, rates: Rates) -> None:
        self._alone = (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
        self._shared = rates.shared
        self._now_s = 0.0
        self._queues: tuple[deque[tuple[Hashable, int]], deque[tuple[Hashable, int]]] = (deque(), deque())
        self._head_left: list[float] = [0.0, 0.0]  # bytes of the first of each queue that are still to go
        self._ends_s: tuple[dict[Hashable, float], dict[Hashable, float]] = ({}, {})  # by lane

    def issue(self, lane: int, key: Hashable, nbytes: int, now_s: float) -> None:
        """Queue a copy at `now_s`, which is no earlier than any moment named before. A key's later copy
        replaces its earlier end."""
        queues = self._queues
        while self._now_s < now_s and (queues[D2H] or queues[H2D]):
            self._run(now_s - self._now_s)
        self._now_s = max(self._now_s, now_s)
        self._ends_s[lane].pop(key, None)
        if not queues[lane]:
            self._head_left[lane] = nbytes
        queues[lane].append((key, nbytes))

    def finish(self, lane: int, key: Hashable) -> float:
        """When the copy ends if nothing more is issued before that."""
        ends_s = self._ends_s[lane]
        while key not in ends_s:
            if not self._queues[lane]:
                raise KeyError(f"no copy of {key} was issued in lane {lane}")
            self._run(_FOR_EVER)
        return ends_s[key]

    def _run(self, at_most_s: float) -> None:
        """Run to the next end of a copy, or for `at_most_s`. A search calls it most of all, so each lane is
        written out."""
        d2h, h2d = self._queues
        out_rate, in_rate = self._shared if d2h and h2d else self._alone
        left = self._head_left
        out_s = left[D2H] / out_rate if d2h else _FOR_EVER
        in_s = left[H2D] / in_rate if h2d else _FOR_EVER
        step_s = min(at_most_s, out_s, in_s)
        self._now_s += step_s
        if out_s <= step_s:
            self._ends_s[D2H][d2h.popleft()[0]] = self._now_s
            left[D2H] = d2h[0][1] if d2h else 0.0
        else:
            left[D2H] -= step_s * out_rate
        if in_s <= step_s:
            self._ends_s[H2D][h2d.popleft()[0]] = self._now_s
            left[H2D] = h2d[0][1] if h2d else 0.0
        else:
            left[H2D] -= step_s * in_rate
