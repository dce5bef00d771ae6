"""QuantLinear and its adapter beside torch's linear on the expanded weight."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import OffloadError, QuantLinear, QuantLinearLoRA
from tests.unit.weights.streamed import dequantized


def pair(bias: bool = True, dtype: torch.dtype = torch.float32) -> tuple[QuantLinear, nn.Linear]:
    """Of it, and of torch's with the same elements."""
    torch.manual_seed(0)
    linear = nn.Linear(24, 40, bias=bias).to(dtype)
    linear.weight.data = linear.weight.data.t().contiguous().t()
    ours = QuantLinear(linear)
    assert ours.values.is_contiguous(), "whatever order the weight had"
    linear.weight.data = dequantized(linear.weight.data.contiguous())
    return ours, linear.requires_grad_(False)


@pytest.mark.req("Q-4")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24,), (5, 24), (3, 5, 24), (0, 24)])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_outputs_and_gradients_have_the_bits_of_torchs_linear(
    bias: bool, dtype: torch.dtype, shape: tuple[int, ...], turned: bool, checkpointed: bool
) -> None:
    ours, its = pair(bias, dtype)
    x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape)))) if turned else torch.randn(shape)
    inputs = [x.to(dtype).detach().requires_grad_() for _ in range(2)]
    ys = [
        checkpoint(module, each, use_reentrant=False) if checkpointed else module(each)
        for module, each in zip((ours, its), inputs, strict=True)
    ]
    assert torch.equal(*ys)
    seed = torch.randn(ys[0].shape).to(dtype)
    for y in ys:
        y.backward(seed)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_autocast_has_the_bits_of_torchs_linear() -> None:
    ours, its = pair()
    inputs = [torch.ones(2, 24, requires_grad=True) for _ in range(2)]
    with torch.autocast("cpu", torch.bfloat16):
        ys = [module(each) for module, each in zip((ours, its), inputs, strict=True)]
    for y in ys:
        y.float().square().sum().backward()
    assert torch.equal(*ys)
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_nothing_expanded_is_kept_for_the_backward() -> None:
    ours, _ = pair()
    y = ours(torch.randn(3, 24, requires_grad=True))
    kept: list[Any] = [y.grad_fn]
    seen = []
    while kept:
        node = kept.pop()
        seen += [getattr(node, name) for name in dir(node) if name.startswith("_raw_saved_mat")]
        kept += [next_node for next_node, _ in node.next_functions if next_node is not None]
    assert seen
    assert all(not isinstance(saved.data, Tensor) for saved in seen if saved.data is not None)


@pytest.mark.req("Q-4")
@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "float"])
def test_conversions_keep_int8_scales_and_bias(convert: str) -> None:
    ours, _ = pair()
    model = nn.Sequential(ours, nn.LayerNorm(40))
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    getattr(model, convert)()
    model.to(torch.bfloat16)
    assert {name: value.dtype for name, value in ours.state_dict().items()} == {
        "values": torch.int8,
        "scales": torch.float32,
        "bias": torch.float32,
    }
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())
    x = torch.randn(2, 24).bfloat16()
    weight = (ours.values.float() * ours.scales).bfloat16()
    assert torch.equal(ours(x), F.linear(x, weight, ours.bias.bfloat16()))


@pytest.mark.req("Q-4")
def test_the_base_has_no_gradient_and_the_adapter_has() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 40)
    module = QuantLinearLoRA(linear, rank=4, alpha=8)
    assert [name for name, _ in module.named_parameters()] == ["lora_A", "lora_B"]
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    x = torch.randn(3, 24, requires_grad=True)
    assert torch.equal(module(x), QuantLinear(linear)(x))  # B is zeros
    nn.init.normal_(module.lora_B)
    weight, bias = dequantized(linear.weight.data), linear.bias.detach()
    a, b = (each.detach().clone().requires_grad_() for each in (module.lora_A, module.lora_B))
    y = x.detach().clone().requires_grad_()
    expected = F.linear(y, weight, bias) + F.linear(F.linear(y, a), b) * 2.0
    found = module(x)
    assert torch.equal(found, expected)
    for each in (found, expected):
        each.square().sum().backward()
    for mine, its in ((x, y), (module.lora_A, a), (module.lora_B, b)):
        assert torch.equal(mine.grad, its.grad)
    assert all(not buffer.requires_grad and buffer.grad is None for buffer in module.buffers())


def test_copies_and_state_dicts() -> None:
    ours, _ = pair()
    other = QuantLinear(nn.Linear(24, 40))
    other.load_state_dict(copy.deepcopy(ours).state_dict())
    x = torch.randn(2, 24)
    assert torch.equal(other(x), ours(x))


def test_what_cannot_be() -> None:
    linear = nn.Linear(2, 3)
    with pytest.raises(ValueError, match="rank 0"):
        QuantLinearLoRA(linear, 0)
    linear.weight.data[1, 1] = float("nan")
    with pytest.raises(ValueError, match="inf or nan"):
        QuantLinear(linear)


def test_a_backward_reads_the_weight_of_its_forward() -> None:
    ours, its = pair()
    x = torch.randn(3, 24, requires_grad=True)
    (expected,) = torch.autograd.grad(its(x).sum(), x)
    y = ours(x)
    ours.values = torch.zeros_like(ours.values)  # another tensor
    ours.to("meta")
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    ours, _ = pair()
    y = ours(x)
    ours.load_state_dict(QuantLinear(nn.Linear(24, 40)).state_dict())
    with pytest.raises(OffloadError, match="between its forward and its backward"):
        y.sum().backward()


def test_its_bias_is_its_own() -> None:
    linear = nn.Linear(24, 40)
    ours = QuantLinear(linear)
    before = linear.bias.detach().clone()
    nn.init.ones_(linear.bias)
    assert torch.equal(ours.bias, before)


def test_it_goes_into_transforms() -> None:
    ours, its = pair()
    x = torch.randn(24)
    grads = [torch.func.grad(lambda x, module=module: module(x).sum())(x) for module in (ours, its)]
    assert torch.equal(*grads)
