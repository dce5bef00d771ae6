"""Run one row's steps and write down what each cost: device time, host time, memory three ways, and what the
engine says.

Times are of the compute lane, by events, so that a step ends when its last kernel does; the wall clock is
kept beside it. Memory is `active_bytes.all.peak` and reserved, because `max_memory_allocated` leaves out
blocks that `record_stream` still holds. One invariant: nothing synchronises inside a step; peaks are reset
and the device drained between steps only.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.rows import Row
from bench.workload import Inputs, Stack, Workload

CUBLAS_WORKSPACE = ":4096:8"
"""What cuBLAS wants for deterministic results; on Hopper it is torch's default size as well."""


def read_cublas_setting(device: torch.device) -> None:
    """Let torch read the setting that deterministic steps need, at the process's first product, and take it
    away again.

    [The setting that costs host time] torch keeps what it found at the first product, and parses the setting
    at each one for as long as it is set: 33 microseconds of the host. So it is set for a product here and for
    deterministic steps, and for no timed step.
    """
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    one = torch.ones(1, 1, device=device)
    torch.mm(one, one)
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]


class Clock:
    """Points in device time: CUDA events, or the host's clock where compute is eager. A row makes one before
    its first step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            read_cublas_setting(device)

    @property
    def cuda(self) -> bool:
        return self._cuda

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Both points must have passed: `drain` first."""
        return float(start.elapsed_time(end)) if self._cuda else (end - start) * 1e3

    def drain(self) -> None:
        """Block until the device has nothing left to do."""
        if self._cuda:
            torch.cuda.synchronize()

    def reset_peaks(self) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            if hasattr(torch.cuda, "reset_peak_host_memory_stats"):
                torch.cuda.reset_peak_host_memory_stats()

    def timed(self, step: Callable[[], object]) -> dict[str, float]:
        """One step from a drained device to a drained device: milliseconds of the device, of Python's calls
        and of the wall, and peaks in bytes. Blocks the host."""
        self.drain()
        self.reset_peaks()
        began, start = time.perf_counter(), self.mark()
        step()
        end, issued = self.mark(), time.perf_counter()
        self.drain()
        return {
            "step_ms": self.ms(start, end),
            "host_ms": (issued - began) * 1e3,
            "wall_ms": (time.perf_counter() - began) * 1e3,
            **self.memory(),
        }

    def active_bytes(self) -> int:
        return int(torch.cuda.memory_stats()["active_bytes.all.current"]) if self._cuda else 0

    def memory(self) -> dict[str, int]:
        if not self._cuda:
            return {"active_peak": 0, "reserved_peak": 0, "allocated_peak": 0, "alloc_retries": 0}
        stats = torch.cuda.memory_stats()
        return {
            "active_peak": int(stats["active_bytes.all.peak"]),
            "reserved_peak": int(torch.cuda.max_memory_reserved()),
            "allocated_peak": int(torch.cuda.max_memory_allocated()),
            "alloc_retries": int(stats["num_alloc_retries"]),
        }


class Collector:
    """What Python's cyclic collector has done since this was entered, as it says itself. seconds: in it, on
    any thread. full: collections of everything that is alive."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.full = 0
        self._began = 0.0

    def _tell(self, phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds += time.perf_counter() - self._began
            self.full += about["generation"] == 2

    def __enter__(self) -> Collector:
        gc.callbacks.append(self._tell)
        return self

    def __exit__(self, *raised: object) -> None:
        gc.callbacks.remove(self._tell)


@dataclass(slots=True)
class StepCost:
    """One step. Milliseconds and bytes."""

    step_ms: float
    wall_ms: float
    host_ms: float
    """The Python calls alone. On a step of more than about a thousand kernels the launch queue fills, and
    this follows the step."""
    collector_ms: float
    """Of `host_ms`, in Python's cyclic collector."""
    forward_ms: list[float]
    backward_ms: list[float]
    memory: dict[str, int]
    pinned_held: int
    pinned_lent_peak: int
    engine: dict[str, Any] = field(default_factory=dict)


def clear_gradients(stack: Stack, inputs: Inputs, keep: bool) -> None:
    """Zero the gradients where they stay allocated (and allocate them the first time), else free them."""
    for tensor in (*stack.parameters(), inputs.source):
        if not keep:
            tensor.grad = None
        elif tensor.grad is None:
            tensor.grad = torch.zeros_like(tensor)
        else:
            tensor.grad.zero_()


