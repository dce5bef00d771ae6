"""The manager: the process-wide instance, chunks and their order, delayed groups, hooks, and what a step leaves behind."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload import (
    ChunkOffloadHandler,
    GPUTensorPool,
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
from offload.device.sim import SimDevice
from offload.memory.budget import LocalHostBudget
from tests.unit.groups.stack import (
    EXECUTORS,
    NAMES,
    ROWS,
    WIDTH,
    Driver,
    Stack,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    gpipe,
    installed,
    interleaved,
    lifo,
    one_f_one_b,
)

HELD = 64 << 20  # the smallest growth of the arena


def save_one(x: Tensor, name: str = "a", **commit: Any) -> Tensor:
    """x * x in a group of its own: one saved tensor, x."""
    x = group_start(x, name)
    with offload_hooks():
        y = x * x
    return group_commit(y, name, **commit)


def leaf(elements: int = 64) -> Tensor:
    return torch.randn(elements, requires_grad=True)


# -- the process-wide instance ------------------------------------------------------------------------------------------
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
    assert handler is not None
    graph = save_one(leaf())
    handler.reload(handler.offload(torch.randn(64)))  # the pool's buffers are the arena's bytes too
    assert (budget.used_bytes, arena.held_bytes) == (HELD, HELD)
    new = PipelineOffloadManager.reset_instance()
    assert PipelineOffloadManager.get_instance() is new is not manager
    assert (budget.used_bytes, arena.held_bytes) == (0, 0)
    assert manager.engine.transfers.device_bytes == 0
    with pytest.raises(StaleHandleError, match=r"s0m0/a#0\[0\] \(256 bytes\) was saved in a step that has ended; run its backward before"):
        graph.sum().backward()


def test_reset_instance_inside_a_scope_takes_nothing_more_and_leaves_no_hooks(manager: PipelineOffloadManager) -> None:
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
    assert handler is not None
    state = handler.offload(torch.randn(64))
    with pytest.raises(PoolError, match="host arena has 1 blocks of 256 bytes lent, of 67,108,864 held; give them back before clear"):
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
    handlers = dict(manager._handlers)
    groups = [group for handler in handlers.values() for group in handler.groups]
    for _ in range(2):
        driver.step(gpipe(2))
    assert (manager.d2h_stream, manager.h2d_stream) == streams
    assert manager._handlers == handlers
    assert [group for handler in manager._handlers.values() for group in handler.groups] == groups


# -- switches -----------------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-37")
def test_switch_reaches_every_cached_chunk(manager: PipelineOffloadManager) -> None:
    Driver(build_stages()).step(gpipe(3))
    for switch, on in ((manager.disable_offload, False), (manager.enable_offload, True)):
        switch()
        assert manager.do_offload is on
        assert [handler.do_offload for handler in manager._handlers.values()] == [on] * 3
    manager.disable_offload()
    init_chunk_handler(None, None, 1)
    init_chunk_handler(2, 1, 1)  # one that is made while it is off
    assert [handler.do_offload for handler in manager._handlers.values()] == [False] * 4


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


# -- chunks -------------------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-46", "S2-47")
def test_each_forward_of_a_step_has_a_handler_that_later_steps_use_again(manager: PipelineOffloadManager) -> None:
    seen: list[list[ChunkOffloadHandler | None]] = []
    for _ in range(3):
        step: list[ChunkOffloadHandler | None] = []
        for stage in (None, 0, 1, 1):
            init_chunk_handler(None if stage is None else 2, stage, 1)
            step.append(manager.cur_forward_chunk())
        seen.append(step)
        step_end()
        assert manager.cur_forward_chunk() is None
    assert seen[0] == seen[1] == seen[2]
    assert [str(handler.id) for handler in seen[0] if handler is not None] == ["s0m0", "s0m1", "s1m0", "s1m1"]


@pytest.mark.req("S2-48")
def test_size_limit_counts_elements_and_is_one_mebi_by_default(manager: PipelineOffloadManager) -> None:
    manager.init_model_chunk_offload_handler()
    handler = manager.cur_forward_chunk()
    assert handler is not None
    assert handler.min_offloaded_tensor_size == 1024 * 1024
    init_chunk_handler(None, None, 65)
    save_one(leaf(64).double()).sum().backward()  # 512 bytes, and too small all the same
    save_one(leaf(65)).sum().backward()
    assert step_end() == manager.stats
    assert (manager.stats.saved, manager.stats.spill_bytes) == (1, 65 * 4)


@pytest.mark.req("S2-46")
@pytest.mark.parametrize(("vp_size", "vp_stage"), [(2, 2), (None, 1), (1, 1), (0, 0)])
def test_virtual_stage_outside_its_count_is_refused_with_both_numbers(manager: PipelineOffloadManager, vp_size: Any, vp_stage: Any) -> None:
    with pytest.raises(ValueError, match=f"vp_stage is {vp_stage} and vp_size {vp_size}; vp_stage must be in 0..vp_size-1"):
        manager.init_model_chunk_offload_handler(vp_size, vp_stage, 1)
    assert manager.cur_forward_chunk() is None
    assert manager._handlers == {}


@pytest.mark.req("S2-51")
def test_current_chunks_are_those_of_the_forward_and_of_the_backward_under_way(manager: PipelineOffloadManager) -> None:
    assert (manager.cur_forward_chunk(), manager.cur_backward_chunk()) == (None, None)
    graphs, handlers = [], []
    for _ in range(2):
        init_chunk_handler(None, None, 1)
        handlers.append(manager.cur_forward_chunk())
        graphs.append(save_one(leaf()))
    for graph, handler in zip(graphs, handlers, strict=True):
        graph.sum().backward()
        assert manager.cur_backward_chunk() is handler
        assert manager.cur_forward_chunk() is handlers[1]


@pytest.mark.req("S2-50")
def test_forward_chunks_are_walked_after_warm_up_until_they_are_exhausted(manager: PipelineOffloadManager) -> None:
    assert manager.pop_forward_chunk() is None
    driver = Driver(build_stages(names=("fc1", "act")))
    init_chunk_handler(None, None, 1)
    assert manager.pop_forward_chunk("fc1") is manager.cur_forward_chunk()
    step_end()
    driver.step(gpipe(2))
    first, second = manager._handlers.values()
    for _ in range(2):
        assert manager.pop_forward_chunk() is first
        assert manager.pop_forward_chunk("act") is first
    manager.disable_offload()
    assert manager.pop_forward_chunk() is None
    manager.enable_offload()
    first.on_group_start_forward("fc1")
    assert manager.pop_forward_chunk("fc1") is first  # the second layer's
    for name in ("act", "fc1", "act"):
        first.on_group_start_forward(name)
    assert manager.pop_forward_chunk() is second
    assert manager.pop_forward_chunk("norm") is None
    assert manager.pop_forward_chunk() is None  # a walk goes one way


@pytest.mark.req("S2-35", "S2-36", "S2-43", "S2-44", "S2-45")
def test_queue_by_hand_hands_out_chunks_and_asserts_when_there_are_none(manager: PipelineOffloadManager) -> None:
    with pytest.raises(AssertionError, match="No non-empty chunk found"):
        manager.pop_backward_chunk()
    assert manager.front_backward_chunk() is None
    handlers = []
    for stage in (0, 1):
        init_chunk_handler(2, stage, 1)
        handlers.append(manager.cur_forward_chunk())
        save_one(leaf(), f"of stage {stage}").detach()
    assert manager.front_backward_chunk() is handlers[1]  # the last stage first
    assert manager.front_backward_chunk("of stage 0") is handlers[0]
    assert manager.cur_backward_chunk() is None
    assert manager.pop_backward_chunk() is handlers[1]
    assert manager.cur_backward_chunk() is handlers[1]
    pushed = handlers[1]
    assert pushed is not None
    manager.push(pushed)
    assert manager._backward_order == [handlers[1]]
    assert manager.pop_backward_chunk("of stage 1") is handlers[1]
    init_chunk_handler(3, 0, 1)
    with pytest.raises(AssertionError, match=r"No non-empty chunk found among 0 queued chunks for group None"):
        manager.pop_backward_chunk()
    manager._queue.stages[2].append(pushed)
    with pytest.raises(AssertionError, match=r"All stages must have same chunk count, got \[1, 0, 1\]"):
        manager.flush()
    manager._queue.stages[1].append(pushed)
    manager.flush()
    assert manager.front_backward_chunk() is pushed


@pytest.mark.req("S2-43")
def test_push_in_warm_up_foretells_the_backward_order_and_later_does_not(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    handler = manager.cur_forward_chunk()
    assert handler is not None
    manager.push(handler)
    assert manager._backward_order == [handler]
    step_end()
    assert not manager.is_warmup
    init_chunk_handler(None, None, 1)
    manager.push(handler)
    assert manager._backward_order == []


# -- delayed groups -----------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-31", "S2-32")
def test_delayed_groups_are_flushed_once_in_the_order_of_their_commits(manager: PipelineOffloadManager) -> None:
    ran: list[tuple[str, list[Tensor]]] = []
    tensor = torch.ones(1)
    manager.push_offload_groups(lambda forced: ran.append(("first", forced)), [tensor])
    manager.push_offload_groups(lambda forced: ran.append(("second", forced)))
    assert ran == []
    manager.flush_delayed_groups()
    manager.flush_delayed_groups()
    assert ran == [("first", [tensor]), ("second", [])]


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
    save_one(leaf(), delay_offload=True).sum().backward()
    manager.reset()
    manager.flush_delayed_groups()
    assert manager.engine.transfers.device_bytes == 0
    assert (manager.stats.saved, manager.stats.spilled) == (1, 0)


def test_flush_after_the_same_chunk_was_begun_again_sends_nothing_twice(manager: PipelineOffloadManager) -> None:
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


# -- hooks --------------------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-53")
def test_context_installs_hooks_only_for_a_current_chunk_while_offloading_is_on(manager: PipelineOffloadManager) -> None:
    def installs() -> bool:
        with manager:
            found = manager.engine.hooks.innermost() is not None
            assert found is (torch._C._autograd._top_saved_tensors_default_hooks(True) is not None)
        assert manager.engine.hooks.innermost() is None
        return found

    assert not installs()  # no chunk
    init_chunk_handler(None, None, 1)
    group_start(leaf(), "a")
    assert installs()
    manager.disable_offload()
    assert not installs()
    manager.enable_offload()
    with torch.no_grad():
        assert not installs()
    step_end()
    assert not installs()


@pytest.mark.req("S2-53")
@pytest.mark.parametrize("starts_on", [True, False])
def test_context_removes_exactly_what_it_installed_whatever_was_switched_inside(manager: PipelineOffloadManager, starts_on: bool) -> None:
    init_chunk_handler(None, None, 1)
    group_start(leaf(), "a")
    if not starts_on:
        manager.disable_offload()
    with torch.autograd.graph.save_on_cpu():
        outside = torch._C._autograd._top_saved_tensors_default_hooks(True)
        with manager:
            (manager.disable_offload if starts_on else manager.enable_offload)()
            with manager:
                (manager.enable_offload if starts_on else manager.disable_offload)()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) == outside


@pytest.mark.req("S2-53")
def test_exception_inside_the_context_removes_the_hooks(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    group_start(leaf(), "a")
    with pytest.raises(KeyError), manager:
        raise KeyError("broken layer")
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_hooks_without_a_group_say_so_once(manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture) -> None:
    init_chunk_handler(None, None, 1)
    with caplog.at_level(logging.WARNING, "offload"):
        for _ in range(2):
            with offload_hooks():
                leaf().square().sum().backward()
    assert [record.getMessage() for record in caplog.records] == [
        "offload_hooks() without an open group in chunk s0m0: nothing saved in it will leave; call group_start first"
    ]


@pytest.mark.req("S2-54", "S2-55")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_save_and_get_by_hand(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        assert manager is not None
        with pytest.raises(AssertionError, match="Must be inside offload context"):
            manager.on_save_for_backward(torch.ones(4))
        init_chunk_handler(None, None, 8)
        group_start(leaf(), "a")
        large, small = torch.randn(64), torch.randn(4)
        expected = large.clone()
        with manager:
            tags = [manager.on_save_for_backward(large), manager.on_save_for_backward(small)]
        with pytest.raises(AssertionError, match="Must be inside offload context"):
            manager.on_save_for_backward(small)
        group_commit(large, "a")
        del large
        for transfer in list(manager.engine.transfers._spilling):
            manager.engine.transfers.settle_spill(transfer)
        assert torch.equal(manager.on_get_saved_tensor(tags[0]), expected)
        assert manager.on_get_saved_tensor(tags[1]) is small
        assert manager.engine.transfers.counts.restore_bytes == 256


# -- the step -----------------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-33")
def test_reset_starts_an_iteration_with_nothing_of_the_last(manager: PipelineOffloadManager) -> None:
    Driver(build_stages()).step(gpipe(2))
    init_chunk_handler(None, None, 1)
    graph = save_one(leaf())
    assert manager.reset() == manager.stats
    assert (manager.cur_forward_chunk(), manager.cur_backward_chunk(), manager.front_backward_chunk()) == (None, None, None)
    assert all(not handler.begun and handler.find_next_group() is handler.groups[0] for handler in manager._handlers.values())
    assert manager.engine.transfers.device_bytes == manager.engine.arena.stats().lent == 0
    init_chunk_handler(None, None, 1)
    current = manager.cur_forward_chunk()
    assert current is not None
    assert str(current.id) == "s0m0"  # counted from the start again
    del graph


@pytest.mark.req("S2-33", "S2-42")
def test_table_is_printed_once_by_the_first_reset_after_a_backward(capsys: pytest.CaptureFixture[str]) -> None:
    with installed(build_manager(print_summary=True)) as manager:
        assert manager is not None
        driver = Driver(build_stages(1, 2, ("fc1",)))
        driver.step([("eval", 0, 2), ("eval", 1, 1)])
        assert manager.is_warmup
        assert capsys.readouterr().out == ""
        driver.step(gpipe(2))
        assert not manager.is_warmup
        out = capsys.readouterr().out
        assert "Activation Offload Summary (MB)" in out
        assert "fc1" in out
        driver.step(gpipe(2))
        driver.step(gpipe(3))
        assert capsys.readouterr().out == ""


@pytest.mark.req("S2-34", "S2-41")
def test_summary_is_empty_before_the_plan_and_counts_what_leaves_after(manager: PipelineOffloadManager) -> None:
    assert (manager.offload_summary_bytes, manager.offload_summary_total_bytes) == ({}, 0)
    driver = Driver(build_stages(1, 2, ("fc1", "act")))
    driver.step(gpipe(3))
    # the first to run backward is the first forward; its last group of each name stays, so one of two layers leaves
    fc1, act = ROWS * WIDTH * 4, ROWS * 2 * WIDTH * 4
    assert manager.offload_summary_bytes == {"fc1": fc1, "act": act}
    assert manager.offload_summary_total_bytes == fc1 + act
    manager.offload_summary_bytes["fc1"] = 0  # a copy
    assert manager.offload_summary_total_bytes == fc1 + act
    driver.step(lifo(3))  # the same shapes in another order: all three forwards come first, and the third has the margin
    assert manager.offload_summary_bytes == {"fc1": 5 * fc1, "act": 5 * act}
    driver.step(lifo(2))
    assert manager.offload_summary_bytes == {"fc1": 3 * fc1, "act": 3 * act}


@pytest.mark.req("S2-38", "S2-42")
def test_callback_by_hand_ends_warm_up_prints_and_wants_as_many_backwards_as_forwards(capsys: pytest.CaptureFixture[str]) -> None:
    with installed(build_manager(print_summary=True)) as manager:
        assert manager is not None
        graphs = []
        for _ in range(2):
            init_chunk_handler(None, None, 1)
            graphs.append(save_one(leaf()))
        graphs[1].sum().backward()
        with pytest.raises(AssertionError, match="2 forward chunks and 1 backward chunks are cached, must be as many; run the backward of"):
            manager.post_warmup_callback()
        assert manager.is_warmup
        assert capsys.readouterr().out == ""
        graphs[0].sum().backward()
        manager.post_warmup_callback()
        assert not manager.is_warmup
        assert manager.offload_summary_bytes == {"a": 256}
        assert "Activation Offload Summary (MB)" in capsys.readouterr().out


def test_step_end_plans_where_the_callback_would_assert(manager: PipelineOffloadManager) -> None:
    """A forward whose backward never came, as of an auxiliary head, is not worth a crash after the whole step has run."""
    Driver(build_stages()).step([*gpipe(2), ("F", 0, 2)])
    assert not manager.is_warmup


@pytest.mark.req("S2-57")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_host_memory_is_added_from_the_second_iteration_on(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        assert manager is not None
        driver = Driver(build_stages())
        held, missing, lent = [], [], []
        for _ in range(7):  # long enough for the arena to be trimmed to what a step needs
            driver.step(one_f_one_b(4, 2))
            arena = manager.engine.arena.stats()
            held.append(arena.held_bytes)
            missing.append(arena.missing)
            lent.append(manager.stats.host_bytes_lent_peak)
        assert held == [held[0]] * 7
        assert missing == [missing[0]] * 7
        assert max(lent[1:]) <= lent[0]  # the margin stays on the device
        assert manager.cpu_tensor_pool.stats["pool_misses"] == 0


def test_ten_steps_with_a_leftover_each_grow_nothing(manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture) -> None:
    """S0-38's shape: a saved tensor of 4 MB whose backward never runs, kept by the caller, in each of ten steps."""
    device = manager.engine.device
    gc.disable()
    try:
        after: list[tuple[int, int, int]] = []
        kept = []
        for _ in range(10):
            init_chunk_handler(None, None, 1)
            kept.append(save_one(torch.randn(1 << 20, requires_grad=True).mul(1)).sum())
            with caplog.at_level(logging.WARNING, "offload"):
                step_end()
            after.append((device.active_bytes(), manager.engine.arena.held_bytes, manager.engine.arena.stats().lent_bytes))
        assert after == [(0, HELD, 0)] * 10
        assert len(caplog.records) == 10  # one warning a step
        assert "step 9 ended with 1 saved tensors (4,194,304 bytes) whose backward has not run; they are dropped" in caplog.messages[9]
    finally:
        gc.enable()


