"""One row from start to end in this process: build the stack, run the steps, check the gradients, return
plain numbers.

One invariant: `run` always returns a dictionary with a status (run.py).
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import gradients, links, ours, peers, rows
from bench.measure import (
    Clock,
    StepCost,
    clear_gradients,
    forward_active_bytes,
    host_step,
    median,
    summarise,
    timed_step,
)
from bench.rows import Row, RowContext, RowOptions
from bench.run import device_of, hardware, outcome
from bench.workload import Inputs, Stack, probe_saved_bytes, tiny, workload

ROWS: Mapping[str, Callable[[RowContext], Row]] = {
    "nothing": rows.Nothing,
    "checkpoint": rows.CheckpointRow,
    "selective": rows.SelectiveCheckpoint,
    "save_on_cpu": rows.SaveOnCpu,
    "ours_attention": ours.ours_attention,
    "ours_all": ours.Ours,
    "ours_kept": ours.OursKept,
    "ours_traced": ours.OursTraced,
    "ours_hidden_states": ours.OursHiddenStates,
    "ours_selective": ours.OursSelective,
    "ours_auto": ours.OursAuto,
    "transformers_inputs": rows.SaveInputsOnCpu,
    "trl": peers.TrlRow,
    "megatron_attention": peers.megatron_attention,
    "megatron_all": peers.MegatronRow,
}
DEFAULT_ROWS = {
    "W1": "checkpoint,selective,save_on_cpu,ours_attention,ours_all,trl,megatron_attention,megatron_all",
    "W2": "checkpoint,selective,ours_attention,ours_all,ours_selective,megatron_attention,megatron_all",
    "W3": "checkpoint,ours_hidden_states,transformers_inputs",
    "WV": "checkpoint,ours_all,ours_auto",
    "W5": "checkpoint,ours_attention,ours_all,ours_kept,megatron_attention,megatron_all",
}
"""Rows of each workload by default, beside `nothing`."""
LIMITED_ROWS = ("ours_all", "ours_selective", "ours_auto", "ours_traced")
"""Rows that run once for each device limit."""
_MOST_LATE_STEPS = 60
"""Beyond the warm-up, for a row whose plan takes its time."""
_PLAIN_STEPS = 5
_SETTLED_STEPS = 6
"""After them: what stays is tried anew under the last plan, a step each."""
_SLOW_ROWS = ("save_on_cpu",)
"""Rows whose step takes several times the baseline: five samples tell enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """What the parent asks of one process."""

    row: str
    workload: str
    options: RowOptions
    tiny: bool = False
    layers: int | None = None
    sequence: int | None = None
    samples: int | None = None
    warmup: int | None = None
    gradients: bool = True
    reference: str | None = None
    """File of the baseline's gradient prints: written by the row "nothing", read by the others."""
    label: str = ""
    """The row's name in the table, with its limit."""


def run(request: RowRequest) -> dict[str, Any]:
    """The row's figures; "links" measures the link's rates instead."""
    about = {"row": request.row, "workload": request.workload, "options": asdict(request.options)}
    return outcome(about, lambda: _links(request) if request.row == "links" else _measure(request))


def _links(request: RowRequest) -> dict[str, Any]:
    device_of(request.tiny)
    return {"hardware": hardware(), "links": asdict(links.measure_links(tiny=request.tiny))}


def context_of(request: RowRequest, clock: Clock) -> RowContext:
    """The model on the device, and the allocator as a fresh process would find it."""
    make = tiny if request.tiny else workload
    work = make(request.workload, layers=request.layers, sequence=request.sequence)
    device = torch.device("cpu" if request.tiny else "cuda")
    dtype = torch.float32 if request.tiny else torch.bfloat16
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    stack, inputs = Stack(work.shape, device, dtype), Inputs(work.shape, device, dtype)
    clear_gradients(stack, inputs, work.keep_gradients)
    layer_bytes = probe_saved_bytes(stack, inputs.of(0), request.options.min_elements)
    clock.drain()
    context = RowContext(
        workload=work,
        stack=stack,
        inputs=inputs,
        device=device,
        options=request.options,
        layer_bytes=layer_bytes,
        resident_bytes=int(torch.cuda.memory_stats()["active_bytes.all.current"]) if clock.cuda else 0,
    )
    if clock.cuda:
        torch.cuda.empty_cache()  # the probe's blocks
    return context


