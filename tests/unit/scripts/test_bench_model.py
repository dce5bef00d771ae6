"""scripts/bench_model.py runs without a GPU: a model of transformers in a user's loop, and the gradients of
each row beside those of the plain one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import bench_model


def test_each_row_trains_the_same_model_and_its_gradients_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2}))
    out = tmp_path / "rows.json"
    rows = ["--rows", "checkpoint,hidden_states,auto", "--device-total-gb", "0.0002,1", "--samples", "2"]
    assert bench_model.main(["--tiny", "--config", str(config), *rows, "--out", str(out)]) == 0
    found = {row["label"]: row for row in json.loads(out.read_text())["results"]}
    assert [*found] == ["nothing", "checkpoint", "hidden_states", "auto@0.0002", "auto@1"]
    verdicts = [row["gradients"]["verdict"] for row in found.values()]
    assert verdicts == ["reference", *["bitwise"] * 4]
    assert found["hidden_states"]["engine"]["spill_bytes"] > 0
    assert found["auto@1"]["over_bound"] > 0
    said = capsys.readouterr().out
    assert "auto@1:\nauto: planned" in said
    assert "transformer.h.0" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "auto,trl"], "unknown rows trl; known are nothing, checkpoint, every_second,"),
        (
            ["--device-total-gb", "12,x"],
            "--device-total-gb is '12,x'; must be numbers above 0, as 12,14.5",
        ),
        (["--device-total-gb=-3"], "--device-total-gb is '-3'; must be numbers above 0"),
        (["--config", "missing.json"], "--config missing.json is no file; give the config.json of a model"),
        (["--samples", "0"], "--samples is 0; it must be at least 1"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_first_row(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_model.parse(arguments)
    assert said in capsys.readouterr().err
