"""What a traced layer saves, computes and needs, against numbers derived by hand and torch's own
checkpoints."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from parallel.dry_run.costs import Piece, piece_of, seconds_of
from parallel.dry_run.models import KNOWN, ModelShape
from parallel.dry_run.rates import GPUS
from parallel.dry_run.reference import Cut, Embedding, Head, Layer
from parallel.dry_run.trace import trace, trace_halves

T, D, F, Q, KV = 16384, 4096, 14336, 32 * 128, 8 * 128  # W2's layer: tokens, widths
W2 = ModelShape(
    name="w2", layers=32, hidden=D, heads=32, kv_heads=8, head_dim=128, ffn=F, vocabulary=256, rotary=False
)
H200 = GPUS["h200"]


def rows(tokens: int, width: int) -> Tensor:
    return torch.empty(tokens, width, dtype=torch.bfloat16, device="meta")


def piece(model: ModelShape, cut: Cut, kind: Any = "dense") -> Piece:
    layer, make = Layer(model, cut, kind), partial(rows, cut.tokens // cut.tp, model.hidden)
    return piece_of(kind, trace(layer, make), trace(layer, make, recompute=True), H200, gpus_per_host=8)


def test_a_layer_saves_what_a_pencil_says() -> None:
    seen = trace(Layer(W2, Cut(sequence=T)), partial(rows, T, D))
    wide = 2 * T * (D + D + Q + 2 * KV + Q + D + D)  # input, norm, q, k, v, attention, residual, norm
    gated = 2 * T * 4 * F  # gate, up, silu(gate), the product
    small = 4 * T * (2 + 2 + 32) + 2 * 8 + 8  # each norm's mean and rstd, attention's sums, its random state
    assert seen.saved_bytes == wide + gated + small
    assert seen.input_bytes == 2 * T * D
    assert seen.parameters == 2 * D + D * Q + 2 * D * KV + Q * D + 3 * D * F


def test_flops_are_those_of_the_products_and_half_of_the_square_of_attention() -> None:
    seen = trace(Layer(W2, Cut(sequence=T)), partial(rows, T, D))
    products = 2 * T * (D * Q + 2 * D * KV + Q * D + 3 * D * F)
    attention = 4 * T * T * Q // 2
    assert sum(call.flops for call in seen.forward) == products + attention
    assert sum(call.flops for call in seen.backward) == 2 * products + 5 * attention // 2


def test_a_backward_needs_gradients_of_both_factors_while_their_product_is_taken_apart() -> None:
    """The product of silu(gate) and up is saved by the last linear, whose backward frees it. Then live: the
    gradient of the output, that of the product, and those of its two factors."""
    seen = trace(Layer(W2, Cut(sequence=T)), partial(rows, T, D))
    assert seen.backward_working_bytes == 2 * T * D + 2 * T * F * (3 - 1)
    # where what was read is gone: the product's room is filled, and both factors are read
    assert seen.moving_working_bytes == 2 * T * D + 2 * T * F * (3 + 2)


def test_the_halves_of_a_split_backward_are_torchs_own() -> None:
    """The W makes the gradients of weights, and runs both norms once more. For it torch keeps the gradients
    of what products and norms make: the layer's output, the attention's, both norms', q, k, v, gate and
    up."""
    make = partial(rows, T, D)
    plain, halves = trace(Layer(W2, Cut(sequence=T)), make), trace_halves(Layer(W2, Cut(sequence=T)), make)
    products = [call for call in plain.forward if call.operator == "aten.mm.default"]
    weights = [call for call in halves.weight if call.operator == "aten.mm.default"]
    assert sum(call.flops for call in weights) == sum(call.flops for call in products)
    assert sum(call.flops for call in (*halves.input, *halves.weight)) == sum(
        call.flops for call in plain.backward
    )
    norms = [sum("norm" in call.operator for call in calls) for calls in (halves.input, halves.weight)]
    assert norms == [2, 2]
    # both norms' inputs, outputs and two numbers a row; what the attention and the last product made
    assert halves.read_bytes == 2 * T * (5 * D + F) + 4 * 4 * T
    # what linears read, but for what the attention made, whose own backward reads it
    assert halves.passed_bytes == 2 * T * (2 * D + F)
    assert halves.held_bytes == 2 * T * (5 * D + 2 * KV + 2 * F)


def test_a_checkpoint_needs_what_it_makes_again_and_what_a_plain_backward_needs() -> None:
    plain = trace(Layer(W2, Cut(sequence=T)), partial(rows, T, D))
    again = trace(Layer(W2, Cut(sequence=T)), partial(rows, T, D), recompute=True)
    level = piece(W2, Cut(sequence=T)).menu[-1]
    assert level.saved_bytes == again.saved_bytes == plain.input_bytes
    expected = level.made_again_bytes + plain.backward_working_bytes
    assert again.backward_working_bytes == pytest.approx(expected, rel=1e-3)
    ran_again = [seconds_of(call, H200, 8) for call in plain.forward[: plain.last_saving_call + 1]]
    assert level.recompute_s == pytest.approx(sum(ran_again))
    assert plain.forward[-2].operator == "aten.mm.default"  # the last product makes nothing that is saved
    assert plain.last_saving_call == len(plain.forward) - 3


def test_a_selective_level_saves_and_needs_what_torchs_own_selective_checkpoint_does() -> None:
    kept = {torch.ops.aten.mm.default, torch.ops.aten._scaled_dot_product_flash_attention.default}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    layer = Layer(W2, Cut(sequence=T))
    make = partial(rows, T, D)
    plain = trace(layer, make)
    torchs = trace(
        layer, make, recompute=True, context_fn=partial(create_selective_checkpoint_contexts, policy)
    )
    level = piece(W2, Cut(sequence=T)).selective
    attention = 2 * T * Q + 4 * T * 32 + 2 * 8 + 8
    assert level.saved_bytes == 2 * T * (D + Q + 2 * KV + D + 2 * F) + attention
    # torch's keeps the last product's output too, which a recompute never comes to
    needs = level.made_again_bytes + plain.backward_working_bytes
    assert torchs.backward_working_bytes == pytest.approx(needs, rel=0.15)
    known = piece(W2, Cut(sequence=T))
    assert torchs.forward_working_bytes == pytest.approx(
        known.forward_bytes(level) - plain.input_bytes, rel=0.1
    )
    assert known.forward_bytes(known.menu[0]) == plain.forward_working_bytes + plain.input_bytes


def test_each_level_saves_less_than_the_one_before_and_costs_more_for_a_byte() -> None:
    for name, kind in (("llama3-70b", "dense"), ("mixtral-8x7b", "moe"), ("deepseek-v3", "moe")):
        menu = piece(KNOWN[name], Cut(sequence=4096, tp=4), kind).menu
        rates = [
            (less.recompute_s - more.recompute_s) / (more.saved_bytes - less.saved_bytes)
            for more, less in pairwise(menu)
        ]
        assert len(menu) > 2
        assert rates == sorted(rates)
        assert rates[0] > 0


def test_tensor_parallelism_cuts_weights_and_sends_rows_at_four_places() -> None:
    whole, cut = piece(W2, Cut(sequence=T)), piece(W2, Cut(sequence=T, tp=4))
    norms = 2 * D
    assert cut.parameters == norms + (whole.parameters - norms) // 4
    # forward: gather and sum, twice; backward: their mirrors
    assert cut.sent_bytes == 8 * (2 * T * D * 3 // 4)
    # the gathered rows are saved whole, once for the attention and once for the MLP; all else is a quarter
    gathered = 2 * 2 * T * D
    assert cut.saved_bytes == pytest.approx((whole.saved_bytes - gathered) / 4 + gathered, rel=0.03)


def test_experts_over_ranks_hold_their_part_and_send_each_token_as_often_as_it_is_chosen() -> None:
    model, sequence = KNOWN["mixtral-8x7b"], 4096
    one = trace(Layer(model, Cut(sequence=sequence), "moe"), partial(rows, sequence, model.hidden))
    four = trace(Layer(model, Cut(sequence=sequence, ep=4), "moe"), partial(rows, sequence, model.hidden))
    experts = 3 * model.experts * model.hidden * model.expert_ffn
    assert one.parameters - four.parameters == experts * 3 // 4
    sent = [call for call in four.forward if call.ranks]
    assert [call.touched_bytes for call in sent] == [2 * model.hidden * sequence * 2] * 2
    assert sum(call.flops for call in one.forward) == sum(call.flops for call in four.forward)


def test_a_head_saves_its_logits_in_float32_and_an_embedding_its_tokens() -> None:
    model, cut = KNOWN["llama3-8b"], Cut(sequence=2048)
    head = trace(Head(model, cut), partial(rows, 2048, model.hidden))
    logits = 4 * 2048 * model.vocabulary
    assert head.saved_bytes == pytest.approx(logits + 2 * 2 * 2048 * model.hidden, rel=1e-3)
    tokens = trace(Embedding(model, cut), lambda: torch.empty(2048, dtype=torch.long, device="meta"))
    assert tokens.saved_bytes == 8 * 2048


def test_a_real_module_is_traced_on_the_device_it_is_on() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    seen = trace(model, lambda: torch.randn(4, 8))
    assert seen.saved_bytes == 4 * 4 * (8 + 16 + 16)
    assert [call.operator for call in seen.forward] == [
        "aten.addmm.default", "aten.gelu.default", "aten.addmm.default",
    ]  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_every_known_model_has_the_parameters_of_its_name(name: str) -> None:
    """Billions: those of the publisher, but for tables that both ends hold."""
    published = {
        "llama3-8b": 8.03, "llama3-70b": 70.6, "llama3-405b": 405.9, "qwen3-8b": 8.19, "qwen3-32b": 32.8,
        "mixtral-8x7b": 46.7, "deepseek-v3": 671.0, "gpt3-175b": 174.6,
    }  # fmt: skip
    model, cut = KNOWN[name], Cut(sequence=256)
    kinds = [model.layer_kind(layer) for layer in range(model.layers)]
    of_kind = {kind: sum(p.numel() for p in Layer(model, cut, kind).parameters()) for kind in set(kinds)}
    ends = [sum(p.numel() for p in module(model, cut).parameters()) for module in (Embedding, Head)]
    total = sum(of_kind[kind] for kind in kinds) + (ends[0] if model.tied else sum(ends))
    assert total / 1e9 == pytest.approx(published[name], rel=0.005)
