"""Host memory of the simulated device: plain memory in the shape of pinned memory.

One invariant: each registration is a storage of its own, so no copy can cross from one into the next, and
each can go alone.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from offload.errors import HostBudgetError


class PlainMemory:
    """`nbytes` in pieces of at most `registration_bytes`; the system gives the pages when they are used."""

    def __init__(
        self, nbytes: int, registration_bytes: int, release: Callable[[Sequence[torch.Tensor]], None]
    ) -> None:
        """release: raises if a copy of one of the pieces may be in flight."""
        if nbytes < 0 or registration_bytes <= 0:
            raise ValueError(
                f"{nbytes:,} host bytes in pieces of {registration_bytes:,} were asked for; give 0 or more, "
                "pieces above 0"
            )
        try:
            pieces = [
                _on_pages(min(registration_bytes, nbytes - start))
                for start in range(0, nbytes, registration_bytes)
            ]
        except (RuntimeError, OSError) as error:
            raise HostBudgetError(
                f"the system refused {nbytes:,} bytes of host memory ({error}); lower host_limit_bytes"
            ) from error
        self.pieces = tuple(pieces)
        self._release = release

    def release_piece(self, index: int) -> None:
        piece = self.pieces[index]
        if piece.numel():
            self._release([piece])
            self.pieces = (*self.pieces[:index], piece.new_empty(0), *self.pieces[index + 1 :])

    def release(self) -> None:
        self._release([piece for piece in self.pieces if piece.numel()])
        self.pieces = ()


def _on_pages(nbytes: int) -> torch.Tensor:
    """Bytes that start on a page, as pinned ones do."""
    return torch.frombuffer(
        mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
