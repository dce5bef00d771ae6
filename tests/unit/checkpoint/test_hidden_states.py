"""A block whose call is recomputed by hooks: what leaves, what comes back, and the bits of the result."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, checkpoint

import offload
from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.checkpoint.hidden_states import HIDDEN_STATES, RecomputedCall
from offload.checkpoint.operators import default_operators
from offload.checkpoint.selective import contexts_for
from offload.device.sim import SimDevice
from offload.errors import CaptureError, OffloadError
from offload.transfer.block import BlockState
from tests.unit.checkpoint.recomputed import (
    BLOCKS,
    INPUT_BYTES,
    ROWS,
    WIDTH,
    Block,
    Model,
    assert_bits,
    build,
    compared,
    recomputed,
    source,
    train,
    train_step,
    values,
)
from tests.unit.checkpoint.regions import FC1_BYTES, assert_empty, noted_reads
from tests.unit.groups.stack import (
    EXECUTORS,
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
    one_f_one_b,
)

MASK_BYTES = 4 * ROWS * ROWS
Manager = PipelineOffloadManager


def zero_bubble() -> list[Action]:
    return [
        *(("F", 0, mb) for mb in range(3)),
        *(("I", 0, mb) for mb in range(3)),
        *(("W", 0, mb) for mb in range(3)),
    ]


def hooks_left() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


# -- what leaves ---------------------------------------------------------------------------------------------
@pytest.mark.req("S4-1", "S4-5", "S4-6", "S4-7", "S4-15", "S4-42")
@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_only_the_input_of_each_block_is_saved_and_the_gradients_have_the_same_bits(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
        assert manager is not None
        for stats in compared(build(), manager, steps=3):
            assert (stats.saved, stats.refused) == (BLOCKS, 0)
            assert (stats.spilled, stats.spill_bytes) == (BLOCKS, BLOCKS * INPUT_BYTES)
        # no plan keeps what the mode is for
        assert manager.step_offload_bytes == {HIDDEN_STATES: BLOCKS * INPUT_BYTES}
        assert_empty(manager)


@pytest.mark.req("S4-2")
@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_mask_that_the_blocks_share_stays(manager: Manager, by_keyword: bool) -> None:
    mask = torch.rand(ROWS, ROWS)
    arguments: Any = {"mask": mask} if by_keyword else {}
    [stats] = compared(build(), manager, *(() if by_keyword else (mask,)), **arguments)
    assert stats.spill_bytes == BLOCKS * INPUT_BYTES


class Keyworded(Block):
    """Takes its input in another way, and hands it to the block by keyword."""

    def forward(self, *, state: dict[str, Any], factors: tuple[float, Any]) -> dict[str, Any]:  # type: ignore[override]
        y = super().forward(x=state["x"], mask=factors[1])
        return {"x": y * factors[0], "calls": [*state["calls"], "one"]}


class KeywordModel(Model):
    def forward(self, x: Tensor) -> Tensor:
        state: dict[str, Any] = {"x": x * 1.0, "calls": []}
        for block in self.blocks:
            state = block(state=state, factors=(0.5, torch.ones(ROWS, ROWS)))
        assert state["calls"] == ["one"] * BLOCKS
        result: Tensor = state["x"]
        return result


@pytest.mark.req("S4-9")
def test_tensors_in_keywords_and_containers_are_saved_like_those_given_by_position(manager: Manager) -> None:
    torch.manual_seed(0)
    model = KeywordModel([Keyworded() for _ in range(BLOCKS)])
    [stats] = compared(model, manager)
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * INPUT_BYTES)


class Second(nn.Module):
    """The first argument is a parameter, the second is too small, the third may leave."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, weight: Tensor, small: Tensor, x: Tensor, again: Tensor) -> Tensor:
        y: Tensor = self.block(x * weight * small)
        return y + again


