"""Decisions on what leaves the device and when: what both orders have in common; what never does; and figures
of a step.

Two invariants: a scheduler decides; `ActivationTransfer` asks the engine to move. A line of figures has
exactly the fields of `ActivationStepMetrics`, which are the source system's. All calls are made under the
engine's lock.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from offload.config import described
from offload.engine import OffloadEngine
from offload.saved.handles import Handle
from offload.transfer.block import BlockState, DeviceBlock, living
from offload.watermark.budget import ActivationBudgetManager, ActivationTransfer
from offload.watermark.forward import Forward


@described
@dataclass(slots=True, kw_only=True)
class ActivationStepMetrics:
    """One step of one runtime, counted while it runs. A record is a storage, however often it was saved, but
    for tensors that order="reactive" keeps: there each save counts."""

    step: int = 0
    """Number that `step_begin` was given, else counted from 0."""

    activations_saved: int = 0
    """Records: `activations_kept + activations_spilled`."""

    activations_kept: int = 0
    """Records that stayed on the device."""

    activations_spilled: int = 0
    """Records whose copy to the host was issued: `pool_hits + pool_misses`."""

    activations_restored: int = 0
    """Spilled records that a backward has read, each counted once: copied back, or found still there. All of
    the spilled ones where the whole graph ran backward."""

    spill_bytes: int = 0
    """Bytes of the spilled records."""

    restore_bytes: int = 0
    """Bytes of the restored records."""

    stall_time_ms: float = 0.0
    """Time that the host was blocked to finalize spills in this step, and device time that compute waited for
    copies of saved tensors in the step before: reading that earlier would block the host."""

    stall_count: int = 0
    """Waits in this step, of both kinds."""

    pool_hits: int = 0
    """Spilled records that found pinned memory."""

    pool_misses: int = 0
    """Spilled records in unpinned memory."""

    vram_peak_mb: float = 0.0
    """MiB of device memory allocated at most in the step."""


@described
@dataclass(slots=True, kw_only=True)
class SpillDetails:
    """Figures that the source's line has no field for."""

    logical_bytes: int = 0
    """Bytes of the saved tensors that were looked at, one count a save."""

    storage_bytes: int = 0
    """Bytes of the storages that they lie in, one count a storage."""

    kept: int = 0
    """Saves that order="reactive" has kept, which have no record."""

    kept_bytes: int = 0
    """Bytes of those tensors."""

    released_bytes: int = 0
    """Spilled bytes whose copy let device memory go: what the peak can fall by."""

    forecast_bytes: int = 0
    """Bytes that left because the curve of earlier steps said that they would have to."""

    latched_bytes: int = 0
    """Bytes that left because the high mark was reached."""

    forwards_lost: int = 0
    """Forwards of a shape that no curve fits: the latch alone ruled."""

    times_over: int = 0
    """Readings at or above the high mark after which nothing more could leave."""

    retries: int = 0
    """Allocations of the engine that failed, for which room was made, after which they were retried."""


_RESIDENT = BlockState.RESIDENT


