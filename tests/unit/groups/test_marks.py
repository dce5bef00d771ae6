"""Marks: the tensor itself comes back, autograd's graph is what it is without them, and a backward tells the
chunk whose group it comes to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import (
    PipelineOffloadManager,
    backward_record,
    forward_record,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
)
from offload.marks import is_graph_capturing
from offload.saved.filters import is_parameter


class Event:
    def __init__(self) -> None:
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1


def in_group(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = group_start(x, "a")
    with offload_hooks():
        y = layer(x)
    return group_commit(y, "a")


@pytest.mark.req("S2-83", "S2-84", "S2-89")
def test_a_mark_returns_its_tensor_and_leaves_the_graph_as_it_is(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = torch.randn(4, 6, requires_grad=True)
    for tensor in (x, x.mul(1), x.mul(1).t(), x.mul(1).chunk(2)[0], torch.ones(3, dtype=torch.int64)):
        node, version = tensor.grad_fn, tensor._version
        assert group_start(tensor, "a") is tensor
        assert group_commit(tensor, "a") is tensor
        assert tensor.grad_fn is node
        assert tensor._version == version
    y = x.mul(1)
    assert backward_record(y, Event()) is y


def test_gradients_of_a_residual_that_is_read_outside_of_its_group_add_up_as_without_marks(
    manager: PipelineOffloadManager,
) -> None:
    """A node between the input and its layers adds their gradients up before the residual's: other bits."""
    torch.manual_seed(1)
    layers = [nn.Linear(64, 64) for _ in range(3)]

    def gradient(marks: bool) -> Tensor:
        x = torch.linspace(-1, 1, 8 * 64).view(8, 64).requires_grad_()
        h = x.sin()
        inner = group_start(h, "a") if marks else h
        with offload_hooks():
            y = sum((layer(inner).tanh() for layer in layers), start=torch.zeros(()))
        y = group_commit(y, "a") if marks else y
        (h.exp() + y * h).sum().backward()
        assert x.grad is not None
        return x.grad

    expected = gradient(marks=False)
    init_chunk_handler(None, None, 1)
    assert torch.equal(gradient(marks=True), expected)
    assert manager.step_end().spilled > 0


@pytest.mark.parametrize("part", [slice(None), slice(0, 4)])
@pytest.mark.parametrize("writer", ["marked", "original"])
def test_a_write_in_place_to_a_marked_tensor_has_the_gradient_that_it_has_without(
    part: slice, writer: str, manager: PipelineOffloadManager
) -> None:
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def gradient(marks: bool) -> Tensor:
        layer.zero_grad()
        base = layer(x)
        view = base[:, part] if part.stop else base
        marked = group_start(view, "a") if marks else view
        (marked if writer == "marked" else view).tanh_()
        marked = group_commit(marked, "a") if marks else marked
        (base.pow(2).sum() + marked.sin().sum()).backward()
        return layer.weight.grad.clone()

    init_chunk_handler(None, None, 1)
    assert torch.equal(gradient(marks=True), gradient(marks=False))


@pytest.mark.req("S2-84")
def test_the_gradient_of_a_group_s_output_says_which_chunk_is_read(manager: PipelineOffloadManager) -> None:
    outputs = []
    for _ in range(2):
        init_chunk_handler(None, None, 1)
        # a group that saves nothing: no read tells
        outputs.append(in_group(torch.neg, torch.randn(64, requires_grad=True) * 1.0))
    seen: list[int] = []
    for number in (1, 0):
        outputs[number].register_hook(lambda grad: None)

        class Watch(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, tensor: Tensor) -> Tensor:
                return tensor.clone()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                current = manager.cur_backward_chunk()
                seen.append(-1 if current is None else current.id.microbatch)
                return grad

        Watch.apply(outputs[number]).sum().backward()
        current = manager.cur_backward_chunk()
        seen.append(current.id.microbatch)
    assert seen == [-1, 1, 1, 0]


def test_hooks_that_are_entered_once_more_are_taken_out_once_each(manager: PipelineOffloadManager) -> None:
    """Also where no manager was there at one of the entries, and as a decorator."""
    hooks = offload_hooks()
    init_chunk_handler(None, None, 1)
    group_start(torch.ones(1), "a")
    PipelineOffloadManager.OFFLOAD_MGR = None
    hooks.__enter__()
    PipelineOffloadManager.OFFLOAD_MGR = manager
    with hooks:
        assert manager.engine.hooks.innermost() is not None
        PipelineOffloadManager.OFFLOAD_MGR = None
        with hooks:
            pass
        assert manager.engine.hooks.innermost() is not None
        PipelineOffloadManager.OFFLOAD_MGR = manager
    assert manager.engine.hooks.innermost() is None
    hooks.__exit__(None, None, None)

    @offload_hooks()
    def layer(x: Tensor) -> Tensor:
        return x * x

    group_commit(layer(torch.randn(64, requires_grad=True)), "a").sum().backward()
    assert manager.step_end().saved == 1


@pytest.mark.usefixtures("manager")
def test_hooks_of_an_output_that_is_a_leaf_or_needs_no_gradient_are_none() -> None:
    init_chunk_handler(None, None, 1)
    leaf = torch.randn(3, requires_grad=True)
    for output in (leaf, torch.ones(3)):
        group_start(leaf, "a")
        assert group_commit(output, "a") is output
    leaf.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(3))  # type: ignore[arg-type]


def test_node_of_a_mark_does_not_confuse_the_search_for_parameters(manager: PipelineOffloadManager) -> None:
    """node.name() of a Function is whatever its forward stored as ctx.name: once a string, and calling it
    ended the forward."""

    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: Tensor) -> Tensor:
            ctx.name = "torch::autograd::AccumulateGrad"
            return tensor * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    parameter = nn.Parameter(torch.randn(4, 4))
    assert is_parameter(parameter.bfloat16().t())
    assert not is_parameter(Named.apply(parameter))
    init_chunk_handler(None, None, 1)
    x = group_start(torch.randn(4, requires_grad=True), "a")
    x = group_start(Named.apply(group_commit(x, "a")), "b")
    with offload_hooks():
        y = x * x
    group_commit(y, "b").sum().backward()
    assert manager.step_end().saved == 1


@pytest.mark.req("S2-88")
def test_forward_record_orders_compute_after_the_offloads_so_far(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = group_start(torch.randn(64, requires_grad=True), "a")
    with offload_hooks():
        y = x * x
    group_commit(y, "a")
    device, event = manager.engine.device, Event()
    spilled = device.record(device.d2h)
    assert not device.poll(spilled)  # copies are late
    forward_record(event)
    assert device.poll(spilled)
    assert event.recorded == 1


@pytest.mark.req("S2-89")
def test_backward_record_is_an_identity_whose_backward_orders_compute_after_the_reloads(
    manager: PipelineOffloadManager,
) -> None:
    device, event = manager.engine.device, Event()
    x = torch.randn(3, requires_grad=True)
    y = backward_record(x, event)
    assert torch.equal(y, x)
    assert event.recorded == 0
    home, host = device.empty(8), device.host_memory(8, 4096).pieces[0]
    device.wait(device.h2d, device.record(device.compute), "allocate")
    device.copy(device.h2d, [(home, host)])
    reloaded = device.record(device.h2d)
    y.backward(torch.ones(3))
    assert device.poll(reloaded)
    assert event.recorded == 1
    assert torch.equal(x.grad, torch.ones(3))  # type: ignore[arg-type]


@pytest.mark.req("S3-10")
def test_nothing_is_captured_without_cuda() -> None:
    if not torch.cuda.is_available():
        assert is_graph_capturing() is False
