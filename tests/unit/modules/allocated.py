"""A simulated device with an allocator, for mode "auto": what is active is what torch's operators have made
on the host, but those of the engine, and somebody still holds; and compute takes what a test says."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import offload
from offload import PipelineOffloadManager
from offload.auto import calls as auto_calls
from offload.auto import plan as auto_plan
from offload.auto.ladder import Ladder
from offload.auto.plan import Beside
from offload.policy import mixed_search
from offload.policy.actions import Rates
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.linked import RATE, LinkedDevice
from tests.unit.modules.training import ROWS, WIDTH, build

__all__ = ["AllocatedDevice", "AllocatedRun", "allocated", "counting"]


class AllocatedDevice(LinkedDevice):
    """peak: active bytes at most, since it was reset. capacity_bytes: that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self.peak = 0
        self.capacity_bytes = 1 << 40

    def active_bytes(self) -> int:
        return sum(storage.nbytes() for storage in list(self.storages.values()))

    def made(self, storage: torch.UntypedStorage) -> None:
        """An operator has made it, or a view of it."""
        if storage._cdata not in self.storages and not self._checker.is_host(storage):
            self.storages[storage._cdata] = storage
            self.peak = max(self.peak, self.active_bytes())

    def host_memory(self, nbytes: int, registration_bytes: int) -> Any:
        memory = super().host_memory(nbytes, registration_bytes)
        for piece in memory.pieces:
            self.storages.pop(piece.untyped_storage()._cdata, None)
        return memory

    def allocator_bytes(self) -> Any:
        return 0, self.peak

    def reset_allocator_peak(self) -> None:
        self.peak = self.active_bytes()

    def free_bytes(self) -> int | None:
        return self.capacity_bytes - self.active_bytes()


class _Counter(TorchDispatchMode):
    def __init__(self, device: AllocatedDevice, at_work: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._at_work = at_work

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if not self._at_work():
            for leaf in tree_leaves(output):
                leaf = getattr(leaf, "_local_tensor", leaf)  # of a DTensor
                if isinstance(leaf, torch.Tensor):
                    self._device.made(leaf.untyped_storage())
        return output


@contextmanager
def counting(device: AllocatedDevice, at_work: Callable[[], bool]) -> Iterator[None]:
    """Inside, what operators make counts as the device's. at_work: of the engine."""
    with _Counter(device, at_work):
        yield


class AllocatedRun:
    """A model in mode "auto" on such a device, whose blocks take a millisecond forward and two backward.

    gives_optimizer: to `apply`, a fused AdamW. peaks, seconds: of each step, active bytes at most and what
    the device took; gradients: of the last one.
    """

    def __init__(
        self, device: AllocatedDevice, blocks: int, *, gives_optimizer: bool = False, **options: Any
    ) -> None:
        self.device, self.model = device, build(blocks=blocks)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, fused=gives_optimizer)
        if gives_optimizer:
            options["optimizer"] = self.optimizer
        for block in self.model.layers:
            block.register_forward_pre_hook(lambda *_: device.compute_for(1e-3))
            block.register_full_backward_hook(lambda *_: device.compute_for(2e-3))
        self.own_hooks = self.num_hooks
        self.handle = offload.apply(self.model, "auto", min_numel=1, **options) if options else None
        self.peaks: list[int] = []
        self.seconds: list[float] = []
        self.losses: list[Tensor] = []

    @property
    def ladder(self) -> Ladder:
        assert self.handle is not None
        assert self.handle._auto is not None
        assert self.handle._auto.ladder is not None
        return self.handle._auto.ladder

    @property
    def num_hooks(self) -> int:
        return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in self.model.modules())

    def steps(self, count: int, *, rows: Sequence[int] = (ROWS,), seed: int = 0) -> None:
        """rows: of each microbatch; all forwards run before the backwards."""
        device = self.device
        for number in range(count):
            device.reset_allocator_peak()
            begun = device.record(device.compute, timed=True)
            torch.manual_seed(seed + number)
            losses = [self.model(torch.randn(own, WIDTH)).square().mean() for own in rows]
            for loss in losses:
                loss.backward()
            ended = device.record(device.compute, timed=True)
            self.optimizer.step()
            self.optimizer.zero_grad()
            device.synchronize(ended)
            self.seconds.append(device.elapsed_ms(begun, ended) / 1e3)
            self.peaks.append(device.peak)
            self.losses += [loss.detach() for loss in losses]
            del losses, loss

    def weights(self) -> list[Tensor]:
        return [weight.detach().clone() for weight in self.model.parameters()]


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., AllocatedRun]]:
    """Builds a run; options: of `apply`, none for a run without. Searches are short and waited for."""
    monkeypatch.setattr(mixed_search, "_MOST_TRIALS", 40)
    monkeypatch.setattr(auto_calls, "perf_counter", lambda: 0.0)  # the device's clock is not the host's
    monkeypatch.setattr(auto_plan, "Beside", lambda calculate, waits: Beside(calculate, waits=True))
    with installed(None), ExitStack() as stack:

        def new(blocks: int = 4, rate: float = RATE, **options: Any) -> AllocatedRun:
            stack.pop_all().close()
            if PipelineOffloadManager.OFFLOAD_MGR is not None:
                PipelineOffloadManager.OFFLOAD_MGR.close()
            device = AllocatedDevice()
            device.set_rate(rate)
            manager = PipelineOffloadManager.OFFLOAD_MGR = build_manager(device=device, piece_bytes=512)
            manager.engine.reserve_host(1 << 20, measure=False)
            manager.engine.rates = Rates(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)
            stack.enter_context(counting(device, manager.engine.at_work))
            run = AllocatedRun(device, blocks, **options)
            if run.handle is not None:
                stack.callback(run.handle.remove)
            return run

        yield new
