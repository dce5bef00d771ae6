"""The engine of this process for a device, for everybody who is given none.

One invariant: there is one at a time, so one budget and one pair of copy lanes, and limits hold for all.
"""

from __future__ import annotations

import threading

from offload.config import OffloadConfig
from offload.device import device_name
from offload.engine import OffloadEngine
from offload.memory.budget import HostBudget

_defaults: dict[str, OffloadEngine] = {}
_defaults_lock = threading.Lock()


def default_engine(
    device: str | None = None, config: OffloadConfig | None = None, budget: HostBudget | None = None
) -> OffloadEngine:
    """The engine of this process for a device. It is built when it is first asked for, and anew after it was
    closed.

    device: "cuda", "cuda:N" or "sim"; None takes CUDA where there is a GPU. config, budget: as of
        OffloadEngine. A living engine takes them over (`reconfigure`); without a config it stays as it is.
    Raises ValueError for an unknown device, HostBudgetError beyond the budget; nothing has changed then.
    Blocks the host while host_reserve_bytes are pinned.
    """
    name = device_name(device)
    with _defaults_lock:
        engine = _defaults.get(name)
        if engine is None or engine.closed:
            before, engine = engine, OffloadEngine(config, device=name, budget=budget)
            _defaults[name] = engine
            replace_engine(before, engine)
        elif config is not None:
            engine.reconfigure(config, budget)
        return engine


def replace_engine(before: OffloadEngine | None, engine: OffloadEngine) -> None:
    """The process has `engine` now. Clients of the one before, if that is closed, are told."""
    if before is not None and before is not engine and before.closed:
        for client in before.clients:
            client.engine_replaced(engine)
