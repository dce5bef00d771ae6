"""What is said about a run: the bar while it goes, a line of JSON a step, a comparison, and a summary a
person can read.

One invariant: it is told figures and prints them; it neither measures nor talks to other ranks. Only rank 0
has one.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from io import TextIOWrapper
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from training.job import RankFigures
from training.options import Options

__all__ = ["Arm", "Reporter", "comparison", "summary"]

MIB = 1 << 20  # every figure of bytes that this script prints, as the engine's summary table


@dataclass(slots=True)
class Arm:
    """One run of one arm, with offload or without: its steps, with every rank's figures of each."""

    name: str
    offloads: bool = True
    run: int = 0
    """Which run of this arm, where a comparison makes several."""
    steps: list[list[RankFigures]] = field(default_factory=list)
    evaluations: list[tuple[int, float]] = field(default_factory=list)

    def loss(self, step: int) -> float:
        """The loss of a step, from whichever rank has it."""
        return known([figures.loss for figures in self.steps[step]])

    def seconds(self, step: int) -> float:
        """A step takes as long as its slowest rank."""
        return max(figures.seconds for figures in self.steps[step])

    @property
    def typical_seconds(self) -> float:
        """The median step of the slowest rank of each."""
        return self.typical_seconds_of(range(len(self.steps[0])))

    def typical_seconds_of(self, ranks: Sequence[int]) -> float:
        """The median step of the slowest of these ranks, without the first step, which also builds things."""
        steps = self.steps[1:] or self.steps
        return statistics.median(max(step[rank].seconds for rank in ranks) for step in steps)

    def most(self, rank: int, name: str) -> int:
        """The largest of one of the engine's figures over the steps."""
        return int(max(step[rank].engine[name] for step in self.steps))


def known(losses: Sequence[float]) -> float:
    """The loss among those of all ranks, most of which have none."""
    return next((loss for loss in losses if not math.isnan(loss)), math.nan)


