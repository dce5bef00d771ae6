"""What the rows of scripts/bench_watermark.py run: the models, and a step of each with the runtime or
without.

One invariant: every row of a workload makes the same steps on the same values. A row that cannot fit ends in
an out-of-memory error, which is its result.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.measure import Clock
from bench.workload import Inputs, Stack, StackShape
from offload import ActivationRuntime, OffloadConfig, OffloadEngine

GB = 1e9
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """One row. order: of the runtime; None for none. checkpoints: every block is recomputed. high_bytes: the
    mark, if the row has one. slabs: of order="reactive", their MiB and how many: enough for what leaves, so
    that its copies are pinned."""

    name: str
    order: str | None = None
    restore_ahead: bool = True
    checkpoints: bool = False
    high_bytes: int = 0
    slabs: tuple[tuple[int, int], ...] = ((16, 64), (64, 32), (256, 32), (512, 24))


@dataclass(slots=True)
class RowResult:
    """status: "ok", or why the row ended. Bytes, unless the name says otherwise. saved_bytes: allocated when
    the last step's forward is over. moved_bytes, stall_ms: of a timed step, on average. details: the
    runtime's counts of all timed steps together."""

    name: str
    status: str = "ok"
    ms: list[float] = field(default_factory=list)
    active_bytes: int = 0
    saved_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    moved_bytes: int = 0
    stall_ms: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.ms) if self.ms else float("nan")


