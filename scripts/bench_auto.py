#!/usr/bin/env python3
"""One total for weights, gradients, optimizer state and activations, beside fixed splits of the same model.

    python scripts/bench_auto.py --works full --out full.json              7 B shape, within 24, 48 and 80 GB
    python scripts/bench_auto.py --works lora                              7 B shape, within 6, 12 and 24 GB
    python scripts/bench_auto.py --works moe                               a mixture, within 20 GB
    python scripts/bench_auto.py --works 14b --device-total-gb 70 --rows auto
    python scripts/bench_auto.py --works fits                              a model that fits, beside plain
    python scripts/bench_auto.py --tiny         the whole script on a CPU and the simulated device

Rows: `auto`, once a total, run until its plan is final, then measured; and nine fixed splits, activations
(plain, moved, recomputed) x weights and state (resident, half, host). A split has no total, so each runs
once, and those whose peak is within a total stand beside auto's row of it. One whose weights, gradients
and state alone are more than every total, or that `apply` refuses, is left out and says why. No gradients
are compared.

Reused: blocks and shapes of bench/weights.py and weights_70b.py, the mixture of bench/families.py, the loop
and its samples of bench_model.py, and processes, budget and record of bench/run.py.

One invariant: each row is a process of its own, and a total counts as passed if any step passed it, those
that tried a plan included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import bench  # noqa: F401
import offload
from bench.families import FAMILIES, Setting
from bench.measure import Clock
from bench.options import add_options
from bench.run import (
    Run,
    SkippedError,
    check_names,
    device_of,
    hardware,
    main_of,
    numbers,
    outcome,
    parser_of,
)
from bench.table import Columns, reason_line
from bench.weights import GB, Shape
from bench.weights_70b import Unchecked
from bench_model import Trainer

MODES = {"plain": None, "moved": "hidden_states", "recomputed": "checkpoint"}
PLACES = ("resident", "half", "host")
SPLITS = tuple(f"{mode}-{place}" for mode in MODES for place in PLACES)
_SETTLING, _AUTO_MOST = 4, 40
"""Steps before the timed ones; of auto until its plan is final, but no more than so many."""


@dataclass(frozen=True, slots=True)
class Work:
    """totals: in GB of 1e9. shape: None for the mixture. asked: auto's step over the best split's."""

    totals: tuple[float, ...]
    tokens: int
    shape: Shape | None
    rows: tuple[str, ...] = SPLITS
    asked: float = 1.03


WORKS = {
    "full": Work((24, 48, 80), 16384, Shape(rank=0)),
    "lora": Work((6, 12, 24), 4096, Shape()),
    "moe": Work((20,), 16384, None),
    "14b": Work((70,), 16384, Shape(48, hidden=5120, ffn=13824, heads=40, kv_heads=8, rank=0)),
    "fits": Work((0,), 4096, Shape(8, rank=0), ("plain-resident",), 1.003),
}
"""A total of 0: none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRequest:
    """What the parent asks of one process. total_bytes: of `auto`, 0 for none. largest_bytes: of all totals,
    0 for no bound."""

    work: str
    row: str
    label: str
    total_bytes: int
    largest_bytes: int
    samples: int
    layers: int | None
    tokens: int
    tiny: bool
    host_limit_bytes: int | None = None


class AutoTrainer(Trainer):
    """The loop of bench_model.py on a work's model."""

    def __init__(self, request: AutoRequest, device: torch.device) -> None:
        shape, dtype = WORKS[request.work].shape, torch.float32 if request.tiny else torch.bfloat16
        torch.manual_seed(0)
        self.model: nn.Module
        if shape is None:
            self.model, self._loss = FAMILIES["qwen3_moe"].make(
                Setting(device=device, tiny=request.tiny, config=None, sequence=None, batch=None)
            )
            self.attended, self.layers = 32 * 128, 8
        else:
            if request.tiny:
                shape = Shape(6, hidden=64, ffn=64, heads=4, kv_heads=4, rank=2 if shape.rank else 0)
            elif request.layers is not None:
                shape = Shape(**asdict(shape) | {"layers": request.layers})
            self.model, self._loss = _blocks(shape, 8 if request.tiny else request.tokens, device, dtype)
            self.attended, self.layers = shape.hidden, shape.layers
        self.model.train()
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        self.clock = Clock(device)
        self.samples: list[dict[str, float]] = []

    def flop(self, tokens: int) -> int:
        """Of one step's mathematics, recomputes left out. Of experts those that a token goes to; of frozen
        weights no gradient; embeddings and head, which the mixture's loss leaves out, none."""
        found = 6 * tokens**2 * self.attended * self.layers  # causal: half of all pairs
        for name, each in self.model.named_parameters():
            if "embed" not in name and "lm_head" not in name:
                share = 4 if ".experts." in name else 16  # of 16 experts
                found += (6 if each.requires_grad else 4) * each.numel() * tokens * share // 16
        return found


