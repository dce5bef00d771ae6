"""What must hold of an engine's bytes after every one of its calls, whatever the step did.

The statements, each derived from what a call may do, with `held` = kept + leaving + coming back:

    limit       after bytes are added or sent, held <= device_limit_bytes, or nothing is leaving and nothing
                is fetched but for its reader: over the limit there is only what saves and that reader forced
                on the engine, nothing to be waited for or dropped
    prefetch    a restore that nobody waits for never ends above the limit, and stays within
                max_restoring_bytes; a tensor larger than that comes alone
    spilling    after a spill, at most max_spilling_bytes are leaving, or one piece; none where that is 0
    counts      each of the three counts is the sum over the living records in its states, and the arena has
                lent what the records hold
    step end    nothing is held, lent or in flight
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence

from offload import OffloadEngine, StepStats
from offload.transfer.admission import Priority
from offload.transfer.layout import WeakStorage, bytes_of
from offload.transfer.record import Record, RecordState, Transfer

__all__ = ["Watch"]


class Watch:
    """Stands between an engine and the callers of its transfers."""

    def __init__(self, engine: OffloadEngine, *, declare: bool) -> None:
        """declare: tell the simulated device which lane wrote a tensor. It holds the storage's address, so
        that no other gets it: for programs of several lanes only, since with one lane there is nothing to
        find."""
        self.engine = engine
        self.transfers = engine.transfers
        self.seen: Counter[str] = Counter()  # what happened, for a test that asks whether it did
        self.over_limit_bytes = 0  # the most that was held above the limit
        self._records: list[weakref.ref[Record]] = []
        self._written: dict[int, WeakStorage] | None = {} if declare else None
        self._adopt, self._resize = self.transfers.adopt, self.transfers.resize
        self._spill, self._restore = self.transfers.spill, self.transfers.restore
        self.transfers.adopt = self.adopt  # type: ignore[method-assign]
        self.transfers.resize = self.resize  # type: ignore[method-assign]
        self.transfers.spill = self.spill  # type: ignore[method-assign]
        self.transfers.restore = self.restore  # type: ignore[method-assign]

    def adopt(self, record: Record) -> None:
        self._adopt(record)
        self._records.append(weakref.ref(record))
        self._declare(record)
        self._check_limit(f"saving {record}")

    def _declare(self, record: Record) -> None:
        """The lane that saves a tensor for the first time is the one that wrote it."""
        if self._written is None or record.device_bytes is None:  # a piece that stays is never copied
            return
        known = self._written.get(record.key)
        if known is None or known.storage() is None:
            assert record.device_bytes is not None
            self._written[record.key] = WeakStorage(record.device_bytes)
            device = self.engine.device
            device.note_write(device.compute, bytes_of(record.device_bytes, record.start, record.nbytes))

    def resize(self, record: Record, nbytes_before: int) -> None:
        self._resize(record, nbytes_before)
        if record.nbytes > nbytes_before:
            self._check_limit(f"growing {record} from {nbytes_before:,} bytes")

    def spill(self, records: Sequence[Record]) -> Transfer | None:
        transfer = self._spill(records)
        cap = self.transfers.limits.max_spilling_bytes
        if cap is not None and transfer is not None:
            leaving = self.transfers.spilling_bytes
            assert leaving <= max(cap, transfer.nbytes), (
                f"{leaving:,} bytes leave, {transfer.nbytes:,} of them newly, the cap is {cap:,}"
            )
            assert cap > 0, "a cap of 0 refuses"
        self._check_limit(f"sending {records}")
        return transfer

    def restore(
        self,
        records: Sequence[Record],
        priority: Priority,
        may_settle: Callable[[Transfer], bool] | None = None,
    ) -> Transfer | None:
        transfer = self._restore(records, priority, may_settle)
        if priority >= Priority.REQUIRED:
            self._check_limit(f"restoring {records}", sum(record.nbytes for record in records))
        elif transfer is not None:
            self._check_prefetch(records)
        return transfer

    def _check_prefetch(self, records: Sequence[Record]) -> None:
        self.seen["prefetched"] += 1
        held, limits = self.transfers.device_bytes, self.transfers.limits
        limit, cap = limits.device_limit_bytes, limits.max_restoring_bytes
        assert cap > 0, "a cap of 0 refuses"
        assert limit is None or held <= limit, f"a prefetch made {held:,} bytes of {limit:,}"
        nbytes = sum(record.nbytes for record in records)
        assert nbytes <= cap or len(records) == 1, f"a prefetch of {nbytes:,} bytes, the cap is {cap:,}"

    def _check_limit(self, what: str, forced_bytes: int = 0) -> None:
        held, limit = self.transfers.device_bytes, self.transfers.limits.device_limit_bytes
        if limit is not None and held > limit:
            self.seen["over the limit"] += 1
            self.over_limit_bytes = max(self.over_limit_bytes, held - limit)
            leaving, fetched = self.transfers.spilling_bytes, self.transfers.restoring_bytes
            assert (leaving, fetched) == (0, forced_bytes), (
                f"{what}: {held:,} bytes held of {limit:,}; {leaving:,} of them could be waited for, "
                f"{fetched - forced_bytes:,} dropped"
            )

    def check_counts(self) -> None:
        with self.engine.lock:
            self.transfers.bury()
            held: dict[RecordState, int] = dict.fromkeys(RecordState, 0)
            lent = 0
            living: list[weakref.ref[Record]] = []
            for reference in self._records:
                record = reference()
                if record is not None:
                    living.append(reference)
                    held[record.state] += record.nbytes
                    lent += 0 if record.block is None else record.block.nbytes
            self._records = living
            assert self.transfers.resident_bytes == held[RecordState.RESIDENT]
            assert self.transfers.restoring_bytes == held[RecordState.RESTORING] + held[RecordState.RESTORED]
            assert self.transfers.spilling_bytes >= held[RecordState.SPILLING]
            assert self.engine.arena.stats().lent_bytes == lent
            limit = self.engine.config.host_limit_bytes
            assert limit is None or self.engine.arena.held_bytes <= limit

    def check_step_end(self, stats: StepStats) -> None:
        self.seen.update(
            spilled=stats.spilled,
            restored=stats.restored,
            refused=stats.refused,
            stalled=stats.stall_count,
            kept=stats.kept,
        )
        transfers = self.transfers
        assert (transfers.resident_bytes, transfers.spilling_bytes, transfers.restoring_bytes) == (0, 0, 0)
        assert transfers.in_flight() == (0, 0)
        arena = self.engine.arena.stats()
        assert (arena.lent, arena.lent_bytes) == (0, 0)
        assert stats.spilled + stats.kept == stats.saved
        assert stats.kept >= 0
        limit = transfers.limits.device_limit_bytes
        assert limit is None or stats.device_bytes_peak <= limit + self.over_limit_bytes
