"""order="reactive", the source system's letter: the tensor that is being saved leaves while the latch is on,
one copy at a time, and each comes back when it is read.

One invariant: a tensor that is kept has no record and costs nothing; one that leaves has left the device when
the next one does, at the latest when its forward ends.
"""

from __future__ import annotations

import torch

from offload.compat.stagehand.registry import ActivationRegistry
from offload.saved.handles import Handle
from offload.transfer.block import DeviceBlock
from offload.watermark.forward import Forward
from offload.watermark.scheduler import ActivationScheduler, Parts


class ReactiveOrder(ActivationScheduler):
    """inline_finalize: a spill past the cap finalizes those in flight; without it, it is kept. registry: of
    what was saved."""

    def __init__(self, parts: Parts, registry: ActivationRegistry, *, inline_finalize: bool) -> None:
        super().__init__(parts)
        self.registry = registry
        self._inline_finalize = inline_finalize
        # saved, and maybe still written by the operator that saved them
        self._due: list[tuple[Forward, DeviceBlock]] = []

    def take(self, forward: Forward, tensor: torch.Tensor) -> Handle | None:
        self._send_due()
        self.budget.read()
        spills = self.budget.spilling and self.coordinator.may_spill(tensor.nbytes) and self.can_take()
        if not spills or not (self._inline_finalize or self.transfer.can_spill()):
            self.metrics.activations_saved += 1
            self.details.kept += 1
            self.details.kept_bytes += tensor.nbytes
            self.details.logical_bytes += tensor.nbytes
            self.details.storage_bytes += tensor.untyped_storage().nbytes()
            return None
        handle, is_new = self.save(forward, tensor)
        if is_new:
            self._due.append((forward, handle.record.block))
            self._send_due()
        return handle

    def forward_ends(self, forward: Forward) -> None:
        super().forward_ends(forward)
        self._send_due()
        if self._inline_finalize:
            self.transfer.finalize_all_spills(self.registry.iter_spilling())

    def _send_due(self) -> None:
        due, self._due = self._due, []
        for forward, block in due:
            if block.slot >= forward.written:
                self._due.append((forward, block))
            elif self.may_leave(block):
                if not self.transfer.can_spill() and not self.transfer.sends_nothing:
                    self.transfer.finalize_all_spills(self.registry.iter_spilling())
                if self.transfer.can_spill():
                    self.details.latched_bytes += self.send(forward, [block])
