"""One row from start to end in this process: build the job, run the steps, check the gradients, return plain
numbers.

After each step zero_grad() frees the gradients. One invariant: `run_row` always returns a dictionary with a
status (bench/run.py).
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench import gradients
from bench.measure import Clock
from bench.run import device_of, outcome
from mixtures.job import Job, MixtureRequest
from mixtures.work import Work

__all__ = ["run_row"]

_MARKED_SETTLING = 8
"""Steps before the timed ones of rows with marks: the plan is of measured times."""
_MOST_AUTO_SETTLING = 40
"""Of mode auto, whose searches for plans run beside the steps."""
_LATE_AUTO = 3
"""Steps after its plan is final."""
ZIPF_SETTLING = 20
"""Steps of the work zipf after which nothing more may be pinned."""


def run_row(request: MixtureRequest) -> dict[str, Any]:
    """The row's figures, with a status."""
    about = {"row": request.row, "label": request.row, "work": request.work.name}
    return outcome(about, lambda: _measure(request))


def _measure(request: MixtureRequest) -> dict[str, Any]:
    device = device_of(request.tiny)
    clock = Clock(device)
    job = Job(request, device)
    clock.drain()
    if clock.cuda:
        torch.cuda.empty_cache()  # of the probes: the first step finds the allocator as a fresh process would
    resident_bytes = clock.active_bytes()
    try:
        first = _step(job, clock, 0)
        settling = [_step(job, clock, number) for number in range(1, 1 + _settling(job, request))]
        while not job.is_final and len(settling) < _MOST_AUTO_SETTLING:
            settling.append(_step(job, clock, len(settling) + 1))
        if job.handle is not None:
            settling += [_step(job, clock, len(settling) + 1) for _ in range(_LATE_AUTO)]
        began = 1 if request.work.zipf else len(settling) + 1
        samples = [_step(job, clock, began + number) for number in range(request.samples)]
        result = _summary(first, samples, request.work)
        result |= {
            "resident_bytes": resident_bytes,
            "saved_bytes": job.saved_bytes,
            "limit_bytes": job.limit_bytes,
            "total_bytes": request.total_bytes if job.handle is not None else None,
            "settling": len(settling) + 1,
            "shape": asdict(request.work.config),
        }
        if request.work.microbatches == 1:
            result["forward_active_bytes"] = _forward_active_bytes(job, clock)
        if job.handle is not None:
            result["explained"] = str(job.handle.explain())
        if request.gradients:
            result["gradients"] = _gradients(request, job, clock)
    finally:
        job.close()
    return result


def _settling(job: Job, request: MixtureRequest) -> int:
    if request.work.zipf:
        return 0
    return max(request.work.warmup, 2 if request.tiny else _MARKED_SETTLING if job.spec.moves else 0)


def _step(job: Job, clock: Clock, number: int) -> dict[str, Any]:
    def step() -> None:
        job.step(number)
        job.clear()

    return {**clock.timed(step), **job.figures()}


def _summary(first: dict[str, Any], samples: list[dict[str, Any]], work: Work) -> dict[str, Any]:
    timed = samples[ZIPF_SETTLING - 1 :] if work.zipf and len(samples) >= ZIPF_SETTLING else samples
    engine = {name: statistics.median(one[name] for one in timed) for name in timed[0] if name in _ENGINE}
    return {
        "step_ms": statistics.median(one["step_ms"] for one in timed),
        "step_ms_max": max(one["step_ms"] for one in timed),
        "host_ms": statistics.median(one["host_ms"] for one in timed),
        "first_step_ms": first["wall_ms"],
        "active_bytes": max(one["active_peak"] for one in timed),
        "reserved_bytes": max(one["reserved_peak"] for one in timed),
        "pinned_held": max(one["held"] for one in timed),
        "pinned_lent_peak": max(one["lent"] for one in timed),
        "pinned_growth": sum(max(0, b["held"] - a["held"]) for a, b in pairwise(timed))
        if work.zipf
        else None,
        "engine": engine,
        "samples": samples,
    }


_ENGINE = ("spill_bytes", "stall_ms")


def _forward_active_bytes(job: Job, clock: Clock) -> int:
    """Active device bytes between the forward and the backward, with every copy so far at its end."""
    seen: list[int] = []

    def look() -> None:
        clock.drain()
        seen.append(clock.active_bytes())

    job.step(0, look)
    job.clear()
    clock.drain()
    return seen[0]


def _gradients(request: MixtureRequest, job: Job, clock: Clock) -> dict[str, Any]:
    """One step more, under deterministic kernels; its gradients beside those of the row nothing."""

    def prints() -> dict[str, Any]:
        with gradients.deterministic():
            job.step(0)
            clock.drain()
        found = gradients.prints_of(job.named_gradients())
        job.clear()
        return found

    is_reference = request.row == "nothing"
    return gradients.judged(Path(request.reference), prints, is_reference=is_reference, repeat=True)
