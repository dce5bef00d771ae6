"""The block and the model that tests of several folders train."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


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
