"""Small models with marks, and a driver that runs a step action by action: what the tests of groups share.

The same program runs with offload and without, so gradients can be compared bit by bit. A stage is a `Stack`;
a step is a list of actions ("F" | "B" | "I" | "W", stage, microbatch), where I and W are the input half and
the weight half of a backward, or ("eval", 0 | 1, microbatches): a forward of all stages without | with
gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload import (
    OffloadConfig,
    OffloadEngine,
    PipelineOffloadManager,
    group_commit,
    group_start,
    init_chunk_handler,
    offload_hooks,
    step_end,
)
from offload.device.sim import ExecutorName, SimDevice

WIDTH, ROWS = 16, 12
NAMES = ("block", "norm", "fc1", "act", "fc2")
"""`block` is around the others, as a norm's group is around a layer whose residual it saves."""
HELD = 64 << 20  # the smallest growth of the arena
EXECUTORS: tuple[ExecutorName, ...] = ("late", "early", "random", "clock")

Action = tuple[str, int, int]


def build_manager(
    executor: ExecutorName = "late",
    *,
    seed: int = 0,
    device: SimDevice | None = None,
    print_summary: bool = False,
    **config: Any,
) -> PipelineOffloadManager:
    """A manager over a simulated device whose every saved tensor may leave, in small pieces."""
    settings: dict[str, Any] = {"min_offloaded_tensor_size": 1, "piece_bytes": 1024, **config}
    device = device if device is not None else SimDevice(executor=executor, seed=seed)
    return PipelineOffloadManager(
        OffloadEngine(OffloadConfig(**settings), device=device), print_summary=print_summary
    )


@contextmanager
def installed(manager: PipelineOffloadManager | None) -> Iterator[PipelineOffloadManager | None]:
    """`manager` as the process-wide one inside; closed, and none there, afterwards."""
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        yield manager
    finally:
        last, PipelineOffloadManager.OFFLOAD_MGR = PipelineOffloadManager.OFFLOAD_MGR, None
        if last is not None:
            last.close()


class Layer(nn.Module):
    """x + fc2(gelu(fc1(norm(x)))), with a mark for each chosen name."""

    def __init__(self, names: Sequence[str] = NAMES, *, delay: bool = False) -> None:
        super().__init__()
        self.names = tuple(names)
        self.delay = delay
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self._start(x, "block")
        with self._hooks("block"):
            y = self._marked("norm", self.norm, x)
            y = self._marked("fc1", self.fc1, y)
            y = self._marked("act", F.gelu, y)
            y = x + self._marked("fc2", self.fc2, y)
        return self._commit(y, "block")

    def _marked(self, name: str, layer: Any, x: Tensor) -> Tensor:
        x = self._start(x, name)
        with self._hooks(name):
            y = layer(x)
        return self._commit(y, name)

    def _start(self, x: Tensor, name: str) -> Tensor:
        return group_start(x, name) if name in self.names else x

    def _hooks(self, name: str) -> Any:
        return offload_hooks() if name in self.names else nullcontext()

    def _commit(self, y: Tensor, name: str) -> Tensor:
        return group_commit(y, name, delay_offload=self.delay) if name in self.names else y


class Stack(nn.Sequential):
    """Some layers."""

    def __init__(self, layers: int = 2, names: Sequence[str] = NAMES, *, delay: bool = False) -> None:
        super().__init__(*(Layer(names, delay=delay) for _ in range(layers)))


def build_stages(
    count: int = 1, layers: int = 2, names: Sequence[str] = NAMES, *, delay: bool = False
) -> list[Stack]:
    torch.manual_seed(0)
    return [Stack(layers, names, delay=delay) for _ in range(count)]


