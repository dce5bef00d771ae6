"""scripts/bench_watermark.py runs without a GPU, and prints each row beside the one that it is judged by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_watermark


def test_each_workload_has_its_rows_and_the_file_has_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    bench_watermark.main(["--tiny", "--workloads", "short,recomputed,diffusion", "--out", str(out)])
    said = capsys.readouterr().out.splitlines()
    names = [line.split("|")[1].strip() for line in said if line.startswith("| ") and "| ms |" not in line]
    ablation = ["nothing", "reactive", "+ forecast", "+ restore ahead"]
    assert names[:4] == ablation
    assert names[4:7] == ["every layer recomputed", "watermark, reactive", "watermark, forecast"]
    assert names[7:] == [*("nothing", "every stage recomputed", "watermark, reactive", "watermark, forecast")]
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]["short"]}
    assert list(rows) == ablation
    assert all(row["status"] == "ok" and len(row["ms"]) == 2 for row in rows.values())
    assert rows["nothing"]["moved_bytes"] == 0
    assert rows["+ restore ahead"]["moved_bytes"] > 0
    assert rows["+ restore ahead"]["details"]["forecast_bytes"] > 0
    assert rows["reactive"]["details"]["pool_hits"] > 0


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_watermark.parse(["--tiny", "--workloads", "long"])
    assert (
        "unknown long; known are enough, short, fifth, recomputed, lengths, diffusion"
        in capsys.readouterr().err
    )
