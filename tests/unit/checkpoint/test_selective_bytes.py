"""What a selective checkpoint keeps: whose bytes they are, in which order they are read, and which of them
stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import (
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    selective_contexts,
    step_end,
)
from tests.loops import ended_step
from tests.unit.checkpoint.regions import (
    BLOCKS,
    CALLS,
    FC1_BYTES,
    INPUT_BYTES,
    MM,
    WIDTH,
    Block,
    Call,
    assert_bits,
    build_blocks,
    coming_labels,
    forward,
    gradients,
    kept,
    kept_in_group,
    let_go,
    noted_reads,
    plain,
    source,
    train,
    train_step,
)
from tests.unit.groups.stack import build_manager, installed


# -- bytes ---------------------------------------------------------------------------------------------------
def test_what_leaves_is_what_was_kept_by_the_name_of_its_group(manager: PipelineOffloadManager) -> None:
    _, stats = train_step(build_blocks(), kept)
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * FC1_BYTES)
    # the last one read first stays: the margin
    assert manager.offload_summary_bytes == {"selective": (BLOCKS - 1) * FC1_BYTES}


def test_in_a_group_kept_outputs_and_the_input_of_the_checkpoint_are_one_group(
    manager: PipelineOffloadManager,
) -> None:
    _, stats = train_step(build_blocks(), kept_in_group)
    assert (stats.saved, stats.spill_bytes) == (2 * BLOCKS, BLOCKS * (INPUT_BYTES + FC1_BYTES))
    assert manager.offload_summary_bytes == {"block": (BLOCKS - 1) * (INPUT_BYTES + FC1_BYTES)}


def test_the_last_outputs_of_a_region_are_kept_only_where_a_recompute_would_read_them(
    manager: PipelineOffloadManager,
) -> None:
    """Nothing is saved after fc2, so its output is not kept; with early_stop=False the recompute calls it
    again."""
    blocks = build_blocks()
    expected = train(blocks, plain)
    for early_stop in (True, False):
        found, stats = train_step(
            blocks, lambda block, h, early_stop=early_stop: kept(block, h, early_stop=early_stop)
        )  # type: ignore[misc]
        assert_bits(expected, found)
        assert stats.saved == BLOCKS


def test_an_output_that_autograd_also_saves_outside_is_one_record(manager: PipelineOffloadManager) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        h = x @ weight
        return h, h.sin()

    init_chunk_handler(None, None, 1)
    x = group_start(source() * 1.0, "both")
    with offload_hooks():
        h, y = checkpoint(body, x, use_reentrant=False, context_fn=selective_contexts({MM}))
        y = group_commit((h * h) * y, "both")
    del h, x
    assert manager.engine.transfers.counts.spill_bytes == 4 * INPUT_BYTES  # x, x @ w, its square, its sine
    y.sum().backward()


def test_a_recompute_saves_the_fetched_bytes_themselves(manager: PipelineOffloadManager) -> None:
    """What autograd saves in the recompute is the restored storage, not a copy of it; it is let go with its
    node."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    seen: list[int] = []

    def body(x: Tensor) -> Tensor:
        h = x @ weight
        seen.append(h.data_ptr())
        y = h.sin()
        saved = (
            y.grad_fn._raw_saved_self if torch._C._current_graph_task_id() == -1 else y.grad_fn._saved_self
        )  # type: ignore[union-attr]
        if isinstance(saved, Tensor):
            seen.append(saved.data_ptr())
        return y.tanh()

    init_chunk_handler(None, None, 1)
    y = kept(body, source() * 1.0)  # type: ignore[arg-type]
    let_go(manager)
    y.sum().backward()
    assert len(seen) == 3
    assert seen[1] == seen[2]
    stats = ended_step()
    assert (stats.restored, stats.restore_bytes) == (1, INPUT_BYTES)


@pytest.mark.parametrize(
    "config", [{"activation_offload_fraction": 0.0}, {"max_spilling_bytes": 0}, {"host_limit_bytes": 0}]
)
def test_a_kept_output_that_stays_costs_no_copy(config: dict[str, Any]) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    with installed(build_manager(**config)):
        for _ in range(2):
            found, stats = train_step(blocks, kept)
            assert_bits(expected, found)
        assert (stats.saved, stats.kept, stats.spill_bytes, stats.restore_bytes) == (BLOCKS, BLOCKS, 0, 0)


def test_a_device_limit_holds_for_kept_outputs() -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    limit_bytes = 2 * FC1_BYTES
    with installed(build_manager(device_limit_bytes=limit_bytes)) as manager:
        for _ in range(4):
            init_chunk_handler(None, None, 1)
            x = source()
            loss = forward(blocks, x, kept)
            loss.backward()
            assert_bits(expected, [loss.detach(), *gradients(blocks, x)])
            del loss
            stats = manager.step_end()
            assert stats.device_bytes_peak <= limit_bytes
        assert stats.restored > 0


