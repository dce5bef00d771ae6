"""Whole steps on the simulated device: whatever the schedule, the model or the caller does, gradients are those without offload.

Every comparison is bitwise, against the same program run with no manager at all.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import (
    GroupOrderError,
    PipelineOffloadManager,
    StepStats,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from parallel.transformer import GROUP_NAMES, TransformerConfig, build_stage_module
from tests.unit.groups import stack
from tests.unit.groups.stack import (
    EXECUTORS,
    NAMES,
    ROWS,
    WIDTH,
    Action,
    Driver,
    Layer,
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


def assert_nothing_is_left(manager: PipelineOffloadManager) -> None:
    transfers = manager.engine.transfers
    assert (transfers.device_bytes, transfers.in_flight()) == (0, (0, 0))
    assert manager.engine.arena.stats().lent == 0
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def run_both(
    steps: Sequence[Sequence[Action]], manager: PipelineOffloadManager, *, announced: bool = False, **build: Any
) -> list[StepStats]:
    """The steps without a manager and with this one: the same gradients, and nothing left after any step. Returns each step's figures."""
    expected = baseline(build_stages(**build), steps)
    with installed(manager):
        driver = Driver(build_stages(**build), announced=announced)
        found, stats = [], []
        for actions in steps:
            found.append(driver.step(actions))
            stats.append(manager.stats)
            assert_nothing_is_left(manager)
    assert_same(expected, found)
    return stats


# -- schedules ----------------------------------------------------------------------------------------------------------
SCHEDULES: dict[str, tuple[list[Action], int]] = {
    "no pipeline, one microbatch": (no_pipeline(1), 1),
    "no pipeline, three microbatches": (no_pipeline(3), 1),
    "gpipe": (gpipe(3), 1),
    "1F1B, last rank": (one_f_one_b(4, 1), 1),
    "1F1B, more microbatches than stages": (one_f_one_b(7, 3), 1),
    "two virtual stages, one microbatch at a time": (no_pipeline(2, stages=2), 2),
    "interleaved": (interleaved(4), 2),
    "interleaved, three virtual stages": (interleaved(2, stages=3), 3),
}


@pytest.mark.req("S2-98", "S2-102", "S3-76")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_of_every_schedule_over_several_iterations(name: str, executor: Any) -> None:
    actions, stages = SCHEDULES[name]
    for announced in (False, True):
        for stats in run_both([actions] * 3, build_manager(executor, seed=len(name)), announced=announced, count=stages):
            assert stats.saved == stats.kept + stats.spilled
            assert stats.spilled > 0
            assert stats.restored <= stats.spilled  # what is not fetched back was read before its source was let go


@pytest.mark.req("S2-102")
def test_backwards_of_paired_losses_come_last_in_first_out() -> None:
    run_both([lifo(4)] * 3, build_manager("random", seed=1))
    run_both([gpipe(2), lifo(3), lifo(3), gpipe(4)], build_manager("random", seed=2))


def test_one_backward_reads_several_forwards() -> None:
    """A contrastive loss: two forwards, one loss, so one backward goes through both chunks."""

    def gradients(module: nn.Module) -> list[Tensor]:
        outputs = []
        for seed in (1, 2, 3):
            if PipelineOffloadManager.OFFLOAD_MGR is not None:
                init_chunk_handler(None, None, 1)
            outputs.append(module(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))))
        (outputs[0] * outputs[1] + outputs[2]).square().mean().backward()
        found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
        return found

    with installed(None):
        expected = [gradients(build_stages()[0])] * 3
    with installed(build_manager("random", seed=3)) as manager:
        assert manager is not None
        module = build_stages()[0]
        found = []
        for _ in range(3):
            found.append(gradients(module))
            step_end()
            assert_nothing_is_left(manager)
    assert_same(expected, found)


@pytest.mark.req("S2-50", "S2-102")
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_microbatch_counts_may_change_between_steps(stages: int, announced: bool) -> None:
    counts = [2, 4, 2, 6, 2]
    steps = [interleaved(count) if stages == 2 else one_f_one_b(count, 2) for count in counts]
    spilled = [stats.spilled for stats in run_both(steps, build_manager("random", seed=4), announced=announced, count=stages)]
    assert spilled[3] > spilled[1] > spilled[2]  # the extra microbatches are not silently kept


