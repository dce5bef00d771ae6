"""Megatron-core's own wheel, unchanged, under the drop-in: installed for this test alone, from the index that
pip asks, so that what test_megatron.py holds is held in every run, and what test_megatron_optimizer.py holds
in the slow run.

As far as a CPU can: its ranks talk over gloo, and megatron_on_cpu.py answers what it asks of a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.once import made_once
from tests.wheels import install, passed

WHEEL = "megatron-core==0.16.1"  # later ones need triton and einops beside them


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that it is installed in; torch and numpy are those of the tests."""
    return made_once(tmp_path_factory, "megatron-core", lambda folder: install(folder, WHEEL))


@pytest.mark.parametrize(
    ("page", "least"),
    [("test_megatron.py", 29), pytest.param("test_megatron_optimizer.py", 36, marks=pytest.mark.slow)],
)
def test_megatrons_models_schedules_and_optimizer_run_unchanged(
    page: str, least: int, megatron: Path
) -> None:
    assert passed(megatron, f"tests/integration/{page}") >= least
