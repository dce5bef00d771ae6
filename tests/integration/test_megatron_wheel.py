"""Megatron-core's own wheel, unchanged, under the drop-in: installed for this test alone, from the index that
pip asks, so that what test_megatron.py holds is held in every run, and what test_megatron_optimizer.py holds
in the slow run.

As far as a CPU can: its ranks talk over gloo, and megatron_on_cpu.py answers what it asks of a GPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.once import made_once

ROOT = Path(__file__).resolve().parents[2]
WHEEL = "megatron-core==0.16.1"  # later ones need triton and einops beside them


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is installed in; torch and numpy are those of the tests."""
    found: Path = made_once(tmp_path_factory, "megatron-core", _installed)
    return found


def _installed(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*pip, "--target", str(folder), WHEEL], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"pip cannot install {WHEEL}: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.parametrize(
    ("page", "least"),
    [("test_megatron.py", 29), pytest.param("test_megatron_optimizer.py", 36, marks=pytest.mark.slow)],
)
def test_megatrons_models_schedules_and_optimizer_run_unchanged(
    page: str, least: int, megatron: Path
) -> None:
    paths = os.pathsep.join((str(ROOT), str(megatron)))
    pytest_alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*pytest_alone, f"tests/integration/{page}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    said = re.fullmatch(r"(\d+) passed.* in .*", done.stdout.strip().splitlines()[-1])
    assert done.returncode == 0, done.stdout[-6000:]
    assert said is not None, done.stdout[-6000:]
    assert "skipped" not in said[0]
    assert int(said[1]) >= least
