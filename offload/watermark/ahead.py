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

One invariant: after each reading of the device (`Readings`) it has less than the high mark, or nothing more
can leave. Saves and reads of every client of the engine count. All of this is decided in program order, on
the host: whether a copy has ended is never asked.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count, islice

import torch

from offload.errors import HostBudgetError
from offload.saved.handles import Handle
from offload.sizes import bytes_text
from offload.telemetry.speaker import Once, speaker
from offload.transfer.block import DeviceBlock
from offload.transfer.coming import ComingReads, Prefetcher
from offload.watermark.budget import Readings
from offload.watermark.forward import Curves, Forward, ReadOrder
from offload.watermark.scheduler import ActivationScheduler, ActivationStepMetrics, Parts, SpillDetails

logger = speaker(__name__)

_FORWARDS_AHEAD = 16
"""Forwards that are looked at for what to fetch ahead: those after them have the time of these."""


class ForecastOrder(ActivationScheduler):
    """restore_ahead: False leaves each tensor where it is until it is read."""

    mark_bounds = True

    def __init__(self, parts: Parts, *, restore_ahead: bool) -> None:
        super().__init__(parts)
        engine = self.engine
        self._piece_bytes = engine.config.piece_bytes
        self._prefetch = (
            Prefetcher(engine.transfers, piece_bytes=self._piece_bytes, fills_room=True)
            if restore_ahead
            else None
        )
        self.readings = Readings(parts.budget, parts.transfer, self._piece_bytes)
        self._curves = Curves()
        self._level = 0
        self._rise = self._rise_before = 0  # of the level, between two readings of a backward, at most
        self._places = count()
        # by the number of a forward, where in the step it began, and where its backward did
        self._began: dict[int, int] = {}
        self._read_at: dict[int, int] = {}
        self._current: Forward | None = None  # being read
        self._order = ReadOrder({}, self._curves.saved_bytes)
        self._coming: list[ComingReads] = []
        self._free_when_full = -1  # of the host bytes held, when they were too few
        self._said = Once()

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
        self._order.enter(forward, forward.number)

    def saved_elsewhere(self, nbytes: int) -> None:
        if self.can_take():
            allocated = self.readings.after_save(nbytes)
            if self.budget.spilling:
                self._hold_mark(self.budget.high_bytes, allocated)

    def _saved(self, forward: Forward, block: DeviceBlock) -> None:
        allocated = self.readings.after_save(block.nbytes)
        level = allocated + self.readings.away_bytes
        forward.recorder.saved(block.nbytes, level)
        self._order.saved(forward, block.nbytes)
        highest = forward.forecast.saved(block.nbytes, level)
        if highest is not None:
            leaving_bytes = self.engine.transfers.spilling_bytes
            short_bytes = highest - (self.budget.high_bytes - 1) - self.readings.away_bytes - leaving_bytes
            if short_bytes > 0:
                self.details.forecast_bytes += self._send_oldest(short_bytes)
        if self.budget.spilling:
            self._hold_mark(self.budget.low_bytes if highest is None else self.budget.high_bytes, allocated)

    def _hold_mark(self, floor_bytes: int, allocated: int) -> None:
        """Bring the device below the high mark. floor_bytes: what is to be left of it once all copies in
        flight are settled, if anything has to leave for that. allocated: now."""
        transfers, high_bytes = self.engine.transfers, self.budget.high_bytes
        excess = allocated - transfers.spilling_bytes - (floor_bytes - 1)
        if excess > 0 and self.budget.spilling:
            self.details.latched_bytes += self._send_oldest(excess, must=True)
        while allocated >= high_bytes:
            if transfers.settle_oldest():
                allocated = self.readings.read()
                continue
            sent = self._send_oldest(allocated - (floor_bytes - 1), must=True)
            self.details.latched_bytes += sent
            if sent:
                continue
            ahead_bytes = transfers.restoring_bytes
            transfers.drop_furthest(allocated - high_bytes + 1)
            if transfers.restoring_bytes == ahead_bytes:
                self.details.times_over += 1
                self._say_it_is_passed(allocated)
                return
            allocated = self.readings.read()

    # -- what leaves -----------------------------------------------------------------------------------------
    def _send_oldest(self, nbytes: int, *, must: bool = False) -> int:
        """Spill what is read last, until `nbytes` have been sent; returns the bytes. must: host memory is
        pinned for it now if there is none, which blocks the host."""
        sent = 0
        if not self.transfer.can_spill():
            return 0  # max_spilling_bytes is 0
        if not must and self._free_host_bytes() <= self._free_when_full:
            return 0  # nothing was pinned or came back since
        for forward, blocks in self._pieces(nbytes, must=must):
            sent_now = self.send(forward, blocks)
            missing = sum(block.nbytes for block in blocks if self.may_leave(block))
            if missing and must and self._pin(missing):
                sent_now += self.send(forward, [block for block in blocks if self.may_leave(block)])
                missing = sum(block.nbytes for block in blocks if self.may_leave(block))
            sent += sent_now
            if missing:
                self._free_when_full = self._free_host_bytes()
                break
        return sent

    def _free_host_bytes(self) -> int:
        arena = self.engine.arena
        return arena.held_bytes - arena.lent_bytes

    def _pieces(self, nbytes: int, *, must: bool) -> Iterator[tuple[Forward, list[DeviceBlock]]]:
        """Blocks that may leave, piece by piece, what is read last first; what something else holds comes
        after all others. must: now. Else bytes are left for saves still to come that are read even later."""
        left = nbytes
        for held_too in (False, True):
            for forward, to_come in self._order.leaving(held_too, left, must=must):
                curve = forward.forecast.curve
                held = frozenset() if curve is None or held_too else curve.held
                blocks, at, upto = forward.chunk.blocks, forward.next[held_too], forward.written
                piece: list[DeviceBlock] = []
                piece_bytes = 0
                while at < upto and left > to_come:
                    block = blocks[at]
                    at += 1
                    if not self.may_leave(block):
                        continue
                    if block.slot in held:
                        self._order.is_held(forward)
                        continue
                    piece.append(block)
                    piece_bytes += block.nbytes
                    left -= block.nbytes
                    if piece_bytes >= self._piece_bytes:
                        yield forward, piece
                        piece, piece_bytes = [], 0
                if piece:
                    yield forward, piece
                forward.next[held_too] = at
                if at == upto and not forward.running:
                    self._order.is_empty(forward, held_too)
                if left <= 0:
                    return

    def _pin(self, nbytes: int) -> bool:
        """Pin host memory for so many bytes more. Blocks the host for nbytes / 17 GB/s."""
        arena = self.engine.arena
        began = time.perf_counter()
        try:
            arena.reserve(arena.held_bytes + nbytes)
        except HostBudgetError as error:
            if self._said.first("host"):
                logger.warning(
                    "the high mark of %s is reached, and the host has no memory for %s that "
                    "should leave (%s); they stay on the device, which may run out of memory. Raise "
                    "host_limit_bytes",
                    bytes_text(self.budget.high_bytes),
                    bytes_text(nbytes),
                    error,
                )
            return False
        finally:
            self.transfer.blocked_ms += (time.perf_counter() - began) * 1000
            self.transfer.blocked_count += 1
        return True

    def _say_it_is_passed(self, allocated: int) -> None:
        if not self._said:  # a host that is full is a reason that has been said
            self._said.first("passed")
            logger.warning(
                f"{bytes_text(allocated)} of the device are allocated, the high mark is "
                f"{bytes_text(self.budget.high_bytes)}, and no more saved tensors can leave: the rest is "
                "weights, gradients, optimizer state, what operators use, and tensors that never leave. "
                "Where that is so the mark does not hold, which is counted as times_over; raise the mark "
                "(high=, vram_high_watermark_mb), or make the rest smaller"
            )

    def relieve(self) -> None:
        self.details.latched_bytes += self._send_oldest(sys.maxsize, must=True)

    # -- reads -----------------------------------------------------------------------------------------------
    def read(self, forward: Forward, handle: Handle) -> None:
        super().read(forward, handle)
        block = handle.record.block
        if forward is not self._current:
            self._begin_reading(forward)
        if block.unread == 0:
            forward.recorder.reads.append(block.slot)
            if self.readings.is_due_after_read(block.nbytes):
                self._look()

    def read_elsewhere(self, handle: Handle) -> None:
        block = handle.record.block
        if block.unread == 0 and self.readings.is_due_after_read(block.nbytes) and self.can_take():
            self.readings.read()
            if self.budget.above_high_watermark():
                self._hold_mark(self.budget.high_bytes, self.budget.last_bytes)

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
            forward.recorder.held |= self.readings.lingering_slots(forward.group.id)
            if curve is not None:  # of what did not leave this time nothing new is known
                blocks = forward.chunk.blocks  # fewer, where it ended earlier than the one before
                forward.recorder.held |= {
                    slot for slot in curve.held if slot < len(blocks) and not blocks[slot].copies
                }
        others = (
            other
            for other in reversed(self._order.forwards)
            if other not in (None, forward) and not other.running and not other.being_read
        )
        self._coming = [other.chunk.coming for other in (forward, *islice(others, _FORWARDS_AHEAD))]
        self._level = sys.maxsize
        self._look()

    def _look(self) -> None:
        """Hold the mark in a backward, and fetch what is read next."""
        assert self._current is not None
        transfers = self.engine.transfers
        allocated = self.readings.read()
        level = allocated + self.readings.away_bytes
        self._rise = max(self._rise, level - self._level)
        self._level = level
        self._current.recorder.read(level)
        if self.budget.above_high_watermark():
            while self.budget.above_high_watermark() and transfers.settle_oldest():
                self.readings.read()
            if self.budget.above_high_watermark():
                transfers.drop_furthest(self.budget.last_bytes - self.budget.high_bytes + 1)
                self._hold_mark(self.budget.high_bytes, self.readings.read())
        elif self._prefetch is not None:
            if transfers.dropped:
                self._prefetch.look_back(self._current.chunk.coming)
            self._prefetch.pump(self._coming)

    def room(self) -> int:
        """Bytes that may be fetched ahead, by whichever client: with a step of the level left free, so that
        they need not be dropped."""
        return self.budget.high_bytes - 1 - self.readings.look() - self._rise_before

    # -- steps -----------------------------------------------------------------------------------------------
    def forget(self, ending: Sequence[Forward]) -> None:
        self.details.forwards_lost += sum(forward.forecast.lost for forward in ending)
        self._curves.learn(
            (forward.number, forward.recorder)
            for forward in ending
            if forward.being_read and forward.number is not None
        )
        began, read = self._began, self._read_at
        seen = {number: (began[number], read[number]) for number in began if number in read}
        self._began, self._read_at = {}, {}
        super().forget(ending)
        self._order = ReadOrder(seen, self._curves.saved_bytes)
        for forward in self.forwards:
            if forward.number is not None:
                self._order.enter(forward)

    def end_step(self) -> tuple[ActivationStepMetrics, SpillDetails]:
        self._rise_before, self._rise = self._rise, 0
        self._current = None
        self._coming = []
        self.details.released_bytes = self.readings.end_step()
        return super().end_step()