def run_step(
    row: Row, clock: Clock, before_action: Callable[[], None] | None = None
) -> list[tuple[str, Any, Any]]:
    """Issue one step; nothing here waits. Returns (kind, start, end) of each action."""
    inputs = row.context.inputs
    actions, lengths = row.context.workload.drawn(row.context.step)
    outputs: dict[int, torch.Tensor] = {}
    marks: list[tuple[str, Any, Any]] = []
    row.begin_step()
    for kind, _, microbatch in actions:
        if before_action is not None:
            before_action()
        start = clock.mark()
        length = None if lengths is None else lengths[microbatch]
        if kind == "F":
            outputs[microbatch] = row.forward(microbatch, inputs.of(microbatch, length))
        else:
            row.backward(microbatch, outputs.pop(microbatch), inputs.output_grad[:, :length])
        marks.append((kind, start, clock.mark()))
    row.end_step()
    return marks


def timed_step(row: Row, clock: Clock) -> StepCost:
    """One step from a drained device to a drained device."""
    work: Workload = row.context.workload
    clear_gradients(row.context.stack, row.context.inputs, work.keep_gradients)
    clock.drain()
    clock.reset_peaks()
    began = time.perf_counter()
    start = clock.mark()
    with Collector() as collector:
        marks = run_step(row, clock)
    end = clock.mark()
    issued = time.perf_counter()
    clock.drain()
    finished = time.perf_counter()
    pinned = row.pinned()
    return StepCost(
        step_ms=clock.ms(start, end),
        wall_ms=(finished - began) * 1e3,
        host_ms=(issued - began) * 1e3,
        collector_ms=collector.seconds * 1e3,
        forward_ms=[clock.ms(first, last) for kind, first, last in marks if kind == "F"],
        backward_ms=[clock.ms(first, last) for kind, first, last in marks if kind != "F"],
        memory=clock.memory(),
        pinned_held=pinned.held,
        pinned_lent_peak=pinned.lent_peak,
        engine=row.stats(),
    )


def forward_active_bytes(row: Row, clock: Clock) -> int:
    """Device bytes between the forward and the backward of a step that has one of each, with every copy so
    far at its end."""
    seen: list[int] = []

    def look() -> None:
        clock.drain()
        seen.append(clock.active_bytes())

    clear_gradients(row.context.stack, row.context.inputs, row.context.workload.keep_gradients)
    run_step(row, clock, look)
    clock.drain()
    return seen[1]


def host_step(row: Row, clock: Clock) -> tuple[float, float]:
    """(milliseconds of one step's Python calls, what the cyclic collector took of them).

    The device is drained before each action, off the clock: an action of W5 is shorter than the launch queue,
    so no call waits for a kernel.
    """
    work = row.context.workload
    clear_gradients(row.context.stack, row.context.inputs, work.keep_gradients)
    clock.drain()
    spent, began = 0.0, time.perf_counter()

    def drained() -> None:
        nonlocal spent, began
        spent += time.perf_counter() - began
        clock.drain()
        began = time.perf_counter()

    with Collector() as collector:
        run_step(row, clock, drained)
        drained()
    return spent * 1e3, collector.seconds * 1e3


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values)) if values else 0.0


def summarise(first: StepCost, samples: Sequence[StepCost], *, vary: bool = False) -> dict[str, Any]:
    """Medians of the timed steps, the largest of their peaks, and every sample. vary: the steps are not of
    one length, so the time of a step is their mean."""
    steps = [sample.step_ms for sample in samples]
    engine = {
        name: median([float(sample.engine[name]) for sample in samples])
        for name in (samples[-1].engine if samples else {})
        if isinstance(samples[-1].engine[name], (int, float))
    }
    return {
        "step_ms": statistics.fmean(steps) if vary else median(steps),
        "step_ms_mean": statistics.fmean(steps),
        "step_ms_min": min(steps),
        "step_ms_max": max(steps),
        "wall_ms": median([sample.wall_ms for sample in samples]),
        "host_ms": median([sample.host_ms for sample in samples]),
        "forward_ms": median([ms for sample in samples for ms in sample.forward_ms]),
        "backward_ms": median([ms for sample in samples for ms in sample.backward_ms]),
        "first_step_ms": first.wall_ms,
        "active_bytes": max(sample.memory["active_peak"] for sample in samples),
        "reserved_bytes": max(sample.memory["reserved_peak"] for sample in samples),
        "first_active_bytes": first.memory["active_peak"],
        "first_reserved_bytes": first.memory["reserved_peak"],
        "pinned_held": max(sample.pinned_held for sample in samples),
        "pinned_lent_peak": max(sample.pinned_lent_peak for sample in samples),
        "engine": engine,
        "first": asdict(first),
        "samples": [asdict(sample) for sample in samples],
    }