def test_what_has_left_is_freed_without_the_garbage_collector(manager: PipelineOffloadManager) -> None:
    gc.disable()
    try:
        init_chunk_handler(None, None, 1)
        x = leaf().mul(1)
        storage = weakref.ref(x.untyped_storage())
        y = save_one(x)
        del x
        for transfer in list(manager.engine.transfers._spilling):
            manager.engine.transfers.settle_spill(transfer)
        assert storage() is None
        handler = weakref.ref(next(iter(manager.living_records())))
        y.sum().backward()
        del y
        assert handler() is None
    finally:
        gc.enable()


def test_backward_on_another_thread_gives_the_same_gradients() -> None:
    steps = [gpipe(2)] * 2
    expected = baseline(build_stages(), steps)
    with installed(build_manager("random", seed=5)):

        class Threaded(Driver):
            def backward(self, stage: int, microbatch: int) -> None:
                errors: list[BaseException] = []

                def run() -> None:
                    try:
                        super(Threaded, self).backward(stage, microbatch)
                    except BaseException as error:
                        errors.append(error)

                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
                assert errors == []

        driver = Threaded(build_stages())
        assert_same(expected, [driver.step(actions) for actions in steps])


def test_backward_on_another_lane_gives_the_same_gradients() -> None:
    expected = baseline(build_stages(), [gpipe(2)])
    with installed(build_manager("random", seed=7)) as manager:
        assert manager is not None
        device = manager.engine.device
        assert isinstance(device, SimDevice)
        other = device.new_compute_lane("other")

        class OnAnotherLane(Driver):
            def backward(self, stage: int, microbatch: int) -> None:
                device.wait(other, device.record(device.compute), "the caller's")
                with device.use_lane(other):
                    super().backward(stage, microbatch)

        assert_same(expected, [OnAnotherLane(build_stages()).step(gpipe(2))])


