#!/usr/bin/env python3
"""What the net under recomputes costs a settled step: steps in which it compares and steps in which it does
not, by turns in one process, in mode "hidden_states".

    python scripts/bench_net.py                    W1's stack of 12 layers, and a Llama of 8 layers
    python scripts/bench_net.py --work llama --turns 20
    python scripts/bench_net.py --tiny             the whole script on a CPU and the simulated device

Two processes of one machine differ by more than what is looked for (0.3%), and steps of one process drift, so
a turn is some steps with the net, as many without, and the ratio is that of the two turns' means; which comes
first alternates. One invariant: nothing but the net's two constants changes between turns.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import bench_model
import offload
from bench import child, ours, rows
from bench.measure import Clock, run_step
from bench.rows import RowOptions
from bench.run import Run, check_names, hardware, main_of, parser_of
from offload.checkpoint import net

WORKS = ("W1", "llama")
_SETTLING = 6


@contextmanager
def _stack(tiny: bool, clock: Clock) -> Iterator[Callable[[], None]]:
    request = child.RowRequest(row="ours_hidden_states", workload="W1", options=RowOptions(), tiny=tiny)
    with rows.opened(ours.OursHiddenStates(child.context_of(request, clock))) as row:
        yield lambda: run_step(row, clock)


@contextmanager
def _llama(tiny: bool, clock: Clock) -> Iterator[Callable[[], None]]:
    args = bench_model.parse(["--tiny"] if tiny else [])
    request = bench_model.request_for("llama", "hidden_states", None, args, Path())
    trainer = bench_model.Trainer(request, torch.device("cuda" if clock.cuda else "cpu"))
    offload.configure(offload.OffloadConfig(), device="sim" if tiny else "cuda", print_summary=False)
    handle = offload.apply(trainer.model, mode="hidden_states", min_numel=1 if tiny else None)
    yield trainer.step
    handle.remove()


def turns(step: Callable[[], None], clock: Clock, *, turns: int, steps: int) -> list[tuple[float, float]]:
    """(ms of a step with the net, without it) of each turn: means."""
    usual = net._FIRST_CALLS, net._EVERY
    never = 0, sys.maxsize

    def mean(first_calls: int, every: int) -> float:
        net._FIRST_CALLS, net._EVERY = first_calls, every
        return statistics.fmean(clock.timed(step)["step_ms"] for _ in range(steps))

    for _ in range(_SETTLING):
        step()
    made = []
    for number in range(turns):
        if number % 2:
            without = mean(*never)
            made.append((mean(*usual), without))
        else:
            compared = mean(*usual)
            made.append((compared, mean(*never)))
    net._FIRST_CALLS, net._EVERY = usual
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--work", default=",".join(WORKS), help="comma-separated (%(default)s)")
    parser.add_argument("--turns", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="in each half of a turn (%(default)s)")
    args = parser.parse_args(arguments)
    check_names(parser, args.work.split(","), WORKS, "works")
    return main_of(__file__, args, arguments, run_works)


def run_works(run: Run) -> int:
    args = run.args
    print(run.header_lines(hardware())[0])
    for name in args.work.split(","):
        clock = Clock(torch.device("cpu" if args.tiny else "cuda"))
        opened = {"W1": _stack, "llama": _llama}[name]
        with opened(args.tiny, clock) as step:
            found = turns(step, clock, turns=args.turns, steps=args.steps)
        ratios = sorted(compared / without for compared, without in found)
        compared, without = (statistics.fmean(side) for side in zip(*found, strict=True))
        print(
            f"{name}: {compared:.2f} ms with the net, {without:.2f} without: {compared / without:.4f}; of "
            f"{len(ratios)} turns of 2 x {args.steps} steps the ratio is {statistics.median(ratios):.4f} in "
            f"the middle, {ratios[0]:.4f} least, {ratios[-1]:.4f} most",
            flush=True,
        )
        run.keep({"work": name, "status": "ok", "turns": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
