"""The marks as nodes of autograd's graph: identities, and what their forward and backward tell the
handler."""

from __future__ import annotations

import inspect
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
from offload.groups.autograd import (
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
    apply_mark,
)
from offload.groups.graphs import is_graph_capturing
from offload.marks import FineGrainedOffloadingBackwardRecordFunction
from offload.saved.filters import is_parameter


class Handler:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_group_start_forward(self, name: str) -> None:
        self.told.append(("start forward", name))

    def on_group_start_backward(self) -> None:
        self.told.append("start backward")

    def commit(self, name: str, forced: Any, delay: Any) -> None:
        self.told.append(("commit forward", name, forced, delay))

    def on_group_commit_backward(self, name: str) -> None:
        self.told.append(("commit backward", name))


class Event:
    def __init__(self) -> None:
        self.recorded = 0

    def record(self) -> None:
        self.recorded += 1


@pytest.mark.req("S2-90")
def test_marks_have_static_forwards_and_backwards_of_the_listed_signatures() -> None:
    signatures = {
        FineGrainedOffloadingGroupStartFunction: ["ctx", "tensor", "cpu_offload_handler", "name"],
        FineGrainedOffloadingGroupCommitFunction: [
            "ctx",
            "tensor",
            "cur_forward_chunk",
            "name",
            "forced_released_tensors",
            "delay_offload",
        ],
        FineGrainedOffloadingBackwardRecordFunction: ["ctx", "tensor", "event"],
    }
    for mark, forward in signatures.items():
        assert issubclass(mark, torch.autograd.Function)
        assert isinstance(inspect.getattr_static(mark, "forward"), staticmethod)
        assert isinstance(inspect.getattr_static(mark, "backward"), staticmethod)
        assert list(inspect.signature(mark.forward).parameters) == forward
        assert list(inspect.signature(mark.backward).parameters) == ["ctx", "grad_output"]


@pytest.mark.req("S2-83", "S2-84", "S2-90")
def test_marks_tell_the_handler_in_both_directions_and_pass_the_gradient() -> None:
    handler, forced = Handler(), [torch.ones(1)]
    x = torch.randn(3, requires_grad=True)
    y = apply_mark(FineGrainedOffloadingGroupStartFunction, x, handler, "a")
    z = apply_mark(FineGrainedOffloadingGroupCommitFunction, y * 2, handler, "a", forced, True)
    assert handler.told == [("start forward", "a"), ("commit forward", "a", forced, True)]
    z.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert handler.told[2:] == [("commit backward", "a"), "start backward"]
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 6.0]))  # type: ignore[arg-type]


MARKS: dict[str, tuple[Any, ...]] = {
    "start": (FineGrainedOffloadingGroupStartFunction, Handler(), "a"),
    "commit": (FineGrainedOffloadingGroupCommitFunction, Handler(), "a", None, False),
    "record": (FineGrainedOffloadingBackwardRecordFunction, Event()),
}


@pytest.mark.req("S2-83", "S2-84", "S2-89")
@pytest.mark.parametrize("mark", MARKS)
def test_marked_tensor_is_the_same_bytes_at_the_same_version_and_a_write_moves_both(mark: str) -> None:
    for x in (torch.randn(4, 6, requires_grad=True).mul(1), torch.randn(6, 4, requires_grad=True).mul(1).t()):
        marked = apply_mark(MARKS[mark][0], x, *MARKS[mark][1:])
        assert (marked.data_ptr(), marked.stride(), marked.dtype, marked.requires_grad) == (
            x.data_ptr(),
            x.stride(),
            x.dtype,
            True,
        )
        assert x._version == marked._version == 0
        marked.add_(1)  # a later in-place operation works, and both see it
        assert x._version == marked._version == 1


def test_committed_tensor_is_no_view_for_split_backwards_detach_it_at_the_end_of_a_stage() -> None:
    committed = apply_mark(
        MARKS["commit"][0], torch.randn(4, requires_grad=True).mul(1), *MARKS["commit"][1:]
    )
    assert not committed._is_view()
    committed.detach_()


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("part", [slice(None), slice(0, 4)])
@pytest.mark.parametrize("writer", ["marked", "original"])
def test_a_write_through_a_mark_counts_for_whoever_reads_the_original(
    mark: str, part: slice, writer: str
) -> None:
    """The mark was an alias that autograd did not know: the write was missing from the original's gradient,
    which was 167.1 where it is 150.4."""
    layer = nn.Linear(8, 8)
    x = torch.randn(4, 8)

    def gradient(marks: bool) -> Tensor:
        layer.zero_grad()
        base = layer(x)
        view = base[:, part] if part.stop else base
        marked = apply_mark(MARKS[mark][0], view, *MARKS[mark][1:]) if marks else view
        (marked if writer == "marked" else view).tanh_()
        (base.pow(2).sum() + marked.sin().sum()).backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    assert torch.equal(gradient(marks=True), gradient(marks=False))


@pytest.mark.parametrize("mark", MARKS)
def test_a_write_to_a_marked_leaf_is_torchs_error_as_without_the_mark(mark: str) -> None:
    leaf = torch.randn(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        apply_mark(MARKS[mark][0], leaf, *MARKS[mark][1:]).relu_()


@pytest.mark.parametrize("mark", MARKS)
def test_marks_of_a_view_of_several_refuse_the_write_that_torch_refuses(mark: str) -> None:
    first, _ = torch.randn(4, requires_grad=True).mul(1).chunk(2)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        apply_mark(MARKS[mark][0], first, *MARKS[mark][1:]).relu_()


def test_marked_tensor_without_gradient_stays_without() -> None:
    for tensor in (torch.ones(3), torch.ones(3, dtype=torch.int64)):
        marked = apply_mark(FineGrainedOffloadingGroupStartFunction, tensor, Handler(), "a")
        assert not marked.requires_grad
        assert torch.equal(marked, tensor)


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
