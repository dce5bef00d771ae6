"""One optimizer row in this process: alone, in training, or its losses. One invariant: `run` always returns a
dictionary with a status.

alone      gradients are there, the device is idle: time from step() until the new weights are
training   accumulated microbatches; consecutive steps are timed together, since a step of ours ends in the
           next one's forward
losses     of some steps, and a print of the weights at the end
rates      the CPU optimizer beside copies both ways, and the bound that follows
"""

from __future__ import annotations

import gc
import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from bench.child import hardware
from bench.measure import Clock, median
from bench.optim_work import TINY, FusedStack, Made, OptimShape, make_optimizer
from bench.outcome import outcome
from bench.rows import SkippedError

__all__ = ["OptimRequest", "run"]


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
    steps: int = 5
    warmup: int = 3
    tiny: bool = False
    threads: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> OptimRequest:
        return cls(**json.loads(text))

    @property
    def shape(self) -> OptimShape:
        shape = TINY if self.tiny else OptimShape()
        if self.layers is not None:
            shape = replace(shape, layers=self.layers)
        return (
            replace(shape, sequence=self.sequence) if self.sequence is not None and not self.tiny else shape
        )


def run(request: OptimRequest) -> dict[str, Any]:
    def measure() -> dict[str, Any]:
        if not request.tiny and not torch.cuda.is_available():
            raise SkippedError("no CUDA device here")
        return {"alone": _alone, "training": _training, "losses": _losses, "rates": _rates}[request.kind](
            request
        )

    return outcome({"request": asdict(request), "hardware": hardware()}, measure)


def _build(request: OptimRequest) -> tuple[FusedStack, Made, Clock]:
    device = torch.device("cpu" if request.tiny else "cuda")
    gc.collect()
    model = FusedStack(request.shape, device, getattr(torch, request.dtype))
    clock = Clock(device)
    clock.drain()
    options = dict(request.options)
    if request.threads is not None:
        options["cpu_threads"] = request.threads
    if request.dtype != "float32" and request.optimizer.startswith("ours"):
        options["param_update_in_fp32"] = True
    return model, make_optimizer(request.optimizer, model, options), clock


def _facts(model: FusedStack, made: Made, clock: Clock) -> dict[str, Any]:
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "construct_s": made.construct_s,
        "pinned_bytes": made.pinned_bytes(),
        **clock.memory(),
        **made.facts,
    }


def _alone(request: OptimRequest) -> dict[str, Any]:
    """Milliseconds from step() to the last new weight, nothing else running; the host's share of it in step()
    alone.

    A row that needs a backward gets one before, which is not timed: its gradients may be on the host by then,
    the others' are not.
    """
    model, made, clock = _build(request)
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
    return {"step_ms": median(samples), "samples": samples, "issue_ms": median(issued)} | _facts(
        model, made, clock
    )


def _one_step(request: OptimRequest, model: FusedStack, made: Made, number: int) -> list[torch.Tensor]:
    losses = []
    for microbatch in range(request.microbatches):
        last = microbatch == request.microbatches - 1
        with nullcontext() if last else made.no_sync():
            loss = model.loss(number * request.microbatches + microbatch) / request.microbatches
            loss.backward()
        losses.append(loss.detach())
    if request.clip:
        if made.clip is not None:
            made.clip(model)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    made.optimizer.step()
    made.optimizer.zero_grad()
    return losses


def _training(request: OptimRequest) -> dict[str, Any]:
    """Milliseconds a step over consecutive steps, the device drained only before the first and after the
    last."""
    model, made, clock = _build(request)
    for number in range(request.warmup):
        _one_step(request, model, made, number)
    made.wait()
    clock.drain()
    clock.reset_peaks()
    began = time.perf_counter()
    for number in range(request.steps):
        _one_step(request, model, made, request.warmup + number)
    made.wait()
    clock.drain()
    step_ms = (time.perf_counter() - began) * 1e3 / request.steps
    return {"step_ms": step_ms} | _facts(model, made, clock)


def _losses(request: OptimRequest) -> dict[str, Any]:
    model, made, clock = _build(request)
    losses = [
        torch.stack(_one_step(request, model, made, number)).sum().item() for number in range(request.steps)
    ]
    made.wait()
    clock.drain()
    bits = [
        int(parameter.detach().view(torch.uint8).to(torch.int64).sum()) for parameter in model.parameters()
    ]
    return {"losses": losses, "bits": bits} | _facts(model, made, clock)


def _rates(request: OptimRequest) -> dict[str, Any]:
    """What bounds a step with all state off the device: from rates measured with both lanes at work, with the
    CPU and without."""
    from offload import OffloadEngine
    from offload.optim.places import OffloadRates, best_cpu_share
    from offload.optim.split import measure

    if request.tiny:
        rates = OffloadRates(
            cpu_elements_per_s=3.3e9,
            d2h_bytes_per_s=40e9,
            h2d_bytes_per_s=40e9,
            d2h_alone_bytes_per_s=50e9,
            h2d_alone_bytes_per_s=50e9,
        )
    else:
        engine = OffloadEngine(device="cuda")
        half = None if request.dtype == "float32" else getattr(torch, request.dtype)
        measured = [measure(engine, threads=request.threads, half=half) for _ in range(3)]
        rates = OffloadRates(
            **{
                part.name: median([getattr(one, part.name) for one in measured])
                for part in fields(OffloadRates)
            }
        )
    # the weights on the device are the masters: moments travel, or gradients out and weights in
    if request.dtype == "float32":
        share, seconds = best_cpu_share(
            rates, cpu_out_bytes=4, cpu_in_bytes=4, streamed_out_bytes=8, streamed_in_bytes=8
        )
    else:  # masters travel with the moments
        share, seconds = best_cpu_share(
            rates, cpu_out_bytes=2, cpu_in_bytes=2, streamed_out_bytes=12, streamed_in_bytes=12
        )
    return {
        "rates": asdict(rates),
        "best_cpu_share": share,
        "bound_ms_per_g": seconds * 1e12,
        "parameters": request.shape.parameters,
    }
