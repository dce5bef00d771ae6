"""One row from start to end in this process: build the model, run the steps, check the gradients, return
plain numbers.

A step is forwards and backwards as the work has them, an optimizer's step that changes nothing, and
zero_grad(), which frees the gradients. One invariant: `run_row` always returns a dictionary with a status
(bench/run.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

import moe
import offload
from bench import gradients
from bench.measure import Clock
from bench.run import SkippedError, outcome
from mixtures.rows import ROWS, RowSpec, wrap_by_torch
from mixtures.work import Work, tokens_of, zipf_gates
from offload.sizes import bytes_text

_IN_FLIGHT = ("max_spilling_bytes", "max_restoring_bytes")
_MARKED_SETTLING = 8
"""Steps before the timed ones of rows with marks: the plan is of measured times."""
_MOST_AUTO_SETTLING = 40
"""Of mode auto, whose searches for plans run beside the steps."""
_LATE_AUTO = 3
"""Steps after its plan is final."""
ZIPF_SETTLING = 20
"""Steps of the work zipf after which nothing more may be pinned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureRequest:
    """What the parent asks of one process.

    kept: share of saved bytes that stays, for a row with `kept`. total_bytes: for mode auto.
    reference: the file of the gradients' fingerprints, written by the row nothing and read by the others.
    """

    row: str
    work: Work
    samples: int
    kept: float = 1.0
    total_bytes: int | None = None
    host_limit_bytes: int
    reference: str
    gradients: bool = True
    tiny: bool = False


def run_row(request: MixtureRequest) -> dict[str, Any]:
    """The row's figures, with a status."""
    about = {"row": request.row, "label": request.row, "work": request.work.name}
    return outcome(about, lambda: _measure(request))


