"""The table of scripts/bench_model.py: a line a row, as it ends, with its ratios to others of its model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.table import aligned, reason_of

GB = 1e9
HELD = 6
"""Steps from which on none of auto's may take much longer than one that recomputes every block."""
_COLUMNS = (
    ("model", -10),
    ("row", -17),
    ("ms", 7),
    ("x rule", 6),
    ("x plain", 7),
    ("active", 7),
    ("any", 7),
    ("reserv", 6),
    ("pinned", 6),
    ("first", 6),
    ("worst", 6),
    ("settle", 6),
)
_HEADER = (
    "ms a step, median of the timed ones; first: the first step's ms; x rule: over the rule within the same "
    "total;\nactive, any: peak of the timed steps and of any step, GB of 1e9; worst: longest step after step "
    f"{HELD}, over a step\nthat recomputes every block; settle: steps before the timed ones"
)


def row_line(result: Mapping[str, Any]) -> str:
    """One row of the table, or why there is none."""
    if result["status"] != "ok":
        about = [result["model"], result["label"], *[""] * (len(_COLUMNS) - 2)]
        return f"{aligned(about, _COLUMNS).rstrip()}  {reason_of(result)}"[:220]

    def number(name: str, digits: int, unit: float = 1.0) -> str:
        return f"{result[name] / unit:.{digits}f}" if name in result else "-"

    cells = [result["model"], result["label"], number("step_ms", 1)]
    cells += [number("over_rule", 3), number("over_plain", 3)]
    cells += [number("active_bytes", 3, GB), number("active_any_bytes", 3, GB)]
    cells += [number("reserved_bytes", 2, GB), number("pinned_held", 2, GB), number("first_step_ms", 0)]
    cells += [number("worst_over", 3), str(result["settle"])]
    return "  ".join([aligned(cells, _COLUMNS), *_notes(result)])


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    total = result["request"]["total_bytes"]
    if "blocks" in result:
        none = ""
        if "recomputed_ms" in result:
            none = f"; 0 take {result['recomputed_ms']:.1f} ms, {result['recomputed_bytes'] / GB:.3f} GB"
        yield f"{result['plain_blocks']} of {result['blocks']} plain{none}"
    if total is not None and result["active_any_bytes"] > total:
        yield f"OVER its total: {result['active_any_bytes'] / total:.3f}"
    if "final" in result:
        yield f"{result['hooks']} hooks" + ("" if result["final"] else "; NOT settled")
    if "plain_ms" in result:
        yield f"{result['step_ms'] / result['plain_ms']:.4f} of plain here, {result['plain_ms']:.1f}"
    if "gradients" in result:
        yield str(result["gradients"]["verdict"])


def header_lines() -> str:
    """What the columns are, and their names."""
    return f"{_HEADER}\n{aligned([name for name, _ in _COLUMNS], _COLUMNS)}"


def add_ratios(result: dict[str, Any], done: Mapping[str, Mapping[str, Any]]) -> None:
    """Put a row's ratios to rows before it into its result: to the rule within the same total, to plain, and
    of its longest late step to a step that recomputes every block. done: of the same model, by label."""
    _, at, total = result["label"].partition("@")
    plain, rule = done.get("plain"), done.get(f"rule@{total}") if at else None
    if plain is not None:
        result["over_plain"] = result["step_ms"] / plain["step_ms"]
    recomputed_ms = done.get("torch_checkpoint", {}).get("step_ms")
    if rule is not None:
        result["over_rule"] = result["step_ms"] / rule["step_ms"]
        recomputed_ms = recomputed_ms or rule["recomputed_ms"]
    if recomputed_ms is not None:
        result["worst_over"] = result["worst_late_ms"] / recomputed_ms
