"""Inputs of recomputed blocks in time and room: what is fetched ahead, what is alive, what is counted."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.checkpoint.hidden_states import HIDDEN_STATES
from offload.device.sim import SimDevice
from offload.transfer.block import BlockState
from tests.unit.checkpoint.recomputed import (
    BLOCKS,
    INPUT_BYTES,
    ROWS,
    Block,
    Model,
    assert_bits,
    build,
    compared,
    recomputed,
    source,
    train,
    train_step,
    values,
)
from tests.unit.checkpoint.regions import assert_empty, noted_reads
from tests.unit.groups.stack import (
    EXECUTORS,
    Action,
    Driver,
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

Manager = PipelineOffloadManager


def zero_bubble() -> list[Action]:
    return [
        *(("F", 0, mb) for mb in range(3)),
        *(("I", 0, mb) for mb in range(3)),
        *(("W", 0, mb) for mb in range(3)),
    ]


@pytest.mark.req("S4-4")
def test_the_next_input_is_fetched_before_the_recompute_that_reads_it() -> None:
    """While a block is recomputed, the input of the one before it is on its way or there."""
    states: list[BlockState] = []

    class Asking(Block):
        number = 0

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if torch._C._current_graph_task_id() != -1 and self.number:
                handler = manager.cur_forward_chunk()
                states.append(handler.saved.blocks[self.number - 1].state)
            return super().forward(x, mask)

    with installed(build_manager("late", max_spilling_bytes=INPUT_BYTES)) as manager:
        model = build(Asking)
        for number, block in enumerate(model.blocks):
            block.number = number  # type: ignore[assignment]
        _, stats = train_step(model, manager)
    # each left, and the last one, which is read first, did not have to come back
    assert (stats.spilled, stats.restored) == (BLOCKS, BLOCKS - 1)
    assert states == [BlockState.RESTORING] * (BLOCKS - 1)


@pytest.mark.req("S4-3", "S4-4")
@pytest.mark.parametrize(("executor", "cap"), [("late", None), ("early", None), ("late", 1), ("late", 3)])
def test_after_the_forward_two_inputs_are_on_the_device_and_in_the_backward_one_is_fetched_ahead(
    executor: Any, cap: int | None
) -> None:
    """Of eight, though the caps in bytes have room for all: a block computes longer than its input is
    copied. In the backward the one that is being read may count, too. Others may bound the two lower."""
    held: list[int] = []

    class Asking(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            held.append(manager.engine.transfers.device_bytes)
            return super().forward(x, mask)

    with installed(build_manager(executor)) as manager:
        limits, sent = manager.engine.limits, 1 if cap == 1 else 2
        limits.contributor("other").bound("inputs_in_flight", cap)
        assert (limits.inputs_in_flight, limits.held_by("inputs_in_flight")) == (
            sent,
            "other" if cap == 1 else "default",
        )
        model = build(Asking, count=8)
        for _ in range(2):
            held.clear()
            with recomputed(list(model.blocks), manager):
                init_chunk_handler(None, None, 1)
                y = model(source())
                held.append(manager.engine.transfers.device_bytes)
                y.sum().backward()
            stats = step_end()
            assert stats.spilled == 8
            forward, after, backward = held[:8], held[8], held[9:]
            assert forward == [INPUT_BYTES, *[sent * INPUT_BYTES] * 7]
            assert after == sent * INPUT_BYTES  # the others are gone
            assert max(backward) <= 3 * INPUT_BYTES
            assert max(backward[3:]) <= 2 * INPUT_BYTES  # no longer those that the forward left behind
            assert stats.device_bytes_peak <= 3 * INPUT_BYTES


@pytest.mark.req("S4-3", "S4-44")
def test_sources_alive_are_bounded_by_bytes_that_a_user_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_spilling_bytes of two inputs: a third copy makes compute wait for the first. Never the host."""
    in_flight: list[int] = []

    class Asking(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            in_flight.append(manager.engine.transfers.in_flight()[0])  # one input each
            return super().forward(x, mask)

    with installed(build_manager("late", max_spilling_bytes=2 * INPUT_BYTES)) as manager:
        model = build(Asking, count=8)
        init_chunk_handler(None, None, 1)
        with recomputed(list(model.blocks), manager):
            with monkeypatch.context() as patched:
                patched.delattr(SimDevice, "synchronize")
                y = model(source())
            assert len(in_flight) == 8
            assert max(in_flight) == 2
            y.sum().backward()
        step_end()


@pytest.mark.req("S4-47")
def test_with_microbatches_in_flight_the_prefetch_follows_the_order_that_was_recorded(
    manager: Manager,
) -> None:
    """Three forwards, then their backwards, first come first read: not the reverse of the saves. Once seen,
    the input of the second one's last block comes while the first one's first block is recomputed."""
    states: list[BlockState] = []

    class Asking(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if manager.cur_backward_chunk() is not None and len(reads) == BLOCKS:
                second = [each for each in manager.living_blocks() if each.group.chunk.microbatch == 1]
                states.append(second[-1].state)
            return super().forward(x, mask)

    model = build(Asking)
    plain = copy.deepcopy(model)

    def run(module: Model, announce: bool) -> list[Tensor]:
        losses, inputs = [], []
        for microbatch in range(3):
            if announce:
                init_chunk_handler(None, None, 1)
            inputs.append(source(microbatch))
            losses.append(module(inputs[-1]).square().mean())
        if announce:
            ahead.append([str(coming.chunk) for coming in manager.tracker._coming])
        for loss in losses:
            loss.backward()
        return [*(x.grad for x in inputs if x.grad is not None), *values(module, inputs[0])]

    ahead: list[list[str]] = []
    expected = run(plain, False)
    for _ in range(2):
        with recomputed(list(model.blocks), manager), noted_reads(manager) as reads:
            assert_bits(expected, run(model, True))
        step_end()
        chunks = list(dict.fromkeys(label.partition("/")[0] for label in reads))
        assert chunks == ["s0m0", "s0m1", "s0m2"]
    assert ahead[1] == ["s0m0", "s0m1", "s0m2"]
    assert states == [BlockState.SPILLED, BlockState.RESTORING]


@pytest.mark.req("S4-47")
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize(
    "actions",
    [gpipe(4), lifo(4), one_f_one_b(5, 2), interleaved(4, 2), zero_bubble()],
    ids=["gpipe", "lifo", "1f1b", "interleaved", "split backwards"],
)
def test_under_any_order_of_forwards_and_backwards_the_gradients_have_the_same_bits(
    actions: Sequence[Action], announced: bool
) -> None:
    """Split backwards recompute in the input half and again in the weight half."""
    steps = [list(actions)] * 3
    count = 1 + max(stage for _, stage, _ in actions)
    expected = baseline(build_stages(count, names=()), steps)
    for executor in EXECUTORS:
        stages = build_stages(count, names=())
        with installed(build_manager(executor)) as manager:
            blocks = [layer for stage in stages for layer in stage]
            with recomputed(blocks, manager):
                driver = Driver(stages, announced=announced)
                assert_same(expected, [driver.step(step) for step in steps])
            assert manager.stats.saved == sum(kind == "F" for kind, _, _ in actions) * len(stages[0])
            assert_empty(manager)


@pytest.mark.req("S4-10", "S4-37", "S4-43")
def test_nothing_grows_over_steps_though_some_forwards_have_no_backward(manager: Manager) -> None:
    model = build()
    labels: list[list[str]] = []
    held: list[int] = []
    with recomputed(list(model.blocks), manager):
        for step in range(6):
            init_chunk_handler(None, None, 1)
            with noted_reads(manager) as reads:
                train(model, seed=step)
                dropped = model.blocks[0](source() * 1.0)
            step_end()
            del dropped
            labels.append(list(reads))
            held.append(manager.engine.arena.held_bytes)
            assert_empty(manager)
    # names start anew in every step
    assert labels[1] == labels[-1]
    assert len(set(held[1:])) == 1


@pytest.mark.req("S4-35")
def test_a_report_counts_what_was_seen_marked_offloaded_restored_and_skipped() -> None:
    """Seen are the arguments of every call: those that were marked, one a call, and those that stayed. Of the
    first step, whose saves are looked at one by one."""
    with installed(build_manager(max_spilling_bytes=INPUT_BYTES)) as manager:
        [stats] = compared(build(), manager, torch.rand(ROWS, ROWS))
        group = offload.report().total.groups[HIDDEN_STATES]
    skipped = sum(stayed.tensors for stayed in group.stayed.values())
    assert list(group.stayed) == ["an argument of a recomputed block, of which one leaves"]
    marked, offloaded, restored = stats.saved, stats.spilled, stats.restored
    assert (marked, offloaded) == (BLOCKS, BLOCKS)
    # one argument of each block; before torch 2.13 a checkpoint saves an empty tensor of its own beside
    assert skipped in (BLOCKS, 2 * BLOCKS)
    assert 0 < restored <= offloaded  # the last ones are still on the device when they are read
    assert group.moved_bytes == stats.spill_bytes == BLOCKS * INPUT_BYTES
    assert stats.restore_bytes == restored * INPUT_BYTES
