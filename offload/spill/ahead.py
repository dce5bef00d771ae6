"""order="forecast": the oldest saved tensors leave, before the mark is reached, and come back before they are
read.

At each save the curve of earlier steps says how high the device's memory will rise. What lies above the high
mark then has to be away by then. The oldest saves are read last, so they leave, and they leave now: the
earlier a copy is issued, the more compute hides it. A spill's memory goes back to the allocator when compute
waits for its copy. That is done when the mark is reached, and not before, so the copy has had all the time
that there was.

Where no curve fits, the latch rules: from the high mark on the oldest leave until what is left is below the
low mark.

In the backward, what is read next comes back as soon as there is room for it below the high mark.

One invariant: after a save or a read the device has less than the high mark, or nothing more can leave. All
of this is decided in program order, on the host: whether a copy has ended is never asked.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Iterator, Sequence

import torch

from offload.errors import HostBudgetError
from offload.saved.handles import Handle
from offload.spill.curve import Curves
from offload.spill.forward import Forward
from offload.spill.scheduler import ActivationScheduler, Parts, SpillCounts
from offload.transfer.block import BlockState, DeviceBlock
from offload.transfer.coming import ComingReads, Prefetcher

__all__ = ["ForecastOrder"]

logger = logging.getLogger(__name__)

_READINGS = 8
"""The device is asked again when an eighth of the room below the mark has been saved."""

_STRIDE = 64
"""In a backward, when a part in so many of the high mark has been read."""


class ForecastOrder(ActivationScheduler):
    """restore_ahead: False leaves each tensor where it is until it is read."""

    def __init__(self, parts: Parts, *, restore_ahead: bool) -> None:
        super().__init__(parts)
        engine = self.engine
        self._piece_bytes = engine.config.piece_bytes
        self._prefetch = (
            Prefetcher(engine.transfers, piece_bytes=self._piece_bytes, room=self._room)
            if restore_ahead
            else None
        )
        self._curves = Curves()
        self._away: list[DeviceBlock] = []  # spilled, and their device memory is free
        self._lingering: list[DeviceBlock] = []  # spilled, and something else holds their device memory
        self._away_bytes = 0
        self._saved_bytes = 0  # since the last reading
        self._next_reading = 0  # of those
        self._read_bytes = 0  # since the backward was looked at
        self._level = 0
        self._rise = self._rise_before = (
            0  # of the level, from one reading of a backward to the next, at most
        )
        self._places = itertools.count()
        # by the number of a forward, where in the step it began, and where its backward did
        self._began: dict[int, int] = {}
        self._read_at: dict[int, int] = {}
        self._before: dict[int, tuple[int, int]] = {}  # both, of the step before
        self._current: Forward | None = None  # being read
        self._coming: list[ComingReads] = []
        self._held_when_full = -1  # host bytes held when they were too few
        self._warned = False

    # -- saves -----------------------------------------------------------------------------------------------
    def take(self, forward: Forward, tensor: torch.Tensor) -> Handle | None:
        if not self.can_take():
            return None
        handle, is_new = self.save(forward, tensor)
        if is_new:
            self._saved(forward, handle.record.block)
        return handle

    def begins(self, forward: Forward) -> None:
        assert forward.number is not None
        forward.forecast = self._curves.forecast(forward.number)
        self._began[forward.number] = next(self._places)

    def _saved(self, forward: Forward, block: DeviceBlock) -> None:
        self._saved_bytes += block.nbytes
        if self._saved_bytes < self._next_reading:
            allocated = self.budget.last_bytes + self._saved_bytes
        else:
            allocated = self._read_device()
        level = allocated + self._away_bytes
        forward.recorder.saved(block.nbytes, level)
        highest = forward.forecast.saved(block.nbytes, level)
        if highest is not None:
            leaving_bytes = self.engine.transfers.spilling_bytes
            short_bytes = highest - (self.budget.high_bytes - 1) - self._away_bytes - leaving_bytes
            if short_bytes > 0:
                self.counts.forecast_bytes += self._send_oldest(short_bytes)
        if self.budget.spilling:
            self._hold_mark(self.budget.low_bytes if highest is None else self.budget.high_bytes, allocated)

    def _read_device(self) -> int:
        self._count_away()
        allocated = self.budget.read()
        self._saved_bytes = 0
        room = max(0, self.budget.high_bytes - allocated)
        self._next_reading = min(self._piece_bytes, room // _READINGS)
        return allocated

    def _count_away(self) -> None:
        """Bytes that would be on the device if nothing had left."""
        for block in self.transfer.take_settled():
            self._lingering.append(block)
        lingering: list[DeviceBlock] = []
        for block in self._lingering:
            if block.state is not BlockState.SPILLED or block.is_freed:
                continue
            if block.storage() is None:
                self._away.append(block)
                self.counts.released_bytes += block.nbytes
            else:
                lingering.append(block)
        self._lingering = lingering
        self._away = [
            block
            for block in self._away
            if block.state is BlockState.SPILLED and not block.is_freed and block.unread
        ]
        self._away_bytes = sum(block.nbytes for block in self._away)

    def _hold_mark(self, floor_bytes: int, allocated: int) -> None:
        """Bring the device below the high mark. floor_bytes: what is to be left of it once all copies in
        flight are settled, if anything has to leave for that. allocated: now."""
        transfers, high_bytes = self.engine.transfers, self.budget.high_bytes
        excess = allocated - transfers.spilling_bytes - (floor_bytes - 1)
        if excess > 0 and self.budget.spilling:
            self.counts.latched_bytes += self._send_oldest(excess, must=True)
        while allocated >= high_bytes:
            if not transfers.settle_oldest():
                sent = self._send_oldest(allocated - (floor_bytes - 1), must=True)
                self.counts.latched_bytes += sent
                if not sent:
                    self.counts.times_over += 1
                    return
            else:
                allocated = self._read_device()

    # -- what leaves -----------------------------------------------------------------------------------------
    def _send_oldest(self, nbytes: int, *, must: bool = False) -> int:
        """Spill what is read last, until `nbytes` have been sent; returns the bytes. must: host memory is
        pinned for it now if there is none, which blocks the host."""
        sent = 0
        if not self.transfer.can_spill():
            return 0  # max_spilling_bytes is 0
        if not must and self.engine.arena.held_bytes == self._held_when_full:
            return 0  # nothing was pinned since
        for forward, blocks in self._pieces(nbytes, must=must):
            sent_now = self.send(forward, blocks)
            missing = sum(block.nbytes for block in blocks if self.may_leave(block))
            if missing and must and self._pin(missing):
                sent_now += self.send(forward, [block for block in blocks if self.may_leave(block)])
                missing = sum(block.nbytes for block in blocks if self.may_leave(block))
            sent += sent_now
            if missing:
                self._held_when_full = self.engine.arena.held_bytes
                break
        return sent

    def _pieces(self, nbytes: int, *, must: bool) -> Iterator[tuple[Forward, list[DeviceBlock]]]:
        """What may leave, piece by piece, what is read last first; what something else holds comes after all
        others. must: now. Else bytes are left for saves still to come that are read even later."""
        left = nbytes
        for held_too in (False, True):
            for forward in self._read_last_first():
                to_come = 0 if must else self._to_come_and_read_later(forward)
                curve = forward.forecast.curve
                held = frozenset() if curve is None or held_too else curve.held
                blocks, at, upto = forward.chunk.blocks, forward.next, forward.written
                piece: list[DeviceBlock] = []
                piece_bytes = 0
                while at < upto and left > to_come:
                    block = blocks[at]
                    at += 1
                    if not self.may_leave(block) or block.slot in held:
                        continue
                    piece.append(block)
                    piece_bytes += block.nbytes
                    left -= block.nbytes
                    if piece_bytes >= self._piece_bytes:
                        yield forward, piece
                        piece, piece_bytes = [], 0
                if piece:
                    yield forward, piece
                while forward.next < upto and not self.may_leave(blocks[forward.next]):
                    forward.next += 1
                if left <= 0:
                    return

    def _to_come_and_read_later(self, forward: Forward) -> int:
        """Bytes that forwards are expected to save from here on of which the backward comes after that of
        `forward`, by what the step before was seen to do."""
        seen = self._before
        if forward.number not in seen:
            return 0
        read_at = seen[forward.number][1]
        made = {other.number: sum(other.recorder.sizes) for other in self.forwards}
        return sum(
            max(0, self._curves.saved_bytes(number) - made.get(number, 0))
            for number, (began, other_read_at) in seen.items()
            if began < read_at < other_read_at
        )

    def _read_last_first(self) -> list[Forward]:
        """By what the step before was seen to do; else the last forward is read first."""
        seen = self._before
        return sorted(
            (forward for forward in self.forwards if forward.number is not None),
            key=lambda forward: -seen.get(forward.number or 0, (0, -1))[1],
        )

    def _pin(self, nbytes: int) -> bool:
        """Pin host memory for so many bytes more. Blocks the host for nbytes / 17 GB/s."""
        arena = self.engine.arena
        began = time.perf_counter()
        try:
            arena.reserve(arena.held_bytes + nbytes)
        except HostBudgetError as error:
            if not self._warned:
                self._warned = True
                logger.warning(
                    "the high mark of %s bytes is reached, and the host has no memory for %s bytes that "
                    "should leave (%s); they stay on the device, which may run out of memory. Raise "
                    "host_limit_bytes",
                    f"{self.budget.high_bytes:,}",
                    f"{nbytes:,}",
                    error,
                )
            return False
        finally:
            self.transfer.blocked_ms += (time.perf_counter() - began) * 1000
            self.transfer.blocked_count += 1
        return True

    def relieve(self) -> None:
        self.counts.latched_bytes += self._send_oldest(sys.maxsize, must=True)

    # -- reads -----------------------------------------------------------------------------------------------
    def read(self, forward: Forward, handle: Handle) -> None:
        super().read(forward, handle)
        block = handle.record.block
        if forward is not self._current:
            self._begin_reading(forward)
        if block.unread == 0:
            forward.recorder.reads.append(block.slot)
            self._read_bytes += block.nbytes
            if self._read_bytes * _STRIDE >= self.budget.high_bytes or self._read_bytes >= self._piece_bytes:
                self._look()

    def _begin_reading(self, forward: Forward) -> None:
        self._current = forward
        if not forward.being_read:
            forward.being_read = True
            forward.chunk.complete()
            if forward.number is not None:
                self._read_at.setdefault(forward.number, next(self._places))
            curve = forward.forecast.curve
            if curve is not None and curve.reads:
                forward.chunk.expect([(0, slot) for slot in curve.reads])
            lingering = {block.slot for block in self._lingering if block.group is forward.group.id}
            forward.recorder.held |= lingering
        others = [
            other
            for other in reversed(self._read_last_first())
            if other is not forward and not other.running and not other.being_read
        ]
        self._coming = [forward.chunk.coming, *(other.chunk.coming for other in others)]
        self._level = sys.maxsize
        self._look()

    def _look(self) -> None:
        """Hold the mark in a backward, and fetch what is read next."""
        assert self._current is not None
        self._read_bytes = 0
        transfers = self.engine.transfers
        allocated = self._read_device()
        level = allocated + self._away_bytes
        self._rise = max(self._rise, level - self._level)
        self._level = level
        self._current.recorder.read(level)
        if self.budget.above_high_watermark():
            while self.budget.above_high_watermark() and transfers.settle_oldest():
                self._read_device()
            if self.budget.above_high_watermark():
                transfers.drop_furthest(self.budget.last_bytes - self.budget.high_bytes + 1)
                self._hold_mark(self.budget.high_bytes, self._read_device())
        elif self._prefetch is not None:
            if transfers.dropped:
                self._prefetch.look_back(self._current.chunk.coming)
            self._prefetch.pump(self._coming)

    def _room(self) -> int:
        """For what is fetched ahead: with a step of the level left free, so that it need not be dropped."""
        return self.budget.room() - self._rise_before

    # -- steps -----------------------------------------------------------------------------------------------
    def end_step(self, ending: Sequence[Forward]) -> SpillCounts:
        self.counts.forwards_lost = sum(
            forward.forecast.lost for forward in ending if forward.number is not None and self._curves.known
        )
        self._curves.learn(
            (forward.number, forward.recorder)
            for forward in ending
            if forward.being_read and forward.number is not None
        )
        read_at = self._read_at
        self._before = {
            number: (began, read_at[number]) for number, began in self._began.items() if number in read_at
        }
        self._began, self._read_at = {}, {}
        self._rise_before, self._rise = self._rise, 0
        self._current = None
        self._coming = []
        counts = super().end_step(ending)
        self._away.clear()
        self._lingering.clear()
        self._away_bytes = self._saved_bytes = self._next_reading = self._read_bytes = 0
        return counts
