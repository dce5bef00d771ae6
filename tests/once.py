"""Launches that several tests look at, once for all workers of the test run.

One invariant: what the first worker made is what every other reads, so a fixture of a module costs one launch
however its tests are spread.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.ranks import run_ranks


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Any]) -> Any:
    """What `make` returns, given an empty folder. Its first caller does the work; the other workers, which
    steal a file's tests, wait for it and read what it returned.

    name: of the launch, its own in the whole suite. What is returned must be picklable. A failed try is tried
        again by the next caller.
    """
    folder = _of_all_workers(factory) / name
    folder.mkdir(exist_ok=True)
    kept = folder / "kept"
    with FileLock(folder / "lock"):
        if not kept.exists():
            found = make(Path(tempfile.mkdtemp(dir=folder)))
            kept.write_bytes(pickle.dumps(found))
        return pickle.loads(kept.read_bytes())


def run_ranks_once(
    factory: pytest.TempPathFactory, name: str, main: Callable[..., Any], world: int, *arguments: Any
) -> list[Any]:
    """`run_ranks`, once; see `made_once`."""
    return made_once(factory, name, lambda folder: run_ranks(main, world, folder, *arguments))


def _of_all_workers(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
