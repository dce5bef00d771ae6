#!/usr/bin/env python3
"""The main job: a pipeline-parallel GPT, dense or of experts, learns real text while its saved activations
travel to host memory and back.

    torchrun --nproc-per-node 2 scripts/train.py --preset tiny --steps 20
    torchrun --nproc-per-node 2 scripts/train.py --schedule zbv --verify
    torchrun --nproc-per-node 2 scripts/train.py --compare --telemetry steps.jsonl
    python scripts/train.py --offload-modules core_attn,attn_proj --plot step.png
    python scripts/train.py --offload auto --device-total-gb 40
    python scripts/train.py --offload watermark --high-gb 60
    torchrun --nproc-per-node 4 scripts/train.py --preset moe --expert-parallel 2 --verify

Without torchrun it is one process with one stage. On a machine without a GPU the copies are simulated, the
results are not. One
invariant: it ends by itself, with exit code 0 when all steps were made, and with one line that says why not
otherwise (2 what was asked for, 1 what happened, 130 Ctrl-C).
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import sys

if __name__ == "__main__" and "PYTORCH_ALLOC_CONF" not in os.environ:
    # read when torch starts to use a GPU; segments of fixed size cannot serve steps of many shapes
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

import bench  # noqa: F401
from offload import plot, print_offload_summary_table
from parallel.launch import Rank, Ranks, choose_device, launched, ranks_from_environment, run_rank
from training.comparison import comparison
from training.figures import Arm, EndCheck
from training.job import Job
from training.options import Options, read_options
from training.report import Reporter, summary
from training.text import read_text


def main(arguments: list[str], ranks: Ranks) -> int:
    """Check everything that can be checked, start the rank, train."""
    options = read_options(arguments, ranks)
    device = choose_device(options.device, ranks)
    text = read_text(options.data, tokens=options.model.sequence)
    if (options.verify or options.check_end) and device.type == "cuda":
        options = _deterministic(options)
    shared = options.expert_parallel
    with launched(ranks, device, timeout=options.timeout, expert_parallel=shared) as rank:
        train(Job(options, rank, text), options, rank)
    return 0


def train(job: Job, options: Options, rank: Rank) -> None:
    """All runs, and on rank 0 what there is to say about them."""
    reporter = Reporter(options) if rank.ranks.rank == 0 else None
    runs = planned(options)
    arms = [arm for run in runs for arm in run]
    on = [arm for arm in arms if arm.offloads]
    checks: list[EndCheck] = []
    gc.collect()
    gc.freeze()  # what is built by now lives on; to walk it takes 0.2 s, for which the other ranks wait
    try:
        for run in runs:
            if run is not runs[0]:
                job.start_again()
            first = on[0] in run and options.offloads
            if first:
                job.reserve_host()
            checks += run_steps(run, job, options, rank, reporter, first=first)
        job.manager.enable_offload()
        job.take_report()
    except KeyboardInterrupt as interrupt:
        made = sum(len(arm.steps) for arm in arms)
        raise KeyboardInterrupt(f"after {made} of {options.steps * len(arms)} steps") from interrupt
    finally:
        if reporter is not None:
            reporter.end()
    if reporter is not None:
        if job.trace is not None and options.plot is not None:
            plot(options.plot, job.trace)
            reporter.say(f"rank 0's step {options.steps} is drawn in {options.plot}")
        print(summary(options, on[0], job.text.source, job.report, checks))
        if options.compare:
            print(comparison(options, [arm for arm in arms if not arm.offloads], on, job.report))


def planned(options: Options) -> list[list[Arm]]:
    """The runs to be made, each with the arms that share its steps.

    A comparison makes each arm's first run alone: its memory is its own there. In the others each step is
    made in both arms, one after the other, so that a machine that grows warm or busy is not taken for the
    price of offload.
    """
    if not options.compare:
        return [[Arm("offload on" if options.offloads else "training")]]
    pairs = [
        [Arm("offload off", offloads=False, run=run), Arm("offload on", run=run)]
        for run in range(options.compare)
    ]
    return [[arm] for arm in pairs[0]] + pairs[1:]


def in_turn(arms: list[Arm], step: int) -> list[Arm]:
    """The arms in the order in which they make a step: each goes first in every other one."""
    return arms if step % 2 == 0 else arms[::-1]


def run_steps(
    run: list[Arm], job: Job, options: Options, rank: Rank, reporter: Reporter | None, *, first: bool
) -> list[EndCheck]:
    """The steps of one run. Returns what each rank said of --check-end, on rank 0.

    first: the first run with offload. After its first step the engine's summary table is printed; its last
        one is drawn and checked, if that was asked for.
    """
    checks: list[EndCheck] = []
    if reporter is not None:
        reporter.begin(run)
    for step in range(options.steps):
        arms = in_turn(run, step)
        if len(arms) > 1:
            figures = job.gathered(job.train_arms(step, [arm.offloads for arm in arms]))
            made = [[of_rank[at] for of_rank in figures] for at in range(len(arms))]
        else:
            job.switch(arms[0].offloads)
            last = run[0].offloads and arms[0].run == 0 and step == options.steps - 1
            found = job.train(
                step,
                trace=last and first and options.plot is not None and rank.ranks.rank == 0,
                check=options.check_end if last else 0,
            )
            figures = job.gathered(found)
            made = [[of_rank[0] for of_rank in figures]]
            checks += [of_rank[1] for of_rank in figures if of_rank[1] is not None]
        if reporter is not None:
            for arm, of_arm in zip(arms, made, strict=True):
                reporter.step(arm, of_arm)
        if step == 0 and first:
            if reporter is not None:
                reporter.clear_for_table()
            print_offload_summary_table(job.manager.step_offload_bytes, process_group=rank.everyone)
    if reporter is not None:
        reporter.end()
    return checks


def _deterministic(options: Options) -> Options:
    """The same bits twice on a GPU too, at the price of speed and of attention's memory; to be called before
    any CUDA context exists."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    return dataclasses.replace(options, model=options.model.deterministic())


if __name__ == "__main__":
    _ranks = ranks_from_environment()
    run_rank(functools.partial(main, sys.argv[1:], _ranks), _ranks)
