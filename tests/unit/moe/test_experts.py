"""Grouped experts beside plain autograd, and the bytes that they save."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import GroupedExperts
from moe.dispatch import gathered_rows
from moe.experts import Rows
from moe.router import inverse_of, sorted_rows

E, D, F, T, K = 4, 16, 8, 10, 3
G, R = 2 * F, T * K


def layer(**options: Any) -> GroupedExperts:
    torch.manual_seed(0)
    experts = GroupedExperts(E, D, F, **options)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.5)
    return experts


def given(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Rows, Tensor]:
    """Tokens, the layout of K experts for each, and a weight for each row."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(T, E, generator=generator).topk(K).indices
    chosen[chosen == 2] = 3  # expert 2 has no rows
    order, ends = sorted_rows(chosen.flatten(), E)
    x = torch.randn(T, D, generator=generator).to(dtype).requires_grad_()
    weights = torch.rand(R, generator=generator).to(dtype).requires_grad_()
    return x, Rows(ends, order // K, inverse_of(order).view(T, K)), weights


def reference(experts: GroupedExperts, x: Tensor, rows: Rows, weights: Tensor | None) -> Tensor:
    """By autograd's own operators, expert by expert."""
    permuted, parts = x[rows.index_R.long()], []
    for expert, (start, end) in enumerate(itertools.pairwise([0, *rows.ends_E.tolist()])):
        gate, up = (permuted[start:end] @ experts.w1_EGD[expert].t()).chunk(2, -1)
        act = nn.functional.silu(gate) * up
        act = act if weights is None else act * weights[start:end, None]
        parts.append(act @ experts.w2_EDF[expert].t())
    return torch.cat(parts)


def run(experts: GroupedExperts, x: Tensor, rows: Rows, weights: Tensor | None, kept: str) -> Tensor:
    if kept == "unpermuted":
        y: Tensor = experts(x, rows, weights)
        return y
    assert rows.index_R is not None
    assert rows.rows_TK is not None
    permuted = gathered_rows(x, rows.index_R, rows.rows_TK)
    y = experts(permuted, Rows(rows.ends_E), weights)
    return y


def gradients(y: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    wanted = [each for each in tensors if each is not None]
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32).to(y.dtype)
    return list(torch.autograd.grad(y, wanted, grad))


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kept", ["permuted", "unpermuted"])
def test_gradients_are_those_of_plain_autograd(kept: str, recomputes: bool, weighted: bool) -> None:
    experts = layer(recomputes=recomputes).double()
    x, rows, weights = given(torch.float64)
    given_weights = weights if weighted else None
    wanted = (x, given_weights, *experts.parameters())
    y = run(experts, x, rows, given_weights, kept)
    expected = reference(experts, x, rows, given_weights)
    torch.testing.assert_close(y, expected)
    for found, other in zip(gradients(y, *wanted), gradients(expected, *wanted), strict=True):
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_kept_changes_no_bit(dtype: torch.dtype) -> None:
    x, rows, weights = given(dtype)
    found = []
    for recomputes, kept in itertools.product([False, True], ["permuted", "unpermuted"]):
        experts = layer(recomputes=recomputes).to(dtype)
        y = run(experts, x, rows, weights, kept)
        found.append([y, *gradients(y, x, weights, *experts.parameters())])
    for others in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], others, strict=True))


@pytest.mark.parametrize("frozen", ["w1_EGD", "w2_EDF", "x", "weights"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_what_needs_no_gradient_gets_none_and_the_others_keep_theirs(frozen: str, recomputes: bool) -> None:
    x, rows, weights = given()
    experts = layer(recomputes=recomputes)
    tensors = {"x": x, "weights": weights, **dict(experts.named_parameters())}
    expected = dict(zip(tensors, gradients(experts(x, rows, weights), *tensors.values()), strict=True))
    tensors[frozen].requires_grad_(False)
    experts(x, rows, weights).backward(torch.randn(R, D, generator=torch.Generator().manual_seed(3)))
    for name, tensor in tensors.items():
        if name == frozen:
            assert tensor.grad is None
        else:
            assert torch.equal(tensor.grad, expected[name])


def test_an_expanded_gradient_is_taken() -> None:
    x, rows, weights = given(torch.bfloat16)
    experts = layer().to(torch.bfloat16)
    y = experts(x, rows, weights)
    (found,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad(experts(x, rows, weights), x, torch.ones_like(y))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("recomputes", [False, True])
def test_no_rows_at_all(recomputes: bool) -> None:
    experts = layer(recomputes=recomputes)
    x = torch.zeros(0, D, requires_grad=True)
    y = experts(x, Rows(torch.zeros(E, dtype=torch.int32)), torch.zeros(0))
    y.sum().backward()
    assert y.shape == (0, D)
    for parameter in experts.parameters():
        assert not parameter.grad.any()


def test_weights_of_another_dtype_are_cast_and_get_gradients_of_their_own() -> None:
    x, rows, weights = given(torch.bfloat16)
    experts = layer()
    y = experts(x, rows, weights)
    assert y.dtype is torch.bfloat16
    found = gradients(y, *experts.parameters())
    same = layer().to(torch.bfloat16)
    expected = gradients(same(x, rows, weights), *same.parameters())
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one, other.float())
    assert saved_bytes(experts, "permuted", torch.bfloat16) == saved_bytes(same, "permuted", torch.bfloat16)


def saved_bytes(experts: GroupedExperts, kept: str, dtype: torch.dtype) -> int:
    """Of storages that are no parameter's."""
    x, rows, weights = given(dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in experts.parameters()}
    storages: dict[int, int] = {}
    held: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(experts, x, rows, weights, kept)
    return sum(storages.values())


@pytest.mark.req("S3-56")
@pytest.mark.parametrize("kept", ["permuted", "unpermuted"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_saved_bytes_are_the_input_the_rows_weights_and_h(recomputes: bool, kept: str) -> None:
    size = 2
    expected = size * D * (T if kept == "unpermuted" else R) + size * R + (0 if recomputes else size * R * G)
    experts = layer(recomputes=recomputes).to(torch.bfloat16)
    assert saved_bytes(experts, kept, torch.bfloat16) == expected