# -- announced chunks ---------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-102")
def test_announced_and_counted_chunks_move_the_same_bytes() -> None:
    stats = []
    for announced in (False, True):
        with installed(build_manager()) as manager:
            assert manager is not None
            driver = Driver(build_stages(), announced=announced)
            for _ in range(3):
                driver.step(one_f_one_b(4, 2))
            stats.append((manager.stats.saved, manager.stats.spill_bytes, manager.stats.restore_bytes, manager.offload_summary_bytes))
    assert stats[0] == stats[1]


def test_order_that_is_given_wins_over_the_one_that_was_seen(manager: PipelineOffloadManager) -> None:
    driver = Driver(build_stages())
    driver.step(gpipe(2))
    assert [action for action in manager._lookahead.actions if action[0] == "B"] == [("B", 0, 0), ("B", 0, 1)]
    manager.set_order(lifo(2))
    assert list(manager._lookahead.coming()) == [("B", 0, 1), ("B", 0, 0)]
    manager.set_order(None)
    assert list(manager._lookahead.coming()) == [("B", 0, 0), ("B", 0, 1)]


def test_backward_of_a_chunk_that_was_never_begun_is_nothing(manager: PipelineOffloadManager) -> None:
    for kind in "BIW":
        manager.begin_backward(3, 4, kind)
        manager.end_backward(3, 4, kind)
    manager.end_forward(3, 4)
    assert step_end() is not None


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
@pytest.mark.parametrize("cap", [None, 0, 1, 2])
def test_pending_offloads_of_a_name_are_capped(cap: int | None) -> None:
    """With a late executor a copy is pending until compute waits for it: none after each commit with 0, the last `cap` otherwise."""
    with installed(build_manager(max_inflight_offloads=cap, piece_bytes=1 << 20)) as manager:
        assert manager is not None
        init_chunk_handler(None, None, 1)
        graphs = []
        for number in range(4):
            graphs.append(save_one(leaf()))
            expected = number + 1 if cap is None else min(cap, number + 1)
            assert manager.engine.transfers.in_flight() == (expected, 0)
        graphs.append(save_one(leaf(), "another name"))
        assert manager.engine.transfers.in_flight()[0] == (5 if cap is None else cap + min(cap, 1))


