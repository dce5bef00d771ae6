"""Wheels that are installed for one test alone, from the index that pip asks, and tests run with them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def install(folder: Path, *wheels: str) -> Path:
    """A folder for PYTHONPATH that has the wheels, and nothing that they need. Where pip cannot: a skip.

    It is called site-packages, by which dill, of TRL's datasets, knows what it does not pickle.
    """
    target = folder / "site-packages"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command = [*pip, "--target", str(target), *wheels]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {wheels[0]}: {done.stderr.strip().splitlines()[-1]}")
    return target


def passed(target: Path, *arguments: str) -> int:
    """How many tests of a pytest run with `target` passed: all that ran, and none was skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(target)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    said = re.search(r"^(\d+) passed.* in .*$", done.stdout, re.MULTILINE)
    assert said is not None, done.stdout[-6000:]
    assert "skipped" not in said[0]
    return int(said[1])
