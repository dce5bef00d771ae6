#!/usr/bin/env python3
"""What offload costs on a model of transformers as a user trains it: one line of `offload.apply`, nothing
announced, head and loss included. One table, one run, one GPU.

    python scripts/bench_model.py                               Llama: 8 layers of 4096, 16384 tokens
    python scripts/bench_model.py --rows checkpoint,auto --device-total-gb 12,14,18
    python scripts/bench_model.py --config my/config.json --sequence 4096 --batch 2
    python scripts/bench_model.py --tiny                        the whole script on a CPU and the simulated
                                                                device, for its own sake

A step is forward, backward, an optimizer's step that changes nothing, and zero_grad(), which frees the
gradients. Each row runs in a process of its own; weights are random, of one seed; nothing is downloaded.
One invariant: every row computes the same gradients from the same weights, compared bit for bit with those of
`nothing` in one more step under deterministic kernels.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_SCRIPTS = Path(__file__).resolve().parent
for _folder in (str(_SCRIPTS.parent), str(_SCRIPTS)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import torch  # noqa: E402

import offload  # noqa: E402
from bench import gradients, report  # noqa: E402
from bench.measure import Clock  # noqa: E402
from bench.run import (  # noqa: E402
    NEEDS_GPU,
    NotInstalledError,
    Run,
    SkippedError,
    add_run_options,
    answer_child,
    hardware,
    outcome,
)

GB = 1e9
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 131072,
}
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
_RECOMPUTING = {
    "checkpoint": {},
    "every_second": {"every_n_layers": 2},
    "transformers_offload": {"offload": True},
}
"""Rows of transformers' own checkpointing, by what they give it."""
_APPLIED = {
    "all": True,
    "groups": "groups",
    "hidden_states": "hidden_states",
    "selective": "selective",
}
"""Rows of `offload.apply`, by their mode."""
ROWS = ("nothing", *_RECOMPUTING, *_APPLIED, "auto")
_SETTLING = {"auto": 28}
"""Steps before the timed ones, of rows that measure and plan, three times, each search a few steps beside
others; the others need four."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """What the parent asks of one process. config: as a config.json of transformers."""

    row: str
    label: str
    config: dict[str, Any]
    sequence: int
    batch: int
    samples: int
    total_bytes: int | None
    host_limit_bytes: int
    reference: str
    """File of the gradients' fingerprints: written by the row "nothing", read by the others."""
    gradients: bool
    tiny: bool


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", type=Path, help="a config.json of a causal language model; with --tiny, in tiny sizes"
    )
    parser.add_argument("--layers", type=int, help="instead of the config's num_hidden_layers")
    parser.add_argument("--sequence", type=int, default=16384, help="tokens (%(default)s)")
    parser.add_argument("--batch", type=int, default=1, help="sequences a step (%(default)s)")
    parser.add_argument(
        "--rows",
        default="nothing,checkpoint,transformers_offload,hidden_states,auto",
        help=f"of {', '.join(ROWS)} (%(default)s); nothing is always run first, for the ratios",
    )
    parser.add_argument(
        "--device-total-gb",
        default="14",
        help="comma-separated GB of 1e9 of all active bytes, for auto, a row each (%(default)s)",
    )
    parser.add_argument("--host-limit-gb", type=float, default=110.0, help="pinned bytes (%(default)s)")
    parser.add_argument("--samples", type=int, default=5, help="timed steps a row (%(default)s)")
    parser.add_argument("--no-gradients", action="store_true", help="leave out the comparison of gradients")
    add_run_options(parser, row_timeout_s=240.0)
    parsed = parser.parse_args(arguments)
    parsed.rows = [name for name in parsed.rows.split(",") if name and name != "nothing"]
    if unknown := [name for name in parsed.rows if name not in ROWS]:
        parser.error(f"unknown rows {', '.join(unknown)}; known are {', '.join(ROWS)}")
    try:
        parsed.totals = [float(text) for text in parsed.device_total_gb.split(",")]
    except ValueError:
        parsed.totals = []
    if not parsed.totals or not all(0 < total < math.inf for total in parsed.totals):
        parser.error(f"--device-total-gb is {parsed.device_total_gb!r}; must be numbers above 0, as 12,14.5")
    if parsed.config is not None and not parsed.config.is_file():
        parser.error(f"--config {parsed.config} is no file; give the config.json of a model of transformers")
    for name in ("sequence", "batch", "samples", "layers"):
        given = getattr(parsed, name)
        if given is not None and given < 1:
            parser.error(f"--{name} is {given}; it must be at least 1")
    return parsed


