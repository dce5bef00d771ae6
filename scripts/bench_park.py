#!/usr/bin/env python3
"""What park and wake take, beside the link alone and what others do: one run, one GPU, each row a process.

    python scripts/bench_park.py                            all rows, an H200 (6 B parameters take 96 GB)
    python scripts/bench_park.py --rows 0.6B,3B,saver,loop,pinned --host-gb 100
    python scripts/bench_park.py --tiny                     the whole script on a CPU and the simulated device

A model of matrices has 16 bytes a parameter: bf16 weights and gradients, fp32 masters and AdamW's moments.

    6B, 0.6B, 3B    all of it, the second of two cycles; the first one, with pinning, beside it
    6B state        gradients and optimizer state only; what is left on the device
    saver           3 B by torch_memory_saver's pause and resume, if it is installed
    loop, pinned    3 B by `p.data = p.data.to("cpu")`, into pageable memory, or into torch's pinned
    cycles          50 cycles with steps between them, of 0.1 B: memory in cycle 3 and 50, and the bits
    ranks           0.6 B on each of two GPUs at once, one budget (needs two)

park and wake are from the call to the last copy's end, park without `release` (the cached memory goes back to
the driver), wake with `allocate`, which runs beside the copies. share: of the link alone, in the same run.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn

import bench  # noqa: F401
import offload
from bench.links import measure_links
from bench.run import (
    Run,
    SkippedError,
    check_names,
    hardware,
    imported,
    main_of,
    outcome,
    parser_of,
)
from bench.table import Columns, cells_line, reason_line
from offload import OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from offload.memory.budget import SharedHostBudget

GB = 1e9
ROWS = {
    "6B": 6e9,
    "6B state": 6e9,
    "0.6B": 0.6e9,
    "3B": 3e9,
    "saver": 3e9,
    "loop": 3e9,
    "pinned": 3e9,
    "cycles": 0.1e9,
    "ranks": 0.6e9,
}
CYCLES, EARLY = 50, 3
COLUMNS = Columns(
    "row = row | park s = park_s:.3f | GB/s = park_rate:.1f | share = park_share:.3f "
    "| release = release_s:.3f | wake s = wake_s:.3f | GB/s = wake_rate:.1f | share = wake_share:.3f "
    "| allocate = allocate_s:.3f | first = first_s:.3f | pin s = first_pin_s:.3f | of GB = bytes:GB "
    "| left MB = left_mb:.0f"
)


@dataclass(frozen=True, slots=True)
class Request:
    row: str
    tiny: bool
    host_gb: float | None

    @property
    def label(self) -> str:
        return self.row


class State(torch.optim.Optimizer):
    """AdamW over fp32 masters, whose weights and gradients are bf16."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["master"] = p.detach().float()
                state["moments"] = [torch.zeros_like(state["master"]) for _ in range(2)]
            first, second = state["moments"]
            gradient = p.grad.float()
            first.lerp_(gradient, 0.1)
            second.mul_(0.99).addcmul_(gradient, gradient, value=0.01)
            state["master"].addcdiv_(first, second.sqrt().add_(1e-8), value=-1e-3)
            p.copy_(state["master"])


