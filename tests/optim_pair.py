"""One training loop, run by torch's own optimizer and by the hybrid one: the bits must be equal.

One invariant: the loop does not know which of the two it was given, so whatever it may do with torch's it may
do with ours.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload import OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.optim import HybridDeviceOptimizer

Overlap = Literal["step", "forward", "backward"]
OVERLAPS: tuple[Overlap, ...] = ("step", "forward", "backward")
EXECUTORS: tuple[ExecutorName, ...] = ("late", "early", "random")

Make = Callable[..., Optimizer]
Loop = Callable[[Make], Sequence[Tensor]]
"""Makes its optimizers by what it is given, of a module or of parameters; returns what must not differ."""


def net() -> nn.Sequential:
    """The same weights each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 24))


def backward(model: nn.Module, number: int) -> None:
    """Of the batch of this number."""
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(number))
    model(x).square().sum().backward()


def settled(optimizer: Any) -> None:
    """Weights that return beside the next forward are there."""
    getattr(optimizer, "synchronize_parameters", lambda: None)()


def torchs(of: nn.Module | Sequence[Tensor], cls: type[Optimizer] = AdamW, **options: Any) -> Optimizer:
    """Torch's own, with the kernel that the hybrid one uses."""
    if "fused" in inspect.signature(cls).parameters:
        options.setdefault("fused", True)
    parameters = of.parameters() if isinstance(of, nn.Module) else of
    optimizer = cls(parameters, **{"lr": 1e-2, **options})
    optimizer.register_step_pre_hook(_lay_out)
    return optimizer


def _lay_out(optimizer: Optimizer, *_: object) -> None:
    """Gradients and state as their weights lie: the fused CPU kernels of torch 2.13 take them as they lie in
    memory, whatever their strides say, and step an element by another's gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad = _as_lies(parameter, parameter.grad)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    optimizer.state[parameter][key] = _as_lies(parameter, value)


def _as_lies(parameter: Tensor, value: Tensor) -> Tensor:
    if value.stride() == parameter.stride() or value.layout is not torch.strided:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value.detach())


def hybrid(
    of: nn.Module | Sequence[Tensor],
    cls: type[Optimizer] = AdamW,
    *,
    overlap: Overlap = "step",
    fraction: float = 1.0,
    model: nn.Module | None = None,
    **options: Any,
) -> HybridDeviceOptimizer:
    """model: by default the module that was given."""
    module = of if isinstance(of, nn.Module) else model
    if "fused" in inspect.signature(cls).parameters:
        options.setdefault("fused", True)
    options["overlap"] = overlap
    parameters = of.parameters() if isinstance(of, nn.Module) else of
    return HybridDeviceOptimizer(
        parameters, fraction, cls, model=module, **{"lr": 1e-2, "bucket_bytes": 4096, **options}
    )


def twins(
    cls: type[Optimizer] = AdamW,
    *,
    overlap: Overlap = "step",
    shares: Sequence[float] = (1.0, 0.0),
    executors: Sequence[ExecutorName] = EXECUTORS,
    **options: Any,
) -> Iterator[tuple[str, Make]]:
    """The hybrid one in each configuration: what it is called, and how it is made. Those that still live are
    closed when the next one is asked for. shares: of the elements, what the CPU steps."""
    for share in shares:
        for executor in executors:
            engine = OffloadEngine(device=SimDevice(executor=executor, seed=7))
            made: weakref.WeakSet[HybridDeviceOptimizer] = weakref.WeakSet()

            common = {"overlap": overlap, "cpu_share": share, "engine": engine, **options}
            yield f"overlap {overlap}, cpu_share {share}, executor {executor}", _maker(cls, common, made)
            for optimizer in list(made):
                optimizer.close()


def _maker(
    cls: type[Optimizer], common: dict[str, Any], made: weakref.WeakSet[HybridDeviceOptimizer]
) -> Make:
    def make(of: Any, **more: Any) -> Optimizer:
        given = {**common, **more}
        optimizer = hybrid(of, given.pop("cls", cls), **given)
        made.add(optimizer)
        return optimizer

    return make


def assert_same(
    loop: Loop,
    cls: type[Optimizer] = AdamW,
    torchs_options: dict[str, Any] | None = None,
    **configuration: Any,
) -> None:
    """The loop's bits by torch's optimizer and by the hybrid one in each configuration; see `twins`.

    The loop may leave weights on their way: what it returns was read by its own means. torchs_options: what
    both are made with.
    """
    common = torchs_options or {}
    expected = list(loop(lambda of, **more: torchs(of, more.pop("cls", cls), **common, **more)))
    differing = []
    for name, make in twins(cls, **common, **configuration):
        found = list(loop(make))
        assert len(found) == len(expected), name
        differing += [
            f"{name}: tensor {place} by {(one.double() - two.double()).abs().max():.3g}"
            for place, (one, two) in enumerate(zip(found, expected, strict=True))
            if not torch.equal(_bytes(one), _bytes(two))
        ]
    assert not differing, "\n".join(differing)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def copies(of: nn.Module | Sequence[Tensor]) -> list[Tensor]:
    """Of the weights, read as anybody would: by a clone, without asking the optimizer."""
    parameters = of.parameters() if isinstance(of, nn.Module) else of
    return [each.detach().clone(memory_format=torch.contiguous_format) for each in parameters]
