"""The router: ties, order, what keeps experts equally used, and what a forward counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe import MixtureConfig, TopKRouter
from moe.router import _top_k, inverse_of, sorted_rows
from tests.unit.moe.mixtures import SMALL

EIGHT = MixtureConfig(dim=16, expert_hidden=8, experts=8, top_k=3)


def rows(tokens: int = 11, dim: int = 16) -> Tensor:
    return torch.randn(tokens, dim, generator=torch.Generator().manual_seed(1))


def drawn(config: MixtureConfig) -> TopKRouter:
    router = TopKRouter(config)
    torch.nn.init.normal_(router.gate.weight, generator=torch.Generator().manual_seed(2))
    return router


def test_ties_go_to_the_expert_of_the_lower_number() -> None:
    scores = torch.tensor([[0.25, 0.5, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25], [-0.0, 0.0, -1.0, -2.0]])
    assert _top_k(scores, 2).tolist() == [[1, 2], [0, 1], [0, 1]]


@pytest.mark.parametrize("k", [1, 3, 8])
def test_without_ties_it_is_torchs_choice(k: int) -> None:
    scores = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(_top_k(scores, k), scores.topk(k).indices)


def test_scores_that_are_no_numbers_still_choose_different_experts() -> None:
    chosen = _top_k(torch.full((4, 8), torch.nan), 3)
    assert chosen.sort().values.tolist() == [[0, 1, 2]] * 4


def test_rows_of_one_expert_stay_in_the_order_of_their_tokens() -> None:
    experts = torch.tensor([2, 0, 2, 1, 0, 2, 5])
    order, ends = sorted_rows(experts, 6)
    assert order.tolist() == [1, 4, 3, 0, 2, 5, 6]
    assert ends.tolist() == [2, 3, 6, 6, 6, 7]
    assert order.dtype is ends.dtype is torch.int32
    assert inverse_of(order)[order.long()].tolist() == list(range(7))
    many = torch.randint(0, 3, (100_000,), generator=torch.Generator().manual_seed(0))
    order, ends = sorted_rows(many, 3)
    for rows_of_one in order.tensor_split(ends[:-1].long()):
        assert bool((rows_of_one.diff() > 0).all())


def test_decisions_are_softmax_top_k_and_normalized() -> None:
    x = rows()
    router = drawn(EIGHT)
    routing = router(x)
    probs = (x @ router.gate.weight.t()).softmax(-1)
    top = probs.topk(3)
    assert torch.equal(routing.experts_TK, top.indices)
    torch.testing.assert_close(routing.weights_TK, top.values / top.values.sum(-1, keepdim=True))
    plain = drawn(EIGHT.with_(normalize=False))(x)
    torch.testing.assert_close(plain.weights_TK, top.values)
    counts = torch.bincount(top.indices.flatten(), minlength=8)
    assert routing.counts_PE.tolist() == [counts.tolist()]
    assert routing.ends_E.tolist() == counts.cumsum(0).tolist()


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_one(tokens: int) -> None:
    routing = drawn(EIGHT.with_(balance="loss"))(rows(tokens))
    assert routing.counts_PE.sum() == 3 * tokens
    routing.weights_TK.sum().backward()
    assert not routing.weights_TK.isnan().any()


def gate_gradient(router: TopKRouter, x: Tensor) -> Tensor:
    router.zero_grad()
    (router(x).weights_TK ** 2).sum().backward()
    return router.gate.weight.grad.clone()


@pytest.mark.parametrize("scale", [1.0, 0.25, torch.tensor(512.0)])
def test_the_backward_adds_the_gradient_of_the_auxiliary_loss(scale: float | Tensor) -> None:
    x, without, with_loss = rows(), drawn(EIGHT), drawn(EIGHT.with_(balance="loss", balance_rate=0.5))
    with_loss.loss_scale = scale
    found = gate_gradient(with_loss, x) - gate_gradient(without, x)
    weight = without.gate.weight.detach().requires_grad_()
    probs = (x @ weight.t()).softmax(-1)
    share = torch.bincount(probs.topk(3).indices.flatten(), minlength=8) / (11 * 3)
    loss = 0.5 * 8 * (share * probs.mean(0)).sum()
    (loss * scale).backward()
    assert with_loss.auxiliary_loss is not None
    torch.testing.assert_close(with_loss.auxiliary_loss, loss.detach())
    assert weight.grad is not None
    torch.testing.assert_close(found, weight.grad, rtol=1e-4, atol=1e-5 * float(scale))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_adds_the_auxiliary_loss_once_and_it_is_the_last_forwards(use_reentrant: bool) -> None:
    """Of two forwards whose backwards came in reverse, the first one's loss was left, by its recompute."""
    x = rows().requires_grad_()
    router = drawn(EIGHT.with_(balance="loss", balance_rate=0.5))
    expected = gate_gradient(router, x)
    router.zero_grad()
    weights = checkpoint(lambda x: router(x).weights_TK, x, use_reentrant=use_reentrant)
    router(rows(5))
    last = router.auxiliary_loss
    assert last is not None
    (weights**2).sum().backward()
    assert router.auxiliary_loss is last
    assert torch.equal(router.gate.weight.grad, expected)