def _measure(request: RowRequest) -> dict[str, Any]:
    clock = Clock(device_of(request.tiny))
    context = context_of(request, clock)
    work, layer_bytes = context.workload, context.layer_bytes
    with rows.opened(ROWS[request.row](context)) as row:
        result = _steps(request, row, clock)
    if work.host_samples and request.row != "nothing":
        result["plain_ms"] = _plain_ms(context, clock)
    result |= {
        "layer_bytes": {name: asdict(group) for name, group in layer_bytes.items()},
        "resident_bytes": context.resident_bytes,
        "reserve_ms": row.reserve_ms,
        "saved_limit_bytes": getattr(row, "limit_bytes", None),
        "bound_cap_bytes": getattr(row, "bound_cap_bytes", getattr(row, "limit_bytes", None)),
        "chunk_bytes": getattr(row, "chunk_bytes", None),
        "moves_all_groups": row.moves_all_groups,
        "notes": row.notes,
        "shape": asdict(work.shape),
        "actions": [list(action) for action in work.actions],
    }
    return result


def _steps(request: RowRequest, row: Row, clock: Clock) -> dict[str, Any]:
    work = row.context.workload
    samples = request.samples or (min(5, work.samples) if request.row in _SLOW_ROWS else work.samples)
    warmup = request.warmup if request.warmup is not None else max(work.warmup, row.settling_steps)
    vary = work.fewest_microbatches is not None
    first = numbered_step(row, clock, -1)
    settling = [numbered_step(row, clock, -2 - number) for number in range(warmup)]
    if request.warmup is None:
        settling += _settle(row, clock, -2 - warmup)
    # rows that settle longer are timed in the same steps
    result = summarise(first, [numbered_step(row, clock, number) for number in range(samples)], vary=vary)
    result["varies"] = vary
    # a total is to hold while a plan is still tried, too
    result["settling_active_bytes"] = [step.memory["active_peak"] for step in settling if step.memory]
    result["pinned"] = result["pinned_held"]
    if len(work.actions) == 2:
        result["forward_active_bytes"] = forward_active_bytes(row, clock)
    result["own_bound_ms"] = getattr(row, "bound_ms", None)
    if work.host_samples:
        drained = [host_step(row, clock) for _ in range(work.host_samples)]
        timed = [(sample["host_ms"], sample["collector_ms"]) for sample in result["samples"]]
        # each is an upper bound: a timed step may wait for the launch queue, and a machine is busy elsewhere
        result["issue_ms"], result["issue_collector_ms"] = min(drained + timed)
        result["drained_host_ms"] = [ms for ms, _ in drained]
    if isinstance(row, ours.OursTraced):
        result["tracing"] = _traced(row, clock, samples)
    if request.gradients and request.reference is not None:
        result["gradients"] = gradients.judged(
            Path(request.reference),
            lambda: gradients.gradient_prints(row, clock),
            is_reference=request.row == "nothing",
            repeat=len(work.actions) == 2,
        )
    return result


def _traced(row: Row, clock: Clock, samples: int) -> dict[str, float]:
    """What a step costs inside `offload.tracing()`, and without, in turns; and what it writes."""
    import offload

    costs: dict[bool, list[StepCost]] = {False: [], True: []}
    for number in range(samples):
        costs[False].append(numbered_step(row, clock, number))
        with offload.tracing() as trace:
            costs[True].append(numbered_step(row, clock, number))
    with tempfile.TemporaryDirectory() as folder:
        trace.save(Path(folder) / "step.json")
        nbytes = (Path(folder) / "step.json").stat().st_size
    return {
        "step_ms": median([cost.step_ms for cost in costs[True]]),
        "untraced_step_ms": median([cost.step_ms for cost in costs[False]]),
        "host_ms": median([cost.host_ms for cost in costs[True]]),
        "untraced_host_ms": median([cost.host_ms for cost in costs[False]]),
        "spans": len(trace.timeline.spans),
        "file_bytes": nbytes,
    }


def _plain_ms(context: RowContext, clock: Clock) -> float:
    """A step of the row "nothing" in this process, after the row's own: where the host sets the pace, two
    processes of one machine differ by more than half."""
    with rows.opened(ROWS["nothing"](context)) as row:
        numbered_step(row, clock, -1)
        return median([numbered_step(row, clock, number).step_ms for number in range(_PLAIN_STEPS)])


def _settle(row: Row, clock: Clock, number: int) -> list[StepCost]:
    """Make steps until the row needs no more, if it needs any, and some under what it has settled on; their
    costs. number: of the first."""
    steps: list[StepCost] = []
    if row.is_settled:
        return steps
    last = number - _MOST_LATE_STEPS
    while not row.is_settled and number > last:
        steps.append(numbered_step(row, clock, number))
        number -= 1
    return steps + [numbered_step(row, clock, number - later) for later in range(_SETTLED_STEPS)]


def numbered_step(row: Row, clock: Clock, number: int) -> StepCost:
    """One timed step, of the lengths of this number."""
    row.context.step = number
    return timed_step(row, clock)
