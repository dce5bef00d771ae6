#!/usr/bin/env python3
"""What offload costs on a mixture of experts: nothing, this project's groups, modes and mode auto, and what
torch ships, in one run on one GPU.

    python scripts/bench_moe.py                             all works but configs, under 8 minutes on an H200
    python scripts/bench_moe.py --work layer --rows groups,groups_permuted,auto
    python scripts/bench_moe.py --work window,zipf --out moe.json
    python scripts/bench_moe.py --work configs              and with --config FILE.toml,... files of your own
    python scripts/bench_moe.py --tiny                      all of it on a CPU and the simulated device, for
                                                            its own sake

layer: one sequence of 16,384 tokens through 8 layers of Qwen3-30B-A3B's shapes with 32 of its 128 experts.
window: 4 sequences of 4,096 tokens a microbatch under 1F1B, four microbatches live. zipf: 200 steps whose
experts' loads follow Zipf's law. lengths: 100 such steps, each shorter by up to an eighth. transformers: a
Qwen3-MoE of these shapes through offload.apply, where transformers is installed. configs: runs of 15 steps by
files that switch activation offload, FSDP's CPU offload and checkpoints ON or OFF (mixtures/configs.py).

Each row runs in a process of its own. One invariant: every row computes the same gradients from the same
weights, compared bit for bit with those of `nothing` in one more step under deterministic kernels. What the
rows are: mixtures/rows.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bench_model
from bench import report
from bench.run import Run, check_names, check_positive, hardware, main_of, parser_of
from mixtures import child, configs
from mixtures.configs import ConfigRequest
from mixtures.job import MixtureRequest
from mixtures.report import asked_lines, facts_line, note_line
from mixtures.rows import ROWS, ROWS_OF
from mixtures.work import TRANSFORMERS, WORKS, Work, tiny

GB = 1e9
USUAL_WORKS = (*WORKS, "transformers")
ALL_WORKS = (*USUAL_WORKS, "configs")
_TRANSFORMERS_ROWS = ("gc", "hidden_states", "auto")
_ZIPF_NOTHING = 30
"""Steps of the row nothing where others make 200."""
Rows = dict[str, dict[str, Any]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=150.0)
    parser.add_argument(
        "--work",
        default="all",
        help=f"comma-separated, of {', '.join(ALL_WORKS)}; all is every one but configs (%(default)s)",
    )
    parser.add_argument(
        "--rows",
        help=f"comma-separated, of {', '.join(ROWS)}; nothing is always run first, for the ratios. Of "
        f"transformers: {', '.join(bench_model.ROWS)}",
    )
    parser.add_argument(
        "--kept",
        type=float,
        default=0.5,
        help="share of its saved bytes that groups and auto may keep on the device (%(default)s)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        nargs="+",
        help=f"of the work configs: files (default: {', '.join(path.stem for path in configs.FILES)})",
    )
    parser.add_argument("--layers", type=int, help="instead of each work's own")
    parser.add_argument("--samples", type=int, help="timed steps a row, instead of each work's own")
    parser.add_argument("--host-limit-gb", type=float, default=110.0, help="pinned bytes (%(default)s)")
    parser.add_argument("--no-gradients", action="store_true", help="leave out the comparison of gradients")
    parsed = parser.parse_args(arguments)
    parsed.works = USUAL_WORKS if parsed.work == "all" else tuple(filter(None, parsed.work.split(",")))
    check_names(parser, parsed.works, ALL_WORKS, "works")
    parsed.rows = None if parsed.rows is None else tuple(filter(None, parsed.rows.split(",")))
    known = {*ROWS, *(bench_model.ROWS if "transformers" in parsed.works else ())}
    check_names(parser, parsed.rows or (), sorted(known), "rows")
    if not 0 < parsed.kept <= 1:
        parser.error(f"--kept is {parsed.kept}; it is a share, above 0 and at most 1")
    try:
        parsed.configs = [configs.read_config(path) for path in parsed.config or configs.FILES]
    except ValueError as error:
        parser.error(str(error))
    check_positive(parser, parsed, "layers", "samples")
    return parsed


def work_named(name: str, args: argparse.Namespace) -> Work:
    """With what the command line changes."""
    work = tiny(WORKS[name]) if args.tiny else WORKS[name]
    return work.with_(
        **{field: given for field in ("layers", "samples") if (given := getattr(args, field)) is not None}
    )


def run_work(run: Run, work: Work) -> None:
    """Its rows, each printed with its note, then what was asked for."""
    args, done = run.args, Rows()
    names = args.rows if args.rows is not None else ROWS_OF[work.name]
    for row in ("nothing", *(name for name in names if name in ROWS and name != "nothing")):
        made = request_for(row, work, args, run.folder, done)
        if isinstance(made, str):
            result: dict[str, Any] = {"row": row, "label": row, "status": "skipped", "reason": made}
        else:
            result = {"row": row, "label": row, "request": asdict(made)}
            result |= run.measure(made, run_row, here=args.tiny)
        _show(run, result, done, work)
    print(*asked_lines(work.name, done) if "nothing" in done else [], sep="\n", flush=True)


def request_for(
    row: str, work: Work, args: argparse.Namespace, folder: Path, done: Mapping[str, Mapping[str, Any]]
) -> MixtureRequest | str:
    """What the row's process is asked for, or why it cannot be."""
    spec = ROWS[row]
    needed = {"nothing"} if spec.total == "share" else {spec.total} - {None}
    if missing := needed - done.keys():
        return f"it needs the row {', '.join(map(str, missing))} before it"
    total_bytes = None
    if "nothing" in done:
        saved = done["nothing"]["saved_bytes"]
        # on the CPU, which tells no active bytes, what is saved stands for them
        total_bytes = (done["nothing"]["active_bytes"] or 2 * saved) - round((1 - args.kept) * saved)
    if spec.total == "torch_checkpoint":
        total_bytes = done["torch_checkpoint"]["active_bytes"] or total_bytes
    return MixtureRequest(
        row=row,
        work=work,
        samples=min(work.samples, _ZIPF_NOTHING) if row == "nothing" else work.samples,
        kept=args.kept,
        total_bytes=total_bytes if spec.total else None,
        host_limit_bytes=round(args.host_limit_gb * GB),
        reference=str(folder / f"reference-{work.name}.pt"),
        gradients=not args.no_gradients,
        tiny=args.tiny,
    )


