"""Random training steps: models whose layers mark groups, orders in which chunks run, and limits; run with offloading and without.

One invariant: `Plain` and `Offloaded` run the same operations on the same values in the same order, so their gradients have equal bits.
Marks change no sum: a marked value takes the place of the unmarked one, as `x = group_start(x, name)` does in a model.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadConfig, OffloadEngine, PipelineOffloadManager, StaleHandleError
from offload.device.sim import ExecutorName, SimDevice, SimGraph
from offload.policy.actions import Rates
from tests.property.watch import Watch

ROWS, COLUMNS = 4, 16
NUMEL = ROWS * COLUMNS
NBYTES = 4 * NUMEL
ActionKey = tuple[str, int, int]

# -- what a layer does ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Op:
    """One operation on two recent values, the a-th and the b-th from the end."""

    kind: str
    a: int
    b: int


@dataclass(frozen=True)
class Group:
    """A named group around `body`. hooks: over all of it, over what comes after its first node, or nowhere."""

    name: str
    at: int
    hooks: Literal["all", "rest", "none"]
    delay: bool
    body: tuple[Any, ...]


@dataclass(frozen=True)
class Overlap:
    """Two groups of which the first one started ends first."""

    first: str
    second: str
    bodies: tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


@dataclass(frozen=True)
class Say:
    """on, off: switch offloading. flush: send the delayed groups."""

    what: Literal["on", "off", "flush"]


class ReadTwice(torch.autograd.Function):
    """Its backward reads its saved tensors twice, and compares bytes, sizes, strides and dtypes with those of the forward."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.expected = [(tensor.clone(), tensor.size(), tensor.stride()) for tensor in tensors]
        return tensors[0] * tensors[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        for found in (ctx.saved_tensors, ctx.saved_tensors):
            for tensor, (value, size, stride) in zip(found, ctx.expected, strict=True):
                assert (tensor.size(), tensor.stride(), tensor.dtype) == (size, stride, value.dtype)
                assert same_bits(tensor, value), "a saved tensor came back with other bytes"
        x, y, *others = found
        return grads[0] * y, grads[0] * x, *(torch.zeros_like(other) for other in others)


class Tick(torch.autograd.Function):
    """An identity whose backward takes virtual time."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: SimDevice, seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, seconds
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.compute_for(ctx.seconds)
        return grads[0], None, None


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def _gated(x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
    gate, up = (x @ w[1]).split(COLUMNS, dim=-1)
    return torch.sigmoid(gate) * up


def _in_forward(x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
    """A backward within the forward."""
    if not torch.is_grad_enabled():
        return x * y
    leaf = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad((leaf * y.detach()).tanh().sum(), leaf)
    return x * grad


def _penalty(x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
    if not x.requires_grad or not torch.is_grad_enabled():
        return x * y
    (grad,) = torch.autograd.grad((x * y.detach()).sin().sum(), x, create_graph=True)
    return torch.tanh(grad)


def _rows(x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
    return torch.cat([x, y])[ROWS // 2 : ROWS // 2 + ROWS] * y


def _sparse(x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
    part = (x @ w[2])[:, ::4]
    return torch.tanh(part * part)


def _sparse_head(x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
    """Two sparse views of one storage, the second inside the first bytes that the first takes packed."""
    wide = x @ w[2]
    return ReadTwice.apply(wide[:, ::4], y) + (wide[:1, :COLUMNS].sin() * wide[:1, :COLUMNS]).expand(ROWS, COLUMNS)


def _growing(x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
    """A part of a storage is saved first, and then all of it."""
    wide = x @ w[1]
    return wide[1:2, :COLUMNS].sin() * wide[2:3, COLUMNS:].sin() + wide.sin()[:, ::2]


OPS: dict[str, Callable[[Tensor, Tensor, list[Tensor]], Tensor]] = {
    "linear": lambda x, y, w: torch.tanh(x @ w[0]),
    "mul": lambda x, y, w: x * y,
    "residual": lambda x, y, w: x + 0.5 * torch.sin(y),
    "gated": _gated,
    "transposed": lambda x, y, w: (x.t() * y.t()).t(),
    "transposed_linear": lambda x, y, w: torch.tanh((w[0] @ x.t()).t()),
    "rows": _rows,
    "sparse": _sparse,
    "sparse_head": _sparse_head,
    "growing": _growing,
    "column": lambda x, y, w: x[:, 1:2].expand(ROWS, COLUMNS) * y,
    "mean": lambda x, y, w: x.mean(0, keepdim=True).expand(ROWS, COLUMNS) * y,
    "mask": lambda x, y, w: torch.where(x > y, x.exp().clamp(max=4.0), y),
    "gather": lambda x, y, w: torch.gather(x, 1, x.detach().argsort(1)),
    "half": lambda x, y, w: (x.bfloat16() * y.bfloat16()).float(),
    "double": lambda x, y, w: (x.double() * y.double()).float(),
    "twice": lambda x, y, w: ReadTwice.apply(x, y),
    "views": lambda x, y, w: ReadTwice.apply(x, y, x[1:], x.t(), x[:, ::2], y[:1, 3:5], x.reshape(-1)[5:]),
    "in_place": lambda x, y, w: (x * 1.5).add_(y).tanh_(),
    "detached": lambda x, y, w: x * y.detach().reshape(-1).flip(0).view(ROWS, COLUMNS),
    "in_forward": _in_forward,
    "penalty": _penalty,
    "checkpoint": lambda x, y, w: checkpoint(lambda p, q: torch.tanh(p * q) @ w[0], x, y, use_reentrant=False),
    "long": lambda x, y, w: torch.sigmoid(x @ w[1]).view(2 * ROWS, COLUMNS)[::2],
}
aten = torch.ops.aten
KEEP_OPS = frozenset({aten.mm.default, aten.exp.default, aten.native_dropout.default, aten.rand_like.default})


def _region_random(x: Tensor, y: Tensor, w: list[Tensor], said: Plain) -> Tensor:
    """Numbers that are kept between numbers that are not; nothing but the region's first state may decide what they are."""
    x = x * torch.bernoulli(torch.full_like(x, 0.5))
    x, _ = torch.native_dropout(x * y, 0.5, True)
    return torch.sigmoid(x * torch.bernoulli(torch.full_like(x, 0.5))) * torch.rand_like(x)


def _region(x: Tensor, y: Tensor, w: list[Tensor], said: Plain) -> Tensor:
    return torch.tanh(torch.sigmoid(x @ w[0]).mul(y)) @ w[0] + x


def _region_nested(x: Tensor, y: Tensor, w: list[Tensor], said: Plain) -> Tensor:
    """Regions inside the region, the second with an input that takes a kept operator to make."""
    first = said.region(_region, x, y, w, said)
    return torch.sigmoid(said.region(_region, torch.tanh(x @ w[0]), first, w, said) @ w[0]) * y


# Checkpointed; with offloading the outputs of KEEP_OPS are kept and leave.
REGIONS: dict[str, Callable[[Tensor, Tensor, list[Tensor], Plain], Tensor]] = {
    "region": _region,
    "region_wide": lambda x, y, w, said: (torch.sin(x @ w[2]).view(-1, COLUMNS) @ w[0])[::4].exp().clamp(max=9.0).tanh() * y,
    "region_head": lambda x, y, w, said: (x @ w[1])[:, :COLUMNS].sin() @ w[0],
    "region_random": _region_random,
    "region_nested": _region_nested,
}
# a branch that never runs backward: dropped at once, or with the chunk; or with the chunk, and what it saved is written again
DEAD = ("dead", "kept", "rewritten")


def make_weights(stages: int) -> list[list[torch.nn.Parameter]]:
    source = torch.Generator().manual_seed(stages)
    shapes = [(COLUMNS, width * COLUMNS) for width in (1, 2, 4)]
    return [[torch.nn.Parameter(torch.randn(shape, generator=source) * 0.3) for shape in shapes] for _ in range(stages)]


# -- how the run speaks to the engine ---------------------------------------------------------------------------------------


class Plain:
    """Says nothing to anybody."""

    def begin(self, stage: int, microbatch: int) -> None: ...
    def end_forward(self, stage: int, microbatch: int) -> None: ...
    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None: ...
    def end_backward(self, stage: int, microbatch: int, kind: str) -> None: ...
    def received(self, tensor: Tensor) -> None: ...
    def foretell(self, actions: tuple[ActionKey, ...] | None) -> None: ...
    def say(self, what: str) -> None: ...
    def between(self) -> None: ...
    def step_end(self) -> None: ...

    def computed(self, tensor: Tensor) -> Tensor:
        return tensor

    def start(self, tensor: Tensor, name: str) -> Tensor:
        return tensor

    def commit(self, tensor: Tensor, name: str, delay: bool) -> Tensor:
        return tensor

    def hooks(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def region(self, body: Callable[..., Tensor], *values: Any) -> Tensor:
        found: Tensor = checkpoint(body, *values, use_reentrant=False)
        return found

    def lane_of(self, microbatch: int) -> int:
        return 0

    def lane(self, microbatch: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def captures(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class Settings:
    """One engine, its device and how it is driven."""

    executor: ExecutorName = "late"
    seed: int = 0
    gb_s: float = 50.0
    compute_s: float = 1e-8  # announced an operation
    lanes: int = 1
    announced: bool = True
    rates: Rates | None = None  # of the link as it was measured: with a device limit, plans are timed and tried
    config: OffloadConfig = field(default_factory=OffloadConfig)


class Offloaded(Plain):
    """Marks groups and announces chunks to a manager of its own, which is the process-wide one until `close`."""

    def __init__(self, settings: Settings, stages: int) -> None:
        self.settings = settings
        self.device = SimDevice(executor=settings.executor, seed=settings.seed, d2h_gb_s=settings.gb_s, h2d_gb_s=settings.gb_s)
        self.engine = OffloadEngine(settings.config, device=self.device)
        self.engine.rates = settings.rates
        self.manager = PipelineOffloadManager(self.engine, print_summary=False)
        self.watch = Watch(self.engine, declare=settings.lanes > 1)
        self.stages = stages
        self.lanes = [self.device.compute, *(self.device.new_compute_lane(f"lane {i}") for i in range(1, settings.lanes))]

    def begin(self, stage: int, microbatch: int) -> None:
        if self.settings.announced:
            self.manager.begin_chunk(stage, microbatch)
        else:
            self.manager.init_model_chunk_offload_handler(self.stages, stage, self.settings.config.min_offloaded_tensor_size)

    def end_forward(self, stage: int, microbatch: int) -> None:
        if self.settings.announced:
            self.manager.end_forward(stage, microbatch)

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        if self.settings.announced:
            self.manager.begin_backward(stage, microbatch, kind)

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        if self.settings.announced:
            self.manager.end_backward(stage, microbatch, kind)

    def received(self, tensor: Tensor) -> None:
        self.manager.register_external(tensor)

    def computed(self, tensor: Tensor) -> Tensor:
        self.device.compute_for(self.settings.compute_s)
        ticked: Tensor = Tick.apply(tensor, self.device, 2 * self.settings.compute_s)
        return ticked

    def foretell(self, actions: tuple[ActionKey, ...] | None) -> None:
        self.manager.set_order(actions)

    def say(self, what: str) -> None:
        {"on": offload.enable_offload, "off": offload.disable_offload, "flush": offload.flush_delayed_groups}[what]()

    def between(self) -> None:
        self.watch.check_counts()

    def step_end(self) -> None:
        for lane in self.lanes[1:]:
            self.device.wait(self.lanes[0], self.device.record(lane), "step")
        self.manager.step_end()
        self.watch.check_step_end(self.manager.stats)

    def start(self, tensor: Tensor, name: str) -> Tensor:
        return offload.group_start(tensor, name)

    def commit(self, tensor: Tensor, name: str, delay: bool) -> Tensor:
        return offload.group_commit(tensor, name, delay_offload=delay)

    def hooks(self) -> AbstractContextManager[Any]:
        return offload.offload_hooks()

    def region(self, body: Callable[..., Tensor], *values: Any) -> Tensor:
        found: Tensor = checkpoint(body, *values, use_reentrant=False, context_fn=offload.selective_contexts(KEEP_OPS))
        return found

    def lane_of(self, microbatch: int) -> int:
        return microbatch % len(self.lanes)

    def lane(self, microbatch: int) -> AbstractContextManager[Any]:
        return self.device.use_lane(self.lanes[self.lane_of(microbatch)])

    @contextmanager
    def captures(self) -> Iterator[None]:
        """What is captured inside is replayed three times, and its host blocks are given back. Host memory is there if the limit allows."""
        self.engine.arena.reserve_later(self.engine.arena.lent_bytes + 64 * NBYTES)
        with offload.capturing() as region:
            self.graphs: list[SimGraph] = []
            yield
        for _ in range(3):
            for graph in self.graphs:
                graph.replay()
        self.watch.seen.update(replayed=region.replays)
        region.release()

    @contextmanager
    def capture(self) -> Iterator[None]:
        with self.device.capture() as graph:
            yield
        self.graphs.append(graph)

    def __enter__(self) -> Offloaded:
        PipelineOffloadManager.reset_instance(self.manager)
        return self

    def __exit__(self, failure: object, *rest: object) -> None:
        PipelineOffloadManager.OFFLOAD_MGR = None
        if failure is None:
            self.manager.close()
            assert self.engine.arena.held_bytes == 0


# -- running ----------------------------------------------------------------------------------------------------------------


class Values:
    """The last few values of a forward; older ones live only where autograd keeps them."""

    def __init__(self, first: Tensor) -> None:
        self.recent = [first]
        self.kept: list[Tensor] = []

    def at(self, back: int) -> int:
        return len(self.recent) - 1 - back % len(self.recent)

    def append(self, value: Tensor) -> None:
        self.recent.append(value)
        del self.recent[:-4]


def run_nodes(nodes: tuple[Any, ...], values: Values, weights: list[Tensor], said: Plain) -> None:
    for node in nodes:
        if isinstance(node, Op):
            x, y = values.recent[values.at(node.a)], values.recent[values.at(node.b)]
            if node.kind in DEAD:
                branch = x * y
                values.kept += [branch * branch] * (node.kind != "dead")
                if node.kind == "rewritten":
                    values.append(said.computed(branch.add_(y).tanh_()))
                continue
            if node.kind in REGIONS:
                torch.manual_seed(node.a + 4 * node.b)  # the same numbers in every run
                values.append(said.computed(said.region(REGIONS[node.kind], x, y, weights, said)))
            else:
                values.append(said.computed(OPS[node.kind](x, y, weights)))
        elif isinstance(node, Say):
            said.say(node.what)
        elif isinstance(node, Group):
            at = values.at(node.at)
            values.recent[at] = said.start(values.recent[at], node.name)
            hooked = {"all": 0, "rest": 1, "none": len(node.body)}[node.hooks]
            run_nodes(node.body[:hooked], values, weights, said)
            with said.hooks():
                run_nodes(node.body[hooked:], values, weights, said)
            values.recent[-1] = said.commit(values.recent[-1], node.name, node.delay)
        else:
            before, both, after = node.bodies
            values.recent[-1] = said.start(values.recent[-1], node.first)
            with said.hooks():
                run_nodes(before, values, weights, said)
                values.recent[-1] = said.start(values.recent[-1], node.second)
                with said.hooks():
                    run_nodes(both, values, weights, said)
            values.recent[-1] = said.commit(values.recent[-1], node.first, False)
            with said.hooks():
                run_nodes(after, values, weights, said)
            values.recent[-1] = said.commit(values.recent[-1], node.second, False)


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

    actions: F, B, I, W; also E, a forward without gradients, and C, a forward and backward captured and replayed. twice: the backward
    runs twice over one graph. again: the forward runs twice, and the first one's graph is dropped. leftover: no backward comes. thread: the
    backward runs on a thread of its own. buffers: inputs are received into buffers that are used again. foretold: the order of actions that
    is announced, right or wrong.
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
    results: list[Tensor] = field(default_factory=list)  # gradients, outputs: everything whose bits must not change
    free_buffers: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))  # by lane: nothing orders one after another

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
        self.results += [weight.grad for weights in self.weights for weight in weights if weight.grad is not None]
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
            value = torch.randn((ROWS, COLUMNS), generator=torch.Generator().manual_seed(step.seed * 64 + stage * 16 + microbatch))
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
        output = values.recent[-1] if values.recent[-1].requires_grad else values.recent[-1] @ self.weights[stage][0]
        if stage == len(self.stages) - 1:
            output = output.square().mean()
        chunk = Chunk(source, output, values.kept)
        self.said.end_forward(stage, microbatch)
        return chunk

    def _captured(self, step: Step, stage: int, microbatch: int) -> None:
        """One graph or one each, beside the chunks of the step."""
        number, weights, one_graph = 16 + microbatch, self.weights[stage], (step.seed + microbatch) % 2 == 0
        source = torch.randn((ROWS, COLUMNS), generator=torch.Generator().manual_seed(step.seed)).requires_grad_()

        def backward(loss: Tensor) -> None:
            self.said.begin_backward(stage, number, "B")
            self.results += [grad for grad in torch.autograd.grad(loss, [source, *weights], allow_unused=True) if grad is not None]
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
                    (chunk.source.grad,) = torch.autograd.grad((chunk.output,), (chunk.source,), grads, retain_graph=True)
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
                torch.autograd.grad(chunk.output, [weight for weights in self.weights for weight in weights], grads, allow_unused=True)


@dataclass(frozen=True)
class Program:
    """A model, its steps, and the engine that they run over."""

    stages: tuple[tuple[Any, ...], ...]
    trains_input: bool
    steps: tuple[Step, ...]
    settings: Settings


def play(program: Program) -> Offloaded:
    """Run a program without offloading and with it, and compare every bit after each step. Returns what spoke to the engine."""
    plain = Run(program.stages, Plain(), program.trains_input)
    with Offloaded(program.settings, len(program.stages)) as said:
        run = Run(program.stages, said, program.trains_input)
        for step in program.steps:
            plain.step(step)
            run.step(step)
            assert len(plain.results) == len(run.results)
            assert all(same_bits(*pair) for pair in zip(plain.results, run.results, strict=True)), "a gradient has other bits"
            plain.results.clear()
            run.results.clear()
        del run
    return said