@pytest.mark.req("S2-33", "S2-50")
@pytest.mark.parametrize("with_grad", [0, 1])
@pytest.mark.parametrize("announced", [False, True])
def test_evaluation_anywhere_changes_nothing(with_grad: int, announced: bool) -> None:
    """Before the first step, so before warm-up ends; between steps; and in the middle of one."""
    evaluation: Action = ("eval", with_grad, 2)
    steps: list[list[Action]] = [
        [evaluation],
        [evaluation, *gpipe(2)],
        gpipe(2),
        [*gpipe(2), evaluation],
        [evaluation, evaluation],
        [*gpipe(2)[:3], evaluation, *gpipe(2)[3:]],
        gpipe(2),
    ]
    manager = build_manager("random", seed=5)
    stats = run_both(steps, manager, announced=announced)
    assert not manager.is_warmup
    assert stats[-1].spilled > 0
    if announced or not with_grad:
        assert stats[-1].spilled == stats[2].spilled  # such an evaluation is no microbatch: the plan still fits


# -- settings -----------------------------------------------------------------------------------------------------------
@pytest.mark.req("S2-104")
@pytest.mark.parametrize(
    "config",
    [
        {"activation_offload_fraction": 0.0},
        {"activation_offload_fraction": 0.5},
        {"pp_rank": 3, "delta_offload_bytes_across_pp_ranks": 2000},
        {"max_inflight_offloads": 0},
        {"max_inflight_offloads": 1},
        {"max_spilling_bytes": 0},
        {"max_spilling_bytes": 1},
        {"max_restoring_bytes": 0},
        {"max_restoring_bytes": 1},
        {"device_limit_bytes": 0},
        {"device_limit_bytes": 1},
        {"device_limit_bytes": 20_000, "max_spilling_bytes": 3000, "max_restoring_bytes": 3000},
        {"host_limit_bytes": 0},
        {"piece_bytes": 1},
        {"piece_bytes": 1 << 30},
        {"min_offloaded_tensor_size": ROWS * WIDTH + 1},
        {"audit": True},
    ],
    ids=lambda config: " ".join(f"{name}={value}" for name, value in config.items()),
)
def test_settings_change_time_and_memory_and_never_results(config: dict[str, Any]) -> None:
    for announced in (False, True):
        run_both([one_f_one_b(4, 2)] * 4, build_manager("random", seed=6, **config), announced=announced)


