"""The end of a step: the plan and its table, and nothing of the step left, on whichever thread or lane it
ran."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch

from offload import ChunkOffloadHandler, PipelineOffloadManager, init_chunk_handler, step_end
from offload.ids import ChunkId
from tests.unit.groups.stack import (
    EXECUTORS,
    HELD,
    ROWS,
    WIDTH,
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    gpipe,
    installed,
    leaf,
    lifo,
    one_f_one_b,
    save_one,
)


@pytest.mark.req("S2-33")
def test_reset_starts_an_iteration_with_nothing_of_the_last(manager: PipelineOffloadManager) -> None:
    Driver(build_stages()).step(gpipe(2))
    init_chunk_handler(None, None, 1)
    graph = save_one(leaf())
    assert manager.reset() == manager.stats
    assert (manager.cur_forward_chunk(), manager.cur_backward_chunk(), manager.front_backward_chunk()) == (
        None,
        None,
        None,
    )
    assert all(
        not handler.begun and handler.find_next_group() is handler.groups[0]
        for handler in manager.tracker.handlers.values()
    )
    assert manager.engine.transfers.device_bytes == manager.engine.arena.stats().lent == 0
    init_chunk_handler(None, None, 1)
    current = manager.cur_forward_chunk()
    assert str(current.id) == "s0m0"  # counted from the start again
    del graph


@pytest.mark.req("S2-33", "S2-42")
def test_table_is_printed_once_by_the_first_reset_after_a_backward(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with installed(build_manager(print_summary=True)) as manager:
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
def test_summary_is_empty_before_the_plan_and_counts_what_leaves_after(
    manager: PipelineOffloadManager,
) -> None:
    assert (manager.offload_summary_bytes, manager.offload_summary_total_bytes) == ({}, 0)
    driver = Driver(build_stages(1, 2, ("fc1", "act")))
    driver.step(gpipe(3))
    # the first to run backward is the first forward; its last group of each name stays, so one of two layers
    # leaves
    fc1, act = ROWS * WIDTH * 4, ROWS * 2 * WIDTH * 4
    assert manager.offload_summary_bytes == {"fc1": fc1, "act": act}
    assert manager.offload_summary_total_bytes == fc1 + act
    manager.offload_summary_bytes["fc1"] = 0  # a copy
    assert manager.offload_summary_total_bytes == fc1 + act
    # the same shapes in another order: all three forwards come first, and the third has the margin
    driver.step(lifo(3))
    assert manager.offload_summary_bytes == {"fc1": 5 * fc1, "act": 5 * act}
    driver.step(lifo(2))
    assert manager.offload_summary_bytes == {"fc1": 3 * fc1, "act": 3 * act}


@pytest.mark.req("S2-34", "S2-41", "S2-42")
def test_the_table_leaves_out_what_found_no_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """It counted the plan: 75.50 MB were printed, and 8.39 moved."""
    limit = 8 << 10
    with installed(build_manager(print_summary=True, host_limit_bytes=limit)) as manager:
        driver = Driver(build_stages(1, 4, ("fc1", "act")))
        driver.step(gpipe(2))
        refused = manager.stats.refused_bytes
        assert refused > 0
        moved, summary = sum(manager.step_offload_bytes.values()), manager.offload_summary_bytes
        out = capsys.readouterr().out
        driver.step(gpipe(2))
        assert 0 < sum(summary.values()) <= moved <= limit
        assert moved == manager.stats.spill_bytes
        assert "Activation Offload Summary (MB)" in out
        assert f"{moved / 1e6:.2f}" in out.splitlines()[-1]
    with installed(build_manager()) as manager:
        Driver(build_stages(1, 4, ("fc1", "act"))).step(gpipe(2))
        assert sum(manager.step_offload_bytes.values()) > moved


@pytest.mark.req("S2-38", "S2-42")
def test_callback_by_hand_ends_warm_up_prints_and_wants_as_many_backwards_as_forwards(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with installed(build_manager(print_summary=True)) as manager:
        graphs = []
        for _ in range(2):
            init_chunk_handler(None, None, 1)
            graphs.append(save_one(leaf()))
        graphs[1].sum().backward()
        with pytest.raises(
            AssertionError,
            match="2 forward chunks and 1 backward chunks are cached, must be as many; run the backward of",
        ):
            manager.post_warmup_callback()
        assert manager.is_warmup
        assert capsys.readouterr().out == ""
        graphs[0].sum().backward()
        manager.post_warmup_callback()
        assert not manager.is_warmup
        assert manager.offload_summary_bytes == {"a": 256}
        assert "Activation Offload Summary (MB)" in capsys.readouterr().out


@pytest.mark.req("S2-38")
def test_callback_by_hand_refuses_more_backwards_than_forwards(manager: PipelineOffloadManager) -> None:
    for _ in range(2):
        init_chunk_handler(None, None, 1)
        save_one(leaf()).sum().backward()
    assert manager.cur_forward_chunk() is not None
    manager.push(ChunkOffloadHandler(1, engine=manager.engine, chunk_id=ChunkId(0, 7), manager=manager))
    with pytest.raises(AssertionError, match="2 forward chunks and 3 backward chunks are cached"):
        manager.post_warmup_callback()
    assert manager.is_warmup


def test_step_end_plans_where_the_callback_would_assert(manager: PipelineOffloadManager) -> None:
    """A forward whose backward never came, as of an auxiliary head, is not worth a crash after the whole step
    has run."""
    Driver(build_stages()).step([*gpipe(2), ("F", 0, 2)])
    assert not manager.is_warmup


@pytest.mark.req("S2-57")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_host_memory_is_added_from_the_second_iteration_on(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
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


@pytest.mark.parametrize(("asked", "expected"), [(True, [5, 14]), (False, [])])
def test_cached_device_memory_goes_back_once_at_the_begin_of_a_step_after_the_plan_has_settled(
    asked: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a step's begin, because that is when the gradients of the last one may be gone."""
    with installed(build_manager(trim_device=asked)) as manager:
        driver = Driver(build_stages())
        ended: list[None] = []
        released: list[int] = []
        saved: list[int] = []

        def release(worth: int) -> int:
            assert worth == 32
            released.append(len(ended))
            saved.append(manager.engine.transfers.counts.saved)
            return 1

        monkeypatch.setattr(manager.engine.device, "release_cached", release)
        for actions in [one_f_one_b(4, 2)] * 9 + [gpipe(3)] * 6:  # another shape has another plan
            driver.step(actions)
            ended.append(None)
        assert released == expected
        assert not any(saved), "before the step has saved anything"


