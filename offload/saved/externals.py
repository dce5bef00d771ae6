"""The one registry of storages that somebody else manages: parameters, receive buffers, tensors that the user
opted out.

One invariant: it holds every storage weakly, and while an entry lives the address in its key names no other
storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import torch
from torch.nn.parameter import is_lazy

from offload.saved.replayed import ReplayedMemory
from offload.transfer.layout import WeakStorage


class ExternalKind(Enum):
    PARAMETER = "parameter"  # never leaves, nor do its views and its autocast casts
    OPTED_OUT = "opted out"  # never leaves: mark_not_offloadable
    # may leave, but is written from outside autograd: its version says nothing, so no save shares another's
    # copy
    BUFFER = "buffer"


_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class ExternalStorages:
    """Storages by kind. A storage registered twice keeps the stricter kind (the first that is not BUFFER).

    kinds: by the storage's key, for whoever sees one to read. replayed: those of torch's own CUDA graphs,
    which nobody registers.
    """

    def __init__(self) -> None:
        self.kinds: dict[int, ExternalKind] = {}
        self._storages: dict[int, WeakStorage] = {}
        self.replayed = ReplayedMemory()

    def register(self, tensor: torch.Tensor, kind: ExternalKind) -> None:
        for part in _plain_parts(tensor):
            with torch._C.DisableTorchFunctionSubclass():  # a weight may be watched
                storage = part.untyped_storage()
            if self.kinds.get(storage._cdata, ExternalKind.BUFFER) is ExternalKind.BUFFER:
                self._storages[storage._cdata] = WeakStorage(storage)
                self.kinds[storage._cdata] = kind

    def register_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            self.register(parameter, ExternalKind.PARAMETER)

    def forget_dead(self) -> None:
        """Drop entries whose storage is gone. Once a step: the dictionary stays as large as what lives."""
        for key in [key for key, weak in self._storages.items() if weak.storage() is None]:
            del self._storages[key], self.kinds[key]


def _plain_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors with storages of their own behind a wrapper subclass (a DTensor's local shard) or a sparse
    tensor, or the tensor itself; none of a lazy module's parameter that has no shape yet."""
    if is_lazy(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor:
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            member = getattr(tensor, name)
            if isinstance(member, torch.Tensor):  # a DTensor also names its mesh
                yield from _plain_parts(member)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield tensor.values()
    elif tensor.layout is torch.strided:
        yield tensor
