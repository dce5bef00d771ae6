"""What the runtime leaves to gradient checkpoints.

One invariant: what a recompute saves passes through; it is read at once (`saved/hooks.py` sees to it that no
scope is asked in a backward). What a checkpoint keeps outside its region, its inputs, is saved like any other
tensor, and what it keeps inside counts in the device's reading.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CheckpointCoordinator:
    """Says which tensors are never spilled.

    recompute_threshold_bytes: a smaller tensor is kept, or recomputed where a checkpoint does that: its copy
        costs more than its recompute. prefer_recompute: False ignores the threshold.
    """

    recompute_threshold_bytes: int = 0
    prefer_recompute: bool = True

    def may_spill(self, nbytes: int) -> bool:
        """Whether a saved tensor of this size may leave."""
        return not self.prefer_recompute or nbytes >= self.recompute_threshold_bytes
