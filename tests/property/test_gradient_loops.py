"""Random loops over gradients that wait on the host, beside the same in plain torch: one result, whatever the
order.

One invariant: an operation does the same to both models, and what it reads is compared bit by bit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.inside import gradients_of
from tests.unit.weights.streamed import BLOCKS, ROWS, WIDTH, Pair, squares
from tests.unit.weights.test_gradients import READS, WRITES, Fails, waiting

OPERATIONS = 40
EXECUTORS = ("late", "early", "random", "clock")


class Program:
    """kept: gradients, or what was made of one, of each of the two models."""

    def __init__(self, pair: Pair, rng: random.Random) -> None:
        self.pair, self.rng = pair, rng
        self.models = (pair.model, pair.plain)
        self.optimizers = pair.optimizers(**rng.choice([{}, {"foreach": True}, {"fused": True}]))
        self.kept: list[list[Tensor]] = []

    def weights(self) -> list[Any]:
        layer, name = self.rng.randrange(BLOCKS), self.rng.choice(["up", "down"])
        return [getattr(model.layers[layer], name).weight for model in self.models]

    def backward(self) -> None:
        x = torch.randn(ROWS, WIDTH)
        skip = tuple(n for n in range(BLOCKS) if self.rng.random() < self.rng.choice([0, 0, 0.3]))
        retain = self.rng.random() < 0.2
        for model in self.models:
            loss = model(x, skip=skip).square().sum()
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()

    def fail(self) -> None:
        x, where = torch.randn(ROWS, WIDTH), self.rng.randrange(BLOCKS)
        for model in self.models:
            y = model.embed(x)
            for number, layer in enumerate(model.layers):
                y = layer(Fails.apply(y) if number == where else y)
            with pytest.raises(RuntimeError, match="on purpose"):
                y.sum().backward()

    def differentiate(self) -> None:
        x = torch.randn(ROWS, WIDTH)
        found = [
            torch.autograd.grad(squares(model, x), [p for p in model.parameters() if p.requires_grad])
            for model in self.models
        ]
        assert all(map(torch.equal, *found))

    def read(self) -> None:
        name = self.rng.choice([*READS])
        weights = self.weights()
        if weights[1].grad is not None and name not in ("text", "array", "list"):
            found, expected = (READS[name](weight.grad) for weight in weights)
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), name

    def write(self) -> None:
        name = self.rng.choice([*WRITES])
        weights = self.weights()
        if weights[1].grad is not None:
            for weight in weights:
                WRITES[name](weight)

    def keep(self) -> None:
        weights = self.weights()
        if weights[1].grad is not None:
            make = self.rng.choice([lambda g: g, lambda g: g.detach(), lambda g: g[1:3], lambda g: g.t()])
            self.kept.append([make(weight.grad) for weight in weights])

    def use_kept(self) -> None:
        if self.kept:
            pair = self.kept.pop(self.rng.randrange(len(self.kept)))
            assert torch.equal(*pair)
            for tensor in pair:
                tensor.mul_(2)

    def clear(self) -> None:
        to_none = self.rng.random() < 0.7
        for model in self.models:
            model.zero_grad(set_to_none=to_none)

    def clip(self) -> None:
        foreach = self.rng.choice([None, True, False])
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 1.0, foreach=foreach) for m in self.models]
        assert torch.equal(*norms)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def freeze(self) -> None:
        layer, trains = self.rng.randrange(BLOCKS), self.rng.random() < 0.7
        for model in self.models:
            model.layers[layer].requires_grad_(trains)

    def check(self) -> None:
        self.pair.check_gradients()
        self.pair.check_weights()


@pytest.mark.parametrize("seed", range(24))
def test_a_random_loop_has_the_bits_of_plain_torch(seed: int) -> None:
    rng = random.Random(seed)
    weights = rng.choice([None, None, "host", "20kB"])
    with waiting(executor=EXECUTORS[seed % 4], weights=weights) as pair:
        program = Program(pair, rng)
        operations = [program.backward] * 6 + [
            program.fail,
            program.differentiate,
            program.read,
            program.read,
            program.write,
            program.write,
            program.keep,
            program.use_kept,
            program.clear,
            program.clip,
            program.step,
            program.freeze,
            program.check,
        ]
        for _ in range(OPERATIONS):
            rng.choice(operations)()
        program.backward()
        program.check()
        stream = gradients_of(pair.handle)
        assert not any(block.entered for block in stream.blocks)
        present = sum(block.nbytes for block in stream.blocks if block.present)
        assert stream.residency.present_bytes == present
