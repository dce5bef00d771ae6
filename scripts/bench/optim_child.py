"""One optimizer row in this process. One invariant: `run` always returns a dictionary with a status.

alone      gradients are there, the device is idle: time from step() until the new weights are
training   accumulated microbatches; consecutive steps are timed together, since a step of ours may end in the
           next one's forward. With or without groups of activations that leave beside the optimizer
rates      copies both ways at once, and the bound that follows
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bench import links
from bench.gradients import fingerprint
from bench.measure import Clock, median
from bench.optim_work import TINY, FusedStack, LeavingActivations, Made, OptimShape, make_optimizer
from bench.run import device_of, hardware, outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimRequest:
    """What the parent asks of one process."""

    kind: str
    optimizer: str = ""
    dtype: str = "float32"
    layers: int | None = None
    sequence: int | None = None
    microbatches: int = 8
    clip: bool = False
    groups: str = ""
    """"one" or "two": the blocks' attention leaves, on the optimizer's pair of lanes or on another one."""
    steps: int = 5
    warmup: int = 3
    tiny: bool = False

    @property
    def shape(self) -> OptimShape:
        shape = TINY if self.tiny else OptimShape()
        given = {"layers": self.layers, "sequence": None if self.tiny else self.sequence}
        return replace(shape, **{name: value for name, value in given.items() if value is not None})


def run(request: OptimRequest) -> dict[str, Any]:
    kinds = {"alone": _alone, "training": _training, "rates": _rates}
    about = {"request": asdict(request), "hardware": hardware()}
    return outcome(about, lambda: kinds[request.kind](request, device_of(request.tiny)))


@dataclass(slots=True, kw_only=True)
class _Job:
    model: FusedStack
    made: Made
    clock: Clock
    leaving: LeavingActivations | None


def _build(request: OptimRequest, device: torch.device) -> _Job:
    gc.collect()
    model = FusedStack(request.shape, device, getattr(torch, request.dtype))
    clock = Clock(device)
    clock.drain()
    masters = request.dtype != "float32" and request.optimizer.startswith("ours")
    options = {"param_update_in_fp32": True} if masters else {}
    leaving = LeavingActivations(model, request.microbatches) if request.groups else None
    engine = leaving.engine if leaving is not None and request.groups == "one" else None
    made = make_optimizer(request.optimizer, model, options, engine)
    return _Job(model=model, made=made, clock=clock, leaving=leaving)


def _facts(job: _Job) -> dict[str, Any]:
    return {
        "parameters": sum(parameter.numel() for parameter in job.model.parameters()),
        "construct_s": job.made.construct_s,
        "pinned_bytes": job.made.pinned_bytes(),
        **job.clock.memory(),
        **job.made.facts,
    }


def _alone(request: OptimRequest, device: torch.device) -> dict[str, Any]:
    """Milliseconds from step() to the last new weight, nothing else running; the host's share of it in step()
    alone.

    A row that needs a backward gets one before, which is not timed: its gradients may be on the host by then,
    the others' are not.
    """
    job = _build(request, device)
    model, made, clock = job.model, job.made, job.clock
    generator = torch.Generator(device=next(model.parameters()).device).manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(
            parameter.shape, device=parameter.device, dtype=parameter.dtype, generator=generator
        ).mul_(1e-3)
    clock.drain()
    clock.reset_peaks()
    samples, issued = [], []
    for number in range(request.warmup + request.steps):
        if made.needs_backward:
            gradients = [parameter.grad for parameter in model.parameters()]
            made.optimizer.zero_grad()
            torch.autograd.backward([parameter * 1.0 for parameter in model.parameters()], gradients)
            del gradients
            clock.drain()
        began = time.perf_counter()
        made.optimizer.step()
        returned = time.perf_counter()
        made.wait()
        clock.drain()
        if number >= request.warmup:
            samples.append((time.perf_counter() - began) * 1e3)
            issued.append((returned - began) * 1e3)
    return {"step_ms": median(samples), "samples": samples, "issue_ms": median(issued)} | _facts(job)


def _one_step(request: OptimRequest, job: _Job, number: int) -> None:
    made, leaving = job.made, job.leaving
    if leaving is not None:
        leaving.begin_step()
    for microbatch in range(request.microbatches):
        last = microbatch == request.microbatches - 1
        with nullcontext() if last else made.no_sync():
            with leaving.forward(microbatch) if leaving is not None else nullcontext():
                loss = job.model.loss(number * request.microbatches + microbatch) / request.microbatches
            with leaving.backward(microbatch) if leaving is not None else nullcontext():
                loss.backward()
    if request.clip:
        if made.clip is not None:
            made.clip(job.model)
        else:
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
    made.optimizer.step()
    made.optimizer.zero_grad()
    if leaving is not None:
        leaving.end_step()


def _training(request: OptimRequest, device: torch.device) -> dict[str, Any]:
    """Milliseconds a step over consecutive steps, the device drained only before the first and after the
    last."""
    job = _build(request, device)
    for number in range(request.warmup):
        _one_step(request, job, number)
    job.made.wait()
    job.clock.drain()
    job.clock.reset_peaks()
    began = time.perf_counter()
    for number in range(request.steps):
        _one_step(request, job, request.warmup + number)
    job.made.wait()
    job.clock.drain()
    step_ms = (time.perf_counter() - began) * 1e3 / request.steps
    bits = [int(fingerprint(parameter)) for parameter in job.model.parameters()]
    found = {"step_ms": step_ms, "bits": bits} | _facts(job)
    job.made.close()
    if job.leaving is not None:
        found["groups"] = job.leaving.figures()
        job.leaving.close()
    return found


def _rates(request: OptimRequest, device: torch.device) -> dict[str, Any]:
    """The link's rates, and the bound of a step with all state off the device: its bytes at duplex rate."""
    rates = links.measure_links(tiny=request.tiny)
    # in float32 the weights on the device are the masters and two moments travel; else masters travel too
    bytes_each_way = 8 if request.dtype == "float32" else 12
    return {
        "links": asdict(rates),
        "bound_ms": 2e3 * bytes_each_way * request.shape.parameters / rates.duplex,
    }
