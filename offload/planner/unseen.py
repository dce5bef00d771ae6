"""Writes to what operators have made by kernels that are no operators, inside custom autograd.Functions.

One invariant: it only reads. An output is held until the block's forward ends, no longer.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import torch

from offload.checkpoint.kept import alias_of

__all__ = ["UnseenWrites"]

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
        if output.numel() == 0 or output.is_meta:
            return
        self._keys.append(key)
        self._outputs.append(alias_of(output))
        self._before.append(_digest(output))

    def end(self) -> None:
        """The block's forward has ended. The comparison has arrived where an event recorded after this has
        passed."""
        outputs, self._outputs = self._outputs, []
        before, self._before = self._before, []
        if outputs:
            after = torch.stack([_digest(output) for output in outputs])
            self._same = _to_host((torch.stack(before) == after).all(dim=1))

    def written(self) -> set[Key]:
        """The calls of which an output has other bytes."""
        if self._same is None:
            return set()
        return {key for key, same in zip(self._keys, self._same.tolist(), strict=True) if not same}


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Two numbers: all bits folded by exclusive or, which a change of the same bits in an even number of
    elements passes by, and the sum."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    elif tensor.is_floating_point() and tensor.element_size() == 1:  # float8 has no reductions
        tensor = tensor.view(torch.uint8)
    folded = torch.hash_tensor(tensor).view(torch.int64)
    return torch.stack([folded, tensor.sum(dtype=torch.float64).view(torch.int64)])


def _to_host(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)
