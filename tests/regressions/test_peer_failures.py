"""What the closest peer, Megatron-core's fine-grained activation offloading (0.19), was measured to do wrong,
failure by failure.

Each test is the program on which it failed. `tests/unit/groups/stack.py` has the models and the schedules;
comparisons are bitwise.
"""

from __future__ import annotations

import gc
import logging
import sys
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import (
    GPUTensorPool,
    HazardError,
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.device.sim import SimDevice
from parallel.transformer import TransformerConfig
from tests.loops import ended_step
from tests.unit.groups.stack import (
    EXECUTORS,
    NAMES,
    Action,
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    gpipe,
    installed,
    interleaved,
    lifo,
    no_pipeline,
    one_f_one_b,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def square(x: Tensor, name: str = "a") -> Tensor:
    x = group_start(x, name)
    with offload_hooks():
        y = x * x
    return group_commit(y, name)


def leaf(elements: int = 64) -> Tensor:
    return torch.randn(elements, requires_grad=True)


# -- 1 -------------------------------------------------------------------------------------------------------
# A tensor that its reader asks for before any prefetch did is reloaded on the spot. The peer did not order
# that reload after the tensor's own copy to the host: 6 of 24 reloads without a pipeline and 36 of 72 in
# 1F1B, all of them in warm-up or where prefetch was skipped.
# no prefetch, and sources let go at once
RELOADED_ON_THE_SPOT: dict[str, Any] = {"max_restoring_bytes": 0, "max_spilling_bytes": 1}


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("actions", [no_pipeline(2), one_f_one_b(6, 3)], ids=["no pipeline", "1F1B"])
def test_1_every_reload_on_the_spot_is_ordered_after_its_own_offload(
    actions: list[Action], executor: Any
) -> None:
    """The simulated device raises at any copy that no event orders after what wrote its source."""
    expected = baseline(build_stages(), [actions] * 2)
    with installed(build_manager(executor, seed=1, **RELOADED_ON_THE_SPOT)) as manager:
        driver = Driver(build_stages())
        found = []
        for _ in range(2):
            found.append(driver.step(actions))
            assert manager.stats.restored > 0
        assert_same(expected, found)
        assert manager.engine.device.waits["restore"] > 0


def test_1_reload_without_that_order_is_seen() -> None:
    """The test above can fail: without the edges from the offload to the reload the device names the two
    copies."""
    device = SimDevice(without={"restore", "settle", "allocate"})
    manager = build_manager(device=device, **RELOADED_ON_THE_SPOT)
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        driver = Driver(build_stages())
        with pytest.raises(HazardError, match=r"allocator reuse|RAW hazard"):
            driver.step(no_pipeline(2))
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = None


# -- 2 -------------------------------------------------------------------------------------------------------
# 768 of 1917 configurations ended in "Chunk mismatch" in iteration 2: always with more than one microbatch
# when a chunk has one layer and two or more names, or when the fraction is 0 and there is more than one
# group.
ORDERS: dict[str, tuple[int, list[Action]]] = {
    "one microbatch": (1, no_pipeline(1)),
    "accumulation": (1, no_pipeline(3)),
    "gpipe": (1, gpipe(3)),
    "lifo": (1, lifo(3)),
    "1F1B first rank": (1, one_f_one_b(4, 3)),
    "1F1B last rank": (1, one_f_one_b(3, 1)),
    "interleaved": (2, interleaved(2)),
}
CHOICES_OF_NAMES = (("fc1",), ("norm", "act"), ("block", "fc2"), NAMES)


@pytest.mark.req("S2-38", "S2-40", "S2-102")
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("names", CHOICES_OF_NAMES, ids="+".join)
def test_2_every_configuration_has_a_second_and_a_third_iteration(
    names: tuple[str, ...], order: str, layers: int
) -> None:
    stages, actions = ORDERS[order]
    expected = baseline(build_stages(stages, layers, names), [actions] * 3)
    for seed, fraction in enumerate((0.0, 0.5, 1.0)):
        with installed(build_manager("random", seed=seed, activation_offload_fraction=fraction)) as manager:
            driver = Driver(build_stages(stages, layers, names))
            assert_same(expected, [driver.step(actions) for _ in range(3)])
            if fraction == 0:
                assert manager.stats.spilled == 0
            elif order != "one microbatch":
                assert manager.stats.spilled > 0


# -- 3 -------------------------------------------------------------------------------------------------------
# The peer foretells the order of the backwards and asserts that it was right. Backwards last in first out
# (two forwards, one paired loss), split backwards (zero-bubble, DualPipe) and a changed number of
# microbatches under virtual stages all ended in "Chunk mismatch".
ZERO_BUBBLE: list[Action] = [
    *(("F", stage, mb) for mb in (0, 1) for stage in (0, 1)),
    *(("I", 1, 0), ("I", 0, 0), ("F", 0, 2), ("F", 1, 2), ("I", 1, 1), ("W", 1, 0), ("I", 0, 1), ("W", 0, 0)),
    *(("I", 1, 2), ("I", 0, 2), ("W", 1, 1), ("W", 0, 1), ("W", 1, 2), ("W", 0, 2)),
]


@pytest.mark.req("S2-102")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_3_backwards_may_come_in_any_order(executor: Any) -> None:
    steps = [gpipe(3), lifo(3), lifo(3), one_f_one_b(3, 2), lifo(2)]
    expected = baseline(build_stages(), steps)
    for announced in (False, True):
        with installed(build_manager(executor, seed=3)):
            driver = Driver(build_stages(), announced=announced)
            assert_same(expected, [driver.step(actions) for actions in steps])


@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize(
    "caps", [{}, RELOADED_ON_THE_SPOT, {"device_limit_bytes": 12_000}], ids=["wide", "on the spot", "limited"]
)
def test_3_backwards_may_come_in_halves(announced: bool, caps: dict[str, Any]) -> None:
    with installed(None):
        driver = Driver(build_stages(2, 1))
        expected = [driver.step(ZERO_BUBBLE) for _ in range(4)]
    for executor in EXECUTORS:
        with installed(build_manager(executor, seed=3, **caps)) as manager:
            driver = Driver(build_stages(2, 1), announced=announced)
            found = []
            for _ in range(4):
                found.append(driver.step(ZERO_BUBBLE))
                assert manager.engine.transfers.device_bytes == manager.engine.arena.stats().lent == 0
            assert_same(expected, found)


def test_3_microbatch_count_may_change_under_virtual_stages() -> None:
    steps = [interleaved(2), interleaved(4), interleaved(4), interleaved(2), interleaved(6)]
    expected = baseline(build_stages(2), steps)
    with installed(build_manager("random", seed=3)):
        driver = Driver(build_stages(2))
        assert_same(expected, [driver.step(actions) for actions in steps])


# -- 4 -------------------------------------------------------------------------------------------------------
# The peer's warm-up is the first step whatever it was: an evaluation that came first froze a plan of 0 bytes.
# Microbatches beyond those of the warm-up stayed on the device without a word.
@pytest.mark.req("S2-33")
@pytest.mark.parametrize("with_grad", [0, 1])
def test_4_evaluation_that_comes_first_does_not_end_warm_up(
    manager: PipelineOffloadManager, with_grad: int
) -> None:
    driver = Driver(build_stages())
    driver.step([("eval", with_grad, 3)])
    assert (manager.is_warmup, manager.offload_summary_total_bytes) == (True, 0)
    driver.step(gpipe(2))
    assert not manager.is_warmup
    assert manager.offload_summary_total_bytes > 0
    driver.step(gpipe(2))
    assert manager.stats.spilled > 0


def test_4_further_microbatches_leave_as_well(manager: PipelineOffloadManager) -> None:
    driver = Driver(build_stages())
    spilled = {}
    for count in (2, 2, 5):
        driver.step(gpipe(count))
        spilled[count] = manager.stats.spilled
    a_microbatch = manager.stats.saved // 5
    assert spilled[5] == spilled[2] + 3 * a_microbatch


# -- 5 -------------------------------------------------------------------------------------------------------
# A saved tensor could be read once: `retain_graph`, a second look at `ctx.saved_tensors` and a split backward
# ended in a KeyError.
@pytest.mark.parametrize("executor", EXECUTORS)
def test_5_saved_tensor_may_be_read_any_number_of_times(executor: Any) -> None:
    looks: list[Tensor] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            looks.extend(ctx.saved_tensors[0] for _ in range(3))
            return 2 * grad * ctx.saved_tensors[0]

    with installed(build_manager(executor, seed=5, **RELOADED_ON_THE_SPOT)) as manager:
        for _ in range(2):
            init_chunk_handler(None, None, 1)
            x = leaf()
            y = group_start(x * 1, "a")
            with offload_hooks():
                y = Twice.apply(y)
            total = group_commit(y, "a").sum()
            for times in (1, 2, 3):
                total.backward(retain_graph=times < 3)
                assert torch.equal(x.grad, 2 * times * x.detach())  # type: ignore[arg-type]
            assert all(torch.equal(look, x.detach()) for look in looks)
            assert len(looks) == 9
            looks.clear()
            del total, y
            step_end()
            assert manager.engine.arena.stats().lent == 0


# -- 6 -------------------------------------------------------------------------------------------------------
# Nested scopes asserted; switching offload off between forward and backward was an AttributeError; an
# exception inside a scope left its group behind, and the next group of that name silently stayed on the
# device.
def test_6_scopes_nest(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = leaf()
    y = group_start(x, "outer")
    with offload_hooks(), offload_hooks():
        z = square(y, "inner")
        with manager, manager:
            z = z * z
    group_commit(z, "outer").sum().backward()
    square_of_x = x.detach() * x.detach()
    assert torch.equal(x.grad, (square_of_x + square_of_x) * x.detach() * 2)  # type: ignore[arg-type]
    assert step_end() == manager.stats
    assert manager.stats.spilled == 2


def test_6_offload_may_be_off_by_the_time_of_the_backward(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = leaf()
    y = square(x * 1)
    manager.disable_offload()
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]
    assert manager.step_end().spilled == 1


@pytest.mark.parametrize("again", ["the same forward", "the next one"])
def test_6_group_after_an_exception_leaves(manager: PipelineOffloadManager, again: str) -> None:
    init_chunk_handler(None, None, 1)
    group_start(leaf(), "a")
    with pytest.raises(KeyError), offload_hooks():
        raise KeyError("broken layer")
    if again == "the next one":
        init_chunk_handler(None, None, 1)
    square(leaf()).sum().backward()
    assert manager.step_end().spilled == 1


# -- 7 -------------------------------------------------------------------------------------------------------
# nn.Linear saves weight.t(), a plain tensor and no Parameter: the peer copied the weights to the host for
# every microbatch.
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_7_weights_are_not_copied(manager: PipelineOffloadManager, registered: bool, autocast: bool) -> None:
    linear = nn.Linear(32, 48)
    if registered:
        manager.register_parameters(linear)
    for _ in range(2):
        for _ in range(3):
            init_chunk_handler(None, None, 1)
            x = group_start(torch.randn(5, 32, requires_grad=True), "fc1")
            with offload_hooks(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                y = linear(x)
            group_commit(y, "fc1").float().sum().backward()
        stats = ended_step()
        assert stats.saved == 3  # the inputs
    assert manager.offload_summary_total_bytes == 0  # the only one before the first backward is the margin
    assert stats.spill_bytes == 2 * 5 * 32 * (2 if autocast else 4)


# -- 8 -------------------------------------------------------------------------------------------------------
# forced_released_tensors freed every listed tensor that was large enough, copied or not.
@pytest.mark.usefixtures("manager")
def test_8_forced_release_never_frees_what_has_no_copy(caplog: pytest.LogCaptureFixture) -> None:
    init_chunk_handler(None, None, 8)
    saved, never_saved, too_small = leaf().detach(), leaf().detach(), torch.ones(4)
    originals = [tensor.clone() for tensor in (saved, never_saved, too_small)]
    x = leaf()
    y = group_start(x, "a")
    with offload_hooks():
        y = y * saved + x * too_small.sum()
    with caplog.at_level(logging.WARNING, "offload"):
        y = group_commit(y, "a", forced_released_tensors=[saved, never_saved, too_small])
    assert saved.untyped_storage().nbytes() == 0
    assert torch.equal(never_saved, originals[1])
    assert torch.equal(too_small, originals[2])
    assert (
        len(
            [
                message
                for message in caplog.messages
                if "was to be released, but this group has not copied all of its" in message
            ]
        )
        == 2
    )
    y.sum().backward()
    assert torch.equal(x.grad, originals[0] + 4)  # type: ignore[arg-type]


# -- 9 -------------------------------------------------------------------------------------------------------
# The peer's pinned pool is keyed by exact shape: eight sequence lengths took it from 24 buffers to 150, and
# nothing ever trimmed it; groups of experts passed it by and pinned anew in every iteration.
@pytest.mark.req("S2-57", "S2-27")
@pytest.mark.parametrize("name", ["core_attn", "expert_fc1"])
def test_9_new_shapes_pin_nothing_new(name: str) -> None:
    largest, held = 12 << 20, []
    with installed(build_manager(trim_host=False)) as manager:
        for round_ in range(2):
            for eighths in (8, 1, 5, 2, 7, 3, 6, 4):
                for _ in range(2):
                    init_chunk_handler(None, None, 1)
                    # lengths that come only once in the first round differ by an element in the second
                    square(leaf(largest // 8 * eighths // 4 + round_) * 1, name).sum().backward()
                stats = ended_step()
                held.append(stats.host_bytes_held)
                assert stats.refused == 0
        assert held == [held[0]] * 16
        # one at a time is on the host; each shape's own buffers would have been 2 * 8 of them, 108 MiB
        assert held[0] == 64 << 20
        assert manager.cpu_tensor_pool.stats["total_allocated"] == 0


# -- 10 ------------------------------------------------------------------------------------------------------
# pool.free was a linear scan: the host's cost of a group rose from 67 to 142 microseconds as the pool grew.
def test_10_work_of_a_free_does_not_grow_with_the_pool() -> None:
    def lines_of_a_free(live: int) -> int:
        """Lines of Python that run; comparisons inside C would show as the scan's own loop."""
        pool = GPUTensorPool("cpu")
        tensors = [pool.allocate((4,)) for _ in range(live)]
        count = 0

        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        gc.collect()
        gc.disable()  # finalisers of what other tests left are lines, too
        sys.settrace(trace)
        try:
            pool.free(tensors[live // 2])
        finally:
            sys.settrace(before)
            gc.enable()
        return count

    assert lines_of_a_free(1000) == lines_of_a_free(10)


def test_10_calls_of_a_group_do_not_grow_with_what_is_saved(manager: PipelineOffloadManager) -> None:
    """Python calls from a group's start to its commit, with 10 groups alive before it and with 300."""
    init_chunk_handler(None, None, 1)
    graphs: list[Tensor] = []

    def calls_of_a_group() -> int:
        x = leaf()
        count = 0

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            count += event == "call"

        before = sys.getprofile()
        sys.setprofile(profile)
        try:
            graphs.append(square(x))
        finally:
            sys.setprofile(before)
        return count

    counts = [calls_of_a_group() for _ in range(300)]
    assert max(counts[-20:]) <= max(counts[:20])


# -- 11 ------------------------------------------------------------------------------------------------------
# A configuration whose names no layer has was accepted and did nothing, without a warning.
def test_11_name_that_no_layer_has_is_refused_with_the_names_that_there_are() -> None:
    shape: dict[str, Any] = {"dim": 32, "layers": 1, "heads": 4, "kv_heads": 2, "ffn": 48, "sequence": 16}
    with pytest.raises(
        ValueError, match="no layer has the mark 'core_atn'; the marks are attn_norm, qkv_linear, core_attn, "
    ):
        TransformerConfig(offload_modules=frozenset({"core_atn"}), **shape)
    with pytest.raises(
        ValueError,
        match=r"attn_proj saves core_attn's output, .* choose core_attn too, or leave attn_proj out",
    ):
        TransformerConfig(offload_modules=frozenset({"attn_proj"}), **shape)