class Reporter:
    """The bar and the file, for one arm after another."""

    def __init__(self, options: Options) -> None:
        self.options = options
        # open for the whole run
        self._file: TextIOWrapper | None = open(options.telemetry, "w") if options.telemetry else None  # noqa: SIM115
        self._bar: tqdm[Any] | None = None

    def begin(self, arm: Arm) -> None:
        """A bar for the steps of this arm."""
        runs = f" {arm.run + 1}/{self.options.compare}" if self.options.compare else ""
        self._bar = tqdm(total=self.options.steps, desc=arm.name + runs, unit="step", dynamic_ncols=True)

    def step(self, arm: Arm, figures: list[RankFigures]) -> None:
        """One step is over on all ranks."""
        arm.steps.append(figures)
        index = len(arm.steps) - 1
        self._write(arm, index, figures)
        if self._bar is not None:
            self._bar.set_postfix_str(_postfix(arm, index, self.options.tokens), refresh=False)
            self._bar.update()

    def evaluation(self, arm: Arm, step: int, losses: Sequence[float]) -> None:
        """The loss on held-out text, after this step."""
        arm.evaluations.append((step, known(losses)))
        self.say(f"step {step + 1}: loss {known(losses):.4f} on held-out text")

    def say(self, text: str) -> None:
        """A line above the bar."""
        tqdm.write(text)

    def end(self) -> None:
        """The arm is over, or the run was cut off."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def clear_for_table(self) -> None:
        """Take the bar away for what another function prints; the next step brings it back."""
        if self._bar is not None:
            self._bar.clear()

    def _write(self, arm: Arm, step: int, figures: list[RankFigures]) -> None:
        if self._file is None:
            return
        line = {
            "step": step,
            "arm": arm.name,
            "run": arm.run,
            "loss": known([rank.loss for rank in figures]),
            "seconds": max(rank.seconds for rank in figures),
            "tokens": self.options.tokens,
            "ranks": [
                {name: value for name, value in asdict(rank).items() if name != "loss"} for rank in figures
            ],
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def _postfix(arm: Arm, step: int, tokens: int) -> str:
    figures = arm.steps[step]
    active = [rank.active_bytes for rank in figures if rank.active_bytes is not None]
    peak = (
        f"peak {_mib(max(active))}"
        if active
        else f"saved {_mib(max(rank.engine['device_bytes_peak'] for rank in figures))}"
    )
    offloaded = sum(rank.engine["spill_bytes"] for rank in figures)
    stall = max(rank.engine["stall_ms"] for rank in figures)
    return (
        f"loss {arm.loss(step):.3f}, {tokens / arm.seconds(step):,.0f} tokens/s, {peak}, "
        f"offloaded {_mib(offloaded)}, stall {stall:.1f} ms"
    )


def summary(options: Options, arm: Arm, source: str) -> str:
    """The run in a few lines."""
    last = arm.steps[-1]
    ranks = range(len(last))
    stages = len(last) * options.virtual_stages
    lines = [
        f"{len(arm.steps)} steps of {options.tokens:,} tokens on {len(last)} rank{'s' * (len(last) > 1)}: "
        f"{options.schedule.name}, "
        f"{stages} stage{'s' * (stages > 1)}, {options.microbatches} microbatches of {options.batch}; "
        f"{source}",
        f"loss       {arm.loss(0):.3f} at first, {arm.loss(len(arm.steps) - 1):.3f} at last"
        + "".join(f"; held out {loss:.3f} after {step + 1}" for step, loss in arm.evaluations[-1:]),
        f"speed      {arm.typical_seconds * 1e3:,.0f} ms a step, {options.tokens / arm.typical_seconds:,.0f} "
        "tokens/s",
    ]
    if options.verify:
        lines.append(
            f"verified   every gradient of all {len(arm.steps)} steps is bit for bit what it is without "
            "offload"
        )
    lines += _optimizer(arm)
    lines += _offloaded(options, arm, ranks)
    return "\n".join(lines)


def _optimizer(arm: Arm) -> list[str]:
    last = [figures.optimizer for figures in arm.steps[-1]]
    if not any(last):
        return []
    each = ", ".join(
        f"rank {rank} {100 * of['fraction']:.0f}%: {_mib(of['host_bytes'])}"
        + (f", {100 * of['cpu_share']:.0f}% of it stepped by the host" if of["cpu_share"] is not None else "")
        for rank, of in enumerate(last)
    )
    return [f"optimizer  its state on the host ({each})"]


def _offloaded(options: Options, arm: Arm, ranks: Sequence[int]) -> list[str]:
    if not options.offloads:
        return ["offloaded  nothing, as --offload-modules none asks"]
    last = [figures.engine for figures in arm.steps[-1]]
    if why := _why_nothing_left(options, arm):
        return [f"offloaded  nothing: {why}"]
    each = ", ".join(f"rank {rank} {_mib(last[rank]['spill_bytes'])}" for rank in ranks)
    left, came_back = (sum(engine[name] for engine in last) for name in ("spill_bytes", "restore_bytes"))
    slowest = max(last, key=lambda engine: float(engine["stall_ms"]))
    simulated = ", on a simulated link" if arm.steps[-1][0].active_bytes is None else ""
    lines = [
        f"offloaded  {_mib(left)} a step ({each}), {_mib(came_back)} fetched back",
        f"stall      {slowest['stall_ms']:.1f} ms in {slowest['stall_count']} waits of the slowest "
        f"rank{simulated}",
        f"device     at most {_mib(max(arm.most(rank, 'device_bytes_peak') for rank in ranks))} of saved "
        "activations at once"
        + "".join(
            f"; {_mib(active)} active, {_mib(reserved)} reserved"
            for active, reserved in [_device_peaks(arm)]
            if active is not None
        ),
        f"host       {_mib(sum(engine['host_bytes_held'] for engine in last))} held, of which at most "
        f"{_mib(sum(arm.most(rank, 'host_bytes_lent_peak') for rank in ranks))} were lent",
    ]
    refused = sum(engine["refused_bytes"] for engine in last)
    if refused:
        lines.append(
            f"stayed     {_mib(refused)} of the last step should have left and found no room on the host"
        )
    return lines


def _why_nothing_left(options: Options, arm: Arm) -> str:
    """Why the last step moved nothing; empty if it moved something."""
    last = [figures.engine for figures in arm.steps[-1]]
    if any(engine["spill_bytes"] for engine in last):
        return ""
    saved = any(engine["saved"] for engine in last)
    return (
        f"{'all of them stayed' if saved else 'no saved tensor has that many elements'} "
        f"(--min-offloaded-tensor-size {options.min_elements:,}, --offload-fraction {options.fraction:g})"
    )


def comparison(
    options: Options, off: Sequence[Arm], on: Sequence[Arm], saved_if_all_stayed: Sequence[int]
) -> str:
    """Time and the three memory figures, side by side, a row for each rank and arm.

    off, on: the runs of each arm, as many of one as of the other; run i of both were neighbours in time.
    saved_if_all_stayed: bytes by rank; what the engine counts when nothing leaves, since it counts nothing
        while it is off.
    """
    rows: list[list[str]] = []
    for rank in range(len(on[0].steps[-1])):
        for runs in (off, on):
            # The host's blocks outlive the first run with offload, so memory is that of each arm's first run.
            last = runs[0].steps[-1][rank]
            times = [run.typical_seconds_of([rank]) * 1e3 for run in runs]
            saved = saved_if_all_stayed[rank] if runs is off else runs[0].most(rank, "device_bytes_peak")
            rows.append(
                [
                    f"rank {rank}",
                    runs[0].name,
                    f"{statistics.median(times):,.1f}",
                    f"{min(times):,.1f} to {max(times):,.1f}",
                    _mib_or_dash(last.active_bytes),
                    _mib_or_dash(last.reserved_bytes),
                    f"{last.engine['host_bytes_held'] / MIB:,.1f}",
                    f"{saved / MIB:,.1f}",
                ]
            )
    table = tabulate(
        rows,
        headers=["", "", "step ms", "of all runs", "active MiB", "reserved MiB", "pinned MiB", "saved MiB"],
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


def _ratio(options: Options, off: Sequence[Arm], on: Sequence[Arm]) -> str:
    """How much longer a step takes with offload, by pairs of neighbouring runs."""
    ratios = [
        offloading.typical_seconds / plain.typical_seconds for plain, offloading in zip(off, on, strict=True)
    ]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} pairs of runs"
    said = f"{statistics.median(ratios):.2f} times as long ({spread})"
    if why := _why_nothing_left(options, on[0]):
        return f"Nothing was offloaded in either arm: {why}. So {said} is how far equal runs differ."
    return f"A step takes {said} with offload."


def _losses(runs: Sequence[Arm], *, on_cpu: bool) -> str:
    steps = range(len(runs[0].steps))
    differing = [step for step in steps if len({run.loss(step) for run in runs}) > 1]
    if not differing:
        return f"The losses of all {len(steps)} steps are equal in all {len(runs)} runs, bit for bit."
    why = "" if on_cpu else ", as attention's on a GPU do from run to run (--verify takes one that does not)"
    return f"The losses differ from step {differing[0] + 1} on{why}."


def _device_peaks(arm: Arm) -> tuple[int | None, int | None]:
    last = arm.steps[-1]
    if last[0].active_bytes is None or last[0].reserved_bytes is None:
        return None, None
    return max(rank.active_bytes or 0 for rank in last), max(rank.reserved_bytes or 0 for rank in last)


def _mib(nbytes: int | None) -> str:
    return f"{(nbytes or 0) / MIB:,.1f} MiB"


def _mib_or_dash(nbytes: int | None) -> str:
    return "-" if nbytes is None else f"{nbytes / MIB:,.1f}"
