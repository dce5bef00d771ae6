"""The real Megatron-core where there is no GPU: what it asks of one is answered by the CPU; and its ranks are
started.

Its schedules and its optimizers ask for the device "cuda" by name, for the types of GPU tensors, and for
streams. One invariant: what is answered for changes where tensors live, not what is computed.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.forks import forked

NOT_IMPORTABLE = 77
SLOW_START = 240.0


def package() -> Path | None:
    """Where megatron.core is, without importing it."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ModuleNotFoundError:
        return None
    return None if found is None or found.origin is None else Path(found.origin).parent


needs_megatron = pytest.mark.skipif(
    package() is None, reason="megatron.core is not importable; put megatron-core on PYTHONPATH to run it"
)


# ---- in a rank ----


def on_the_cpu() -> None:
    """For the life of the process."""

    def at_home(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **keywords: Any) -> Any:
            if str(keywords.get("device")).startswith("cuda"):
                keywords["device"] = "cpu"
            return make(*arguments, **keywords)

        return made

    for name in ("empty", "tensor", "zeros"):
        setattr(torch, name, at_home(getattr(torch, name)))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    stream = SimpleNamespace(
        wait_stream=lambda other: None, wait_event=lambda event: None, synchronize=lambda: None
    )
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    type_of = torch.Tensor.type

    def type_on_a_gpu(self: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        found = type_of(self, *arguments, **keywords)
        return found.replace("torch.", "torch.cuda.", 1) if isinstance(found, str) else found

    torch.Tensor.type = type_on_a_gpu  # type: ignore[method-assign,assignment]
    from megatron.core.tensor_parallel import random

    # the CPU's generator, seeded before each step
    random.CudaRNGStatesTracker.fork = lambda self, name="": nullcontext()


def without_transformer_engine() -> None:
    """Core 0.16's optimizer config compares the version of Transformer Engine, whether there is one or
    not."""
    from megatron.core.optimizer import optimizer_config
    from megatron.core.utils import get_te_version

    if get_te_version() is None:
        optimizer_config.is_te_min_version = lambda version: False


# ---- their reports ----


def reports_of(
    script: str, worlds: Sequence[int], folder: Path, *arguments: str
) -> list[tuple[int, int, Any]]:
    """(ranks, rank, what it wrote as JSON) of every rank of every world, all started at once.

    A rank is `script rank ranks meeting_place *arguments`; it writes to meeting_place.rank, and exits with
    NOT_IMPORTABLE to skip.
    """
    with ExitStack() as stack:
        started = [
            (
                ranks,
                rank,
                stack.enter_context(
                    forked(Path(script), [str(rank), str(ranks), str(folder / f"of{ranks}"), *arguments])
                ),
            )
            for ranks in worlds
            for rank in range(ranks)
        ]
        for _, _, process in started:
            ended = process.ended(SLOW_START)
            if ended.code == NOT_IMPORTABLE:
                pytest.skip(f"megatron.core is there but cannot be imported: {ended.errors.splitlines()[-1]}")
            assert ended.code == 0, ended.errors[-4000:]
    return [
        (ranks, rank, json.loads((folder / f"of{ranks}.{rank}").read_text())) for ranks, rank, _ in started
    ]
