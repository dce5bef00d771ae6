"""What a profiler sees of one block, and what it finds out about its calls afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from offload import PipelineOffloadManager, group_commit, group_start
from offload.planner.operators import kind_of, may_differ
from offload.planner.profile import BlockProfile
from offload.planner.profiler import BlockProfiler
from tests.nets import Summed
from tests.unit.checkpoint.regions import FC1_BYTES, INPUT_BYTES, MM, ROWS, WIDTH, Block, assert_bits
from tests.unit.planner.families import build, profiled, run, run_plain, seeded, watched

aten = torch.ops.aten
Manager = PipelineOffloadManager


def profile_of(manager: Manager, module: nn.Module, x: Tensor | None = None, **kwargs: Any) -> BlockProfile:
    return profiled(manager, module, (seeded(ROWS, WIDTH) if x is None else x,), kwargs)[0]


def reason(profile: BlockProfile, operator: Any, number: int = 0) -> str:
    return profile.why_not.get(f"call {number} of {operator}", "")


class Of(nn.Module):
    """A block of one function over some weights."""

    def __init__(self, body: Callable[..., Any], weights: int = 2) -> None:
        super().__init__()
        self.body = body
        self.weights = nn.ParameterList(seeded(WIDTH, WIDTH, seed=number) / 4 for number in range(weights))

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.body(x, *self.weights, **kwargs)


# -- bytes and calls -----------------------------------------------------------------------------------------
def test_calls_are_numbered_with_their_bytes_and_those_after_the_last_save_are_told_apart(
    manager: Manager,
) -> None:
    profile = profile_of(manager, Block())
    calls = {(call.operator, call.number): call for call in profile.calls}
    first, last = calls[MM, 0], calls[MM, 1]
    assert (first.nbytes, first.saved_bytes, first.again) == (FC1_BYTES, FC1_BYTES, True)
    assert (last.nbytes, last.saved_bytes, last.again) == (INPUT_BYTES, 0, False)
    assert reason(profile, aten.t.default) == "it returns a view of its input"
    # the input and its norm, with a mean and a deviation a row, fc1's output, and gelu's
    assert profile.plain_bytes == 2 * INPUT_BYTES + 2 * 4 * ROWS + 2 * FC1_BYTES
    assert (profile.input_bytes, profile.given_bytes) == (INPUT_BYTES, INPUT_BYTES)
    assert profile.collectives == frozenset()


def test_what_the_block_is_given_beside_its_input_is_not_what_it_makes(manager: Manager) -> None:
    profile = profile_of(manager, Of(lambda x, w, v, mask: (x @ w * mask).sin()), mask=seeded(ROWS, WIDTH))
    assert profile.input_bytes == INPUT_BYTES
    assert profile.given_bytes == 2 * INPUT_BYTES
    assert profile.plain_bytes == 3 * INPUT_BYTES
    assert profile.menu[-1].made_again_bytes == INPUT_BYTES


def test_small_tensors_wait_in_no_group(manager: Manager) -> None:
    profiler = BlockProfiler(Block(), manager.engine, (seeded(ROWS, WIDTH),), min_elements=ROWS * WIDTH + 1)
    run(manager, Block(), (seeded(ROWS, WIDTH),), {}, None, profiler)
    profile = profiler.profile()
    assert (profile.input_bytes, profile.plain_bytes) == (0, 2 * FC1_BYTES)
    assert [call.nbytes for call in profile.calls if call.operator is MM] == [FC1_BYTES, 0]


def test_what_the_engine_computes_is_no_call_of_the_block(manager: Manager) -> None:
    """A commit inside the block copies."""

    def body(x: Tensor, w: Tensor, v: Tensor, marks: bool = True) -> Tensor:
        h = group_start(x @ w, "h") if marks else x @ w
        h = group_commit(h.tanh(), "h") if marks else h.tanh()
        return torch.tanh(h @ v) + x

    with_marks = profile_of(manager, Of(body))
    without = profile_of(manager, Of(body), marks=False)
    assert [call[:3] for call in with_marks.calls] == [call[:3] for call in without.calls]


# -- what is not kept ----------------------------------------------------------------------------------------
def test_an_output_that_is_written_in_the_block_is_not_kept_whatever_view_it_is_written_through(
    manager: Manager,
) -> None:
    def body(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        tracked = (x @ w).sin()
        tracked[0].add_(1.0)
        untracked = aten._unsafe_view.default(tracked.cos() @ v, [ROWS // 2, 2, WIDTH])
        untracked.mul_(2.0)
        return untracked.tanh().view(ROWS, WIDTH)

    profile = profile_of(manager, Of(body))
    assert reason(profile, aten.sin.default) == "its output is written by aten.add_.Tensor"
    assert reason(profile, MM, 1) == "its output is written by aten.mul_.Tensor"
    assert reason(profile, MM, 0) == reason(profile, aten.cos.default) == ""


@pytest.mark.parametrize("through", ["itself", "an untracked view"])
def test_an_output_that_is_written_after_the_block_is_found_when_the_profile_is_read(
    through: str, manager: Manager
) -> None:
    def body(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        z = aten._unsafe_view.default(y, [ROWS, WIDTH]) if through == "an untracked view" else y
        return z, (x @ v).tanh()

    block = Of(body)
    profiler = BlockProfiler(block, manager.engine, (seeded(ROWS, WIDTH),), min_elements=1)
    x = seeded(ROWS, WIDTH).requires_grad_()
    with watched(profiler):
        y, z = block(x * 1.0)
    assert reason(profiler.profile(), MM, 0) == ""
    y.add_(z)
    assert reason(profiler.profile(), MM, 0) == "its output is written after the block"
    assert reason(profiler.profile(), MM, 1) == ""


def test_inside_a_custom_function_a_write_that_no_operator_shows_is_found_by_the_bytes(
    manager: Manager,
) -> None:
    """It doubles each element, which changes the same bits in most of them."""
    module, args, kwargs = build("custom function")
    profile, _ = profiled(manager, module, args, kwargs)
    unseen = "a kernel that is no operator writes its output"
    for number in (0, 1):
        assert reason(profile, aten.sin.default, number) == unseen
        assert reason(profile, MM, number) == ""
        assert reason(profile, aten.zeros_like.default, number).startswith("it only makes a tensor")


def test_a_block_that_writes_to_its_input_is_not_recomputed(manager: Manager) -> None:
    block = Of(lambda x, w, v: x.add_(1.0) @ w)
    profiler = BlockProfiler(block, manager.engine, min_elements=1)
    h = seeded(ROWS, WIDTH).requires_grad_() * 1.0
    with watched(profiler):
        block(h)
    profile = profiler.profile()
    assert profile.only == "aten.add_.Tensor writes to what the block was given"
    assert [level.name for level in profile.menu] == ["plain"]


def test_statistics_that_an_instance_norm_copies_and_its_batch_norm_writes_are_not_kept(
    manager: Manager,
) -> None:
    """The schema does not say that they are written, and a recompute that was given them saved other bits."""
    norm = nn.InstanceNorm1d(WIDTH, affine=True, track_running_stats=True)
    profile = profile_of(manager, norm, seeded(2, WIDTH, ROWS))
    reasons = [why for why in profile.why_not.values() if "is written by aten." in why]
    assert len(reasons) == 2, profile.why_not
    assert profile.only == ""


def test_a_block_that_makes_a_jagged_tensor_is_not_recomputed(manager: Manager) -> None:
    """Its size is a symbol, of the recompute another one than of the forward: a CheckpointError. One that it
    is given has the same in both."""
    as_nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    made = profile_of(manager, Of(lambda x, w, v: (as_nested([x, x[1:]]) @ w).values()))
    given = profile_of(manager, Of(lambda x, w, v: torch.tanh(x @ w)), as_nested([seeded(ROWS, WIDTH)]))
    assert (made.only, given.only) == ("it makes a jagged tensor, whose size is another symbol each time", "")


def test_a_forward_that_raises_has_no_profile(manager: Manager) -> None:
    profiler = BlockProfiler(Block(), manager.engine)
    with pytest.raises(KeyError), watched(profiler):
        raise KeyError
    assert not profiler.ready()


# -- routing -------------------------------------------------------------------------------------------------
def test_a_router_that_cannot_be_kept_is_given_what_it_was_given(manager: Manager) -> None:
    """mixtral divides the chosen weights in place; its softmax is kept instead. qwen3 does not."""
    for family, operator in (("mixtral", aten._softmax.default), ("qwen3 moe", aten.topk.default)):
        module, args, kwargs = build(family)
        profile, _ = profiled(manager, module, args, kwargs)
        assert all((operator, 0) in keep for keep in profile.keeps[1:] if keep is not None)
    # max pooling makes whole numbers too, which nothing in the block reads
    module, args, kwargs = build("conv")
    assert not any(call.must for call in profiled(manager, module, args, kwargs)[0].calls)


@pytest.mark.parametrize("family", ["mixtral", "qwen3 moe"])
def test_a_profile_holds_for_other_inputs_though_they_call_other_experts(
    family: str, manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    module, args, kwargs = build(family)
    profile, _ = profiled(manager, module, args, kwargs)
    numbers = set()
    for seed in (2, 3):
        other = seeded(1, 1, WIDTH, seed=seed)
        shorter = {"position_embeddings": tuple(part[:, :1] for part in kwargs["position_embeddings"])}
        numbers.add(len(profiled(manager, module, (other,), shorter)[0].calls))
        expected = run_plain(module, (other,), shorter)
        for keep in profile.keeps:
            assert_bits(expected, run(manager, module, (other,), shorter, keep).values)
    assert numbers != {len(profile.calls)}
    assert caplog.records == []


# -- collectives ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
def test_functional_collectives_are_kept_at_every_level_and_their_groups_are_named(manager: Manager) -> None:
    block = Of(lambda x, w, v: torch.tanh(torch.tanh(Summed.apply(torch.tanh(x @ w)) * 2.0) @ v))
    args = (seeded(ROWS, WIDTH),)
    expected = run_plain(block, args, {})
    profile = profile_of(manager, block)
    reduce = torch.ops._c10d_functional.all_reduce.default
    assert profile.collectives == {dist.group.WORLD.group_name}
    assert len(profile.keeps) > 1
    for keep, level in zip(profile.keeps, profile.menu, strict=True):
        assert keep is None or (reduce, 0) in keep
        found = run(manager, block, args, {}, keep)
        assert_bits(expected, found.values)
        assert found.saved_bytes == level.saved_bytes


@pytest.mark.usefixtures("one_rank")
def test_of_dtensors_the_groups_of_their_mesh_are_named_because_collectives_run_below_their_operators(
    manager: Manager,
) -> None:
    block = Block()
    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(block, mesh, {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()})
    profile = profile_of(manager, block)
    assert profile.collectives == {mesh.get_group().group_name}
    assert profile.plain_bytes == 2 * INPUT_BYTES + 2 * 4 * ROWS + 2 * FC1_BYTES
    assert run(manager, block, (seeded(ROWS, WIDTH),), {}, None).saved_bytes == profile.plain_bytes


@pytest.mark.usefixtures("one_rank")
def test_what_fsdp_gathers_around_a_block_is_no_call_of_it_and_no_reason_not_to_recompute(
    manager: Manager,
) -> None:
    """A recompute finds the parameters gathered."""
    args = (seeded(ROWS, WIDTH),)
    alone = profile_of(manager, Block())
    block = Block()
    policy = MixedPrecisionPolicy(param_dtype=torch.float64)
    fully_shard(block, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    expected = run_plain(block, args, {})
    profile, observed = profiled(manager, block, args, {})
    assert_bits(expected, observed.values)
    assert (profile.only, profile.collectives) == ("", frozenset())
    assert [call[:2] for call in profile.calls] == [call[:2] for call in alone.calls]
    kept = {(MM, 0), (aten.gelu.default, 0)}
    for keep in (*profile.keeps, kept):
        assert_bits(expected, run(manager, block, args, {}, keep).values)


def test_on_a_gpu_what_may_give_other_bits_in_a_second_call_is_kept() -> None:
    cpu, elsewhere = torch.ones(4), torch.ones(4, device="meta")
    assert may_differ(aten.cumsum.default, (elsewhere, 0), {})
    assert may_differ(aten.index_add_.default, (elsewhere, 0, elsewhere, elsewhere), {})
    assert not may_differ(aten.cumsum.default, (cpu, 0), {})
    assert not may_differ(aten.mm.default, (elsewhere, elsewhere), {})
    assert not may_differ(torch.ops.higher_order.flex_attention, (elsewhere,), {})


@pytest.mark.usefixtures("one_rank")
def test_a_block_that_communicates_in_place_is_not_recomputed(manager: Manager) -> None:
    def body(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        y = x @ w
        dist.all_reduce(y.detach())
        return torch.tanh(y)

    profile = profile_of(manager, Of(body))
    assert profile.collectives == {dist.group.WORLD.group_name}
    assert profile.only == "c10d.allreduce_.default communicates in place, and a recompute would do it again"
    assert profile.keeps == (None,)


# -- seconds -------------------------------------------------------------------------------------------------
def test_seconds_are_those_of_the_plain_forward_where_it_was_measured(manager: Manager) -> None:
    alone = profile_of(manager, Block())
    assert alone.forward_s == pytest.approx(sum(call.device_s for call in alone.calls))
    profile = alone.timed(alone.forward_s / 4)
    assert profile.forward_s == pytest.approx(alone.forward_s / 4)
    assert [call.device_s for call in profile.calls] == pytest.approx(
        [call.device_s / 4 for call in alone.calls]
    )


def test_on_a_device_seconds_are_read_from_events_without_blocking(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = manager.engine.device
    monkeypatch.setattr(device, "torch_device", torch.device("meta"), raising=False)
    monkeypatch.setattr(device, "elapsed_ms", lambda start, end: 1e6)
    passed = [False]
    monkeypatch.setattr(device, "poll", lambda event: passed[0])
    args = (seeded(ROWS, WIDTH),)
    profiler = BlockProfiler(Block(), manager.engine, args, min_elements=1)
    with watched(profiler):
        Block()(args[0].requires_grad_() * 1.0)
    assert not profiler.ready()
    passed[0] = True
    assert profiler.ready()
    assert {call.device_s for call in profiler.profile().calls} == {1e3}


# -- compiled blocks, kinds ----------------------------------------------------------------------------------
def test_a_compiled_block_is_plain_or_recomputed_whole(manager: Manager) -> None:
    block = Block()
    block._compiled_call_impl = block._call_impl  # type: ignore[assignment]
    profile = profile_of(manager, block)
    assert profile.whole == "the block is compiled: its calls are not seen"
    assert [level.name for level in profile.menu] == ["plain", "checkpoint"]
    assert profile.keeps == (None, frozenset())


class Layer(Block):
    def __init__(self, index: int, window: Any = None, kind: str = "full", drop: float = 0.0) -> None:
        super().__init__()
        self.index, self.window, self.kind = index, window, kind
        self.drop = nn.Dropout(drop)


def test_blocks_of_one_kind_differ_in_their_index_and_in_how_much_they_drop() -> None:
    first, second = Layer(0), Layer(1)
    assert kind_of(first) == kind_of(second)
    rates = [kind_of(Layer(at, drop=0.1 * at)) for at in range(4)]
    assert rates[0] == kind_of(first)
    assert rates[1] == rates[2] == rates[3] != rates[0]
    assert len({kind_of(layer) for layer in (first, second)}) == 1
    others = [Layer(0, window=8), Layer(0, kind="sliding"), Layer(0).eval(), Layer(0).bfloat16(), Block()]
    windows = ((1, 2), (2, 2), torch.float16, torch.relu, nn.functional.silu, *map(nn.MaxPool1d, (2, 3)))
    others += [Layer(0, window=window) for window in windows]
    others += [Layer(0).requires_grad_(False), Layer(0)]
    others[-1]._compiled_call_impl = others[-1]._call_impl
    assert len({kind_of(layer) for layer in (first, *others)}) == 1 + len(others)
