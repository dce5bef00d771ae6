"""Where the host's time goes in a steady step: every Python and C function's own time, in a few classes.

The step runs under cProfile with autograd on the calling thread, where a profiler sees it, and with the
cyclic collector off: `measure.host_step` times the collector without a profiler. A profiler costs time at
each call, so shares are worth more than sums. One invariant: a profiled step is never a timed one.
"""

from __future__ import annotations

import cProfile
import gc
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.measure import Clock, clear_gradients, run_step
from bench.rows import Row

_ROOT = Path(__file__).resolve().parent.parent.parent
_OFFLOAD = f"{_ROOT / 'offload'}/"
_TORCH = f"{Path(torch.__file__).parent}/"  # as functions name it, links unresolved
# torch's own `wait` methods make a stream wait, not the host
_BLOCKING = ("synchronize", "'acquire'", "time.sleep", "'item'", "'tolist'", "'cpu'", "_local_scalar")
# what of torch's Python the model itself does not call: the engine's streams, events and autograd functions
_CALLED_BY_US = (f"{_TORCH}cuda/", f"{_TORCH}autograd/function.py")
STEPS = 2
CLASSES = (
    "Python of offload",
    "C calls from offload",
    "blocked, from offload",
    "Python of torch",
    "autograd's C++ and the model's C calls",
    "blocked, elsewhere",
    "the rest",
)


def _place(code: Any) -> tuple[str, str]:
    """(file, what to print) of a profiled function; a C function has no file."""
    if isinstance(code, str):
        return "", code
    name = code.co_filename
    short = name.removeprefix(f"{_ROOT}/").replace(_TORCH, "torch/")
    return name, f"{short}:{code.co_firstlineno} {code.co_name}"


def _is_ours(file: str) -> bool:
    return file.startswith(_OFFLOAD)


def _class_of(file: str, name: str, caller: str) -> str:
    if file:
        if _is_ours(file):
            return "Python of offload"
        return "Python of torch" if file.startswith(_TORCH) else "the rest"
    blocks = any(word in name for word in _BLOCKING)
    if _is_ours(caller) or caller.startswith(_CALLED_BY_US):
        return "blocked, from offload" if blocks else "C calls from offload"
    return "blocked, elsewhere" if blocks else "autograd's C++ and the model's C calls"


def profile_host(row: Row, clock: Clock) -> dict[str, Any]:
    """Own milliseconds a step by class, by folder of offload/, and of each function with at least 0.1%."""
    context = row.context
    profiler = cProfile.Profile()
    collects = gc.isenabled()
    wall_s = 0.0
    try:
        for _ in range(STEPS):
            clear_gradients(context.stack, context.inputs, context.workload.keep_gradients)
            gc.collect()
            gc.disable()
            clock.drain()
            began = time.perf_counter()
            with torch.autograd.set_multithreading_enabled(False):
                profiler.enable()
                run_step(row, clock)
                profiler.disable()
            wall_s += time.perf_counter() - began
            clock.drain()
    finally:
        profiler.disable()
        if collects:
            gc.enable()
    return _summary(profiler.getstats(), wall_s * 1e3 / STEPS)


def _summary(entries: list[Any], wall_ms: float) -> dict[str, Any]:
    """What `profile_host` returns, from cProfile's entries of all its steps."""
    of_class, folders = dict.fromkeys(CLASSES, 0.0), dict[str, float]()
    functions: dict[tuple[str, str], list[float]] = {}

    def add(file: str, name: str, caller: str, calls: float, own_ms: float) -> None:
        kind = _class_of(file, name, caller)
        of_class[kind] += own_ms
        if _is_ours(file):
            folder = file.removeprefix(_OFFLOAD).rpartition("/")[0] or "."
            folders[folder] = folders.get(folder, 0.0) + own_ms
        found = functions.setdefault((kind, name), [0.0, 0.0])
        found[0] += calls / STEPS
        found[1] += own_ms

    c_own: dict[str, list[float]] = {}  # (calls, own ms) of C functions that no Python caller accounts for
    for entry in entries:
        file, name = _place(entry.code)
        if file:
            add(file, name, "", entry.callcount, entry.inlinetime * 1e3 / STEPS)
        else:
            c_own[name] = [entry.callcount, entry.inlinetime * 1e3 / STEPS]
    for entry in entries:
        caller = _place(entry.code)[0]
        for callee in entry.calls or () if caller else ():
            if isinstance(callee.code, str):
                own_ms = callee.inlinetime * 1e3 / STEPS
                add("", callee.code, caller, callee.callcount, own_ms)
                c_own[callee.code][0] -= callee.callcount
                c_own[callee.code][1] -= own_ms
    for name, (calls, own_ms) in c_own.items():
        if calls > 0:
            add("", name, "", calls, max(0.0, own_ms))
    rows = [
        {"class": kind, "name": name, "calls": calls, "own_ms": own_ms}
        for (kind, name), (calls, own_ms) in functions.items()
    ]
    rows.sort(key=lambda row: -float(row["own_ms"]))
    return {
        "wall_ms": wall_ms,
        "classes": of_class,
        "folders": folders,
        "functions": [row for row in rows if float(row["own_ms"]) >= wall_ms * 1e-3],
    }


def profile_lines(result: Mapping[str, Any], *, longest: int = 40) -> list[str]:
    """The classes, the folders and the functions of most own time of one row."""
    profile, label = result["host_profile"], result.get("label", result["row"])
    alone = result.get("issue_ms")
    lines = [
        f"host profile of {label}, ms a step: {profile['wall_ms']:.1f} under cProfile"
        + (
            f", {alone:.1f} without it, of which the collector {result['issue_collector_ms']:.1f} (off here)"
            if alone is not None
            else ""
        ),
        *(f"  {ms:9.2f}  {name}" for name, ms in profile["classes"].items()),
    ]
    folders = sorted(profile["folders"].items(), key=lambda item: -item[1])
    if folders:
        lines.append("  folders of offload: " + ", ".join(f"{name} {ms:.1f}" for name, ms in folders))
    lines.append("     own ms    calls   us each  function")
    for row in profile["functions"][:longest]:
        each = 1e3 * row["own_ms"] / row["calls"]
        lines.append(
            f"  {row['own_ms']:9.2f} {row['calls']:8.0f} {each:9.2f}  {row['name'][:96]} [{row['class']}]"
        )
    return lines
