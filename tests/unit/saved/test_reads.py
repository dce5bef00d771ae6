"""Reading more than once, in another order, or not at all: the same bits each time, until the step has
ended."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.device.sim import ExecutorName
from offload.errors import StaleHandleError
from offload.transfer.block import BlockState, WeakStorage
from tests.threads import run_all
from tests.unit.saved.rig import EXECUTORS, KIB, Rig, assert_equal_bits, gradients, leaf


def chain(x: Tensor) -> Tensor:
    return (x * 2).sin().exp().tanh()


CHAIN_SAVES = 3
"""The sine's input, the output of exp, the output of tanh."""


# -- again ---------------------------------------------------------------------------------------------------
@pytest.mark.req("S4-46")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_retained_graph_gives_the_same_gradients_each_time(executor: ExecutorName) -> None:
    rig = Rig(executor, seed=1)
    x = leaf()
    expected = gradients(chain, [x])
    with rig.group():
        y = chain(x)
    total = y.sum()
    del y
    rig.leave()
    for last in (False, False, True):
        assert_equal_bits(expected, torch.autograd.grad(total, [x], retain_graph=not last))
    assert rig.restored_bytes == 3 * CHAIN_SAVES * KIB


def test_two_readers_of_one_record_share_its_buffer_in_each_pass(rig: Rig) -> None:
    x, other = leaf(), leaf()

    def program(x: Tensor, other: Tensor) -> Tensor:
        shared = x * 2
        return shared.sin() + shared.cos() * other

    expected = gradients(program, [x, other])
    with rig.group():
        y = program(x, other)
    rig.leave()
    first = torch.autograd.grad(y.sum(), [x, other], retain_graph=True)
    once = rig.restored_bytes
    second = torch.autograd.grad(y.sum(), [x, other])
    assert_equal_bits(expected, list(first))
    assert_equal_bits(expected, list(second))
    assert once == 2 * KIB  # the shared input and the cosine; `other` lives
    assert rig.restored_bytes == 2 * once


@pytest.mark.parametrize("executor", EXECUTORS)
def test_input_half_first_and_weight_half_later_read_the_same_bits(executor: ExecutorName) -> None:
    """As a zero-bubble schedule splits a backward: the weight half reads nearly everything again, in forward
    order."""
    x = torch.randn(8, 16, requires_grad=True)
    weights = [torch.nn.Parameter(torch.randn(16, 16)) for _ in range(3)]

    def program(x: Tensor) -> Tensor:
        for weight in weights:
            x = (x @ weight).tanh()
        return x

    expected = torch.autograd.grad(program(x).sum(), [x, *weights])
    rig = Rig(executor, seed=4)
    with rig.group():
        total = program(x).sum()
    rig.leave()
    found = list(torch.autograd.grad(total, [x], retain_graph=True))
    for weight in weights:
        found.extend(torch.autograd.grad(total, [weight], retain_graph=True))
    assert_equal_bits(list(expected), found)


def test_a_second_derivative_is_the_same(rig: Rig) -> None:
    x, weight = torch.randn(8, 8, requires_grad=True), torch.nn.Parameter(torch.randn(8, 8))

    def second(rig: Rig | None) -> list[Tensor]:
        def first_order() -> Tensor:
            return ((x @ weight).tanh() * x).pow(3).sum()

        if rig is None:
            total = first_order()
        else:
            with rig.group():
                total = first_order()
            rig.leave()
        (gradient,) = torch.autograd.grad(total, [x], create_graph=True)
        return list(torch.autograd.grad(gradient.pow(2).sum(), [x, weight]))

    assert_equal_bits(second(None), second(rig))


# -- another thread ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
def test_two_threads_may_read_two_graphs_at_the_same_time(seed: int) -> None:
    rig = Rig("random", seed=seed)
    inputs = [leaf() for _ in range(2)]
    outputs = []
    for x in inputs:
        rig.chunk()
        with rig.group():
            outputs.append(chain(x).sum())
    rig.leave()
    threads = [threading.Thread(target=output.backward) for output in outputs]
    run_all(threads)
    for x in inputs:
        assert_equal_bits(gradients(chain, [x]), [x.grad])  # type: ignore[list-item]
    threads.clear()
    outputs.clear()
    assert rig.end().restored == 2 * CHAIN_SAVES


def test_a_graph_may_be_dropped_on_another_thread(rig: Rig) -> None:
    """Finalisers run there, and take no lock: this thread holds it."""
    box = []
    with rig.group():
        box.append(chain(leaf()))
    with rig.engine.lock:
        dropper = threading.Thread(target=box.clear)
        dropper.start()
        dropper.join()
        assert rig.blocks() == []