def requests(args: argparse.Namespace, folder: Path) -> list[ModelRequest]:
    """Of every row, nothing first."""
    config = dict(LLAMA if args.config is None else json.loads(args.config.read_text()))
    config |= _TINY if args.tiny else {}
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    found = []
    for row in ("nothing", *args.rows):
        for total in args.totals if row == "auto" else [None]:
            found.append(
                ModelRequest(
                    row=row,
                    label=row if total is None else f"{row}@{total:g}",
                    config=config,
                    sequence=16 if args.tiny else args.sequence,
                    batch=args.batch,
                    samples=2 if args.tiny else args.samples,
                    total_bytes=None if total is None else round(total * GB),
                    host_limit_bytes=round(args.host_limit_gb * GB),
                    reference=str(folder / "reference.pt"),
                    gradients=not args.no_gradients,
                    tiny=args.tiny,
                )
            )
    return found


def run_row(request: ModelRequest) -> dict[str, Any]:
    """The row's figures, with a status."""
    return outcome({"row": request.row, "label": request.label}, lambda: _measure(request))


class Trainer:
    """A user's loop over one batch. The optimizer's step changes no weight, so that all rows have the same
    ones in every step."""

    def __init__(self, request: ModelRequest, device: torch.device) -> None:
        try:
            from transformers import AutoConfig, AutoModelForCausalLM
        except ImportError as error:
            raise NotInstalledError("transformers is not installed") from error
        config = AutoConfig.for_model(**request.config)
        config.use_cache = False
        torch.manual_seed(0)
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32 if request.tiny else torch.bfloat16
            )
        self.model.train()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        drawn = torch.Generator().manual_seed(1)
        size = (request.batch, request.sequence)
        self.tokens = torch.randint(config.vocab_size, size, generator=drawn).to(device)

    def backward(self) -> None:
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _measure(request: ModelRequest) -> dict[str, Any]:
    if not request.tiny and not torch.cuda.is_available():
        raise SkippedError("no CUDA device here")
    device = torch.device("cpu" if request.tiny else "cuda")
    trainer, clock = Trainer(request, device), Clock(device)
    if request.row in _RECOMPUTING:
        _recompute(trainer.model, _RECOMPUTING[request.row])
    handle = _applied(trainer.model, request)
    settling = 2 if request.tiny else _SETTLING.get(request.row, 4)
    samples = [_step(trainer, clock) for _ in range(settling + request.samples)]
    timed = samples[settling:]
    result: dict[str, Any] = {
        "step_ms": statistics.median(one["step_ms"] for one in timed),
        "step_ms_mean": statistics.fmean(one["step_ms"] for one in timed),
        "host_ms": statistics.median(one["host_ms"] for one in timed),
        "first_step_ms": samples[0]["wall_ms"],
        "active_bytes": max(one["active_peak"] for one in timed),
        "reserved_bytes": max(one["reserved_peak"] for one in timed),
        "pinned_held": 0,
        "pinned_lent_peak": 0,
        "engine": {},
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "samples": samples,
    }
    if handle is not None:
        result |= _figures(handle)
    if request.gradients:
        result["gradients"] = _gradients(request, trainer, clock)
    if handle is not None:
        handle.remove()
    if request.row != "nothing":
        if request.row in _RECOMPUTING:
            _recompute_no_more(trainer.model)
        plain = [_step(trainer, clock)["step_ms"] for _ in range(2 + request.samples)]
        result["plain_ms"] = statistics.median(plain[2:])
    return result


