"""scripts/bench_moe.py runs without a GPU: each row's gradients beside those of the plain one, tokens routed
by Zipf's law, and runs by files of switches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bench_moe
from mixtures import configs
from mixtures.rows import ROWS, ROWS_OF
from mixtures.work import WORKS, ZipfGate


def ran(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The rows of a tiny run, by name."""
    out = tmp_path / "rows.json"
    assert bench_moe.main(["--tiny", *arguments, "--out", str(out)]) == 0
    return {row["row"]: row for row in json.loads(out.read_text())["results"]}


@pytest.mark.req("S3-92")
def test_each_row_trains_the_same_model_and_its_gradients_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ran(tmp_path, "--work", "layer")
    assert [*rows] == [*ROWS_OF["layer"]]
    verdicts = {name: row["gradients"]["verdict"] for name, row in rows.items()}
    assert verdicts == {"nothing": "reference", **dict.fromkeys([*rows][1:], "bitwise")}
    for name, row in rows.items():
        if ROWS[name].moves:
            assert row["engine"]["spill_bytes"] > 0, name
    steps = [step for row in rows.values() for step in row["samples"]]
    assert all(0 < step["step_ms"] <= step["wall_ms"] for step in steps)
    layers, rows_of_tokens, dim, hidden, item = 2, 32 * 4, 64, 64, 4
    saved = {name: row["saved_bytes"] for name, row in rows.items()}
    # each token once for each of its experts; and the first product, which is twice as wide as an expert
    assert saved["nothing_permuted"] - saved["nothing"] == layers * rows_of_tokens * dim * item
    first_products = layers * rows_of_tokens * 2 * hidden * item
    assert saved["nothing"] - saved["experts_checkpoint"] == first_products
    said = capsys.readouterr().out
    assert "after the forward" not in said, "a CPU tells no active bytes"


def test_a_window_of_microbatches_and_lengths_that_vary_keep_every_bit(tmp_path: Path) -> None:
    rows = ran(tmp_path, "--work", "window")
    assert rows["experts_leave"]["gradients"]["verdict"] == "bitwise"
    assert rows["experts_leave"]["engine"]["spill_bytes"] > 0
    rows = ran(tmp_path, "--work", "lengths", "--samples", "6")
    assert rows["groups"]["gradients"]["verdict"] == "bitwise"
    left = {step["spill_bytes"] for step in rows["groups"]["samples"]}
    assert len(left) > 1, "steps of one length"


def test_the_loads_of_experts_follow_zipfs_law_and_change_owners_with_the_step() -> None:
    experts, tokens = 8, 40_000
    gate = ZipfGate(nn.Linear(4, experts, bias=False), layer=0)
    nn.init.zeros_(gate.weight)
    x = torch.randn(tokens, 4)
    total = sum(1 / rank for rank in range(1, experts + 1))
    law = [1 / rank / total for rank in range(1, experts + 1)]
    busiest = set()
    for step in range(6):
        gate.drawn = step
        logits = gate(x)
        assert torch.equal(logits, gate(x)), "a recompute routes as the forward"
        counts = torch.bincount(logits.argmax(-1), minlength=experts)
        shares = sorted((counts / tokens).tolist(), reverse=True)
        # three standard deviations of the largest share
        assert shares == pytest.approx(law, abs=3 * (0.25 / tokens) ** 0.5)
        busiest.add(int(counts.argmax()))
    assert len(busiest) > 1


def test_every_row_of_a_work_is_known() -> None:
    assert set(ROWS_OF) == set(WORKS)
    assert {name for rows in ROWS_OF.values() for name in rows} == set(ROWS)


@pytest.mark.req("S3-83", "S3-96")
def test_runs_by_files_of_switches_learn_the_same_and_print_memory_and_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ran(tmp_path, "--work", "configs")
    assert {"baseline", "fsdp_offload", "fsdp_offload_selective", "full_checkpoint"} < set(rows)
    assert configs.STEPS == 15
    losses = {(row["first_loss"], row["last_loss"]) for row in rows.values()}
    assert len(losses) == 1
    ((first, last),) = losses
    assert last < first
    moved = {name for name, row in rows.items() if row["moved_bytes"]}
    assert moved == {"experts_offload", "experts_both", "experts_and_fsdp"}
    said = capsys.readouterr().out
    assert "tokens/s" in said
    assert "active GB" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[training]\nenable_offload = true", "enable_offload is no key of torchtitan's training table"),
        ("[training]\nenable_cpu_offload = 1", "enable_cpu_offload is 1, must be bool"),
        ("[training]\nsteps = 9", "steps would change nothing here; what does is mode of"),
        ("[job]\nname = 'a'", "job would change nothing here"),
        ("[activation_checkpoint]\nmode = 'half'", "mode is 'half', must be one of none, selective, full"),
        ("[training", "Expected"),
    ],
)
def test_a_file_of_switches_that_cannot_be_meant_is_refused(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(SystemExit):
        bench_moe.parse(["--work", "configs", "--config", str(path)])
    shown = capsys.readouterr().err
    assert f"{path}: " in shown
    assert said in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--work", "layer,dense"], "unknown works dense; known are layer, window,"),
        (["--rows", "groups,peft"], "unknown rows peft; known are nothing,"),
        (["--kept", "0"], "--kept is 0.0; it is a share, above 0 and at most 1"),
        (["--samples", "0"], "--samples is 0; it must be at least 1"),
        (["--config", "missing.toml"], "missing.toml: [Errno 2]"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_row(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_moe.parse(arguments)
    assert said in capsys.readouterr().err
