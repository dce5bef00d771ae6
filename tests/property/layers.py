"""What a layer of a random program does: operations that save all kinds of views, groups around them, and
regions that are checkpointed.

One invariant: what is computed depends on the nodes, the values and the weights alone, never on what `said`
tells the engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from tests.property.speakers import Plain

ROWS, COLUMNS = 4, 16
NUMEL = ROWS * COLUMNS
NBYTES = 4 * NUMEL
ActionKey = tuple[str, int, int]


@dataclass(frozen=True)
class Op:
    """One operation on two recent values, the a-th and the b-th from the end."""

    kind: str
    a: int
    b: int


@dataclass(frozen=True)
class Group:
    """A named group around `body`. hooks: over all of it, over what comes after its first node, or
    nowhere."""

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
    """Its backward reads its saved tensors twice, and compares bytes, sizes, strides and dtypes with those of
    the forward."""

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


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


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
    return ReadTwice.apply(wide[:, ::4], y) + (wide[:1, :COLUMNS].sin() * wide[:1, :COLUMNS]).expand(
        ROWS, COLUMNS
    )


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
    "checkpoint": lambda x, y, w: checkpoint(
        lambda p, q: torch.tanh(p * q) @ w[0], x, y, use_reentrant=False
    ),
    "long": lambda x, y, w: torch.sigmoid(x @ w[1]).view(2 * ROWS, COLUMNS)[::2],
}
aten = torch.ops.aten
KEEP_OPS = frozenset({aten.mm.default, aten.exp.default, aten.native_dropout.default, aten.rand_like.default})


def _region_random(x: Tensor, y: Tensor, w: list[Tensor], said: Plain) -> Tensor:
    """Numbers that are kept between numbers that are not; nothing but the region's first state may decide
    what they are."""
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
    "region_wide": lambda x, y, w, said: (
        (torch.sin(x @ w[2]).view(-1, COLUMNS) @ w[0])[::4].exp().clamp(max=9.0).tanh() * y
    ),
    "region_head": lambda x, y, w, said: (x @ w[1])[:, :COLUMNS].sin() @ w[0],
    "region_random": _region_random,
    "region_nested": _region_nested,
}
# a branch that never runs backward: dropped at once, or with the chunk; or with the chunk, and what it saved
# is written again
DEAD = ("dead", "kept", "rewritten")


def make_weights(stages: int) -> list[list[torch.nn.Parameter]]:
    source = torch.Generator().manual_seed(stages)
    shapes = [(COLUMNS, width * COLUMNS) for width in (1, 2, 4)]
    return [
        [torch.nn.Parameter(torch.randn(shape, generator=source) * 0.3) for shape in shapes]
        for _ in range(stages)
    ]


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
