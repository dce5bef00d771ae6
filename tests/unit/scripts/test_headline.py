"""The headline picture: its points are those that it is given, and that of docs/ has the page's figures."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

import headline
from bench.points import Panel, Point, panels_of_page, panels_of_runs

pytest.importorskip("matplotlib", reason="needs the extra plot")
PAGE = headline.PAGE.read_text()


def result(row: str, step_ms: float, active_gb: float, **more: Any) -> dict[str, Any]:
    return {
        "row": row,
        "workload": "W1",
        "status": "ok",
        "shape": {"layers": 12, "sequence": 16384},
        "step_ms": step_ms,
        "active_bytes": active_gb * 1e9,
    } | more


def limited(kind: str, gb: float) -> dict[str, Any]:
    return {"options": {f"{kind}_limit_bytes": gb * 1e9}}


RUNS = [
    {
        "results": [
            result("nothing", 600.0, 42.0),
            result("checkpoint", 750.0, 17.0),
            {"row": "trl", "workload": "W1", "status": "not installed"},
            result("ours_all", 1200.0, 18.0, **limited("saved", 3)),
            result("ours_all", 900.0, 30.0, **limited("saved", 12)),
        ]
    },
    {  # a machine that is slower by a sixth: its times are over its own `nothing`
        "results": [
            result("nothing", 700.0, 42.0),
            result("ours_attention", 700.0, 39.5),
            result(
                "ours_auto",
                770.0,
                22.0,
                **limited("total", 22),
                notes={"bounds": [[20e9, 735.0], [24e9, 721.0]]},
            ),
        ]
    },
]


def test_rows_of_several_runs_are_points_and_ours_under_limits_are_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    draw = headline.draw
    monkeypatch.setattr(headline, "draw", lambda panels: figures.append(draw(panels)) or figures[-1])
    (panel,) = panels_of_runs(RUNS)
    assert panel == Panel(
        "W1: 12 layers, 16,384 tokens",
        (
            Point("nothing", "peer", 42.0, 1.0),
            Point("checkpoint, every layer", "peer", 17.0, 1.25),
            Point("all groups, 3 GB of saved bytes", "groups", 18.0, 2.0),
            Point("all groups, 12 GB of saved bytes", "groups", 30.0, 1.5),
            Point("attention groups", "ours", 39.5, 1.0),
            Point("auto, 22 GB in all", "auto", 22.0, 1.1),
        ),
        ((20.0, 1.05), (24.0, 1.03)),
    )
    files = [tmp_path / f"{at}.json" for at in range(len(RUNS))]
    for file, record in zip(files, RUNS, strict=True):
        file.write_text(json.dumps(record))
    assert headline.main([*map(str, files), "--picture", str(tmp_path / "runs.png")]) == 0
    assert data_of(tmp_path / "runs.png") == as_data([panel])
    (axes,) = figures[0].axes
    drawn = {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.lines}
    assert drawn == {
        "ours, mode auto within a total": [(22.0, 1.1)],
        "ours, all groups moved under a limit": [(18.0, 2.0), (30.0, 1.5)],
        "ours, other modes": [(39.5, 1.0)],
        "torch and peers": [(17.0, 1.25), (42.0, 1.0)],
        "bound of any mixture (computed)": [(20.0, 1.05), (24.0, 1.03)],
    }
    dashes = {line.get_label(): line.get_linestyle() for line in axes.lines}
    assert [label for label, style in dashes.items() if style == "None"] == [
        "ours, other modes",
        "torch and peers",
    ]


def test_a_run_without_memory_or_what_its_times_are_over_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the row checkpoint of W1: .* has no row nothing before it"):
        panels_of_runs([{"results": [result("checkpoint", 750.0, 17.0)]}])
    with pytest.raises(ValueError, match="the row nothing measured no device memory: its run had no GPU"):
        panels_of_runs([{"results": [result("nothing", 200.0, 0.0)]}])
    with pytest.raises(ValueError, match="the row auto@14 has no workload: give files that bench_stage"):
        panels_of_runs([{"results": [{"row": "auto", "label": "auto@14", "status": "ok"}]}])
    with pytest.raises(SystemExit):
        headline.main(["run.json"])


def test_the_picture_in_the_docs_is_of_the_figures_on_the_page() -> None:
    """`python scripts/headline.py` draws it again."""
    panels = panels_of_page(PAGE)
    assert data_of(headline.PICTURE) == as_data(panels), "draw it again: python scripts/headline.py"
    assert headline.PICTURE.stat().st_size <= 80_000
    first, second = panels
    assert Point("nothing", "peer", 42.56, 1.0) in first.points
    assert Point("TRL 1.16.0", "peer", 13.98, 2.19) in first.points
    assert Point("attention groups", "ours", 39.88, 1.0) in first.points
    assert sum(point.series == "groups" for point in second.points) == 4
    for panel in panels:
        auto = [point for point in panel.points if point.series == "auto"]
        # the line goes through the bound of a measured row, and no plan of any total is below it
        bound = dict(panel.bound)
        known = {float(point.name.split()[1]): point for point in auto if point.least is not None}
        least = {total: point.least for total, point in known.items() if total in bound}
        total = next(at for at, of in least.items() if bound[at] == pytest.approx(of, abs=2e-3))
        assert [least for _, least in panel.bound] == sorted(
            (least for _, least in panel.bound), reverse=True
        )
        assert all(point.over_nothing > bound[total] for point in auto if point.active_gb <= total)


def test_a_page_without_a_workload_or_its_bounds_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no section with rows of W1, .* it has \['W2'\] and bounds of \['W1', 'W2'\]"
    ):
        panels_of_page(PAGE.replace("## W1:", "## A:"))
    with pytest.raises(ValueError, match=r"rows of W1, W2, .* bounds of \[\]"):
        panels_of_page(PAGE.replace("least of any mixture, computed", "another table"))


def test_no_name_covers_another_name_or_a_point_of_the_page() -> None:
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure = headline.draw(panels_of_page(PAGE))
    canvas = figure.canvas.get_renderer()
    for axes in figure.axes:
        names = [Text.get_window_extent(text, canvas) for text in axes.texts]
        points = [axes.transData.transform(point) for line in axes.lines[:-1] for point in line.get_xydata()]
        markers = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in points]
        assert len(names) == len(markers)
        assert not any(one.overlaps(other) for one, other in itertools.combinations(names, 2))
        assert not any(name.overlaps(marker) for name in names for marker in markers)


def data_of(picture: Path) -> Any:
    from PIL import Image

    with Image.open(picture) as opened:
        return json.loads(opened.text["data"])  # type: ignore[attr-defined]


def as_data(panels: list[Panel]) -> Any:
    return json.loads(json.dumps([panel.as_dict() for panel in panels]))
