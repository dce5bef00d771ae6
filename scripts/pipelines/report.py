"""The text of the report: the machine, the calculation, the link, a line for each rank of each row, and
equal gradients.

One invariant: every ratio is of two rows of this run; where the row it would refer to did not run the cell is
a dash. GB is 1e9 bytes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

from bench.table import reason_of
from pipelines.memory import BlockFacts, need_lines, need_of
from pipelines.requests import STREAMED, JobShape

GB = 1e9
TIMED = ("nothing", "ours", *STREAMED, "auto")
_SUMMED = "blocks kept_blocks limit_bytes streamed_bytes in_bytes out_bytes stall_ms hits misses"


def step_ms(result: Mapping[str, Any]) -> list[float]:
    """The steps of a row: each as long as its slowest rank."""
    return [max(walls) for walls in zip(*(rank["walls_ms"] for rank in result["ranks"]), strict=True)]


def tokens_a_second(result: Mapping[str, Any], tokens: int) -> float:
    return tokens / (statistics.median(step_ms(result)) / 1e3)


def progress_line(result: Mapping[str, Any], began_s: float) -> str:
    """One line as soon as a row is over."""
    line = f"[{began_s:5.0f} s] {result['label']}: "
    if result["status"] != "ok":
        return line + reason_of(result)[:300]
    kind = result["row"]["kind"]
    if kind in TIMED:
        steps = step_ms(result)
        peaks = ", ".join(f"{rank['active_bytes'] / GB:.1f}" for rank in result["ranks"])
        line += (
            f"step {statistics.median(steps):.0f} ms ({min(steps):.0f} to {max(steps):.0f}), "
            f"active GB {peaks}"
        )
    elif kind == "verify":
        line += _verdict(result)
    else:
        line += "measured"
    return line + f" (row took {result['row_s']:.0f} s)"


def calculation_lines(facts: Mapping[str, Any], shape: JobShape, world: int) -> list[str]:
    """How many layers fit, and why."""
    assert shape.layers is not None
    block = BlockFacts(**facts["block"])
    live = min(world, shape.microbatches)
    need = need_of(block, layers=shape.layers, live=live, optimizer_bytes=shape.optimizer_bytes)
    return need_lines(
        block,
        need,
        sequence=shape.sequence,
        optimizer_bytes=shape.optimizer_bytes,
        ranks=world,
        microbatches=shape.microbatches,
    )


def report_lines(results: Sequence[Mapping[str, Any]], shape: JobShape) -> list[str]:
    """All that is said once the rows have run."""
    links = results[0]
    lines = ["", *link_lines(links), "", *steps_lines(results, shape.microbatches * shape.sequence), ""]
    return lines + verify_lines(results)


def link_lines(result: Mapping[str, Any]) -> list[str]:
    """GB/s by the set of ranks that copied at once."""
    lines = ["link, GB/s of each rank: out, back, both at once"]
    for at, entry in enumerate(result["ranks"][0]["rates"]):
        copying = entry["ranks"]
        rates = [result["ranks"][rank]["rates"][at]["rates"] for rank in copying]
        fields = (("d2h",), ("h2d",), ("duplex_d2h", "duplex_h2d"))
        each = [" ".join(f"{sum(rate[n] for n in names) / GB:.1f}" for rate in rates) for names in fields]
        lines.append(f"  ranks {', '.join(map(str, copying))}: {'; '.join(each)}")
    for rank in result["ranks"][1:2]:
        each = [f"{name} {ms:.2f} ms" for name, ms in rank.get("message_ms", {}).items()]
        if each:
            lines.append(f"  a stage's hidden states from rank 0 to rank 1: {', '.join(each)}")
    sums = [found for rank in result["ranks"] if (found := rank.get("sums"))]
    if sums:
        alone, busy, out, back = (
            " ".join(f"{rank[name] / GB:.1f}" for rank in sums)
            for name in ("alone", "beside_copies", "copies_d2h", "copies_h2d")
        )
        lines.append(
            f"  an all-reduce of {sums[0]['nbytes'] / 1e6:.0f} MB over all ranks, bus GB/s on each: "
            f"alone {alone}; beside copies both ways on every rank {busy}; the copies beside it: out {out}, "
            f"back {back}"
        )
    return lines


def steps_lines(results: Sequence[Mapping[str, Any]], tokens: int) -> list[str]:
    """The table of rows: the first line of each has the whole pipeline's figures, and each rank has a
    line."""
    plain = _fine(results, ("nothing",))
    fitting = {result["row"]["schedule"]: tokens_a_second(result, tokens) for result in plain}
    fastest = max(fitting.values(), default=None)
    rows: list[list[str]] = []
    reasons: list[str] = []
    for result in results:
        if result["row"]["kind"] not in TIMED:
            continue
        if result["status"] != "ok":
            rows.append([result["label"], result["status"]])
            reasons.append(f"{result['label']}: {reason_of(result)}"[:400])
            continue
        steps, speed = step_ms(result), tokens_a_second(result, tokens)
        own = fitting.get(result["row"]["schedule"])
        whole = [
            result["label"],
            f"{statistics.median(steps):.0f}",
            f"{min(steps):.0f}..{max(steps):.0f}",
            f"{speed:,.0f}",
            "-" if own is None else f"{own / speed:.3f}",
            "-" if fastest is None else f"{fastest / speed:.3f}",
        ]
        for number, rank in enumerate(result["ranks"]):
            rows.append([*(whole if number == 0 else [""] * len(whole)), str(number), *_rank_cells(rank)])
    headers = ["row", "step ms", "spread", "tokens/s", "x own", "x best", "rank", "compute ms", "active"]
    headers += ["reserved", "r/a", "saved", "pinned", "h/lent", "stall ms", "out", "back", "refused"]
    return [
        "steps. x own: step over that of the same schedule with nothing offloaded; x best: over the fastest "
        "that fits so. compute: the",
        "rank's actions, stalls included. saved: saved tensors on the device at once, as the engine counts "
        "them. active, reserved, saved,",
        "pinned, out, back, refused in GB of 1e9; h/lent: pinned held over most lent",
        tabulate(rows, headers=headers, disable_numparse=True, colalign=("left", *["right"] * 17)),
        *reasons,
        *map(_start_line, _fine(results, TIMED)),
        *(line for result in _fine(results, ("auto",)) for line in _plan_lines(result)),
        *(line for result in _fine(results, STREAMED) for line in _weights_lines(result)),
    ]


def _fine(results: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[Mapping[str, Any]]:
    """The results of these kinds that have figures."""
    return [each for each in results if each["row"]["kind"] in kinds and each["status"] == "ok"]


def _weights_lines(result: Mapping[str, Any]) -> list[str]:
    """What streamed on each rank, all of its stages together."""
    lines = []
    for number, rank in enumerate(result["ranks"]):
        stages = rank["weights"]
        total = {name: sum(stage[name] for stage in stages) for name in _SUMMED.split()}
        lines.append(
            f"{result['label']}, rank {number}: at most {total['limit_bytes'] / GB:.2f} of "
            f"{total['streamed_bytes'] / GB:.2f} GB of weights on the device, {total['kept_blocks']} of "
            f"{total['blocks']} blocks stay; a step: {total['in_bytes'] / GB:.2f} GB in, "
            f"{total['out_bytes'] / GB:.2f} out, {total['misses']} of {total['hits'] + total['misses']} uses "
            f"not foretold, compute waited {total['stall_ms']:.1f} ms"
        )
    return lines


def _plan_lines(result: Mapping[str, Any]) -> list[str]:
    """What mode auto says of itself on each rank, without its table: that is in --out."""
    lines = []
    for number, rank in enumerate(result["ranks"]):
        said = f"{result['label']}, rank {number}, after {rank['warmup']} steps"
        if rank["predicted_ms"] is not None:
            lines.append(
                f"{said}: the plan's step {rank['predicted_ms']:.1f} ms, measured "
                f"{statistics.median(rank['walls_ms']):.1f}, its actions {sum(rank['action_ms']):.1f}"
            )
        lines += [f"{said}: {line}" for line in rank["explained"].split("\n\n")[0].splitlines()]
    return lines


def _start_line(result: Mapping[str, Any]) -> str:
    """What came before the timed steps."""
    ranks = result["ranks"]
    line = f"{result['label']}: first step {max(rank['first_ms'] for rank in ranks):.0f} ms"
    if all("reserve_bytes" in rank for rank in ranks):
        pinned = " + ".join(f"{rank['reserve_bytes'] / GB:.1f}" for rank in ranks)
        line += (
            f"; {pinned} GB pinned before it, and the link measured, in "
            f"{max(rank['reserve_ms'] for rank in ranks) / 1e3:.1f} s"
        )
    return line


def _rank_cells(rank: Mapping[str, Any]) -> list[str]:
    engine, active, reserved = rank["engine"], rank["active_bytes"], rank["reserved_bytes"]
    cells = [f"{sum(rank['action_ms']):.0f}", f"{active / GB:.2f}", f"{reserved / GB:.2f}"]
    cells.append(f"{reserved / active:.3f}" if active else "-")
    if not engine:
        return [*cells, *["-"] * 7]
    held, lent = engine["host_bytes_held"], engine["host_bytes_lent_peak"]
    return [
        *cells,
        f"{engine['device_bytes_peak'] / GB:.2f}",
        f"{held / GB:.2f}",
        f"{held / lent:.3f}" if lent else "-",
        f"{engine['stall_ms']:.0f}",
        *(f"{engine[name] / GB:.2f}" for name in ("spill_bytes", "restore_bytes", "refused_bytes")),
    ]


def verify_lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a schedule."""
    return [
        f"gradients {result['row']['schedule']}: {_verdict(result)}"
        for result in results
        if result["row"]["kind"] == "verify"
    ]