def test_bias_moves_towards_equal_use_and_changes_the_choice_alone() -> None:
    config = EIGHT.with_(balance="bias", balance_rate=0.1, top_k=1)
    router, x = drawn(config), rows(400)
    first = router(x)
    counted = router.tokens_E
    assert torch.equal(counted, first.counts_PE[0])
    router.update_balance()
    assert router.tokens_E is None
    assert torch.equal(router.bias_E, 0.1 * (50 - counted).sign().float())
    for _ in range(30):
        routing = router(x)
        router.update_balance()
    assert int(routing.counts_PE.max()) < int(first.counts_PE.max())
    probs = (x @ router.gate.weight.t()).softmax(-1)
    torch.testing.assert_close(routing.weights_TK, torch.ones(400, 1))
    unnormalized = TopKRouter(config.with_(normalize=False))
    unnormalized.load_state_dict(router.state_dict())
    routing = unnormalized(x)
    torch.testing.assert_close(routing.weights_TK, probs.gather(1, routing.experts_TK))


def test_a_model_that_is_cast_keeps_the_bits_of_the_bias() -> None:
    router, x = drawn(EIGHT.with_(balance="bias")), rows()
    for _ in range(3):
        router(x)
        router.update_balance()
    router(x)
    bias, tokens = router.bias_E, router.tokens_E
    router.to(torch.bfloat16)
    assert router.gate.weight.dtype is torch.bfloat16
    assert router.tokens_E is not None
    assert torch.equal(router.bias_E, bias)
    assert torch.equal(router.tokens_E, tokens)
    with torch.device("meta"):
        unborn = TopKRouter(EIGHT.with_(balance="bias"))
    unborn.to(torch.bfloat16).to_empty(device="cpu").load_state_dict(router.state_dict())
    assert torch.equal(unborn.bias_E, bias)


def test_forwards_of_training_are_counted_and_no_others() -> None:
    router, x = drawn(EIGHT.with_(balance="bias")), rows().requires_grad_()
    checkpoint(lambda x: router(x).weights_TK, x, use_reentrant=False).sum().backward()
    router(x)
    with torch.no_grad():
        router(x)
    router.eval()
    router(x)
    assert int(router.tokens_E.sum()) == 2 * 11 * 3


def test_an_update_without_anything_counted_is_an_error() -> None:
    router, x = drawn(EIGHT.with_(balance="bias")), rows().requires_grad_()
    checkpoint(lambda x: router(x).weights_TK, x, use_reentrant=True).sum().backward()
    with pytest.raises(RuntimeError, match="before any training forward was counted"):
        router.update_balance()


def test_a_router_without_a_bias_has_nothing_to_update() -> None:
    router = drawn(SMALL.with_(dim=16, heads=2, kv_heads=1))
    router(rows())
    router.update_balance()
    assert router.tokens_E is None
    assert "bias_E" not in router.state_dict()
