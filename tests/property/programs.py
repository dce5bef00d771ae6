"""Random training steps: orders in which chunks run, and what is unusual about some of them; run with
offloading and without.

One invariant: the two runs do the same operations on the same values in the same order, so their gradients
have equal bits. Marks change no sum: a marked value takes the place of the unmarked one, as `x =
group_start(x, name)` does in a model.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from offload import StaleHandleError
from tests.property.layers import COLUMNS, ROWS, ActionKey, Values, make_weights, run_nodes, same_bits
from tests.property.speakers import Offloaded, Plain, Settings


@dataclass
class Chunk:
    """What a pipeline keeps between a forward and its backward."""

    source: Tensor
    output: Tensor
    kept: list[Tensor]
    grad: Tensor | None = None  # of the output, from the next stage


@dataclass(frozen=True)
class Step:
    """One step: its microbatches, the order of its actions, and what is unusual about some of them.

    actions: F, B, I, W; also E, a forward without gradients, and C, a forward and backward captured and
    replayed. twice: the backward runs twice over one graph. again: the forward runs twice, and the first
    one's graph is dropped. leftover: no backward comes. thread: the backward runs on a thread of its own.
    buffers: inputs are received into buffers that are used again. foretold: the order of actions that is
        announced, right or wrong.
    """

    seed: int
    actions: tuple[ActionKey, ...]
    twice: frozenset[tuple[int, int]] = frozenset()
    again: frozenset[tuple[int, int]] = frozenset()
    leftover: frozenset[tuple[int, int]] = frozenset()
    thread: frozenset[tuple[int, int]] = frozenset()
    buffers: bool = False
    foretold: tuple[ActionKey, ...] | None = None


@dataclass
class Run:
    """A model, and what its steps left."""

    stages: tuple[tuple[Any, ...], ...]
    said: Plain
    trains_input: bool = True
    weights: list[list[torch.nn.Parameter]] = field(init=False)
    chunks: dict[tuple[int, int], Chunk] = field(default_factory=dict)
    # gradients, outputs: everything whose bits must not change
    results: list[Tensor] = field(default_factory=list)
    # by lane: nothing orders one after another
    free_buffers: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        self.weights = make_weights(len(self.stages))

    def step(self, step: Step) -> None:
        for weight in (weight for weights in self.weights for weight in weights):
            weight.grad = None
        self.said.foretell(step.foretold)
        for kind, stage, microbatch in step.actions:
            self._act(step, kind, stage, microbatch)
            self.said.between()
        self.said.step_end()
        self.results += [
            weight.grad for weights in self.weights for weight in weights if weight.grad is not None
        ]
        self._read_leftovers()
        self.chunks.clear()
        self.free_buffers.clear()

    def _act(self, step: Step, kind: str, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        with self.said.lane(microbatch):
            if kind == "E":
                with torch.no_grad():
                    self.results.append(self._forward(step, stage, microbatch).output)
            elif kind == "F":
                for _ in range(2 if key in step.again else 1):
                    self.chunks[key] = self._forward(step, stage, microbatch)
            elif kind == "C":
                self._captured(step, stage, microbatch)
        if kind in ("F", "E", "C"):
            return
        if key not in step.thread:
            self._backward(step, kind, stage, microbatch)
            return
        errors: list[BaseException] = []

        def target() -> None:
            try:
                self._backward(step, kind, stage, microbatch)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def _source(self, step: Step, stage: int, microbatch: int) -> Tensor:
        if stage > 0 and (stage - 1, microbatch) in self.chunks:
            value = self.chunks[stage - 1, microbatch].output.detach()
        else:
            value = torch.randn(
                (ROWS, COLUMNS),
                generator=torch.Generator().manual_seed(step.seed * 64 + stage * 16 + microbatch),
            )
        if step.buffers and stage > 0 and torch.is_grad_enabled():
            free = self.free_buffers[self.said.lane_of(microbatch)]
            buffer = free.pop() if free else torch.empty((ROWS, COLUMNS))
            buffer.numpy()[:] = value.numpy()  # as a receive does: the version does not move
            self.said.received(buffer)
            value = buffer.detach()
        return value.requires_grad_(stage > 0 or self.trains_input)

    def _forward(self, step: Step, stage: int, microbatch: int) -> Chunk:
        self.said.begin(stage, microbatch)
        source = self._source(step, stage, microbatch)
        values = Values(source)
        run_nodes(self.stages[stage], values, list(self.weights[stage]), self.said)
        output = (
            values.recent[-1]
            if values.recent[-1].requires_grad
            else values.recent[-1] @ self.weights[stage][0]
        )
        if stage == len(self.stages) - 1:
            output = output.square().mean()
        chunk = Chunk(source, output, values.kept)
        self.said.end_forward(stage, microbatch)
        return chunk

    def _captured(self, step: Step, stage: int, microbatch: int) -> None:
        """One graph or one each, beside the chunks of the step."""
        number, weights, one_graph = 16 + microbatch, self.weights[stage], (step.seed + microbatch) % 2 == 0
        source = torch.randn(
            (ROWS, COLUMNS), generator=torch.Generator().manual_seed(step.seed)
        ).requires_grad_()

        def backward(loss: Tensor) -> None:
            self.said.begin_backward(stage, number, "B")
            self.results += [
                grad
                for grad in torch.autograd.grad(loss, [source, *weights], allow_unused=True)
                if grad is not None
            ]
            self.said.end_backward(stage, number, "B")

        self.said.begin(stage, number)
        with self.said.captures():
            with self.said.capture():
                values = Values(source)
                run_nodes(self.stages[stage], values, list(weights), self.said)
                loss = (values.recent[-1] @ weights[0]).square().mean()
                self.said.end_forward(stage, number)
                if one_graph:
                    backward(loss)
            if not one_graph:
                with self.said.capture():
                    backward(loss)

    def _backward(self, step: Step, kind: str, stage: int, microbatch: int) -> None:
        key = (stage, microbatch)
        with self.said.lane(microbatch):
            chunk = self.chunks[key]
            self.said.begin_backward(stage, microbatch, kind)
            grads = None if chunk.grad is None else (chunk.grad,)
            trains = chunk.source.requires_grad
            if kind == "I":
                if trains:
                    (chunk.source.grad,) = torch.autograd.grad(
                        (chunk.output,), (chunk.source,), grads, retain_graph=True
                    )
            elif kind == "W" and trains:
                weights = self.weights[stage]
                found = torch.autograd.grad((chunk.output,), weights, grads, allow_unused=True)
                for weight, grad in zip(weights, found, strict=True):
                    if grad is not None:
                        weight.grad = grad if weight.grad is None else weight.grad + grad
            else:
                if key in step.twice:
                    torch.autograd.backward((chunk.output,), grads, retain_graph=True)
                torch.autograd.backward((chunk.output,), grads)
            self.said.end_backward(stage, microbatch, kind)
            if kind != "W" and chunk.source.grad is not None:
                self.results.append(chunk.source.grad)
                if stage > 0:
                    self.chunks[stage - 1, microbatch].grad = chunk.source.grad
            if kind != "I":
                del self.chunks[key]
                if step.buffers and stage > 0:
                    self.free_buffers[self.said.lane_of(microbatch)].append(chunk.source.detach())

    def _read_leftovers(self) -> None:
        """A graph that outlives its step is right, or says that its tensors are gone."""
        for chunk in self.chunks.values():
            grads = None if chunk.output.dim() == 0 else torch.ones_like(chunk.output)
            with suppress(StaleHandleError):
                torch.autograd.grad(
                    chunk.output,
                    [weight for weights in self.weights for weight in weights],
                    grads,
                    allow_unused=True,
                )


@dataclass(frozen=True)
class Program:
    """A model, its steps, and the engine that they run over."""

    stages: tuple[tuple[Any, ...], ...]
    trains_input: bool
    steps: tuple[Step, ...]
    settings: Settings


def play(program: Program) -> Offloaded:
    """Run a program without offloading and with it, and compare every bit after each step. Returns what spoke
    to the engine."""
    plain = Run(program.stages, Plain(), program.trains_input)
    with Offloaded(program.settings, len(program.stages)) as said:
        run = Run(program.stages, said, program.trains_input)
        for step in program.steps:
            plain.step(step)
            run.step(step)
            assert len(plain.results) == len(run.results)
            assert all(same_bits(*pair) for pair in zip(plain.results, run.results, strict=True)), (
                "a gradient has other bits"
            )
            plain.results.clear()
            run.results.clear()
        del run
    return said
