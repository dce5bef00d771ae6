"""Which chunk is current: chunks counted and announced, the queue by hand, evaluations in between, and when
the prefetch looks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import (
    ChunkOffloadHandler,
    OffloadConfig,
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.policy.actions import Action
from tests.unit.groups.stack import (
    ROWS,
    WIDTH,
    Driver,
    Stack,
    build_manager,
    build_stages,
    gpipe,
    installed,
    interleaved,
    leaf,
    lifo,
    one_f_one_b,
    save_one,
)


# -- chunks --------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-46", "S2-47")
def test_each_forward_of_a_step_has_a_handler_that_later_steps_use_again(
    manager: PipelineOffloadManager,
) -> None:
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
    """A limit that was not given used to be 1 Mi, whatever the config said: a small model moved nothing."""
    assert OffloadConfig().min_offloaded_tensor_size == 1024 * 1024
    manager.init_model_chunk_offload_handler()
    handler = manager.cur_forward_chunk()
    assert handler.min_offloaded_tensor_size == manager.engine.config.min_offloaded_tensor_size == 1
    init_chunk_handler(None, None, 65)
    save_one(leaf(64).double()).sum().backward()  # 512 bytes, and too small all the same
    save_one(leaf(65)).sum().backward()
    assert step_end() == manager.stats
    assert (manager.stats.saved, manager.stats.spill_bytes) == (1, 65 * 4)


@pytest.mark.req("S2-51")
def test_current_chunks_are_those_of_the_forward_and_of_the_backward_under_way(
    manager: PipelineOffloadManager,
) -> None:
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
def test_forward_chunks_are_walked_after_warm_up_until_they_are_exhausted(
    manager: PipelineOffloadManager,
) -> None:
    assert manager.pop_forward_chunk() is None
    driver = Driver(build_stages(names=("fc1", "act")))
    init_chunk_handler(None, None, 1)
    assert manager.pop_forward_chunk("fc1") is manager.cur_forward_chunk()
    step_end()
    driver.step(gpipe(2))
    first, second = manager.tracker.handlers.values()
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
    init_chunk_handler(None, None, 1)
    assert manager.cur_forward_chunk() is not None
    assert manager.pop_forward_chunk() is None  # though a forward is under way, and its groups leave


@pytest.mark.req("S2-35", "S2-36", "S2-43", "S2-44", "S2-45")
def test_queue_by_hand_hands_out_chunks_and_asserts_when_there_are_none(
    manager: PipelineOffloadManager,
) -> None:
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
    assert [*manager.tracker.backward_order] == [handlers[1]]
    assert manager.pop_backward_chunk("of stage 1") is handlers[1]
    init_chunk_handler(3, 0, 1)
    with pytest.raises(
        AssertionError, match=r"No non-empty chunk found among 0 queued chunks for group None"
    ):
        manager.pop_backward_chunk()
    manager.tracker.queue.stages[2].append(pushed)
    with pytest.raises(AssertionError, match=r"All stages must have same chunk count, got \[1, 0, 1\]"):
        manager.flush()
    manager.tracker.queue.stages[1].append(pushed)
    manager.flush()
    assert manager.front_backward_chunk() is pushed


@pytest.mark.req("S2-43")
def test_push_in_warm_up_foretells_the_backward_order_and_later_does_not(
    manager: PipelineOffloadManager,
) -> None:
    init_chunk_handler(None, None, 1)
    handler = manager.cur_forward_chunk()
    assert handler is not None
    manager.push(handler)
    assert [*manager.tracker.backward_order] == [handler]
    step_end()
    assert not manager.is_warmup
    init_chunk_handler(None, None, 1)
    manager.push(handler)
    assert [*manager.tracker.backward_order] == []


# -- announced chunks ----------------------------------------------------------------------------------------
@pytest.mark.req("S2-102")
def test_announced_and_counted_chunks_move_the_same_bytes() -> None:
    stats = []
    for announced in (False, True):
        with installed(build_manager()) as manager:
            driver = Driver(build_stages(), announced=announced)
            for _ in range(3):
                driver.step(one_f_one_b(4, 2))
            stats.append(
                (
                    manager.stats.saved,
                    manager.stats.spill_bytes,
                    manager.stats.restore_bytes,
                    manager.offload_summary_bytes,
                )
            )
    assert stats[0] == stats[1]


def test_order_that_is_given_wins_over_the_one_that_was_seen(manager: PipelineOffloadManager) -> None:
    driver, tracker = Driver(build_stages()), manager.tracker
    driver.step(gpipe(2))
    assert [action for action in tracker._lookahead.actions if action[0] == "B"] == [
        ("B", 0, 0),
        ("B", 0, 1),
    ]
    manager.set_order(lifo(2))
    assert [action for action in tracker._lookahead.actions if action[0] == "B"] == [
        ("B", 0, 1),
        ("B", 0, 0),
    ]
    manager.set_order(None)
    assert [action for action in tracker._lookahead.actions if action[0] == "B"] == [
        ("B", 0, 0),
        ("B", 0, 1),
    ]


def test_backward_of_a_chunk_that_was_never_begun_is_nothing(manager: PipelineOffloadManager) -> None:
    for kind in "BIW":
        manager.begin_backward(3, 4, kind)
        manager.end_backward(3, 4, kind)
    manager.end_forward(3, 4)
    assert step_end() is not None


@pytest.mark.req("S2-46")
@pytest.mark.parametrize("with_grad", [0, 1])
def test_evaluation_is_no_microbatch_unless_it_saves(manager: PipelineOffloadManager, with_grad: int) -> None:
    driver = Driver(build_stages(2, 1))
    for _ in range(3):
        driver.step([("eval", with_grad, 3), *interleaved(2), ("eval", with_grad, 3)])
        assert len(manager.tracker.handlers) == 2 * (2 + 6 * with_grad)


@pytest.mark.req("S2-50", "S4-45")
def test_forward_without_gradients_has_no_current_chunk_and_the_next_one_has(
    manager: PipelineOffloadManager,
) -> None:
    init_chunk_handler(None, None, 1)
    first = manager.cur_forward_chunk()
    with torch.no_grad():
        init_chunk_handler(None, None, 1)
        assert manager.cur_forward_chunk() is None
        assert manager.pop_forward_chunk() is None
    init_chunk_handler(None, None, 1)
    second = manager.cur_forward_chunk()
    assert (first.id.microbatch, second.id.microbatch) == (0, 1)


def test_forward_that_a_checkpoint_runs_again_is_no_further_microbatch(
    manager: PipelineOffloadManager,
) -> None:
    layer = Stack(1, ("fc1",))

    def whole_forward(x: Tensor) -> Tensor:
        init_chunk_handler(None, None, 1)
        return layer(x)

    for _ in range(2):
        checkpoint(
            whole_forward, torch.randn(ROWS, WIDTH, requires_grad=True), use_reentrant=False
        ).sum().backward()  # type: ignore[union-attr]
    assert [handler.id.microbatch for handler in manager.tracker.handlers.values()] == [0, 1]


# -- how often the prefetch looks ----------------------------------------------------------------------------
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


def test_a_loop_that_announces_nothing_is_timed_all_the_same(manager: PipelineOffloadManager) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offload.activations(model, min_numel=1):
        for _ in range(3):
            for _ in range(2):
                model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    last = manager.follower.last_step
    assert last.seconds is not None
    assert set(last.seconds) == {Action(kind, 0, at) for kind in "FB" for at in range(2)}
