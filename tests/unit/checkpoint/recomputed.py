"""Blocks whose calls are recomputed by hooks, as `offload.apply` puts them on: what the tests of hidden
states share."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.checkpoint.hidden_states import RecomputedCall, is_recompute
from offload.telemetry.records import StepStats

ROWS, WIDTH, BLOCKS = 12, 16, 4
INPUT_BYTES = 4 * ROWS * WIDTH


class Block(nn.Module):
    """x + fc2(dropout(gelu(fc1(norm(x))))), plus the mean of a mask if there is one."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        if mask is not None:
            y = mask @ y
        y = F.dropout(F.gelu(self.fc1(y)), self.dropout)
        return x + self.fc2(y)


class Model(nn.Module):
    """Some blocks. The input of the first is a value that only the graph holds."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        h = x * 1.0
        for block in self.blocks:
            h = block(h, *args, **kwargs)
        return h


class Seen(NamedTuple):
    requires_grad: bool
    is_leaf: bool
    shape: torch.Size
    stride: tuple[int, ...]
    autocast: bool


class Watching(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Seen] = []

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        autocast = torch.is_autocast_enabled("cpu")
        self.seen.append(Seen(x.requires_grad, x.is_leaf, x.size(), x.stride(), autocast))
        return super().forward(x, mask)


def hooks_left() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def build(kind: Callable[[], nn.Module] = Block, count: int = BLOCKS) -> Model:
    torch.manual_seed(0)
    return Model([kind() for _ in range(count)])


def put_on(
    module: nn.Module, manager: PipelineOffloadManager, context_fn: Callable[[], Any] | None = None
) -> Callable[[], None]:
    """The two hooks of one block; takes them off again."""
    calls: list[RecomputedCall | None] = []

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(None)
        if is_recompute(module):
            return
        call = RecomputedCall(manager, module, args, kwargs, context_fn)
        call.begin()
        calls[-1] = call

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = calls.pop()
        if call is None:
            return
        if sys.exc_info()[1] is None:
            call.end(output)
        else:
            call.abort()

    first = module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    last = module.register_forward_hook(after, always_call=True)

    def take_off() -> None:
        first.remove()
        last.remove()

    return take_off


@contextmanager
def recomputed(
    modules: Sequence[nn.Module], manager: PipelineOffloadManager, context_fn: Callable[[], Any] | None = None
) -> Iterator[None]:
    """Calls of `modules` are recomputed inside; a backward may come after."""
    with ExitStack() as stack:
        for module in dict.fromkeys(modules):
            stack.callback(put_on(module, manager, context_fn))
        yield


def source(seed: int = 1) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def values(module: nn.Module, x: Tensor) -> list[Tensor]:
    """The gradients, which are taken away, and the buffers of now."""
    found = [x.grad, *(parameter.grad for parameter in module.parameters())]
    x.grad = None
    module.zero_grad(set_to_none=True)
    return [
        *(torch.zeros(()) if grad is None else grad for grad in found),
        *(buffer.clone() for buffer in module.buffers()),
    ]


def train(
    module: nn.Module, *args: Any, seed: int = 1, x: Tensor | None = None, **kwargs: Any
) -> list[Tensor]:
    """The loss, the gradients and the buffers of one forward and one backward, from one random state."""
    torch.manual_seed(seed)
    x = source(seed) if x is None else x
    loss = module(x, *args, **kwargs).square().mean()
    loss.backward()
    return [loss.detach(), *values(module, x)]


def train_step(
    model: Model, manager: PipelineOffloadManager, *args: Any, context_fn: Any = None, **kwargs: Any
) -> tuple[list[Tensor], StepStats]:
    """The same, its blocks recomputed, as a step of the process-wide manager."""
    with recomputed(list(model.blocks), manager, context_fn):
        init_chunk_handler(None, None, 1)
        found = train(model, *args, **kwargs)
        stats = step_end()
    assert stats is not None
    return found, stats


def compared(
    model: Model,
    manager: PipelineOffloadManager,
    *args: Any,
    steps: int = 1,
    context_fn: Any = None,
    **kwargs: Any,
) -> list[StepStats]:
    """The figures of some steps, each of which has the bits of plain training."""
    plain = copy.deepcopy(model)
    figures: list[StepStats] = []
    for step in range(steps):
        expected = train(plain, *args, seed=step, **kwargs)
        found, stats = train_step(model, manager, *args, seed=step, context_fn=context_fn, **kwargs)
        assert_bits(expected, found)
        figures.append(stats)
    return figures


def assert_bits(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), f"number {number} differs by up to {(one - other).abs().max().item()}"
