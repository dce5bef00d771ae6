"""A report as one page of HTML, which is complete: it loads nothing, runs no script, and may be mailed.

One invariant: the page shows what the report says, text for text, and adds no figure but sums of the trace's
own. Names are the user's, and are escaped wherever they stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from offload.sizes import bytes_text
from offload.telemetry.drawing import (
    KIND_COLORS,
    MEMORY_LINES,
    group_colors,
    require_matplotlib,
    svg_of_lanes,
    svg_of_memory,
)
from offload.telemetry.timeline import Timeline

WORTH = 0.02
"""Of a step: what stalls less is within what steps of one run differ by."""

_MOST_ROWS = 100  # of a table, and of figures by group or rank
_MOST_NAMES = 24  # of a legend
_WIDE, _NARROW = (12.5, 4.2), (4.4, 3.8)
"""Inches of a picture in a window of 1,400 and of 400 pixels, of which an inch is about 90."""


class Table(NamedTuple):
    """Headers, and rows of as many texts; the first column is the row's name, its header the table's. none:
    what to say where there are no rows."""

    headers: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    none: str = "none"

    @property
    def title(self) -> str:
        title = self.headers[0] or "all figures"
        return title[:1].upper() + title[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Contents of the page.

    | name | |
    |---|---|
    | figures | as_dict() of the report |
    | lead | the verdict and what to change, a line each; or why there is none |
    | simulated | stalls are a simulated link's |
    | tables | in their order |
    | choices, choice | what mode "auto" chose: sentences, and by block |
    | text | of weights and gradients that wait on the host |
    | footer | who wrote it, and when |
    | timeline | of a traced step, None without one |
    """

    figures: Mapping[str, Any]
    lead: Sequence[str]
    simulated: bool = False
    tables: Sequence[Table] = ()
    choices: Sequence[str] = ()
    choice: Table | None = None
    text: str = ""
    footer: str = ""
    timeline: Timeline | None = field(default=None, repr=False)


def write_page(path: str | Path, page: Page) -> None:
    """Raises ImportError for a timeline without matplotlib, ValueError for one in which nothing was recorded;
    nothing is written then."""
    pictures = None if page.timeline is None else _pictures(page.timeline)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(Path(__file__).with_name("page.html").read_text("utf-8"))
    text = template.render(
        answer=_answer(page.figures, page.simulated),
        lead=page.lead,
        tiles=_tiles(page.figures, page.simulated),
        pictures=pictures,
        choice={"lines": page.choices, "table": page.choice},
        tables=page.tables,
        text=page.text,
        footer=page.footer,
        figures=_first(page.figures),
        most_rows=_MOST_ROWS,
    )
    Path(path).write_bytes(text.encode("utf-8", "backslashreplace"))  # a name may have half a character


def _answer(figures: Mapping[str, Any], simulated: bool) -> dict[str, str]:
    """Answer for the last step, by the conditions of the report's own advice."""
    last, kinds = figures["last_step"], figures["kinds"].values()
    if not last and not kinds:
        return {"state": "unknown", "word": "No step has ended yet."}
    moved = [last["moved_bytes"]] if last else []
    moved += [kind["out_bytes"] + kind["in_bytes"] for kind in kinds]
    if not any(moved) and figures["recomputes"] and not figures["saved_bytes"]:
        return {"state": "unknown", "word": "Blocks were recomputed, and nothing left the device."}
    if not any(moved):
        by_plan = last and last["by_plan_bytes"] == last["kept_bytes"] > 0
        return {"state": "unknown" if by_plan else "no", "word": "Nothing left the device in the last step."}
    slow = last and not simulated and last["stall_ms"] > WORTH * last["step_ms"]
    no_less = last and last["peak_bytes"] >= last["would_hold_bytes"] > 0
    if last and (slow or no_less or last["no_host_bytes"] or last["over_limit_bytes"]):
        return {"state": "partly", "word": "In part."}
    return {"state": "yes", "word": "Yes, as far as a simulated device shows." if simulated else "Yes."}


def _tiles(figures: Mapping[str, Any], simulated: bool) -> list[dict[str, Any]]:
    last, peak_bytes = figures["last_step"], figures["device_peak_bytes"]
    if not last:
        return []

    def tile(name: str, label: str, value: int, beside: str, share: float | None = None) -> dict[str, Any]:
        found = {"name": name, "label": label, "value": value, "text": bytes_text(value)}
        return found | {"beside": beside, "share": share}

    tiles = [tile("device_peak_bytes", "Device memory, at most", peak_bytes, "active")] if peak_bytes else []
    if figures["saved_bytes"]:
        held, without, moved = last["peak_bytes"], last["would_hold_bytes"], last["moved_bytes"]
        instead = f"instead of {bytes_text(without)} if nothing had left" if without else ""
        share, of_saved = (held / without if without else None), f"of {bytes_text(last['saved_bytes'])} saved"
        tiles += [
            tile("peak_bytes", "Saved tensors on the device, at most", held, instead, share),
            tile("moved_bytes", "Moved to the host in the last step", moved, of_saved),
        ]
    for kind, one in figures["kinds"].items():
        if kind != "activations":
            beside = f"on the device; {bytes_text(one['host_bytes'])} on the host"
            tiles.append(tile(kind, kind.capitalize(), one["device_bytes"], beside))
    stalls = tile("stall_ms", "Compute waited for copies", last["stall_ms"], "")
    stalls["text"] = f"{last['stall_ms']:,.1f} ms"
    if last["step_ms"]:
        stalls["text"] += f" ({last['stall_ms'] / last['step_ms']:.1%})"
        stalls["beside"] = f"of a step of {last['step_ms']:,.1f} ms" + ", simulated" * simulated
    in_use = f"{bytes_text(last['host_lent_bytes'])} in use at once"
    return [*tiles, stalls, tile("host_bytes", "Pinned host memory", last["host_bytes"], in_use)]


def _pictures(timeline: Timeline) -> dict[str, Any]:
    require_matplotlib()
    timeline.check_recorded()
    most = {
        kind: f"at most {bytes_text(max(sample.by_kind[kind] for sample in timeline.memory))}"
        for kind in KIND_COLORS
    }
    if timeline.simulated:
        most["others"] = "only a GPU shows"
    kinds = [{"name": kind, "color": color, "text": most[kind]} for kind, color in KIND_COLORS.items()]
    kinds += [{"name": name, "color": color, "text": ""} for name, color in MEMORY_LINES.items()]
    colors = group_colors(timeline)
    groups = [{"name": name, "color": color} for name, color in [*colors.items()][:_MOST_NAMES]]
    if len(colors) > _MOST_NAMES:
        groups.append({"name": f"and {len(colors) - _MOST_NAMES} more in the same colors", "color": ""})
    groups.append({"name": "paler: backward", "color": ""})
    return {
        "memory": [Markup(svg_of_memory(timeline, inches)) for inches in (_WIDE, _NARROW)],
        "lanes": [Markup(svg_of_lanes(timeline, inches)) for inches in (_WIDE, _NARROW)],
        "kinds": kinds,
        "groups": groups,
    }


def _first(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of the first groups and ranks, of ranks without groups: all of them would be megabytes."""

    def first(found: Mapping[Any, Any]) -> dict[Any, Any]:
        return dict(itertools.islice(found.items(), _MOST_ROWS))

    last, ranks = dict(figures["last_step"]), first(figures["ranks"])
    if last:
        last["groups"] = first(last["groups"])
    ranks = {rank: {**of, "groups": {}} for rank, of in ranks.items()}
    return {**figures, "groups": first(figures["groups"]), "last_step": last, "ranks": ranks}