def _blocks(
    shape: Shape, tokens: int, device: torch.device, dtype: torch.dtype
) -> tuple[nn.Module, Callable[[int], torch.Tensor]]:
    model = Unchecked(shape, device=device, dtype=dtype)
    x = torch.randn(1, tokens, shape.hidden, device=device, dtype=dtype)
    return model, lambda number: model(x).float().square().mean()


def run_row(request: AutoRequest) -> dict[str, Any]:
    """The row's figures, with a status."""
    about = {"work": request.work, "row": request.row, "label": request.label}
    return outcome(about | {"total_bytes": request.total_bytes}, lambda: _measure(request))


def _measure(request: AutoRequest) -> dict[str, Any]:
    device = device_of(request.tiny)
    if request.tiny:
        offload.configure(offload.OffloadConfig(), device="sim", print_summary=False)
    trainer = AutoTrainer(request, device)
    sizes = [(each.nbytes, each.requires_grad) for each in trainer.model.parameters()]
    weights, trained = sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)
    result: dict[str, Any] = {"weight_bytes": weights, "trained_bytes": trained}
    handle: offload.Applied | None = None
    smallest: dict[str, Any] = {"min_numel": 1} if request.tiny else {}
    if request.row == "auto":
        total = weights + 3 * trained if request.tiny else request.total_bytes
        given: dict[str, Any] = {"device_total": f"{total}B"} if request.total_bytes else {}
        if request.host_limit_bytes is not None:
            given["host_limit"] = f"{request.host_limit_bytes}B"
        handle = offload.apply(trainer.model, optimizer=trainer.optimizer, mode="auto", **given, **smallest)
    else:
        handle, result["kept_state_bytes"] = _split(trainer, request, weights, trained, smallest)
    is_auto = request.row == "auto"
    try:
        trainer.ms_of(2 if request.tiny else _SETTLING)
        while is_auto and handle is not None and not handle.explain().is_final:
            if len(trainer.samples) >= (12 if request.tiny else _AUTO_MOST):
                break
            trainer.timed()
        settle = len(trainer.samples)
        times = trainer.ms_of(request.samples)
        ms = statistics.median(times)
        result |= {
            "ms": ms,
            "settle": settle,
            "active_bytes": max(one["active"] for one in trainer.samples[settle:]),
            "active_any_bytes": max(one["active"] for one in trainer.samples),
            "tflop_s": trainer.flop(8 if request.tiny else request.tokens) / ms / 1e9,
            "trace_ms": [one["ms"] for one in trainer.samples],
            "trace_active": [one["active"] for one in trainer.samples],
        }
        if handle is not None and is_auto:
            result |= {"final": handle.explain().is_final, "explained": str(handle.explain())}
    finally:
        if handle is not None:
            handle.remove()
    if request.work == "fits" and is_auto:  # in the same process: 1.003 is less than two differ by
        result["plain_ms"] = statistics.median(trainer.ms_of(3 + request.samples)[3:])
    return result


def _split(
    trainer: AutoTrainer, request: AutoRequest, weights: int, trained: int, smallest: dict[str, Any]
) -> tuple[offload.Applied | None, int]:
    """A fixed split, by hand: half of the weights' bytes and of the state's stay, or all, or none. Returns
    its handle, None where nothing is applied, and the bytes of streamed state that stay."""
    activations, place = request.row.split("-")
    away = {"resident": 0.0, "half": 0.5, "host": 1.0}[place]
    least = round((weights + 3 * trained) * (1 - away))
    if not request.tiny and 0 < request.largest_bytes < least:
        raise SkippedError(f"{least / GB:.1f} GB of weights, gradients and state are more than any total")
    mode: Any = MODES[activations]
    if mode is None and not away:
        return None, 0
    given: dict[str, Any] = {} if mode is None else {"mode": mode}
    if away:
        stay = "host" if away == 1 else f"{weights // 2}B"
        given |= {"weights": stay, "optimizer": trainer.optimizer}
    try:
        handle = offload.apply(trainer.model, **given, **smallest)
    except ValueError as error:  # such as half of weights whose window of two blocks is more
        raise SkippedError(f"apply refuses it: {error}") from error
    optimizer: Any = trainer.optimizer  # a HybridDeviceOptimizer by now, where state is away
    kept = optimizer.keep_on_device(trained) if away == 0.5 else 0  # half of two moments
    return handle, kept


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=180.0)
    options = f"""
    --works text=full,lora,moe,fits  of {", ".join(WORKS)}
    --rows text  of auto, {", ".join(SPLITS)} (all)
    --device-total-gb text  totals in GB of 1e9, as 24,48, instead of a work's own
    --host-limit-gb float  of auto, most pinned bytes (the library's)
    --layers int  instead of a shape's own; not of moe
    --samples int=5  timed steps a row
    """
    add_options(parser, options)
    parsed = parser.parse_args(arguments)
    parsed.works = parsed.works.split(",")
    parsed.rows = None if parsed.rows is None else parsed.rows.split(",")
    check_names(parser, parsed.works, WORKS, "works")
    check_names(parser, parsed.rows or (), ("auto", *SPLITS), "rows")
    parsed.totals = numbers(parser, "--device-total-gb", parsed.device_total_gb)
    return parsed