def equal_gradients(result: Mapping[str, Any]) -> bool:
    """Whether a comparison ran, had something to compare, and found nothing."""
    return result["status"] == "ok" and all(
        rank["num_wrong"] == 0 and rank["left"] > 0 and rank["repeatable"] and all(rank["came"].values())
        for rank in result["ranks"]
    )


def _verdict(result: Mapping[str, Any]) -> str:
    if result["status"] != "ok":
        return reason_of(result)
    ranks = result["ranks"]
    unrepeatable = [number for number, rank in enumerate(ranks) if not rank["repeatable"]]
    if unrepeatable:
        return f"NOT COMPARABLE: without offload two steps differ on rank {unrepeatable[0]}"
    idle = [number for number, rank in enumerate(ranks) if not rank["left"]]
    if idle:
        return f"PROVES NOTHING: no tensor left rank {idle[0]}"
    for kind in ranks[0]["came"]:
        if idle := [number for number, rank in enumerate(ranks) if not rank["came"][kind]]:
            return f"PROVES NOTHING: no weight came to rank {idle[0]} with {kind}"
    wrong = sum(rank["num_wrong"] for rank in ranks)
    if wrong:
        first = next(rank["wrong"][0] for rank in ranks if rank["wrong"])
        return f"DIFFERENT in {wrong} tensors, first {first}"
    left = "+".join(str(rank["left"]) for rank in ranks)
    tensors = "+".join(str(rank["tensors"]) for rank in ranks)
    came = "".join(
        f", {sum(rank['came'][kind] for rank in ranks) / 1e6:.1f} MB came in those of {kind}"
        for kind in ranks[0]["came"]
    )
    return (
        f"bitwise equal on every rank: {tensors} tensors in {ranks[0]['steps']} steps, "
        f"{left} saved tensors left{came}"
    )
