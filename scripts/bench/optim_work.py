"""What the optimizer rows run: a stack of fused blocks, its microbatches, and the optimizers that step it,
ours and others'.

W4: 6 layers, fused qkv (hidden x 3 hidden) and fused gate and up, sequence 4096, 1.46 G parameters, AdamW (lr
1e-4, betas 0.9 and 0.95, weight decay 0.1). One invariant: every row trains the same weights on the same
numbers; only the optimizer differs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.rows import NotInstalledError

__all__ = ["ADAMW", "OPTIMIZERS", "OURS", "FusedStack", "Made", "OptimShape", "make_optimizer"]

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimShape:
    layers: int = 6
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    sequence: int = 4096

    @property
    def parameters(self) -> int:
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden)


TINY = OptimShape(layers=2, hidden=64, ffn=96, heads=4, sequence=32)


class _Block(nn.Module):
    def __init__(self, shape: OptimShape, **where: Any) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attn_norm = nn.RMSNorm(shape.hidden, eps=1e-5, **where)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False, **where)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False, **where)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5, **where)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False, **where)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, sequence, hidden)
        )
        x = x + self.output(attended)
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class FusedStack(nn.Module):
    """Seeded weights: two processes build the same bits."""

    def __init__(self, shape: OptimShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(_Block(shape, device=device, dtype=dtype) for _ in range(shape.layers))
        generator = torch.Generator(device=device).manual_seed(1234)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, number: int) -> Tensor:
        """Of microbatch `number`: how far the stack is from turning one noise into another."""
        parameter = next(self.parameters())
        generator = torch.Generator(device=parameter.device).manual_seed(number)
        size = (1, self.shape.sequence, self.shape.hidden)
        x, y = (
            torch.randn(size, device=parameter.device, dtype=torch.float32, generator=generator)
            for _ in range(2)
        )
        cuda = parameter.device.type == "cuda"
        cast = (
            torch.autocast("cuda", torch.bfloat16)
            if cuda and parameter.dtype is torch.float32
            else nullcontext()
        )
        with cast:
            out = self(x if parameter.dtype is torch.float32 else x.to(parameter.dtype))
        return F.mse_loss(out.float(), y)


@dataclass(slots=True)
class Made:
    """One optimizer under test, and what is particular about it."""

    optimizer: Any
    construct_s: float = 0.0
    no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext
    wait: Callable[[], None] = lambda: None
    """Make the current stream wait for all new weights."""
    pinned_bytes: Callable[[], int] = lambda: 0
    clip: Callable[[nn.Module], Any] | None = None
    needs_backward: bool = False
    """It steps what its hooks saw in a backward, and no gradient that is simply there."""
    facts: dict[str, Any] = field(default_factory=dict)


def _ours(
    model: nn.Module,
    *,
    fraction: float = 1.0,
    attached: bool = True,
    max_norm: float = 1.0,
    **options: Any,
) -> Made:
    """max_norm: where a row clips."""
    from offload import OffloadEngine
    from offload.groups.tracing import import_compiler
    from offload.optim import HybridDeviceOptimizer

    cuda = next(model.parameters()).device.type == "cuda"
    engine = OffloadEngine(device="cuda" if cuda else "sim")
    pinning: list[float] = []
    contiguous = engine.arena.contiguous

    def timed(nbytes: int) -> Any:
        asked = time.perf_counter()
        try:
            return contiguous(nbytes)
        finally:
            pinning.append(time.perf_counter() - asked)

    # torch's optimizers import it when the first one of a process is built: 3 s that are nobody's
    # construction
    import_compiler()
    engine.arena.contiguous = timed  # type: ignore[method-assign]
    began = time.perf_counter()
    optimizer = HybridDeviceOptimizer(
        model.parameters(),
        fraction,
        engine=engine,
        model=model if attached else None,
        fused=cuda or None,
        **ADAMW,
        **options,
    )
    if cuda:
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    made = Made(
        optimizer,
        construct_s=took,
        no_sync=optimizer.no_sync,
        wait=optimizer.synchronize_parameters,
        pinned_bytes=lambda: engine.arena.held_bytes,
        clip=lambda _: optimizer.clip_grad_norm_(max_norm),
    )
    made.facts = {
        "cpu_share": optimizer.cpu_share,
        "host_bytes": optimizer.host_bytes,
        "pin_s": sum(pinning),
        "ring_bytes": optimizer.ring_bytes,
        "streamed_buckets": len(optimizer.placed.streamed.buckets),
    }
    return made


def _gpu(model: nn.Module, **how: Any) -> Made:
    return Made(torch.optim.AdamW(model.parameters(), **ADAMW, **how))


def _torchao(model: nn.Module, **options: Any) -> Made:
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ImportError as error:
        raise NotInstalledError(f"torchao: {error}") from error
    began = time.perf_counter()
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW, **options)
    return Made(optimizer, construct_s=time.perf_counter() - began, needs_backward=True)


def _megatron(model: nn.Module, fraction: float) -> Made:
    try:
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
    except ImportError as error:
        raise NotInstalledError(f"megatron-core: {error}") from error
    began = time.perf_counter()
    optimizer = HybridDeviceOptimizer(
        list(model.parameters()),
        offload_fraction=fraction,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        overlap_cpu_optimizer_d2h_h2d=True,
        **ADAMW,
    )
    return Made(optimizer, construct_s=time.perf_counter() - began)


OURS: dict[str, dict[str, Any]] = {
    "ours": {"step_in_backward": True},
    "ours_after_backward": {},
    "ours_half": {"fraction": 0.5, "step_in_backward": True},
    "ours_no_overlap": {"attached": False, "overlap_cpu_optimizer_d2h_h2d": False},
    "ours_alone": {"attached": False},
    "ours_alone_half": {"fraction": 0.5, "attached": False},
    "ours_alone_cpu": {"attached": False, "cpu_share": 1.0},
    "ours_alone_streamed": {"attached": False, "cpu_share": 0.0},
}
"""Rows of ours, by how the optimizer is made. Not attached to the model, step() waits for every weight."""

OTHERS: dict[str, Callable[[nn.Module], Made]] = {
    "gpu_fused": lambda model: _gpu(model, fused=True),
    "gpu_foreach": lambda model: _gpu(model, foreach=True),
    "torchao": _torchao,
    "torchao_gradients": lambda model: _torchao(model, offload_gradients=True),
    "megatron": lambda model: _megatron(model, 1.0),
    "megatron_half": lambda model: _megatron(model, 0.5),
}


OPTIMIZERS = (*OURS, *OTHERS)


def make_optimizer(name: str, model: nn.Module, options: dict[str, Any]) -> Made:
    """options: further keyword arguments, for rows of ours."""
    return _ours(model, **{**OURS[name], **options}) if name in OURS else OTHERS[name](model)