def test_steps_whose_shapes_come_in_turns_give_no_cached_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(build_manager()) as manager:
        driver = Driver(build_stages())
        monkeypatch.setattr(
            manager.engine.device, "release_cached", lambda _: pytest.fail("the plan never settled")
        )
        for microbatches in (1, 2, 3, 2) * 3:
            driver.step(gpipe(microbatches))


def test_ten_steps_with_a_leftover_each_grow_nothing(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    """S0-38's shape: a saved tensor of 4 MB whose backward never runs, kept by the caller, in each of ten
    steps."""
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
            after.append(
                (
                    device.active_bytes(),
                    manager.engine.arena.held_bytes,
                    manager.engine.arena.stats().lent_bytes,
                )
            )
        assert after == [(0, HELD, 0)] * 10
        assert len(caplog.records) == 10  # one warning a step
        assert (
            "step 9 ended with 1 saved tensors (4.19 MB) whose backward has not run; they are dropped"
            in caplog.messages[9]
        )
    finally:
        gc.enable()


def test_backward_on_another_lane_gives_the_same_gradients() -> None:
    expected = baseline(build_stages(), [gpipe(2)])
    with installed(build_manager("random", seed=7)) as manager:
        device = manager.engine.device
        other = device.new_compute_lane("other")

        class OnAnotherLane(Driver):
            def backward(self, stage: int, microbatch: int) -> None:
                device.wait(other, device.record(device.compute), "the caller's")
                with device.use_lane(other):
                    super().backward(stage, microbatch)

        assert_same(expected, [OnAnotherLane(build_stages()).step(gpipe(2))])
