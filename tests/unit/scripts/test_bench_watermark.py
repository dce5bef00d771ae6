"""scripts/bench_watermark.py runs without a GPU, and prints each row beside the one that it is judged by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import bench_watermark
from bench.watermark_work import RowSpec, Work, denoiser_work, run_row


def test_each_workload_has_its_rows_and_the_file_has_their_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "rows.json"
    bench_watermark.main(["--tiny", "--workloads", "short,diffusion", "--out", str(out)])
    said = capsys.readouterr().out.splitlines()
    names = [line.split("|")[1].strip() for line in said if line.startswith("| ") and "| ms |" not in line]
    ablation = ["nothing", "every layer recomputed", "reactive", "+ forecast", "+ restore ahead"]
    assert names[:5] == ablation
    assert names[5:] == ["nothing", "every stage recomputed", "watermark, reactive", "watermark, forecast"]
    found = json.loads(out.read_text())
    rows = {row["name"]: row for row in found["rows"]["short"]}
    assert list(rows) == ablation
    assert all(row["status"] == "ok" and len(row["ms"]) == 2 for row in rows.values())
    assert rows["nothing"]["moved_bytes"] == 0
    assert rows["+ restore ahead"]["moved_bytes"] > 0
    assert rows["+ restore ahead"]["details"]["forecast_bytes"] > 0
    assert rows["reactive"]["details"]["pool_hits"] > 0


def run_out(limit: int) -> Work:
    """Its third step needs more than there is."""
    weight = torch.nn.Linear(64, 64)

    def loss_of(step: int, checkpoints: bool) -> torch.Tensor:
        if step == limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return weight(torch.randn(64 * (step + 1), 64)).tanh().sum()

    return Work(weight, loss_of)


def test_a_row_has_the_mean_of_its_steps_and_names_the_step_that_ran_out_of_memory() -> None:
    spec = RowSpec(name="row", order="forecast", high_bytes=1)
    row = run_row(spec, run_out(9), steps=2, warmup=1, sim=True)
    assert row.status == "ok"
    # of the second and the third step: the input and tanh's output, 16 KiB for each 64 rows
    assert row.moved_bytes == 2 * 16384 * (2 + 3) // 2
    assert row.details["spill_bytes"] == 2 * row.moved_bytes
    beside = run_row(spec, run_out(2), steps=2, warmup=1, sim=True)
    assert beside.status == "out of memory in step 3 of 3: CUDA out of memory. Tried to allocate 1 GiB"
    assert len(beside.ms) == 1
    assert bench_watermark.line(row, beside, spec).split("|")[3] == "  ", "no ratio to a part of the steps"


def test_attention_of_the_diffusion_like_model_takes_a_fused_kernel() -> None:
    """The one without saves the weights of all pairs of pixels, which is 60 GB of what would be 6."""
    work = denoiser_work(torch.device("cpu"), torch.float32, tiny=True, batch=1)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
        work.loss_of(0, False).backward()


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench_watermark.parse(["--tiny", "--workloads", "long"])
    assert (
        "unknown long; known are enough, short, fifth, recomputed, lengths, diffusion"
        in capsys.readouterr().err
    )
