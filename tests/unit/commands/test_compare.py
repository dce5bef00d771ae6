"""`offload compare script.py:function`: what it asks of the script, what it prints, and its codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload.commands import compare
from offload.compare import Compared, Comparison

SCRIPT = """
import sys
import torch
from torch import nn
print("loading", *sys.argv[1:])

def build():
    print("building")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step

def with_state():
    model, step = build()
    return model, step, [Counter()]

class Counter:
    def state_dict(self):
        return {}
    def load_state_dict(self, state):
        pass

def bad_step():
    def step():
        raise ValueError("of the step")
    return nn.Linear(8, 8), step

def nothing():
    pass

def only_a_model():
    return nn.Linear(8, 8)

def fails():
    raise KeyError("a key")

number = 3

if __name__ == "__main__":
    raise SystemExit("what is for a script alone ran")
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = tmp_path / "trained_here.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", ["offload"])
    monkeypatch.delitem(sys.modules, "trained_here", raising=False)
    yield str(path)
    sys.modules.pop("trained_here", None)


def test_the_table_and_the_line_to_take_are_printed_and_the_scripts_words_are_beside(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    modes = ["--modes", "off,True, checkpoint"]
    assert compare.main([f"{script}:build", *modes, "--", "--lr", "3"]) == 0
    said = capsys.readouterr()
    assert "loading --lr 3\nbuilding\n" in said.err
    rows = [line for line in said.out.splitlines() if line.startswith("mode=")]
    assert [row.split()[0] for row in rows] == ["mode=False", "mode=True", "mode='checkpoint'"]
    if torch.cuda.is_available():
        assert said.out.splitlines()[-1].startswith("take offload.apply(model, mode=")
    else:
        assert said.out.splitlines()[-1].startswith("no GPU: ")


def test_on_a_gpu_the_last_line_is_the_call_to_write() -> None:
    rows = [Compared(arguments={"mode": "groups", "weights": "host"}, steps=2, step_ms=2.0)]
    rows.append(Compared(arguments={"mode": "auto"}, steps=2, step_ms=3.0))
    expected = "take offload.apply(model, mode='groups', weights='host')"
    assert compare._last_line(Comparison(tuple(rows))) == expected


def test_the_json_has_the_rows_and_the_best(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([f"{script}:with_state", "--modes", "True", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["best"] == {"mode": True}
    assert answer["simulated"] is not torch.cuda.is_available()
    assert [row["arguments"] for row in answer["rows"]] == [{"mode": True}]


@pytest.mark.parametrize("more", [["--modes", "checkpoint"], ["--modes", "off", "--within", "1MB"]])
def test_where_no_mode_can_be_taken_the_code_is_3(
    more: list[str], script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model without blocks; and one that, without a GPU, was said to take 0 B and to fit."""
    assert compare.main([f"{script}:build", *more, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["best"] is None


@pytest.mark.parametrize(
    ("function", "more", "text"),
    [
        ("", [], "names no function of a script; write script.py:function"),
        (":", [], "names no function of a script"),
        (":bild", [], "has no function 'bild'; it has build, with_state, bad_step"),
        (":number", [], "has no function 'number'"),
        (":nothing", [], "nothing() returned (NoneType); return (model, step)"),
        (":only_a_model", [], "returned (Linear); return (model, step)"),
        (":build", ["--within", "24"], "within is '24', must be"),
        (":build", ["--modes", "grups"], "--modes is 'grups', must be one of"),
        (":build", ["--budget-s", "0"], "budget_s is 0.0"),
    ],
)
def test_a_question_without_sense_is_one_line_and_code_2(
    function: str, more: list[str], text: str, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([f"{script}{function}", *more]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = [each for each in said.err.splitlines() if each.startswith("offload compare: ")]
    assert text in line


def test_a_script_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "noname").write_text("")
    (tmp_path / "json.py").write_text("")
    for name, text in (
        ("absent.py", "there is no script"),
        ("noname", "is no Python file"),
        ("json.py", "json.py has the name of a module that is loaded already"),
    ):
        assert compare.main([f"{tmp_path / name}:build"]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "error", "note"),
    [("fails", KeyError, "while calling "), ("bad_step", ValueError, "while the step of ")],
)
def test_an_error_of_the_script_is_its_own_and_says_where(
    function: str, error: type[Exception], note: str, script: str
) -> None:
    with pytest.raises(error) as raised:
        compare.main([f"{script}:{function}"])
    assert note in raised.value.__notes__[0]
    Path(script).with_name("broken_here.py").write_text("def f(:")
    with pytest.raises(SyntaxError) as broken:
        compare.main([f"{Path(script).with_name('broken_here.py')}:f"])
    sys.modules.pop("broken_here", None)
    assert "while loading " in broken.value.__notes__[0]
