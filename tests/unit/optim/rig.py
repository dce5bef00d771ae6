"""What the optimizer's tests share: a small net of parameters of uneven sizes, batches by number, and a run
of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadConfig, OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.optim import HybridDeviceOptimizer

WIDTH = 33
FUSED = {"lr": 1e-2, "fused": True}
"""What torch's own AdamW is made with, so that it steps with the kernel of the hybrid one."""


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Six parameters, none of whose sizes is a multiple of 16 but one; the same weights each time."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 70), nn.Tanh(), nn.Linear(70, 48), nn.Tanh(), nn.Linear(48, 7)).to(
        dtype
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def batch(number: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 + number)).to(dtype)


def backward(model: nn.Module, number: int, last_alone: bool = False) -> Tensor:
    """last_alone: no parameter but the last gets a gradient."""
    dtype = next(model.parameters()).dtype
    loss: Tensor = model(batch(number, dtype)).float().square().mean()
    loss.backward(inputs=[*model.parameters()][-1:] if last_alone else None)
    return loss


def engine(
    executor: ExecutorName = "late", *, seed: int = 0, without: set[str] | None = None, **config: Any
) -> OffloadEngine:
    return OffloadEngine(
        OffloadConfig(**config), device=SimDevice(executor=executor, seed=seed, without=without or set())
    )


def hybrid(parameters_of: nn.Module, /, **options: Any) -> HybridDeviceOptimizer:
    """Of all parameters, unless `offload_fraction` says otherwise. With a model its weights return beside the
    next forward, unless `overlap` says otherwise."""
    atomic = options.get("atomic_step", bool({"cpu_optimizer_cls", "gpu_optimizer_cls"} & options.keys()))
    workers = options.get("overlap_cpu_optimizer_d2h_h2d", True) and not atomic
    if options.get("model") is not None and workers:
        options.setdefault("overlap", "forward")
    return HybridDeviceOptimizer(
        options.pop("params", None) or parameters_of.parameters(),
        **{"lr": 1e-2, "bucket_bytes": 4096, "offload_fraction": 1.0, **options},
    )


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, first: int = 0, microbatches: int = 1
) -> list[Tensor]:
    """Copies of the weights after `steps` steps."""
    for step in range(first, first + steps):
        for microbatch in range(microbatches):
            backward(model, step * microbatches + microbatch)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, optimizer)


def weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize_parameters()
    return [parameter.detach().clone() for parameter in model.parameters()]


def run(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    steps: int = 4,
    *,
    dtype: torch.dtype = torch.float32,
    **how: Any,
) -> list[Tensor]:
    model = net(dtype)
    optimizer = make(model)
    found = train(model, optimizer, steps, **how)
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.close()
    return found


def assert_same_bits(mine: list[Tensor], other: list[Tensor]) -> None:
    assert len(mine) == len(other)
    for place, (one, two) in enumerate(zip(mine, other, strict=True)):
        assert one.dtype == two.dtype
        assert torch.equal(one.view(torch.uint8), two.view(torch.uint8)), (
            f"tensor {place} differs by {(one - two).abs().max()}"
        )


def assert_torchs_bits(
    trained: Callable[[nn.Module, Any], list[Tensor]], *, attached: bool = True, **options: Any
) -> None:
    """`trained` returns the same bits with torch's AdamW and the hybrid one. attached: it gets the model."""
    reference, model = net(), net()
    expected = trained(reference, torch.optim.AdamW(reference.parameters(), **FUSED))
    optimizer = hybrid(model, model=model if attached else None, **options)
    assert_same_bits(trained(model, optimizer), expected)


def failing(call: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The call of that number, counted from one, raises before it does anything."""
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise MemoryError("no more")
        return call(*arguments, **options)

    return counted


def broken_off(copy: Callable[..., None], at: int) -> Callable[..., None]:
    """The copy of that number issues all of its pairs but the last and raises."""
    calls = 0

    def counted(device: SimDevice, lane: Any, pairs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            copy(device, lane, pairs[:-1])
            raise MemoryError("no more")
        copy(device, lane, pairs)

    return counted
