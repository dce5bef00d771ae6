"""Many steps whose shapes change, and a census of everything that could grow: what the soak tests on the CPU
and on a GPU share.

One invariant: the steps repeat after `PERIOD` of them, shape by shape, on parameters that do not change. So
from the second period on whatever an engine holds at a step's end must be what it held one period before;
anything more is a leak, however slow.
"""

from __future__ import annotations

import gc
import os
import random
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import offload.engine
from offload import OffloadConfig, OffloadEngine, PipelineOffloadManager, StepStats
from offload.device import Device
from offload.memory.arena import HostArena
from parallel.transformer import TransformerConfig, TransformerStage, build_stage_module

PERIOD = 50
"""Steps, after which the shapes come again."""

LONGEST_RUN = 7
"""Steps of one shape in a row: long enough for a plan to settle and for unused host memory to be given
back."""

NAMES = ("attn_norm", "core_attn", "mlp_act")


class Shape(NamedTuple):
    """What one step works on. tokens: length of its sequences."""

    tokens: int
    microbatches: int


def shapes(longest: int, *, most_microbatches: int = 4, seed: int = 0) -> list[Shape]:
    """One period: runs of equal steps, each of another length and another number of microbatches. A run of
    the smallest comes first, so that host memory is given back which the run of the largest after it
    needs."""
    choose = random.Random(seed)
    steps = [Shape(longest // 8, 1)] * LONGEST_RUN + [Shape(longest, most_microbatches)] * LONGEST_RUN
    while len(steps) < PERIOD:
        shape = Shape(longest * choose.randint(1, 8) // 8, choose.randint(1, most_microbatches))
        steps += [shape] * choose.randint(1, LONGEST_RUN)
    return steps[:PERIOD]


@contextmanager
def small_slabs(patch: pytest.MonkeyPatch, registration_bytes: int) -> Iterator[None]:
    """Engines that are built inside pin in small registrations, four a slab: a small model then needs many of
    them."""
    with patch.context() as inside:
        arena = partial(HostArena, slab_bytes=4 * registration_bytes, registration_bytes=registration_bytes)
        inside.setattr(offload.engine, "HostArena", arena)
        yield


def build_manager(device: Device, **config: Any) -> PipelineOffloadManager:
    settings: dict[str, Any] = {"min_offloaded_tensor_size": 1, **config}
    return PipelineOffloadManager(
        OffloadEngine(OffloadConfig(**settings), device=device), print_summary=False
    )


class Training:
    """The middle stage of three under 1F1B, announced as a pipeline stage does it; no step changes its
    parameters."""

    def __init__(
        self,
        manager: PipelineOffloadManager | None,
        config: TransformerConfig,
        device: torch.device | str = "cpu",
    ) -> None:
        self.manager = manager
        self.device = device
        self.width = config.dim
        marked = config.with_(offload_modules=frozenset(NAMES), math_attention=True)
        self.model: TransformerStage = build_stage_module(marked, 1, 3, device=device)
        if manager is not None:
            manager.register_parameters(self.model)

    def step(self, shape: Shape) -> StepStats | None:
        """One forward ahead of the backwards. The parameters' gradients are there when it returns."""
        self.model.zero_grad(set_to_none=True)
        live: dict[int, Tensor] = {}
        self._forward(live, shape, 0)
        for microbatch in range(shape.microbatches):
            if microbatch + 1 < shape.microbatches:
                self._forward(live, shape, microbatch + 1)
            if self.manager is not None:
                self.manager.begin_backward(0, microbatch, "B")
            live.pop(microbatch).square().sum().backward()
            if self.manager is not None:
                self.manager.end_backward(0, microbatch, "B")
        return None if self.manager is None else self.manager.step_end()

    def _forward(self, live: dict[int, Tensor], shape: Shape, microbatch: int) -> None:
        generator = torch.Generator().manual_seed(microbatch)
        x = torch.randn(1, shape.tokens, self.width, generator=generator).to(self.device).requires_grad_()
        if self.manager is not None:
            self.manager.register_external(x)  # as a stage does with what it receives: a new one each time
            self.manager.begin_chunk(0, microbatch)
        live[microbatch] = self.model(x)
        if self.manager is not None:
            self.manager.end_forward(0, microbatch)

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.model.parameters()]
        assert all(gradient is not None for gradient in found)
        return [gradient for gradient in found if gradient is not None]


# -- the census ----------------------------------------------------------------------------------------------


def census(root: object) -> dict[str, int]:
    """The number of entries of every container that belongs to `root`, by its path; those of one path are
    added up.

    Walks attributes and entries of this project's own objects, so it meets whatever list or table a later
    change adds.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: deque[tuple[str, object]] = deque([(type(root).__name__, root)])
    while todo:
        path, value = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            found[path] += len(value)
            todo.extend((f"{path}[]", part) for pair in value.items() for part in pair)
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            found[path] += len(value)
            todo.extend((f"{path}[]", part) for part in value)
        elif _is_ours(value):
            todo.extend((f"{path}.{name}", part) for name, part in _attributes(value))
    return dict(found)


def _is_ours(value: object) -> bool:
    """Whether its class, or one that it inherits from, is this project's."""
    return any(
        str(kind.__dict__.get("__module__")).partition(".")[0] == "offload" for kind in type(value).__mro__
    )


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__weakref__", "__dict__") and hasattr(value, name):
                yield name, getattr(value, name)


def living() -> dict[str, int]:
    """This project's objects that are alive, by type, whoever holds them."""
    gc.collect()
    return dict(
        Counter(
            f"{type(value).__module__}.{type(value).__qualname__}"
            for value in gc.get_objects()
            if _is_ours(value)
        )
    )


def differences(before: dict[str, int], after: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What is not as it was: (before, after) by name."""
    names = sorted(before.keys() | after.keys())
    return {
        name: (before.get(name, 0), after.get(name, 0))
        for name in names
        if before.get(name, 0) != after.get(name, 0)
    }


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
