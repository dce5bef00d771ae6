"""Selective checkpoints: the same bits, the bytes that were named, the order in which they are read, nothing left over."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from offload import (
    OffloadError,
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    selective_contexts,
    step_end,
)
from offload.device.sim import ExecutorName
from offload.transfer.record import RecordState
from tests.unit.groups.regions import (
    BLOCKS,
    FC1_BYTES,
    INPUT_BYTES,
    MM,
    ROWS,
    WIDTH,
    Block,
    Call,
    assert_bits,
    assert_empty,
    build_blocks,
    forward,
    gradients,
    kept,
    kept_in_group,
    let_go,
    plain,
    recomputed,
    source,
    train,
    train_step,
)
from tests.unit.groups.stack import EXECUTORS, build_manager, installed

aten = torch.ops.aten
CALLS = pytest.mark.parametrize("call", [kept, kept_in_group], ids=["no group", "in a group"])


def coming_labels(manager: PipelineOffloadManager) -> list[str]:
    """Of the chunk whose forward is over, in the order in which the prefetch would fetch them."""
    handler = manager.cur_forward_chunk()
    assert handler is not None
    handler.saved.complete()
    return [str(record.label) for reference in handler.saved.coming._records if (record := reference()) is not None]


@contextmanager
def noted_reads(manager: PipelineOffloadManager) -> Iterator[list[str]]:
    reads: list[str] = []
    manager.engine.on_read(lambda handle: reads.append(str(handle.record.label)))
    yield reads


# -- bits ---------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", EXECUTORS)
@CALLS
def test_loss_and_gradients_are_those_of_a_checkpoint_and_of_none(call: Call, executor: ExecutorName) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    assert_bits(expected, train(blocks, recomputed))
    with installed(build_manager(executor, max_spilling_bytes=1)):
        for _ in range(4):
            found, stats = train_step(blocks, call)
            assert_bits(expected, found)
        assert stats.restored > 0


@CALLS
def test_a_second_backward_over_a_retained_graph_gives_the_same_bits(call: Call, manager: PipelineOffloadManager) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    init_chunk_handler(None, None, 1)
    x = source()
    loss = forward(blocks, x, call)
    for _ in range(3):
        let_go(manager)
        loss.backward(retain_graph=True)
        assert_bits(expected, [loss.detach(), *gradients(blocks, x)])
    del loss
    step_end()
    assert_empty(manager)


@pytest.mark.parametrize("stays_by", ["size", "plan"])
def test_what_stays_is_given_again_as_a_tensor_of_its_own(stays_by: str, manager: PipelineOffloadManager) -> None:
    """A backward that keeps its recompute's graph (create_graph) must not find the next one's output in it. Too small to leave, it is in
    the region's keeping; where the plan keeps it, a record has it, whose own alias was given away and became a part of each graph."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    given: list[Tensor] = []

    def body(x: Tensor) -> Tensor:
        h = x @ weight
        given.append(h)
        return h.sin().tanh()

    if stays_by == "plan":
        init_chunk_handler(None, None, 1)
        handler = manager.cur_forward_chunk()
        assert handler is not None
        handler.stays = frozenset({0})
    else:
        init_chunk_handler(None, None, 10**6)  # elements
    x = source()
    y = kept(body, x)  # type: ignore[arg-type]
    assert [record.state for record in manager.living_records()] == [RecordState.RESIDENT] * (stays_by == "plan")
    first, second = (torch.autograd.grad(y.sum(), [x], create_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    forwards, once, twice = given
    assert len({id(forwards), id(once), id(twice)}) == 3
    assert forwards.data_ptr() == once.data_ptr() == twice.data_ptr()
    assert once.grad_fn is not twice.grad_fn
    plain_x = source()
    (expected,) = torch.autograd.grad(torch.autograd.grad(body(plain_x).sum(), [plain_x], create_graph=True)[0].sum(), [plain_x])
    assert torch.equal(expected, torch.autograd.grad(first.sum(), [x])[0])


@pytest.mark.parametrize("executor", EXECUTORS)
@CALLS
def test_the_two_halves_of_a_split_backward_both_find_what_was_kept(call: Call, executor: ExecutorName) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)[1:]
    with installed(build_manager(executor, max_spilling_bytes=1)) as manager:
        assert manager is not None
        for _ in range(3):
            manager.begin_chunk(0, 0)
            x = source()
            loss = forward(blocks, x, call)
            manager.end_forward(0, 0)
            manager.begin_backward(0, 0, "I")
            (input_grad,), groups = stage_backward_input([loss], None, [x], blocks.parameters())
            manager.end_backward(0, 0, "I")
            manager.begin_backward(0, 0, "W")
            stage_backward_weight(blocks.parameters(), groups)
            manager.end_backward(0, 0, "W")
            assert input_grad is not None
            x.grad = input_grad
            assert_bits(expected, gradients(blocks, x))
            del loss, groups
            stats = manager.step_end()
            assert stats.restored > 0
            assert_empty(manager)


def test_gradients_of_some_inputs_only_give_the_same_bits(manager: PipelineOffloadManager) -> None:
    blocks = build_blocks()
    weight = blocks[1].fc2.weight
    (expected,) = torch.autograd.grad(forward(blocks, source(), plain), [weight])
    init_chunk_handler(None, None, 1)
    loss = forward(blocks, source(), kept)
    let_go(manager)
    (found,) = torch.autograd.grad(loss, [weight])
    assert torch.equal(expected, found)


def test_under_autocast_the_products_are_kept_in_its_dtype(manager: PipelineOffloadManager) -> None:
    blocks = build_blocks()

    def cast(call: Call) -> list[Tensor]:
        x = source()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(blocks, x, call)
        let_go(manager)
        loss.backward()
        return [loss.detach(), *gradients(blocks, x)]

    expected = cast(plain)
    init_chunk_handler(None, None, 1)
    assert_bits(expected, cast(kept))
    stats = step_end()
    assert stats is not None
    assert stats.spill_bytes == BLOCKS * FC1_BYTES // 2


@pytest.mark.parametrize("outer_keeps", [False, True])
def test_nested_checkpoints_give_the_same_bits_and_keep_each_output_once(outer_keeps: bool, manager: PipelineOffloadManager) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)

    def both(inner_blocks: nn.Module, h: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            for block in blocks:
                x = kept(block, x)
            return x

        return checkpoint(body, h, use_reentrant=False, **({"context_fn": selective_contexts({MM})} if outer_keeps else {}))

    init_chunk_handler(None, None, 1)
    x = source()
    loss = forward([blocks], x, both)
    assert manager.engine.transfers.counts.spill_bytes == BLOCKS * FC1_BYTES + (BLOCKS - 1) * INPUT_BYTES * outer_keeps
    let_go(manager)
    with noted_reads(manager) as reads:
        coming = coming_labels(manager)
        loss.backward()
    assert list(dict.fromkeys(reads)) == coming
    assert_bits(expected, [loss.detach(), *gradients(blocks, x)])
    del loss
    step_end()
    assert_empty(manager)


class Attention(nn.Module):
    """Fused attention of two heads, whose operator returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=-1))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.tanh(self.out(y.transpose(1, 2).reshape(ROWS, WIDTH)))


def test_an_operator_with_several_outputs_keeps_them_all_with_their_strides(manager: PipelineOffloadManager) -> None:
    blocks = build_blocks(Attention)
    expected = train(blocks, plain)
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    init_chunk_handler(None, None, 1)
    x = source()
    loss = forward(blocks, x, lambda block, h: kept(block, h, {attention}))
    let_go(manager)
    loss.backward()
    assert_bits(expected, [loss.detach(), *gradients(blocks, x)])
    del loss
    stats = step_end()
    assert stats is not None
    logsumexp_bytes = 4 * ROWS * 2
    assert (stats.saved, stats.spill_bytes) == (2 * BLOCKS, BLOCKS * (INPUT_BYTES + logsumexp_bytes))
    assert stats.restore_bytes == stats.spill_bytes


def test_outputs_of_a_wrapper_subclass_leave_by_their_inner_tensors(manager: PipelineOffloadManager) -> None:
    weight = torch.randn(WIDTH, WIDTH)
    pair = TwoTensor(weight.clone(), 2 * weight).requires_grad_()

    def body(x: Tensor) -> Tensor:
        return torch.sin(x @ pair).tanh()

    def grads(call: Call) -> list[Tensor]:
        x = TwoTensor(source().detach(), source(2).detach()).requires_grad_()
        y = call(body, x)  # type: ignore[arg-type]
        let_go(manager)
        found = torch.autograd.grad(y.sum(), [x, pair])
        return [inner for grad in found for inner in (grad.a, grad.b)]  # type: ignore[attr-defined]

    expected = grads(plain)
    init_chunk_handler(None, None, 1)
    assert_bits(expected, grads(kept))
    stats = step_end()
    assert stats is not None
    assert (stats.saved, stats.spill_bytes, stats.restored) == (2, 2 * INPUT_BYTES, 2)


def test_an_operator_of_higher_order_in_the_region_is_a_call_like_others(manager: PipelineOffloadManager) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    q = torch.randn(1, 2, ROWS, WIDTH, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        y = x.detach()  # torch has no backward of it on the CPU
        return torch.tanh(flex_attention(y, y, y) * x)  # type: ignore[operator]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (expected,) = torch.autograd.grad(body(q).sum(), [q])
        for keep in ({torch.ops.higher_order.flex_attention}, {MM}):
            init_chunk_handler(None, None, 1)
            (found,) = torch.autograd.grad(checkpoint(body, q, use_reentrant=False, context_fn=selective_contexts(keep)).sum(), [q])
            assert torch.equal(expected, found)
            step_end()


# -- random numbers -------------------------------------------------------------------------------------------------------
class Dropping(nn.Module):
    """A kept dropout between others that are not kept."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.bernoulli(torch.full_like(x, 0.5))
        x, _ = torch.native_dropout(x * 1.5, 0.5, True)
        return torch.sigmoid(x * torch.bernoulli(torch.full_like(x, 0.5))) + x


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_a_kept_dropout_shifts_no_random_number_of_others(preserve_rng_state: bool, manager: PipelineOffloadManager) -> None:
    x = source()
    dropping = Dropping()

    def run(keep: bool) -> tuple[Tensor, Tensor]:
        torch.manual_seed(3)
        init_chunk_handler(None, None, 1)
        context = {"context_fn": selective_contexts({aten.native_dropout.default})} if keep else {}
        y = checkpoint(dropping, x, use_reentrant=False, preserve_rng_state=preserve_rng_state, **context)
        before = torch.get_rng_state()
        let_go(manager)
        (grad,) = torch.autograd.grad(y.sum(), [x])
        step_end()
        return grad, torch.equal(before, torch.get_rng_state())  # type: ignore[return-value]

    torch.manual_seed(3)
    (expected,) = torch.autograd.grad(dropping(x).sum(), [x])
    grad, untouched = run(keep=True)
    if preserve_rng_state:
        assert torch.equal(expected, grad)
        assert untouched
    else:  # the recompute draws other numbers, as it was told to; what it sets is not the forward's state
        assert not untouched
        state = torch.get_rng_state()
        run(keep=False)
        assert not torch.equal(state, torch.get_rng_state())  # a plain recompute draws the dropout's as well


# -- bytes ----------------------------------------------------------------------------------------------------------------
def test_what_leaves_is_what_was_kept_by_the_name_of_its_group(manager: PipelineOffloadManager) -> None:
    _, stats = train_step(build_blocks(), kept)
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * FC1_BYTES)
    assert manager.offload_summary_bytes == {"selective": (BLOCKS - 1) * FC1_BYTES}  # the last one read first stays: the margin


