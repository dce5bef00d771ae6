"""The sources' autograd Functions, as the sources' function names apply them: nodes in the graph, by which a
group moves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from offload import (
    CaptureError,
    ChunkOffloadHandler,
    GroupOrderError,
    PipelineOffloadManager,
    init_chunk_handler,
    offload_hooks,
)
from offload import fine_grained_activation_offload as page
from offload.fine_grained_activation_offload import (
    FineGrainedOffloadingBackwardRecordFunction,
    FineGrainedOffloadingGroupCommitFunction,
    FineGrainedOffloadingGroupStartFunction,
)


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


def in_group(layer: Callable[[Tensor], Any], x: Tensor, name: str = "a", **how: Any) -> Any:
    x = page.fine_grained_offloading_group_start(x, name)
    with offload_hooks():
        y = layer(x)
    return page.fine_grained_offloading_group_commit(y, name, **how)


def leaf() -> Tensor:
    return torch.linspace(-1, 1, 64).requires_grad_()


def node(tensor: Tensor) -> str:
    return type(tensor.grad_fn).__name__


@pytest.mark.req("S2-83", "S2-84", "S2-90")
def test_the_long_names_are_nodes_whose_backward_tells_the_chunk_and_the_group_moves(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They returned their argument, and nothing applied the Functions but a test with a stand-in for the
    handler."""
    told: list[str] = []

    def watch(of: Any, what: str) -> None:
        does = getattr(of, what)

        def tell(*arguments: Any) -> Any:
            told.append(what)
            return does(*arguments)

        monkeypatch.setattr(of, what, tell)

    for what in ("on_group_start_forward", "commit", "on_group_commit_backward", "on_group_start_backward"):
        watch(ChunkOffloadHandler, what)
    for what in ("reading", "pump"):
        watch(manager.tracker, what)
    x = leaf()
    init_chunk_handler(None, None, 1)
    started = page.fine_grained_offloading_group_start(x, "a")
    with offload_hooks():
        y = started.sin()
    z = page.fine_grained_offloading_group_commit(y, "a")
    assert node(started) == "FineGrainedOffloadingGroupStartFunctionBackward"
    assert node(z) == "FineGrainedOffloadingGroupCommitFunctionBackward"
    assert torch.equal(started, x)
    assert torch.equal(z, x.sin())
    assert [what for what in told if what != "pump"] == ["on_group_start_forward", "commit"]
    assert manager.cur_backward_chunk() is None
    told.clear()
    z.backward(torch.linspace(1, 2, 64))
    assert told[:2] == ["on_group_commit_backward", "reading"]
    assert told[-2:] == ["on_group_start_backward", "pump"]
    assert manager.cur_backward_chunk() is manager.cur_forward_chunk()
    expected = leaf()
    expected.sin().backward(torch.linspace(1, 2, 64))
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]
    assert manager.step_end().spilled == 1


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.req("S2-85")
@pytest.mark.parametrize("make", [lambda *two: two, lambda *two: [*two], Pair])
@pytest.mark.usefixtures("manager")
def test_the_first_element_of_a_container_gets_the_node_of_a_long_commit(make: Callable[..., Any]) -> None:
    init_chunk_handler(None, None, 1)
    given = []

    def layer(x: Tensor) -> Any:
        given.append(make(x.sin(), x.cos()))
        return given[0]

    got = in_group(layer, leaf())
    assert type(got) is type(given[0])
    assert node(got[0]) == "FineGrainedOffloadingGroupCommitFunctionBackward"
    assert got[1] is given[0][1]
    assert page.fine_grained_offloading_group_commit((), "a") == ()


@pytest.mark.req("S2-83", "S2-84")
def test_the_long_names_return_their_tensor_where_nothing_leaves(manager: PipelineOffloadManager) -> None:
    x, y = leaf(), leaf() * 1

    def untouched() -> bool:
        return (
            page.fine_grained_offloading_group_start(x, "a") is x
            and page.fine_grained_offloading_group_commit(y, "a") is y
        )

    assert untouched()  # no chunk
    init_chunk_handler(None, None, 1)
    with torch.no_grad():
        assert untouched()
    manager.disable_offload()
    assert untouched()
    manager.enable_offload()
    assert not untouched()


@pytest.mark.req("S2-84", "S2-86")
def test_a_long_commit_delays_releases_and_refuses_as_the_short_one(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    init_chunk_handler(None, None, 1)
    with pytest.raises(GroupOrderError, match="commit of group 'b', which has not been started"):
        page.fine_grained_offloading_group_commit(leaf(), "b")
    with pytest.raises(ValueError, match="group_commit with name None"):
        page.fine_grained_offloading_group_commit(leaf(), None)  # type: ignore[type-var]
    x = leaf()
    y = in_group(torch.sin, x, delay_offload=True)
    assert manager.engine.transfers.counts.spilled == 0
    manager.flush_delayed_groups()
    assert manager.engine.transfers.counts.spilled == 1
    out: list[Tensor] = []
    z = in_group(lambda x: out.append(x.exp()) or out[0], y, "d", forced_released_tensors=out)  # type: ignore[func-returns-value]
    assert "1 tensor(s) of forced_released_tensors share the storage of the group's output" in caplog.text
    z.sum().backward()


@pytest.mark.req("S2-89", "S2-90")
@pytest.mark.usefixtures("manager")
def test_a_long_backward_record_is_a_node_that_records_in_the_backward() -> None:
    event = Event()
    x = leaf()
    y = page.fine_grained_offloading_backward_record(x * 2, event)
    assert node(y) == "FineGrainedOffloadingBackwardRecordFunctionBackward"
    assert event.recorded == 0
    y.sum().backward()
    assert event.recorded == 1
    assert torch.equal(x.grad, torch.full((64,), 2.0))  # type: ignore[arg-type]
    for wrong in ((x, 5), (5, event)):
        with pytest.raises(ValueError, match="backward_record got a int"):
            page.fine_grained_offloading_backward_record(*wrong)  # type: ignore[arg-type]


def test_a_long_start_in_a_capture_outside_of_a_region_is_refused(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    device = manager.engine.device
    with device.capture(), pytest.raises(CaptureError, match="group 'a' in a graph under capture"):
        page.fine_grained_offloading_group_start(leaf(), "a")
