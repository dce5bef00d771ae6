"""What autograd's graph keeps instead of a saved tensor: a `Handle` of a tensor that may leave, or a `Passed`
tensor that stays. Handles of one storage at one version share a `Record`: which bytes it has, and whether
they were changed since.

One invariant: neither holds a reference to the graph node that holds it, and a handle keeps only device bytes
that its record's block counts. A record lives as long as a handle of it. When the last handle dies, the
record dies, and its finaliser frees the block.

Saves that torch unpacks for a node whose gradients, in this backward, read them not: the halves of a split
backward unpack all operands of a product, and each reads one of them. In doubt a save is read. What is not
read may be given on meta, where a read would raise.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

from offload.ids import SlotId
from offload.transfer.block import DeviceBlock
from offload.transfer.layout import ViewLayout


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Record:
    """What the handles of one saved storage share.

    block: its bytes. probe: a tensor without bytes that counts the versions of what was saved first; None
    where the block stays, each of whose handles has an alias of its own. version: at the saves, which are all
    of one. layout: of every save so far, None once two differ. gathered: the block holds this sparse view,
    packed.
    """

    block: DeviceBlock
    probe: torch.Tensor | None
    version: int
    layout: ViewLayout | None = None
    gathered: ViewLayout | None = None

    @property
    def label(self) -> SlotId:
        return self.block.label

    def __del__(self) -> None:
        try:
            block = self.block
        except AttributeError:  # an interrupt in its constructor
            return
        if not block.is_freed:  # `DeviceBlock.free`, without a call: every record dies once
            block.is_freed = True
            block.device_bytes = None
            block.freed_blocks.append(block)

    def __repr__(self) -> str:
        return f"Record({self.block!r})"


class Handle:
    """What autograd's graph keeps instead of a tensor: names a record, and owns no storage unless that record
    stays.

    layout and probe: how to rebuild the tensor, and a tensor without bytes that counts its versions (the
    record's own where it was the first save). Where the record stays, layout is None and the probe an alias
    of the tensor, which is all that a read needs; None once the record is released. version: at the save.
    """

    __slots__ = ("__weakref__", "layout", "pass_no", "probe", "record", "version")

    def __init__(
        self, record: Record, layout: ViewLayout | None, probe: torch.Tensor | None, version: int
    ) -> None:
        self.record = record
        self.layout = layout
        self.probe = probe
        self.version = version
        self.pass_no = record.block.pass_no - 1  # not read yet in the pass under way


class Passed:
    """A tensor that stays where it is, in the graph's own keeping, with the version that it had.

    It holds a detached alias: the tensor itself, if it is the node's own output, would keep the node alive
    for ever.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        try:
            self.version: int | None = tensor._version
        except RuntimeError:  # an inference tensor counts none
            self.version = None
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()

    def read(self) -> torch.Tensor:
        if self.version is not None and self.tensor._version != self.version:
            raise modified(self.tensor.dtype, self.tensor.size(), self.tensor._version, self.version)
        return self.tensor


def counts_with(probe: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors count versions together. Views do; `.data` and the parts of `unsafe_chunk` share
    bytes and count alone. Moves the counter for a moment: nothing else tells. A backward that another thread
    runs may see that, and raise (docs/limits.md); a read of the store, under the engine's lock, does not."""
    version = probe._version
    _count((probe,), (version + 1,))
    try:
        return tensor._version != version
    finally:
        _count((probe,), (version,))


_count = torch._C._autograd._unsafe_set_version_counter


class ModifiedError(RuntimeError):
    """A saved tensor was written in place before it was read."""


def modified(dtype: torch.dtype, size: torch.Size, found: int, expected: int) -> ModifiedError:
    """The error that autograd itself would raise."""
    return ModifiedError(
        f"a saved tensor needed for the gradient computation was modified by an inplace operation: {dtype} "
        f"{list(size)} is at version {found}, expected version {expected}; clone it before the in-place "
        "change, or save it after"
    )


_READ_FOR = {
    "AddmmBackward0": {"_raw_saved_mat2": 1, "_raw_saved_mat1": 2},
    "BaddbmmBackward0": {"_raw_saved_batch2": 1, "_raw_saved_batch1": 2},
    "BmmBackward0": {"_raw_saved_mat2": 0, "_raw_saved_self": 1},
    "GroupedMmBackward0": {"_raw_saved_mat2": 0, "_raw_saved_self": 1},
    "MmBackward0": {"_raw_saved_mat2": 0, "_raw_saved_self": 1},
    "MulBackward0": {"_raw_saved_other": 0, "_raw_saved_self": 1},
}
"""torch's nodes that read each operand for one gradient alone: the place of that one."""

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def is_read(packed: object, unpacks: type) -> bool:
    """False where torch itself unpacks it, for a node that computes no gradient from it in this backward.
    packed: what autograd keeps. unpacks: whose method is its hook; another's may look at what it gets."""
    node: Any = torch._C._current_autograd_node()
    for name, place in _READ_FOR.get("" if node is None else node.name(), {}).items():
        saved = getattr(node, name)
        if saved.data is packed and type(getattr(saved.unpack_hook, "__self__", None)) is unpacks:
            before = node.next_functions[place][0]
            if not _asked_by_engine():
                return True
            try:
                return before is not None and torch._C._will_engine_execute_node(before)
            except RuntimeError:  # a leaf whose gradient is asked for
                return True
    return True


def _asked_by_engine() -> bool:
    """False where Python code does that runs for the node: a hook that looks at its node's saves."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("offload."):
        frame = frame.f_back
    return frame is None or frame.f_code is _RUN_BACKWARD  # none on a thread of autograd's own
