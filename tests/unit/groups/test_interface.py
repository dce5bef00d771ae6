"""The functions that a model calls: identities everywhere, an offload where a chunk is current, the same bits
always."""

from __future__ import annotations

import inspect
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import (
    ActivationOffloadContext,
    FineGrainedActivationOffloadingInterface,
    GroupOrderError,
    PipelineOffloadManager,
    configure,
    disable_offload,
    enable_offload,
    flush_delayed_groups,
    group_commit,
    group_start,
    init_chunk_handler,
    mark_not_offloadable,
    offload_hooks,
    reset,
    step_end,
)
from offload.transfer.block import living
from tests.unit.groups.stack import (
    EXECUTORS,
    build_manager,
    build_stages,
    installed,
)

Interface = FineGrainedActivationOffloadingInterface


def leaf() -> Tensor:
    return torch.randn(64, requires_grad=True)


# -- identities ----------------------------------------------------------------------------------------------
@pytest.mark.req("S2-83", "S2-84")
def test_marks_return_the_tensor_itself_where_no_chunk_is_active() -> None:
    x = leaf()

    def untouched() -> bool:
        with offload_hooks():
            return group_start(x, "a") is x and group_commit(x, "a") is x

    assert untouched()
    assert PipelineOffloadManager.OFFLOAD_MGR is None  # and made none
    with installed(build_manager()) as manager:
        assert untouched()
        init_chunk_handler(None, None, 1)
        disable_offload()
        assert untouched()
        enable_offload()
        with torch.no_grad():
            assert untouched()
        with torch.inference_mode():
            assert group_start(x, "a") is x
            assert group_commit(x, "a") is x
        assert group_start(x, "a") is x
        handler = manager.cur_forward_chunk()
        assert handler.innermost_open() is not None
        group_commit(x, "a")
        step_end()
        assert untouched()


