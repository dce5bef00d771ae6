"""A training run that can be repeated with offload and without, and the comparison bit by bit.

One invariant: a `Program` runs the same operations on the same values in the same order each time; only where
saved bytes live differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from offload import (
    OffloadConfig,
    OffloadEngine,
    PipelineOffloadManager,
    StepStats,
    init_chunk_handler,
    step_end,
)
from offload.device import Device
from offload.device.cuda import CudaDevice
from parallel.transformer import TransformerConfig, TransformerStage, build_stage_module

DEVICE = torch.device("cuda")
NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act", "mlp_fc2")
SEQUENCES, TOKENS, WIDTH = 2, 128, 128
# every saved tensor of every program here, and the two blocks that the link is measured with
RESERVED_BYTES = 128 << 20

Action = tuple[str, int, int]
Forward = Callable[[Any, Tensor], Tensor]


def build_manager(
    device: Device | None = None, *, reserve_bytes: int = RESERVED_BYTES, **config: Any
) -> PipelineOffloadManager:
    """A manager whose every saved tensor may leave, in small pieces, and finds its host memory pinned."""
    settings: dict[str, Any] = {"min_offloaded_tensor_size": 1, "piece_bytes": 256 << 10, **config}
    device = device if device is not None else CudaDevice()
    manager = PipelineOffloadManager(
        OffloadEngine(OffloadConfig(**settings), device=device), print_summary=False
    )
    if reserve_bytes:
        manager.reserve_host(reserve_bytes)
    return manager


@contextmanager
def installed(manager: PipelineOffloadManager | None) -> Iterator[None]:
    """`manager` as the process-wide one inside; closed, and none there, afterwards."""
    PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        yield
    finally:
        PipelineOffloadManager.OFFLOAD_MGR = None
        if manager is not None:
            manager.close()


def one_f_one_b(microbatches: int, warmup: int) -> list[Action]:
    """One rank's step: `warmup` forwards, a forward and a backward in turn, and the backwards that are
    left."""
    order: list[Action] = [("F", 0, microbatch) for microbatch in range(warmup)]
    for microbatch in range(microbatches):
        order += [("F", 0, ahead) for ahead in (microbatch + warmup,) if ahead < microbatches]
        order.append(("B", 0, microbatch))
    return order


def plain_forward(model: TransformerStage, x: Tensor) -> Tensor:
    return model(x)


@dataclass
class Result:
    """gradients: of every step, the inputs' and the parameters'. stats: of every step, none without a
    manager."""

    gradients: list[Tensor] = field(default_factory=list)
    stats: list[StepStats] = field(default_factory=list)

    @property
    def spilled(self) -> int:
        return sum(stats.spilled for stats in self.stats)

    @property
    def restored(self) -> int:
        return sum(stats.restored for stats in self.stats)

    @property
    def refused(self) -> int:
        return sum(stats.refused for stats in self.stats)


@dataclass(frozen=True, kw_only=True)
class Program:
    """A few training steps of a small transformer: the middle stage of three, so that hidden states go in and
    out.

    names: the marks of its layers. forward: how the model is called. streams: the microbatches take turns on
    so many streams; 0 means the default one. pause: called before each forward and backward, as work that
    keeps compute behind the host.
    """

    dtype: torch.dtype = torch.float32
    names: Sequence[str] = NAMES
    order: Sequence[Action] = tuple(one_f_one_b(4, 2))
    steps: int = 2
    forward: Forward = plain_forward
    autocast: bool = False
    streams: int = 0
    pause: Callable[[], None] = lambda: None

    def run(self, manager: PipelineOffloadManager | None = None, *, announced: bool = True) -> Result:
        """announced: chunks are announced as a pipeline stage does it; else `init_chunk_handler` is called
        before each forward."""
        config = TransformerConfig(
            dim=WIDTH,
            layers=6,
            heads=4,
            kv_heads=2,
            ffn=352,
            sequence=TOKENS,
            offload_modules=frozenset(self.names),
            math_attention=True,
        )
        model = build_stage_module(config, 1, 3, device=DEVICE, dtype=self.dtype)
        result = Result()
        with installed(manager):
            if manager is not None:
                manager.register_parameters(model)
            streams = [torch.cuda.Stream() for _ in range(self.streams)]
            for step in range(self.steps):
                result.gradients += self._step(model, step, manager if announced else None, streams)
                stats = step_end()
                if stats is not None:
                    result.stats.append(stats)
        return result

    def _step(
        self,
        model: TransformerStage,
        step: int,
        announce: PipelineOffloadManager | None,
        streams: Sequence[torch.cuda.Stream],
    ) -> list[Tensor]:
        microbatches = 1 + max(microbatch for _, _, microbatch in self.order)
        inputs = [self._input(step, microbatch) for microbatch in range(microbatches)]
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
        live: dict[int, Tensor] = {}
        for kind, stage, microbatch in self.order:
            with _on(streams, microbatch):
                self.pause()
                if kind == "F":
                    if announce is not None:
                        announce.begin_chunk(stage, microbatch)
                    elif PipelineOffloadManager.OFFLOAD_MGR is not None:
                        init_chunk_handler(1, stage, 1)
                    with torch.autocast(DEVICE.type, torch.bfloat16) if self.autocast else nullcontext():
                        live[microbatch] = self.forward(model, inputs[microbatch])
                    if announce is not None:
                        announce.end_forward(stage, microbatch)
                else:
                    y = live.pop(microbatch)
                    if announce is not None:
                        announce.begin_backward(stage, microbatch, kind)
                    (y.float().square().sum() / 64).backward()
                    if announce is not None:
                        announce.end_backward(stage, microbatch, kind)
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        gradients = [_gradient(tensor).clone() for tensor in [*inputs, *model.parameters()]]
        _update(model)
        return gradients

    def _input(self, step: int, microbatch: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        x = torch.randn(SEQUENCES, TOKENS, WIDTH, generator=generator)
        return x.to(DEVICE, self.dtype).requires_grad_()


def _on(streams: Sequence[torch.cuda.Stream], microbatch: int) -> AbstractContextManager[Any]:
    return torch.cuda.stream(streams[microbatch % len(streams)]) if streams else nullcontext()


def _gradient(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@torch.no_grad()
def _update(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.sub_(_gradient(parameter), alpha=0.001)
        parameter.grad = None


def bits(tensor: Tensor) -> Tensor:
    """The elements' bytes, in order; equal for two NaNs of one pattern."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same_bits(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """And that there is something to compare: every expected gradient is finite and not all zero."""
    assert len(expected) == len(found) > 0
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert one.isfinite().all(), f"gradient {number} of {len(expected)} is not finite"
        assert one.any(), f"gradient {number} of {len(expected)} is all zero"
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other)), (
            f"gradient {number} of {len(expected)}, shape {tuple(one.shape)}, differs by up to "
            f"{(one - other).abs().max().item()}"
        )
