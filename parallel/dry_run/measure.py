"""The rates of the GPU that is here, in place of those of the table.

One invariant: each rate is the best of some repeats of one kernel on a device that does nothing else, so a
dry run with them is as hopeful as one with the table's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional
from torch.utils.benchmark import Timer

from offload import OffloadEngine
from offload.policy.actions import Rates

from .rates import Gpu

_REPEATS = 5
_LINK_BYTES = 256 << 20
"""Pinned to measure the link with: two blocks of 64 MiB, and room around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of what is timed."""

    side: int = 8192
    """Of the square matrices."""
    tokens: int = 16384
    heads: int = 32
    channels: int = 128
    elements: int = 1 << 29
    """Of what is copied from memory to memory, and a sixteenth of it of what is stepped."""
    calls: int = 2000


def measured(named: Gpu, device: torch.device, sizes: Sizes | None = None, link: Rates | None = None) -> Gpu:
    """`named` with the rates of `device`. Blocks for some seconds.

    link: the host link; None measures it, which needs CUDA. Rates between GPUs stay assumed.
    """
    sizes = Sizes() if sizes is None else sizes
    link = _link_rates(device) if link is None else link
    forward, backward = _attention_flops(device, sizes)
    memory_bytes = named.memory_bytes
    if device.type == "cuda":
        memory_bytes = int(torch.cuda.mem_get_info(device)[0])
    return replace(
        named,
        name=f"{device.type} measured here",
        memory_bytes=memory_bytes,
        matmul_flops=_matmul_flops(device, sizes),
        attention_flops=forward,
        attention_backward_flops=backward,
        memory_rate=_memory_rate(device, sizes),
        call_s=_call_s(device, sizes),
        links={1: link},
        optimizer_rate=_optimizer_rate(device, sizes),
        assumed=(f"rates between GPUs are those of {named.name}",),
        sources=dict.fromkeys(named.sources, "measured here"),
    )


def _link_rates(device: torch.device) -> Rates:
    """As an engine measures it before its first plan. Raises HostBudgetError where nothing can be pinned."""
    engine = OffloadEngine(device=str(device))
    try:
        engine.reserve_host(_LINK_BYTES)
        assert engine.rates is not None, f"{_LINK_BYTES:,} bytes were pinned and the link was not measured"
        return engine.rates
    finally:
        engine.close()


def _least_s(work: Callable[[], object]) -> float:
    """Of some runs of a few calls each, a call's. The timer waits for the device."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.timeit(3).median for _ in range(_REPEATS))


def _matmul_flops(device: torch.device, sizes: Sizes) -> float:
    a, b = (torch.randn(sizes.side, sizes.side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * sizes.side**3 / _least_s(lambda: a @ b)


def _attention_flops(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Of the causal forward and of the backward alone, flops above the diagonal not counted."""
    shape = (1, sizes.heads, sizes.tokens, sizes.channels)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    flops = 2 * sizes.tokens**2 * sizes.heads * sizes.channels
    y = forward()
    gradient = torch.ones_like(y)
    backward_s = _least_s(lambda: torch.autograd.grad(y, (q, k, v), gradient, retain_graph=True))
    return flops / _least_s(forward), 2.5 * flops / backward_s


def _memory_rate(device: torch.device, sizes: Sizes) -> float:
    a = torch.ones(sizes.elements, device=device, dtype=torch.bfloat16)
    return 2 * 2 * sizes.elements / _least_s(lambda: a.neg())


def _call_s(device: torch.device, sizes: Sizes) -> float:
    """Host time of a call in a forward and a backward of small operators, of which each kernel is one."""
    x = torch.ones(16, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(sizes.calls // 2):
            y = y * 2.0
        y.sum().backward()

    chain()
    found = []
    for _ in range(_REPEATS):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begun = time.perf_counter()
        chain()
        found.append(time.perf_counter() - begun)
    return min(found) / sizes.calls


def _optimizer_rate(device: torch.device, sizes: Sizes) -> float:
    parameter = torch.nn.Parameter(torch.zeros(max(1, sizes.elements // 16), device=device))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return parameter.numel() / _least_s(optimizer.step)