def model_of(parameters: float, device: torch.device, tiny: bool) -> tuple[nn.Sequential, State]:
    """Layers of four matrices, 12 width² parameters each; gradients and state are there."""
    width = 32 if tiny else 4096 if parameters > 1e9 else 1024
    layers = 2 if tiny else max(1, round(parameters / (12 * width * width)))
    torch.manual_seed(0)
    shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    made = nn.Sequential()
    for _ in range(layers):
        layer = nn.ParameterList(torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
        made.append(layer)
    optimizer = State(made.parameters())
    step(made, optimizer, 0)
    return made, optimizer


def step(model: nn.Module, optimizer: State, at: int) -> None:
    generator = torch.Generator().manual_seed(at)
    for p in model.parameters():
        scale = torch.randn((), generator=generator).item()
        p.grad = p.detach() * scale
    optimizer.step()


def engine_of(request: Request, device: torch.device, budget: Any = None) -> OffloadEngine:
    limit = None if request.host_gb is None else int(request.host_gb * GB)
    where = SimDevice(executor="early") if request.tiny else str(device)
    return OffloadEngine(OffloadConfig(host_limit_bytes=limit), device=where, budget=budget)


def synchronize(tiny: bool) -> None:
    if not tiny:
        torch.cuda.synchronize()


def timed(call: Callable[[], Any], tiny: bool) -> float:
    synchronize(tiny)
    began = time.perf_counter()
    call()
    synchronize(tiny)
    return time.perf_counter() - began


def device_bytes(tiny: bool) -> int:
    if tiny:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def cycle(
    model: nn.Module, optimizer: State, engine: OffloadEngine, kinds: Any, tiny: bool
) -> dict[str, Any]:
    """One park and one wake."""
    refill, allocated = engine.device.refill, [0.0]

    def counted(storage: torch.UntypedStorage, nbytes: int) -> None:
        began = time.perf_counter()
        refill(storage, nbytes)
        allocated[0] += time.perf_counter() - began

    handles: list[offload.Parked] = []
    park_s = timed(lambda: handles.append(offload.park(model, optimizer, kinds=kinds, engine=engine)), tiny)
    report, left = handles[0].report, device_bytes(tiny)
    engine.device.refill = counted  # type: ignore[method-assign]
    wake_s = timed(handles[0].wake, tiny)
    engine.device.refill = refill  # type: ignore[method-assign]
    return {
        "park_s": park_s - report.release_s,
        "release_s": report.release_s,
        "pin_s": report.pin_s,
        "pinned_bytes": report.pinned_bytes,
        "wake_s": wake_s,
        "allocate_s": allocated[0],
        "left": left,
        "report": str(report),
    }


def parked_row(request: Request) -> dict[str, Any]:
    device = torch.device("cpu" if request.tiny else "cuda:0")
    links = measure_links(tiny=request.tiny)
    if not request.tiny:
        torch.cuda.empty_cache()
    before = device_bytes(request.tiny)  # what the process holds without a model
    model, optimizer = model_of(ROWS[request.row], device, request.tiny)
    engine = engine_of(request, device)
    kinds = ("gradients", "optimizer") if "state" in request.row else ("weights", "gradients", "optimizer")
    weights = sum(p.nbytes for p in model.parameters())
    nbytes = weights * (7 if "state" in request.row else 8)
    cycles = [cycle(model, optimizer, engine, kinds, request.tiny) for _ in range(3)]
    first, second = cycles[0], cycles[1]
    return {
        "bytes": nbytes,
        "links": {"d2h": links.d2h, "h2d": links.h2d},
        "park_share": nbytes / second["park_s"] / links.d2h,
        "wake_share": nbytes / second["wake_s"] / links.h2d,
        "left_beside_weights": second["left"] - before - (weights if "state" in request.row else 0),
        "first": first,
        "second": second,
        "third": cycles[2],
    }


def others_row(request: Request) -> dict[str, Any]:
    """3 B by what others do: seconds of the second of two cycles."""
    device = torch.device("cpu" if request.tiny else "cuda:0")
    saver: Any = None
    if request.row == "saver":
        saver = imported("torch_memory_saver").torch_memory_saver
        saver.hook_mode = "torch"  # its second mode: the first one needs LD_PRELOAD
        with saver.region(enable_cpu_backup=True):
            model, optimizer = model_of(ROWS["3B"], device, request.tiny)
    else:
        model, optimizer = model_of(ROWS["3B"], device, request.tiny)
    nbytes = 8 * sum(p.nbytes for p in model.parameters())

    def tensors() -> Iterator[Tensor]:
        for p in model.parameters():
            assert p.grad is not None
            yield from (p, p.grad, optimizer.state[p]["master"], *optimizer.state[p]["moments"])

    def out() -> None:
        for each in tensors():
            if request.row == "pinned" and not request.tiny:
                host = torch.empty(each.shape, dtype=each.dtype, pin_memory=True)
                each.data = host.copy_(each.data, non_blocking=True)
            else:
                each.data = each.data.to("cpu", non_blocking=request.row == "pinned")

    def back() -> None:
        for each in tensors():
            each.data = each.data.to(device, non_blocking=True)

    times = []
    for _ in range(2):
        park_s = timed(out if saver is None else saver.pause, request.tiny)
        release_s = timed(torch.cuda.empty_cache, request.tiny)
        times.append((park_s, release_s, timed(back if saver is None else saver.resume, request.tiny)))
    return {"bytes": nbytes, "park_s": times[1][0], "release_s": times[1][1], "wake_s": times[1][2]}


def cycles_row(request: Request) -> dict[str, Any]:
    """Memory of the device, pinned and of the process, in cycle 3 and 50, and the bits of a run without."""
    device, count = torch.device("cpu" if request.tiny else "cuda:0"), 6 if request.tiny else CYCLES
    engine = engine_of(request, device)
    runs = []
    memory: dict[int, dict[str, int]] = {}
    for parks in (False, True):
        model, optimizer = model_of(ROWS["cycles"], device, request.tiny)
        for at in range(count):
            if parks:
                offload.park(model, optimizer, engine=engine).wake()
            step(model, optimizer, at + 1)
            if parks and at + 1 in (EARLY, count):
                gc.collect()
                memory[at + 1] = {
                    "device": 0 if request.tiny else torch.cuda.memory_allocated(),
                    "pinned": engine.arena.held_bytes,
                    "lent": engine.arena.lent_bytes,
                    "host": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
                }
        runs.append([p.detach().cpu() for p in model.parameters()])
        del model, optimizer
    same = all(torch.equal(mine, its) for mine, its in zip(*runs, strict=True))
    return {"same bits": same, "early": memory[EARLY], "late": memory[count], "cycles": count}


def _rank(rank: int, request: Request, folder: str, answers: Any, line_up: Any) -> None:
    device = torch.device("cpu" if request.tiny else f"cuda:{rank}")
    if not request.tiny:
        torch.cuda.set_device(device)
    limit = int((request.host_gb or 40) * GB)
    engine = engine_of(request, device, SharedHostBudget(Path(folder) / "budget", limit))
    model, optimizer = model_of(ROWS["ranks"], device, request.tiny)
    links = measure_links(line_up.wait, tiny=request.tiny)
    kinds = ("weights", "gradients", "optimizer")
    found = []
    for _ in range(2):
        line_up.wait()
        found.append(cycle(model, optimizer, engine, kinds, request.tiny))
    used = engine.arena.budget.used_bytes
    line_up.wait()
    nbytes = 8 * sum(p.nbytes for p in model.parameters())
    both = {"d2h": links.d2h, "h2d": links.h2d}
    answers.put({"rank": rank, "bytes": nbytes, "links": both, "used": used, "limit": limit, **found[1]})


def ranks_row(request: Request) -> dict[str, Any]:
    if not request.tiny and torch.cuda.device_count() < 2:
        raise SkippedError("one GPU, and this row is of two")
    import tempfile

    context = multiprocessing.get_context("spawn")
    answers, line_up = context.Queue(), context.Barrier(2)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, request, folder, answers, line_up)) for rank in range(2)
        ]
        for each in ranks:
            each.start()
        found = [answers.get(timeout=600) for _ in ranks]
        for each in ranks:
            each.join()
    return {
        "ranks": found,
        "park_share": min(each["bytes"] / each["park_s"] / each["links"]["d2h"] for each in found),
        "wake_share": min(each["bytes"] / each["wake_s"] / each["links"]["h2d"] for each in found),
        "one budget": all(each["used"] <= each["limit"] for each in found),
    }


