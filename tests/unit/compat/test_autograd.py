"""The sources' autograd Functions: identities, and what their forward and backward tell the handler."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from offload.fine_grained_activation_offload import (
    FineGrainedOffloadingBackwardRecordFunction,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
)


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
    y = FineGrainedOffloadingGroupStartFunction.apply(x, handler, "a")
    z = FineGrainedOffloadingGroupCommitFunction.apply(y * 2, handler, "a", forced, True)
    assert handler.told == [("start forward", "a"), ("commit forward", "a", forced, True)]
    z.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert handler.told[2:] == [("commit backward", "a"), "start backward"]
    assert torch.equal(x.grad, torch.tensor([2.0, 4.0, 6.0]))  # type: ignore[arg-type]
