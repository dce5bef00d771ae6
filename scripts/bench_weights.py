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
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
for _folder in (str(_ROOT), str(_ROOT / "scripts")):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import torch  # noqa: E402

from bench.run import NEEDS_GPU, hardware  # noqa: E402
from bench.weights import HEADER, Shape, line  # noqa: E402

WORKS = {work: f"bench.weights_{work}" for work in ("lora", "int8", "70b", "full", "gradients", "experts")}
"""Each has ROWS and run_row(options); HEADER and line(row, nothing), too, where its columns are others; and
DEFAULTS of options, where they are others."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", choices=WORKS, default="lora", help="(%(default)s)")
    parser.add_argument("--rows", help="(all of the work's own, no peers)")
    parser.add_argument("--tokens", type=int, default=4096, help="of one sequence (%(default)s)")
    parser.add_argument("--layers", type=int, default=Shape.layers, help="(%(default)s)")
    parser.add_argument("--samples", type=int, default=10, help="timed steps a row (%(default)s)")
    parser.add_argument("--warmup", type=int, default=6, help="steps before them (%(default)s)")
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of --work experts (%(default)s)")
    parser.add_argument("--inside", action="store_true", help="of lora, int8: checkpoints inside blocks")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write every figure as JSON")
    parser.add_argument("--tiny", action="store_true", help="tiny blocks on the simulated device")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    work = importlib.import_module(WORKS[parser.parse_known_args(arguments)[0].work])
    parser.set_defaults(**getattr(work, "DEFAULTS", {}))
    parsed = parser.parse_args(arguments)
    if parsed.tiny:
        parsed.samples, parsed.warmup = 1, 3
    elif not torch.cuda.is_available():
        parser.error(NEEDS_GPU)
    return parsed


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    work = importlib.import_module(WORKS[options.work])
    if options.row:
        print(json.dumps(work.run_row(options)))
        return
    header, to_line = getattr(work, "HEADER", HEADER), getattr(work, "line", line)
    print("simulated" if options.tiny else hardware(), f"torch {torch.__version__}", header, sep="\n")
    print("|---" * header.count(" | ") + "|---|", flush=True)
    given = sys.argv[1:] if arguments is None else arguments
    found: list[dict[str, Any]] = []
    for row in (options.rows or work.ROWS).split(","):
        command = [sys.executable, __file__, *given, "--row", row]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"| {row} | failed: {(done.stderr.strip().splitlines() or [''])[-1]} |", flush=True)
            continue
        found.append(json.loads(done.stdout.splitlines()[-1]))
        nothing = next((each for each in found if each["row"] == "nothing"), None)
        print(to_line(found[-1], nothing), flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