def test_in_a_group_kept_outputs_and_the_input_of_the_checkpoint_are_one_group(manager: PipelineOffloadManager) -> None:
    _, stats = train_step(build_blocks(), kept_in_group)
    assert (stats.saved, stats.spill_bytes) == (2 * BLOCKS, BLOCKS * (INPUT_BYTES + FC1_BYTES))
    assert manager.offload_summary_bytes == {"block": (BLOCKS - 1) * (INPUT_BYTES + FC1_BYTES)}


def test_the_last_outputs_of_a_region_are_kept_only_where_a_recompute_would_read_them(manager: PipelineOffloadManager) -> None:
    """Nothing is saved after fc2, so its output is not kept; with early_stop=False the recompute calls it again."""
    blocks = build_blocks()
    expected = train(blocks, plain)
    for early_stop in (True, False):
        found, stats = train_step(blocks, lambda block, h, early_stop=early_stop: kept(block, h, early_stop=early_stop))  # type: ignore[misc]
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
    step_end()


def test_a_recompute_saves_the_fetched_bytes_themselves(manager: PipelineOffloadManager) -> None:
    """What autograd saves in the recompute is the restored storage, not a copy of it; it is let go with its node."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    seen: list[int] = []

    def body(x: Tensor) -> Tensor:
        h = x @ weight
        seen.append(h.data_ptr())
        y = h.sin()
        saved = y.grad_fn._raw_saved_self if torch._C._current_graph_task_id() == -1 else y.grad_fn._saved_self  # type: ignore[union-attr]
        if isinstance(saved, Tensor):
            seen.append(saved.data_ptr())
        return y.tanh()

    init_chunk_handler(None, None, 1)
    y = kept(body, source() * 1.0)  # type: ignore[arg-type]
    let_go(manager)
    y.sum().backward()
    assert len(seen) == 3
    assert seen[1] == seen[2]
    stats = step_end()
    assert stats is not None
    assert (stats.restored, stats.restore_bytes) == (1, INPUT_BYTES)


@pytest.mark.parametrize("config", [{"activation_offload_fraction": 0.0}, {"max_spilling_bytes": 0}, {"host_limit_bytes": 0}])
def test_a_kept_output_that_stays_costs_no_copy(config: dict[str, Any]) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    with installed(build_manager(**config)) as manager:
        assert manager is not None
        for _ in range(2):
            found, stats = train_step(blocks, kept)
            assert_bits(expected, found)
        assert (stats.saved, stats.kept, stats.spill_bytes, stats.restore_bytes) == (BLOCKS, BLOCKS, 0, 0)


def test_small_outputs_stay_in_the_regions_own_keeping(manager: PipelineOffloadManager) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    init_chunk_handler(None, None, FC1_BYTES // 4 + 1)
    found = train(blocks, kept)
    stats = step_end()
    assert stats is not None
    assert stats.saved == 0
    assert_bits(expected, found)


def test_a_device_limit_holds_for_kept_outputs() -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    limit_bytes = 2 * FC1_BYTES
    with installed(build_manager(device_limit_bytes=limit_bytes)) as manager:
        assert manager is not None
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


# -- order ----------------------------------------------------------------------------------------------------------------
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
def test_the_coming_reads_are_blocks_in_reverse_and_each_in_the_order_of_its_forward(call: Call, manager: PipelineOffloadManager) -> None:
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
    assert places == [(str(block), str(slot)) for block in reversed(range(BLOCKS)) for slot in range(4 + inputs)]
    del loss
    step_end()


def test_what_a_recompute_reads_is_fetched_before_it_asks() -> None:
    """With a window of two outputs, nothing but the first read of the step is fetched on demand."""
    blocks = build_blocks(Long)
    with installed(build_manager(max_restoring_bytes=2 * INPUT_BYTES, piece_bytes=1, max_spilling_bytes=1)) as manager:
        assert manager is not None
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


# -- groups inside the region -----------------------------------------------------------------------------------------------
class Marked(Block):
    """Marks around the two products, inside the region."""

    delay = False

    def forward(self, x: Tensor) -> Tensor:
        h = group_start(self.norm(x), "fc1")
        h = F.gelu(group_commit(self.fc1(h), "fc1", delay_offload=self.delay))
        h = group_start(h, "fc2")
        return x + torch.tanh(group_commit(self.fc2(h), "fc2", delay_offload=self.delay))


@pytest.mark.parametrize("delay", [False, True])
def test_an_output_belongs_to_the_group_that_was_open_when_it_was_made(delay: bool, caplog: pytest.LogCaptureFixture) -> None:
    """fc1's output waits for a save that comes after its group's commit, and still goes there."""
    blocks = build_blocks(Marked)
    expected = train(blocks, plain)
    for block in blocks:
        block.delay = delay  # type: ignore[assignment]
    with installed(build_manager(piece_bytes=1 << 20)) as manager:
        assert manager is not None
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
        assert manager.offload_summary_bytes == {"fc1": (BLOCKS - 1) * FC1_BYTES, "fc2": (BLOCKS - 1) * INPUT_BYTES}
    assert caplog.records == []


# -- a change in place --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("late", [False, True], ids=["before the next save", "after it"])
def test_a_kept_output_that_is_changed_in_place_is_an_error_of_the_backward(late: bool, manager: PipelineOffloadManager) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def body(x: Tensor) -> Tensor:
        h = x @ weight
        y = h.detach().sin() * x if late else x
        h.add_(1.0)
        return (h * y).sin()

    init_chunk_handler(None, None, 1)
    y = kept(body, source() * 1.0)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    del y
    step_end()
    assert_empty(manager)


# -- nothing is left ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@CALLS
def test_a_graph_that_is_dropped_unread_leaves_nothing(call: Call, manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    loss = forward(build_blocks(), source(), call)
    assert manager.engine.transfers.device_bytes > 0
    del loss
    let_go(manager)
    assert_empty(manager)
    step_end()


@pytest.mark.usefixtures("no_collector")
@CALLS
def test_an_exception_in_the_forward_leaves_nothing_and_the_next_step_is_right(call: Call, manager: PipelineOffloadManager) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)

    class Failing(Block):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x).sin()
            raise ArithmeticError("on purpose")

    init_chunk_handler(None, None, 1)
    failing = Failing()
    try:
        forward([*blocks, failing], source(), call)
    except ArithmeticError:
        pass
    else:
        pytest.fail("the block did not fail")
    let_go(manager)
    assert_empty(manager)
    assert manager.keep_report.open_regions == 0
    step_end()
    found, stats = train_step(blocks, call)
    assert_bits(expected, found)
    assert stats.saved == BLOCKS * (1 + (call is kept_in_group))
    assert_empty(manager)


@pytest.mark.usefixtures("no_collector")
def test_a_graph_that_outlives_its_step_is_reported_and_holds_no_bytes(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    init_chunk_handler(None, None, 1)
    loss = forward(build_blocks(), source(), kept)
    step_end()
    assert_empty(manager)
    assert f"{BLOCKS} saved tensors ({BLOCKS * FC1_BYTES:,} bytes) whose backward has not run" in caplog.text
    with pytest.raises(OffloadError, match="was saved in a step that has ended"):
        loss.backward()


def test_a_kept_output_is_let_go_by_its_reader_when_it_was_fetched(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    loss = forward(build_blocks(), source(), kept)
    let_go(manager)
    states: list[RecordState] = []
    manager.engine.on_read(lambda handle: states.append(handle.record.state))
    loss.backward()
    assert states == [RecordState.SPILLED] * BLOCKS


# -- what does not leave ----------------------------------------------------------------------------------------------------------
def test_without_gradients_nothing_is_kept_and_nothing_said(manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        init_chunk_handler(None, None, 1)
        forward(build_blocks(), source(), kept)
    stats = step_end()
    assert stats is not None
    assert stats.saved == 0
    assert caplog.records == []


def test_switched_off_the_outputs_stay_and_nothing_is_said(manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    manager.disable_offload()
    found, stats = train_step(blocks, kept)
    assert_bits(expected, found)
    assert stats.saved == 0
    assert caplog.records == []


def test_without_a_chunk_the_outputs_stay_with_one_warning(manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    for _ in range(2):
        assert_bits(expected, train(blocks, kept))
        step_end()
    (record,) = caplog.records
    assert "no chunk is current" in record.message
    assert "init_chunk_handler()" in record.message
