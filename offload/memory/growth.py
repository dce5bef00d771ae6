"""Growth pins host memory for an arena, in slabs, and unpins it piece by piece.

Pinning takes a millisecond for each 17 MB and holds up kernel launches. So it happens before step 1 on the
calling thread, or during the steps on a thread of its own; never while a graph is captured, because a
registration on any thread breaks the capture. One invariant: bytes are asked of the budget before they are
pinned and returned to it after they are unpinned; one thread pins at a time.

Every method is called with the arena's lock held, and releases the lock while it asks the budget or pins.
"""

from __future__ import annotations

import sys
import threading

from offload.device.base import Device, HostMemory
from offload.errors import HostBudgetError, OffloadError
from offload.memory.budget import HostBudget
from offload.memory.free_ranges import FreeRanges, PendingEvents, round_up
from offload.sizes import bytes_text
from offload.telemetry.speaker import progress, speaker

logger = speaker(__name__)

PAGE_BYTES = 4096
"""The finest growth, used where rounding up to a whole registration would break the budget."""

_SHOWN_BYTES = 8 * 10**9
"""What takes half a second or more on the calling thread has a bar."""


class Growth:
    """The slabs of an arena. New pieces go to `free`; `pieces` is indexed by `Range.piece`."""

    def __init__(
        self,
        device: Device,
        budget: HostBudget,
        free: FreeRanges,
        lock: threading.Condition,
        *,
        slab_bytes: int,
        registration_bytes: int,
        inline: bool,
    ) -> None:
        self.held_bytes = 0
        self.pieces: dict[int, tuple[HostMemory, int]] = {}  # their slab, and their index there
        self.inline = inline
        self._device = device
        self.budget = budget
        self._free = free
        self._changed = lock
        self._slab_bytes = slab_bytes - slab_bytes % registration_bytes
        self._registration_bytes = registration_bytes
        self._num_adopted = 0  # pieces, ever
        self._target_bytes = 0
        self._pinning = False
        self._num_pauses = 0
        self._stopping = False
        self.closed = False  # for good: nothing grows any more
        self._thread: threading.Thread | None = None
        self._refused: tuple[int, int] | None = None  # (bytes, limit) of the smallest growth refused
        self.refusal = ""  # of a growth, by the budget or the system, and the way out

    # -- growing ---------------------------------------------------------------------------------------------
    def hold(self, target_bytes: int) -> None:
        """Pin until `target_bytes` are held. Blocks the host. Raises HostBudgetError, or OffloadError where
        nothing may be pinned now."""
        while target_bytes > self.held_bytes:
            self.pin_or_wait(target_bytes - self.held_bytes)

    def pin_or_wait(self, nbytes: int, *, one_piece: bool = False) -> None:
        """Pin `nbytes` more, or wait for the thread that pins: it may pin what fits. Blocks the host. Raises
        as `hold`."""
        if not self._allowed():
            raise OffloadError(
                f"host arena holds {self.held_bytes:,} bytes and cannot pin {nbytes:,} more while a graph is "
                "captured or the arena is trimmed, cleared or closed; reserve them before"
            )
        self._pin(nbytes, one_piece=one_piece)

    def want(self, target_bytes: int) -> bool:
        """Return True if `target_bytes` are held: pinned here and now if growth is inline, else later, by the
        thread. A refusal is kept, with its reason. Blocks the host: never, but for inline growth."""
        deficit = target_bytes - self.held_bytes
        if deficit <= 0:
            return True
        if self.inline:
            if self._allowed():
                try:
                    self.hold(target_bytes)
                except OffloadError as error:
                    self._refuse(deficit, error)
            return target_bytes <= self.held_bytes
        if self.closed or self._stopping or self._device.is_capturing():
            return False
        if (
            self._refused is not None
            and deficit >= self._refused[0]
            and self.budget.limit_bytes == self._refused[1]
        ):
            return False
        self._target_bytes = max(self._target_bytes, target_bytes)
        if self._thread is None and not self._num_pauses:
            thread = threading.Thread(target=self._run, name="offload-host-growth", daemon=True)
            try:
                thread.start()  # it waits for the lock
            except RuntimeError as error:  # the system gives no thread: as where it gives no memory
                self._target_bytes = 0
                self._refuse(deficit, error)
            else:
                self._thread = thread
        return False

    def allow_retry(self) -> None:
        """Forget what was refused: somebody asks anew, or a step has ended."""
        self._refused = None

    def synchronize(self) -> None:
        """Block the host until the growth asked for so far is done or refused."""
        self._changed.wait_for(lambda: self._thread is None and not self._pinning)

    def pause(self) -> None:
        """Pin and unpin nothing until `resume`. Blocks the host as `synchronize`."""
        self.synchronize()
        self._num_pauses += 1

    def resume(self) -> None:
        self._num_pauses -= 1
        self.want(self._target_bytes)

    # -- shrinking -------------------------------------------------------------------------------------------
    def lower(self, target_bytes: int) -> None:
        """Want no more than `target_bytes`: growth past it is given up. Blocks the host for the slab under
        way."""
        wanted_bytes = min(self._target_bytes, target_bytes)
        self.stop()
        self.want(wanted_bytes)

    def trim(self, target_bytes: int, events: PendingEvents) -> int:
        """Release whole free pieces until `target_bytes` are held, if enough are free; the bytes released.
        Those that nobody reads any more go first.

        Blocks the host for their last users. Keeps the lock, so that nobody is lent what is being released.
        """
        if not self._allowed():
            return 0  # a capture breaks at an unregistration as at a registration
        sizes = {number: slab.pieces[index].numel() for number, (slab, index) in self.pieces.items()}
        whole = [free for free in self._free if free.nbytes == sizes[free.piece]]
        whole.sort(key=lambda free: (not free.idle, free.piece))
        before_bytes = self.held_bytes
        try:
            for free in whole:
                if self.held_bytes <= target_bytes:
                    break
                events.synchronize(free.pending)
                slab, index = self.pieces[free.piece]
                slab.release_piece(index)  # first: if it raises, the piece is still held and free
                self._free.cut(free, free.nbytes)
                del self.pieces[free.piece]
                self.held_bytes -= free.nbytes
        finally:
            freed_bytes = before_bytes - self.held_bytes
            if freed_bytes:
                self._refused = None  # the budget has room again
                self.budget.release(freed_bytes)  # once: it may be a round trip
        return freed_bytes

    # -- the end ---------------------------------------------------------------------------------------------
    def stop(self) -> None:
        """Give up the growth asked for. Blocks the host for the slab under way."""
        self._stopping = True
        try:
            self.synchronize()
            self._target_bytes = 0
        finally:
            self._stopping = False

    def release(self) -> None:
        """Unpin and free every slab. No copy of them may be in flight."""
        slabs = {id(slab): slab for slab, _ in self.pieces.values()}
        freed_bytes, self.held_bytes = self.held_bytes, 0
        self.pieces.clear()
        self._free.clear()
        self._refused = None
        for slab in slabs.values():
            slab.release()
        if freed_bytes:
            self.budget.release(freed_bytes)

    # -- inside ----------------------------------------------------------------------------------------------
    def _allowed(self) -> bool:
        return not (self.closed or self._stopping or self._num_pauses or self._device.is_capturing())

    def _run(self) -> None:
        """The thread. It ends when the target is held: an idle arena has none, and can be dropped."""
        with self._changed:
            try:
                while self._target_bytes > self.held_bytes and not self._stopping:
                    deficit = self._target_bytes - self.held_bytes
                    try:
                        self._pin(deficit)
                    # whatever the system said, training goes on without these bytes
                    except Exception as error:
                        self._target_bytes = 0
                        self._refuse(deficit, error)
            finally:
                self._thread = None
                self._changed.notify_all()

    def _refuse(self, nbytes: int, error: Exception) -> None:
        """Remember a refusal: asking for as much again at every miss costs a round trip, or the touch of all
        pages, each time."""
        if self._refused is None or nbytes < self._refused[0]:
            self._refused = (nbytes, self.budget.limit_bytes)
        logger.info("host memory cannot grow: %s", error)
        limit = self.budget.limit_bytes
        at_limit = self.budget.used_bytes + round_up(nbytes, PAGE_BYTES) > limit
        self.refusal = (
            f"Raise host_limit (host_limit_bytes in OffloadConfig) to that: it is {bytes_text(limit)}"
            if at_limit
            else f"The system refuses more: {error}"
        )

    def _pin(self, nbytes: int, *, one_piece: bool = False) -> None:
        """Hold `nbytes` more, or wait for the thread that pins. Holds less, without an error, if growth is
        stopped meanwhile."""
        if self._pinning:
            self._changed.wait()
            return
        registration_bytes, slab_bytes = self._registration_bytes, self._slab_bytes
        if one_piece:
            registration_bytes = slab_bytes = max(registration_bytes, round_up(nbytes, PAGE_BYTES))
        unpinned = 0
        self._pinning = True
        self._changed.release()
        try:
            unpinned = self._reserve_budget(nbytes, registration_bytes)
            least = _SHOWN_BYTES if threading.current_thread() is not self._thread else sys.maxsize
            with progress("pinning host memory", unpinned, "B", least=least) as show:
                while unpinned and not self._stopping:
                    memory = self._device.host_memory(min(slab_bytes, unpinned), registration_bytes)
                    with self._changed:
                        adopted = self._adopt(memory)
                        unpinned -= adopted
                    show(adopted)
        finally:
            self._changed.acquire()
            self._pinning = False
            self._changed.notify_all()
            if unpinned:
                self.budget.release(unpinned)

    def _reserve_budget(self, nbytes: int, registration_bytes: int) -> int:
        """The bytes granted: `nbytes` rounded up to whole registrations, or to pages where those do not
        fit."""
        for unit in (registration_bytes, PAGE_BYTES):
            rounded = round_up(nbytes, unit)
            if self.budget.reserve(rounded):
                return rounded
        raise HostBudgetError(
            f"host arena holds {self.held_bytes:,} bytes and needs {nbytes:,} more, but "
            f"{self.budget.used_bytes:,} of the host's "
            f"{self.budget.limit_bytes:,} bytes are in use; reserve "
            f"{max(0, self.held_bytes + self.budget.limit_bytes - self.budget.used_bytes):,} or less (what a "
            "step lacks is pinned beside it), or raise host_limit (host_limit_bytes in OffloadConfig)"
        )

    def _adopt(self, memory: HostMemory) -> int:
        """Add the pieces of a new slab to the free ranges. Returns its bytes."""
        for index, piece in enumerate(memory.pieces):
            self.pieces[self._num_adopted] = memory, index
            self._free.put(self._num_adopted, 0, piece.numel())
            self._num_adopted += 1
        nbytes = sum(piece.numel() for piece in memory.pieces)
        self.held_bytes += nbytes
        return nbytes
