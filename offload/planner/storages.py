"""The bytes that autograd saves in a block, as the groups would count them: one copy for each storage at a
version, of the range that its views span.

One invariant: what the groups leave on the device (parameters, small tensors, foreign ones) is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from offload.checkpoint.kept import plain_parts
from offload.engine import OffloadEngine
from offload.saved.filters import Verdict, is_parameter, judge, waited
from offload.saved.store import GATHER_BELOW
from offload.transfer.layout import ViewLayout, WeakStorage, overlaps_itself, span_of


def can_leave(tensor: torch.Tensor, engine: OffloadEngine, min_elements: int) -> bool:
    """Whether a group would take it; of a wrapper, one of the tensors that it is made of."""
    return not is_parameter(tensor) and any(
        judge(part, engine.device, engine.externals, min_elements) is Verdict.ELIGIBLE
        for part in plain_parts(tensor)
    )


def waiting_bytes(tensor: torch.Tensor, engine: OffloadEngine, min_elements: int) -> dict[int, int]:
    """By storage, the bytes that wait while a group has the tensor."""
    saved = SavedBytes(engine, min_elements)
    saved.add(tensor)
    return {key: saved.of_storage(key) for key in saved.storages()}


@dataclass(slots=True)
class _Range:
    start: int
    stop: int
    layouts: set[ViewLayout] = field(default_factory=set)

    def nbytes(self) -> int:
        """A lone view of few of the bytes that it spans is packed."""
        if len(self.layouts) == 1:
            (layout,) = self.layouts
            packed = layout.size.numel() * layout.dtype.itemsize
            if packed < GATHER_BELOW * (self.stop - self.start) and not overlaps_itself(layout):
                return packed
        return self.stop - self.start


class SavedBytes:
    """What was added, each storage and version once."""

    def __init__(self, engine: OffloadEngine, min_elements: int) -> None:
        self._engine = engine
        self._min_elements = min_elements
        self._ranges: dict[tuple[int, int], _Range] = {}
        self._storages: dict[int, WeakStorage] = {}  # their addresses name no other storage meanwhile

    def add(self, tensor: torch.Tensor) -> None:
        tensor = waited(tensor)
        if is_parameter(tensor):
            return
        for part in plain_parts(tensor):
            if tensor.is_nested and not part.is_floating_point():
                continue
            verdict = judge(part, self._engine.device, self._engine.externals, self._min_elements)
            if verdict is not Verdict.ELIGIBLE:
                continue
            storage = part.untyped_storage()
            key = storage._cdata
            self._storages.setdefault(key, WeakStorage(storage))
            start, stop = span_of(part, storage.nbytes())
            found = self._ranges.setdefault((key, part._version), _Range(start, stop))
            found.start, found.stop = min(found.start, start), max(found.stop, stop)
            layout = ViewLayout(part.size(), part.stride(), int(part.storage_offset()), part.dtype)
            found.layouts.add(layout)

    def storages(self) -> set[int]:
        return {key for key, _ in self._ranges}

    def of_storage(self, key: int) -> int:
        return sum(found.nbytes() for (storage, _), found in self._ranges.items() if storage == key)

    def total(self) -> int:
        return sum(found.nbytes() for found in self._ranges.values())