def test_configure_with_a_wrong_device_leaves_the_old_manager_at_work(manager: PipelineOffloadManager) -> None:
    for arguments in ({"device": "tpu"}, {"config": 5}):
        with pytest.raises(ValueError, match=r"unknown device 'tpu'|config is a int, must be an OffloadConfig"):
            configure(**arguments)  # type: ignore[arg-type]
        assert PipelineOffloadManager.get_instance() is manager
    init_chunk_handler(None, None, 1)
    save_one(leaf()).sum().backward()
    assert manager.step_end().spilled == 1


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


@pytest.mark.req("S2-46", "S2-50")
@pytest.mark.parametrize("with_grad", [0, 1])
def test_evaluation_is_no_microbatch_unless_it_saves(manager: PipelineOffloadManager, with_grad: int) -> None:
    driver = Driver(build_stages(2, 1))
    for _ in range(3):
        driver.step([("eval", with_grad, 3), *interleaved(2), ("eval", with_grad, 3)])
        assert len(manager._handlers) == 2 * (2 + 6 * with_grad)


def test_forward_without_gradients_has_no_current_chunk_and_the_next_one_has(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    first = manager.cur_forward_chunk()
    with torch.no_grad():
        init_chunk_handler(None, None, 1)
        assert manager.cur_forward_chunk() is None
        assert manager.pop_forward_chunk() is None
    init_chunk_handler(None, None, 1)
    second = manager.cur_forward_chunk()
    assert first is not None
    assert second is not None
    assert (first.id.microbatch, second.id.microbatch) == (0, 1)


def test_forward_that_a_checkpoint_runs_again_is_no_further_microbatch(manager: PipelineOffloadManager) -> None:
    layer = Stack(1, ("fc1",))

    def whole_forward(x: Tensor) -> Tensor:
        init_chunk_handler(None, None, 1)
        return layer(x)

    for _ in range(2):
        checkpoint(whole_forward, torch.randn(ROWS, WIDTH, requires_grad=True), use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    assert [handler.id.microbatch for handler in manager._handlers.values()] == [0, 1]


def test_groups_of_a_name_that_every_layer_has_are_told_apart(manager: PipelineOffloadManager) -> None:
    module = Stack(3, NAMES)
    init_chunk_handler(None, None, 1)
    module(torch.randn(ROWS, WIDTH))
    handler = manager.cur_forward_chunk()
    assert handler is not None
    assert [group.name for group in handler.groups] == list(NAMES) * 3
    assert handler.get_max_deduplicated_groups() == len(NAMES)


# -- how often the prefetch looks -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("piece_bytes", "window_bytes", "reads_a_look"),
    [
        (1024, 1 << 20, 4),  # a piece is four records
        (1 << 20, 8 * 1024, 8),  # a quarter of the window is eight
        (1024, 512, 1),  # less than a record
        (1024, 0, 1),
    ],
)
def test_prefetch_looks_again_after_a_stride_of_reads_and_not_after_each(
    piece_bytes: int, window_bytes: int, reads_a_look: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its look costs more host time than a small read."""
    saves = 16
    looks: list[int] = []
    reads = [0]
    with installed(build_manager(piece_bytes=piece_bytes, max_restoring_bytes=window_bytes)) as manager:
        assert manager is not None
        monkeypatch.setattr(manager.engine.prefetch, "pump", lambda chunks: looks.append(reads[0]))
        manager.engine.on_read(lambda handle: reads.__setitem__(0, reads[0] + 1))  # told after the manager
        init_chunk_handler(None, None, 1)
        x = group_start(leaf(), "a")
        with offload_hooks():
            y = x * 2
            for _ in range(saves):
                y = y.sin()
        group_commit(y, "a").sum().backward()
        in_between = [at for at in looks if 0 < at < saves]
        assert in_between == [at - 1 for at in range(reads_a_look, saves + 1, reads_a_look) if at > 1]
        step_end()