class Job:
    """A user's loop over the microbatches of one batch. The optimizer's step changes no weight, so that all
    rows have the same ones in every step."""

    def __init__(self, request: MixtureRequest, device: torch.device) -> None:
        self.request, self.work, self.device = request, request.work, device
        self.spec: RowSpec = ROWS[request.row]
        self.model = moe.build_stage_module(
            self.work.config,
            device=device,
            dtype=torch.float32 if request.tiny else torch.bfloat16,
            **self.spec.placement,
        )
        self.model.train()
        self.gates = zipf_gates(self.model) if self.work.zipf else []
        if self.spec.by_torch:
            wrap_by_torch(self.model, self.spec.by_torch, pinned=device.type == "cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.batch = [tokens_of(self.work, number, device) for number in range(self.work.microbatches)]
        self.manager = self._configured(None) if self.spec.is_ours else None
        self.saved_bytes, stays_bytes = self._probed()
        self.limit_bytes = self._limit(stays_bytes)
        if self.limit_bytes is not None:
            self.manager = self._configured(self.limit_bytes)
        self.handle = self._applied()

    def step(self, number: int, after_action: Callable[[], None] | None = None) -> None:
        """The step of this number. Nothing here waits, but for what `after_action` does."""
        manager = None if self.handle is not None else self.manager
        length = self.work.length(number)
        losses: dict[int, torch.Tensor] = {}
        if manager is not None:
            manager.set_order(self.work.actions)
        for kind, _, microbatch in self.work.actions:
            if kind == "F":
                for gate in self.gates:
                    gate.drawn = number * self.work.microbatches + microbatch
                with _announced(manager, microbatch, "F"):
                    losses[microbatch] = self._loss(microbatch, length)
            else:
                with _announced(manager, microbatch, "B"):
                    losses.pop(microbatch).backward()
            if after_action is not None:
                after_action()
        if manager is not None:
            manager.step_end()
        self.optimizer.step()

    def named_gradients(self) -> dict[str, torch.Tensor]:
        named = {name: one.grad for name, one in self.model.named_parameters()}
        if missing := [name for name, grad in named.items() if grad is None]:
            raise RuntimeError(
                f"{len(missing)} of {len(named)} parameters got no gradient, first {missing[0]}"
            )
        return {name: grad for name, grad in named.items() if grad is not None}

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def figures(self) -> dict[str, Any]:
        """Of the step that ended last: pinned bytes, and what the engine says."""
        if self.handle is not None:
            last = self.handle.report().last_step
            return {
                "held": last["host_bytes"],
                "lent": last["host_lent_bytes"],
                "spill_bytes": last["moved_bytes"],
                "stall_ms": last["stall_ms"],
            }
        if self.manager is not None:
            stats = self.manager.stats
            return {
                "held": stats.host_bytes_held,
                "lent": stats.host_bytes_lent_peak,
                "spill_bytes": stats.spill_bytes,
                "stall_ms": stats.stall_ms,
            }
        if self.device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
            return {"held": 0, "lent": 0}
        pinned = torch.cuda.host_memory_stats()
        return {
            "held": int(pinned.get("allocated_bytes.current", 0)),
            "lent": int(pinned.get("active_bytes.peak", 0)),
        }

    @property
    def is_final(self) -> bool:
        """Whether further steps will do what the last one did, as far as that is known."""
        return self.handle is None or self.handle.explain().is_final

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        if self.manager is not None:
            offload.PipelineOffloadManager.close_instance()

    def _loss(self, microbatch: int, length: int) -> torch.Tensor:
        tokens, targets = (part[:, :length] for part in self.batch[microbatch])
        logits = self.model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _configured(self, limit_bytes: int | None) -> Any:
        small: dict[str, Any] = {"min_offloaded_tensor_size": 1}
        small |= {} if limit_bytes is not None else dict.fromkeys(_IN_FLIGHT, 1 << 14)
        limits: dict[str, Any] = {"device_limit_bytes": limit_bytes}
        limits |= small if self.request.tiny else self.spec.limits
        config = offload.OffloadConfig(host_limit_bytes=self.request.host_limit_bytes, **limits)
        manager = offload.configure(
            config, device="sim" if self.device.type == "cpu" else "cuda", print_summary=False
        )
        manager.register_parameters(self.model)
        return manager

    def _applied(self) -> offload.Applied | None:
        if self.spec.total is None:
            return None
        smallest: dict[str, Any] = {"min_numel": 1} if self.request.tiny else {}
        total = f"{self.request.total_bytes}B"
        return offload.apply(self.model, mode="auto", blocks="blocks.*", device_total=total, **smallest)

    def _probed(self) -> tuple[int, int]:
        """Bytes that a microbatch's forward saves for the backward, and those of them that no mark takes."""
        if self.manager is None or self.spec.total is not None:
            saved = self._seen(0)
            return saved, saved
        self.manager.disable_offload()
        with _announced(self.manager, 0, "F"):
            saved = self._seen(0)
        self.manager.enable_offload()
        with _announced(self.manager, 0, "F"):
            self._loss(0, self.work.sequence)  # its graph ends here
        return saved, saved - int(self.manager.step_end().saved_bytes)

    def _seen(self, microbatch: int) -> int:
        """Distinct bytes, of no parameter, that a forward shows to hooks around it."""
        parameters = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        seen: dict[int, torch.UntypedStorage] = {}  # held: the address of a freed one could be another's

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                seen[storage.data_ptr()] = storage
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            self._loss(microbatch, self.work.sequence)
        return sum(storage.nbytes() for storage in seen.values())

    def _limit(self, stays_bytes: int) -> int | None:
        """Of the engine: of the bytes that may be kept, what is left beside those that no mark takes."""
        if not self.spec.kept:
            return None
        kept = round(self.request.kept * self.saved_bytes)
        if kept <= stays_bytes:
            stay = bytes_text(stays_bytes)
            raise SkippedError(f"{stay} are of no mark, and --kept leaves {bytes_text(kept)}")
        return kept - stays_bytes


@contextmanager
def _announced(manager: Any, microbatch: int, kind: str) -> Iterator[None]:
    """Tell the engine that a forward or backward begins and ends, as a pipeline's stage does."""
    if manager is None:
        yield
    elif kind == "F":
        manager.begin_chunk(0, microbatch)
        yield
        manager.end_forward(0, microbatch)
    else:
        manager.begin_backward(0, microbatch, kind)
        yield
        manager.end_backward(0, microbatch, kind)


def _measure(request: MixtureRequest) -> dict[str, Any]:
    if not request.tiny and not torch.cuda.is_available():
        raise SkippedError("no CUDA device here")
    device = torch.device("cpu" if request.tiny else "cuda")
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
    """One step from a drained device to a drained device."""
    clock.drain()
    clock.reset_peaks()
    wall, start = time.perf_counter(), clock.mark()
    job.step(number)
    job.clear()
    end, issued = clock.mark(), time.perf_counter()
    clock.drain()
    return {
        "step_ms": clock.ms(start, end),
        "host_ms": (issued - wall) * 1e3,
        "wall_ms": (time.perf_counter() - wall) * 1e3,
        **clock.memory(),
        **job.figures(),
    }


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
        "pinned_growth": sum(max(0, b["held"] - a["held"]) for a, b in pairwise(timed)),
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

    made, path = prints(), Path(request.reference)
    if request.row == "nothing":
        gradients.save(path, made)
        again = gradients.compare(made, prints())
        same = again["verdict"] == "bitwise"
        return again | {"verdict": "reference" if same else f"not repeatable: {again['verdict']}"}
    return gradients.compare(gradients.load(path), made) if path.exists() else {"verdict": "no reference"}