class Driver:
    """Runs actions on stages that lie one after the other.

    announced: chunks are announced, as a pipeline stage does it; else `init_chunk_handler` is called before
        each forward.
    """

    def __init__(
        self, stages: Sequence[nn.Module], *, announced: bool = False, min_elements: int = 1, **keywords: Any
    ) -> None:
        self.stages = stages
        self.announced = announced
        self.min_elements = min_elements
        self.keywords = keywords
        self._live: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._steps = 0

    def step(self, actions: Sequence[Action]) -> list[Tensor]:
        """The gradients of this step, by parameter; an SGD step and `step_end` follow."""
        for kind, stage, microbatch in actions:
            if kind == "F":
                self.forward(stage, microbatch)
            elif kind == "B":
                self.backward(stage, microbatch)
            elif kind == "eval":
                self.evaluate(bool(stage), microbatch)
            else:
                self.half_backward(kind, stage, microbatch)
        parameters = [parameter for module in self.stages for parameter in module.parameters()]
        gradients = [
            torch.zeros(()) if parameter.grad is None else parameter.grad.clone() for parameter in parameters
        ]
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= 0.01 * parameter.grad
                    parameter.grad = None
        self._live.clear()
        self._steps += 1
        step_end()
        return gradients

    def forward(self, stage: int, microbatch: int) -> None:
        manager = PipelineOffloadManager.OFFLOAD_MGR
        if manager is not None and self.announced:
            manager.begin_chunk(stage, microbatch)
        elif manager is not None:
            init_chunk_handler(len(self.stages), stage, self.min_elements, **self.keywords)
        x = self._input(microbatch) if stage == 0 else self._live[stage - 1, microbatch][1].detach()
        x.requires_grad_()
        self._live[stage, microbatch] = (x, self.stages[stage](x))
        if manager is not None and self.announced:
            manager.end_forward(stage, microbatch)

    def backward(self, stage: int, microbatch: int) -> None:
        manager = PipelineOffloadManager.OFFLOAD_MGR
        _, y = self._live[stage, microbatch]
        gradient = (
            torch.ones_like(y) if stage == len(self.stages) - 1 else self._live[stage + 1, microbatch][0].grad
        )
        if manager is not None and self.announced:
            manager.begin_backward(stage, microbatch, "B")
        if stage == len(self.stages) - 1:
            y.square().mean().backward()
        else:
            y.backward(gradient)
        if manager is not None and self.announced:
            manager.end_backward(stage, microbatch, "B")

    def half_backward(self, kind: str, stage: int, microbatch: int) -> None:
        manager = PipelineOffloadManager.OFFLOAD_MGR
        x, y = self._live[stage, microbatch]
        last = stage == len(self.stages) - 1
        gradient = y.detach() * (2 / y.numel()) if last else self._live[stage + 1, microbatch][0].grad
        if manager is not None and self.announced:
            manager.begin_backward(stage, microbatch, kind)
        if kind == "I":
            (x.grad,) = torch.autograd.grad(y, x, gradient, retain_graph=True)
        else:
            parameters = list(self.stages[stage].parameters())
            for parameter, part in zip(parameters, torch.autograd.grad(y, parameters, gradient), strict=True):
                parameter.grad = part if parameter.grad is None else parameter.grad + part
        if manager is not None and self.announced:
            manager.end_backward(stage, microbatch, kind)

    def evaluate(self, with_grad: bool, microbatches: int) -> None:
        for microbatch in range(microbatches):
            with torch.set_grad_enabled(with_grad):
                x = self._input(100 + microbatch)
                for stage, module in enumerate(self.stages):
                    if PipelineOffloadManager.OFFLOAD_MGR is not None and not self.announced:
                        init_chunk_handler(len(self.stages), stage, self.min_elements, **self.keywords)
                    x = module(x)

    def _input(self, microbatch: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self._steps + microbatch)
        return torch.randn(ROWS, WIDTH, generator=generator)


def baseline(stages: Sequence[nn.Module], steps: Sequence[Sequence[Action]]) -> list[list[Tensor]]:
    """The gradients of each step with no manager at all."""
    with installed(None):
        driver = Driver(stages)
        return [driver.step(actions) for actions in steps]


def assert_same(expected: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor]]) -> None:
    """Bitwise."""
    assert len(expected) == len(found)
    for step, (one, other) in enumerate(zip(expected, found, strict=True)):
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            assert torch.equal(a, b), (
                f"gradient {number} of step {step} differs by up to {(a - b).abs().max().item()}"
            )


# -- orders of one rank's step -------------------------------------------------------------------------------
def no_pipeline(microbatches: int, stages: int = 1) -> list[Action]:
    return [
        action
        for mb in range(microbatches)
        for action in [
            *(("F", stage, mb) for stage in range(stages)),
            *(("B", stage, mb) for stage in reversed(range(stages))),
        ]
    ]


def gpipe(microbatches: int) -> list[Action]:
    return [*(("F", 0, mb) for mb in range(microbatches)), *(("B", 0, mb) for mb in range(microbatches))]


def lifo(microbatches: int) -> list[Action]:
    return [
        *(("F", 0, mb) for mb in range(microbatches)),
        *(("B", 0, mb) for mb in reversed(range(microbatches))),
    ]


def one_f_one_b(microbatches: int, warmup: int) -> list[Action]:
    order: list[Action] = [("F", 0, mb) for mb in range(min(warmup, microbatches))]
    for mb in range(microbatches):
        if mb + warmup < microbatches:
            order.append(("F", 0, mb + warmup))
        order.append(("B", 0, mb))
    return order


def interleaved(microbatches: int, stages: int = 2, warmup: int = 4) -> list[Action]:
    """Groups of two microbatches through each virtual stage in turn, forwards ahead of backwards by
    `warmup`."""
    assert microbatches % 2 == 0
    groups = range(0, microbatches, 2)
    forwards: list[Action] = [
        ("F", stage, mb + i) for mb in groups for stage in range(stages) for i in (0, 1)
    ]
    backwards: list[Action] = [
        ("B", stage, mb + i) for mb in groups for stage in reversed(range(stages)) for i in (0, 1)
    ]
    order = forwards[:warmup]
    for i, backward in enumerate(backwards):
        order.extend(forwards[warmup + i : warmup + i + 1])
        order.append(backward)
    return order


def save_one(x: Tensor, name: str = "a", **commit: Any) -> Tensor:
    """x * x in a group of its own: one saved tensor, x."""
    x = group_start(x, name)
    with offload_hooks():
        y = x * x
    return group_commit(y, name, **commit)


def leaf(elements: int = 64) -> Tensor:
    return torch.randn(elements, requires_grad=True)
