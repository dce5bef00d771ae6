"""A training loop whose every gradient and last weight a test compares with those of another run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from offload import step_end
from offload.telemetry.records import StepStats


def local(tensor: Any) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def trained(
    model: nn.Module,
    optimizer: Optimizer,
    steps: int,
    backward: Callable[[int], object],
    *,
    keeps: bool = True,
) -> list[Tensor]:
    """Gradients of each step, if they are to be kept, then weights and buffers, as far as this rank has them.
    backward: computes the gradients of the step of this number."""
    seen: list[Tensor] = []
    for step in range(steps):
        backward(step)
        if keeps:
            seen += [local(each.grad).clone() for each in model.parameters() if each.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(local(each.detach()).clone() for each in (*model.parameters(), *model.buffers()))]


def ended_step() -> StepStats:
    """The figures of the process-wide manager's step, which ends."""
    stats = step_end()
    assert stats is not None
    return stats
