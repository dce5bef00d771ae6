#!/usr/bin/env python3
"""The main job: a pipeline-parallel GPT learns real text while its saved activations travel to host memory
and back.

    torchrun --nproc-per-node 2 scripts/train.py --preset tiny --steps 20
    torchrun --nproc-per-node 2 scripts/train.py --schedule zbv --verify
    torchrun --nproc-per-node 2 scripts/train.py --compare --telemetry steps.jsonl
    python scripts/train.py --offload-modules core_attn,attn_proj

Without torchrun it is one process with one stage. On a machine without a GPU the copies are simulated, the
results are not. One
invariant: it ends by itself, with exit code 0 when all steps were made, and with one line that says why not
otherwise (2 what was asked for, 1 what happened, 130 Ctrl-C).
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parent
for _folder in (str(_SCRIPTS.parent), str(_SCRIPTS)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import torch  # noqa: E402

from offload import print_offload_summary_table  # noqa: E402
from parallel.launch import Rank, Ranks, choose_device, launched, ranks_from_environment, run_rank  # noqa: E402
from training.job import Job  # noqa: E402
from training.options import Options, read_options  # noqa: E402
from training.report import Arm, Reporter, comparison, summary  # noqa: E402
from training.text import read_text  # noqa: E402


def main(arguments: list[str], ranks: Ranks) -> int:
    """Check everything that can be checked, start the rank, train."""
    options = read_options(arguments, ranks)
    device = choose_device(options.device, ranks)
    text = read_text(options.data, tokens=options.model.sequence)
    if options.verify and device.type == "cuda":
        options = _deterministic(options)
    with launched(ranks, device, timeout=options.timeout) as rank:
        train(Job(options, rank, text), options, rank)
    return 0


def train(job: Job, options: Options, rank: Rank) -> None:
    """All runs, and on rank 0 what there is to say about them."""
    reporter = Reporter(options) if rank.ranks.rank == 0 else None
    runs = planned(options)
    on = [run for run in runs if run.offloads]
    try:
        for run in runs:
            if run is not runs[0]:
                job.start_again()
            if run.offloads:
                job.manager.enable_offload()
            else:
                job.manager.disable_offload()
            if run is on[0] and options.offloads:
                job.reserve_host()
            run_steps(run, job, options, rank, reporter, table=run is on[0] and options.offloads)
        job.manager.enable_offload()
        stayed = job.gathered(job.saved_bytes_if_all_stayed()) if options.compare else []
    except KeyboardInterrupt as interrupt:
        made = sum(len(run.steps) for run in runs)
        raise KeyboardInterrupt(f"after {made} of {options.steps * len(runs)} steps") from interrupt
    finally:
        if reporter is not None:
            reporter.end()
    if reporter is not None:
        print(summary(options, on[-1], job.text.source))
        if options.compare:
            print(comparison(options, [run for run in runs if not run.offloads], on, stayed))


def planned(options: Options) -> list[Arm]:
    """The runs to be made. A comparison's arms take turns at going first: off on, on off, off on, so that a
    machine that grows warm or busy is not taken for the price of offload."""
    if not options.compare:
        return [Arm("offload on" if options.offloads else "training")]
    pairs = [
        [Arm("offload off", offloads=False, run=run), Arm("offload on", run=run)]
        for run in range(options.compare)
    ]
    return [arm for run, pair in enumerate(pairs) for arm in (pair if run % 2 == 0 else reversed(pair))]


def run_steps(
    arm: Arm, job: Job, options: Options, rank: Rank, reporter: Reporter | None, *, table: bool
) -> None:
    """The steps of one run. table: print the engine's summary table after its first."""
    if reporter is not None:
        reporter.begin(arm)
    for step in range(options.steps):
        figures = job.gathered(job.train(step))
        if reporter is not None:
            reporter.step(arm, figures)
        if step == 0 and table:
            if reporter is not None:
                reporter.clear_for_table()
            print_offload_summary_table(job.manager.step_offload_bytes, process_group=rank.group)
        if options.eval_every and (step + 1) % options.eval_every == 0:
            losses = job.gathered(job.evaluate())
            if reporter is not None:
                reporter.evaluation(arm, step, losses)
    if reporter is not None:
        reporter.end()


def _deterministic(options: Options) -> Options:
    """The same bits twice on a GPU too, at the price of speed and of attention's memory; to be called before
    any CUDA context exists."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return dataclasses.replace(options, model=options.model.with_(math_attention=True))


if __name__ == "__main__":
    _ranks = ranks_from_environment()
    run_rank(functools.partial(main, sys.argv[1:], _ranks), _ranks)
