"""One managed forward: what it saved, how much of that may leave now, and where its reads stand.

One invariant: no block leaves while the operator that saved it may still write it. rrelu saves its noise and
draws it afterwards; such an operator saves a tensor that requires no gradient. autograd numbers the operators
of each thread by itself, so to another thread the last operator of a forward is never over.
"""

from __future__ import annotations

import threading

import torch

from offload.ids import ForwardId, GroupId
from offload.saved.handles import SavedChunk, SavedGroup
from offload.telemetry.records import ClientStats
from offload.transfer.block import DeviceBlock
from offload.watermark.curve import CurveRecorder, Forecast

CLIENT = "watermark"

_sequence_nr = torch._C._autograd._get_sequence_nr


class Forward:
    """number: of the forwards of its step that saved something; None until this one has. running: inside
    `managed_forward`. being_read: its backward has begun. spilled: blocks that left and were not read so far.
    place: among the forwards, by when they are read. next: position of the first block that may still have to
    leave, if nothing else holds it, and at all. ends: step ends that it has outlived.
    in_figures: blocks whose copies the figures of a step have."""

    def __init__(self, chunk_id: ForwardId, levels: list[int]) -> None:
        self.chunk = SavedChunk(chunk_id)
        self.group = SavedGroup(GroupId(chunk_id, 0, "saved", CLIENT), leaves=True, waits=True)
        self.number: int | None = None
        self.recorder = CurveRecorder(levels)
        self.forecast = Forecast(())
        self.running = True
        self.being_read = False
        self.spilled: set[DeviceBlock] = set()
        self.place = -1
        self.next = [0, 0]
        self.ends = 0
        self.in_figures: set[DeviceBlock] = set()
        self._over = False
        self._operator = -1  # autograd's number of the one that saves
        self._thread = 0  # where it runs
        self._unwritten = False
        self._complete = 0  # blocks of operators before it

    def note_save(self, tensor: torch.Tensor) -> None:
        """An operator is about to save `tensor`."""
        operator = _sequence_nr()
        if operator != self._operator:
            self._operator, self._unwritten = operator, False
            self._thread = threading.get_ident()
            self._complete = len(self.chunk.blocks)
        if not tensor.requires_grad:
            self._unwritten = True

    @property
    def written(self) -> int:
        """How many of its blocks, from the first on, have the bytes that they will be read with."""
        if not (self.running and self._unwritten):
            return len(self.chunk.blocks)
        is_over = _sequence_nr() != self._operator and threading.get_ident() == self._thread
        return len(self.chunk.blocks) if is_over else self._complete

    def figures(self) -> ClientStats:
        """Where its bytes went, of those that the figures of no earlier step have."""
        kept = came_back = read_here = 0
        blocks = [block for block in self.chunk.blocks if block not in self.in_figures]
        self.in_figures.update(block for block in blocks if block.copies)
        for block in blocks:
            if block.copies == 0:
                kept += 0 if self.ends else block.nbytes
            elif block.copies > 1:
                came_back += block.nbytes
            elif block.unread < block.readers:
                read_here += block.nbytes
        return ClientStats(kept_bytes=kept, came_back_bytes=came_back, read_here_bytes=read_here)

    @property
    def is_over(self) -> bool:
        """Whether nothing of it can be read any more."""
        self._over = self._over or not (self.running or next(self.chunk.living(), None))
        return self._over
