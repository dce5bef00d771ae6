"""A meter of all living storages, and small models trained with the watermark runtime and without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offload import OffloadConfig, OffloadEngine
from offload.compat.stagehand.activations import ActivationRuntime
from offload.device.sim import ExecutorName, SimDevice
from offload.transfer.block import WeakStorage

EXECUTORS: tuple[ExecutorName, ...] = ("late", "early", "random", "clock")
WIDTH, ROWS = 64, 128
TENSOR = 4 * WIDTH * ROWS  # bytes of one activation
MIB = 1 << 20
SILENT: dict[str, Any] = {"telemetry_enabled": False}


class LivingStorages(TorchDispatchMode):
    """Bytes of the storages that operators of this thread have made and that are still alive: what
    `torch.cuda.memory_allocated` is on a GPU. device: whose host memory does not count. peak: at the end of
    an operator, at most."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self._device = device
        self._known: dict[int, tuple[WeakStorage, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and self._device.owns(leaf):
                storage = leaf.untyped_storage()
                known = self._known.get(storage._cdata)
                if known is None or known[0].storage() is None:
                    self._known[storage._cdata] = WeakStorage(storage), storage.nbytes()
        self.allocated()
        return out

    def allocated(self) -> int:
        self._known = {key: entry for key, entry in self._known.items() if entry[0].storage() is not None}
        found = sum(nbytes for _, nbytes in self._known.values())
        self.peak = max(self.peak, found)
        return found

    def start_step(self) -> None:
        self.peak = 0


def blocks(count: int) -> nn.Sequential:
    """Each saves its input and the input of its activation: two tensors of TENSOR bytes."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(count)])


def batch(seed: int, rows: int = ROWS) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def engine_of(executor: ExecutorName = "late", *, seed: int = 0, **config: Any) -> OffloadEngine:
    settings: dict[str, Any] = {"min_offloaded_tensor_size": 1, "piece_bytes": TENSOR, **config}
    return OffloadEngine(OffloadConfig(**settings), device=SimDevice(executor=executor, seed=seed))


@contextmanager
def runtime_of(
    executor: ExecutorName = "late", *, engine: OffloadEngine | None = None, seed: int = 0, **fields: Any
) -> Iterator[ActivationRuntime]:
    """high, low: bytes, in place of the fields in MiB."""
    for short, name in (("high", "vram_high_watermark_mb"), ("low", "vram_low_watermark_mb")):
        if short in fields:
            fields[name] = fields.pop(short) / MIB
    engine = engine_of(executor, seed=seed) if engine is None else engine
    slabs = {"slabs_per_class": (64, 1, 0, 0, 0)} if fields.get("order") == "reactive" else {}
    runtime = ActivationRuntime(engine=engine, **{**SILENT, **slabs, **fields})
    try:
        yield runtime
    finally:
        runtime.close()


def train(
    model: nn.Module,
    runtime: ActivationRuntime | None,
    *,
    steps: int = 3,
    rows: Callable[[int], int] = lambda step: ROWS,
    loss_of: Callable[[nn.Module, Tensor], Tensor] = lambda model, x: model(x).square().mean(),
    after: Callable[[], object] = int,
) -> list[bytes]:
    """The bits of the gradients of every step, and of the last weights. after: called at each step's end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[bytes] = []
    for step in range(steps):
        if runtime is not None:
            runtime.step_begin(step)
        with nullcontext() if runtime is None else runtime.managed_forward():
            loss = loss_of(model, batch(step, rows(step)))
        loss.backward()
        seen += [bits(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if runtime is not None:
            runtime.step_end()
        after()
    return [*seen, *(bits(parameter) for parameter in model.parameters())]


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()