def _step(trainer: Trainer, clock: Clock) -> dict[str, Any]:
    """One step from a drained device to a drained device."""
    clock.drain()
    clock.reset_peaks()
    wall, start = time.perf_counter(), clock.mark()
    trainer.step()
    end, issued = clock.mark(), time.perf_counter()
    clock.drain()
    return {
        "step_ms": clock.ms(start, end),
        "host_ms": (issued - wall) * 1e3,
        "wall_ms": (time.perf_counter() - wall) * 1e3,
        **clock.memory(),
    }


def _recompute(model: Any, keywords: dict[str, Any]) -> None:
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable({"use_reentrant": False}, **keywords)
    elif keywords:
        raise NotInstalledError(f"this transformers has no checkpointing with {', '.join(keywords)}")
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})


def _recompute_no_more(model: Any) -> None:
    disable = getattr(model, "activation_checkpointing_disable", None)
    (model.gradient_checkpointing_disable if disable is None else disable)()


def _applied(model: Any, request: ModelRequest) -> offload.Applied | None:
    if request.row not in (*_APPLIED, "auto"):
        return None
    offload.configure(
        offload.OffloadConfig(host_limit_bytes=request.host_limit_bytes),
        device="sim" if request.tiny else "cuda",
        print_summary=False,
    )
    smallest: dict[str, Any] = {"min_numel": 1} if request.tiny else {}
    if request.row == "auto":
        return offload.apply(model, mode="auto", device_total=f"{request.total_bytes}B", **smallest)
    return offload.apply(model, mode=_APPLIED[request.row], **smallest)


def _figures(handle: offload.Applied) -> dict[str, Any]:
    last = handle.report().last_step
    found: dict[str, Any] = {
        "pinned_held": last["host_bytes"],
        "pinned_lent_peak": last["host_lent_bytes"],
        "engine": {"spill_bytes": last["moved_bytes"], "stall_ms": last["stall_ms"]},
        "report": str(handle.report()),
    }
    if handle.mode == "auto":
        explained = handle.explain()
        found["explained"] = str(explained)
        if explained.bound is not None:
            found["own_bound_ms"] = explained.bound.step_s * 1e3
    return found


def _gradients(request: ModelRequest, trainer: Trainer, clock: Clock) -> dict[str, Any]:
    """One step more, under deterministic kernels; its gradients beside those of the row nothing."""
    torch.manual_seed(2)  # a row that settles longer has drawn more
    with gradients.deterministic():
        trainer.backward()
        clock.drain()
    named = {name: one.grad for name, one in trainer.model.named_parameters() if one.grad is not None}
    prints = gradients.prints_of(named)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    path = Path(request.reference)
    if request.row == "nothing":
        gradients.save(path, prints)
        return {"verdict": "reference"}
    return gradients.compare(gradients.load(path), prints) if path.exists() else {"verdict": "no reference"}


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.child is not None:
        return answer_child(args.child, run_row)
    if not args.tiny and not torch.cuda.is_available():
        print(NEEDS_GPU)
        return 2
    with Run(__file__, args, arguments) as run:
        print(*run.header_lines(hardware()), report.HEADER, report.header_line(), sep="\n", flush=True)
        baseline = None
        said: list[str] = []
        for request in requests(args, run.folder):
            result = {"row": request.row, "label": request.label, "request": asdict(request)}
            result |= run.measure(request, run_row, here=args.tiny)
            if request.row == "nothing" and result["status"] == "ok":
                baseline = result
            if baseline is not None and result["status"] == "ok":
                result["over_baseline"] = result["step_ms"] / baseline["step_ms"]
            if "own_bound_ms" in result:
                result["bound_ms"] = result["own_bound_ms"]
                result["over_bound"] = result["step_ms"] / result["bound_ms"]
            print(report.row_line(result), flush=True)
            if "plain_ms" in result:
                print(f"  {request.label}: {report.over_plain(result)}", flush=True)
            said += [f"\n{request.label}:\n{result['explained']}"] if "explained" in result else []
            run.keep(result)
        print(*said, sep="\n")
        return run.end()


if __name__ == "__main__":
    sys.exit(main())
