"""The manager: the process-wide instance, switches, delayed groups, settings."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from offload import (
    GPUTensorPool,
    HybridDeviceOptimizer,
    OffloadManager,
    PipelineOffloadManager,
    PoolError,
    StaleHandleError,
    configure,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.memory.budget import LocalHostBudget
from tests.inside import holds_lock
from tests.unit.groups.stack import (
    HELD,
    Driver,
    build_manager,
    build_stages,
    gpipe,
    installed,
    leaf,
    save_one,
)


# -- the process-wide instance -------------------------------------------------------------------------------
@pytest.mark.req("S2-28", "S3-7")
def test_instance_is_made_on_first_use_and_is_the_same_afterwards() -> None:
    assert PipelineOffloadManager.OFFLOAD_MGR is None
    made = PipelineOffloadManager.get_instance()
    assert PipelineOffloadManager.OFFLOAD_MGR is made
    assert PipelineOffloadManager.get_instance() is made
    assert OffloadManager is PipelineOffloadManager


@pytest.mark.req("S2-29", "S3-7")
def test_reset_instance_makes_a_new_one_and_really_frees_the_old(manager: PipelineOffloadManager) -> None:
    budget, arena = manager.engine.arena.budget, manager.engine.arena
    assert isinstance(budget, LocalHostBudget)
    init_chunk_handler(None, None, 1)
    handler = manager.cur_forward_chunk()
    graph = save_one(leaf())
    handler.reload(handler.offload(torch.randn(64)))  # the pool's buffers are the arena's bytes too
    assert (budget.used_bytes, arena.held_bytes) == (HELD, HELD)
    new = PipelineOffloadManager.reset_instance()
    assert PipelineOffloadManager.get_instance() is new is not manager
    assert (budget.used_bytes, arena.held_bytes) == (0, 0)
    assert manager.engine.transfers.device_bytes == 0
    with pytest.raises(
        StaleHandleError,
        match=r"s0m0/a#0\[0\] \(256 bytes\) was saved in a step that has ended; run its backward before",
    ):
        graph.sum().backward()


def test_reset_instance_leaves_the_engine_to_an_optimizer_that_uses_it() -> None:
    """It was gone and its memory still pinned, and the error named blocks that no user of a manager has ever
    seen."""
    manager = PipelineOffloadManager.reset_instance(build_manager())
    model = nn.Linear(4, 4)
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, engine=manager.engine, lr=0.1, cpu_share=1.0)
    assert PipelineOffloadManager.reset_instance(build_manager()) is not manager
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    optimizer.close()
    manager.engine.close()
    assert manager.engine.arena.held_bytes == 0
    PipelineOffloadManager.get_instance().close()


def test_reset_instance_inside_a_scope_takes_nothing_more_and_leaves_no_hooks(
    manager: PipelineOffloadManager,
) -> None:
    init_chunk_handler(None, None, 1)
    x = group_start(leaf(), "a")
    with offload_hooks():
        PipelineOffloadManager.reset_instance(build_manager())
        y = x * x
    group_commit(y, "a").sum().backward()  # nothing of it is offloaded, so nothing is lost
    assert manager.engine.arena.held_bytes == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_reset_instance_names_what_is_still_lent(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    handler = manager.cur_forward_chunk()
    state = handler.offload(torch.randn(64))
    with pytest.raises(
        PoolError,
        match="host arena has 1 blocks of 256 bytes lent, of 67,108,864 held; give them back before clear",
    ):
        PipelineOffloadManager.reset_instance()
    assert state.cpu_tensor.shape == (64,)


@pytest.mark.req("S2-30")
def test_copy_streams_differ_from_each_other_and_from_compute(manager: PipelineOffloadManager) -> None:
    lanes = {id(manager.d2h_stream), id(manager.h2d_stream), id(manager.engine.device.compute)}
    assert len(lanes) == 3
    assert isinstance(manager.cpu_tensor_pool, GPUTensorPool)
    assert (manager.cpu_tensor_pool.device.type, manager.cpu_tensor_pool.pin_memory) == ("cpu", True)


def test_streams_handlers_and_groups_are_made_once(manager: PipelineOffloadManager) -> None:
    driver = Driver(build_stages())
    driver.step(gpipe(2))
    streams = (manager.d2h_stream, manager.h2d_stream)
    handlers = dict(manager.tracker.handlers)
    groups = [group for handler in handlers.values() for group in handler.groups]
    for _ in range(2):
        driver.step(gpipe(2))
    assert (manager.d2h_stream, manager.h2d_stream) == streams
    assert manager.tracker.handlers == handlers
    assert [group for handler in manager.tracker.handlers.values() for group in handler.groups] == groups


# -- switches ------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-37")
def test_switch_reaches_every_cached_chunk(manager: PipelineOffloadManager) -> None:
    Driver(build_stages()).step(gpipe(3))
    for switch, on in ((manager.disable_offload, False), (manager.enable_offload, True)):
        switch()
        assert manager.do_offload is on
        assert [handler.do_offload for handler in manager.tracker.handlers.values()] == [on] * 3
    manager.disable_offload()
    init_chunk_handler(None, None, 1)
    init_chunk_handler(2, 1, 1)  # one that is made while it is off
    assert [handler.do_offload for handler in manager.tracker.handlers.values()] == [False] * 4


@pytest.mark.req("S2-52")
def test_marked_tensor_never_leaves_nor_do_its_views(manager: PipelineOffloadManager) -> None:
    manager.mark_not_offloadable(None)
    x = leaf()
    manager.mark_not_offloadable(x)
    for _ in range(3):
        init_chunk_handler(None, None, 1)
        save_one(x).sum().backward()
        save_one(x.view(8, 8)).sum().backward()
        assert step_end() == manager.stats
        assert (manager.stats.saved, manager.stats.spilled) == (0, 0)


# -- delayed groups ------------------------------------------------------------------------------------------
@pytest.mark.req("S2-31", "S2-32")
def test_delayed_groups_are_flushed_once_in_the_order_of_their_commits(
    manager: PipelineOffloadManager,
) -> None:
    ran: list[tuple[str, list[Tensor]]] = []
    held: list[bool] = []
    tensor = torch.ones(1)
    manager.push_offload_groups(lambda forced: ran.append(("first", forced)), [tensor])
    manager.push_offload_groups(lambda forced: ran.append(("second", forced)))
    manager.push_offload_groups(lambda forced: held.append(holds_lock(manager.engine)))
    assert ran == []
    manager.flush_delayed_groups()
    manager.flush_delayed_groups()
    assert ran == [("first", [tensor]), ("second", [])]
    assert held == [True], "other threads wait"


@pytest.mark.req("S2-32")
def test_group_that_is_delayed_during_a_flush_waits_for_the_next(manager: PipelineOffloadManager) -> None:
    ran: list[str] = []

    def again(_: list[Tensor]) -> None:
        ran.append("first")
        manager.push_offload_groups(lambda forced: ran.append("second"))

    manager.push_offload_groups(again)
    manager.flush_delayed_groups()
    assert ran == ["first"]
    manager.flush_delayed_groups()
    assert ran == ["first", "second"]


@pytest.mark.req("S2-33")
def test_reset_forgets_delayed_groups_and_keeps_nothing_of_them(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    due = torch.ones(1)
    held = weakref.ref(due)
    save_one(leaf(), delay_offload=True, forced_released_tensors=[due]).sum().backward()
    del due
    manager.reset()
    assert held() is None
    manager.flush_delayed_groups()
    assert manager.engine.transfers.device_bytes == 0
    assert (manager.stats.saved, manager.stats.spilled) == (1, 0)


def test_flush_after_the_same_chunk_was_begun_again_sends_nothing_twice(
    manager: PipelineOffloadManager,
) -> None:
    manager.begin_chunk(0, 0)
    first = save_one(leaf(), delay_offload=True)
    manager.begin_chunk(0, 0)  # the forward is run again in the same step
    x = leaf()
    second = save_one(x, delay_offload=True)
    manager.flush_delayed_groups()
    assert manager.engine.transfers.counts.spilled == 1
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]


# -- announced chunks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("between", ["a step without offload", "an evaluation"])
def test_what_a_chunk_saves_is_fetched_ahead_although_its_last_forward_saved_nothing(
    manager: PipelineOffloadManager, between: str
) -> None:
    """Its forward counted as over already, so nothing was expected: each tensor was fetched by its reader."""
    driver = Driver(build_stages(), announced=True)
    waits = []
    for step in range(4):
        if step == 3 and between == "an evaluation":
            with torch.no_grad():
                driver.forward(0, 0)
        elif step == 3:
            manager.disable_offload()
            driver.step(gpipe(2))
            manager.enable_offload()
        driver.step(gpipe(2))
        waits.append(manager.stats.stall_count)
    assert waits[3] == waits[2]


def test_new_settings_make_a_new_plan(manager: PipelineOffloadManager) -> None:
    names = ("fc1", "act")
    stages = build_stages(1, 2, names)
    Driver(stages).step(gpipe(2))
    some = manager.offload_summary_total_bytes
    assert some > 0
    Driver(stages, activation_offload_fraction=0.0).step(gpipe(2))
    assert manager.offload_summary_total_bytes == 0
    Driver(stages).step(gpipe(2))  # a keyword that is left out stays as it was
    assert manager.stats.spilled == 0
    Driver(stages, activation_offload_fraction=1.0).step(gpipe(2))
    assert manager.offload_summary_total_bytes == some


@pytest.mark.req("S2-104")
@pytest.mark.parametrize(("of_config", "cap"), [(None, None), (0, 0), (1, 1), (2, 2), (2, 1), (None, 1)])
def test_pending_offloads_of_a_name_are_capped(of_config: int | None, cap: int | None) -> None:
    """With a late executor a copy is pending until compute waits for it: none after each commit with 0, the
    last `cap` otherwise. It is the least of what the config and others bound."""
    with installed(build_manager(max_inflight_offloads=of_config, piece_bytes=1 << 20)) as manager:
        other = manager.engine.limits.contributor("other")
        other.bound("groups_in_flight", None if cap == of_config else cap)
        init_chunk_handler(None, None, 1)
        graphs = []
        for number in range(4):
            graphs.append(save_one(leaf()))
            expected = number + 1 if cap is None else min(cap, number + 1)
            assert manager.engine.transfers.in_flight() == (expected, 0)
        graphs.append(save_one(leaf(), "another name"))
        assert manager.engine.transfers.in_flight()[0] == (5 if cap is None else cap + min(cap, 1))


def test_configure_closes_the_old_manager_and_installs_the_new(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    save_one(leaf()).sum().backward()
    new = configure(device="sim", print_summary=False)
    assert PipelineOffloadManager.get_instance() is new is not manager
    assert manager.engine.arena.held_bytes == 0


def test_parameters_and_external_storages_are_registered(manager: PipelineOffloadManager) -> None:
    module = nn.Linear(8, 8)
    manager.register_parameters(module)
    manager.register_external(torch.ones(8))
    init_chunk_handler(None, None, 1)
    x = group_start(torch.randn(4, 8, requires_grad=True), "a")
    weight = module.weight.detach()  # a plain tensor by now, known by its storage
    with offload_hooks():
        y = x @ weight
    group_commit(y, "a").sum().backward()
    assert manager.step_end().saved == 0


@pytest.mark.req("S2-30")
def test_the_managers_pool_is_over_the_memory_that_groups_are_lent_and_shows_it(
    manager: PipelineOffloadManager,
) -> None:
    """It serves copies by hand; groups are lent bytes by the arena, which nothing said."""
    assert repr(manager.cpu_tensor_pool) == (
        "<GPUTensorPool on cpu: 0 of 0 tensors lent, in an arena of 0 bytes that groups share>"
    )
    init_chunk_handler(None, None, 1)
    state = manager.cur_forward_chunk().offload(torch.ones(4))  # type: ignore[union-attr]
    held = manager.engine.arena.held_bytes
    assert f"1 of 1 tensors lent, in an arena of {held:,} bytes" in repr(manager.cpu_tensor_pool)
    assert held > 0
    assert state.cpu_tensor.numel() == 4
    assert repr(GPUTensorPool("cpu")) == "<GPUTensorPool on cpu: 0 of 0 tensors lent>"
