#!/usr/bin/env python3
"""One line of `offload.apply` on models that nobody tuned, beside what a user writes with torch alone: time
and memory of a training step, each model as its library builds it. One table, one run, one GPU.

    python scripts/bench_model.py --models six --rows rule,auto --total-number 1 --out six.json
    python scripts/bench_model.py --models own --rows rule,auto --total-number 1 --out own.json
    python scripts/bench_model.py --models gemma3,t5 --rows plain,gc,torch_checkpoint,rule,auto
    python scripts/bench_model.py --models whisper --device-total-gb 9.8 --rows rule,auto,rule,auto
    python scripts/bench_model.py --rows plain,gc,auto --device-total-gb 14 --gradients       a Llama
    python scripts/bench_model.py --config my/config.json --sequence 4096 --batch 2
    python scripts/bench_model.py --models llama8b --device-total-gb 32 --rows fsdp2,auto_all,trainstream
    python scripts/bench_model.py --models six,own --tiny       on a CPU, for the script's own sake

What the models are: bench/families.py; `six` and `own` are names for several. Rows: `plain`, nothing is
offloaded; `gc`, the model's own checkpointing; `torch_checkpoint`, torch's non-reentrant checkpoint around
each block; `rule`, the same around all but the last k blocks, the largest k whose step fits the total, found
by real steps (bench/rule.py); `trl`, `fsdp2` and `trainstream`, other projects (bench/model_peers.py);
`auto`, `auto_all`, which moves weights, gradients and optimizer state, too, and the rest, one line of
`offload.apply`.

A step is forward, backward, optimizer.step() and zero_grad(), from a drained device to a drained device, on
the host's clock. Active bytes are the peak of torch's `active_bytes.all` over a whole step. Each row runs in
a process of its own; one that fails, runs out of memory or takes too long has a line that says so. A row may
be named twice, to see how far two processes differ.

With --gradients, weights do not change and the gradients of one more step, under deterministic kernels, are
compared bit for bit with those of `plain`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import bench  # noqa: F401
import offload
from bench import gradients, model_table
from bench.families import FAMILIES, GROUPS, LLAMA, Setting
from bench.measure import Clock
from bench.model_peers import PEERS, peer
from bench.options import add_options
from bench.rule import Rule
from bench.run import (
    Run,
    SkippedError,
    check_names,
    check_positive,
    device_of,
    hardware,
    main_of,
    numbers,
    outcome,
    parser_of,
)

GB = 1e9
_OWN_CHECKPOINTING: dict[str, dict[str, Any]] = {
    "gc": {},
    "every_second": {"every_n_layers": 2},
    "transformers_offload": {"offload": True},
}
"""Rows of the library's own checkpointing, by what transformers' gets."""
_WITHIN = ("rule", "auto", "auto_all", "trainstream")
"""Rows that have a total."""
_MODES = ("checkpoint", "hidden_states")
"""Rows of `offload.apply` without a total, which are modes."""
ROWS = ("plain", *_OWN_CHECKPOINTING, "torch_checkpoint", *PEERS, *_MODES, *_WITHIN[:3])
_SETTLING, _AUTO_LEAST, _AUTO_MOST, _AUTO_S = 4, 24, 90, 32.0
"""Steps before the timed ones. Of auto, at least so many, then until its plan is final, but no more, and not
for longer."""
_EXPLAINED_LINES = 40
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What the parent asks of one process.

    model     of families.FAMILIES
    row       of ROWS; label: with its total
    total_bytes       of all active bytes, for `rule` and `auto`
    host_limit_bytes  most pinned bytes; None leaves the library's default
    config, sequence, batch   of the models "llama" and "config"
    reference     file of the gradients' fingerprints: written by the row "plain", read by the others
    beside_plain  also time plain steps in this process, after the row's own
    """

    model: str
    row: str
    label: str
    total_bytes: int | None = None
    host_limit_bytes: int | None = None
    samples: int = 5
    config: dict[str, Any] | None = None
    sequence: int | None = None
    batch: int | None = None
    reference: str = ""
    gradients: bool = False
    beside_plain: bool = False
    tiny: bool = False


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=75.0)
    options = f"""
    --models text  of {", ".join((*GROUPS, *FAMILIES))} (llama; config, where --config is given)
    --rows text=plain,rule,auto  of {", ".join(ROWS)}
    --device-total-gb text  totals in GB of 1e9, as 14,19, instead of the model's two
    --total-number int  1 or 2: one of the model's two (both)
    --config path  a config.json of a causal language model
    --layers int  of llama or --config, instead of its num_hidden_layers
    --sequence int=16384  tokens, of the same
    --batch int=1  sequences a step, of the same
    --host-limit-gb float  most pinned bytes (the library's default)
    --samples int=5  timed steps a row
    --gradients  compare gradients; weights do not change
    --beside-plain  time plain steps in each row's process, after its own
    """
    add_options(parser, options)
    parsed = parser.parse_args(arguments)
    named = (parsed.models or ("llama" if parsed.config is None else "config")).split(",")
    parsed.models = [model for name in named if name for model in GROUPS.get(name, (name,))]
    parsed.rows = [name for name in parsed.rows.split(",") if name]
    check_names(parser, parsed.models, FAMILIES, "models")
    check_names(parser, parsed.rows, ROWS, "rows")
    if parsed.total_number not in (None, 1, 2) or (parsed.total_number and parsed.device_total_gb):
        parser.error(
            "--total-number is 1 or 2, one of the model's own totals; leave it out where totals are given"
        )
    parsed.totals_gb = numbers(parser, "--device-total-gb", parsed.device_total_gb)
    if parsed.config is not None and not parsed.config.is_file():
        parser.error(f"--config {parsed.config} is no file; give the config.json of a model of transformers")
    if "config" in parsed.models and parsed.config is None:
        parser.error("the model config needs --config FILE")
    check_positive(parser, parsed, "sequence", "batch", "samples", "layers")
    return parsed


