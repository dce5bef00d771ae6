"""What the headline picture is drawn from: step time over memory, a panel a workload.

The points are read from the tables of docs/benchmarks.md, or from the files that bench_stage.py --out writes.
One invariant: no figure is written here. A point was measured; what was computed is the bound's line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["BOUND", "WORKLOADS", "Panel", "Point", "panels_of_page", "panels_of_runs"]

GB = 1e9
WORKLOADS = ("W1", "W2")
"""Of the page, in this order."""
BOUND = "least of any mixture, computed"
"""First cell of the page's table of bounds; its further columns are totals in GB."""
_AUTO_COLUMNS = ("work", "total")

Series = Literal["auto", "groups", "ours", "peer"]


@dataclass(frozen=True, slots=True)
class Point:
    """A measured row. over_nothing: its step time over that of the same run with nothing offloaded. least:
    the bound of mode auto's row, over the same."""

    name: str
    series: Series
    active_gb: float
    over_nothing: float
    least: float | None = None


@dataclass(frozen=True, slots=True)
class Panel:
    """One workload. bound: total GB and the least time over nothing, by total; () where none was computed."""

    title: str
    points: tuple[Point, ...]
    bound: tuple[tuple[float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


# -- the page ------------------------------------------------------------------------------------------------
def panels_of_page(text: str) -> list[Panel]:
    """The panels of W1 and W2. Raises ValueError where the page has no points or no bound of one."""
    titles: dict[str, str] = {}
    points: dict[str, list[Point]] = {name: [] for name in WORKLOADS}
    bounds: dict[str, tuple[tuple[float, float], ...]] = {}
    for heading, row in _rows(text):
        first, work = next(iter(row)), heading.partition(":")[0]
        if first == BOUND:
            totals = [(_number(total), _number(cell)) for total, cell in list(row.items())[1:] if cell]
            bounds[row[first]] = tuple(totals)
        elif tuple(row)[:2] == _AUTO_COLUMNS:
            if row["work"] in points:
                points[row["work"]].append(_point(f"ours, auto, {row['total']} in all", row))
        elif work in points and first == "row":
            titles[work] = heading
            points[work].append(_point(row["row"], row))
    missing = [name for name in WORKLOADS if name not in titles or name not in bounds]
    if missing:
        raise ValueError(
            f"the page has no section with rows of {', '.join(missing)}, or no row of it in the table "
            f"'{BOUND}'; it has {sorted(titles)} and bounds of {sorted(bounds)}"
        )
    return [Panel(titles[name], tuple(points[name]), bounds[name]) for name in WORKLOADS]


def _rows(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Each row of a table: the heading that it stands under, and its cells by column, without marks of
    emphasis and code."""
    heading, columns = "", None
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line.removeprefix("## ")
        if not line.startswith("|"):
            columns = None
            continue
        cells = [re.sub(r"\*\*|`", "", cell).strip() for cell in line.strip("|").split("|")]
        if columns is None:
            columns = cells
        elif not set(cells[0]) <= {"-"} or not cells[0]:
            yield heading, dict(zip(columns, cells, strict=True))


def _point(name: str, row: Mapping[str, str]) -> Point:
    active_gb, over_nothing = _number(row["active"]), _number(row["/ nothing"])
    ours, _, rest = name.partition(", ")
    if ours != "ours":
        return Point(name, "peer", active_gb, over_nothing)
    if rest.startswith("auto"):
        least = over_nothing / _number(row["/ bound"]) if row["/ bound"] else None
        return Point(rest, "auto", active_gb, over_nothing, least)
    return Point(rest, "groups" if rest.startswith("all groups") else "ours", active_gb, over_nothing)


def _number(cell: str) -> float:
    return float(cell.removesuffix("GB").replace(",", ""))


# -- files of runs -------------------------------------------------------------------------------------------
_NAMES = {
    "checkpoint": "checkpoint, every layer",
    "selective": "selective checkpoint",
    "ours_all": "all groups",
    "ours_attention": "attention groups",
    "ours_auto": "auto",
}
_SERIES: Mapping[str, Series] = {"ours_auto": "auto", "ours_all": "groups"}


def panels_of_runs(records: Iterable[Mapping[str, Any]]) -> list[Panel]:
    """A panel for each workload and length that the records have; of a row that several have, the last is
    drawn. Rows that did not run are left out. Raises ValueError for a record of another script, of a run
    without a GPU, or without the row "nothing", which times are over."""
    points: dict[str, dict[str, Point]] = {}
    bounds: dict[str, tuple[tuple[float, float], ...]] = {}
    for record in records:
        plain_ms: dict[str, float] = {}
        for result in record["results"]:
            if result["status"] != "ok":
                continue
            row, label = result["row"], result.get("label", result["row"])
            if "shape" not in result:
                raise ValueError(
                    f"the row {label} has no workload: give files that bench_stage.py --out wrote"
                )
            if not result["active_bytes"]:
                raise ValueError(
                    f"the row {label} measured no device memory: its run had no GPU, draw another"
                )
            shape = result["shape"]
            title = f"{result['workload']}: {shape['layers']} layers, {shape['sequence']:,} tokens"
            if row == "nothing":
                plain_ms[title] = result["step_ms"]
            if title not in plain_ms:
                raise ValueError(
                    f"the row {label} of {title} has no row nothing before it, which its time is over"
                )
            over = result["step_ms"] / plain_ms[title]
            series = _SERIES.get(row, "ours" if row.startswith("ours") else "peer")
            found = Point(_name(row, result.get("options", {})), series, result["active_bytes"] / GB, over)
            points.setdefault(title, {})[found.name] = found
            if pairs := result.get("notes", {}).get("bounds"):
                bounds[title] = tuple((total / GB, ms / plain_ms[title]) for total, ms in pairs)
    return [Panel(title, tuple(own.values()), bounds.get(title, ())) for title, own in points.items()]


def _name(row: str, options: Mapping[str, Any]) -> str:
    name = _NAMES.get(row, row.removeprefix("ours_").replace("_", " "))
    for option, words in (("total_limit_bytes", "in all"), ("saved_limit_bytes", "of saved bytes")):
        if options.get(option) and row.startswith("ours"):
            return f"{name}, {options[option] / GB:g} GB {words}"
    return name
