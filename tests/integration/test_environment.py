"""scripts/env.sh: which interpreter it takes, and what it says where it cannot go on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With a .venv whose pip installs nothing, as without a network."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/env.sh", "scripts/constraints-cpu.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    written(tmp_path / ".venv/bin/python", f'[ "$2" = pip ] && exit 1\nexec {sys.executable} "$@"')
    return tmp_path


def written(program: Path, text: str) -> Path:
    """A program in place of an interpreter."""
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return program


def prepared(checkout: Path, torch: str = "", **environment: str) -> tuple[int, str]:
    """Exit status and words of prepare_python."""
    done = subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source scripts/env.sh; prepare_python {torch}"],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name != "OFFLOAD_PYTHON"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_python_that_is_none_is_refused_although_there_is_an_environment(checkout: Path) -> None:
    """It was ignored once .venv existed."""
    code, said = prepared(checkout, PYTHON="/nope")
    assert code == 1
    assert said == "PYTHON=/nope is not a Python >= 3.11 with venv and ensurepip; name another one\n"


def test_an_environment_of_another_python_is_made_anew(checkout: Path) -> None:
    other = written(
        checkout / "python3.99",
        'case "$*" in *base_prefix*) echo other;; *--clear*) echo made >&2; exit 3;; '
        f'*) exec {sys.executable} "$@";; esac',
    )
    code, said = prepared(checkout, PYTHON=str(other))
    assert code == 3
    assert said.startswith("making .venv with Python 3.")
    code, said = prepared(checkout, PYTHON=sys.executable)
    assert "making" not in said, "it has the same one"


def test_without_a_network_the_last_line_says_what_to_set(checkout: Path) -> None:
    """It was pip's: conflicting dependencies."""
    code, said = prepared(checkout)
    assert code == 1
    assert "PIP_INDEX_URL" in said.splitlines()[-1]
    assert "OFFLOAD_PYTHON" in said.splitlines()[-1]


def test_a_torch_that_is_asked_for_has_an_environment_of_its_own_and_no_constraint_of_pips_configuration(
    checkout: Path,
) -> None:
    """`constraint = ...` in a configuration file held torch back. An empty PIP_CONSTRAINT lifts nothing."""
    written(
        checkout / ".venv-9.8.7/bin/python",
        '[ "$2" = pip ] || exec ' + sys.executable + ' "$@"\n'
        'cat "$PIP_CONSTRAINT" >>said; echo "$*" >>said; case "$*" in *+cpu) exit 1;; esac',
    )
    code, said = prepared(checkout, "9.8.7", PIP_CONSTRAINT="/nope")
    assert code == 0, said
    steps = (checkout / "said").read_text().splitlines()
    assert steps[::2] == ["torch==9.8.7"] * 3
    assert [step.split()[-1] for step in steps[1::2]] == [
        "torch==9.8.7+cpu",
        "torch==9.8.7",
        ".[test,plan,docs,plot]",
    ]
    assert "no torch 9.8.7+cpu: the default build brings gigabytes of CUDA libraries" in said
    assert prepared(checkout, "9.8.7") == (0, "")
    assert (checkout / "said").read_text().splitlines() == steps, "it is there, and installed once"
    assert not list((checkout / ".venv").glob("installed-*"))


def test_the_newest_torch_is_the_first_that_pip_names_and_without_one_it_is_an_error(checkout: Path) -> None:
    """CI's second run is made or fails."""
    for answer, code, said in (
        ("echo 'torch (9.8.7+cpu)'; echo 'Available versions: 9.8.7, 9.8.6'", 3, "making .venv-9.8.7 with"),
        ("echo 'no network' >&2; exit 1", 1, "pip index versions torch names no version: no network\n"),
    ):
        answers = written(checkout / "answers", answer)
        base = written(
            checkout / "base",
            f'case "$*" in *--clear*) exit 3;; "-m venv"*) mkdir -p "$3/bin"; cp {answers} "$3/bin/python";; '
            f'*) exec {sys.executable} "$@";; esac',
        )
        found = prepared(checkout, "newest", PYTHON=str(base))
        assert (found[0], found[1][: len(said)]) == (code, said)


def test_an_interpreter_that_is_given_is_not_asked_for_another_torch(checkout: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", "set -euo pipefail; source scripts/env.sh; prepare_python 9.8.7"],
        cwd=checkout,
        env=os.environ | {"OFFLOAD_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.split(";")[1]) == (1, " unset it for --torch 9.8.7\n")
