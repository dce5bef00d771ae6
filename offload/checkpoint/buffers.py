"""Values of the buffers of a block whose forward is run a second time: they end as after one forward.

One invariant: a recompute starts from the values that its forward had, and writes into copies of its own.

Small buffers are copied before every forward: the kernels of batch norm write their statistics and move no
version, and a call may do so that none before did. Which of the large ones a forward writes is learned in the
first one, which compares values: that blocks the host, once for each and each of training and evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from offload.saved.filters import is_plain
from offload.telemetry.speaker import speaker
from offload.transfer.layout import ViewLayout, empty_at, overlaps_itself, place_of

logger = speaker(__name__)

_SMALL_BYTES = 1 << 16
"""Bytes that a small buffer has at most: the statistics of 16,384 channels."""

_writes: WeakKeyDictionary[nn.Module, dict[tuple[str, bool], bool]] = WeakKeyDictionary()
"""By module, then by large buffer and whether the module trains: whether a forward writes it."""


class BuffersBefore:
    """Buffers of `modules` before one forward: built just before, and `learn` called just after.

    Blocks the host: in the first forward, see above; in a CUDA graph's capture never.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.clones: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of the tensor, which lives
        self._owners = [owner for owner in modules if owner._buffers]
        self._large: list[tuple[nn.Module, str, torch.Tensor, int]] = []
        for owner in self._owners:
            for name, tensor in owner._buffers.items():
                if tensor is None:
                    continue
                if tensor.numel() * tensor.element_size() > _SMALL_BYTES:
                    self._large.append((owner, name, tensor, _version(tensor)))
                    if _writes.get(owner, {}).get((name, owner.training)) is False:
                        continue
                if id(tensor) not in self.clones:
                    self.clones[id(tensor)] = tensor, _copy(tensor)

    def learn(self) -> None:
        """The forward is over: let go of large buffers that it did not write."""
        large, self._large = self._large, []
        learns = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
        for owner, name, tensor, version in large:
            known, which = _writes.setdefault(owner, {}), (name, owner.training)
            is_written = _version(tensor) != version
            if id(tensor) not in self.clones:
                if is_written:  # earlier forwards left it alone, so there is no clone of it
                    known[which] = True
                    logger.warning(
                        "buffer %r of a %s was written in a forward that is recomputed, and in none before: "
                        "this one recompute starts from its value in the backward, and writes it again; "
                        "later ones do not",
                        name,
                        type(owner).__name__,
                    )
            elif learns and not known.get(which):
                known[which] = is_written or not _are_equal(*self.clones[id(tensor)])
                if not known[which]:
                    del self.clones[id(tensor)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside, and finds copies, which go with its end: a second backward starts from
        the clones too."""
        copies: dict[int, torch.Tensor] = {}
        found = []
        try:
            for owner in self._owners:
                for name, tensor in list(owner._buffers.items()):
                    if id(tensor) in self.clones:
                        if id(tensor) not in copies:
                            copies[id(tensor)] = _copy(self.clones[id(tensor)][1])
                        found.append((owner, name, tensor))
                        owner._buffers[name] = copies[id(tensor)]
            yield
        finally:
            for owner, name, tensor in found:
                owner._buffers[name] = tensor


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


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _are_equal(tensor: torch.Tensor, clone: torch.Tensor) -> bool:
    try:
        return torch.equal(tensor, clone)
    except (NotImplementedError, RuntimeError):  # a layout or a device that cannot be compared
        return False
