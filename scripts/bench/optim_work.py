"""What the optimizer rows run: a stack of fused blocks, its microbatches, and the optimizers that step it,
ours and others'.

W4: 6 layers, fused qkv (hidden x 3 hidden) and fused gate and up, sequence 4096, 1.46 G parameters, AdamW (lr
1e-4, betas 0.9 and 0.95, weight decay 0.1). One invariant: every row trains the same weights on the same
numbers; only the optimizer differs.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ours import OurMarks
from bench.run import imported

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
        self.marks: OurMarks | None = None
        self.attn_norm = nn.RMSNorm(shape.hidden, eps=1e-5, **where)
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False, **where)
        self.output = nn.Linear(shape.hidden, shape.hidden, bias=False, **where)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5, **where)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False, **where)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        if self.marks is None:
            x = self._attended(x)
        else:
            x = self.marks.start(x, "attention")
            with self.marks.hooks():
                attended = self._attended(x)
            x = self.marks.commit(attended, "attention")
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def _attended(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .reshape(batch, sequence, hidden)
        )
        return x + self.output(attended)


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
    close: Callable[[], None] = lambda: None
    needs_backward: bool = False
    """It steps what its hooks saw in a backward, and no gradient that is simply there."""
    facts: dict[str, Any] = field(default_factory=dict)


def _ours(
    model: nn.Module, engine: Any, *, fraction: float = 1.0, overlap: str = "step", **options: Any
) -> Made:
    """engine: whose lanes and host memory are used; None makes one."""
    from offload import HybridDeviceOptimizer, OffloadEngine

    cuda = next(model.parameters()).device.type == "cuda"
    engine = OffloadEngine(device="cuda" if cuda else "sim") if engine is None else engine
    importlib.import_module(
        "torch._dynamo"
    )  # torch's first optimizer imports it: 3 s of nobody's construction
    began = time.perf_counter()
    optimizer = HybridDeviceOptimizer(
        model.parameters(),
        fraction,
        engine=engine,
        fused=cuda or None,
        overlap=overlap,
        model=None if overlap == "step" else model,
        **ADAMW,
        **options,
    )
    if cuda:
        torch.cuda.synchronize()
    made = Made(
        optimizer,
        construct_s=time.perf_counter() - began,
        no_sync=optimizer.no_sync,
        wait=optimizer.synchronize_parameters,
        pinned_bytes=lambda: engine.arena.held_bytes,
        clip=lambda _: optimizer.clip_grad_norm_(1.0),
        close=optimizer.close,
    )
    made.facts = {name: getattr(optimizer, name) for name in ("cpu_share", "host_bytes", "ring_bytes")}
    return made


class LeavingActivations:
    """The attention of every block in a group that leaves, on the default engine, one chunk a microbatch."""

    def __init__(self, model: FusedStack, microbatches: int) -> None:
        import offload

        shape = model.shape
        cuda = next(model.parameters()).device.type == "cuda"
        # what a block's attention saves: at most 8 tensors of the hidden states' size and 4 bytes an element
        chunk_bytes = shape.layers * 8 * shape.sequence * shape.hidden * 4
        config = offload.OffloadConfig(
            host_reserve_bytes=chunk_bytes, min_offloaded_tensor_size=1 << 20 if cuda else 1
        )
        self._manager = offload.configure(config, device="cuda" if cuda else "sim", print_summary=False)
        self._manager.register_parameters(model)
        self._actions = [(kind, 0, number) for number in range(microbatches) for kind in ("F", "B")]
        self._model = model
        self._mark(OurMarks())

    @property
    def engine(self) -> Any:
        return self._manager.engine

    def begin_step(self) -> None:
        self._manager.set_order(self._actions)

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        self._manager.begin_chunk(0, microbatch)
        yield
        self._manager.end_forward(0, microbatch)

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        self._manager.begin_backward(0, microbatch, "B")
        yield
        self._manager.end_backward(0, microbatch, "B")

    def end_step(self) -> None:
        self._manager.step_end()

    def figures(self) -> dict[str, float]:
        """Of the last step: its bytes each way, the device's stalls in ms, the pinned bytes."""
        stats = self._manager.stats
        return {name: getattr(stats, name) for name in ("spill_bytes", "stall_ms", "host_bytes_held")}

    def close(self) -> None:
        import offload

        self._mark(None)
        offload.PipelineOffloadManager.close_instance()

    def _mark(self, marks: OurMarks | None) -> None:
        for block in self._model.blocks:
            assert isinstance(block, _Block)
            block.marks = marks


def _torchao(model: nn.Module) -> Made:
    library = imported("torchao.optim", "torchao")
    began = time.perf_counter()
    optimizer = library.CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **ADAMW)
    return Made(optimizer, construct_s=time.perf_counter() - began, needs_backward=True)


def _megatron(model: nn.Module) -> Made:
    """As get_megatron_optimizer() makes it for --optimizer-cpu-offload with the overlap of copies: torch's
    fused AdamW on the host, float32 masters."""
    library = imported("megatron.core.optimizer.cpu_offloading", "megatron-core")
    began = time.perf_counter()
    optimizer = library.HybridDeviceOptimizer(
        list(model.parameters()),
        offload_fraction=1.0,
        cpu_optimizer_cls=torch.optim.AdamW,
        gpu_optimizer_cls=torch.optim.AdamW,
        overlap_cpu_optimizer_d2h_h2d=True,
        param_update_in_fp32=True,
        fused=True,
        **ADAMW,
    )
    return Made(optimizer, construct_s=time.perf_counter() - began)


OURS: dict[str, dict[str, Any]] = {
    "ours_step": {"overlap": "step"},
    "ours_forward": {"overlap": "forward"},
    "ours_backward": {"overlap": "backward"},
    "ours_half": {"fraction": 0.5},
}
"""Rows of ours, by how the optimizer is made."""

OTHERS: dict[str, Callable[[nn.Module], Made]] = {
    "gpu_fused": lambda model: Made(torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)),
    "torchao": _torchao,
    "megatron": _megatron,
}


OPTIMIZERS = (*OURS, *OTHERS)


def make_optimizer(name: str, model: nn.Module, options: dict[str, Any], engine: Any = None) -> Made:
    """options: further keyword arguments, for rows of ours. engine: for rows of ours; None makes one."""
    return _ours(model, engine, **{**OURS[name], **options}) if name in OURS else OTHERS[name](model)
