"""In which phase of a step the device's memory is highest, and what is saved there outside of the blocks:
what a mode that changes only the blocks cannot lower.

One invariant: it looks, in the first steps after `apply`, and changes nothing. torch's peak only rises, so
the phase in which it rose last is the one. A run that was higher before `apply` hides it; then nothing is
said.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from offload.sizes import bytes_text

BLOCKS: Final = "the forward, up to the last block"
HEAD: Final = "the head and the loss, after the last block"
BACKWARD: Final = "the backward of the blocks"
OPTIMIZER: Final = "the optimizer's step"

_STEPS = 2  # in the first the optimizer makes its state


def device_peak_bytes(device: torch.device | None = None) -> int | None:
    """Active bytes at most since torch began to count, of the current GPU where `device` is none. None where
    there is no GPU. Blocks the host: never."""
    if not torch.cuda.is_available():
        return None
    where = device if device is not None and device.type == "cuda" else None
    return int(torch.cuda.memory_stats(where).get("active_bytes.all.peak", 0))


class PeakWatch:
    """Scope that takes nothing: it sees what is saved outside of the blocks."""

    min_elements = 1

    def __init__(self, has_blocks: bool) -> None:
        peak_bytes = device_peak_bytes() if has_blocks else None
        self._peak_bytes = peak_bytes or 0
        self._phase: str | None = None  # the one under way
        self._highest: str | None = None
        self._largest: dict[str, tuple[int, str]] = {}  # by phase: bytes, and what
        self._steps_left = 0 if peak_bytes is None else _STEPS
        self._ends_before: int | None = None

    @property
    def is_over(self) -> bool:
        return self._steps_left == 0

    def begins(self, phase: str) -> None:
        """The phase before ends."""
        if self.is_over:
            return
        peak_bytes = device_peak_bytes() or 0
        if peak_bytes > self._peak_bytes:
            self._peak_bytes, self._highest = peak_bytes, self._phase
        self._phase = phase

    def forward_begins(self, ends_by_hand: int) -> bool:
        """Whether it watches this one. ends_by_hand: of steps, so far: they tell that the first ones are over
        where no optimizer of torch steps. While it watches, no block is left alone with its hooks."""
        if self._ends_before is None:
            self._ends_before = ends_by_hand
        elif ends_by_hand - self._ends_before > _STEPS:
            self._steps_left = 0
        self.begins(BLOCKS)
        return not self.is_over

    def step_ends(self) -> None:
        if not self.is_over:
            self.begins(OPTIMIZER)
            self._steps_left -= 1

    def take(self, tensor: torch.Tensor) -> None:
        """Note the largest of a phase."""
        nbytes = math.prod(tensor.shape) * tensor.element_size()
        if self._phase is not None and nbytes > self._largest.get(self._phase, (0, ""))[0]:
            what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            self._largest[self._phase] = nbytes, what

    def note_replayed(self, tensor: torch.Tensor) -> None:
        """Nothing: such memory is not the model's."""

    def text(self) -> str:
        """Where the peak is, "" where that is not known."""
        if self._highest is None:
            return ""
        found = f"Device memory is highest, {bytes_text(self._peak_bytes)} active, in {self._highest}"
        nbytes, what = self._largest.get(self._highest, (0, ""))
        if nbytes:
            found += f"; the largest tensor saved there outside of the blocks is {what}, {bytes_text(nbytes)}"
        return found
