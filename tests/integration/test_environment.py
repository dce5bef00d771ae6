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
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\n[ "$2" = pip ] && exit 1\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def prepared(checkout: Path, **environment: str) -> tuple[int, str]:
    """Exit status and words of prepare_python."""
    done = subprocess.run(
        ["bash", "-c", "set -euo pipefail; source scripts/env.sh; prepare_python"],
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
    other = checkout / "python3.99"
    other.write_text(
        f'#!/bin/sh\ncase "$*" in *base_prefix*) echo other;; *--clear*) echo made >&2; exit 3;; '
        f'*) exec {sys.executable} "$@";; esac\n'
    )
    other.chmod(0o755)
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
