"""Random training programs for `offload.apply`: small models whose blocks are called in many ways, and loops
that do what loops do between a forward and its backward.

One invariant: a program runs the same operations in the same order with offload and without; what torch
itself refuses is not drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.unit.groups.stack import EXECUTORS
from tests.unit.modules.training import seeded

ROWS, WIDTH = 6, 8
KINDS = ("mlp", "batch norm", "attention", "counter", "function")
RESIDUALS = ("inside", "outside", "in place", "none")
CHECKPOINTS = ("none", "none", "blocks", "blocks, reentrant", "all", "all, reentrant")
MODES: tuple[Any, ...] = ("groups", True, "legacy", "disk", "hidden_states", "selective", "auto")
RECOMPUTING = ("hidden_states", "selective", "auto")
BACKWARDS = ("once", "once", "twice", "never", "grad")
BETWEEN = ("nothing", "nothing", "no_grad", "evaluation", "forward of a block", "mode", "exception")


@dataclass(frozen=True)
class Microbatch:
    """backward: how often, "grad" by torch.autograd.grad. between: its forward and its backward."""

    backward: str
    between: str
    input_requires_grad: bool


@dataclass(frozen=True)
class Program:
    """kinds: of the blocks. steps: the microbatches of each. live: whether all forwards of a step come before
    its backwards; latest_first: which of them begins then. limit: of saved bytes on the device."""

    kinds: tuple[str, ...]
    residual: str
    keyword: bool
    in_place_activation: bool
    frozen: frozenset[int]  # parts: the embedding, then the blocks
    checkpoints: str
    autocast: bool
    mode: Any
    min_numel: int
    limit: int | None
    executor: Any
    seed: int
    steps: tuple[tuple[Microbatch, ...], ...]
    live: bool
    latest_first: bool
    set_to_none: bool


class _Square(torch.autograd.Function):
    """Saves its input and its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * x
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return gradients[0] * 2 * x + 0 * y


class Block(nn.Module):
    def __init__(self, program: Program, kind: str) -> None:
        super().__init__()
        self.program, self.kind = program, kind
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(WIDTH if kind == "attention" else 3 * WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.count: Tensor

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> Tensor:
        in_place = self.program.residual == "in place"
        h = self.up(self.norm(x * 2 if in_place else x))
        if self.kind == "attention":
            query, key, value = h.view(1, ROWS, 3, WIDTH).unbind(2)
            h = F.scaled_dot_product_attention(query, key, value).view(ROWS, WIDTH)
        elif self.kind == "function":
            h = _Square.apply(h)
        else:
            h = F.relu(h, inplace=True) if self.program.in_place_activation else torch.tanh(h)
            h = F.dropout(h, 0.2, self.training)
        if self.kind == "counter":
            self.count += 1
            h = h / float(self.count)
        y = self.down(h)
        if scale is not None:
            y = y * scale
        if in_place:
            return x.add_(y)
        return x + y if self.program.residual == "inside" else y


class Model(nn.Module):
    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(program, kind) for kind in program.kinds)
        self.head = nn.Linear(WIDTH, 3)
        self.fails = False
        parts = [self.embed, *self.layers]
        for number in program.frozen:
            parts[number % len(parts)].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            named = {"scale": x.sigmoid()} if self.program.keyword else {}
            if self.program.checkpoints.startswith("blocks"):
                reentrant = self.program.checkpoints.endswith("reentrant")
                y = checkpoint(layer, x, use_reentrant=reentrant, **({} if reentrant else named))
            else:
                y = layer(x, **named)
            x = x + y if self.program.residual == "outside" else y
            if self.fails:
                raise KeyError("a forward fails after its first block")
        return self.head(x)


