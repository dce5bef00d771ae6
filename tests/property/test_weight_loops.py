"""Random loops over streamed weights beside the same loops in plain torch: one result, whatever the order.

One invariant: an operation does the same to both models, and what it reads is compared bit by bit.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.optim import HybridDeviceOptimizer
from tests.inside import impose
from tests.optim_pair import Overlap
from tests.unit.weights.streamed import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Model, Pair, squares, streamed

OPERATIONS = 40

ALIASES: list[Callable[[Any], Tensor]] = [
    lambda weight: weight.data,
    lambda weight: weight.detach()[1],
    lambda weight: weight.data.t(),
    lambda weight: weight.detach().view(-1)[3:9],
]


class Program:
    """aliases: of a weight, in each of the two models. graphs: losses that wait for their backward.
    overlap: of the optimizer that keeps its state on the host; None for torch's."""

    def __init__(self, pair: Pair, rng: random.Random, overlap: Overlap | None = None) -> None:
        self.pair, self.rng, self.overlap = pair, rng, overlap
        self.models = (pair.model, pair.plain)
        if overlap is None:
            self.optimizers = pair.optimizers(**rng.choice([{}, {"foreach": True}, {"fused": True}]))
        else:
            self.optimizers = pair.with_state_on_host(overlap, cpu_share=rng.choice([0.0, 0.5, 1.0]))
        self.aliases: list[list[Tensor]] = []
        self.graphs: list[list[Tensor]] = []

    def weights(self) -> list[Any]:
        layer = self.rng.randrange(BLOCKS)
        return [model.layers[layer].up.weight for model in self.models]

    def backward(self) -> None:
        x = torch.randn(ROWS, WIDTH)
        for model in self.models:
            squares(model, x.clone().requires_grad_()).backward()
        self.pair.check_gradients()

    def train(self) -> None:
        if self.overlap == "backward":
            self.train_in_the_backward()
            return
        self.backward()
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    def train_in_the_backward(self) -> None:
        """Gradients are final, and stepped, in the last of one or two backwards."""
        accumulates, (ours, _) = self.rng.random() < 0.3, self.optimizers
        assert isinstance(ours, HybridDeviceOptimizer)
        for waits in (ours.no_sync(), nullcontext()) if accumulates else (nullcontext(),):
            x = torch.randn(ROWS, WIDTH)
            with waits:
                for model in self.models:
                    squares(model, x).backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self) -> None:
        x = torch.randn(ROWS, WIDTH)
        with self.rng.choice([torch.no_grad, torch.inference_mode])():
            assert torch.equal(*(model(x) for model in self.models))

    def freeze(self) -> None:
        layer, trains = self.rng.randrange(BLOCKS), self.rng.random() < 0.5
        for model in self.models:
            model.layers[layer].requires_grad_(trains)

    def write(self) -> None:
        with torch.no_grad():
            for weight in self.weights():
                weight.lerp_(torch.ones_like(weight), 0.1)

    def write_all(self) -> None:
        for model in self.models:
            torch._foreach_mul_([parameter.data for parameter in model.parameters()], 0.99)

    def write_a_state_dict(self) -> None:
        layer = self.rng.randrange(BLOCKS)
        for model in self.models:
            model.state_dict()[f"layers.{layer}.up.weight"][3].mul_(0.5)

    def load(self) -> None:
        state = copy.deepcopy(self.pair.plain.state_dict())
        for model in self.models:
            model.load_state_dict({name: value * 0.9 for name, value in state.items()})

    def copy(self) -> None:
        x = torch.randn(ROWS, WIDTH)
        assert torch.equal(copy.deepcopy(self.pair.model)(x), self.pair.plain(x))

    def take_an_alias(self) -> None:
        alias = self.rng.choice(ALIASES)
        self.aliases.append([alias(weight) for weight in self.weights()])

    def write_an_alias(self) -> None:
        if self.aliases:
            mine, its = self.rng.choice(self.aliases)
            assert torch.equal(mine, its)
            for each in (mine, its):
                each.add_(0.125)

    def merge(self) -> None:
        delta = torch.randn(2 * WIDTH, 1) @ torch.randn(1, WIDTH)
        for weight in self.weights():
            weight.data += delta

    def swap_data(self) -> None:
        self.graphs.clear()  # an error in the backward, which test_nobody_reads_a_freed_weight.py has
        swapped = []
        for weight in self.weights():
            other = torch.full((2 * WIDTH, WIDTH), 0.1)
            weight.data, other.data = other.data, weight.data
            swapped.append(other)
        self.aliases.append(swapped)

    def use_weights_past_their_modules(self) -> None:
        x, layer = torch.randn(ROWS, WIDTH), self.rng.randrange(BLOCKS)
        for model, weight in zip(self.models, self.weights(), strict=True):
            y = model.layers[layer].forward(model.embed(x)) @ weight.t()
            y.sum().backward()
        self.pair.check_gradients()

    def hold_a_graph(self) -> None:
        x = torch.randn(ROWS, WIDTH)
        self.graphs.append([squares(model, x) for model in self.models])

    def go_back_through_a_graph(self) -> None:
        if not self.graphs:
            return
        errors = []
        for number, loss in enumerate(self.graphs.pop(0)):
            try:
                loss.backward()
            except RuntimeError:
                errors.append(number)
        # torch's fused kernel for the CPU moves no version: its backward would read stepped weights
        silent = isinstance(self.optimizers[0], HybridDeviceOptimizer) and errors == [0]
        assert silent or errors in ([], [0, 1]), "both raise, or none"
        if not errors:
            self.pair.check_gradients()
        for model in self.models:
            model.zero_grad()

    def fail(self) -> None:
        def fails(*_: Any) -> None:
            raise KeyError("on its way")

        layer, reentrant = self.rng.randrange(BLOCKS), self.pair.plain.reentrant
        in_backward = not reentrant and self.rng.random() < 0.5
        for model in self.models:
            down = model.layers[layer].down
            hook = down.register_forward_hook(
                (lambda module, args, output: output.register_hook(fails) and None) if in_backward else fails
            )
            with pytest.raises(KeyError):
                squares(model, torch.randn(ROWS, WIDTH, requires_grad=True)).backward()
            hook.remove()
            model.zero_grad()


