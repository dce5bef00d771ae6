"""The console command: which module answers, and how a process of it ends."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import offload
from offload import commands

Planted = Callable[[Callable[[list[str]], int]], None]


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Planted:
    """A command called "planted", which does this."""

    def plant(main: Callable[[list[str]], int]) -> None:
        module = ModuleType("planted_command")
        module.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "planted_command", module)
        monkeypatch.setitem(commands._COMMANDS, "planted", ("planted_command", "nothing"))

    return plant


def test_a_command_gets_its_own_arguments_and_gives_the_code(planted: Planted) -> None:
    given: list[str] = []
    planted(lambda arguments: given.extend(arguments) or 3)
    assert commands.main(["planted", "--help", "x", "--", "--json"]) == 3
    assert given == ["--help", "x", "--", "--json"]


def test_every_command_is_a_module_with_a_help(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("doctor", "plan", "compare"):
        assert callable(import_module(commands._COMMANDS[name][0]).main)
        with pytest.raises(SystemExit, match="0"):
            commands.main([name, "--help"])
        assert f"offload {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["docter"], "2", "usage: offload"),
        ([], "0", "which mode?"),
        (["--version"], "0", f"offload {offload.__version__}\n"),
    ],
)
def test_without_a_command_it_says_what_it_can(
    arguments: list[str], code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=code):
        commands.main(arguments)
    assert said in "".join(capsys.readouterr())


def test_a_name_that_the_locale_cannot_write_is_no_error(
    planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    planted(lambda arguments: sys.stdout.write("modèle\n") and 0)
    assert commands.main(["planted"]) == 0
    assert written.getvalue() == b"mod\\xe8le\n"


def test_ctrl_c_and_a_reader_that_went_away_end_it_without_a_traceback(
    planted: Planted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def raises(error: BaseException) -> Callable[[list[str]], int]:
        def run(arguments: list[str]) -> int:
            raise error

        return run

    planted(raises(KeyboardInterrupt()))
    assert commands.main(["planted"]) == 130
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        planted(raises(BrokenPipeError()))
        assert commands.main(["planted"]) == 141
        sys.stdout.write("into nothing")
    assert (tmp_path / "out").read_text() == ""
