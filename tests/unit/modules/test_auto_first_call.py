"""Mode "auto" finds out in the first call of a block, which runs plain, whether a recompute would have its
bits; if not, the block is kept or moved whole. With plain torch all of these train, so they train here."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError

import offload
from offload import OffloadError, PipelineOffloadManager, RecomputeDiffersError
from tests.nets import Summed
from tests.unit.modules.test_auto import SLOW_LINK
from tests.unit.modules.training import ROWS, WIDTH, Model, equal, train

LAYERS = 3


class Cache:
    """Of keys and values, as transformers has them."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.seen)

    def update(self, y: Tensor) -> Tensor:
        self.seen.append(y)
        return torch.stack(self.seen).sum(0)


class Body(nn.Module):
    """A block that keeps nothing of its input, and something else beside its weights."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.body = body
        self.count, self.mean = 0, torch.zeros(WIDTH)
        self.outside = [torch.zeros(WIDTH)]
        self.own = torch.Generator().manual_seed(1)
        self.writes = False

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        y = torch.tanh(self.fc(self.body(self, x * 2)))
        return y if cache is None else cache.update(y)


def build(body: Callable[[Any, Tensor], Tensor], call: Any = lambda block, x: block(x)) -> Model:
    torch.manual_seed(3)
    model = Model(call)
    model.layers = nn.ModuleList(Body(body) for _ in range(LAYERS))
    return model


def writes_outside(block: Any, x: Tensor) -> Tensor:
    block.outside[0].add_(x.detach().mean(0))
    return x + block.outside[0]


def own_generator(block: Any, x: Tensor) -> Tensor:
    return x * torch.rand(x.shape, generator=block.own)


def counts(block: Any, x: Tensor) -> Tensor:
    """The number of operators depends on what a forward leaves behind."""
    block.count += 1
    block.mean = 0.5 * block.mean + x.detach().mean(0)
    for _ in range(block.count % 3):
        x = x.sin() + block.mean
    return x


def draws(block: Any, x: Tensor) -> Tensor:
    """From numpy's generator only where Python's says so: in the first forward of none of the blocks."""
    return x.cos() * float(np.random.randn()) if random.random() < 0.25 else x


def binds(block: Any, x: Tensor) -> Tensor:
    """What it does not read in this forward."""
    block.count += 1
    block.mean = x.detach().mean(0)
    block.last = x * 1
    return x.cos()


def own_generators(block: Any, x: Tensor) -> Tensor:
    if not hasattr(block, "python"):
        block.python, block.numpy = random.Random(1), np.random.default_rng(1)
    return x.sin() * block.python.random() * float(block.numpy.random())


def binds_containers(block: Any, x: Tensor) -> Tensor:
    seen = getattr(block, "seen", [])
    block.seen = [*seen[-2:], {"mean": (x * 1).mean(0)}]
    block.array = getattr(block, "array", np.zeros(2)) + 1
    return x * float(block.array[0]) + sum(one["mean"].detach() for one in block.seen)


def state_of(model: Model) -> list[Tensor]:
    return [
        part for block in model.layers for part in (torch.tensor(block.count), block.mean, block.outside[0])
    ]


def trained(model: Model, mode: Any, **options: Any) -> list[Tensor]:
    random.seed(5)
    np.random.seed(5)
    if mode is None:
        return [*train(model, steps=4), *state_of(model)]
    with offload.activations(model, mode, min_numel=1, **options) as handle:
        seen = train(model, steps=4)
        if mode == "auto":
            assert handle.explain().plan is not None
    return [*seen, *state_of(model)]


@pytest.mark.parametrize(
    "arguments",
    [
        (writes_outside,),
        (own_generator,),
        (lambda block, x: x, lambda block, x: x.add_(block(x))),
        (lambda block, x: x, lambda block, x: block(block(x, cache=(own := Cache())), cache=own)),
    ],
)
def test_a_block_whose_second_run_would_have_other_bits_is_never_recomputed(
    arguments: tuple[Any, ...], manager: PipelineOffloadManager
) -> None:
    """It writes to what is not its own, its input is written after it, or it adds to a cache."""
    manager.engine.rates = SLOW_LINK
    plain = trained(build(*arguments), None)
    assert equal(trained(build(*arguments), "auto", device_total="12000B"), plain)


@pytest.mark.parametrize("mode", ["hidden_states", "selective", "auto"])
@pytest.mark.parametrize("body", [own_generators, binds_containers])
def test_a_block_that_reads_what_changes_or_has_a_graph_is_an_error_and_auto_moves_it_from_then_on(
    body: Any, mode: str, manager: PipelineOffloadManager
) -> None:
    manager.engine.rates = SLOW_LINK
    plain = trained(build(body), None)
    with pytest.raises((RecomputeDiffersError, CheckpointError), match="no_recompute="):
        trained(build(body), mode)
    assert equal(trained(build(body), mode, no_recompute="*"), plain)


@pytest.mark.parametrize("mode", ["hidden_states", "selective", "auto"])
@pytest.mark.parametrize("body", [draws, binds, counts])
def test_what_a_block_binds_and_draws_happens_once_although_it_is_recomputed(
    body: Any, mode: str, manager: PipelineOffloadManager
) -> None:
    manager.engine.rates = SLOW_LINK
    plain = trained(build(body), None)
    assert equal(trained(build(body), mode), plain)


def moves_on(block: Any, x: Tensor) -> Tensor:
    return block(x) * (random.random() + float(np.random.randn()))


def puts_back(block: Any, x: Tensor) -> Tensor:
    """Both calls begin with one state, as those of models that compare two runs under one noise."""
    states = random.getstate(), np.random.get_state()
    y = block(x)
    random.setstate(states[0])
    np.random.set_state(states[1])
    return y + block(x.sin())


def leaves_half_a_pair(block: Any, x: Tensor) -> Tensor:
    """A normal is made along with another one, which the next draw takes: no bits are drawn then."""
    np.random.seed(7)
    random.seed(7)
    drawn = float(np.random.standard_normal()) * random.gauss(0.0, 1.0)
    y = block(x * drawn)
    return y * float(np.random.standard_normal()) * random.gauss(0.0, 1.0)


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
@pytest.mark.parametrize("between", [moves_on, puts_back, leaves_half_a_pair])
def test_draws_are_those_of_a_plain_run_whatever_happens_to_the_states_between_blocks(
    between: Any, mode: str
) -> None:
    def body(block: Any, x: Tensor) -> Tensor:
        return x.cos() * float(np.random.randn()) * random.gauss(0.0, 1.0)

    plain = [*trained(build(body, between), None), torch.tensor([random.random(), np.random.rand()])]
    ours = [*trained(build(body, between), mode), torch.tensor([random.random(), np.random.rand()])]
    assert equal(ours, plain)


def test_what_a_block_binds_leads_to_no_graph_of_an_earlier_forward() -> None:
    held: list[weakref.ref[Any]] = []

    def body(block: Any, x: Tensor) -> Tensor:
        block.last = x * 1
        held.append(weakref.ref(block.last))
        return x

    model = build(body)
    with offload.activations(model, "hidden_states", min_numel=1):
        first = model(torch.randn(ROWS, WIDTH))
        second = model(torch.randn(ROWS, WIDTH))
        assert [reference() is not None for reference in held] == [False] * LAYERS + [True] * LAYERS
        second.sum().backward()
    assert [model.layers[number].last is held[LAYERS + number]() for number in range(LAYERS)] == [
        True
    ] * LAYERS
    del first, second


def test_a_block_that_writes_to_its_input_in_a_later_call_only_is_an_error_with_the_way_out(
    manager: PipelineOffloadManager,
) -> None:
    manager.engine.rates = SLOW_LINK
    model, writes = build(lambda block, x: x), list[bool]()  # a list: no attribute of the block shows it
    model.layers[1].register_forward_pre_hook(lambda block, args: (args[0].mul_(1.5),) if writes else args)
    with offload.activations(model, "auto", min_numel=1, device_total="12000B"):
        train(model, steps=2)
        writes.append(True)
        with pytest.raises(OffloadError, match=r"forward of a Body that is recomputed has written") as raised:
            train(model, steps=1)
    assert "argument float32[12, 16] in place, from which its recompute would start" in str(raised.value)
    assert "use mode='groups'" in str(raised.value)


# -- collectives ---------------------------------------------------------------------------------------------


def in_place(block: Any, x: Tensor) -> Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return x + y


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("body", "operator"),
    [
        (lambda block, x: Summed.apply(x), "_c10d_functional.all_reduce.default"),
        (in_place, "c10d.allreduce_.default"),
    ],
)
def test_in_the_first_step_too_a_collective_is_called_once_a_forward(body: Any, operator: str) -> None:
    model = build(body)
    with offload.activations(model, "auto", min_numel=1, device_total="12000B"), _Counted() as counted:
        train(model, steps=1, microbatches=2)
    assert counted.calls[operator] == 2 * LAYERS
