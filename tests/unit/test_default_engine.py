"""The one engine of a process: who uses it, whose limits hold, what a refused `configure` leaves, and when it
closes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload import (
    ChunkOffloadHandler,
    HybridDeviceOptimizer,
    OffloadConfig,
    PipelineOffloadManager,
    configure,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.engine import OffloadEngine, default_engine
from offload.errors import HostBudgetError
from offload.memory.budget import LocalHostBudget, SharedHostBudget, shared_by_store

pytestmark = pytest.mark.usefixtures("no_manager")

KIB, MIB, GIB = 1024, 1 << 20, 1 << 30


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))


def optimizer_of(model: nn.Module, engine: OffloadEngine | None = None) -> HybridDeviceOptimizer:
    return HybridDeviceOptimizer(model.parameters(), 1.0, lr=1e-2, engine=engine)


def step(model: nn.Module, optimizer: HybridDeviceOptimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 32)).sum().backward()
    optimizer.step()


def saved_in_a_group() -> tuple[torch.Tensor, torch.Tensor]:
    """(leaf, output) of a forward whose saved tensors leave."""
    init_chunk_handler(min_offloaded_tensor_size=0)
    x = torch.linspace(0, 1, 256, requires_grad=True)
    y = group_start(x, "fc1")
    with offload_hooks():
        y = (y * 2).sin()
    return x, group_commit(y, "fc1")


def test_whoever_is_given_no_engine_uses_the_process_s_own() -> None:
    manager = configure(device="sim")
    optimizer = optimizer_of(a_model())
    assert manager.engine is optimizer.engine is ChunkOffloadHandler(0).engine is default_engine("sim")
    optimizer.close()


def test_one_step_s_figures_have_groups_and_optimizer() -> None:
    configure(OffloadConfig(piece_bytes=1), device="sim")
    model = a_model()
    optimizer = optimizer_of(model)
    saved_in_a_group()[1].sum().backward()
    step(model, optimizer)
    stats = step_end()
    assert stats.clients["groups"].out_bytes == KIB
    assert stats.clients["optim"].out_bytes > 0
    assert stats.clients["optim"].lent_bytes == optimizer.host_bytes > 0
    assert stats.clients["optim"].device_bytes == optimizer.ring_bytes > 0
    optimizer.close()


def test_configure_beside_a_living_optimizer_changes_the_limits_of_both_and_no_bit() -> None:
    expected, model = a_model(), a_model()
    reference, optimizer = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True), optimizer_of(model)
    engine = optimizer.engine
    for number in range(3):
        if number == 1:
            config = OffloadConfig(host_limit_bytes=GIB, device_limit_bytes=8 * MIB, piece_bytes=KIB)
            assert configure(config, device="sim").engine is engine
        step(model, optimizer)
        reference.zero_grad()
        expected(torch.ones(2, 32)).sum().backward()
        reference.step()
    optimizer.synchronize_parameters()
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)
    assert engine.arena.budget.limit_bytes == GIB
    assert engine.limits.device_limit_bytes == 8 * MIB
    assert engine.store.piece_bytes == engine.prefetch.piece_bytes == KIB
    optimizer.close()


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside an optimizer"])
def test_a_configure_that_is_refused_changes_nothing(beside: bool) -> None:
    """The old manager was closed before the new budget was asked: what it had saved was gone."""
    manager = configure(OffloadConfig(host_limit_bytes=GIB, piece_bytes=1), device="sim")
    optimizer = optimizer_of(a_model()) if beside else None
    x, y = saved_in_a_group()
    held_bytes = manager.engine.arena.held_bytes
    store = torch.distributed.HashStore()
    shared = shared_by_store(store, "here", 4 * GIB)
    assert shared.reserve(3 * GIB)  # another rank's
    with pytest.raises(HostBudgetError, match="reserve 1,073,741,824 or less"):
        configure(
            OffloadConfig(host_limit_bytes=4 * GIB, host_reserve_bytes=2 * GIB, piece_bytes=7),
            device="sim",
            store=store,
            host_key="here",
        )
    engine = manager.engine
    assert PipelineOffloadManager.get_instance() is manager
    assert (engine.arena.budget.limit_bytes, engine.arena.held_bytes) == (GIB, held_bytes)
    assert isinstance(engine.arena.budget, LocalHostBudget)
    assert engine.arena.budget.used_bytes == held_bytes
    assert (engine.config.piece_bytes, engine.store.piece_bytes) == (1, 1)
    assert shared.used_bytes == 3 * GIB
    shared.release(3 * GIB)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * torch.cos(2 * x.detach()))
    if optimizer is not None:
        optimizer.close()


def test_a_limit_below_what_an_optimizer_holds_is_refused_and_changes_nothing() -> None:
    optimizer = optimizer_of(a_model())
    engine = optimizer.engine
    before = engine.arena.budget
    with pytest.raises(HostBudgetError, match="of them lent, and the new limit leaves room for 4,096"):
        configure(OffloadConfig(host_limit_bytes=4096), device="sim")
    assert engine.arena.budget is before
    assert PipelineOffloadManager.OFFLOAD_MGR is None
    optimizer.close()


def test_what_is_free_beyond_a_new_limit_goes_back_to_the_system() -> None:
    manager = configure(OffloadConfig(host_reserve_bytes=512 * MIB), device="sim")
    engine = manager.engine
    assert engine.arena.held_bytes == 512 * MIB
    configure(OffloadConfig(host_limit_bytes=128 * MIB), device="sim")
    assert engine.arena.held_bytes == engine.arena.budget.used_bytes == 0
    configure(OffloadConfig(host_limit_bytes=128 * MIB, host_reserve_bytes=64 * MIB), device="sim")
    assert engine.arena.held_bytes == engine.arena.budget.used_bytes == 64 * MIB


def test_ranks_that_share_a_budget_may_lower_it_while_they_hold_some() -> None:
    store = torch.distributed.HashStore()
    here = {"device": "sim", "store": store, "host_key": "here"}
    configure(OffloadConfig(host_limit_bytes=GIB, host_reserve_bytes=512 * MIB), **here)  # type: ignore[arg-type]
    config = OffloadConfig(host_limit_bytes=600 * MIB, host_reserve_bytes=512 * MIB)
    manager = configure(config, **here)  # type: ignore[arg-type]
    budget = manager.engine.arena.budget
    assert isinstance(budget, SharedHostBudget)
    assert (budget.limit_bytes, budget.used_bytes) == (600 * MIB, 512 * MIB)
    PipelineOffloadManager.close_instance()
    assert budget.used_bytes == 0


@pytest.mark.parametrize("last", ["manager", "optimizer"])
def test_the_last_client_closes_the_engine(last: str) -> None:
    manager = configure(OffloadConfig(host_reserve_bytes=MIB), device="sim")
    optimizer = optimizer_of(a_model())
    engine = manager.engine
    enders = [PipelineOffloadManager.close_instance, optimizer.close]
    for end in enders if last == "optimizer" else reversed(enders):
        assert engine.arena.held_bytes > 0
        end()
    assert engine.arena.held_bytes == 0
    assert default_engine("sim") is not engine


def test_a_manager_that_closes_leaves_the_engine_to_the_optimizer() -> None:
    model = a_model()
    optimizer = optimizer_of(model)
    configure(device="sim")
    _, y = saved_in_a_group()
    PipelineOffloadManager.close_instance()
    del y
    step(model, optimizer)
    stats = optimizer.engine.end_step()
    assert stats.clients["optim"].out_bytes > 0
    assert stats.host_bytes_held > 0
    optimizer.close()


def test_an_engine_that_was_given_stays_open() -> None:
    engine = OffloadEngine(OffloadConfig(host_reserve_bytes=MIB), device="sim")
    optimizer = optimizer_of(a_model(), engine)
    assert optimizer.engine is not default_engine("sim")
    optimizer.close()
    assert engine.arena.held_bytes > 0
    engine.close()