@pytest.mark.req("S4-2")
def test_the_first_argument_that_may_leave_does_and_one_given_twice_is_saved_once(manager: Manager) -> None:
    torch.manual_seed(0)
    second = Second()
    plain = copy.deepcopy(second)

    def run(module: Second) -> list[Tensor]:
        x = source()
        h = x * 1.0
        loss = module(module.weight, torch.ones(1), h, h).square().sum()
        del h
        loss.backward()
        return values(module, x)

    expected = run(plain)
    with recomputed([second], manager):
        init_chunk_handler(None, None, 2)
        assert_bits(expected, run(second))
    stats = step_end()
    assert stats is not None
    assert (stats.saved, stats.spill_bytes) == (1, INPUT_BYTES)


def test_a_view_of_a_larger_tensor_leaves_alone(manager: Manager) -> None:
    """Transposed, and in the midst of its storage."""
    model = build(count=1)
    plain = copy.deepcopy(model)

    def run(module: Model, block: nn.Module) -> list[Tensor]:
        wide = torch.randn(3, WIDTH, ROWS, generator=torch.Generator().manual_seed(3), requires_grad=True)
        view = (wide * 2.0)[1].t()
        loss = block(view).square().sum()
        del view
        loss.backward()
        return values(module, wide)

    expected = run(plain, plain.blocks[0])
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        assert_bits(expected, run(model, model.blocks[0]))
    stats = step_end()
    assert stats is not None
    assert stats.spill_bytes == INPUT_BYTES


class Seen(NamedTuple):
    requires_grad: bool
    is_leaf: bool
    shape: torch.Size
    stride: tuple[int, ...]
    autocast: bool


