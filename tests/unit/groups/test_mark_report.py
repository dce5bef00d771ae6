"""What the marks were asked for and did not do: one warning each, with its cause and the way out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import (
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.groups.reports import FORWARDS_WITHOUT_END
from tests.unit.groups.stack import leaf

pytestmark = pytest.mark.usefixtures("manager")


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "offload"):
        yield


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def marked(x: Tensor, name: str = "g", *, hooks: bool = True) -> Tensor:
    x = group_start(x, name)
    if hooks:
        with offload_hooks():
            return group_commit(x * x, name)
    return group_commit(x * x, name)


def test_a_forward_that_was_never_announced_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        marked(leaf()).sum().backward()
        step_end()
    (message,) = said(caplog)
    assert "group 'g' is started while no chunk is current" in message
    assert "init_chunk_handler() at the start of every forward" in message
    assert "a stage without an announcer begins no chunk" in message


def test_a_group_that_is_never_committed_is_said_once_and_one_that_an_exception_cut_short_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        init_chunk_handler()
        group_start(leaf(), "cut short")
        init_chunk_handler()
        y = group_start(leaf(), "g", hooks=True).square()
        y.sum().backward()
        step_end()
    (message,) = said(caplog)
    assert "group 'g' was started and is not committed where its step ends" in message
    assert "Call group_commit(output, 'g')" in message


def test_an_evaluation_that_is_not_announced_is_nothing_to_say(caplog: pytest.LogCaptureFixture) -> None:
    with torch.no_grad():
        marked(leaf())
    assert not said(caplog)


def test_forgotten_hooks_are_said_once_a_name(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        init_chunk_handler(None, None, 1)
        (
            marked(leaf(), "a", hooks=False) + marked(leaf(), "b", hooks=False) + marked(leaf(), "c")
        ).sum().backward()
        step_end()
    assert [message.split(":")[0] for message in said(caplog)] == [
        "group 'a' moved nothing",
        "group 'b' moved nothing",
    ]
    assert "with offload_hooks():" in said(caplog)[0]


def test_a_group_of_tensors_that_are_all_too_small_is_told_the_threshold(
    caplog: pytest.LogCaptureFixture,
) -> None:
    init_chunk_handler(None, None, 1 << 20)
    marked(leaf()).sum().backward()
    step_end()
    assert said(caplog) == [
        "nothing leaves: all that autograd saved in groups 'g' is smaller than min_numel "
        "(min_offloaded_tensor_size in OffloadConfig), 1,048,576 elements here, or can never leave. The "
        "largest tensor that is too small has 64 elements: set min_numel to that or less"
    ]


def test_that_nothing_leaves_is_said_once_while_warm_up_lasts(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        init_chunk_handler(None, None, 1 << 20)
        marked(leaf())  # its backward never runs
        step_end()
    assert manager.is_warmup
    assert [text.split(":")[0] for text in said(caplog)] == ["nothing leaves"]


def test_a_group_of_small_tensors_beside_one_that_moves_is_told_its_own_largest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    init_chunk_handler(None, None, 100)
    (marked(leaf(64), "small").sum() + marked(leaf(128), "large").sum()).backward()
    step_end()
    (message,) = said(caplog)
    assert "group 'small' moved nothing" in message
    assert "min_offloaded_tensor_size in OffloadConfig), 100 elements here (the largest has 64)" in message


@pytest.mark.parametrize(
    ("reentrant", "what", "way_out"),
    [
        (
            False,
            "groups 'g' are inside a non-reentrant checkpoint, which recomputes",
            "Put the marks around the checkpoint, or give the checkpoint context_fn=",
        ),
        (True, "group 'g' is inside a reentrant checkpoint", "Put its marks around the checkpoint"),
    ],
)
def test_a_group_inside_a_checkpoint_that_saves_nothing_is_told_so(
    reentrant: bool, what: str, way_out: str, caplog: pytest.LogCaptureFixture
) -> None:
    init_chunk_handler(None, None, 1)
    checkpoint(marked, marked(leaf(), "outside"), use_reentrant=reentrant).sum().backward()
    step_end()
    (message,) = said(caplog)
    assert what in message
    assert way_out in message


def test_a_checkpoint_that_keeps_what_it_was_asked_for_is_given_no_advice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(x: Tensor) -> Tensor:
        return marked(marked(x @ x, "mm"), "act")

    init_chunk_handler(None, None, 1)
    contexts = offload.selective_contexts({torch.ops.aten.mm.default})
    x = torch.randn(8, 8, requires_grad=True)
    checkpoint(body, x, use_reentrant=False, context_fn=contexts).sum().backward()
    step_end()
    assert said(caplog) == []


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return marked(self.fc2(marked(self.fc1(x), "a")), "b")


@pytest.mark.parametrize("mode", ["groups", "hidden_states", "checkpoint", "selective", "auto"])
def test_groups_inside_blocks_that_apply_recomputes_are_told_so_where_no_plan_may_send_them(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(*(Marked() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with offload.activations(model, mode, min_numel=1):
        for _ in range(4):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    about = [text for text in said(caplog) if "group" in text and "'a'" in text]
    assert len(about) == (mode not in ("groups", "auto"))
    assert all("groups 'a', 'b' are inside blocks that offload.apply recomputes" in text for text in about)


def test_a_group_around_others_moves_nothing_of_its_own_and_is_nothing_to_say(
    caplog: pytest.LogCaptureFixture,
) -> None:
    init_chunk_handler(None, None, 1)
    x = group_start(leaf(), "outer")
    group_commit(marked(x), "outer").sum().backward()
    step_end()
    assert not said(caplog)


@pytest.mark.parametrize("announced", [False, True])
def test_a_step_that_is_never_ended_is_told_so(
    announced: bool, manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(FORWARDS_WITHOUT_END + 1):
        manager.begin_chunk(0, 0) if announced else init_chunk_handler()
        marked(leaf()).sum().backward()
    (message,) = said(caplog)
    assert message.startswith("1,024 forwards of virtual stage 0 have begun since the last step_end()")
    assert "Call step_end() once a step" in message


def test_more_virtual_stages_than_a_model_has_layers_are_refused() -> None:
    """It made a list for each of them: 49 s and 7 GB."""
    with pytest.raises(ValueError, match="vp_size is 100,000,000; it counts the virtual stages of one rank"):
        init_chunk_handler(10**8, 0)


def test_a_loop_that_never_ends_a_step_does_not_grow(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.groups.tracker.FORWARDS_WITHOUT_END", 4)
    unread: Tensor | None = None
    for number in range(20):
        init_chunk_handler(None, None, 1)
        y = marked(leaf())
        if number == 6:
            unread = y  # what is not read keeps its step
        else:
            y.sum().backward()
        if number == 14:
            unread.sum().backward()
            unread = None
        assert len(manager.tracker.handlers) <= 11
    step_end()
    del y
    assert manager.engine.transfers.device_bytes == manager.engine.arena.lent_bytes == 0
