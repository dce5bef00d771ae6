"""torch's own CUDA sanitizer, watching programs on the simulated device: what it would say of the engine on a
GPU, without one.

The sanitizer knows kernels (every operation that torch dispatches, on the current stream), events and waits;
here the simulated device tells it of its lanes, events and copies as CUDA's hooks would. One invariant: it is
told nothing that it would not learn on a GPU. It is stricter here: CPU memory that is freed is not reported,
so it never forgets what touched an address. Hence one compute lane only: two would get each other's freed
memory, which CUDA's allocator keeps apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.utils._python_dispatch import TorchDispatchMode

from offload.device import CopyPair, Event, Lane
from offload.device.cuda import polled
from offload.device.sim import SimDevice


class SanitizedDevice(SimDevice):
    """Its copies are kernels that read and write device memory, as `copy_` is; its events are known by a
    number of their own."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.handler = _sanitizer.EventHandler()
        self._events: list[Any] = []  # kept, so that no address names two
        self._left_out = frozenset(settings.get("without", ()))

    def stream_of(self, lane: Any) -> int:
        return int(lane.index)

    def record(self, lane: Lane, *, timed: bool = False) -> Any:
        event = super().record(lane, timed=timed)
        self._events.append(event)
        self.handler._handle_event_creation(id(event))
        self.handler._handle_event_record(id(event), self.stream_of(lane))
        return event

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        super().wait(lane, event, order)
        if order not in self._left_out:
            self.handler._handle_event_wait(id(event), self.stream_of(lane))

    def poll(self, event: Event) -> bool:
        return polled(super().poll(event), lambda: self.synchronize(event))

    def synchronize(self, event: Event) -> None:
        super().synchronize(event)
        self.handler._handle_event_synchronization(id(event))

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        for destination, source in pairs:
            read, written = self._on_device(source), self._on_device(destination)
            aliases: dict[int, list[str]] = {address: ["copy"] for address in (*read, *written)}
            errors = self.handler._handle_kernel_launch(
                self.stream_of(lane), read, written, set(), "aten::copy_", aliases
            )
            if errors:
                raise _sanitizer.CUDASanitizerErrors(errors)
        super().copy(lane, pairs)

    def _on_device(self, tensor: Tensor) -> set[int]:
        return {tensor.data_ptr()} if self.owns(tensor) else set()


class _Arguments(_sanitizer.ArgumentHandler):
    """What an operation reads and writes, where the tensors that count are on the CPU. One without bytes goes
    by its id, as in torch."""

    def _handle_argument(
        self,
        value: Any,
        is_write: bool,
        metadata_only: bool,
        name: str | None = None,
        is_output: bool = False,
    ) -> None:
        if not isinstance(value, Tensor):
            return
        address = value.data_ptr() or id(value)
        if is_write or not metadata_only:
            (self.dataptrs_written if is_write else self.dataptrs_read).add(address)
        self.tensor_aliases.setdefault(address, []).extend([name] if name else [])
        if is_output:
            self.outputs.add(address)


class _Mode(_sanitizer.CUDASanitizerDispatchMode):
    """torch's mode without the hooks into CUDA."""

    def __init__(self, handler: _sanitizer.EventHandler) -> None:
        TorchDispatchMode.__init__(self)
        self.event_handler = handler


@contextmanager
def sanitized(device: SanitizedDevice, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Operations inside are watched. Raises CUDASanitizerErrors where one is not ordered after what it
    conflicts with."""
    with patch.context() as inside:
        inside.setattr(_sanitizer, "ArgumentHandler", _Arguments)
        inside.setattr(
            torch.cuda,
            "current_stream",
            lambda: SimpleNamespace(cuda_stream=device.stream_of(device.compute)),
        )
        with _Mode(device.handler):
            yield
