"""The scope of one managed forward: autograd's saves inside go to the runtime's scheduler.

One invariant: leaving the context removes exactly what entering it installed, also after an exception. The
hooks are the engine's one pair: a group's scope inside is asked first, and what it does not take comes here;
inside a checkpoint, torch's own hooks get all tensors.
"""

from __future__ import annotations

import threading
from types import TracebackType

import torch

from offload.compile.untraced import untraced
from offload.saved.handles import Handle
from offload.saved.hooks import InstalledScope
from offload.watermark.forward import Forward
from offload.watermark.runtime import WatermarkRuntime
from offload.watermark.scheduler import ActivationScheduler


class _SpillScope:
    """Scope that takes every eligible tensor that the scheduler wants."""

    __slots__ = ("_forward", "_scheduler", "min_elements")

    def __init__(self, scheduler: ActivationScheduler, forward: Forward, min_elements: int) -> None:
        self._scheduler = scheduler
        self._forward = forward
        self.min_elements = min_elements

    def take(self, tensor: torch.Tensor) -> Handle | None:
        return self._scheduler.take(self._forward, tensor)

    def note_replayed(self, tensor: torch.Tensor) -> None:
        """Nothing: memory of CUDA graphs that torch.compile records never leaves."""


class _Entered(threading.local):
    """Forwards entered by the calling thread, whose own torch's stack of hooks is."""

    def __init__(self) -> None:
        self.stack: list[tuple[Forward, InstalledScope]] = []


class ActivationHookContext:
    """What `managed_forward` returns. It may be entered again, nested too, in any thread: each time is a
    forward of its own, which ends in the thread where it began.

    An out-of-memory error of an operator inside gets a note of what was spilled, and what could have been.

    min_elements: of a tensor that is looked at; None for the runtime's.
    """

    def __init__(self, runtime: WatermarkRuntime, min_elements: int | None = None) -> None:
        self._runtime = runtime
        self._min_elements = runtime.min_elements if min_elements is None else min_elements
        self._entered = _Entered()

    @untraced
    def __enter__(self) -> None:
        runtime = self._runtime
        forward = runtime.begin_forward()
        scope = _SpillScope(runtime.scheduler, forward, self._min_elements)
        try:
            installed = runtime.engine.hooks.push(scope)
        except BaseException:  # inside a transform of torch.func, which admits no hooks
            runtime.end_forward(forward)
            raise
        self._entered.stack.append((forward, installed))

    @untraced
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        forward, installed = self._entered.stack.pop()
        self._runtime.engine.hooks.pop(installed)
        self._runtime.end_forward(forward)
        if isinstance(error, torch.OutOfMemoryError):
            self._runtime.explain(error)
