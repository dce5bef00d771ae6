"""Recomputed blocks in models of other makes: frozen, with adapters, used again, with kept outputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.checkpoint.decisions import default_operators
from offload.checkpoint.hidden_states import HIDDEN_STATES
from offload.checkpoint.selective import contexts_for
from tests.loops import ended_step
from tests.unit.checkpoint.recomputed import (
    BLOCKS,
    INPUT_BYTES,
    ROWS,
    WIDTH,
    Block,
    assert_bits,
    build,
    compared,
    recomputed,
    source,
    train,
    values,
)
from tests.unit.checkpoint.regions import FC1_BYTES

Manager = PipelineOffloadManager


def test_weights_that_are_partly_frozen(manager: Manager) -> None:
    model = build()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].fc1.requires_grad_(False)  # type: ignore[union-attr]
    compared(model, manager)
    # and where the first blocks have nothing to do
    x = source().detach()
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        model(x).sum().backward()
    stats = ended_step()
    assert stats.saved == BLOCKS - 1  # the first block is frozen, and so is its input
    assert_bits(values(plain, source()), values(model, source()))


def test_a_model_with_lora_adapters(manager: Manager) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["fc1", "fc2"], lora_dropout=0.25, init_lora_weights=False)
    model = peft.get_peft_model(build(), config)
    plain = copy.deepcopy(model)
    blocks = list(model.base_model.model.blocks)
    expected = train(plain)
    with recomputed(blocks, manager):
        init_chunk_handler(None, None, 1)
        found = train(model)
    stats = ended_step()
    assert_bits(expected, found)
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * INPUT_BYTES)


class Inner(nn.Module):
    """Its caller adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


def test_where_the_caller_uses_the_input_again_gradients_add_up_as_before(manager: Manager) -> None:
    model = build(Inner)
    plain = copy.deepcopy(model)
    expected = train(plain)
    with recomputed([block.inner for block in model.blocks], manager):  # type: ignore[misc]
        init_chunk_handler(None, None, 1)
        found = train(model)
    step_end()
    assert_bits(expected, found)


@pytest.mark.req("S4-36")
def test_with_a_selective_context_the_input_and_the_kept_outputs_leave_by_names_of_their_own(
    manager: Manager,
) -> None:
    model = build()
    keep = contexts_for(default_operators(), "selective", lambda: manager)
    stats = compared(model, manager, steps=3, context_fn=keep)
    assert (stats[0].saved, stats[0].spill_bytes) == (2 * BLOCKS, BLOCKS * (INPUT_BYTES + FC1_BYTES))
    assert manager.step_offload_bytes == {
        # here the plan keeps what is read first
        HIDDEN_STATES: (BLOCKS - 1) * INPUT_BYTES,
        "selective": (BLOCKS - 1) * FC1_BYTES,
    }


def test_beside_kept_outputs_the_caps_in_bytes_alone_bound_what_is_on_its_way(manager: Manager) -> None:
    """One lane carries both: to wait for an input would be to wait for the outputs before it."""
    model = build()
    keep = contexts_for(default_operators(), "selective", lambda: manager)
    with recomputed(list(model.blocks), manager, keep):
        init_chunk_handler(None, None, 1)
        y = model(source())
        assert manager.engine.transfers.in_flight() == (2 * BLOCKS, 0)
        y.sum().backward()


def test_by_default_matrix_products_and_attention_are_kept(manager: Manager) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(1, ROWS, 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, -1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).tanh()
            return x + y.transpose(1, 2).reshape(x.size())

    model = build(Attention, count=2)
    keep = contexts_for(default_operators(), "selective", lambda: manager)
    [stats] = compared(model, manager, context_fn=keep)
    names = {str(operator) for operator in default_operators()}
    assert {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"} <= names
    assert "aten._scaled_dot_product_flash_attention.default" in names
    log_sums = 4 * 2 * ROWS  # a number for each head and row
    assert stats.spill_bytes == 2 * (INPUT_BYTES + 3 * INPUT_BYTES + INPUT_BYTES + log_sums)
