"""The manager of this process: which one the marks and `apply` talk to, and the limits of its engine.

One invariant: it is looked up here and passed on. The engine and the groups never look it up.
"""

from __future__ import annotations

import socket
from typing import Any

from offload.config import OffloadConfig, checked_config, naming_near
from offload.engine import OffloadEngine
from offload.engines import default_engine, replace_engine
from offload.groups.manager import GroupsManager
from offload.memory.budget import HostBudget, SharedHostBudget, default_host_limit_bytes, shared_by_store

manager: GroupsManager | None = None
"""The process-wide one. Written by `put_manager` alone."""


def existing_manager() -> GroupsManager | None:
    """The process-wide manager, None if none was built."""
    return manager


def default_manager() -> GroupsManager:
    """The process-wide manager; built with the default config on first use."""
    if manager is None:
        put_manager(GroupsManager())
    assert manager is not None
    return manager


def put_manager(new: GroupsManager | None) -> None:
    """`new` is the process-wide manager from now on; the old one is not closed."""
    global manager
    manager = new


def close_manager() -> None:
    """Close the process-wide manager, if there is one. Its engine closes too, unless a HybridDeviceOptimizer
    is attached to it. Raises PoolError, and leaves the manager in its place, while a pool or an
    FSDPGPUOptimizerWrapper has host memory of an engine that would close."""
    if manager is not None:
        manager.close()
        put_manager(None)


@naming_near
def configure(
    config: OffloadConfig | None = None,
    *,
    device: str | None = None,
    store: Any = None,
    host_key: str | None = None,
    print_summary: bool = True,
    process_group: Any = None,
) -> GroupsManager:
    """Give the process-wide engine these limits, and its groups a new manager. Other clients, such as an
    optimizer, stay attached: the limits hold for them too, and their state and host memory stay as they are.
    Free host memory beyond host_reserve_bytes goes back to the system.

    device: "cuda", "cuda:N" or "sim"; None takes CUDA where there is a GPU, else the simulated device. store:
    a torch.distributed Store: the host limit is then one number for all ranks whose host_key (None: the
    host's name) is the same. print_summary: print the rank table when warm-up ends; it gathers over
    process_group, so all its ranks must step. Where step ends are inferred (`offload.apply`) none is printed:
    `offload.report` has more. Blocks the host while host_reserve_bytes are pinned. Raises
    ValueError for an unknown device, HostBudgetError if they, or what an optimizer holds, are beyond the
    limit, and PoolError while a pool has host memory of the old manager on loan; nothing has changed then.
    """
    config = checked_config(config)
    budget: HostBudget | None = None
    if store is not None:
        limit = config.host_limit_bytes if config.host_limit_bytes is not None else default_host_limit_bytes()
        budget = shared_by_store(store, host_key if host_key is not None else socket.gethostname(), limit)
    if manager is not None:
        manager.prepare_close()  # raises while a buffer is on loan
    engine = default_engine(device, config, budget)
    return _new_manager(engine, print_summary, process_group)


def change_limits(config: OffloadConfig) -> GroupsManager:
    """`configure`, for the engine that the process-wide manager has: its device, the budget that it shares
    with other ranks, and the group that its summary is gathered over stay. Raises ValueError for another
    host_limit_bytes where the budget is shared; else as `configure`."""
    if manager is None:
        return configure(config)
    engine = manager.engine
    budget = engine.arena.budget
    shared = budget if isinstance(budget, SharedHostBudget) and budget.is_named else None
    if shared is not None and config.host_limit_bytes != engine.config.host_limit_bytes:
        raise ValueError(
            f"host_limit is {config.host_limit_bytes!r}, and the ranks of this host share a limit of "
            f"{shared.limit_bytes:,} bytes; give the new one to configure(store=...) on every rank"
        )
    manager.prepare_close()
    engine.reconfigure(config, shared)
    return _new_manager(engine, manager.print_summary, manager.process_group)


def _new_manager(engine: OffloadEngine, print_summary: bool, process_group: Any) -> GroupsManager:
    new = GroupsManager(engine, print_summary=print_summary, process_group=process_group)
    before = None if manager is None else manager.engine
    if manager is not None:
        new.ledgers.take_over(manager.ledgers)
    close_manager()
    put_manager(new)
    replace_engine(before, engine)
    # pieces go whole, and what was reserved stays
    engine.arena.trim(engine.config.host_reserve_bytes + engine.arena.registration_bytes - 1)
    return new
