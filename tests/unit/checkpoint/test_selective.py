"""Selective checkpoints: the same bits, whatever is kept, however the graph is read, and with random
numbers."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from offload import (
    PipelineOffloadManager,
    RecomputeDiffersError,
    init_chunk_handler,
    selective_contexts,
    step_end,
)
from offload.device.sim import ExecutorName
from offload.transfer.block import BlockState
from tests.loops import ended_step
from tests.unit.checkpoint.regions import (
    BLOCKS,
    CALLS,
    FC1_BYTES,
    INPUT_BYTES,
    MM,
    ROWS,
    WIDTH,
    Call,
    assert_bits,
    assert_empty,
    build_blocks,
    coming_labels,
    forward,
    gradients,
    kept,
    let_go,
    noted_reads,
    plain,
    recomputed,
    source,
    train,
    train_step,
)
from tests.unit.groups.stack import EXECUTORS, build_manager, installed

aten = torch.ops.aten


# -- bits ----------------------------------------------------------------------------------------------------
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
def test_a_second_backward_over_a_retained_graph_gives_the_same_bits(
    call: Call, manager: PipelineOffloadManager
) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)
    init_chunk_handler(None, None, 1)
    x = source()
    loss = forward(blocks, x, call)
    for _ in range(3):
        let_go(manager)
        loss.backward(retain_graph=True)
        assert_bits(expected, [loss.detach(), *gradients(blocks, x)])


@pytest.mark.parametrize("stays_by", ["size", "plan"])
def test_what_stays_is_given_again_as_a_tensor_of_its_own(
    stays_by: str, manager: PipelineOffloadManager
) -> None:
    """A backward that keeps its recompute's graph (create_graph) must not find the next one's output in it.
    Too small to leave, it is in the region's keeping; where the plan keeps it, a record has it, whose own
    alias was given away and became a part of each graph."""
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
    assert [record.state for record in manager.living_blocks()] == [BlockState.RESIDENT] * (
        stays_by == "plan"
    )
    first, second = (torch.autograd.grad(y.sum(), [x], create_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    forwards, once, twice = given
    assert len({id(forwards), id(once), id(twice)}) == 3
    assert forwards.data_ptr() == once.data_ptr() == twice.data_ptr()
    assert once.grad_fn is not twice.grad_fn
    plain_x = source()
    (expected,) = torch.autograd.grad(
        torch.autograd.grad(body(plain_x).sum(), [plain_x], create_graph=True)[0].sum(), [plain_x]
    )
    assert torch.equal(expected, torch.autograd.grad(first.sum(), [x])[0])


@pytest.mark.parametrize("executor", EXECUTORS)
@CALLS
def test_the_two_halves_of_a_split_backward_both_find_what_was_kept(
    call: Call, executor: ExecutorName
) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)[1:]
    with installed(build_manager(executor, max_spilling_bytes=1)) as manager:
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
    stats = ended_step()
    assert stats.spill_bytes == BLOCKS * FC1_BYTES // 2


@pytest.mark.parametrize("outer_keeps", [False, True])
def test_nested_checkpoints_give_the_same_bits_and_keep_each_output_once(
    outer_keeps: bool, manager: PipelineOffloadManager
) -> None:
    blocks = build_blocks()
    expected = train(blocks, plain)

    def both(inner_blocks: nn.Module, h: Tensor) -> Tensor:
        def body(x: Tensor) -> Tensor:
            for block in blocks:
                x = kept(block, x)
            return x

        return checkpoint(
            body, h, use_reentrant=False, **({"context_fn": selective_contexts({MM})} if outer_keeps else {})
        )

    init_chunk_handler(None, None, 1)
    x = source()
    loss = forward([blocks], x, both)
    assert (
        manager.engine.transfers.counts.spill_bytes
        == BLOCKS * FC1_BYTES + (BLOCKS - 1) * INPUT_BYTES * outer_keeps
    )
    let_go(manager)
    with noted_reads(manager) as reads:
        coming = coming_labels(manager)
        loss.backward()
    assert list(dict.fromkeys(reads)) == coming
    assert_bits(expected, [loss.detach(), *gradients(blocks, x)])


class Attention(nn.Module):
    """Fused attention of two heads, whose operator returns two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.view(1, ROWS, 2, WIDTH // 2).transpose(1, 2) for part in self.qkv(x).split(WIDTH, dim=-1)
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + torch.tanh(self.out(y.transpose(1, 2).reshape(ROWS, WIDTH)))


def test_an_operator_with_several_outputs_keeps_them_all_with_their_strides(
    manager: PipelineOffloadManager,
) -> None:
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
    stats = ended_step()
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
    stats = ended_step()
    assert (stats.saved, stats.spill_bytes, stats.restored) == (2, 2 * INPUT_BYTES, 2)


def test_an_operator_of_higher_order_in_the_region_is_a_call_like_others(
    manager: PipelineOffloadManager,
) -> None:
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
            (found,) = torch.autograd.grad(
                checkpoint(body, q, use_reentrant=False, context_fn=selective_contexts(keep)).sum(), [q]
            )
            assert torch.equal(expected, found)
            step_end()


# -- random numbers ------------------------------------------------------------------------------------------
class Dropping(nn.Module):
    """A kept dropout between others that are not kept."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * torch.bernoulli(torch.full_like(x, 0.5))
        x, _ = torch.native_dropout(x * 1.5, 0.5, True)
        return torch.sigmoid(x * torch.bernoulli(torch.full_like(x, 0.5))) + x


@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_a_kept_dropout_shifts_no_random_number_of_others(
    preserve_rng_state: bool, manager: PipelineOffloadManager
) -> None:
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
        differs = keep and not preserve_rng_state
        with pytest.raises(RecomputeDiffersError) if differs else nullcontext():
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
