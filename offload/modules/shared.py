"""Objects that the models of one engine share: the arbiter of `conductor=`, and the runtime of
mode="watermark", whose managed forwards are the models' forwards.

Two invariants: an engine has one conductor, for as long as a handle wants it; the last handle that goes shuts
down what `apply` has built, and none what the user has. The models of a process share one runtime, so one
pair of marks: what is oldest leaves first, whichever model saved it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.conductor.arbiter import Conductor
from offload.conductor.config import ConductorConfig
from offload.conductor.runtime import TelemetryHub
from offload.device import device_bytes
from offload.engine import OffloadEngine
from offload.groups.manager import GroupsManager
from offload.modules.root import ModelRoot
from offload.modules.steps import Steps
from offload.sizes import argument_bytes
from offload.watermark.runtime import ActivationHookContext, WatermarkRuntime

Conducted = bool | str | Path | Mapping[str, Any] | ConductorConfig | None
"""What `conductor=` may be."""

_handles: weakref.WeakKeyDictionary[Conductor, int] = weakref.WeakKeyDictionary()
"""Conductors that `apply` has built, and how many handles want each."""


def conductor_config(
    given: Conducted, engine: OffloadEngine | None, where: torch.device
) -> ConductorConfig | None:
    """The config that `given` asks for; None for no conductor. engine: the one of `where`, if there is one.
    Raises ValueError for a config that cannot be, or another one than the engine's conductor has."""
    if given is None or given is False:
        return None
    there = None if engine is None else engine.copier.admission
    if given is True:
        return (
            there.config if isinstance(there, Conductor) else ConductorConfig.of_device(device_bytes(where))
        )
    if isinstance(given, (str, Path, Mapping)):
        config = ConductorConfig.load(given)
    elif isinstance(given, ConductorConfig):
        config = given
    else:
        raise ValueError(
            f"conductor is {given!r}, must be True, a ConductorConfig, a JSON file of the source system, or "
            "what one holds"
        )
    if isinstance(there, Conductor) and there.config != config:
        raise ValueError(
            f"apply(conductor=...) with {config!r}, and this device has a conductor with {there.config!r}: "
            "one arbitrates for all; give the same, give True for the one that is there, or shutdown() it"
        )
    TelemetryHub(config)  # which raises where its file cannot be written
    return config


def conduct(engine: OffloadEngine, config: ConductorConfig) -> tuple[Conductor, Callable[[], None]]:
    """The conductor of the engine, built where there is none, and what a handle calls once it goes."""
    there = engine.copier.admission
    if not isinstance(there, Conductor):
        there = Conductor(config, engine=engine)
        _handles[there] = 0
    if there in _handles:
        _handles[there] += 1
    reference = weakref.ref(there)

    def end() -> None:
        if (found := reference()) is not None and found in _handles:
            _handles[found] -= 1
            if _handles[found] == 0:
                found.shutdown()

    return there, end


_HIGH_PERCENT = 90  # of a GPU, where no mark is given: the rest is for what operators use for themselves
_LOW_SHARE = 15 / 16  # of the high mark


_shared = weakref.WeakKeyDictionary[OffloadEngine, weakref.ref[WatermarkRuntime]]()


class Marks(NamedTuple):
    """In bytes of allocated device memory."""

    high: int
    low: int


def marks_of(high: float | str | None, low: float | str | None) -> Marks:
    """The marks of mode="watermark". Raises ValueError for marks that cannot be."""
    total = device_bytes()
    high_bytes = argument_bytes(high, name="high", of_bytes=total)
    low_bytes = argument_bytes(low, name="low", of_bytes=total)
    if high_bytes is None:
        if total is None:
            raise ValueError(
                "mode='watermark' without high=: there is no GPU here to take a share of; give the bytes of "
                "saved tensors at which they begin to leave, as in high='8GB'"
            )
        high_bytes = total * _HIGH_PERCENT // 100
    if low_bytes is None:
        low_bytes = int(high_bytes * _LOW_SHARE)
    if not 0 < low_bytes <= high_bytes:
        raise ValueError(
            f"high is {high_bytes:,} bytes and low {low_bytes:,}: spilling would stop above where it starts; "
            "give a low mark above 0 and not above the high one"
        )
    marks = Marks(high_bytes, low_bytes)
    for reference in _shared.values():
        runtime = reference()
        if runtime is None or runtime.engine.closed:
            continue
        if (runtime.budget.high_bytes, runtime.budget.low_bytes) != marks:
            other = runtime.budget
            raise ValueError(
                f"high is {high_bytes:,} bytes and low {low_bytes:,}, and another model has "
                f"{other.high_bytes:,} and {other.low_bytes:,}: the marks are the device's, and one pair "
                "holds for the process; give the same ones, or call remove() on that model's handle"
            )
    return marks


def _runtime(engine: OffloadEngine, marks: Marks) -> WatermarkRuntime:
    """The one of this engine."""
    found = _shared.get(engine)
    runtime = None if found is None else found()
    if runtime is None:
        runtime = WatermarkRuntime.between(engine, marks.high, marks.low)
        _shared[engine] = weakref.ref(runtime)
    return runtime


class _ManagedCall(NamedTuple):
    """The model's forward, inside `managed_forward`."""

    context: AbstractContextManager[None]

    def close(self, output: Any, failed: bool) -> None:
        """It is over."""
        self.context.__exit__(*(sys.exc_info() if failed else (None, None, None)))


class WatermarkRoot(ModelRoot):
    """A model whose forwards are managed. min_numel: elements of a tensor that is looked at; None for the
    runtime's default."""

    def __init__(
        self,
        model: nn.Module,
        steps: Steps,
        manager: Callable[[], GroupsManager],
        marks: Marks,
        min_numel: int | None,
    ) -> None:
        super().__init__(model, {}, steps, manager, min_elements=None, everything="watermark")
        self._marks = marks
        self._min_numel = min_numel
        self._runtime = _runtime(manager().engine, marks)

    @property
    def runtime(self) -> WatermarkRuntime:
        """Runtime of the process's engine, which `configure` may have replaced."""
        engine = self.manager().engine
        if self._runtime.engine is not engine:
            self._runtime = _runtime(engine, self._marks)
        return self._runtime

    def open_own(self) -> _ManagedCall | None:
        """Open a managed forward; None where nothing is saved."""
        if not (torch.is_grad_enabled() and self.manager().tracker.do_offload):
            return None
        context = ActivationHookContext(self.runtime, self._min_numel)
        context.__enter__()
        return _ManagedCall(context)

    def _begin_chunk(self, *, may_end: bool = True) -> None:
        super()._begin_chunk(may_end=may_end and not self.runtime.holds)
