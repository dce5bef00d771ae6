#!/usr/bin/env python3
"""What weights on the host cost, each row in a process of its own.

    python scripts/bench_weights.py             4,096 tokens: nothing, all streamed, 5 GB, 6.8 GB
    python scripts/bench_weights.py --rows nothing,host,trainstream,fsdp2       peers, if installed
    python scripts/bench_weights.py --tokens 16384 --rows nothing,host
    python scripts/bench_weights.py --work int8        in INT8: all streamed, 5 GB
    python scripts/bench_weights.py --work 70b         80 layers of 8192, 68.5 GB of INT8 on the host
    python scripts/bench_weights.py --tiny      the whole script on a CPU and the simulated device

Works (`--work`) are files of scripts/bench/. A row is judged by the row `nothing` and by the law: of each
pass what is longer, its compute (a third of `nothing` in the forward, two thirds in the backward with its
recompute) or the copies of the blocks that do not stay.

One invariant: a row's gradients of a step under deterministic kernels have the bits of `nothing`'s, or the
row says that they differ.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from bench.options import add_options
from bench.run import Run, hardware, main_of, outcome, parser_of
from bench.table import reason_line
from bench.weights import COLUMNS, Shape, derived, shown

WORKS = {work: f"bench.weights_{work}" for work in ("lora", "int8", "70b", "full", "gradients", "experts")}
"""Each has ROWS and run_row(options); COLUMNS and derived(row, nothing) where its columns are others; and
DEFAULTS of options, where they are others."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=1800.0)
    options = f"""
    --work {"|".join(WORKS)}=lora  what is on the host
    --rows text  (all of the work's own, no peers)
    --tokens int=4096  of one sequence
    --layers int={Shape.layers}  of the model
    --samples int=10  timed steps a row
    --warmup int=6  steps before them
    """
    add_options(parser, options)
    parser.set_defaults(**getattr(_work(parser.parse_known_args(arguments)[0]), "DEFAULTS", {}))
    parsed = parser.parse_args(arguments)
    if parsed.tiny:
        parsed.samples, parsed.warmup = 1, 3
    return parsed


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row's figures, with a status."""
    return outcome({"row": options.row}, lambda: _work(options).run_row(options))


def _work(options: argparse.Namespace) -> Any:
    return importlib.import_module(WORKS[options.work])


def run_rows(run: Run) -> None:
    """The work's rows, each beside the first `nothing`."""
    work, nothing = _work(run.args), None
    columns = getattr(work, "COLUMNS", COLUMNS)
    more = getattr(work, "derived", derived if columns is COLUMNS else lambda row, nothing: {})
    print(*run.header_lines(hardware()), columns.header, sep="\n", flush=True)
    for row in (run.args.rows or work.ROWS).split(","):
        options = argparse.Namespace(**vars(run.args) | {"row": row, "label": row})
        result = run.keep({"row": row, **run.measure(options)})
        if result["status"] != "ok":
            print(reason_line([row], result), flush=True)
            continue
        nothing = nothing or (result if row == "nothing" else None)
        cells = shown(result, nothing)
        print(columns.line(cells | more(cells, nothing)), flush=True)


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_rows, run_row)


if __name__ == "__main__":
    sys.exit(main())
