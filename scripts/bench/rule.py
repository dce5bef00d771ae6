"""The rule that mode "auto" has to be no slower than, as a user writes it around torch's own checkpoint: all
blocks but the last k are recomputed, and k is the largest number whose step fits.

Whether a step fits is measured, by real steps, and k is found by bisection. Two invariants: nothing of
`offload` is used; and a step with k = 0 is torch's non-reentrant checkpoint around each block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated layers, in the order of its modules: of each ModuleList and Sequential that holds
    two or more modules of one class, with parameters and modules inside. The longest list first: what is
    inside of a block found is none."""
    lists = [one for one in model.modules() if isinstance(one, nn.ModuleList) or type(one) is nn.Sequential]
    inside: set[nn.Module] = set()
    found: list[nn.Module] = []
    for one in sorted(lists, key=len, reverse=True):
        layers = list(one)
        parts = [part for layer in layers for part in layer.modules()]
        if len(layers) < 2 or len({type(layer) for layer in layers}) > 1:
            continue
        if not all(any(layer.children()) and any(True for _ in layer.parameters()) for layer in layers):
            continue
        if inside.isdisjoint(parts):
            found += layers
            inside.update(parts)
    place = {module: number for number, module in enumerate(model.modules())}
    return sorted(found, key=place.__getitem__)


def most_that_fits(count: int, fits: Callable[[int], bool]) -> int:
    """The largest k of 0 to `count` for which fits(k), where fits() turns false once; 0 is not asked for."""
    least, most = 0, count
    while least < most:
        k = (least + most + 1) // 2
        if fits(k):
            least = k
        else:
            most = k - 1
    return least


class Rule:
    """torch's non-reentrant checkpoint around all blocks of a model but the last `num_plain`."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks = find_blocks(model)
        self.num_plain = 0
        for number, block in enumerate(self.blocks):
            self._wrap(number, block, block.forward)

    def _wrap(self, number: int, block: nn.Module, forward: Callable[..., Any]) -> None:
        @functools.wraps(forward)
        def recomputed(*args: Any, **keywords: Any) -> Any:
            if not block.training or number >= len(self.blocks) - self.num_plain:
                return forward(*args, **keywords)
            return checkpoint(forward, *args, use_reentrant=False, **keywords)

        block.forward = recomputed

    def choose(self, step: Callable[[], int], total_bytes: int) -> None:
        """Set `num_plain` by real steps. step: makes one and returns its active peak in bytes; one that runs
        out of memory does not fit."""

        def fits(k: int) -> bool:
            self.num_plain = k
            try:
                return step() <= total_bytes
            except torch.OutOfMemoryError:
                return False

        self.num_plain = most_that_fits(len(self.blocks), fits)

    def remove(self) -> None:
        for block in self.blocks:
            del block.forward
