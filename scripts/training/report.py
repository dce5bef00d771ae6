"""What is said about a run: the bar while it goes, a line of JSON a step, and a summary a person can read.

One invariant: it is told figures and prints them; it neither measures nor talks to other ranks. Only rank 0
has one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from io import TextIOWrapper
from typing import Any

from tqdm import tqdm

from offload import Report
from training.comparison import ratio_text
from training.figures import Arm, EndCheck, RankFigures, known, mib, why_nothing_left
from training.options import Options

__all__ = ["Reporter", "summary"]


class Reporter:
    """The bar and the file, for one arm after another."""

    def __init__(self, options: Options) -> None:
        self.options = options
        # open for the whole run
        self._file: TextIOWrapper | None = open(options.telemetry, "w") if options.telemetry else None  # noqa: SIM115
        self._bar: tqdm[Any] | None = None
        self._alone = True  # of a pair each arm gets the other's stall, which the engine reads one step late

    def begin(self, arms: Sequence[Arm]) -> None:
        """A bar for the steps of these arms, which are made together."""
        runs = f" {arms[0].run + 1}/{self.options.compare}" if self.options.compare else ""
        names = " and ".join(arm.name for arm in arms)
        steps = self.options.steps * len(arms)
        self._alone = len(arms) == 1
        self._bar = tqdm(total=steps, desc=names + runs, unit="step", dynamic_ncols=True)

    def step(self, arm: Arm, figures: list[RankFigures]) -> None:
        """One step is over on all ranks."""
        arm.steps.append(figures)
        index = len(arm.steps) - 1
        self._write(arm, index, figures)
        if self._bar is not None:
            said = _postfix(arm, index, self.options.tokens, stall=self._alone)
            self._bar.set_postfix_str(said, refresh=False)
            self._bar.update()

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


def _postfix(arm: Arm, step: int, tokens: int, *, stall: bool) -> str:
    figures = arm.steps[step]
    active = [rank.active_bytes for rank in figures if rank.active_bytes is not None]
    peak = (
        f"peak {mib(max(active))}"
        if active
        else f"saved {mib(max(rank.engine['device_bytes_peak'] for rank in figures))}"
    )
    offloaded = sum(rank.engine["spill_bytes"] for rank in figures)
    stall_ms = max(rank.engine["stall_ms"] for rank in figures)
    return (
        f"loss {arm.loss(step):.3f}, {tokens / arm.seconds(step):,.0f} tokens/s, {peak}, "
        f"offloaded {mib(offloaded)}{f', stall {stall_ms:.1f} ms' if stall else ''}"
    )


def summary(
    options: Options, arm: Arm, source: str, report: Report | None = None, checks: Sequence[EndCheck] = ()
) -> str:
    """The run in a few lines, and the engine's report. checks: of --check-end, by rank."""
    last = arm.steps[-1]
    stages = len(last) // options.expert_parallel * options.virtual_stages
    shared = options.expert_parallel
    lines = [
        f"{len(arm.steps)} steps of {options.tokens:,} tokens on {len(last)} rank{'s' * (len(last) > 1)}: "
        f"{options.schedule.name}, "
        f"{stages} stage{'s' * (stages > 1)}, {options.microbatches} microbatches of {options.batch}; "
        + f"{shared} ranks share the experts; " * (shared > 1)
        + source,
        f"loss       {arm.loss(0):.3f} at first, {arm.loss(len(arm.steps) - 1):.3f} at last"
        f"speed      {arm.typical_seconds * 1e3:,.0f} ms a step, {options.tokens / arm.typical_seconds:,.0f} "
        "tokens/s",
    ]
    if options.verify:
        lines.append(
            f"verified   every gradient of all {len(arm.steps)} steps is bit for bit what it is without "
            "offload"
        )
    lines += _optimizer(arm)
    lines += _device_memory(arm)
    lines += _checked(options, arm, checks)
    if why := why_nothing_left(options, arm):
        lines.append(f"offloaded  nothing: {why}")
    if report is not None and options.offloads:
        lines += ["", str(report)]
    return "\n".join(lines)


def _optimizer(arm: Arm) -> list[str]:
    last = [figures.optimizer for figures in arm.steps[-1]]
    if not any(last):
        return []
    each = ", ".join(
        f"rank {rank} {100 * of['fraction']:.0f}%: {mib(of['host_bytes'])}"
        + (f", {100 * of['cpu_share']:.0f}% of it stepped by the host" if of["cpu_share"] is not None else "")
        for rank, of in enumerate(last)
    )
    return [f"optimizer  its state on the host ({each})"]


def _device_memory(arm: Arm) -> list[str]:
    last = arm.steps[-1]
    if last[0].active_bytes is None:
        return []
    active = max(rank.active_bytes or 0 for rank in last)
    reserved = max(rank.reserved_bytes or 0 for rank in last)
    return [f"device     at most {mib(active)} active, {mib(reserved)} reserved"]


def _checked(options: Options, arm: Arm, checks: Sequence[EndCheck]) -> list[str]:
    if not checks:
        return []
    pairs = len(checks[0].off_seconds)
    ratios = [
        max(check.on_seconds[pair] for check in checks) / max(check.off_seconds[pair] for check in checks)
        for pair in range(pairs)
    ]
    notes = ["nothing was offloaded in either"] * bool(why_nothing_left(options, arm))
    if arm.steps[-1][0].active_bytes is None:
        notes.append("on a CPU this is the work of the simulated device")
    note = f" ({'; '.join(notes)})" * bool(notes)
    return [
        f"checked    gradients bitwise equal with and without offload: all "
        f"{sum(check.gradients for check in checks):,} of the last step, {pairs} times",
        f"time       forward and backward take {ratio_text(ratios)} with offload{note}",
    ]