def request_for(
    model: str, row: str, total_bytes: int | None, args: argparse.Namespace, folder: Path
) -> ModelRequest:
    config = json.loads(args.config.read_text()) if model == "config" else None
    if model == "llama" or (config is not None and args.layers is not None):
        layers = {} if args.layers is None else {"num_hidden_layers": args.layers}
        config = (LLAMA if config is None else config) | layers
    return ModelRequest(
        model=model,
        row=row,
        label=row if total_bytes is None else f"{row}@{total_bytes / GB:.4g}",
        total_bytes=total_bytes,
        host_limit_bytes=None if args.host_limit_gb is None else round(args.host_limit_gb * GB),
        samples=2 if args.tiny else args.samples,
        config=config,
        sequence=args.sequence,
        batch=args.batch,
        reference=str(folder / f"reference-{model}.pt"),
        gradients=args.gradients,
        beside_plain=args.beside_plain,
        tiny=args.tiny,
    )


class Trainer:
    """A user's loop. Steps are recorded as they end."""

    def __init__(self, request: ModelRequest, device: torch.device) -> None:
        family = FAMILIES[request.model]
        setting = Setting(
            device=device,
            tiny=request.tiny,
            config=request.config,
            sequence=request.sequence,
            batch=request.batch,
        )
        torch.manual_seed(0)
        self.model, self._loss = family.make(setting)
        self.model.train()
        self.optimizer = family.optimizer(list(self.model.parameters()), device)
        if request.gradients:
            for group in self.optimizer.param_groups:
                group["lr"] = 0.0
        self.clock = Clock(device)
        self.samples: list[dict[str, float]] = []

    around: AbstractContextManager[Any] = nullcontext()
    """Of each forward and backward."""

    def backward(self, number: int = 0) -> None:
        torch.manual_seed(number)
        with self.around:
            self._loss(number).backward()

    def step(self, number: int = 0) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self) -> dict[str, float]:
        """One more step, and its record: milliseconds, those of the Python calls, and peaks in bytes."""
        self.clock.reset_peaks()
        self.clock.drain()
        began = time.perf_counter()
        self.step(len(self.samples))
        issued = time.perf_counter()
        self.clock.drain()
        ended = time.perf_counter()
        peaks = self.clock.memory()
        self.samples.append(
            {
                "ms": (ended - began) * 1e3,
                "host_ms": (issued - began) * 1e3,
                "active": peaks["active_peak"],
                "reserved": peaks["reserved_peak"],
            }
        )
        return self.samples[-1]

    def ms_of(self, count: int) -> list[float]:
        return [self.timed()["ms"] for _ in range(count)]


def run_row(request: ModelRequest) -> dict[str, Any]:
    """The row's figures, with a status."""
    about = {"model": request.model, "row": request.row, "label": request.label}
    return outcome(about, lambda: _measure(request))


