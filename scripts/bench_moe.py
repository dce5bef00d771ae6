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
experts' loads follow Zipf's law. lengths: 100 such steps, each shorter by up to an eighth. configs: runs of
15 steps by files that switch activation offload, FSDP's CPU offload and checkpoints ON or OFF
(mixtures/configs.py).

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

from bench import report
from bench.options import add_options
from bench.run import Run, check_names, check_positive, hardware, main_of, parser_of
from mixtures import child, configs
from mixtures.configs import ConfigRequest
from mixtures.job import MixtureRequest
from mixtures.report import facts_line, note_line
from mixtures.rows import ROWS, ROWS_OF
from mixtures.work import WORKS, Work, tiny

GB = 1e9
ALL_WORKS = (*WORKS, "configs")
_ZIPF_NOTHING = 30
"""Steps of the row nothing where others make 200."""
Rows = dict[str, dict[str, Any]]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=150.0)
    options = f"""
    --work text=all  comma-separated, of {", ".join(ALL_WORKS)}; all is every one but configs
    --rows text  comma-separated, of {", ".join(ROWS)}; nothing is always run first, for the ratios
    --kept float=0.5  share of its saved bytes that groups and auto may keep on the device
    --layers int  instead of each work's own
    --samples int  timed steps a row, instead of each work's own
    --host-limit-gb float=110  pinned bytes
    --no-gradients  leave out the comparison of gradients
    """
    add_options(parser, options)
    own = f"of the work configs: files (default: {', '.join(path.stem for path in configs.FILES)})"
    parser.add_argument("--config", type=Path, nargs="+", help=own)
    parsed = parser.parse_args(arguments)
    parsed.works = tuple(WORKS) if parsed.work == "all" else tuple(filter(None, parsed.work.split(",")))
    check_names(parser, parsed.works, ALL_WORKS, "works")
    parsed.rows = None if parsed.rows is None else tuple(filter(None, parsed.rows.split(",")))
    check_names(parser, parsed.rows or (), ROWS, "rows")
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
    """Its rows, each printed with its note."""
    args, done = run.args, Rows()
    names = args.rows if args.rows is not None else ROWS_OF[work.name]
    for row in ("nothing", *(name for name in names if name != "nothing")):
        made = request_for(row, work, args, run.folder, done)
        if isinstance(made, str):
            result: dict[str, Any] = {"row": row, "label": row, "status": "skipped", "reason": made}
        else:
            result = {"row": row, "label": row, "request": asdict(made)}
            result |= run.measure(made, run_row, here=args.tiny)
        _show(run, result, done, work)


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


def _show(run: Run, result: dict[str, Any], done: Rows, work: Work) -> None:
    """Print a row and keep it."""
    fine = result["status"] == "ok"
    if fine:
        done[result["row"]] = result
    if fine and "nothing" in done:
        result["over_baseline"] = result["step_ms"] / done["nothing"]["step_ms"]
    if result["row"] == "nothing":
        facts = facts_line(result, work.tokens, work.microbatches) if fine else work.name
        print(facts, report.header_line(), sep="\n")
    print(report.row_line(result), flush=True)
    if fine:
        print(note_line(result, done, work.tokens), flush=True)
    run.keep(result)


def run_row(request: Any) -> dict[str, Any]:
    """Whichever row is asked for."""
    return child.run_row(request) if isinstance(request, MixtureRequest) else configs.run_config(request)


def run_works(run: Run) -> None:
    print(*run.header_lines(hardware()), report.HEADER, sep="\n", flush=True)
    for name in run.args.works:
        if name == "configs":
            run_configs(run)
        else:
            run_work(run, work_named(name, run.args))


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_works, run_row)


if __name__ == "__main__":
    sys.exit(main())
