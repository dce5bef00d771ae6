"""Saves that torch unpacks for a node whose gradients, in this backward, read them not: the halves of a split
backward unpack all operands of a product, and each reads one of them.

One invariant: in doubt a save is read. What is not read may be given on meta, where a read would raise.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

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
