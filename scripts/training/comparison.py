"""How much longer a step takes with offload, and what the two arms held: the table of --compare, and the
ratio of neighbours in time.

One invariant: a ratio is of two measurements that were made one after the other, so a machine that grows warm
or busy changes both.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tabulate import tabulate

from offload import Report
from training.figures import MIB, Arm, RankFigures, mib_or_dash, why_nothing_left
from training.options import Options

__all__ = ["comparison", "ratio_text", "ratios_of", "spread_of"]

_FEW = 10  # pairs, below which the spread is that of all of them


def comparison(options: Options, off: Sequence[Arm], on: Sequence[Arm], report: Report) -> str:
    """Time and the three memory figures, side by side, a row for each rank and arm.

    off, on: the runs of each arm. Run 0 of an arm was made alone: memory is from there. In the others both
        arms made each step, one after the other: times are from there.
    report: of all ranks. The engine counts nothing while it is off, so what the other arm saves is what would
        have been on the device if nothing had left.
    """
    rows: list[list[str]] = []
    for rank in range(len(on[0].steps[-1])):
        for runs in (off, on):
            last = runs[0].steps[-1][rank]
            times = [step[rank].seconds * 1e3 for run in runs[1:] for step in run.steps]
            stayed = report.ranks[rank]["would_hold_bytes"] or None
            saved = stayed if runs is off else runs[0].most(rank, "device_bytes_peak")
            least, most = spread_of(times)
            rows.append(
                [
                    f"rank {rank}",
                    runs[0].name,
                    f"{statistics.median(times):,.1f}",
                    f"{least:,.1f} to {most:,.1f}",
                    mib_or_dash(last.active_bytes),
                    mib_or_dash(last.reserved_bytes),
                    f"{last.engine['host_bytes_held'] / MIB:,.1f}",
                    mib_or_dash(saved),
                ]
            )
    table = tabulate(
        rows,
        headers=["", "", "step ms", "spread", "active MiB", "reserved MiB", "pinned MiB", "saved MiB"],
        colalign=("left", "left", *["right"] * 6),
        disable_numparse=True,
    )
    on_cpu = on[0].steps[-1][0].active_bytes is None
    notes = [_ratio(options, off, on), _losses([*off, *on], on_cpu=on_cpu)]
    notes.append(
        '"saved" is the engine\'s own count of saved activations on the device at once; without '
        "offload, of the same ones."
    )
    if on_cpu:
        notes.append(
            "Active and reserved are a GPU allocator's figures, which a CPU does not have; its host memory "
            "is not pinned either."
        )
    return "\n".join([table, *notes])


def ratios_of(off: Sequence[Sequence[RankFigures]], on: Sequence[Sequence[RankFigures]]) -> list[float]:
    """Of the slowest rank's time with offload over that without, by pairs of steps."""
    return [
        max(rank.seconds for rank in with_) / max(rank.seconds for rank in without)
        for without, with_ in zip(off, on, strict=True)
    ]


def ratio_text(ratios: Sequence[float]) -> str:
    """The median, and how far the pairs spread."""
    least, most = spread_of(ratios)
    share = "" if len(ratios) < _FEW else "80% of "
    return (
        f"{statistics.median(ratios):.2f} times as long ({least:.2f} to {most:.2f} in {share}{len(ratios)} "
        "pairs of steps)"
    )


def spread_of(values: Sequence[float]) -> tuple[float, float]:
    """The least and the most of a few values; of ten and more, what four fifths of them lie within: a single
    step that something else held up says nothing."""
    if len(values) < _FEW:
        return min(values), max(values)
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], tenths[-1]


def _ratio(options: Options, off: Sequence[Arm], on: Sequence[Arm]) -> str:
    """How much longer a step takes with offload, by pairs of neighbours in time."""
    ratios = [
        ratio
        for without, with_ in zip(off[1:], on[1:], strict=True)
        for ratio in ratios_of(without.steps, with_.steps)
    ]
    said = ratio_text(ratios)
    if why := why_nothing_left(options, on[0]):
        return f"Nothing was offloaded in either arm: {why}. So {said} is how far equal steps differ."
    return f"A step takes {said} with offload."


def _losses(runs: Sequence[Arm], *, on_cpu: bool) -> str:
    steps = range(len(runs[0].steps))
    differing = [step for step in steps if len({run.loss(step) for run in runs}) > 1]
    if not differing:
        return f"The losses of all {len(steps)} steps are equal in all {len(runs)} runs, bit for bit."
    why = "" if on_cpu else ", as attention's on a GPU do from run to run (--verify takes one that does not)"
    return f"The losses differ from step {differing[0] + 1} on{why}."