# -- order ---------------------------------------------------------------------------------------------------
class Long(nn.Module):
    """Four kept products a block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x).mul(0.5))
        return x


@CALLS
def test_the_coming_reads_are_blocks_in_reverse_and_each_in_the_order_of_its_forward(
    call: Call, manager: PipelineOffloadManager
) -> None:
    blocks = build_blocks(Long)
    init_chunk_handler(None, None, 1)
    loss = forward(blocks, source(), call)
    let_go(manager)
    with noted_reads(manager) as reads:
        coming = coming_labels(manager)
        loss.backward()
    inputs = int(call is kept_in_group)
    assert len(coming) == BLOCKS * (4 + inputs)
    assert reads == coming
    places = [(label.split("#")[1][0], label.split("[")[1][0]) for label in reads]
    assert places == [
        (str(block), str(slot)) for block in reversed(range(BLOCKS)) for slot in range(4 + inputs)
    ]


def test_the_planner_is_told_which_tensors_a_recompute_reads_together(
    manager: PipelineOffloadManager,
) -> None:
    blocks = build_blocks(Long)
    for _ in range(2):  # a group of the second step is the first one's
        init_chunk_handler(None, None, 1)
        x = group_start(source(), "around")
        with offload_hooks():
            y = kept(blocks[1], kept(blocks[0], torch.sin(x)))
            loss = group_commit(torch.cos(y), "around").sum()
        chunk = manager.cur_forward_chunk()
        (group,) = chunk.groups
        outside = [slot for slot, _ in group.slot_bytes if slot not in group.regions]
        # x by sin, y by cos; sin's output and the first region's are the regions' inputs, beside four
        # products each
        assert [len(outside), *Counter(group.regions.values()).items()] == [2, (1, 5), (2, 5)]
        loss.backward()
        del x, y, loss
        step_end()


def test_what_a_recompute_reads_is_fetched_before_it_asks() -> None:
    """With a window of two outputs, nothing but the first read of the step is fetched on demand."""
    blocks = build_blocks(Long)
    with installed(
        build_manager(max_restoring_bytes=2 * INPUT_BYTES, piece_bytes=1, max_spilling_bytes=1)
    ) as manager:
        on_demand: list[str] = []
        restore = manager.engine.transfers.restore

        def noted(records: Any, priority: Any, *rest: Any) -> Any:
            if priority.name == "REQUIRED":
                on_demand.extend(str(record.label) for record in records)
            return restore(records, priority, *rest)

        manager.engine.transfers.restore = noted  # type: ignore[method-assign]
        manager.begin_chunk(0, 0)
        loss = forward(blocks, source(), kept)
        manager.end_forward(0, 0)
        let_go(manager)
        manager.begin_backward(0, 0, "B")
        loss.backward()
        manager.end_backward(0, 0, "B")
        del loss
        stats = manager.step_end()
        assert stats.restored == BLOCKS * 4
        assert on_demand == []


# -- groups inside the region --------------------------------------------------------------------------------
class Marked(Block):
    """Marks around the two products, inside the region."""

    delay = False

    def forward(self, x: Tensor) -> Tensor:
        h = group_start(self.norm(x), "fc1")
        h = F.gelu(group_commit(self.fc1(h), "fc1", delay_offload=self.delay))
        h = group_start(h, "fc2")
        return x + torch.tanh(group_commit(self.fc2(h), "fc2", delay_offload=self.delay))


@pytest.mark.parametrize("delay", [False, True])
def test_an_output_belongs_to_the_group_that_was_open_when_it_was_made(
    delay: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """fc1's output waits for a save that comes after its group's commit, and still goes there."""
    blocks = build_blocks(Marked)
    expected = train(blocks, plain)
    for block in blocks:
        block.delay = delay  # type: ignore[assignment]
    with installed(build_manager(piece_bytes=1 << 20)) as manager:
        init_chunk_handler(None, None, 1)
        x = source()
        loss = forward(blocks, x, kept)
        if delay:
            assert manager.engine.transfers.counts.spill_bytes == 0
            manager.flush_delayed_groups()
        assert manager.engine.transfers.counts.spill_bytes == BLOCKS * (FC1_BYTES + INPUT_BYTES)
        let_go(manager)
        loss.backward()
        assert_bits(expected, [loss.detach(), *gradients(blocks, x)])
        del loss
        step_end()
        assert manager.offload_summary_bytes == {
            "fc1": (BLOCKS - 1) * FC1_BYTES,
            "fc2": (BLOCKS - 1) * INPUT_BYTES,
        }
    assert caplog.records == []
