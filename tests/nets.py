"""The block and the model that tests of several folders train, and functions that they compute with."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.utils.checkpoint import checkpoint

from offload.device.sim import SimDevice


class Block(nn.Module):
    """x + down(activation(up(norm(x)))). inner: width between the two, by default twice that of x."""

    def __init__(
        self, width: int, inner: int = 0, activation: Callable[[Tensor], Tensor] = torch.relu
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        inner = inner or 2 * width
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.activation(self.up(self.norm(x))))


class Stack(nn.Module):
    """Layers between an embedding and a head of `out` numbers. reentrant: of checkpoints around the layers;
    None for none."""

    def __init__(
        self, layer: Callable[[], nn.Module], layers: int, width: int, out: int, reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.head = nn.Linear(width, out)
        self.reentrant = reentrant

    def forward(self, x: Tensor, skip: Container[int] = ()) -> Tensor:
        """skip: numbers of layers that are left out."""
        x = self.embed(x)
        for number, layer in enumerate(self.layers):
            if number not in skip:
                x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class ProductKeptOnCtx(torch.autograd.Function):
    """sin(x @ w). The product is an attribute of ctx, where no saved-tensor hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.product = x @ w
        return ctx.product.sin()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output * ctx.product.cos(), None


class Summed(torch.autograd.Function):
    """The sum over all ranks, by a collective that autograd records."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        summed: Tensor = functional_collectives.all_reduce(x, "sum", dist.group.WORLD)
        return summed * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Computes(torch.autograd.Function):
    """Takes so much of the simulated device's time, once in the forward and twice in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimDevice, seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, seconds
        device.compute_for(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.compute_for(2 * ctx.seconds)
        return gradients[0], None, None
