"""`conductor=` of `offload.apply`: the arbiter of the process's engine, for as long as a handle wants it.

One invariant: an engine has one. Handles share it; the last one that goes shuts down what `apply` has built,
and none what the user has.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from offload.conductor.arbiter import Conductor
from offload.conductor.config import ConductorConfig
from offload.conductor.runtime import TelemetryHub
from offload.device import device_bytes
from offload.engine import OffloadEngine

Conducted = bool | str | Path | Mapping[str, Any] | ConductorConfig | None
"""What `conductor=` may be."""

_handles: weakref.WeakKeyDictionary[Conductor, int] = weakref.WeakKeyDictionary()
"""Conductors that `apply` has built, and how many handles want each."""


def conductor_config(
    given: Conducted, engine: OffloadEngine | None, where: torch.device
) -> ConductorConfig | None:
    """What `given` asks for; None for no conductor. engine: the one of `where`, if there is one. Raises
    ValueError for a config that cannot be, or another one than the engine's conductor has."""
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
