"""A model whose weights stream, beside the same model without: what tests of streamed weights start from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import offload
from offload.apply import Applied
from offload.device.sim import ExecutorName
from offload.engine import OffloadEngine
from offload.optim import HybridDeviceOptimizer
from offload.weights.figures import WeightFigures
from offload.weights.stream import WeightStream
from tests import nets
from tests.inside import streaming_of, streams_from
from tests.optim_pair import Overlap
from tests.unit.groups.stack import build_manager, installed

WIDTH, ROWS, BLOCKS = 16, 4, 6
BLOCK_BYTES = 2 * 2 * WIDTH * WIDTH * 4
"""Of one block's two weights, which are all that streams of it."""

Loss = Callable[[nn.Module, Tensor], Tensor]


class Block(nets.Block):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class Model(nets.Stack):
    """reentrant: of checkpoints around its blocks; None for none."""

    def __init__(self, blocks: int = BLOCKS, reentrant: bool | None = None) -> None:
        super().__init__(Block, blocks, WIDTH, 3, reentrant)


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().sum()


def adam(model: nn.Module, **options: Any) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


@dataclass
class Pair:
    """model: its weights stream. plain: the same without."""

    model: Any
    plain: Any
    handle: Applied

    @property
    def stream(self) -> WeightStream:
        return streaming_of(self.handle)

    @property
    def figures(self) -> WeightFigures:
        """The handle's, of streamed weights."""
        assert self.handle.weights is not None
        return self.handle.weights

    @property
    def present_bytes(self) -> int:
        """Of streamed weights on the device, counted from their storages."""
        return sum(weight.storage.nbytes() for block in self.stream.blocks for weight in block.weights)

    def optimizers(self, **options: Any) -> tuple[Optimizer, Optimizer]:
        return adam(self.model, **options), adam(self.plain, **options)

    def with_state_on_host(
        self, overlap: Overlap, *, masters: bool = False, **options: Any
    ) -> tuple[HybridDeviceOptimizer, Optimizer]:
        """The hybrid optimizer, and torch's, or with masters one whose weights do not stream."""
        given = {"lr": 1e-2, "bucket_bytes": 4096, "param_update_in_fp32": masters, **options}
        params = [[p for p in model.parameters() if p.requires_grad] for model in (self.model, self.plain)]
        engine = self.stream._engine
        ours = HybridDeviceOptimizer(
            params[0], 1.0, **given, overlap=overlap, model=self.model, engine=engine
        )
        if masters:
            return ours, HybridDeviceOptimizer(params[1], 1.0, **given, engine=OffloadEngine(device="sim"))
        return ours, torch.optim.AdamW(params[1], lr=1e-2, fused=True)

    @contextmanager
    def stepping(self, overlap: Overlap, **options: Any) -> Iterator[tuple[HybridDeviceOptimizer, Any]]:
        """The same as `with_state_on_host`, closed behind the block."""
        optimizers = self.with_state_on_host(overlap, **options)
        yield optimizers
        for optimizer in optimizers:
            getattr(optimizer, "close", int)()

    def train(
        self, steps: int = 4, loss: Loss = squares, optimizers: tuple[Optimizer, Optimizer] | None = None
    ) -> None:
        """Each loss, gradient and weight is that of the plain model, bit for bit."""
        ours, its = optimizers or self.optimizers()
        for _ in range(steps):
            x = torch.randn(ROWS, WIDTH)
            losses = [loss(model, x) for model in (self.model, self.plain)]
            for each in losses:
                each.backward()
            assert torch.equal(*losses)
            if getattr(ours, "overlap", "") != "backward":  # which is stepping by now
                self.check_gradients()
            for optimizer in (ours, its):
                optimizer.step()
                optimizer.zero_grad()
        for mine, other in zip(ours.state.values(), its.state.values(), strict=True):
            assert all(torch.equal(mine[key], other[key]) for key in other if isinstance(other[key], Tensor))
        self.check_weights()

    def check_gradients(self) -> None:
        for (name, mine), its in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, its.grad), name

    def check_weights(self) -> None:
        state = self.model.state_dict()
        for name, its in self.plain.state_dict().items():
            assert torch.equal(state[name], its), name


def dequantized(weight: Tensor) -> Tensor:
    """The elements that an INT8 weight is expanded to, by the formulas."""
    scales = (weight.abs().amax(-1, keepdim=True).float() / 127).clamp(min=1e-8)
    values = (weight.float() / scales).round().clamp(-127, 127).to(torch.int8)
    return (values.float() * scales).to(weight.dtype)


def expand_as(pair: Pair) -> None:
    """The plain model has the weights that the INT8 ones are expanded to."""
    for weight in (weight for block in pair.stream.blocks for weight in block.weights if weight.int8):
        parameter = pair.plain.get_parameter(weight.name)
        parameter.data = dequantized(parameter.data)


@contextmanager
def streamed(
    model: nn.Module | None = None,
    *,
    frozen: bool = False,
    executor: ExecutorName = "late",
    weights: str = "host",
    **options: Any,
) -> Iterator[Pair]:
    """Two alike, one of them streamed; the handle is removed afterwards, and all is as it was. frozen: the
    blocks are."""
    torch.manual_seed(0)
    model = Model() if model is None else model
    if frozen:
        for layer in model.layers:  # type: ignore[union-attr]
            layer.requires_grad_(False)
    plain = copy.deepcopy(model)
    with installed(build_manager(executor)) as manager, streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, weights=weights, **options)
        pair = Pair(model, plain, handle)
        if "quantize" in options:
            expand_as(pair)
        yield pair
        handle.remove()
        assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
        pair.check_weights()
        if options.get("mode") != "disk":  # whose threads end what they have begun, in their time
            assert manager.engine.arena.stats().lent_bytes == 0
        assert manager.engine.hooks.streamed == {}