@pytest.mark.req("S2-83")
def test_marks_inside_a_backward_are_identities(manager: PipelineOffloadManager) -> None:
    """A recomputation runs the marks of its layers once more."""
    seen: list[bool] = []

    class Recompute(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            x = leaf()
            with torch.enable_grad(), offload_hooks():
                seen.append(group_start(x, "a") is x and group_commit(x, "never started") is x)
            return grad * 2

    init_chunk_handler(None, None, 1)
    Recompute.apply(leaf()).sum().backward()
    assert seen == [True]


Pair = namedtuple("Pair", ["output", "bias"])


@pytest.mark.req("S2-85")
def test_commit_takes_the_first_element_of_a_container_and_returns_the_container(
    manager: PipelineOffloadManager,
) -> None:
    init_chunk_handler(None, None, 1)
    x, bias = leaf(), torch.ones(1)
    for container in ((x, bias, None), [x, bias, None], Pair(x, bias)):
        group_start(x, "a")
        committed = group_commit(container, "a")
        assert committed is container
        assert manager.cur_forward_chunk().innermost_open() is None  # type: ignore[union-attr]
    group_start(x, "a")
    nested = [(x * 2, bias), None]
    assert group_commit(nested, "a") is nested
    group_start(x, "a")
    largest = torch.max(x.view(8, 8), 0)
    assert group_commit(largest, "a") is largest
    for empty in ((), []):
        assert group_commit(empty, "a") is empty


@pytest.mark.req("S2-85")
def test_empty_container_leaves_its_group_open(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = group_start(leaf(), "a")
    group_commit((), "a")
    group_commit(x, "a")
    with pytest.raises(
        GroupOrderError,
        match=r"chunk s0m0: commit of group 'a', which has not been started; open: none\. Call group_start",
    ):
        group_commit(x, "a")


# -- offload -------------------------------------------------------------------------------------------------
def leaving(manager: PipelineOffloadManager) -> list[str]:
    """Labels of the records whose copies are in flight, in their order."""
    return [
        str(record.label)
        for transfer in manager.engine.transfers._spilling
        for record in living(transfer.blocks)
    ]


@pytest.mark.req("S2-84", "S2-86")
def test_delayed_commit_sends_nothing_until_the_flush(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    graphs = []
    for name in ("a", "b"):
        x = group_start(leaf(), name)
        with offload_hooks():
            y = x * x
        graphs.append(group_commit(y, name, delay_offload=True))
    counts = manager.engine.transfers.counts
    assert (counts.saved, counts.spilled) == (2, 0)
    flush_delayed_groups()
    assert counts.spilled == 2
    assert leaving(manager) == ["s0m0/a#0[0]", "s0m0/b#1[0]"]
    flush_delayed_groups()
    assert counts.spilled == 2
    for graph in graphs:
        graph.sum().backward()


@pytest.mark.req("S2-86")
def test_groups_delayed_out_of_order_keep_their_own_tensors(manager: PipelineOffloadManager) -> None:
    """Two groups of one name, the outer committed last; matched by name alone the flush would mix them up."""
    init_chunk_handler(None, None, 1)
    outer_in, inner_in = leaf(), leaf()
    outer = group_start(outer_in, "a")
    with offload_hooks():
        kept = outer * outer
        inner = group_start(inner_in, "a")
        with offload_hooks():
            y = inner * inner
        y = group_commit(y, "a", delay_offload=True)
    z = group_commit(kept + y, "a", delay_offload=True)
    flush_delayed_groups()
    assert leaving(manager) == ["s0m0/a#1[0]", "s0m0/a#0[0]"]
    z.sum().backward()
    assert torch.equal(outer_in.grad, 2 * outer_in.detach())  # type: ignore[arg-type]
    assert torch.equal(inner_in.grad, 2 * inner_in.detach())  # type: ignore[arg-type]


@pytest.mark.req("S2-84", "S2-74")
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_commit_releases_by_force_what_it_has_copied(executor: Any, delay: bool) -> None:
    with installed(build_manager(executor)):
        init_chunk_handler(None, None, 1)
        x = leaf()
        held = x * 1
        expected = 2 * held.detach().clone()
        y = group_start(held, "a")
        with offload_hooks():
            z = y * y
        z = group_commit(z, "a", forced_released_tensors=[held], delay_offload=delay)
        assert held.untyped_storage().nbytes() == (256 if delay else 0)
        flush_delayed_groups()
        assert held.untyped_storage().nbytes() == 0
        z.sum().backward()
        assert torch.equal(x.grad, expected)  # type: ignore[arg-type]


@pytest.mark.req("S2-87")
def test_switches_are_global_and_keep_starts_and_commits_paired(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = group_start(leaf(), "a")
    disable_offload()
    assert not manager.do_offload
    inner = group_start(x, "a")
    assert inner is x
    enable_offload()
    assert manager.do_offload
    assert group_commit(inner, "a") is inner  # the muted one
    handler = manager.cur_forward_chunk()
    assert handler.innermost_open() is not None
    assert group_commit(x, "a") is x
    assert handler.innermost_open() is None


def test_commits_under_no_grad_are_paired_whatever_their_order(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = leaf()
    with torch.no_grad():
        for name in ("a", "b"):
            group_start(x, name)
        for name in ("a", "b"):
            group_commit(x, name)
    group_start(x, "a")
    handler = manager.cur_forward_chunk()
    group_commit(x, "a")
    assert handler.innermost_open() is None


# -- one call a forward --------------------------------------------------------------------------------------
@pytest.mark.req("S2-95", "S2-104")
def test_settings_follow_three_positional_arguments_by_keyword_only() -> None:
    parameters = inspect.signature(init_chunk_handler).parameters
    kinds = [parameter.kind for parameter in parameters.values()]
    assert list(parameters)[:3] == ["vp_size", "vp_stage", "min_offloaded_tensor_size"]
    assert kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 3 + [inspect.Parameter.KEYWORD_ONLY] * (
        len(kinds) - 3
    )
    assert parameters["min_offloaded_tensor_size"].default is None  # the config's


@pytest.mark.req("S2-95")
def test_model_level_use(manager: PipelineOffloadManager) -> None:
    module = build_stages()[0]
    for parameter in module.parameters():
        mark_not_offloadable(parameter)
    for _ in range(2):
        for _ in range(3):
            init_chunk_handler(None, None, 1)
            module(torch.randn(12, 16)).square().mean().backward()
        stats = reset()
        assert stats.saved > 0
    assert [handler.id.microbatch for handler in manager.tracker.handlers.values()] == [0, 1, 2]


def test_step_end_without_a_manager_makes_none() -> None:
    assert step_end() is None
    assert reset() is None
    assert PipelineOffloadManager.OFFLOAD_MGR is None


def test_configure_builds_on_the_simulated_device_without_a_gpu() -> None:
    manager = configure(print_summary=False)
    if not torch.cuda.is_available():
        assert manager.engine.device.name == "sim"


# -- the class -----------------------------------------------------------------------------------------------
@pytest.mark.req("S2-92", "S3-8")
def test_context_opens_a_group_and_installs_hooks_only_if_it_is_to_offload(
    manager: PipelineOffloadManager,
) -> None:
    init_chunk_handler(None, None, 1)
    x = leaf()
    with Interface(False, x, "a") as same:
        assert same is x
        assert manager.engine.hooks.innermost() is None
    with Interface(True, x, "a") as marked:
        assert marked is x
        assert manager.engine.hooks.innermost() is not None
        y = marked * marked
    assert manager.engine.hooks.innermost() is None
    Interface.group_commit(y, "a").sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]
    assert manager.engine.transfers.counts.saved == 1
    assert ActivationOffloadContext is Interface


@pytest.mark.req("S2-92")
def test_context_takes_its_hooks_out_after_an_exception_a_switch_and_a_new_manager(
    manager: PipelineOffloadManager,
) -> None:
    init_chunk_handler(None, None, 1)

    def broken() -> None:
        disable_offload()
        raise KeyError("broken layer")

    with pytest.raises(KeyError), Interface(True, leaf(), "a"):
        broken()
    enable_offload()
    with Interface(True, leaf(), "a"):
        PipelineOffloadManager.reset_instance(build_manager())
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.req("S2-93")
def test_static_methods_are_the_functions(manager: PipelineOffloadManager) -> None:
    names = (
        "init_chunk_handler get_context group_commit mark_not_offloadable forward_record reset reset_instance"
    )
    for name in names.split():
        assert isinstance(inspect.getattr_static(Interface, name), staticmethod), name
    Interface.init_chunk_handler(2, 1, 5)
    handler = manager.cur_forward_chunk()
    assert (handler.id.stage, handler.min_offloaded_tensor_size) == (1, 5)
    Interface.mark_not_offloadable(None)
    x = leaf()
    Interface.mark_not_offloadable(x)
    assert not handler.tensor_need_offloading_checker(x)
    Interface.reset()
    assert manager.cur_forward_chunk() is None
    Interface.reset_instance()
    assert PipelineOffloadManager.get_instance() is not manager


@pytest.mark.req("S2-93", "S2-94")
def test_context_by_flag_is_the_manager_or_nothing(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    group_start(leaf(), "a")
    with Interface.get_context(True):
        assert manager.engine.hooks.innermost() is not None
    with Interface.get_context(False):
        assert manager.engine.hooks.innermost() is None
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.req("S3-8")
def test_short_names_are_exported() -> None:
    names = (
        "group_start group_commit flush_delayed_groups disable_offload enable_offload "
        "forward_record backward_record"
    )
    classes = "ActivationOffloadContext OffloadManager ChunkOffloadHandler OffloadTensorGroup TensorPool"
    for name in (*names.split(), *classes.split()):
        assert name in dir(offload)
        assert hasattr(offload, name)


def test_page_lists_the_names_that_are_sold_and_the_others_are_importable_as_they_were() -> None:
    starred: dict[str, object] = {}
    exec("from offload import *", starred)
    assert set(offload.__all__) <= set(starred)
    assert 18 <= len(offload.__all__) <= 44
    assert offload.OffloadManager is offload.PipelineOffloadManager
    assert issubclass(offload.HostBudgetError, offload.OffloadError)
    with pytest.raises(AttributeError, match="module 'offload' has no attribute 'group_end'"):
        offload.group_end  # type: ignore[attr-defined] # noqa: B018