@pytest.mark.req("S2-98")
@pytest.mark.parametrize(
    "names", [*((name,) for name in GROUP_NAMES if name != "attn_proj"), ("core_attn", "attn_proj"), GROUP_NAMES], ids="+".join
)
def test_gpt_with_each_mark_has_the_logits_and_gradients_of_the_one_without(names: tuple[str, ...]) -> None:
    config = TransformerConfig(dim=32, layers=2, heads=4, kv_heads=2, ffn=48, sequence=16)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))

    def run(module: nn.Module, steps: int) -> Iterator[list[Tensor]]:
        for _ in range(steps):
            found = []
            for _ in range(2):
                if PipelineOffloadManager.OFFLOAD_MGR is not None:
                    init_chunk_handler(None, None, 1)
                logits = module(tokens)
                found.append(logits.detach().clone())
                F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
            found += [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
            module.zero_grad()
            step_end()
            yield found

    with installed(None):
        expected = list(run(build_stage_module(config, 0, 1), 3))
    with installed(build_manager("random", seed=7)) as manager:
        assert manager is not None
        module = build_stage_module(config.with_(offload_modules=frozenset(names)), 0, 1)
        manager.register_parameters(module)
        assert_same(expected, list(run(module, 3)))
        assert manager.stats.spilled > 0
        assert set(manager.offload_summary_bytes) == set(names)


@pytest.mark.req("S3-78")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_keeps_its_bits(dtype: torch.dtype) -> None:
    def run() -> list[Tensor]:
        module = build_stages()[0].to(dtype)
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
        if PipelineOffloadManager.OFFLOAD_MGR is not None:
            init_chunk_handler(None, None, 1)
        F.dropout(module(x), 0.0).square().mean().backward()  # with a mask of booleans among the saved
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    with installed(None):
        expected = run()
    with installed(build_manager("random", seed=8)):
        assert_same([expected], [run()])


def test_autocast_keeps_its_bits_and_copies_no_weight() -> None:
    def run() -> list[Tensor]:
        module = build_stages(names=("fc1", "act", "fc2"))[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for seed in (0, 1):
                x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
                if PipelineOffloadManager.OFFLOAD_MGR is not None:
                    init_chunk_handler(None, None, 1)
                module(x).square().mean().backward()
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    with installed(None):
        expected = run()
    with installed(build_manager("random", seed=9)) as manager:
        assert manager is not None
        assert_same([expected], [run()])
        # two layers and two microbatches: the inputs of fc1, of gelu and of fc2, in bfloat16
        assert step_end().saved == 2 * 2 * 3  # type: ignore[union-attr]
        assert manager.stats.spill_bytes == 2 * 2 * (ROWS * WIDTH + 2 * ROWS * 2 * WIDTH) * 2


# -- what callers do ----------------------------------------------------------------------------------------------------
@contextmanager
def between_marks(call: Callable[[], None]) -> Iterator[None]:
    """`call()` before and after every mark and at both ends of every hook scope of `stack.Layer`."""
    start, commit, hooks = stack.group_start, stack.group_commit, stack.offload_hooks

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            call()
            result = function(*args, **keywords)
            call()
            return result

        return called

    @contextmanager
    def around_hooks() -> Iterator[None]:
        call()
        with hooks():
            call()
            yield
            call()
        call()

    vars(stack).update(group_start=around(start), group_commit=around(commit), offload_hooks=around_hooks)
    try:
        yield
    finally:
        vars(stack).update(group_start=start, group_commit=commit, offload_hooks=hooks)


@pytest.mark.req("S2-37", "S2-53", "S2-87")
def test_switch_may_flip_at_any_point_of_a_step() -> None:
    points = 0

    def count() -> None:
        nonlocal points
        points += 1

    steps = [gpipe(2)] * 2
    with between_marks(count):
        expected = baseline(build_stages(1, 1), steps)
    assert points == 2 * 2 * len(NAMES) * 8
    for flipped in range(1, points + 1, 3):
        seen = 0

        def flip(flipped: int = flipped) -> None:
            nonlocal seen
            seen += 1
            manager = PipelineOffloadManager.get_instance()
            if seen == flipped:
                manager.disable_offload()
            elif seen == flipped + 7:
                manager.enable_offload()

        with between_marks(flip), installed(build_manager("random", seed=flipped)) as manager:
            assert manager is not None
            driver = Driver(build_stages(1, 1), announced=bool(flipped % 2))
            for expected_step, actions in zip(expected, steps, strict=True):
                assert_same([expected_step], [driver.step(actions)])
                assert_nothing_is_left(manager)


def test_switch_between_forward_and_backward() -> None:
    steps = [gpipe(2)] * 2
    expected = baseline(build_stages(), steps)
    with installed(build_manager("random", seed=10)) as manager:
        assert manager is not None

        class Switching(Driver):
            def backward(self, stage: int, microbatch: int) -> None:
                assert manager is not None
                (manager.enable_offload if microbatch else manager.disable_offload)()
                super().backward(stage, microbatch)

        driver = Switching(build_stages())
        assert_same(expected, [driver.step(actions) for actions in steps])


class BrokenLayerError(Exception):
    pass


@pytest.mark.parametrize("announced", [False, True])
def test_exception_at_any_point_of_a_forward_and_then_the_step_is_run_again(announced: bool) -> None:
    steps = [gpipe(2)] * 2
    expected = baseline(build_stages(1, 1), steps)
    for broken in range(1, 8 * len(NAMES) + 1, 3):
        seen = 0

        def fail(broken: int = broken) -> None:
            nonlocal seen
            seen += 1
            if seen == broken:
                raise BrokenLayerError

        with installed(build_manager("random", seed=broken)) as manager:
            assert manager is not None
            driver = Driver(build_stages(1, 1), announced=announced)
            with between_marks(fail), pytest.raises(BrokenLayerError):
                driver.forward(0, 0)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            found = []
            for actions in steps:
                found.append(driver.step(actions))
                assert_nothing_is_left(manager)
            assert_same(expected, found)
            assert manager.stats.spilled > 0


def test_exception_in_a_backward_and_then_the_next_step() -> None:
    expected = baseline(build_stages(), [gpipe(2)])
    with installed(build_manager("random", seed=11)) as manager:
        assert manager is not None
        module = build_stages()[0]

        def fail(grad: Tensor) -> Tensor:
            raise BrokenLayerError

        init_chunk_handler(None, None, 1)
        middle = module[0](torch.randn(ROWS, WIDTH))
        middle.register_hook(fail)
        with pytest.raises(BrokenLayerError):
            module[1](middle).sum().backward()
        module.zero_grad()
        step_end()
        assert_nothing_is_left(manager)
        assert_same(expected, [Driver([module]).step(gpipe(2))])


def test_graph_may_be_read_again_with_retain_graph() -> None:
    with installed(None):
        module = build_stages()[0]
        module(torch.ones(ROWS, WIDTH)).square().mean().backward()
        expected = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    for executor in EXECUTORS:
        with installed(build_manager(executor, seed=12, max_spilling_bytes=1)) as manager:
            assert manager is not None
            module = build_stages()[0]
            for _ in range(3):
                init_chunk_handler(None, None, 1)
                loss = module(torch.ones(ROWS, WIDTH)).square().mean()
                for times in range(3):
                    loss.backward(retain_graph=times < 2)
                    found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
                    assert_same([expected], [found])
                    module.zero_grad()
                step_end()
                assert_nothing_is_left(manager)


def test_second_derivatives_are_those_of_the_marked_model_that_offloads_nothing() -> None:
    """Marks are nodes of the graph, so they may change the order in which a double backward adds three gradients up."""

    def run(min_elements: int) -> list[Tensor]:
        module = build_stages()[0]
        x = torch.ones(ROWS, WIDTH).requires_grad_()
        init_chunk_handler(None, None, min_elements)
        y = module(x).square().mean()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (gradient.square().sum() + y).backward()
        step_end()
        return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]

    with installed(build_manager("random", seed=13, max_spilling_bytes=1)) as manager:
        assert manager is not None
        expected = run(1 << 40)
        assert manager.stats.spilled == 0
        assert_same([expected], [run(1)])
        assert manager.stats.spilled > 0


@pytest.mark.req("S2-32", "S2-86")
@pytest.mark.parametrize("flush", [True, False])
def test_delayed_commits_with_a_flush_after_each_forward_or_never(flush: bool) -> None:
    steps = [one_f_one_b(4, 2)] * 3
    expected = baseline(build_stages(), steps)
    with installed(build_manager("random", seed=14)) as manager:
        assert manager is not None

        class Flushing(Driver):
            def forward(self, stage: int, microbatch: int) -> None:
                super().forward(stage, microbatch)
                assert manager is not None
                if flush:
                    manager.flush_delayed_groups()

        driver = Flushing(build_stages(delay=True))
        found = []
        for actions in steps:
            found.append(driver.step(actions))
            assert_nothing_is_left(manager)
        assert_same(expected, found)
        if flush:
            assert manager.stats.spilled > 0


# -- scopes and groups in one another -----------------------------------------------------------------------------------
def test_save_in_an_inner_scope_belongs_to_the_inner_group_and_after_its_commit_to_the_outer(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    a, b, c, d = (torch.randn(8 * size, requires_grad=True) for size in (1, 2, 3, 4))
    x = group_start(a, "outer")
    with offload_hooks():
        first = a * a
        y = group_start(b, "inner")
        with offload_hooks():
            second = b * b
            y = group_commit(y, "inner")
            third = c * c  # still inside the inner scope
        fourth = d * d
    x = group_commit(x, "outer")
    handler = manager.cur_forward_chunk()
    assert handler is not None
    assert {group.name: group.total_offload_bytes for group in handler.groups} == {"outer": 4 * (8 + 24 + 32), "inner": 4 * 16}
    (first.sum() + second.sum() + third.sum() + fourth.sum() + x.sum() + y.sum()).backward()
    for leaf in (c, d):
        assert torch.equal(leaf.grad, 2 * leaf.detach())  # type: ignore[arg-type]


def test_scope_may_outlive_its_group_and_its_step(manager: PipelineOffloadManager) -> None:
    x = torch.randn(64, requires_grad=True)
    init_chunk_handler(None, None, 1)
    y = group_start(x, "a")
    with offload_hooks():
        step_end()
        init_chunk_handler(None, None, 1)
        group_start(torch.ones(1), "a")  # the same group object, recorded in the chunk
        z = y * y
        group_commit(torch.ones(1), "a")
    z.sum().backward()
    assert torch.equal(x.grad, 2 * x.detach())  # type: ignore[arg-type]
    assert manager.step_end().saved == 0


def test_groups_that_overlap_without_nesting(manager: PipelineOffloadManager) -> None:
    def run() -> Tensor:
        x = torch.ones(8, 8).mul(3).requires_grad_()
        a = group_start(x, "a")
        with offload_hooks():
            y = a * a
        b = group_start(y, "b")
        z = group_commit(b, "a")
        with offload_hooks():
            z = z * z
        group_commit(z, "b").sum().backward()
        assert x.grad is not None
        return x.grad

    with installed(None):
        expected = run()
    with installed(build_manager("random", seed=15)) as other:
        assert other is not None
        for _ in range(3):
            init_chunk_handler(None, None, 1)
            assert torch.equal(run(), expected)
            assert step_end() == other.stats
        assert other.stats.saved == 2


def test_work_that_a_layer_does_on_a_thread_of_its_own_stays_on_the_device(manager: PipelineOffloadManager) -> None:
    """torch's saved-tensor hooks belong to a thread; what another one saves is right, and does not leave."""
    init_chunk_handler(None, None, 1)
    x = torch.randn(64, requires_grad=True)
    results: list[Tensor] = []
    y = group_start(x, "a")
    with offload_hooks():
        thread = threading.Thread(target=lambda: results.append(y * y))
        thread.start()
        thread.join()
        z = y * 3 * y
    group_commit(z + results[0], "a").sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())
    assert manager.step_end().saved == 2


def test_commit_in_the_next_chunk_is_an_error_that_says_what_is_open(manager: PipelineOffloadManager) -> None:
    init_chunk_handler(None, None, 1)
    x = group_start(torch.ones(4, requires_grad=True), "a")
    init_chunk_handler(None, None, 1)
    with pytest.raises(GroupOrderError, match=r"chunk s0m1: commit of group 'a', which has not been started; open: none"):
        group_commit(x, "a")


# -- checkpoints --------------------------------------------------------------------------------------------------------
def checkpointed(reentrant: bool, inside: bool, around: bool) -> Callable[[nn.Module, Tensor], Tensor]:
    """A forward whose body is checkpointed; with marks in the body, around the checkpoint, or both."""
    names = NAMES if inside else ()

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        assert isinstance(layer, Layer)
        layer.names = names

        def body(x: Tensor) -> Tensor:
            return torch.tanh(layer(x)) * 2

        if around:
            x = group_start(x, "around")
            with offload_hooks():
                y = checkpoint(body, x, use_reentrant=reentrant)
            return group_commit(y, "around")
        y = checkpoint(body, x, use_reentrant=reentrant)
        assert isinstance(y, Tensor)
        return y

    return forward


@pytest.mark.req("S3-62")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("inside", "around"), [(True, False), (False, True), (True, True)])
def test_group_inside_a_checkpoint_around_one_or_both(reentrant: bool, inside: bool, around: bool) -> None:
    """Inside, a non-reentrant checkpoint counts what its forward and its recompute save; taking a tensor away from one of them ended in
    "different metadata" at best, and would have ended in another tensor's bits where the shapes agree."""
    forward = checkpointed(reentrant, inside, around)

    def run(module: nn.Module) -> list[Tensor]:
        for seed in (1, 2):
            if PipelineOffloadManager.OFFLOAD_MGR is not None:
                init_chunk_handler(None, None, 1)
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for layer in module.children():
                x = forward(layer, x * 1)
            x.square().mean().backward()
        found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad()
        return found

    with installed(None):
        expected = run(build_stages()[0])
    for executor in EXECUTORS:
        with installed(build_manager(executor, seed=16, max_spilling_bytes=1)) as manager:
            assert manager is not None
            module = build_stages()[0]
            for _ in range(3):
                assert_same([expected], [run(module)])
                stats = step_end()
                assert stats is not None
                # the input of each checkpoint and nothing of its recomputation: two layers, two microbatches
                assert stats.saved == (4 if around else 0)
                assert stats.spill_bytes <= 4 * ROWS * WIDTH * 4
                assert_nothing_is_left(manager)


