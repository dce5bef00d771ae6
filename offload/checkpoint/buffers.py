"""The buffers of a block whose forward is run a second time, so that they end as after one forward.

One invariant: a recompute starts from the very values that its forward had, and leaves every buffer as it
found it, whether it runs to its end or not.

Small buffers are copied before every forward: the kernels of batch norm write their statistics and move no
version, and a call may do so that none before did. Which of the large ones a forward writes is learned in the
first one, which compares values: that blocks the host, once for each and each of training and evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from offload.saved.filters import is_plain
from offload.telemetry.speaker import speaker
from offload.transfer.layout import ViewLayout, empty_at, overlaps_itself, place_of

__all__ = ["BuffersBefore"]

logger = speaker(__name__)

_ABSENT: Any = object()

_SMALL_BYTES = 1 << 16
"""Of the statistics of 16,384 channels."""

_writes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
"""Of a module: by buffer and whether it trains, whether a forward writes it."""


class _Buffer(NamedTuple):
    """One buffer as it was before a forward. value: a clone, None where the buffer was None; `_ABSENT` where
    it was not there, or where it is known not to be written and has no clone."""

    owner: nn.Module
    name: str
    tensor: torch.Tensor | None
    version: int
    value: Any
    known: bool | None


class BuffersBefore:
    """The buffers of `module` before one forward of it, and of the others in it, all of `modules`: built just
    before, and `learn` called just after.

    Blocks the host: in the first forward, see above; in a CUDA graph's capture never.
    """

    def __init__(self, module: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._module, self._modules = module, modules
        self._first = module not in _writes  # then buffers may still be made
        self._clones: dict[int, torch.Tensor] = {}
        self._buffers = [buffer for owner in modules for buffer in self._of(owner)]
        self._clones.clear()
        self._count = len(self._buffers)

    def _of(self, owner: nn.Module) -> Iterator[_Buffer]:
        if not owner._buffers:
            return
        learned = _writes.get(owner, {})
        for name, tensor in owner._buffers.items():
            is_small = tensor is not None and tensor.nbytes <= _SMALL_BYTES
            known = True if is_small else learned.get((name, owner.training))
            value: Any = _ABSENT
            if known is not False:
                value = None if tensor is None else self._clone(tensor)
            yield _Buffer(owner, name, tensor, _version(tensor), value, known)

    def _clone(self, tensor: torch.Tensor) -> torch.Tensor:
        """One for a buffer, however many modules share it."""
        if id(tensor) not in self._clones:
            self._clones[id(tensor)] = _copy(tensor)
        return self._clones[id(tensor)]

    def learn(self) -> None:
        """The forward is over: keep the values of what it wrote, and let go of the rest."""
        learns = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        kept: list[_Buffer] = []
        for buffer in self._buffers:
            moved = (
                buffer.owner._buffers.get(buffer.name, _ABSENT) is not buffer.tensor
                or _version(buffer.tensor) != buffer.version
            )
            if buffer.known is False:
                if moved:
                    self._written_late(buffer)
                continue
            written = buffer.known or moved or not learns or not _equal(buffer.tensor, buffer.value)
            if learns:
                learned = _writes.setdefault(buffer.owner, {})
                learned[buffer.name, buffer.owner.training] = written
            if written:
                kept.append(buffer._replace(tensor=None))  # its value is enough
        are_new = sum(len(owner._buffers) for owner in self._modules) != self._count
        if (self._first or are_new) and learns:
            before = {(buffer.owner, buffer.name) for buffer in self._buffers}
            made = [
                _Buffer(owner, name, None, 0, _ABSENT, None)
                for owner in self._module.modules()
                for name in owner._buffers
                if (owner, name) not in before
            ]
            kept += made
            _writes.setdefault(self._module, {})
        self._buffers = kept

    def _written_late(self, buffer: _Buffer) -> None:
        """A buffer that earlier forwards left alone, so there is no clone of it."""
        _writes[buffer.owner][buffer.name, buffer.owner.training] = True
        logger.warning(
            "buffer %r of a %s was written in a forward that is recomputed, and in none before: this one "
            "recompute starts from its value in the backward, and writes it again; later ones do not",
            buffer.name,
            type(buffer.owner).__name__,
        )

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside: its buffers have the values from before the forward, in tensors of its
        own; at the end, by an exception too, the tensors of now are back."""
        now = [
            (buffer.owner, buffer.name, buffer.owner._buffers.get(buffer.name, _ABSENT))
            for buffer in self._buffers
        ]
        copies: dict[int, torch.Tensor] = {}
        try:
            for buffer in self._buffers:
                value = buffer.value
                if isinstance(value, torch.Tensor):
                    if id(value) not in copies:  # cloned again: a second backward starts from here too
                        copies[id(value)] = _copy(value)
                    value = copies[id(value)]
                _put(buffer.owner, buffer.name, value)
            yield
        finally:
            for owner, name, tensor in now:
                _put(owner, name, tensor)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for which kernels are chosen as for the tensor."""
    with _disable_current_modes(), torch.no_grad():  # who counts the block's calls does not see this one
        copy = tensor.detach().clone()
        if is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_quantized:
            start = int(tensor.storage_offset()) * tensor.itemsize
            place = place_of(tensor.untyped_storage(), start) // tensor.itemsize
            layout = ViewLayout(tensor.size(), tensor.stride(), place, tensor.dtype)
            if (place or copy.stride() != layout.stride) and not overlaps_itself(layout):
                copy = empty_at(layout, tensor.device).copy_(copy)
    return copy.requires_grad_(tensor.requires_grad)


def _put(owner: nn.Module, name: str, tensor: Any) -> None:
    if tensor is _ABSENT:
        owner._buffers.pop(name, None)
    else:
        owner._buffers[name] = tensor


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _equal(tensor: torch.Tensor | None, clone: torch.Tensor | None) -> bool:
    if tensor is None or clone is None:
        return tensor is clone
    try:
        return torch.equal(tensor, clone)
    except (NotImplementedError, RuntimeError):  # a layout or a device that cannot be compared
        return False
