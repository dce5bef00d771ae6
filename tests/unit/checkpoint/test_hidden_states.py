"""A block whose call is recomputed by hooks: what leaves, what comes back, and the bits of the result."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.checkpoint.hidden_states import HIDDEN_STATES
from tests.loops import ended_step
from tests.unit.checkpoint.recomputed import (
    BLOCKS,
    INPUT_BYTES,
    ROWS,
    WIDTH,
    Block,
    Model,
    Watching,
    assert_bits,
    build,
    compared,
    recomputed,
    source,
    train,
    train_step,
    values,
)
from tests.unit.checkpoint.regions import assert_empty
from tests.unit.groups.stack import build_manager, installed

Manager = PipelineOffloadManager


@pytest.mark.req("S4-1", "S4-5", "S4-6", "S4-7", "S4-15", "S4-42")
@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_only_the_input_of_each_block_is_saved_and_the_gradients_have_the_same_bits(executor: Any) -> None:
    with installed(build_manager(executor)) as manager:
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
        return state["x"]


@pytest.mark.req("S4-9")
def test_tensors_in_keywords_and_containers_are_saved_like_those_given_by_position(manager: Manager) -> None:
    torch.manual_seed(0)
    model = KeywordModel([Keyworded() for _ in range(BLOCKS)])
    [stats] = compared(model, manager)
    assert (stats.saved, stats.spill_bytes) == (BLOCKS, BLOCKS * INPUT_BYTES)


class Noting(Block):
    """Takes whatever it is called with, and notes it."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[Any] = []

    def forward(self, x: Tensor, *others: Any, **named: Any) -> Tensor:
        self.noted.append((others, list(named.items())))
        return super().forward(x)


@pytest.mark.parametrize("more", [{}, {"empty": (), "also": {}}, {"pair": (1, None)}], ids=str)
def test_a_recompute_gets_what_has_no_tensor_by_the_same_place_and_keyword(
    manager: Manager, more: dict[str, Any]
) -> None:
    """Arguments without parts are not taken apart; keywords keep their order, of which a forward may tell."""
    block = Noting()
    with recomputed([block], manager):
        init_chunk_handler(1, 0, 1)
        block(source(), None, 2.0, zeta="z", mask=None, **more, alpha=True).sum().backward()
    forward, recompute = block.noted
    assert (
        forward == recompute == ((None, 2.0), [*{"zeta": "z", "mask": None, **more, "alpha": True}.items()])
    )


class Second(nn.Module):
    """The first argument is a parameter, the second is too small; of the others the first leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, weight: Tensor, small: Tensor, x: Tensor, again: Tensor, last: Tensor) -> Tensor:
        y: Tensor = self.block(x * weight * small)
        return y + again + last


class Narrow(nn.Module):
    """Its first argument is the smaller one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, wide: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        return y * wide.chunk(2)[0]


@pytest.mark.req("S4-2")
def test_the_first_argument_leaves_and_not_the_largest(manager: Manager) -> None:
    torch.manual_seed(0)
    with recomputed([narrow := Narrow()], manager):
        init_chunk_handler(None, None, 1)
        narrow(source() * 1.0, torch.rand(2 * ROWS, WIDTH)).square().sum().backward()
    stats = ended_step()
    assert (stats.spilled, stats.spill_bytes) == (1, INPUT_BYTES)


@pytest.mark.req("S4-2")
def test_the_first_argument_that_may_leave_does_and_one_given_twice_is_saved_once(manager: Manager) -> None:
    torch.manual_seed(0)
    second = Second()
    plain = copy.deepcopy(second)

    def run(module: Second) -> list[Tensor]:
        x = source()
        h = x * 1.0
        loss = module(module.weight, torch.ones(1), h, h, torch.ones(ROWS, WIDTH)).square().sum()
        del h
        loss.backward()
        return values(module, x)

    expected = run(plain)
    with recomputed([second], manager):
        init_chunk_handler(None, None, 2)
        assert_bits(expected, run(second))
    stats = ended_step()
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
    stats = ended_step()
    assert stats.spill_bytes == INPUT_BYTES


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