STEPS = [
    value
    for name, value in vars(Program).items()
    if name not in ("__init__", "weights", "train_in_the_backward") and callable(value)
]
BREAK_THE_PROMISE = (
    Program.backward,
    Program.use_weights_past_their_modules,
    Program.hold_a_graph,
    Program.go_back_through_a_graph,
    Program.fail,
)
"""Of `overlap="backward"`: no step comes after their backward."""


@pytest.mark.parametrize(
    ("seed", "overlap"),
    [
        (seed, overlap)
        for seed in range(8)
        for overlap in ((None, "forward"), ("step", "backward"))[seed // 2 % 2]
    ],
)
def test_any_order_of_operations_gives_what_torch_gives(seed: int, overlap: Overlap | None) -> None:
    rng = random.Random(seed)
    with streamed(
        Model(reentrant=rng.choice([None, False, True])),
        frozen=seed % 2 == 0,
        executor=rng.choice(["late", "early", "random", "clock"]),
        weights=rng.choice(["host", "12.3kB", "20.5kB"]),
        **({"gradients": rng.choice(["host", "device"])} if overlap == "backward" else {}),
    ) as pair:
        program, done = Program(pair, rng, overlap), []
        steps = STEPS
        if overlap == "backward":
            impose(pair.stream._engine, gradients_behind_bytes=rng.choice([0, BLOCK_BYTES, 1 << 30]))
            steps = [step for step in STEPS if step not in BREAK_THE_PROMISE]
        for _ in range(OPERATIONS):
            step = rng.choice([*steps, Program.train, Program.train])
            done.append(step.__name__)
            try:
                step(program)
            except BaseException as error:
                error.add_note(f"after {done}")
                raise
        pair.check_weights()
        if isinstance(program.optimizers[0], HybridDeviceOptimizer):
            program.optimizers[0].close()
        del program, step
        gc.collect()
