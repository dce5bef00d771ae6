"""Runs of one model by files that switch what is offloaded and recomputed ON or OFF.

    [training]                                     torchtitan's keys (offload/compat/torchtitan.py)
    enable_activation_offload = true
    activation_offload_modules = "expert_fc1,moe_act"    or activation_offload_mode = "both"
    activation_offload_min_tensor_size = 1048576   elements
    enable_cpu_offload = false                     FSDP's: parameters, gradients and the optimizer's state
    [activation_checkpoint]
    mode = "none"                                  or "selective", "full"

Each run makes 15 steps of AdamW; its time is the median of the last ten. One invariant: the runs differ in
what their files say alone, and begin with the same weights; losses are printed, since all must be the same.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._composable.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import moe
import offload
from bench.measure import Clock
from bench.rows import kept_operators
from bench.run import device_of, outcome
from bench.table import reason_of
from mixtures.work import Work, tokens_of
from offload.compat import torchtitan
from offload.compat.torchtitan import TorchtitanSettings

_FOLDER = Path(__file__).parent / "on_off"
FILES = (
    _FOLDER / "baseline.toml",
    *sorted(path for path in _FOLDER.glob("*.toml") if path.stem != "baseline"),
)
STEPS = 15
_WARMUP = 5
_CHECKPOINTS = ("none", "selective", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One file, read and checked."""

    name: str
    settings: TorchtitanSettings
    checkpoints: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRequest:
    """What the parent asks of one process."""

    config: Config
    work: Work
    host_limit_bytes: int
    steps: int = STEPS
    tiny: bool = False


def read_config(path: Path) -> Config:
    """Raises ValueError for a key that is not obeyed here or has a wrong value, naming the file."""
    try:
        table = tomllib.loads(path.read_text())
        training = table.pop("training", {})
        checkpoint = table.pop("activation_checkpoint", {})
        settings = torchtitan.settings({"training": training})
        mode = checkpoint.pop("mode", "none")
        known = [field.name for field in fields(settings)]
        if unknown := [*table, *checkpoint, *(name for name in training if name not in known)]:
            raise ValueError(
                f"{', '.join(unknown)} would change nothing here; what does is mode of "
                f"activation_checkpoint, and of training {', '.join(known)}"
            )
        if mode not in _CHECKPOINTS:
            raise ValueError(f"mode is {mode!r}, must be one of {', '.join(_CHECKPOINTS)}")
    except (OSError, ValueError) as error:  # of TOML, too
        raise ValueError(f"{path}: {error}") from error
    return Config(name=path.stem, settings=settings, checkpoints=mode)


def run_config(request: ConfigRequest) -> dict[str, Any]:
    """The run's figures, with a status."""
    name = request.config.name
    return outcome({"row": name, "label": name, "work": "configs"}, lambda: _measure(request))


def _measure(request: ConfigRequest) -> dict[str, Any]:
    device = device_of(request.tiny)
    backend = "gloo" if request.tiny else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        return _trained(request, device)
    finally:
        offload.PipelineOffloadManager.close_instance()
        dist.destroy_process_group()


def _trained(request: ConfigRequest, device: torch.device) -> dict[str, Any]:
    config, work, clock = request.config, request.work, Clock(device)
    settings = config.settings
    dtype = torch.float32 if request.tiny else torch.bfloat16
    model = moe.build_stage_module(work.config, device=device, dtype=dtype, **settings.placement())
    manager = None
    if settings.enable_activation_offload:
        limits = offload.OffloadConfig(
            min_offloaded_tensor_size=1 if request.tiny else settings.activation_offload_min_tensor_size,
            host_limit_bytes=request.host_limit_bytes,
        )
        manager = offload.configure(limits, device="sim" if request.tiny else "cuda", print_summary=False)
        manager.register_parameters(model)
    _checkpointed(model, config.checkpoints)
    if settings.enable_cpu_offload:
        mesh = init_device_mesh(device.type, (1,))
        policy = CPUOffloadPolicy(pin_memory=clock.cuda)
        for part in (*model.blocks.values(), model):
            fully_shard(part, mesh=mesh, offload_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens, targets = tokens_of(work, 0, device)
    samples, losses = [], []
    for _ in range(request.steps):
        clock.drain()
        clock.reset_peaks()
        start = clock.mark()
        if manager is not None:
            offload.init_chunk_handler()
        loss = functional.cross_entropy(model(tokens).flatten(0, 1).float(), targets.flatten())
        loss.backward()
        if manager is not None:
            offload.step_end()
        optimizer.step()
        optimizer.zero_grad()
        end = clock.mark()
        clock.drain()
        losses.append(loss.item())
        samples.append({"step_ms": clock.ms(start, end), **clock.memory()})
    timed = samples[_WARMUP:] or samples
    step_ms = statistics.median(one["step_ms"] for one in timed)
    return {
        "step_ms": step_ms,
        "tokens_per_s": work.tokens / step_ms * 1e3,
        "active_bytes": max(one["active_peak"] for one in timed),
        "reserved_bytes": max(one["reserved_peak"] for one in timed),
        "moved_bytes": 0 if manager is None else int(manager.stats.spill_bytes),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "samples": samples,
    }


def _checkpointed(model: moe.MixtureGPT, mode: str) -> None:
    if mode == "none":
        return
    # a product of groups of rows is kept as the other products are
    kept = {*kept_operators(), torch.ops.aten._grouped_mm.default}

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: dict[str, Any] = {}
    if mode == "selective":
        contexts["context_fn"] = lambda: create_selective_checkpoint_contexts(policy)
    for name, block in [*model.blocks.items()]:
        model.blocks[name] = checkpoint_wrapper(block, **contexts)


def header_line() -> str:
    return (
        f"{'config':<24} {'tokens/s':>9} {'x first':>7} {'active GB':>9} {'reserved GB':>11} "
        f"{'moved GB':>8}  loss"
    )


def config_line(result: Mapping[str, Any], first: Mapping[str, Any] | None) -> str:
    """One run. first: the run that the ratio is to."""
    if result["status"] != "ok":
        return f"{result['row']:<24} {reason_of(result)}"[:200]
    ratio = "-" if first is None else f"{result['tokens_per_s'] / first['tokens_per_s']:.3f}"
    active, reserved, moved = (
        result[name] / 1e9 for name in ("active_bytes", "reserved_bytes", "moved_bytes")
    )
    return (
        f"{result['row']:<24} {result['tokens_per_s']:>9,.0f} {ratio:>7} {active:>9.2f} {reserved:>11.2f} "
        f"{moved:>8.2f}  {result['first_loss']:.4f} to {result['last_loss']:.4f}"
    )