def test_group_inside_a_checkpoint_is_said_once(manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture) -> None:
    init_chunk_handler(None, None, 1)
    layer = Layer(("fc1", "act"))
    for _ in range(2):
        x = torch.randn(ROWS, WIDTH, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()  # type: ignore[union-attr]
    assert [message.split(",")[0] for message in caplog.messages] == ["group 'fc1' of chunk s0m0 is inside a non-reentrant checkpoint"]
    assert "put the group around the checkpoint" in caplog.messages[0]


def test_recompute_inside_a_group_keeps_what_it_saves(manager: PipelineOffloadManager) -> None:
    """A Function that drops its output and makes it again in its backward, as Megatron's output-discarding checkpoint does."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.detach().tanh() * x.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad(), offload_hooks():
                x = x.detach().requires_grad_()
                y = group_start(x, "a").tanh() * x
                group_commit(y, "a").backward(grad)
            assert x.grad is not None
            return x.grad

    x = torch.randn(64, requires_grad=True)
    (expected,) = torch.autograd.grad((x.tanh() * x).square().sum(), x)
    for _ in range(3):
        init_chunk_handler(None, None, 1)
        y = group_start(x * 1, "a")
        with offload_hooks():
            z = Again.apply(y).square()
        (found,) = torch.autograd.grad(group_commit(z, "a").sum(), x)
        assert torch.equal(found, expected)
        assert manager.step_end().saved == 2  # the input and the output; nothing of the recomputation


# -- anything at all ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(40))
def test_random_programs(seed: int) -> None:
    """Random models, schedules, counts, evaluations, settings, executors and flips of the switch, all at once."""
    dice = random.Random(seed)
    build = {
        "count": dice.choice([1, 1, 2]),
        "layers": dice.choice([1, 2, 3]),
        "names": tuple(name for name in NAMES if dice.random() < 0.7),
        "delay": dice.random() < 0.3,
    }
    steps: list[list[Action]] = []
    for _ in range(dice.randint(2, 4)):
        count = dice.randint(1, 4) if dice.random() < 0.4 else 2
        if build["count"] == 2:
            actions = no_pipeline(count, 2) if dice.random() < 0.5 else interleaved(2 * ((count + 1) // 2))
        else:
            actions = dice.choice([no_pipeline(count), gpipe(count), lifo(count), one_f_one_b(count, 2)])
        for _ in range(dice.choice([0, 0, 1, 2])):
            actions.insert(dice.randint(0, len(actions)), ("eval", dice.randint(0, 1), 1))
        steps.append(actions)
    choices: dict[str, list[Any]] = {
        "activation_offload_fraction": [0.0, 0.3, 0.5],
        "device_limit_bytes": [0, 1000, 8000, 30_000],
        "max_spilling_bytes": [0, 1, 3000],
        "max_restoring_bytes": [0, 1, 3000],
        "max_inflight_offloads": [0, 1, 2],
        "piece_bytes": [1, 1_000_000],
        "host_limit_bytes": [0, 64 << 20],
    }
    config = {name: dice.choice(values) for name, values in choices.items() if dice.random() < 0.25}
    flips = set(dice.sample(range(1, 400), dice.choice([0, 0, 1, 3, 20])))
    seen = 0

    def flip() -> None:
        nonlocal seen
        seen += 1
        manager = PipelineOffloadManager.OFFLOAD_MGR
        if manager is not None and seen in flips:
            (manager.disable_offload if manager.do_offload else manager.enable_offload)()

    manager = build_manager(dice.choice(EXECUTORS), seed=seed, **config)
    if dice.random() < 0.3:
        manager.set_order([action for action in steps[-1] if action[0] != "eval"])
    with between_marks(flip):
        run_both(steps, manager, announced=dice.random() < 0.5, **build)