def run_transformers(run: Run) -> None:
    """A Qwen3-MoE of these shapes, by bench_model.py's rows; auto within --kept of what nothing takes."""
    args, done = run.args, Rows()
    asked = args.rows or _TRANSFORMERS_ROWS
    names = [name for name in asked if name in bench_model.ROWS and name != "plain"]
    config = TRANSFORMERS | ({} if args.layers is None else {"num_hidden_layers": args.layers})
    for row in ("plain", *names):
        total = None
        if row in ("rule", "auto"):
            if "nothing" not in done:
                continue
            total = round(args.kept * done["nothing"]["active_bytes"]) or 200_000
        label = "nothing" if row == "plain" else row
        request = bench_model.ModelRequest(
            model="config",
            row=row,
            label=label,
            config=config,
            sequence=16 if args.tiny else 16384,
            batch=1,
            samples=2 if args.tiny else args.samples or 5,
            total_bytes=total,
            host_limit_bytes=round(args.host_limit_gb * GB),
            reference=str(run.folder / "reference-transformers.pt"),
            gradients=not args.no_gradients,
            tiny=args.tiny,
        )
        result = {"work": "transformers", "request": asdict(request)}
        result |= run.measure(request, run_row, here=args.tiny) | {"row": label, "label": label}
        _show(run, result, done, None)


def run_configs(run: Run) -> None:
    """Each file's run, on four layers of the work `layer` unless --layers says otherwise."""
    args, first = run.args, None
    work = work_named("layer", args)
    work = work if args.layers is not None or args.tiny else work.with_(layers=4)
    print(f"configs: {work.layers} layers, {work.tokens:,} tokens a step, {configs.STEPS} steps of AdamW")
    print(configs.header_line())
    for config in args.configs:
        request = ConfigRequest(
            config=config,
            work=work,
            host_limit_bytes=round(args.host_limit_gb * GB),
            steps=3 if args.tiny else configs.STEPS,
            tiny=args.tiny,
        )
        result = {"row": config.name, "label": config.name, "work": "configs"}
        result |= run.measure(request, run_row, here=args.tiny)
        first = result if first is None and result["status"] == "ok" else first
        print(configs.config_line(result, first), flush=True)
        run.keep(result)


def _show(run: Run, result: dict[str, Any], done: Rows, work: Work | None) -> None:
    """Print a row and keep it. work: None of transformers, whose rows have no note of their own."""
    fine = result["status"] == "ok"
    if fine:
        done[result["row"]] = result
    if fine and "nothing" in done:
        result["over_baseline"] = result["step_ms"] / done["nothing"]["step_ms"]
    if result["row"] == "nothing":
        facts = "transformers" if work is None else work.name
        if fine and work is not None:
            facts = facts_line(result, work.tokens, work.microbatches)
        print(facts, report.header_line(), sep="\n")
    print(report.row_line(result), flush=True)
    if fine and work is not None:
        print(note_line(result, done, work.tokens), flush=True)
    run.keep(result)


def run_row(request: Any) -> dict[str, Any]:
    """Whichever row is asked for."""
    if isinstance(request, ConfigRequest):
        return configs.run_config(request)
    return child.run_row(request) if isinstance(request, MixtureRequest) else bench_model.run_row(request)


def run_works(run: Run) -> None:
    print(*run.header_lines(hardware()), report.HEADER, sep="\n", flush=True)
    for name in run.args.works:
        if name == "transformers":
            run_transformers(run)
        elif name == "configs":
            run_configs(run)
        else:
            run_work(run, work_named(name, run.args))


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_works, run_row)


if __name__ == "__main__":
    sys.exit(main())
