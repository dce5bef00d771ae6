"""HostArena owns all pinned host memory of a process and lends it in blocks.

torch's pinned allocator rounds every request up to a power of two and pins at a tenth of the speed, inside
whichever hook asked. Here memory is pinned before step 1 (`reserve`) or during the steps on another thread
(growth.py); `take` returns None for a block that is not pinned yet. One invariant: the arena holds no more
than the host budget granted, lends bytes to one borrower at a time, tells the borrower which events must pass
before the bytes may be written, and releases only bytes that nobody has on loan.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import warnings
import weakref
from typing import Literal

from offload.device.base import Device
from offload.errors import HostBudgetError, PoolError
from offload.memory.budget import HostBudget
from offload.memory.growth import PAGE_BYTES, Growth
from offload.memory.loans import ArenaStats, Block, HostLender, Lender
from offload.sizes import bytes_text
from offload.telemetry.speaker import speaker

__all__ = ["ArenaStats", "Block", "HostArena", "HostLender"]

logger = speaker(__name__)

CLOSE_PATIENCE_S = 5.0
"""What the end of the process waits for copies: a step's worth of them takes less, and a rank that is gone
never answers."""


class HostArena(Lender):
    """Lends pinned host memory, cut to the byte. Thread-safe; one lock, which finalisers never take.

    budget: asked before every growth.
    slab_bytes: what one call of `device.host_memory` pins at most, and so what growth pins before a taker
        sees any of it.
    registration_bytes: one piece. 64 MiB: pinning a larger one stops every kernel launch for tens of ms
        (docs/design.md, decision 13).
    growth: who pins when bytes are missing. "background": a thread, and the taker gets None now; "inline":
        the taker, at once.
        None: background where pinning costs time (`device.pins`).
    """

    def __init__(
        self,
        device: Device,
        *,
        budget: HostBudget,
        slab_bytes: int = 1 << 30,
        registration_bytes: int = 64 << 20,
        growth: Literal["inline", "background"] | None = None,
    ) -> None:
        if registration_bytes <= 0 or registration_bytes % PAGE_BYTES:
            raise ValueError(
                f"registration_bytes={registration_bytes:,} must be a positive multiple of {PAGE_BYTES:,}"
            )
        if slab_bytes < registration_bytes:
            raise ValueError(
                f"slab_bytes={slab_bytes:,} is less than registration_bytes={registration_bytes:,}; raise it "
                "to at least that"
            )
        super().__init__(device)
        self._growth = Growth(
            device,
            budget,
            self._ranges,
            threading.Condition(self._lock),
            slab_bytes=slab_bytes,
            registration_bytes=registration_bytes,
            inline=not device.pins if growth is None else growth == "inline",
        )
        self.budget = budget
        self.registration_bytes = registration_bytes
        self._at_exit = functools.partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    @property
    def held_bytes(self) -> int:
        return self._growth.held_bytes

    @property
    def cannot_grow(self) -> str:
        """Why the budget or the system has refused a growth, and the way out; "" where none was refused."""
        return self._growth.refusal

    # -- growing and shrinking -------------------------------------------------------------------------------
    def reserve(self, nbytes: int) -> None:
        """Pin until at least `nbytes` are held, lent or free. For before step 1: blocks the host for nbytes /
        17 GB/s. Raises HostBudgetError if the budget or the system refuses."""
        with self._lock:
            self._growth.allow_retry()
            self._growth.hold(nbytes)

    def reserve_later(self, nbytes: int) -> None:
        """Pin during the steps, and without an error, until so much is held: for what a step was seen to
        lack.

        Blocks the host: never with background growth, for the pinning with inline growth.
        """
        with self._lock:
            self._growth.allow_retry()
            self._growth.want(nbytes)

    def change_budget(self, budget: HostBudget) -> None:
        """Count in `budget` from here on, not in the one before; what is free beyond its limit goes back to
        the system. Blocks the host for that.

        Raises HostBudgetError, and changes nothing, if what is lent does not fit in it.
        """
        shared = budget.counts_with(self.budget)
        room = budget.limit_bytes - budget.used_bytes + shared * self.held_bytes
        if self.lent_bytes <= room < self.held_bytes:
            self.trim(room)
        with self._lock:
            self._growth.synchronize()
            held_bytes = self._growth.held_bytes
            if not (held_bytes <= room if shared else budget.reserve(held_bytes)):
                raise HostBudgetError(
                    f"{held_bytes:,} bytes of host memory are held, {self.lent_bytes:,} of them lent, and "
                    f"the new limit leaves room for {max(0, room):,}; close the optimizers that use them, or "
                    "raise host_limit (host_limit_bytes in OffloadConfig)"
                )
            if not shared:
                self.budget.release(held_bytes)
            self.budget = self._growth.budget = budget
            self._growth.allow_retry()

    def synchronize_growth(self) -> None:
        """Block the host until the growth asked for so far is done or refused."""
        with self._lock:
            self._growth.synchronize()

    def begin_capture(self) -> None:
        """A graph is captured from here to `end_capture`: nothing may be pinned or polled. Blocks the host
        until the growth asked for so far is done and the last users of every free byte have ended: no event
        is kept with bytes that are lent in the capture."""
        with self._lock:
            self._growth.pause()
            self._accept_returned()
            self._events.synchronize_all()
            self._all_passed = True

    def end_capture(self) -> None:
        with self._lock:
            self._all_passed = False
            self._growth.resume()

    def trim(self, target_bytes: int) -> int:
        """Give memory back to the system, one whole free piece at a time, until at most `target_bytes` are
        held or no such piece is left.

        Returns the bytes given back: less than one piece too many, as pieces go whole; nothing while a graph
        is captured. Growth past `target_bytes` that is still under way is given up; what is missing later is
        pinned again as before. For between steps, once it is known what a step needs. Blocks the host for the
        last users of the pieces it releases, for their unpinning, and for the slab under way.
        """
        with self._lock:
            self._growth.lower(target_bytes)
            self._accept_returned()
            self._split_whole()
            self._events.poll_all()  # what has passed need not be waited for, and goes first
            return self._growth.trim(target_bytes, self._events)

    # -- the end ---------------------------------------------------------------------------------------------
    def clear(self) -> None:
        """Unpin and free everything, and give the budget back. The arena can grow again afterwards.

        Blocks the host until growth has stopped and the last users of every free range have ended. Raises
        PoolError, and frees nothing, while blocks are lent.
        """
        with self._lock:
            self._growth.stop()
            self._accept_returned()
            if self._lent:
                raise PoolError(
                    f"host arena has {len(self._lent)} blocks of {self.lent_bytes:,} bytes lent, of "
                    f"{self._growth.held_bytes:,} held; give them back before clear"
                )
            self._events.synchronize_all()
            self._whole.clear()
            self._growth.release()

    def close(self) -> None:
        """`clear` for the end of the process: never raises, and nothing grows afterwards. Memory still lent
        is left to the system, and so is memory whose last copies have not ended in CLOSE_PATIENCE_S: they may
        wait for a message of a rank that is gone."""
        self._growth.closed = True
        atexit.unregister(self._at_exit)
        try:
            if self.device.pins and not self._idle_within(CLOSE_PATIENCE_S):
                logger.warning(
                    f"closing: the last copies of {bytes_text(self.held_bytes)} of host memory have not "
                    f"ended after {CLOSE_PATIENCE_S:.0f} s; the memory is left to the system. If a rank is "
                    "gone, this one is waiting for it: set a timeout on the process group"
                )
                return
            self.clear()
        except PoolError as error:
            logger.info("closing: %s", error)
        except Exception:
            logger.warning("closing the host arena failed; the system frees its memory", exc_info=True)

    def __del__(self) -> None:
        # frees nothing: a finaliser takes no lock, and the budget has one
        if hasattr(self, "_at_exit"):
            atexit.unregister(self._at_exit)
            if self.device.pins and self.held_bytes:
                warnings.warn(
                    f"offload: host arena dropped with {self.held_bytes:,} bytes pinned; call clear first",
                    ResourceWarning,
                    stacklevel=2,
                )

    def _idle_within(self, seconds: float) -> bool:
        """Return True if the last users of every free range end within `seconds`. Blocks the host until they
        have, or so long."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:
                self._accept_returned()
                if self._events.poll_all():
                    return True
            if time.monotonic() >= end:
                return False
            time.sleep(0.01)


def _close_if_alive(reference: weakref.ref[HostArena]) -> None:
    arena = reference()
    if arena is not None:
        arena.close()
