"""Records one stretch of training as a timeline: timed events around copies and groups, and where bytes are:
saved tensors, and what of the process's weights, gradients and optimizer state is on the device.

One invariant: it only observes. While none is at work, nothing of it runs. While one is, each copy costs two
timed events more, and each group a few.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offload.compile import untraced
from offload.device import Event
from offload.device.sim import SimDevice
from offload.groups.chunk import GroupScope
from offload.groups.tracker import ChunkTracker
from offload.ids import GroupId, Owner
from offload.saved.filters import Verdict
from offload.saved.handles import Handle
from offload.saved.hooks import Scope
from offload.telemetry.timeline import Kind, MemorySample, Span, Timeline
from offload.transfer.block import BlockState
from offload.transfer.copier import Direction

_HELD = (BlockState.RESIDENT, BlockState.RESTORING, BlockState.RESTORED)


@dataclass(slots=True)
class _Timed:
    """A span whose times are not read yet. end: None for a backward, until the next thing is seen."""

    lane: str
    kind: Kind
    name: str
    owner: str
    start: Event
    end: Event | None = None
    nbytes: int = 0


class Recorder:
    """From `start` to `finish`; one at a time for an engine."""

    def __init__(self, tracker: ChunkTracker) -> None:
        self._tracker = tracker
        self._engine = tracker.engine
        self._device = tracker.engine.device
        self._spans: list[_Timed] = []
        self._samples: list[tuple[Event, MemorySample]] = []
        self._open: list[_Timed] = []  # forwards
        self._reading: _Timed | None = None
        self._read_group: GroupId | None = None
        self._stepping: list[_Timed] = []  # optimizers
        self._hooks: list[Any] = []
        self._seen_s = 0.0

    def start(self) -> None:
        """Begin to observe. Raises RuntimeError while another recorder is at work. Blocks the host: never."""
        engine = self._engine
        self._holdings = Holdings(self._device.owns)
        self._optimizer_bytes = self._holdings.optimizer_bytes()
        with engine.lock:
            if any(isinstance(observer, Recorder) for observer in engine.hooks.observers):
                raise RuntimeError("a recording is under way; end it before another begins")
            self._seen_s = time.perf_counter()
            self._peak_bytes = engine.transfers.counts.device_bytes_peak
            self._begin = self._device.record(self._device.compute, timed=True)
            self._stalls = [(engine.transfers.stalls, len(engine.transfers.stalls))]
            engine.copier.watch(self._copied)
            engine.hooks.observers.append(self)
            engine.on_read(self._read)
            self._hooks.append(register_optimizer_step_pre_hook(self._step_begins))
            self._hooks.append(register_optimizer_step_post_hook(self._step_ended))
            self._sample()

    def stop(self) -> None:
        """Observe no more. Called again, it does nothing."""
        engine = self._engine
        with engine.lock:
            if self in engine.hooks.observers:
                engine.copier.unwatch(self._copied)
                engine.hooks.observers.remove(self)
                engine.off_read(self._read)
                for hook in self._hooks:
                    hook.remove()

    def finish(self) -> Timeline:
        """`stop`, and read the times. Blocks the host until the device has done what was recorded."""
        engine, device = self._engine, self._device
        with engine.lock:
            self._sample()
            self.stop()
            end = device.record(device.compute, timed=True)
            for lane in (device.compute, device.d2h, device.h2d):
                device.synchronize(device.record(lane))
            spans = [self._span(timed, timed.end if timed.end is not None else end) for timed in self._spans]
            spans += [
                self._span(_Timed("compute", "stall", "", "", stall.before), stall.after)
                for stalls, first in self._stalls
                for stall in stalls[first:]
            ]
            samples = [replace(sample, ms=self._ms(event)) for event, sample in self._samples]
            began_ns = self._began_ns()
        return Timeline(
            spans=sorted(spans, key=lambda span: span.start_ms),
            memory=sorted(samples, key=lambda sample: sample.ms),
            device_limit_bytes=engine.limits.device_limit_bytes,
            simulated=not device.pins,
            began_ns=began_ns,
        )

    def _began_ns(self) -> int:
        """Unix time of the begin: an idle device passes an event as soon as it is recorded. Of a few, the one
        that the host looked at the shortest."""
        found = []
        for _ in range(5):
            before_ns = time.time_ns()
            event = self._now()
            self._device.synchronize(event)
            took_ns = time.time_ns() - before_ns
            found.append((took_ns, before_ns + took_ns // 2 - round(self._ms(event) * 1e6)))
        return min(found)[1]

    # -- as PackObserver -------------------------------------------------------------------------------------
    def opened(self, scope: Scope) -> None:
        """A group's hooks open: its forward begins."""
        if not isinstance(scope, GroupScope) or self._device.is_capturing():
            return
        owner = f"{scope.chunk}/{scope.name}"
        event = self._sample() if self._reading is not None else self._sample(gradients=False)
        self._end_reading(event)
        timed = _Timed("compute", "forward", scope.name, owner, event)
        self._open.append(timed)
        self._spans.append(timed)

    def packed(self, scope: Scope, tensor: torch.Tensor, packed: Any, verdict: Verdict | None) -> None:
        """Nothing: a group's own begin and end are enough."""

    def closed(self, scope: Scope) -> None:
        """The latest hooks close."""
        if isinstance(scope, GroupScope) and self._open and not self._device.is_capturing():
            self._open.pop().end = self._sample(gradients=False)

    # -- the other observers ---------------------------------------------------------------------------------
    def _copied(self, direction: Direction, owner: Owner, nbytes: int, start: Event, end: Event) -> None:
        out = direction is Direction.D2H
        lane = "d2h" if out else "h2d"
        name = owner.label.rpartition("/")[2] if owner.client == "groups" else owner.client
        kind: Kind = "spill" if out else "restore"
        self._spans.append(_Timed(lane, kind, name, owner.label, start, end, nbytes))
        if self._engine.at_work():  # else it is a thread of an optimizer, whose lane is its own
            of_groups = owner.client == "groups"
            # the buffer of a restore is there, and not counted yet
            more_bytes = nbytes if of_groups and not out else 0
            self._sample(more_bytes, graphs=False, gradients=not of_groups)

    def _read(self, handle: Handle) -> None:
        group = handle.record.block.group
        if self._device.is_capturing() or (self._reading is not None and self._read_group == group):
            return
        event = self._sample()
        self._end_reading(event)
        self._read_group = group
        owner = f"{group.chunk}/{group.name}"
        self._reading = _Timed("compute", "backward", group.name, owner, event)
        self._spans.append(self._reading)

    def _end_reading(self, event: Event) -> None:
        if self._reading is not None:
            self._reading.end = event
            self._reading = None

    @untraced
    def _step_begins(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._device.is_capturing():
            event = self._sample()
            self._end_reading(event)
            timed = _Timed("compute", "optimizer", type(optimizer).__name__, "", event)
            self._stepping.append(timed)
            self._spans.append(timed)

    @untraced
    def _step_ended(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._stepping and not self._device.is_capturing():
            self._optimizer_bytes = self._holdings.optimizer_bytes()
            self._stepping.pop().end = self._sample()

    # -- times and bytes -------------------------------------------------------------------------------------
    def _sample(self, more_bytes: int = 0, *, graphs: bool = True, gradients: bool = True) -> Event:
        """Note where bytes are; the event of this point of the compute lane. graphs, gradients: what they
        hold may have changed, and is counted anew, which takes about 0.1 ms each."""
        device, engine = self._device, self._engine
        with engine.lock:
            if engine.transfers.stalls is not self._stalls[-1][0]:  # a step has ended meanwhile
                self._stalls.append((engine.transfers.stalls, 0))
            event = self._now()
            # the engine counts freed blocks out at its next call; what a copy still uses is not free
            freed_bytes = sum(
                block.nbytes
                for block in engine.transfers.freed_blocks.copy()
                if block.state in _HELD and (block.transfer is None or block.transfer.settled)
            )
            if graphs:
                self._without_bytes = sum(block.nbytes for block in self._tracker.living_blocks())
            if gradients:
                self._weights_bytes, self._gradient_bytes = self._holdings.weights_and_gradients()
            saved_bytes = engine.transfers.device_bytes - freed_bytes + more_bytes
            before_bytes, self._peak_bytes = self._peak_bytes, engine.transfers.counts.device_bytes_peak
            if self._peak_bytes > before_bytes:  # between two samples
                saved_bytes = max(saved_bytes, self._peak_bytes)
            known_bytes = saved_bytes + self._weights_bytes + self._gradient_bytes + self._optimizer_bytes
            sample = MemorySample(
                ms=0.0,
                saved_bytes=saved_bytes,
                without_bytes=self._without_bytes,
                host_bytes=engine.arena.lent_bytes,
                weights_bytes=self._weights_bytes,
                gradient_bytes=self._gradient_bytes,
                optimizer_bytes=self._optimizer_bytes,
                other_bytes=max(0, device.active_bytes() - known_bytes) if device.pins else 0,
                pinned_bytes=engine.arena.held_bytes,
            )
            self._samples.append((event, sample))
        return event

    def _now(self) -> Event:
        device = self._device
        if isinstance(device, SimDevice):  # it has no compute of its own: the host's time is taken for it
            now_s = time.perf_counter()
            device.compute_for(now_s - self._seen_s)
            self._seen_s = now_s
        return device.record(device.compute, timed=True)

    def _ms(self, event: Event) -> float:
        return self._device.elapsed_ms(self._begin, event)

    def _span(self, timed: _Timed, end: Event) -> Span:
        start_ms = self._ms(timed.start)
        return Span(
            lane=timed.lane,
            kind=timed.kind,
            name=timed.name,
            owner=timed.owner,
            start_ms=start_ms,
            end_ms=max(start_ms, self._ms(end)),
            nbytes=timed.nbytes,
        )


class Holdings:
    """on_device: whether a tensor's bytes are in the device's memory. Blocks the host: never; to find what
    there is takes about 0.1 s."""

    def __init__(self, on_device: Callable[[Tensor], bool]) -> None:
        self._on_device = on_device
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        for each in gc.get_objects():  # by type(): isinstance() would run properties of users' proxies
            if issubclass(type(each), nn.Module) and each.__dict__.get("_parameters"):
                self._modules.add(each)
            elif issubclass(type(each), Optimizer):
                self._optimizers.add(each)

    def weights_and_gradients(self) -> tuple[int, int]:
        """Bytes of parameters' storages on the device, and of their gradients'."""
        with torch._C.DisableTorchFunctionSubclass():  # a streamed weight is not fetched to be counted
            weights = [each for module in self._modules for each in module._parameters.values()]
            seen: set[int] = set()
            return self._bytes(weights, seen), self._bytes((w.grad for w in weights if w is not None), seen)

    def optimizer_bytes(self) -> int:
        """Bytes of optimizers' state on the device."""
        with torch._C.DisableTorchFunctionSubclass():
            # of an object's own: a HybridDeviceOptimizer's is a view of those inside, made when it is read
            states = [vars(each).get("state") or {} for each in self._optimizers]
            return self._bytes(_tensors([*map(dict.values, states)]), set())

    def _bytes(self, tensors: Iterable[Tensor | None], seen: set[int]) -> int:
        """Bytes of storages that are not among `seen`, which has them then."""
        total = 0
        for tensor in tensors:
            tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
            if tensor is None or tensor.layout is not torch.strided or not self._on_device(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total


def _tensors(found: Any) -> Iterator[Tensor]:
    for each in found:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            yield from _tensors(each.values())
        elif isinstance(each, (list, tuple)) or type(each).__name__ == "dict_values":
            yield from _tensors(each)