class Watching(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        autocast = torch.is_autocast_enabled("cpu")
        self.seen.append(Seen(x.requires_grad, x.is_leaf, x.size(), x.stride(), autocast))
        return super().forward(x, mask)


@pytest.mark.req("S4-8")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_recompute_gets_an_input_of_the_same_make(manager: Manager, requires_grad: bool) -> None:
    model = build(Watching, count=2)
    first = torch.randn(WIDTH, ROWS).t().requires_grad_(requires_grad)
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        y = model.blocks[1](model.blocks[0](first))
        y.sum().backward()
    step_end()
    for block in model.blocks:
        seen = block.seen
        assert isinstance(seen, list)
        assert len(seen) == 2
        assert seen[0] == seen[1]
    assert model.blocks[0].seen[0].requires_grad is requires_grad  # type: ignore[union-attr,index]


@pytest.mark.req("S4-9")
def test_dropout_draws_the_same_numbers_again_and_leaves_the_random_state_alone(manager: Manager) -> None:
    model = build(lambda: Block(dropout=0.5))
    plain = copy.deepcopy(model)
    expected = train(plain, seed=5)
    after = torch.get_rng_state()
    found, _ = train_step(model, manager, seed=5)
    assert_bits(expected, found)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.req("S4-9")
def test_a_recompute_outside_of_autocast_computes_as_its_forward_inside(manager: Manager) -> None:
    model = build(Watching)
    plain = copy.deepcopy(model)

    def run(module: Model) -> list[Tensor]:
        x = source()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(x).float().square().mean()
        loss.backward()
        return [loss.detach(), *values(module, x)]

    expected = run(plain)
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        assert_bits(expected, run(model))
    step_end()
    assert [seen.autocast for block in model.blocks for seen in block.seen] == [True] * 2 * BLOCKS  # type: ignore[union-attr]


# -- as torch's checkpoint -----------------------------------------------------------------------------------
def test_the_recompute_stops_at_the_last_saved_tensor(manager: Manager) -> None:
    ran: list[str] = []

    class Late(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = super().forward(x, mask)
            ran.append("end")
            return y

    train_step(build(Late), manager)
    assert ran == ["end"] * BLOCKS  # of the forwards only


def test_a_block_that_does_not_repeat_itself_raises_torchs_error(manager: Manager) -> None:
    class Changing(Block):
        calls = 0

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            self.calls += 1
            return super().forward(x if self.calls == 1 else x.sin(), mask)

    block = Changing()
    with recomputed([block], manager):
        init_chunk_handler(None, None, 1)
        y = block(source() * 1.0)
        with pytest.raises(CheckpointError, match=r"(?s)different (metadata|number of tensors)"):
            y.sum().backward()
    del y
    step_end()
    assert not hooks_left()


def test_a_cache_that_the_forward_adds_to_is_refused_by_name(manager: Manager) -> None:
    """A recompute would attend to every key twice. One that the block only reads is an argument like
    others."""

    class Cache(dict[str, Tensor]):
        def get_seq_length(self) -> int:
            return 0

    class Caching(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    model = build(Caching, count=1)
    init_chunk_handler(None, None, 1)
    with recomputed(list(model.blocks), manager):
        with pytest.raises(
            OffloadError, match=r"a Caching that is recomputed was called with a Cache.*use_cache"
        ):
            model(source(), cache=Cache())
        with torch.no_grad():
            model(source(), cache=Cache())
        model.requires_grad_(False)(source().detach(), cache=Cache())
        model.requires_grad_()
        assert not hooks_left()
    step_end()
    model.blocks[0]._can_checkpoint_with_cache = True  # type: ignore[assignment]
    compared(model, manager, cache=Cache())


def test_an_input_that_is_changed_in_place_afterwards_raises_as_autograd_does(manager: Manager) -> None:
    block = build(count=1).blocks[0]
    with recomputed([block], manager):
        init_chunk_handler(None, None, 1)
        h = source() * 1.0
        y = block(h)
        h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    del y, h
    step_end()


@pytest.mark.req("S4-46")
def test_a_second_backward_over_a_retained_graph_recomputes_again(manager: Manager) -> None:
    model = build(lambda: Block(dropout=0.5))
    plain = copy.deepcopy(model)

    def run(module: Model) -> list[Tensor]:
        torch.manual_seed(1)
        x = source()
        loss = module(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return values(module, x)

    expected = run(plain)
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        assert_bits(expected, run(model))
    stats = step_end()
    assert stats is not None
    assert stats.saved == BLOCKS


def test_gradients_may_be_asked_for_by_inputs(manager: Manager) -> None:
    """As torch's non-reentrant checkpoint, and unlike the other."""
    model = build()
    plain = copy.deepcopy(model)
    x, other = source(), source()
    expected = torch.autograd.grad(plain(x).sum(), [x])
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        assert_bits(expected, torch.autograd.grad(model(other).sum(), [other]))
    step_end()


def test_a_recompute_after_the_hooks_were_taken_off_is_not_remembered_for_the_next_ones(
    manager: Manager,
) -> None:
    block = build(count=1).blocks[0]
    init_chunk_handler(None, None, 1)
    with recomputed([block], manager):
        y = block(source() * 1.0)
    y.sum().backward()
    with recomputed([block], manager):
        block(source() * 1.0).sum().backward()
    stats = step_end()
    assert stats is not None
    assert stats.saved == 2


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(0.5), Block(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(self.first(x).tanh())
        return y


def test_calls_inside_a_recomputed_call_are_recomputed_with_it_and_only_its_input_leaves(
    manager: Manager,
) -> None:
    model = build(Outer, count=2)
    plain = copy.deepcopy(model)
    expected = train(plain)
    inner = [block for outer in model.blocks for block in (outer.first, outer.second)]  # type: ignore[union-attr]
    with recomputed([*model.blocks, *inner], manager):  # type: ignore[list-item]
        init_chunk_handler(None, None, 1)
        found = train(model)
    stats = step_end()
    assert stats is not None
    assert_bits(expected, found)
    assert (stats.saved, stats.spill_bytes) == (2, 2 * INPUT_BYTES)


def test_one_block_called_many_times_has_a_call_of_its_own_each_time(manager: Manager) -> None:
    """Also inside itself: the module that is called again is not taken for its own recompute."""

    class Recursive(Block):
        def forward(self, x: Tensor, depth: Any = 1) -> Tensor:
            y = super().forward(x)
            result: Tensor = self(y, depth - 1) if depth else y
            return result

    torch.manual_seed(0)
    block = Recursive()
    model = Model([block, block])
    [stats] = compared(model, manager)
    assert (stats.saved, stats.spill_bytes) == (2, 2 * INPUT_BYTES)


def test_a_block_inside_somebodys_own_checkpoint_gives_its_input_to_that_one(manager: Manager) -> None:
    model = build(Outer, count=1)
    plain = copy.deepcopy(model)
    outer = model.blocks[0]

    def run(module: Model, block: nn.Module) -> list[Tensor]:
        torch.manual_seed(1)
        x = source()
        loss = checkpoint(block, x * 1.0, use_reentrant=False).square().mean()
        loss.backward()
        return [loss.detach(), *values(module, x)]

    expected = run(plain, plain.blocks[0])
    with recomputed([outer.first, outer.second], manager):  # type: ignore[list-item]
        init_chunk_handler(None, None, 1)
        found = run(model, outer)
    stats = step_end()
    assert stats is not None
    assert_bits(expected, found)
    assert stats.saved == 0


# -- where nothing is recomputed, or nothing leaves ----------------------------------------------------------
@pytest.mark.req("S4-45")
def test_without_gradients_nothing_is_saved_and_a_frozen_block_runs_as_without_hooks(
    manager: Manager,
) -> None:
    model = build(Watching)
    x = source()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        with torch.no_grad():
            model(x)
        model.requires_grad_(False)
        model(x.detach())
        assert manager.engine.transfers.device_bytes == 0
        # it is enough that the input requires one
        model(x).sum().backward()
    stats = step_end()
    assert stats is not None
    assert stats.saved == BLOCKS
    assert [len(block.seen) for block in model.blocks] == [4] * BLOCKS  # type: ignore[arg-type]


def test_an_evaluation_with_gradients_is_recomputed_like_training(manager: Manager) -> None:
    model = build(lambda: Block()).eval()
    compared(model, manager)


@pytest.mark.req("S4-45")
def test_a_forward_whose_backward_never_runs_leaves_nothing_behind(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        dropped = model(source())
        init_chunk_handler(None, None, 1)
        kept = model(source(2)).sum()
    del dropped
    kept.backward()
    step_end()
    assert "whose backward has not run" not in caplog.text
    assert_empty(manager)
    assert not hooks_left()


def test_while_no_chunk_is_current_a_call_is_recomputed_all_the_same_which_is_said_once(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    model = build(Watching)
    with recomputed(list(model.blocks), manager):
        found = train(model)
        train(model)
    assert_bits(train(model), found)
    assert [len(block.seen) for block in model.blocks] == [5] * BLOCKS  # type: ignore[arg-type]
    assert manager.engine.last_stats.saved == 0
    [record] = caplog.records
    assert "group 'hidden_states' is started while no chunk is current" in record.getMessage()


def test_with_offload_switched_off_a_call_is_recomputed_and_nothing_leaves(manager: Manager) -> None:
    manager.disable_offload()
    [stats] = compared(build(), manager)
    assert stats.saved == 0


def test_inputs_that_are_all_too_small_are_said_so(
    manager: Manager, caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1 << 20)
        train(model)
        step_end()
    assert "nothing leaves: all that autograd saved in groups 'hidden_states' is" in caplog.text
    assert f"The largest tensor that is too small has {ROWS * WIDTH:,} elements" in caplog.text


def test_an_exception_in_the_forward_takes_off_exactly_what_the_call_put_on(manager: Manager) -> None:
    class Failing(Block):
        fails = True

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = super().forward(x, mask)
            if self.fails:
                raise KeyError("in the forward")
            return y

    model = build(Failing)
    plain = copy.deepcopy(model)
    for block in (*plain.blocks, *model.blocks[:2]):
        block.fails = False  # type: ignore[assignment]
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        with pytest.raises(KeyError, match="in the forward"):
            model(source())
        assert not hooks_left()
        for block in model.blocks:
            block.fails = False  # type: ignore[assignment]
        init_chunk_handler(None, None, 1)
        found = train(model)
    step_end()
    assert_bits(train(plain), found)
    assert_empty(manager)


def test_a_call_that_cannot_begin_leaves_no_hooks(manager: Manager) -> None:
    block = build(count=1).blocks[0]

    def no_contexts() -> Any:
        raise ValueError("no contexts")

    init_chunk_handler(None, None, 1)
    call = RecomputedCall(manager, block, (source(),), {}, no_contexts)
    with pytest.raises(ValueError, match="no contexts"):
        call.begin()
    call.end(None)
    call.abort()
    assert not hooks_left()
    step_end()


def test_a_call_in_a_capture_outside_of_a_region_is_refused_and_opens_no_group(manager: Manager) -> None:
    block = build(count=1).blocks[0]
    init_chunk_handler(None, None, 1)
    device = manager.engine.device
    assert isinstance(device, SimDevice)
    with device.capture():
        call = RecomputedCall(manager, block, (source() * 1.0,), {})
        with pytest.raises(
            CaptureError, match=r"group 'hidden_states' in a graph under capture, outside of a"
        ):
            call.begin()
    assert not hooks_left()
    handler = manager.cur_forward_chunk()
    assert handler is not None
    assert handler.groups == []
    step_end()


# -- time and room -------------------------------------------------------------------------------------------
@pytest.mark.req("S4-4")
def test_the_next_input_is_fetched_before_the_recompute_that_reads_it() -> None:
    """While a block is recomputed, the input of the one before it is on its way or there."""
    states: list[BlockState] = []

    class Asking(Block):
        number = 0

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if torch._C._current_graph_task_id() != -1 and self.number:
                handler = manager.cur_forward_chunk()
                assert handler is not None
                states.append(handler.saved.blocks[self.number - 1].state)
            return super().forward(x, mask)

    with installed(build_manager("late", max_spilling_bytes=INPUT_BYTES)) as manager:
        assert manager is not None
        model = build(Asking)
        for number, block in enumerate(model.blocks):
            block.number = number  # type: ignore[assignment]
        train_step(model, manager)
    assert len(states) == BLOCKS - 1
    assert set(states) <= {BlockState.RESTORING, BlockState.RESTORED, BlockState.RESIDENT}


@pytest.mark.req("S4-3", "S4-4")
@pytest.mark.parametrize("executor", ["late", "early"])
def test_after_the_forward_two_inputs_are_on_the_device_and_in_the_backward_one_is_fetched_ahead(
    executor: Any,
) -> None:
    """Of eight, though the caps in bytes have room for all: a block computes longer than its input is
    copied. In the backward the one that is being read may count, too."""
    held: list[int] = []

    class Asking(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            held.append(manager.engine.transfers.device_bytes)
            return super().forward(x, mask)

    with installed(build_manager(executor)) as manager:
        assert manager is not None
        model = build(Asking, count=8)
        for _ in range(2):
            held.clear()
            with recomputed(list(model.blocks), manager):
                init_chunk_handler(None, None, 1)
                y = model(source())
                held.append(manager.engine.transfers.device_bytes)
                y.sum().backward()
            stats = step_end()
            assert stats is not None
            assert stats.spilled == 8
            forward, after, backward = held[:8], held[8], held[9:]
            assert forward == [INPUT_BYTES, *[2 * INPUT_BYTES] * 7]
            assert after == 2 * INPUT_BYTES  # layers - 2 are gone
            assert max(backward) <= 3 * INPUT_BYTES
            assert max(backward[3:]) <= 2 * INPUT_BYTES  # no longer those that the forward left behind
            assert stats.device_bytes_peak <= 3 * INPUT_BYTES


@pytest.mark.req("S4-3", "S4-44")
def test_sources_alive_are_bounded_by_bytes_that_a_user_sets() -> None:
    """max_spilling_bytes of two inputs: a third copy makes compute wait for the first. Never the host."""
    in_flight: list[int] = []

    class Asking(Block):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            in_flight.append(manager.engine.transfers.in_flight()[0])  # one input each
            return super().forward(x, mask)

    with installed(build_manager("late", max_spilling_bytes=2 * INPUT_BYTES)) as manager:
        assert manager is not None
        model = build(Asking, count=8)
        init_chunk_handler(None, None, 1)
        with recomputed(list(model.blocks), manager):
            y = model(source())
            assert len(in_flight) == 8
            assert max(in_flight) == 2
            y.sum().backward()
        step_end()


@pytest.mark.req("S4-47")
def test_with_microbatches_in_flight_the_prefetch_follows_the_order_that_was_recorded(
    manager: Manager,
) -> None:
    """Three forwards, then their backwards, first come first read: not the reverse of the saves."""
    model = build()
    plain = copy.deepcopy(model)

    def run(module: Model, announce: bool) -> list[Tensor]:
        losses, inputs = [], []
        for microbatch in range(3):
            if announce:
                init_chunk_handler(None, None, 1)
            inputs.append(source(microbatch))
            losses.append(module(inputs[-1]).square().mean())
        if announce:
            ahead.append([str(coming.chunk) for coming in manager._coming])
        for loss in losses:
            loss.backward()
        return [*(x.grad for x in inputs if x.grad is not None), *values(module, inputs[0])]

    ahead: list[list[str]] = []
    expected = run(plain, False)
    for _ in range(2):
        with recomputed(list(model.blocks), manager), noted_reads(manager) as reads:
            assert_bits(expected, run(model, True))
        step_end()
        chunks = list(dict.fromkeys(label.partition("/")[0] for label in reads))
        assert chunks == ["s0m0", "s0m1", "s0m2"]
    assert ahead[1] == ["s0m0", "s0m1", "s0m2"]


@pytest.mark.req("S4-47")
@pytest.mark.parametrize("announced", [False, True])
@pytest.mark.parametrize(
    "actions",
    [gpipe(4), lifo(4), one_f_one_b(5, 2), interleaved(4, 2), zero_bubble()],
    ids=["gpipe", "lifo", "1f1b", "interleaved", "split backwards"],
)
def test_under_any_order_of_forwards_and_backwards_the_gradients_have_the_same_bits(
    actions: Sequence[Action], announced: bool
) -> None:
    """Split backwards recompute in the input half and again in the weight half."""
    steps = [list(actions)] * 3
    count = 1 + max(stage for _, stage, _ in actions)
    expected = baseline(build_stages(count, names=()), steps)
    for executor in EXECUTORS:
        stages = build_stages(count, names=())
        with installed(build_manager(executor)) as manager:
            assert manager is not None
            blocks = [layer for stage in stages for layer in stage]
            with recomputed(blocks, manager):
                driver = Driver(stages, announced=announced)
                assert_same(expected, [driver.step(step) for step in steps])
            assert manager.stats.saved == sum(kind == "F" for kind, _, _ in actions) * len(stages[0])
            assert_empty(manager)


@pytest.mark.req("S4-10", "S4-37", "S4-43")
def test_nothing_grows_over_steps_though_some_forwards_have_no_backward(manager: Manager) -> None:
    model = build()
    labels: list[list[str]] = []
    held: list[int] = []
    with recomputed(list(model.blocks), manager):
        for step in range(6):
            init_chunk_handler(None, None, 1)
            with noted_reads(manager) as reads:
                train(model, seed=step)
                dropped = model.blocks[0](source() * 1.0)
            step_end()
            del dropped
            labels.append(list(reads))
            held.append(manager.engine.arena.held_bytes)
            assert_empty(manager)
    # names start anew in every step
    assert labels[1] == labels[-1]
    assert len(set(held[1:])) == 1


@pytest.mark.req("S4-35")
def test_a_report_counts_what_was_seen_marked_offloaded_restored_and_skipped() -> None:
    """Seen are the arguments of every call: those that were marked, one a call, and those that stayed. Of the
    first step, whose saves are looked at one by one."""
    with installed(build_manager(max_spilling_bytes=INPUT_BYTES)) as manager:
        assert manager is not None
        [stats] = compared(build(), manager, torch.rand(ROWS, ROWS))
        group = offload.report().total.groups[HIDDEN_STATES]
    skipped = sum(stayed.tensors for stayed in group.stayed.values())
    assert list(group.stayed) == ["an argument of a recomputed block, of which one leaves"]
    marked, offloaded, restored = stats.saved, stats.spilled, stats.restored
    assert (marked, offloaded) == (BLOCKS, BLOCKS)
    # one argument of each block; before torch 2.13 a checkpoint saves an empty tensor of its own beside
    assert skipped in (BLOCKS, 2 * BLOCKS)
    assert 0 < restored <= offloaded  # the last ones are still on the device when they are read
    assert group.moved_bytes == stats.spill_bytes == BLOCKS * INPUT_BYTES
    assert stats.restore_bytes == restored * INPUT_BYTES


# -- other models --------------------------------------------------------------------------------------------
def test_weights_that_are_partly_frozen(manager: Manager) -> None:
    model = build()
    model.blocks[0].requires_grad_(False)
    model.blocks[2].fc1.requires_grad_(False)  # type: ignore[union-attr]
    compared(model, manager)
    # and where the first blocks have nothing to do
    x = source().detach()
    plain = copy.deepcopy(model)
    plain(x).sum().backward()
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        model(x).sum().backward()
    stats = step_end()
    assert stats is not None
    assert stats.saved == BLOCKS - 1  # the first block is frozen, and so is its input
    assert_bits(values(plain, source()), values(model, source()))


def test_a_model_with_lora_adapters(manager: Manager) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["fc1", "fc2"], lora_dropout=0.25, init_lora_weights=False)
    model = peft.get_peft_model(build(), config)
    plain = copy.deepcopy(model)
    blocks = list(model.base_model.model.blocks)
    expected = train(plain)
    with recomputed(blocks, manager):
        init_chunk_handler(None, None, 1)
        found = train(model)
    stats = step_end()
    assert stats is not None
    assert_bits(expected, found)
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * INPUT_BYTES)


class Inner(nn.Module):
    """Its caller adds the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x).tanh()


def test_where_the_caller_uses_the_input_again_gradients_add_up_as_before(manager: Manager) -> None:
    model = build(Inner)
    plain = copy.deepcopy(model)
    expected = train(plain)
    with recomputed([block.inner for block in model.blocks], manager):  # type: ignore[misc]
        init_chunk_handler(None, None, 1)
        found = train(model)
    step_end()
    assert_bits(expected, found)


@pytest.mark.req("S4-36")
def test_with_a_selective_context_the_input_and_the_kept_outputs_leave_by_names_of_their_own(
    manager: Manager,
) -> None:
    model = build()
    keep = contexts_for(default_operators(), "selective", lambda: manager)
    stats = compared(model, manager, steps=3, context_fn=keep)
    assert (stats[0].saved, stats[0].spill_bytes) == (2 * BLOCKS, BLOCKS * (INPUT_BYTES + FC1_BYTES))
    assert manager.step_offload_bytes == {
        # here the plan keeps what is read first
        HIDDEN_STATES: (BLOCKS - 1) * INPUT_BYTES,
        "selective": (BLOCKS - 1) * FC1_BYTES,
    }
    assert_empty(manager)


def test_beside_kept_outputs_the_caps_in_bytes_alone_bound_what_is_on_its_way(manager: Manager) -> None:
    """One lane carries both: to wait for an input would be to wait for the outputs before it."""
    model = build()
    keep = contexts_for(default_operators(), "selective", lambda: manager)
    with recomputed(list(model.blocks), manager, keep):
        init_chunk_handler(None, None, 1)
        y = model(source())
        assert manager.engine.transfers.in_flight() == (2 * BLOCKS, 0)
        y.sum().backward()
    step_end()


def test_by_default_matrix_products_and_attention_are_kept(manager: Manager) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(1, ROWS, 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, -1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).tanh()
            return x + y.transpose(1, 2).reshape(x.size())

    model = build(Attention, count=2)
    keep = contexts_for(default_operators(), "selective", lambda: manager)
    [stats] = compared(model, manager, context_fn=keep)
    names = {str(operator) for operator in default_operators()}
    assert {"aten.mm.default", "aten.addmm.default", "aten.bmm.default"} <= names
    assert "aten._scaled_dot_product_flash_attention.default" in names
    log_sums = 4 * 2 * ROWS  # a number for each head and row
    assert stats.spill_bytes == 2 * (INPUT_BYTES + 3 * INPUT_BYTES + INPUT_BYTES + log_sums)
