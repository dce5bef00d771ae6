"""One optimizer row in this process: alone, in training, or its losses. One invariant: `run` always returns a
dictionary with a status.

alone      gradients are there, the device is idle: time from step() until the new weights are
training   accumulated microbatches; consecutive steps are timed together, since a step of ours ends in the
           next one's forward
losses     of some steps, and a print of the weights at the end
rates      copies both ways at once, and the bound that follows
"""

from __future__ import annotations

import gc
import json
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
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
    """The bound of a step with all state off the device: streamed bytes over the rate of both lanes."""
    from offload import OffloadEngine
    from offload.policy.actions import Rates

    if request.tiny:
        rates = Rates(d2h_bytes_per_s=50e9, h2d_bytes_per_s=50e9, duplex_bytes_per_s=100e9)
    else:
        engine = OffloadEngine(device="cuda")
        engine.reserve_host(256 << 20)
        measured = [engine.measure_link() for _ in range(3)]
        rates = sorted(
            (one for one in measured if one is not None), key=lambda one: one.duplex_bytes_per_s or 0
        )[1]
        engine.close()
    # in float32 the weights on the device are the masters and two moments travel; else masters travel too
    bytes_each_way = 8 if request.dtype == "float32" else 12
    assert rates.duplex_bytes_per_s is not None
    return {
        "rates": {name.removesuffix("_bytes_per_s"): value for name, value in asdict(rates).items()},
        "bound_ms_per_g": 2 * bytes_each_way * 1e12 / rates.duplex_bytes_per_s,
        "parameters": request.shape.parameters,
    }
