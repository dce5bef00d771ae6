"""A small mixture GPT, its steps, and the device that its activations leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from moe import MixtureConfig
from offload import PipelineOffloadManager, init_chunk_handler, step_end
from offload.device.sim import ExecutorName
from tests.unit.groups.stack import build_manager, installed

SMALL = MixtureConfig(
    dim=32,
    expert_hidden=16,
    experts=8,
    top_k=2,
    layers=3,
    heads=4,
    kv_heads=2,
    sequence=16,
    seed=3,
    shared_hidden=24,
)
BATCH = 2


def text(seed: int = 0, batch: int = BATCH) -> Tensor:
    return torch.randint(0, 256, (batch, SMALL.sequence), generator=torch.Generator().manual_seed(seed))


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    targets = tokens[:, 1:].flatten().to(logits.device)
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)


@contextmanager
def offloading(executor: ExecutorName = "late", **config: Any) -> Iterator[PipelineOffloadManager]:
    """Groups leave for the simulated device's host inside. Small caps let them go only as copies end."""
    settings = {"min_offloaded_tensor_size": 16, "max_spilling_bytes": 8192, **config}
    with installed(build_manager(executor, **settings)) as manager:
        yield manager


def step(
    model: nn.Module, seeds: tuple[int, ...] = (0, 1), *, ordered: bool = False
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The logits of some microbatches, and the sum of their gradients. Backwards come in reverse; ordered:
    each after its forward."""
    model.zero_grad()
    device = next(model.parameters()).device
    logits, losses = [], []
    for seed in seeds:
        init_chunk_handler()
        logits.append(model(text(seed).to(device)))
        losses.append(loss_of(logits[-1], text(seed)))
        if ordered:
            losses.pop().backward()
    for loss in reversed(losses):
        loss.backward()
    step_end()
    return [each.detach().clone() for each in logits], grads_of(model)


def grads_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def assert_same(found: Any, expected: Any) -> None:
    """Bit for bit."""
    (logits, grads), (expected_logits, expected_grads) = found, expected
    assert all(torch.equal(one, other) for one, other in zip(logits, expected_logits, strict=True))
    assert grads.keys() == expected_grads.keys()
    wrong = [name for name in grads if not torch.equal(grads[name], expected_grads[name])]
    assert wrong == []


def noted_marks(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> list[str]:
    """What the module's layers call, in order, in place of offload's functions."""
    said: list[str] = []

    def start(tensor: Tensor, name: str) -> Tensor:
        said.append(f"start {name}")
        return tensor

    @contextmanager
    def hooks() -> Iterator[None]:
        said.append("hooks")
        yield
        said.append("end")

    def commit(tensor: Tensor, name: str) -> Tensor:
        said.append(f"commit {name}")
        return tensor

    for name, function in (("group_start", start), ("offload_hooks", hooks), ("group_commit", commit)):
        monkeypatch.setattr(module, name, function)
    return said


def marked(name: str) -> list[str]:
    """What `noted_marks` has of a group that nothing else is in."""
    return [f"start {name}", "hooks", "end", f"commit {name}"]