class Stage(nn.Module):
    """Of the diffusion-like model: a convolution, attention over all pixels, a convolution."""

    def __init__(self, width: int, heads: int, where: dict[str, Any]) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, width, **where)
        self.conv = nn.Conv2d(width, width, 3, padding=1, **where)
        self.qkv = nn.Conv2d(width, 3 * width, 1, **where)
        self.out = nn.Conv2d(width, width, 1, **where)
        self.last = nn.Conv2d(width, width, 3, padding=1, **where)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + functional.silu(self.conv(self.norm(x)))
        batch, width, rows, columns = x.shape
        # with the vectors of each head contiguous: no fused kernel takes others
        pixels = self.qkv(x).flatten(2).transpose(1, 2).contiguous()
        qkv = pixels.view(batch, rows * columns, 3, self.heads, width // self.heads)
        seen = functional.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.out(seen.transpose(2, 3).reshape(x.shape))
        return x + functional.silu(self.last(x))


class Denoiser(nn.Module):
    """Down, middle and up, with a skip connection at each size."""

    def __init__(self, width: int, stages: int, heads: int, where: dict[str, Any]) -> None:
        super().__init__()
        self.into = nn.Conv2d(4, width, 3, padding=1, **where)
        self.down = nn.ModuleList(Stage(width, heads, where) for _ in range(stages))
        self.middle = Stage(width, heads, where)
        self.up = nn.ModuleList(Stage(width, heads, where) for _ in range(stages))
        self.out = nn.Conv2d(width, 4, 3, padding=1, **where)
        self.checkpoints = False

    def _run(self, stage: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(stage, x, use_reentrant=False) if self.checkpoints else stage(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.into(x), []
        for at, stage in enumerate(self.down):
            x = self._run(stage, x)
            skips.append(x)
            if at % 2:
                x = functional.avg_pool2d(x, 2)
        x = self._run(self.middle, x)
        for at, stage in reversed(list(enumerate(self.up))):
            if at % 2:
                x = functional.interpolate(x, scale_factor=2.0)
            x = self._run(stage, x + skips.pop())
        return self.out(x)


class Work:
    """A model and its steps. loss_of(step, checkpoints): the loss of that step's batch; with checkpoints
    every block is recomputed."""

    def __init__(self, model: nn.Module, loss_of: Callable[[int, bool], torch.Tensor]) -> None:
        self.model = model
        self.loss_of = loss_of


def _lengths(shape: StackShape) -> range:
    return range(shape.sequence // 2, shape.sequence + 1, 64)


def num_lengths(shape: StackShape) -> int:
    """Of `stack_work` where they vary."""
    return len(_lengths(shape))


def stack_work(shape: StackShape, device: torch.device, dtype: torch.dtype, *, vary: bool, seed: int) -> Work:
    """The block stack of W1. vary: the sequence is drawn from half of the shape's to all of it; the first
    steps have each length once."""
    stack, inputs = Stack(shape, device, dtype), Inputs(shape, device, dtype)
    drawn = random.Random(seed)
    possible = _lengths(shape)
    lengths = drawn.sample(possible, len(possible)) + drawn.choices(possible, k=4096)

    def loss_of(step: int, checkpoints: bool) -> torch.Tensor:
        out = inputs.of(0)
        if vary:
            out = out[:, : lengths[step % len(lengths)]].clone()
        for block in stack.blocks:
            out = checkpoint(block, out, use_reentrant=False) if checkpoints else block(out)
        return (out * inputs.output_grad[:, : out.shape[1]]).sum()

    return Work(stack, loss_of)


def denoiser_work(device: torch.device, dtype: torch.dtype, *, tiny: bool, batch: int) -> Work:
    width, stages, heads, size = (16, 2, 2, 16) if tiny else (512, 6, 8, 64)
    torch.manual_seed(0)
    model = Denoiser(width, stages, heads, {"device": device, "dtype": dtype})
    noise = torch.randn(batch, 4, size, size, device=device, dtype=dtype)

    def loss_of(step: int, checkpoints: bool) -> torch.Tensor:
        model.checkpoints = checkpoints
        return (model(noise + step) - noise).square().mean()

    return Work(model, loss_of)


def run_row(spec: RowSpec, work: Work, *, steps: int, warmup: int, sim: bool) -> RowResult:
    """Make the steps of a row; its figures. Blocks the host."""
    result = RowResult(spec.name)
    runtime = None if spec.order is None else _runtime(spec, sim=sim)
    seen: list[dict[str, Any]] = []
    # steps follow each other, as in training: the host may be ahead of the device
    clock, ends = Clock(torch.device("cpu" if sim else "cuda")), []
    step = 0
    try:
        for step in range(warmup + steps):
            if step == warmup:
                clock.drain()
                clock.reset_peaks()
                ends.append(clock.mark())
            result.saved_bytes = _step(work, runtime, step, checkpoints=spec.checkpoints)
            if step >= warmup:
                ends.append(clock.mark())
                if runtime is not None and runtime.last_metrics is not None:
                    seen.append({**asdict(runtime.last_metrics), **asdict(runtime.last_details)})
    except torch.OutOfMemoryError as error:
        result.status = (
            f"out of memory in step {step + 1} of {warmup + steps}: {str(error).splitlines()[0][:80]}"
        )
    clock.drain()
    result.ms = [clock.ms(start, end) for start, end in pairwise(ends)]
    peaks = clock.memory()
    result.active_bytes, result.reserved_bytes = peaks["active_peak"], peaks["reserved_peak"]
    if runtime is not None:
        result.pinned_bytes = runtime.engine.arena.held_bytes
    if seen:
        result.details = {name: sum(one[name] for one in seen) for name in seen[0] if name != "step"}
        result.details["vram_peak_mb"] = max(one["vram_peak_mb"] for one in seen)
        result.moved_bytes = round(result.details["spill_bytes"] / len(seen))
        result.stall_ms = result.details["stall_time_ms"] / len(seen)
    work.model.zero_grad(set_to_none=True)
    if runtime is not None:
        runtime.close()
    clear_device()
    return result


def clear_device() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _runtime(spec: RowSpec, *, sim: bool) -> ActivationRuntime:
    high_mb = spec.high_bytes / MIB
    engine = OffloadEngine(OffloadConfig(), device="sim" if sim else None)
    fields: dict[str, Any] = {
        "order": spec.order,
        "vram_high_watermark_mb": high_mb,
        "vram_low_watermark_mb": high_mb * 15 / 16,
        "telemetry_enabled": False,
    }
    if spec.order == "reactive":
        fields["pinned_pool_classes_mb"] = tuple(size for size, _ in spec.slabs)
        fields["slabs_per_class"] = 1 if sim else tuple(count for _, count in spec.slabs)
        fields["memory_allocated"] = (lambda: spec.high_bytes) if sim else None
    else:
        fields["restore_ahead"] = spec.restore_ahead
    return ActivationRuntime(engine=engine, **fields)


def _step(work: Work, runtime: ActivationRuntime | None, step: int, *, checkpoints: bool) -> int:
    """Gradients are freed before each step. Returns the bytes that are allocated when its forward is over."""
    work.model.zero_grad(set_to_none=True)
    if runtime is not None:
        runtime.step_begin(step)
    with nullcontext() if runtime is None else runtime.managed_forward():
        loss = work.loss_of(step, checkpoints)
    saved_bytes = torch.cuda.memory_allocated() if loss.is_cuda else 0
    loss.backward()
    del loss
    if runtime is not None:
        runtime.step_end()
    return saved_bytes