# -- not at all ----------------------------------------------------------------------------------------------
@pytest.mark.req("S4-45")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_is_never_read_is_freed_without_the_garbage_collector(executor: ExecutorName) -> None:
    rig = Rig(executor)
    gc.collect()
    gc.disable()
    try:
        x = leaf()
        with rig.group():
            y = chain(x)
        watched = rig.blocks()
        storages = [WeakStorage(block.storage()) for block in watched]  # type: ignore[arg-type]
        assert len(watched) == CHAIN_SAVES
        del y
        assert all(block.is_freed and block.device_bytes is None for block in watched)
        rig.leave()
        assert [storage.storage() for storage in storages] == CHAIN_SAVES * [None]
        rig.transfers.reclaim_freed()
        rig.assert_empty()
        rig.end()
    finally:
        gc.enable()


@pytest.mark.req("S4-45")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_graph_that_outlives_its_step_unread_holds_no_memory(executor: ExecutorName) -> None:
    """Two steps, so that neither ends with what the other left."""
    rig = Rig(executor)
    kept = []
    for _ in range(2):
        with rig.group():
            kept.append(chain(leaf()))
        storages = [WeakStorage(block.storage()) for block in rig.blocks()]  # type: ignore[arg-type]
        rig.leave()
        rig.end()  # nothing lent, nothing in flight, nothing counted
        assert [storage.storage() for storage in storages[:-1]] == (CHAIN_SAVES - 1) * [None]
    for y in kept:
        with pytest.raises(StaleHandleError, match="was saved in a step that has ended"):
            y.sum().backward()


@pytest.mark.req("S4-45")
def test_without_gradients_nothing_is_saved_at_all(rig: Rig) -> None:
    with rig.group(), torch.no_grad():
        chain(leaf())
    assert (rig.saved, rig.sizes, rig.spilled_bytes) == (0, [], 0)


@pytest.mark.parametrize("min_elements", [0, 10_000], ids=["offloaded", "passed through"])
def test_a_node_that_saves_its_own_output_is_freed_without_the_garbage_collector(min_elements: int) -> None:
    """Holding the output itself would tie node and tensor into a ring that no counter frees."""
    rig = Rig()
    gc.collect()
    gc.disable()
    try:
        with rig.group(min_elements=min_elements):
            y = leaf().exp()
        storage = WeakStorage(y.untyped_storage())
        del y
        rig.leave()
        assert storage.storage() is None
    finally:
        gc.enable()


def test_an_exception_in_the_forward_leaves_nothing(rig: Rig) -> None:
    def interrupted() -> None:
        with rig.group():
            y = chain(leaf())
            raise KeyError(str(y.shape))

    with pytest.raises(KeyError):
        interrupted()
    assert rig.engine.hooks.innermost() is None
    assert rig.blocks() == []


def test_an_exception_in_the_backward_leaves_what_was_not_read_for_another_try(rig: Rig) -> None:
    class Fails(torch.autograd.Function):
        tries = 0

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            Fails.tries += 1
            if Fails.tries == 1:
                raise KeyError
            return gradient

    x = leaf()
    with rig.group():
        y = chain(Fails.apply(chain(x))).sum()
    rig.leave()
    with pytest.raises(KeyError):
        y.backward(retain_graph=True)
    y.backward()
    assert_equal_bits(gradients(lambda x: chain(chain(x).clone()), [x]), [x.grad])  # type: ignore[list-item]


# -- too late ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("leaves", [True, False], ids=["left", "kept"])
def test_reading_after_the_step_has_ended_is_an_error_that_says_so(rig: Rig, leaves: bool) -> None:
    with rig.group(leaves=leaves):
        y = chain(leaf())
    rig.end()
    with pytest.raises(
        StaleHandleError,
        match=r"s0m0/group#0\[2\] \(1,024 bytes\) was saved in a step that has ended; run its backward",
    ):
        y.sum().backward()


def test_a_graph_of_an_ended_step_may_die_at_any_time(rig: Rig) -> None:
    with rig.group():
        y = chain(leaf())
    rig.leave()
    rig.end()
    with rig.group():
        z = chain(leaf()).sum()
    del y
    assert rig.states() == CHAIN_SAVES * [BlockState.SPILLING]
    rig.leave()
    z.backward()
    del z
    assert rig.end().restored == CHAIN_SAVES


def test_a_passed_tensor_may_be_read_after_the_step_has_ended(rig: Rig) -> None:
    x = leaf()
    with rig.group(min_elements=10_000):
        y = chain(x)
    rig.end()
    assert_equal_bits(gradients(chain, [x]), list(torch.autograd.grad(y.sum(), [x])))
