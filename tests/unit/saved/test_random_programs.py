"""A hundred random programs, each on every executor: whatever autograd saves of them, the gradients are the
same bits.

A program is a list of steps over a growing list of tensors: elementwise operations, products, reductions,
views, in-place changes of what nothing has saved, checkpoints, custom functions, parameters. It is run once
without hooks and then on simulated devices whose checker raises wherever no event orders two accesses of the
same bytes. Chunks share tensors; some groups stay, whole or from some slot on; caps are small.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.unit.saved.rig import EXECUTORS, Rig, assert_equal_bits

ROWS = 12
PROGRAMS = 100
SEEDS_A_TEST = 25

Step = Callable[[list[Tensor]], Tensor]


class Scale(torch.autograd.Function):
    """Saves its input, a view of it and its output; reads them one at a time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 3
        ctx.save_for_backward(x, x[::2, 1:], y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x = ctx.saved_tensors[0]
        part = ctx.saved_tensors[1].sum()
        return gradient * 3 + (x - ctx.saved_tensors[2]) * 1e-3 + part * 1e-3


def residual(x: Tensor) -> Tensor:
    return x + (x.sin() * x.cos()).tanh()


UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.sin,
    torch.tanh,
    torch.sigmoid,
    lambda x: x * x,
    lambda x: x.abs().sqrt(),
    lambda x: x.softmax(-1),
    lambda x: x.cumsum(0) * 0.1,
    lambda x: torch.where(x > 0, x, x * 0.1),
    lambda x: x.clamp(-1, 1),
    lambda x: x.to(torch.float64).sin().to(torch.float32),
    lambda x: (x + 1).sin_(),
    lambda x: (x * 2).mul_(0.5).relu_(),
    lambda x: torch.nn.functional.layer_norm(x, [ROWS]),
    lambda x: torch.nn.functional.dropout(x, 0.3),
    Scale.apply,
    residual,
    lambda x: checkpoint(residual, x, use_reentrant=False),
    lambda x: checkpoint(residual, x, use_reentrant=True),
]
VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.t(),
    lambda x: x[:, :4].repeat(1, 3),
    lambda x: x[::2].exp().clamp(max=2).repeat(2, 1),
    lambda x: x[:, ::3].square().repeat(1, 3),
    lambda x: x[3:4].expand(ROWS, ROWS) * 0.5,
    lambda x: x.roll(1, 0),
    lambda x: torch.cat([part.sin() for part in x.split([3, 4, 5], dim=1)], dim=1),
    lambda x: torch.stack([row.cos() for row in x.unbind()]),
    lambda x: x.reshape(-1).view(ROWS, ROWS).flip(0),
    lambda x: x.diagonal().diag() + x,
]
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda a, b: a * b,
    lambda a, b: a + b.sin(),
    lambda a, b: (a @ b).tanh(),
    lambda a, b: torch.maximum(a, b),
    lambda a, b: a / (b.square() + 1),
    lambda a, b: torch.addmm(a, b, b.t()).tanh(),
]


class Program:
    """inputs: two leaves and two parameters, shared by all chunks. Each chunk is a list of groups, each a
    list of steps."""

    def __init__(self, seed: int) -> None:
        choose = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.leaves = [torch.randn(ROWS, ROWS, generator=generator, requires_grad=True) for _ in range(2)]
        self.parameters = [nn.Parameter(torch.randn(ROWS, ROWS, generator=generator)) for _ in range(2)]
        self.table = torch.randn(ROWS, ROWS, generator=generator)
        self.seed = seed
        self.chunks = [
            [[self._step(choose) for _ in range(choose.randint(1, 5))] for _ in range(choose.randint(1, 3))]
            for _ in range(choose.randint(1, 3))
        ]
        self.stays = [[choose.random() < 0.2 for _ in groups] for groups in self.chunks]
        self.stays_from = [
            [choose.choice([None, None, 0, 1, 2, 4]) for _ in groups] for groups in self.chunks
        ]
        self.config: dict[str, int | None] = {
            "piece_bytes": choose.choice([1, 1000, 100_000]),
            "device_limit_bytes": choose.choice([None, 0, 2000, 20_000]),
            "max_spilling_bytes": choose.choice([None, 1, 1500]),
            "max_restoring_bytes": choose.choice([None, 0, 1500]),
        }
        self.leave_first = choose.random() < 0.7
        self.order = choose.choice([1, -1])  # first in first out, or last in first out
        self.retains = choose.random() < 0.3

    @staticmethod
    def _step(choose: random.Random) -> Step:
        kind, back = choose.random(), choose.randint(1, 3)
        if kind < 0.4:
            unary = choose.choice(UNARY)
            return lambda values: unary(values[-1])
        if kind < 0.65:
            view = choose.choice(VIEWS)
            return lambda values: view(values[-1])
        binary = choose.choice(BINARY)
        return lambda values: binary(values[-1], values[-min(back, len(values))])

    def run(self, rig: Rig | None = None) -> list[Tensor]:
        """The gradients of all inputs, twice where the graph is retained."""
        torch.manual_seed(self.seed)  # for the dropouts
        outputs = []
        for groups, stays, stays_from in zip(self.chunks, self.stays, self.stays_from, strict=True):
            if rig is not None:
                rig.chunk()
            values: list[Tensor] = [self.table, *self.leaves, *self.parameters]
            for steps, stay, slot in zip(groups, stays, stays_from, strict=True):
                if rig is None:
                    self._group(steps, values)
                else:
                    with rig.group(leaves=not stay, stays_from=slot):
                        self._group(steps, values)
            outputs.append(values[-1].sum())
            if rig is not None:
                rig.chunks[-1].complete()
        values.clear()
        if rig is not None and self.leave_first:
            rig.leave()
        inputs: list[Tensor] = [*self.leaves, *self.parameters]
        for value in inputs:
            value.grad = None
        for output in outputs[:: self.order]:
            for retain in (True, False) if self.retains else (False,):
                if rig is not None:
                    rig.engine.prefetch.pump([chunk.coming for chunk in rig.chunks[:: self.order]])
                output.backward(retain_graph=retain)
        return [torch.zeros(()) if value.grad is None else value.grad for value in inputs]

    @staticmethod
    def _group(steps: list[Step], values: list[Tensor]) -> None:
        for step in steps:
            values.append(step(values))


@pytest.mark.parametrize("first", range(0, PROGRAMS, SEEDS_A_TEST))
def test_random_programs_have_the_same_gradients_and_leave_nothing(first: int) -> None:
    travelled = 0
    for seed in range(first, first + SEEDS_A_TEST):
        program = Program(seed)
        expected = program.run()
        for executor in EXECUTORS:
            rig = Rig(executor, seed=seed, **program.config)
            for _ in range(1 + (seed % 4 == 0)):  # a second step finds the host blocks of the first
                assert_equal_bits(expected, program.run(rig))
                travelled += rig.end().restored
    assert travelled > SEEDS_A_TEST * len(EXECUTORS)