def _measure(request: ModelRequest) -> dict[str, Any]:
    trainer = Trainer(request, device_of(request.tiny))
    result: dict[str, Any] = {"parameters": sum(one.numel() for one in trainer.model.parameters())}
    own_hooks, handle, undo = _hooks(trainer.model), None, lambda: None
    if request.row in _OWN_CHECKPOINTING:
        undo = _own_checkpointing(trainer.model, _OWN_CHECKPOINTING[request.row])
    elif request.row in ("rule", "torch_checkpoint"):
        rule = Rule(trainer.model)
        undo = rule.remove
        if request.row == "rule":
            result |= _choose(rule, trainer, request)
        result |= {"blocks": len(rule.blocks), "plain_blocks": rule.num_plain}
    elif request.row in PEERS:
        used = peer(request.row, trainer.model, trainer.optimizer, request.total_bytes)
        trainer.model, trainer.optimizer = used.model, used.optimizer
        trainer.around = used.around or nullcontext()
    elif request.row != "plain":
        handle = _apply(trainer, request)
        undo = handle.remove
    is_auto = request.row in ("auto", "auto_all")
    _settle(trainer, handle if is_auto else None, request)
    settle = len(trainer.samples)
    trainer.ms_of(request.samples)
    result |= _figures(trainer.samples, settle) | {"hooks": _hooks(trainer.model) - own_hooks}
    if handle is not None:
        last = handle.report().last_step
        result |= {"pinned_held": last["host_bytes"], "pinned_lent_peak": last["host_lent_bytes"]}
        result["engine"] = {"spill_bytes": last["moved_bytes"], "stall_ms": last["stall_ms"]}
        result["report"] = str(handle.report())
        if is_auto:
            explained = handle.explain()
            result |= {"final": explained.is_final, "explained": str(explained)}
    if request.gradients:
        result["gradients"] = _gradients(request, trainer)
    if request.beside_plain and request.row != "plain":
        undo()
        result["plain_ms"] = statistics.median(trainer.ms_of(3 + request.samples)[3:])
    return result


def _settle(trainer: Trainer, auto: offload.Applied | None, request: ModelRequest) -> None:
    if auto is None:
        trainer.ms_of(2 if request.tiny else _SETTLING)
        return
    least, most = (4, 8) if request.tiny else (_AUTO_LEAST, _AUTO_MOST)
    ends = time.perf_counter() + _AUTO_S
    trainer.ms_of(least)
    while len(trainer.samples) < most and time.perf_counter() < ends and not auto.explain().is_final:
        trainer.timed()


def _choose(rule: Rule, trainer: Trainer, request: ModelRequest) -> dict[str, Any]:
    """Find the rule's k; the steps that it takes are forgotten. Returns what a step that recomputes every
    block takes, of the steps before."""
    assert request.total_bytes is not None
    recomputing = trainer.ms_of(1 if request.tiny else 4)[-3:]
    found = {
        "recomputed_ms": statistics.median(recomputing),
        "recomputed_bytes": max(one["active"] for one in trainer.samples),
    }

    def active_of_step() -> int:
        try:
            return round(trainer.timed()["active"])
        except torch.OutOfMemoryError:
            trainer.optimizer.zero_grad()
            torch.cuda.empty_cache()
            raise

    rule.choose(active_of_step, request.total_bytes)
    trainer.samples.clear()
    if trainer.clock.cuda:
        torch.cuda.empty_cache()  # reserved bytes are then those of steps with this k
    return found


def _figures(samples: list[dict[str, float]], settle: int) -> dict[str, Any]:
    """settle: steps before the timed ones."""
    timed, late = samples[settle:], samples[model_table.HELD :] or samples[-1:]
    return {
        "step_ms": statistics.median(one["ms"] for one in timed),
        "host_ms": statistics.median(one["host_ms"] for one in timed),
        "first_step_ms": samples[0]["ms"],
        "worst_late_ms": max(one["ms"] for one in late),
        "active_bytes": max(one["active"] for one in timed),
        "active_any_bytes": max(one["active"] for one in samples),
        "reserved_bytes": max(one["reserved"] for one in timed),
        "pinned_held": 0,
        "pinned_lent_peak": 0,
        "engine": {},
        "settle": settle,
        "trace_ms": [one["ms"] for one in samples],
        "trace_active": [one["active"] for one in samples],
    }


def _hooks(model: torch.nn.Module) -> int:
    """Hooks and replaced forwards of all its modules."""
    count = sum(len(getattr(module, name)) for module in model.modules() for name in _HOOKS)
    return count + sum("forward" in vars(module) for module in model.modules())


