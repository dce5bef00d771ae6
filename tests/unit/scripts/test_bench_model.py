"""scripts/bench_model.py runs without a GPU: models in a user's loop, the rule that auto is compared with,
and the gradients of each row beside those of the plain one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bench_model
from bench.families import FAMILIES, GROUPS, Setting
from bench.rule import Rule, find_blocks, most_that_fits


def results(path: Path) -> dict[str, dict[str, Any]]:
    return {row["label"]: row for row in json.loads(path.read_text())["results"]}


def test_each_row_trains_the_same_model_and_its_gradients_are_compared(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config, out = tmp_path / "config.json", tmp_path / "rows.json"
    config.write_text(
        json.dumps({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64})
    )
    rows = ["--rows", "gc,hidden_states,rule,auto", "--gradients", "--beside-plain"]
    arguments = ["--tiny", "--config", str(config), *rows, "--device-total-gb", "0.0002", "--out", str(out)]
    assert bench_model.main(arguments) == 0
    found = results(out)
    assert [*found] == ["plain", "gc", "hidden_states", "rule@0.0002", "auto@0.0002"]
    assert [row["gradients"]["verdict"] for row in found.values()] == ["reference", *["bitwise"] * 4]
    assert found["hidden_states"]["engine"]["spill_bytes"] > 0
    assert all(("plain_ms" in row) == (row["row"] != "plain") for row in found.values())


def test_auto_stands_beside_the_rule_within_the_same_total(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "rows.json"
    monkeypatch.setitem(FAMILIES, "readme", replace(FAMILIES["readme"], totals=(0.8,), shares=True))
    rows = ["--models", "readme", "--rows", "rule,auto", "--total-number", "1"]
    assert bench_model.main(["--tiny", *rows, "--samples", "1", "--out", str(out)]) == 0
    plain, rule, auto = results(out).values()
    assert [plain["label"], rule["row"], auto["row"]] == ["plain", "rule", "auto"]
    assert (rule["blocks"], rule["plain_blocks"]) == (8, 8)  # a CPU tells no bytes: all of it fits
    assert auto["over_rule"] == auto["step_ms"] / rule["step_ms"]
    assert auto["worst_over"] == max(auto["trace_ms"][6:]) / rule["recomputed_ms"]
    assert (plain["hooks"], rule["hooks"]) == (0, 8)  # a replaced forward each
    said = (tmp_path / "rows.explain.txt").read_text()
    assert said.splitlines()[0].split()[:2] == ["readme", auto["label"]]
    assert said.splitlines()[1] == auto["explained"].splitlines()[0]
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[6:-1]] == [
        ["readme", row["label"]] for row in (plain, rule, auto)
    ]


def test_a_row_that_runs_out_of_memory_says_so_and_the_next_ones_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(setting: Setting) -> Any:
        model = nn.Linear(2, 2)

        def loss(number: int) -> torch.Tensor:
            if model.weight._version > 1:  # after a step
                raise torch.OutOfMemoryError("out of memory. Tried to allocate\nmore than there is")
            return model(torch.ones(1, 2)).sum()

        return model, loss

    monkeypatch.setitem(FAMILIES, "readme", replace(FAMILIES["readme"], make=make, shares=True))
    arguments = ["--tiny", "--models", "readme", "--rows", "torch_checkpoint,rule", "--total-number", "2"]
    assert bench_model.main(arguments) == 1
    said = capsys.readouterr().out
    assert "readme     plain  failed: OutOfMemoryError: out of memory. Tried to allocate\n" in said
    assert "readme     torch_checkpoint  failed: OutOfMemoryError: " in said
    assert "readme     rule@16 of plain  skipped: its total is a share of what plain takes" in said


def test_the_rule_recomputes_all_but_the_last_blocks_that_fit() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(5)])
    calls: list[int] = []
    for number, block in enumerate(model):
        block[0].register_forward_hook(lambda *_, number=number: calls.append(number))
    x = torch.randn(3, 4, requires_grad=True)
    model(x).sum().backward()
    expected = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    rule = Rule(model)
    asked: list[int] = []

    def step() -> int:
        asked.append(rule.num_plain)
        if rule.num_plain == 5:
            raise torch.OutOfMemoryError
        return 10 * rule.num_plain

    rule.choose(step, 20)
    assert (rule.num_plain, asked) == (2, [3, 1, 2])
    calls.clear()
    model.zero_grad()
    model(x).sum().backward()
    assert calls == [0, 1, 2, 3, 4, 2, 1, 0]
    found = [one.grad for one in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    rule.choose(step, 1000)
    assert rule.num_plain == 4
    rule.remove()
    assert all("forward" not in vars(block) for block in model)


@pytest.mark.parametrize("count", [0, 1, 7, 32])
def test_the_largest_number_of_plain_blocks_is_found_by_bisection(count: int) -> None:
    for most in range(count + 1):
        asked: list[int] = []
        assert most_that_fits(count, lambda k, most=most, asked=asked: asked.append(k) or k <= most) == most
        assert len(asked) <= count.bit_length()


def test_blocks_are_the_repeated_layers_and_not_what_is_inside_of_them() -> None:
    def layer() -> nn.Module:
        return nn.ModuleDict({"parts": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])})

    model = nn.ModuleDict(
        {
            "stem": nn.Sequential(nn.Linear(2, 2), nn.GELU()),  # two classes
            "encoder": nn.ModuleList([layer() for _ in range(2)]),
            "heads": nn.ModuleList([nn.Linear(2, 2) for _ in range(8)]),  # nothing inside
            "decoder": nn.ModuleList([layer() for _ in range(3)]),
        }
    )
    assert find_blocks(model) == [*model["encoder"], *model["decoder"]]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rows", "auto,peft"], "unknown rows peft; known are plain, gc, every_second,"),
        (["--models", "six,bloom"], "unknown models bloom; known are llama8b, llama, config, gpt2,"),
        (["--device-total-gb", "12,x"], "--device-total-gb is '12,x'; must be numbers above 0, as 12,14.5"),
        (["--total-number", "1", "--device-total-gb", "5"], "leave it out where totals are given"),
        (["--models", "config"], "the model config needs --config FILE"),
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


def test_names_for_several_models_are_those_of_the_families() -> None:
    parsed = bench_model.parse(["--models", "six,own,llama8b,llama"])
    assert parsed.models == [*GROUPS["six"], *GROUPS["own"], "llama8b", "llama"]
    assert {*parsed.models, "config"} == {*FAMILIES}
    assert all(family.totals == tuple(sorted(family.totals)) for family in FAMILIES.values())
