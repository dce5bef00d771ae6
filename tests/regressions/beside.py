"""A loop of a stranger, run plain and with `offload.apply`: what differs, bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import offload
from tests.ticks import counted_time

MOVING: tuple[Any, ...] = ("groups", True, "legacy", "disk", "watermark")
RECOMPUTING: tuple[Any, ...] = ("hidden_states", "selective", "auto")
MODES = MOVING + RECOMPUTING
WIDTH = 16

Step = Callable[[nn.Module, int], Any]
"""A forward and its backward; what it returns is compared, too."""


def wide(rows: int = 12) -> Tensor:
    return torch.randn(rows, WIDTH)


def squared(model: nn.Module, number: int) -> Tensor:
    loss = model(wide()).square().mean()
    loss.backward()
    return loss.detach()


def run(
    build: Callable[[], nn.Module], step: Step, mode: Any = None, steps: int = 4, **settings: Any
) -> list[Any]:
    """What `step` returned, gradients, buffers and states of generators after each of the steps. With a mode,
    everything that may leave has left before it is read."""
    torch.manual_seed(0)
    random.seed(3)
    model = build()
    handle = None
    if mode is not None:
        config = offload.OffloadConfig(min_offloaded_tensor_size=1, piece_bytes=256)
        offload.configure(config)
        settings = {"min_numel": 1, **settings}
        if mode == "watermark":
            settings = {"high": "4000B", **settings}
        elif mode in ("groups", "selective"):
            settings = {"device_limit": "400B", **settings}
        elif mode == "auto":
            settings = {"device_total": "40000B", **settings}
        handle = offload.apply(model, mode, **settings)
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen: list[Any] = []
    try:
        with counted_time():
            for number in range(steps):
                seen.append(step(model, number))
                seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
                seen += [buffer.clone() for buffer in model.buffers()]
                seen += [torch.get_rng_state(), random.random()]
                optimizer.step()
                optimizer.zero_grad()
    finally:
        if handle is not None:
            handle.remove()
            for _ in range(2):  # the first one of all ends nothing that an inferred end has ended
                offload.step_end()
            offload.reset()
    return seen


def differing(one: list[Any], other: list[Any]) -> list[int]:
    """Places of what is not the same in every bit."""
    assert len(one) == len(other)
    return [place for place, pair in enumerate(zip(one, other, strict=True)) if not _same(*pair)]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def assert_beside(
    build: Callable[[], nn.Module], step: Step, mode: Any, steps: int = 4, **settings: Any
) -> None:
    """The loop has the bits that it has without offload."""
    plain = run(build, step, steps=steps)
    again = run(build, step, steps=steps)
    assert differing(plain, again) == [], "the loop itself does not do the same twice"
    assert differing(plain, run(build, step, mode, steps=steps, **settings)) == []
