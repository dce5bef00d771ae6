"""Writes to what operators have made by kernels that are no operators, inside custom autograd.Functions.

One invariant: it only reads. An output is held until the block's forward ends, no longer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from offload.checkpoint.checksum import checksum, to_host
from offload.checkpoint.kept import alias_of

Key = TypeVar("Key", bound=Hashable)


class UnseenWrites(Generic[Key]):
    """Compares the bytes of outputs right after their calls with those at the end of the block. Blocks the
    host: never."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._outputs: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._same: torch.Tensor | None = None

    def add(self, key: Key, output: torch.Tensor) -> None:
        """output: what the call `key` has just made."""
        before = checksum(output)
        if before is not None:
            self._keys.append(key)
            self._outputs.append(alias_of(output))
            self._before.append(before)

    def end(self) -> None:
        """The block's forward has ended. The comparison has arrived where an event recorded after this has
        passed."""
        outputs, self._outputs = self._outputs, []
        before, self._before = self._before, []
        if outputs:
            # without bytes by now: nothing was written that a reader could find
            after = [checksum(output) for output in outputs]
            same = [one if other is None else other for one, other in zip(before, after, strict=True)]
            self._same = to_host(torch.stack(before) == torch.stack(same))

    def written(self) -> set[Key]:
        """The calls of which an output has other bytes."""
        if self._same is None:
            return set()
        return {key for key, same in zip(self._keys, self._same.tolist(), strict=True) if not same}