@dataclass(slots=True)
class CheckpointCoordinator:
    """Says which tensors are never spilled, and so what the runtime leaves to gradient checkpoints.

    What a recompute saves passes through; it is read at once (`saved/hooks.py` sees to it that no scope is
    asked in a backward). What a checkpoint keeps outside its region, its inputs, is saved like any other
    tensor, and what it keeps inside counts in the device's reading.

    recompute_threshold_bytes: a smaller tensor is kept, or recomputed where a checkpoint does that: its copy
        costs more than its recompute. prefer_recompute: False ignores the threshold.
    """

    recompute_threshold_bytes: int = 0
    prefer_recompute: bool = True

    def may_spill(self, nbytes: int) -> bool:
        """Predicate: a saved tensor of this size may leave."""
        return not self.prefer_recompute or nbytes >= self.recompute_threshold_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts that a scheduler works with. note_save: called with each handle, and the device of its tensor."""

    engine: OffloadEngine
    budget: ActivationBudgetManager
    transfer: ActivationTransfer
    coordinator: CheckpointCoordinator = field(default_factory=CheckpointCoordinator)
    note_save: Callable[[Handle, torch.device], object] | None = None


class ActivationScheduler:
    """metrics, details: of the step under way. forwards: those of this step, and earlier ones of which
    something can still be read. mark_bounds: whether the mark alone bounds what is in flight."""

    mark_bounds = False

    def __init__(self, parts: Parts) -> None:
        self.engine = parts.engine
        self.budget = parts.budget
        self.transfer = parts.transfer
        self.coordinator = parts.coordinator
        self._note_save = parts.note_save
        self.metrics, self.details = ActivationStepMetrics(), SpillDetails()
        self.forwards: list[Forward] = []
        self.levels: list[int] = []
        self._numbered = 0

    # -- what happens ----------------------------------------------------------------------------------------
    def take(self, forward: Forward, tensor: torch.Tensor) -> Handle | None:
        """An eligible tensor is being saved. None: it stays, without a record."""
        raise NotImplementedError

    def read(self, forward: Forward, handle: Handle) -> None:
        """A saved tensor has been read."""
        block = handle.record.block
        if block in forward.spilled:
            forward.spilled.discard(block)
            self.metrics.activations_restored += 1
            self.metrics.restore_bytes += block.nbytes

    def saved_elsewhere(self, nbytes: int) -> None:
        """Another client of the engine has saved so many bytes."""

    def read_elsewhere(self, handle: Handle) -> None:
        """A saved tensor of another client has been read."""

    def forward_ends(self, forward: Forward) -> None:
        """Nothing more is saved in it."""
        forward.running = False
        forward.chunk.complete()

    def room(self) -> int:
        """Bytes that may be fetched ahead, by whichever client of the engine."""
        return sys.maxsize

    def relieve(self) -> None:
        """An allocation of the engine has failed: send what can leave. Its caller settles the copies."""

    def forget(self, ending: Sequence[Forward]) -> None:
        """These forwards are over, and the next one has number 0. The step may go on."""
        ended = set(ending)
        self.forwards = [forward for forward in self.forwards if forward not in ended]
        self._numbered = 0
        self.levels = []

    def end_step(self) -> tuple[ActivationStepMetrics, SpillDetails]:
        """Returns what was counted in the step."""
        found = self.metrics, self.details
        self.metrics, self.details = ActivationStepMetrics(), SpillDetails()
        return found

    # -- for both --------------------------------------------------------------------------------------------
    def can_take(self) -> bool:
        """False in a capture: a graph's memory is never given back, so nothing of it has to leave."""
        transfers = self.engine.transfers
        return transfers.capture is None and not transfers.device.is_capturing()

    def save(self, forward: Forward, tensor: torch.Tensor) -> tuple[Handle, bool]:
        """A record of the tensor, whose bytes stay for now; and whether it is a new one."""
        if forward.number is None:
            forward.number = self._numbered
            self._numbered += 1
            self.begins(forward)
        forward.note_save(tensor)
        records = len(forward.group.blocks)
        handle = self.engine.store.save(tensor, forward.chunk, forward.group)
        if self._note_save is not None:
            self._note_save(handle, tensor.device)
        self.details.logical_bytes += tensor.nbytes
        is_new = len(forward.group.blocks) > records
        if is_new:
            self.metrics.activations_saved += 1
            self.details.storage_bytes += tensor.untyped_storage().nbytes()
        return handle, is_new

    def begins(self, forward: Forward) -> None:
        """It has a number, and is about to make its first save."""

    def may_leave(self, block: DeviceBlock) -> bool:
        """Predicate: the block's bytes are resident, are to be read, and have no copy on the host."""
        return (
            block.state is _RESIDENT
            and not block.is_freed
            and block.unread > 0
            and block.host is None
            and block.stored is None
            and block.device_bytes is not None
            and self.coordinator.may_spill(block.nbytes)
        )

    def out_of_memory_note(self) -> str:
        """Text on what was sent in this step, and what could have been."""
        metrics, details = self.metrics, self.details
        left = [
            block.nbytes
            for forward in self.forwards
            for block in living(forward.chunk.blocks)
            if self.may_leave(block)
        ]
        number = len(left) + details.kept
        remedy = (
            "What an operator uses for itself comes on top of the mark: lower the mark by what it asked for "
            "(vram_high_watermark_mb, or high= of apply)"
            if number
            else "No saved tensor is left that could leave: make the batch, or something else, smaller"
        )
        return (
            f"watermark: {metrics.spill_bytes:,} bytes in {metrics.activations_spilled:,} saved tensors had "
            f"been sent to the host, and {sum(left) + details.kept_bytes:,} bytes in {number:,} more could "
            f"have been; the high mark is {self.budget.high_bytes:,} bytes. {remedy}"
        )

    def send(self, forward: Forward, blocks: Sequence[DeviceBlock]) -> int:
        """Spill these, of one forward; the bytes that do leave."""
        left = self.transfer.spill(blocks)
        nbytes = sum(block.nbytes for block in left)
        forward.spilled.update(left)
        self.metrics.activations_spilled += len(left)
        self.metrics.spill_bytes += nbytes
        if forward.ends:  # an earlier step's figures have them as kept
            self.metrics.activations_saved += len(left)
            self.engine.transfers.counts.saved += len(left)
            self.engine.transfers.counts.saved_bytes += nbytes
        return nbytes
