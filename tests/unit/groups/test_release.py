"""Forced release: storage is freed under the hands of Python once all of it has left, and only then."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from offload import OffloadError, PipelineOffloadManager, group_commit, group_start, offload_hooks
from tests.unit.groups.handlers import begun, group_of
from tests.unit.groups.stack import EXECUTORS, build_manager, installed


@pytest.mark.req("S2-74", "S3-68")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_forced_release_frees_at_once_what_python_still_holds_and_it_comes_back(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        handler = begun(manager)
        handler.on_group_start_forward("a")
        x = torch.randn(64)
        original = x.clone()
        tag = handler.tensor_push(x)
        handler.bulk_offload([x, x.view(8, 8)])
        assert x.untyped_storage().nbytes() == 0
        assert torch.equal(handler.tensor_pop(tag), original)


@pytest.mark.req("S2-75")
def test_forced_release_leaves_alone_what_the_group_did_not_copy_and_warns(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    handler = begun(manager, min_elements=8)
    never_saved, small, in_another_group = torch.randn(64), torch.randn(4), torch.randn(64)
    group_of(handler, "other", in_another_group)
    group = handler.on_group_start_forward("a")
    handler.tensor_push(small)
    with caplog.at_level(logging.WARNING, "offload"):
        handler.on_group_commit_forward([never_saved, small, in_another_group])
    for tensor in (never_saved, small, in_another_group):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * 4
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert (
        "group s0m0/a#1: a tensor of shape (64,) (256 B of storage) was to be released, but this group "
        "has not copied all" in said[0]
    )
    assert "take it off forced_released_tensors" in said[0]
    assert group.total_offload_bytes == 0


@pytest.mark.req("S2-75")
def test_forced_release_of_a_storage_of_which_only_a_part_was_copied_is_refused(
    manager: PipelineOffloadManager,
) -> None:
    handler = begun(manager)
    handler.on_group_start_forward("a")
    x = torch.randn(64, 64)
    original = x.clone()
    handler.tensor_push(x[:2])
    handler.on_group_commit_forward([x])
    assert torch.equal(x, original)  # the other 62 rows have no copy


@pytest.mark.req("S2-75")
def test_forced_release_of_what_another_chunk_still_keeps_is_refused(manager: PipelineOffloadManager) -> None:
    x = torch.randn(64)
    original = x.clone()
    keeper = begun(manager)
    keeper.stays = frozenset({0})
    _, (tag,) = group_of(keeper, "a", x)
    handler = begun(manager)
    handler.on_group_start_forward("a")
    handler.tensor_push(x)
    handler.on_group_commit_forward([x])
    assert torch.equal(keeper.tensor_pop(tag), original)


def test_group_that_the_plan_keeps_releases_nothing_and_says_nothing(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(64)
    original = x.clone()
    handler = begun(manager)
    handler.stays = frozenset({0})
    handler.on_group_start_forward("a")
    tag = handler.tensor_push(x)
    with caplog.at_level(logging.WARNING, "offload"):
        handler.on_group_commit_forward([x])
    assert torch.equal(x, original)
    assert torch.equal(handler.tensor_pop(tag), original)
    assert not caplog.records


def test_forced_release_in_a_group_that_stays_in_part_frees_what_leaves_and_leaves_alone_what_stays(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    """What was saved as both stays: the plan's part of it is read where it is."""
    leaving, staying, both = torch.randn(64), torch.randn(64), torch.randn(64)
    handler = begun(manager)
    handler.stays_from = {0: 2}
    handler.on_group_start_forward("a")
    tags = [handler.tensor_push(tensor) for tensor in (leaving, both, staying)]
    original = [tensor.clone() for tensor in (leaving, both, staying)]
    both.add_(1)
    tags.append(handler.tensor_push(both))  # slot 3
    with caplog.at_level(logging.WARNING, "offload"):
        handler.on_group_commit_forward([leaving, staying, both])
    assert not caplog.records
    assert [tensor.untyped_storage().nbytes() for tensor in (leaving, staying, both)] == [0, 256, 256]
    assert torch.equal(handler.tensor_pop(tags[0]), original[0])
    assert torch.equal(handler.tensor_pop(tags[2]), original[2])
    assert torch.equal(handler.tensor_pop(tags[3]), both)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        handler.tensor_pop(tags[1])