def requests(name: str, args: argparse.Namespace) -> Iterator[AutoRequest]:
    """Auto's rows first: what a budget leaves out is splits."""
    work = WORKS[name]
    totals = [round(one * GB) for one in args.totals or work.totals]
    pairs = [("auto", total) for total in totals] + [(row, 0) for row in work.rows]
    for row, total in pairs:
        if args.rows is None or row in args.rows:
            yield AutoRequest(
                work=name,
                row=row,
                label=f"{row}@{total / GB:g}" if total else row,
                total_bytes=total,
                largest_bytes=max(totals),
                samples=1 if args.tiny else args.samples,
                layers=args.layers,
                tokens=work.tokens,
                tiny=args.tiny,
                host_limit_bytes=None if args.host_limit_gb is None else round(args.host_limit_gb * GB),
            )


COLUMNS = Columns(
    "work = work | row = label | ms = ms:.1f | active GB = active_bytes:GB "
    "| in any step = active_any_bytes:GB | passed its total = passed | model-TFLOP/s = tflop_s:.0f "
    "| steps before = steps"
)
ASKED = Columns(
    "work = work | within GB = within | asked = asked:.3f | measured = measured:.3f | best split = best "
    "| its ms = best_ms:.1f | auto's ms = ms:.1f | passed = passed | splits = splits"
)


def passed(row: dict[str, Any]) -> str:
    if not row["total_bytes"]:
        return ""
    return "yes" if row["active_any_bytes"] > row["total_bytes"] else "no"


def line(row: dict[str, Any]) -> str:
    if row["status"] != "ok":
        return reason_line([row["work"], row["label"]], row)
    steps = f"{row['settle']}{'' if row.get('final', True) else ', not final'}"
    return COLUMNS.line(row | {"passed": passed(row), "steps": steps})


def compared(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each auto row beside the fastest split that is within its total; for `fits`, beside plain steps of the
    same process."""
    for auto in rows:
        if auto["row"] != "auto" or auto["status"] != "ok":
            continue
        total, best = auto["total_bytes"], ("no split fits, or none ran", None)
        fit = [
            each
            for each in rows
            if each["work"] == auto["work"] and each["row"] != "auto" and each["status"] == "ok"
            if not total or each["active_any_bytes"] <= total
        ]
        if "plain_ms" in auto:
            best = ("plain, same process", auto["plain_ms"])
        elif fit:
            best = min(((each["row"], each["ms"]) for each in fit), key=lambda one: one[1])
        yield {
            "work": auto["work"],
            "total_gb": total / GB,
            "asked": WORKS[auto["work"]].asked,
            "within": f"{total / GB:g}" if total else "none",
            "measured": best[1] and auto["ms"] / best[1],
            "best": best[0],
            "best_ms": best[1],
            "ms": auto["ms"],
            "passed": passed(auto),
            "splits": len(fit),
        }


def run_rows(run: Run) -> None:
    """Every work's rows, then what was asked for."""
    args = run.args
    print(*run.header_lines(hardware()), COLUMNS.header, sep="\n", flush=True)
    for name in args.works:
        for request in requests(name, args):
            about = {"work": name, "row": request.row, "label": request.label}
            about |= {"total_bytes": request.total_bytes, "request": asdict(request)}
            result = run.keep(about | run.measure(request, run_row, here=args.tiny))
            print(line(result), flush=True)
    run.record["asked"] = [*compared(run.results)]
    print("", ASKED.header, *map(ASKED.line, run.record["asked"]), sep="\n", flush=True)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return main_of(__file__, args, arguments, run_rows, run_row)


if __name__ == "__main__":
    sys.exit(main())