class Run:
    """One run of a program. `seen` has every gradient, and at the end weights, buffers and the next random
    number. before_step: called before each step."""

    def __init__(self, program: Program, before_step: Callable[[], object] = int) -> None:
        self.before_step = before_step
        self.program = program
        with seeded(program.seed):
            self.model = Model(program)
        self.seen: list[Tensor | None] = []
        self.optimizer = torch.optim.SGD(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad], lr=0.01
        )

    def play(self) -> None:
        with seeded(self.program.seed + 1):
            for step in self.program.steps:
                self._step(step)
            self.seen += [tensor.detach().clone() for tensor in self.model.state_dict().values()]
            self.seen.append(torch.rand(2))

    def _step(self, microbatches: tuple[Microbatch, ...]) -> None:
        self.before_step()
        waiting = []
        for microbatch in microbatches:
            x = torch.randn(ROWS, WIDTH, requires_grad=microbatch.input_requires_grad)
            waiting.append((microbatch, x, self._loss(x)))
            if not self.program.live:
                self._backward(*waiting.pop())
        while waiting:
            self._backward(*waiting.pop(-1 if self.program.latest_first else 0))
        self.seen += [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.program.set_to_none)

    def _loss(self, x: Tensor) -> Tensor:
        program = self.program
        with torch.autocast("cpu", torch.bfloat16, enabled=program.autocast):
            if program.checkpoints.startswith("all"):
                y = checkpoint(self.model, x, use_reentrant=program.checkpoints.endswith("reentrant"))
            else:
                y = self.model(x)
        return y.float().square().mean()

    def _backward(self, microbatch: Microbatch, x: Tensor, loss: Tensor) -> None:
        self._between(microbatch.between)
        if microbatch.backward == "grad" and "reentrant" not in self.program.checkpoints:
            wanted = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.seen += torch.autograd.grad(loss, wanted, allow_unused=True)
        elif microbatch.backward != "never":
            if microbatch.backward == "twice":
                loss.backward(retain_graph=True)
            loss.backward()
            self.seen.append(None if x.grad is None else x.grad.clone())

    def _between(self, what: str) -> None:
        if what == "nothing":
            return
        if what == "mode":  # the next forwards are in evaluation, or in training again
            self.model.train(not self.model.training)
            return
        if what == "exception":
            self.model.fails = True
            with suppress(KeyError):
                self._loss(torch.randn(ROWS, WIDTH, requires_grad=True))
            self.model.fails = False
            return
        trains = self.model.training
        self.model.train(what != "evaluation")
        with torch.no_grad() if what != "forward of a block" else nullcontext():
            x = torch.randn(ROWS, WIDTH)
            self.model.layers[-1](x) if what == "forward of a block" else self.model(x)
        self.model.train(trains)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    mode, residual = draw(st.sampled_from(MODES)), draw(st.sampled_from(RESIDUALS))
    checkpoints = draw(st.sampled_from(CHECKPOINTS))
    # what is recomputed must find its input as it was
    if residual == "in place" and (mode in RECOMPUTING or checkpoints.startswith("blocks")):
        residual = "inside"
    reentrant = checkpoints.endswith("reentrant")
    kinds = tuple(draw(st.lists(st.sampled_from(KINDS), min_size=2, max_size=4)))
    # torch's checkpoints recompute in the mode of then, and torch's backward of a batch norm in evaluation
    # reads the statistics of then, which a forward in training may have moved since
    changes_mode = checkpoints == "none" and "batch norm" not in kinds
    microbatches = st.builds(
        Microbatch,
        backward=st.sampled_from(BACKWARDS),
        between=st.sampled_from([what for what in BETWEEN if what != "mode" or changes_mode]),
        # a reentrant checkpoint has gradients only for an input that wants one
        input_requires_grad=st.just(True) if reentrant else st.booleans(),
    )
    return Program(
        kinds=kinds,
        residual=residual,
        keyword=draw(st.booleans()),
        in_place_activation=mode != "selective" and draw(st.booleans()),
        frozen=draw(st.frozensets(st.integers(0, 4), max_size=2)),
        checkpoints=checkpoints,
        autocast=draw(st.booleans()),
        mode=mode,
        min_numel=draw(st.sampled_from([1, 1, 1 + ROWS * WIDTH])),
        limit=draw(st.sampled_from([None, 0, 1024, 4096])),
        executor=draw(st.sampled_from(EXECUTORS)),
        seed=draw(st.integers(0, 99)),
        steps=tuple(
            tuple(draw(st.lists(microbatches, min_size=1, max_size=3)))
            for _ in range(draw(st.integers(1, 4)))
        ),
        live=draw(st.booleans()),
        latest_first=draw(st.booleans()),
        set_to_none=draw(st.booleans()),
    )
