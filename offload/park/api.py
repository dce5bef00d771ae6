"""What `offload.park` and `offload.parked` are asked with.

One invariant: one handle a model, whatever is parked of it and when.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from offload.engine import OffloadEngine, default_engine
from offload.park.census import KINDS, check_kinds
from offload.park.parked import Parked
from offload.park.report import Kind

_known: weakref.WeakKeyDictionary[nn.Module, Parked] = weakref.WeakKeyDictionary()


def park(
    model: nn.Module,
    optimizer: Any = None,
    *,
    kinds: Sequence[Kind] = KINDS,
    extra: Sequence[Any] = (),
    dry_run: bool = False,
    pageable: bool = False,
    ignore_graphs: bool = False,
    engine: OffloadEngine | None = None,
) -> Parked:
    """Move a model's training state to pinned host memory, and free its device memory, until `wake`.

    optimizer: one, or several in a list: whose state leaves too. None: those of the last call.
    kinds: of "weights" (and buffers), "gradients", "optimizer" and "extra"; the others stay where they are.
    extra: what else leaves: tensors, modules such as an average of the weights, nested lists and dicts.
    dry_run: nothing moves, and `print()` of what is returned tells what would.
    pageable: what the host's budget has no room for goes to ordinary memory.
    ignore_graphs: you vouch that no CUDA graph that may be replayed reads what is parked.
    engine: whose lanes and host memory are used; None takes the process's own of the model's device.

    A storage that something else holds stays on the device, and a warning names it. A kind that is parked
    already stays as it is. Blocks the host for the copies, and in the first cycle for pinning. Raises
    HostBudgetError before anything has moved, CaptureError while a CUDA graph lives, OffloadError inside a
    backward, ValueError for what it cannot take.
    """
    check_kinds(kinds)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, must be a module: park each one by itself")
    given = [] if optimizer is None else [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [each if hasattr(each, "drop_ring") else getattr(each, "optimizer", each) for each in given]
    optimizers = [each for each in inner if hasattr(each, "param_groups")]  # a look at state may end a step
    if len(optimizers) < len(given):
        names = ", ".join(type(each).__name__ for each in given)
        raise ValueError(f"optimizer is {names}, of which one has no state: give its tensors as extra=")
    handle = _known.get(model)
    if handle is None or engine not in (None, handle.engine):
        if handle is not None:
            handle.close()
        handle = _known[model] = Parked(engine or _engine_of(model), model)
    handle.park(optimizers, extra, kinds, dry_run=dry_run, pageable=pageable, ignore_graphs=ignore_graphs)
    return handle


@contextmanager
def parked(model: nn.Module, optimizer: Any = None, **arguments: Any) -> Iterator[Parked]:
    """`park` with these arguments inside; what it has parked is awake at the end, whatever was raised."""
    handle = park(model, optimizer, **arguments)
    coming = () if handle.report.is_plan else tuple(handle.report.kinds)
    try:
        yield handle
    finally:
        if coming:
            handle.wake(*coming)


def _engine_of(model: nn.Module) -> OffloadEngine:
    """Raises ValueError for a model on the CPU of a machine that has a GPU."""
    devices = {str(tensor.device) for tensor in chain(model.parameters(), model.buffers())}
    name = next((device for device in sorted(devices) if device.startswith("cuda")), "sim")
    if name == "sim" and torch.cuda.is_available():
        raise ValueError(f"{type(model).__name__} has nothing on a GPU that could be parked")
    return default_engine(name)
