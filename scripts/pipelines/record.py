"""The first rank's record of a run: rows as they come, bounds beside them, the text at the end.

One invariant: what has been measured is printed and written at once, so a run that is cut short leaves what
it has.
"""

from __future__ import annotations

import datetime
import json
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from offload.policy.actions import Action
from parallel.launch import Ranks
from pipelines import report
from pipelines.bounds import compare_rates, compute_seconds, rates_of
from pipelines.memory import BlockFacts, need_lines, need_of
from pipelines.requests import JobShape, Request, RowRequest
from pipelines.worker import complete

__all__ = ["Run", "compared"]


class Run:
    """The first rank's record of a run: rows as they come, text at the end."""

    def __init__(
        self, request: Request, ranks: Ranks, command: str, *, began: float, out: str | None = None
    ) -> None:
        self.request, self.ranks, self.began = request, ranks, began
        self.results: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.record: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": command,
            "hardware": {},
        }
        self._out = out
        # bounds and plans take seconds, while the workers measure in processes of their own
        self._thread = ThreadPoolExecutor(1)
        self._compared: list[Future[list[dict[str, Any]]]] = []

    def add(self, result: dict[str, Any]) -> None:
        self.results.append(result)
        print(report.progress_line(result, time.time() - self.began), flush=True)
        if self.facts is not None:
            if result["row"]["kind"] == "links":
                self.record["hardware"] = self.facts["hardware"]
                print("\n".join(self._calculation()), flush=True)
            elif (
                result["row"]["kind"] == "ours"
                and result["status"] == "ok"
                and self._is_of_first_schedule(result)
            ):
                links = next(other for other in self.results if other["row"]["kind"] == "links")
                baseline = next((other for other in self.results if _is_baseline_of(other, result)), None)
                self._compared.append(self._thread.submit(compared, result, baseline, links["ranks"]))
        self.write()

    @property
    def facts(self) -> dict[str, Any] | None:
        """What `links` measured; the fullest device's figures are in every rank's."""
        found = [
            result for result in self.results if result["row"]["kind"] == "links" and result["status"] == "ok"
        ]
        return found[0]["ranks"][0] if found else None

    @property
    def shape(self) -> JobShape:
        """With what was left open, once the figures of a block are there: the same for all sets of processes,
        whatever rows they run."""
        if self.facts is None:
            return self.request.shape
        return complete(list(self.request.rows), self.request.shape, self._block, self.ranks.world)[1]

    def completed(self, rows: list[RowRequest]) -> list[RowRequest]:
        """With limits in bytes, as the workers complete them from the same figures."""
        return rows if self.facts is None else complete(rows, self.shape, self._block, self.ranks.world)[0]

    @property
    def _block(self) -> BlockFacts:
        assert self.facts is not None
        return BlockFacts.from_json(self.facts["block"])

    def write(self) -> None:
        """After every row, so that a run that is cut short leaves what it has."""
        if self._out is not None:
            Path(self._out).write_text(
                json.dumps(
                    self.record | {"results": self.results, "notes": self.notes}, indent=1, default=str
                )
            )

    def _calculation(self) -> list[str]:
        assert self.facts is not None
        about = self.facts["hardware"]
        gpus = f"{self.ranks.world} x {about['gpu']}" if about.get("gpu") else "no GPU"
        shape, block = self.shape, self._block
        assert shape.layers is not None
        live = min(self.ranks.world, shape.microbatches)
        need = need_of(block, layers=shape.layers, live=live, optimizer_bytes=shape.optimizer_bytes)
        lines = need_lines(
            block,
            need,
            sequence=shape.sequence,
            optimizer_bytes=shape.optimizer_bytes,
            ranks=self.ranks.world,
            microbatches=shape.microbatches,
        )
        return [f"{gpus}, torch {about['torch']}, Python {about['python']}, {about['cpus']} cores", *lines]

    def _is_of_first_schedule(self, result: dict[str, Any]) -> bool:
        first = next(row.schedule for row in self.request.rows if row.kind != "links")
        return bool(result["row"]["schedule"] == first)

    def header(self) -> list[str]:
        lines = [f"{self.record['date']}, torch {torch.__version__}", self.record["command"]]
        if self.request.shape.tiny:
            lines.append(
                "TINY: gloo and the simulated device; link rates are stand-ins and no figure below is a "
                "measurement"
            )
        return lines

    def report(self) -> list[str]:
        tokens = self.request.shape.microbatches * self.request.shape.sequence
        links = [
            result for result in self.results if result["row"]["kind"] == "links" and result["status"] == "ok"
        ]
        lines = [""]
        if links:
            lines += [*self._calculation(), "", *report.link_lines(links[0]), ""]
        lines += [*report.steps_lines(self.results, tokens), ""]
        lines += report.verify_lines(self.results)
        for result in self.results:
            if result["row"]["kind"] == "delta":
                lines += ["", *report.delta_lines(result)]
        if links:
            lines += ["", *self._rates()]
        return [*lines, *self.notes, f"{time.time() - self.began:.0f} s in all"]

    def _rates(self) -> list[str]:
        """Bounds and plans, for the limited rows of the first schedule."""
        try:
            self.record["rates"] = comparisons = [
                entry for future in self._compared for entry in future.result()
            ]
        except ImportError as error:
            return [str(error)]
        return report.rates_lines(comparisons)


def _is_baseline_of(other: dict[str, Any], result: dict[str, Any]) -> bool:
    return (
        other["status"] == "ok"
        and other["row"]["kind"] == "nothing"
        and other["row"]["schedule"] == result["row"]["schedule"]
    )


def compared(
    result: dict[str, Any], baseline: dict[str, Any] | None, links: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """`compare_rates` of one limited row, a rank at a time. links: what each rank measured of its link."""
    block = BlockFacts.from_json(links[0]["block"])
    found = []
    for number, rank in enumerate(result["ranks"]):
        actions = [Action(*action) for action in rank["actions"]]
        virtual = len({action.stage for action in actions})
        measured = None
        if baseline is not None:
            timed = baseline["ranks"][number]
            measured = {
                str(Action(*action)): ms / 1e3
                for action, ms in zip(timed["actions"], timed["action_ms"], strict=True)
            }
        sets = {tuple(entry["ranks"]): entry["rates"] for entry in links[number]["rates"]}
        entry = compare_rates(
            actions,
            compute_seconds(actions, block, rank["layers"] / virtual, measured),
            block,
            rank["layers"] // virtual,
            result["row"]["saved_limit_bytes"],
            lone=rates_of(sets[(number,)]),
            shared=rates_of(sets[tuple(range(len(links)))]),
        )
        found.append(
            entry
            | {"label": result["label"], "rank": number, "measured_ms": statistics.median(rank["walls_ms"])}
        )
    return found