def _own_checkpointing(model: Any, keywords: dict[str, Any]) -> Callable[[], None]:
    """Switch it on; returns what switches it off."""
    if hasattr(model, "set_grad_checkpointing") and not keywords:  # timm
        model.set_grad_checkpointing(True)
        return lambda: model.set_grad_checkpointing(False)
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # transformers, newer and older
        if hasattr(model, f"{name}_enable") and (not keywords or name.startswith("activation")):
            getattr(model, f"{name}_enable")({"use_reentrant": False}, **keywords)
            return getattr(model, f"{name}_disable")
    asked = f" with {', '.join(keywords)}" if keywords else ""
    raise SkippedError(f"this model has no checkpointing of its own{asked}")


def _apply(trainer: Trainer, request: ModelRequest) -> offload.Applied:
    model: Any = trainer.model
    if request.tiny or request.host_limit_bytes is not None:
        offload.configure(
            offload.OffloadConfig(host_limit_bytes=request.host_limit_bytes),
            device="sim" if request.tiny else "cuda",
            print_summary=False,
        )
    smallest: dict[str, Any] = {"min_numel": 1} if request.tiny else {}
    if request.row.startswith("auto"):
        if request.row == "auto_all":
            smallest["optimizer"] = trainer.optimizer
        return offload.apply(model, mode="auto", device_total=f"{request.total_bytes}B", **smallest)
    return offload.apply(model, mode=request.row, **smallest)


def _gradients(request: ModelRequest, trainer: Trainer) -> dict[str, Any]:
    """One step more, under deterministic kernels; its gradients beside those of the row plain."""

    def prints() -> dict[str, Any]:
        with gradients.deterministic():
            trainer.backward()
            trainer.clock.drain()
        named = {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}
        found = gradients.prints_of(named)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return found

    try:
        return gradients.judged(Path(request.reference), prints, is_reference=request.row == "plain")
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        return {"verdict": "no kernel"}  # one of the model's has no deterministic form


def _pairs(model: str, args: argparse.Namespace) -> Iterator[tuple[str, float | None, bool]]:
    """(row, total, whether it is a share) of one model; plain first where another needs it."""
    family = FAMILIES[model]
    totals = list(args.totals_gb or family.totals)
    if args.total_number is not None:
        totals = [totals[args.total_number - 1]]
    shares = not args.totals_gb and family.shares
    within = [row for row in args.rows if row in _WITHIN]
    if "plain" in args.rows or args.gradients or (shares and within):
        yield "plain", None, False
    yield from ((row, None, False) for row in args.rows if row not in ("plain", *_WITHIN))
    yield from ((row, total, shares) for total in totals for row in within)


def run_model(run: Run, model: str) -> None:
    """Its rows, each printed and kept as it ends."""
    done: dict[str, dict[str, Any]] = {}
    for row, total, is_share in _pairs(model, run.args):
        total_bytes = None if total is None else round(total * GB)
        result: dict[str, Any] = {"model": model, "row": row, "label": row}
        if total is not None and is_share:
            if "plain" not in done:
                result |= {"label": f"{row}@{total:g} of plain", "status": "skipped"}
                result["reason"] = "its total is a share of what plain takes, and that row has no figures"
                print(model_table.row_line(run.keep(result)), flush=True)
                continue
            # a CPU tells no active bytes
            total_bytes = round(total * done["plain"]["active_bytes"]) or 200_000
        request = request_for(model, row, total_bytes, run.args, run.folder)
        result |= {"label": request.label, "request": asdict(request)}
        result |= run.measure(request, run_row, here=run.args.tiny)
        if result["status"] == "ok":
            done[request.label] = result
            model_table.add_ratios(result, done)
        print(model_table.row_line(result), flush=True)
        said = [line for line in result.get("stderr", "").splitlines() if "offload" in line]
        print(*(f"    it said: {line[:200]}\n" for line in said[:3]), sep="", end="", flush=True)
        _keep_explained(run, result)
        run.keep(result)


def _keep_explained(run: Run, result: Mapping[str, Any]) -> None:
    """The first lines of what mode auto says of its plan, into a file beside --out."""
    if run.args.out and "explained" in result:
        lines = [model_table.row_line(result), *result["explained"].splitlines()[:_EXPLAINED_LINES], ""]
        with Path(run.args.out).with_suffix(".explain.txt").open("a") as file:
            print(*lines, sep="\n", file=file)


def run_models(run: Run) -> None:
    if run.args.out:
        Path(run.args.out).with_suffix(".explain.txt").unlink(missing_ok=True)
    print(*run.header_lines(hardware()), model_table.header_lines(), sep="\n", flush=True)
    for model in run.args.models:
        run_model(run, model)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    return main_of(__file__, args, arguments, run_models, run_row)


if __name__ == "__main__":
    sys.exit(main())