def run_row(request: Request) -> dict[str, Any]:
    kinds = {"cycles": cycles_row, "ranks": ranks_row, "saver": others_row, "loop": others_row}
    measure = {**kinds, "pinned": others_row}.get(request.row, parked_row)
    return outcome({"row": request.row, "hardware": hardware()}, lambda: measure(request))


def line_of(result: dict[str, Any]) -> str:
    if result["status"] != "ok":
        return reason_line([result["row"]], result)
    if result["row"] == "cycles":
        text = f"same bits: {result['same bits']}; cycle {EARLY} {result['early']}; last {result['late']}"
        return cells_line(["cycles", text])
    if result["row"] == "ranks":
        shares = f"{result['park_share']:.3f} and {result['wake_share']:.3f} of the link together"
        seconds = ", ".join(
            f"{each['park_s']:.3f} and {each['wake_s']:.3f} s at links of "
            f"{each['links']['d2h'] / GB:.1f} and {each['links']['h2d'] / GB:.1f} GB/s"
            for each in result["ranks"]
        )
        text = f"park and wake at {shares} ({seconds}); one budget kept: {result['one budget']}"
        return cells_line(["ranks", text])
    nbytes, first = result["bytes"], result.get("first", {})
    found = result | result.get("second", result)
    found |= {f"{way}_rate": nbytes / found[f"{way}_s"] / GB for way in ("park", "wake")}
    if "left_beside_weights" in result:
        found["left_mb"] = result["left_beside_weights"] / 1e6
    return COLUMNS.line(found | {"first_s": first.get("park_s"), "first_pin_s": first.get("pin_s")})


def run_rows(run: Run) -> None:
    args = run.args
    print(*run.header_lines(hardware()), COLUMNS.header, sep="\n")
    for row in args.rows.split(","):
        request = Request(row, args.tiny, args.host_gb)
        result = run.measure(request, run_row, here=args.tiny and row != "ranks")
        print(line_of(run.keep({"row": row, **result})), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, row_timeout_s=300)
    parser.add_argument("--rows", default=",".join(ROWS), help="(%(default)s)")
    parser.add_argument("--host-gb", type=float, help="host memory that may be pinned (what is free)")
    args = parser.parse_args(arguments)
    check_names(parser, args.rows.split(","), ROWS)
    return main_of(__file__, args, arguments, run_rows, run_row)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "8")
    sys.exit(main())