@pytest.mark.req("S2-75")
def test_forced_release_waits_for_every_copy_of_that_storage_that_is_under_way(
    manager: PipelineOffloadManager,
) -> None:
    """Two chunks save one storage; the second frees it while the first one's copy, issued later, still reads
    it."""
    x = torch.randn(64)
    original = x.clone()
    one = begun(manager)
    one.on_group_start_forward("a")
    one_tag = one.tensor_push(x)
    other = begun(manager)
    other.on_group_start_forward("a")
    other_tag = other.tensor_push(x)
    other.bulk_offload_group()
    one.on_group_commit_forward()
    other.on_group_commit_forward([x])
    assert x.untyped_storage().nbytes() == 0
    assert torch.equal(one.tensor_pop(one_tag), original)
    assert torch.equal(other.tensor_pop(other_tag), original)


def test_forced_release_takes_a_list_of_tensors_only_and_closes_nothing_else(
    manager: PipelineOffloadManager,
) -> None:
    handler = begun(manager)
    group = handler.on_group_start_forward("a")
    for wrong, found in ((torch.ones(2), "Tensor"), ([1], r"\['int'\]"), ("x", "str")):
        with pytest.raises(
            ValueError, match=f"forced_released_tensors is {found}, must be a list of tensors, or None"
        ):
            handler.on_group_commit_forward(wrong)  # type: ignore[arg-type]
    assert handler.innermost_open() is group


# -- what somebody else still needs --------------------------------------------------------------------------
# Each of these freed the storage all the same, and the process died of the next read of it.
def started(manager: PipelineOffloadManager) -> tuple[torch.Tensor, torch.Tensor]:
    """An activation and its square, saved by group "g", which is open."""
    begun(manager)
    x = group_start(torch.randn(64, requires_grad=True), "g")
    a = x * 2
    with offload_hooks():
        return a, a * a


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.req("S2-75")
def test_what_a_graph_outside_of_the_hooks_saved_too_stays(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = started(manager)
    original = a.detach().clone()
    outside = a * a
    with caplog.at_level(logging.WARNING, "offload"):
        b = group_commit(b, "g", [a])
    assert "a graph that saved it outside of the hooks" in said(caplog)[0]
    (gradient,) = torch.autograd.grad((b + outside).sum(), a)
    assert torch.equal(gradient, 4 * original)


@pytest.mark.req("S2-75")
def test_what_a_graph_saved_as_its_output_or_a_view_still_shows_stays(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    begun(manager)
    x = group_start(torch.randn(64, requires_grad=True), "g")
    saved_by_its_maker = x.exp()
    viewed = x * 2
    view = viewed[:8]
    with offload_hooks():
        b = saved_by_its_maker.square() + viewed.square()
    with caplog.at_level(logging.WARNING, "offload"):
        b = group_commit(b, "g", [saved_by_its_maker, viewed])
    assert len(said(caplog)) == 2
    assert torch.equal(view, x[:8] * 2)
    b.sum().backward()


@pytest.mark.req("S2-75")
def test_the_committed_tensor_itself_stays(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = started(manager)
    with offload_hooks():
        e = b.exp()
    with caplog.at_level(logging.WARNING, "offload"):
        e = group_commit(e, "g", [e, a])
    assert (
        "group 'g': 1 tensor(s) of forced_released_tensors share the storage of the group's output"
        in (said(caplog)[0])
    )
    assert a.untyped_storage().nbytes() == 0
    assert e.detach().sum() > 0
    e.sum().backward()


@pytest.mark.req("S2-74")
def test_an_operator_on_a_released_tensor_is_an_error_that_names_the_group(
    manager: PipelineOffloadManager,
) -> None:
    a, b = started(manager)
    marked = group_start(a, "h")  # Python's other name for it
    group_commit(marked * 1, "h")
    b = group_commit(b, "g", [a])
    assert (a.shape, a.untyped_storage().nbytes()) == ((64,), 0)
    for held in (a, marked):
        with pytest.raises(OffloadError, match=r"of shape \(64,\) that group s0m0/g#0 released"):
            held + 1
    assert "group s0m0/g#0 released" in repr(a)
    a.retain_grad()  # as Megatron's schedule asks of a stage's input, which a group may have released
    b.sum().backward()
    assert a.grad is not None
    a.data = torch.ones(2)
    assert torch.equal(a.detach() + 1, torch.tensor([2.0, 2.0]))
