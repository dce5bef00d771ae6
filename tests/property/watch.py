"""What must hold of an engine's bytes after every one of its calls, whatever the step did.

The statements, each derived from what a call may do, with `held` = kept + leaving + coming back:

    limit       after bytes are added or sent, held <= device_limit_bytes, or nothing is leaving and nothing
                is fetched but for its reader: over the limit there is only what saves and that reader forced
                on the engine, nothing to be waited for or dropped
    prefetch    a restore that nobody waits for never ends above the limit, and stays within
                max_restoring_bytes; a tensor larger than that comes alone
    spilling    after a spill, at most max_spilling_bytes are leaving, or one piece; none where that is 0
    counts      each of the three counts is the sum over the blocks in its states that can be read, and the
                arena has lent what the blocks hold
    step end    nothing is held, lent or in flight
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from offload import OffloadEngine, StepStats
from offload.disk.worker import Stored
from offload.transfer.block import BlockState, DeviceBlock, Transfer, WeakStorage, bytes_of
from offload.transfer.copier import Priority


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
        self._blocks: list[DeviceBlock] = []
        self._written: dict[int, WeakStorage] | None = {} if declare else None
        self._adopt, self._resize = self.transfers.adopt, self.transfers.resize
        self._spill, self._restore = self.transfers.spill, self.transfers.restore
        self.transfers.adopt = self.adopt  # type: ignore[method-assign]
        self.transfers.resize = self.resize  # type: ignore[method-assign]
        self.transfers.spill = self.spill  # type: ignore[method-assign]
        self.transfers.restore = self.restore  # type: ignore[method-assign]

    def adopt(self, block: DeviceBlock, more_bytes: int | None = None) -> None:
        self._adopt(block, more_bytes)
        if more_bytes is None:
            self._blocks.append(block)
            self._declare(block)
        self._check_limit(f"saving {block}")

    def _declare(self, block: DeviceBlock) -> None:
        """The lane that saves a tensor for the first time is the one that wrote it."""
        if self._written is None or block.device_bytes is None:  # a piece that stays is never copied
            return
        known = self._written.get(block.key)
        if known is None or known.storage() is None:
            assert block.device_bytes is not None
            self._written[block.key] = WeakStorage(block.device_bytes)
            device = self.engine.device
            device.note_write(device.compute, bytes_of(block.device_bytes, block.start, block.nbytes))

    def resize(self, block: DeviceBlock, start: int, stop: int) -> None:
        nbytes_before = block.nbytes
        self._resize(block, start, stop)
        if block.nbytes > nbytes_before:
            self._check_limit(f"growing {block} from {nbytes_before:,} bytes")

    def spill(self, blocks: Sequence[DeviceBlock]) -> Transfer | None:
        transfer = self._spill(blocks)
        cap = self.transfers.limits.max_spilling_bytes
        if cap is not None and transfer is not None:
            leaving = self.transfers.spilling_bytes
            assert leaving <= max(cap, transfer.nbytes), (
                f"{leaving:,} bytes leave, {transfer.nbytes:,} of them newly, the cap is {cap:,}"
            )
            assert cap > 0, "a cap of 0 refuses"
        self._check_limit(f"sending {blocks}")
        return transfer

    def restore(
        self,
        blocks: Sequence[DeviceBlock],
        priority: Priority,
        may_settle: Callable[[Transfer], bool] | None = None,
    ) -> Transfer | None:
        transfer = self._restore(blocks, priority, may_settle)
        if priority >= Priority.REQUIRED:
            self._check_limit(f"restoring {blocks}", sum(block.nbytes for block in blocks))
        elif transfer is not None:
            self._check_prefetch(blocks)
        return transfer

    def _check_prefetch(self, blocks: Sequence[DeviceBlock]) -> None:
        self.seen["prefetched"] += 1
        held, limits = self.transfers.device_bytes, self.transfers.limits
        limit, cap = limits.device_limit_bytes, limits.max_restoring_bytes
        assert cap > 0, "a cap of 0 refuses"
        assert limit is None or held <= limit, f"a prefetch made {held:,} bytes of {limit:,}"
        nbytes = sum(block.nbytes for block in blocks)
        assert nbytes <= cap or len(blocks) == 1, f"a prefetch of {nbytes:,} bytes, the cap is {cap:,}"

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
            self.transfers.reclaim_freed()
            held: dict[BlockState, int] = dict.fromkeys(BlockState, 0)
            lent = 0
            self._blocks = [block for block in self._blocks if not block.is_freed]
            for block in self._blocks:
                held[block.state] += block.nbytes
                lent += 0 if block.host is None else block.host.nbytes
            assert self.transfers.resident_bytes == held[BlockState.RESIDENT]
            assert self.transfers.restoring_bytes == held[BlockState.RESTORING] + held[BlockState.RESTORED]
            assert self.transfers.spilling_bytes >= held[BlockState.SPILLING]
            # before the arena is asked: a write that ends gives its block back
            lent += self._lent_to_the_disk()
            assert self.engine.arena.stats().lent_bytes == lent
            limit = self.engine.config.host_limit_bytes
            assert limit is None or self.engine.arena.held_bytes <= limit

    def _lent_to_the_disk(self) -> int:
        """What reads fill, and what the jobs of freed blocks still use; nothing of it beside the arena."""
        disk = self.transfers.disk
        if disk is None:
            return 0
        held = [block for block in self._blocks if block.stored is not None]
        self.seen["on the disk"] += sum(block.host is None for block in held)
        self.seen["spare"] += bool(disk.spare)
        hosts = [each.host for each in (*(block.stored for block in held), *disk._freed) if _is_used(each)]
        lent = sum(host.nbytes for host in hosts if host is not None and host not in disk.spare)
        return lent - sum(
            block.nbytes for block in held if block.host is not None and block.host in disk.spare
        )

    def check_step_end(self, stats: StepStats) -> None:
        self.seen.update(
            spilled=stats.spilled,
            restored=stats.restored,
            refused=stats.refused,
            stalled=stats.stall_count,
            kept=stats.kept,
        )
        transfers = self.transfers
        if transfers.disk is not None:
            self.seen.update(written=stats.disk_write_bytes, read=stats.disk_read_bytes)
            transfers.disk.drain()  # of a freed block a job may run on
            assert transfers.disk.extents.lent_bytes == 0
            assert not transfers.disk.in_use
        assert (transfers.resident_bytes, transfers.spilling_bytes, transfers.restoring_bytes) == (0, 0, 0)
        assert transfers.in_flight() == (0, 0)
        arena = self.engine.arena.stats()
        assert (arena.lent, arena.lent_bytes) == (0, 0)
        assert stats.spilled + stats.kept == stats.saved
        assert stats.kept >= 0
        limit = transfers.limits.device_limit_bytes
        assert limit is None or stats.device_bytes_peak <= limit + self.over_limit_bytes


def _is_used(stored: Stored | None) -> bool:
    """Whether it has a host block that is not its block's own: a read fills it, or a job is not over."""
    return stored is not None and (stored.read is not None or stored.block is None)
