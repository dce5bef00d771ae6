"""Rows of other projects in bench_model.py, each as its own README has it, around the model's own
checkpointing: TRL's activation offloading, FSDP2's CPUOffloadPolicy and TrainStream.

One invariant: a peer is imported when its row starts, and driven through its public interface alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from bench.rule import find_blocks
from bench.run import SkippedError, imported


class Peer(NamedTuple):
    """What steps use from now on. around: entered for each forward and backward, None for nothing."""

    model: Any
    optimizer: torch.optim.Optimizer
    around: AbstractContextManager[Any] | None = None


def _checkpointing(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def _trl(model: Any, optimizer: torch.optim.Optimizer, total_bytes: int | None) -> Peer:
    """As SFTTrainer with activation_offloading=True: one context around the step of a checkpointed model."""
    module = imported("trl.models.activation_offloading", "trl")
    _checkpointing(model)
    return Peer(model, optimizer, module.get_act_offloading_ctx_manager(model))


def _fsdp2(model: Any, optimizer: torch.optim.Optimizer, total_bytes: int | None) -> Peer:
    """One rank. Each block and the model are shards on the host, which the optimizer steps there."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    _checkpointing(model)
    model.to("cpu")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    for block in (*find_blocks(model), model):
        fully_shard(block, offload_policy=CPUOffloadPolicy())
    return Peer(model, _anew(model, optimizer))


def _trainstream(model: Any, optimizer: torch.optim.Optimizer, total_bytes: int | None) -> Peer:
    """A model larger than the GPU: on the CPU, wrapped once. The total is a cap of this process's memory,
    which its planner reads."""
    module = imported("trainstream")
    _checkpointing(model)
    model.to("cpu")
    torch.cuda.empty_cache()
    if total_bytes is not None:
        whole_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(total_bytes / whole_bytes)
    return Peer(*module.wrap(model, _anew(model, optimizer), device="cuda"))


def _anew(model: Any, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer of the model's parameters of now."""
    given = {name: value for name, value in optimizer.defaults.items() if name != "decoupled_weight_decay"}
    return type(optimizer)(model.parameters(), **given)


PEERS: dict[str, Callable[[Any, torch.optim.Optimizer, int | None], Peer]] = {
    "trl": _trl,
    "fsdp2": _fsdp2,
    "trainstream": _trainstream,
}


def peer(row: str, model: Any, optimizer: torch.optim.Optimizer, total_bytes: int | None) -> Peer:
    """Raises NotInstalledError, or SkippedError without a GPU or a model with checkpointing of its own."""
    if not torch.cuda.is_available():
        raise SkippedError(f"{row} needs a GPU")
    if not hasattr(model, "gradient_checkpointing_enable"):
        raise SkippedError("this model has no checkpointing of its own")
    return PEERS[row](model, optimizer, total_bytes)
