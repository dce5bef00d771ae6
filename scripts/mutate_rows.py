#!/usr/bin/env python3
"""Take away what single rows of docs/requirements.md ask for, and see each row's own tests fail.

    python scripts/mutate_rows.py                # all of scripts/mutate_rows.toml
    python scripts/mutate_rows.py S1-8 W-2       # the faults of these rows

A fault there names its row, a file of the source, what it takes away, and the text that stands in place of
another. It is shown to the tests that carry the row's number, and to no others, by the README's command: what
only a GPU or the slow run proves is left out.

One invariant: the working tree is never written; scripts/mutate.py has how. The row's tests run once without
a fault, then with each until the first failure. Exit status 0: every fault was noticed; 1: one survived; 2:
one cannot be planted, or the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mutate import ROOT, Fault, Result, Trees, told

TABLE = Path(__file__).with_suffix(".toml")


def read_faults(table: Path = TABLE, root: Path = ROOT) -> dict[str, list[Fault]]:
    """What each row asks for, taken away: by row, in the order of the file.

    Raises ValueError if the text that a fault replaces is not in its file just once.
    """
    faults: dict[str, list[Fault]] = {}
    for one in tomllib.loads(table.read_text())["fault"]:
        source, old, row = (root / one["file"]).read_bytes(), one["old"].encode(), one["row"]
        if (found := source.count(old)) != 1:
            raise ValueError(
                f"{row}: what its fault replaces is {found} times in {one['file']}, must be once; "
                f"write it anew in {table.name}: {one['old'].strip().splitlines()[0]}"
            )
        start = source.index(old)
        kind, line = f"{row}: {one['removes']}", source[:start].count(b"\n") + 1
        faults.setdefault(row, []).append(Fault(one["file"], line, kind, start, start + len(old), one["new"]))
    return faults


def own_tests(row: str, root: Path = ROOT) -> list[str]:
    """pytest's arguments that run the tests of one row. Raises ValueError if none carries it."""
    files = sorted(path for path in (root / "tests").rglob("test_*.py") if f'"{row}"' in path.read_text())
    if not files:
        raise ValueError(f"no test carries {row}; mark one, or take its fault out of {TABLE.name}")
    return ["-p", "mutate_rows", "--row", row, *(str(path.relative_to(root)) for path in files)]


# -- as a part of pytest -------------------------------------------------------------------------------------
def pytest_addoption(parser: Any) -> None:
    parser.addoption("--row", help="run only the tests that carry this number of a row")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    if row := config.getoption("--row"):
        items[:] = [item for item in items if any(row in mark.args for mark in item.iter_markers("req"))]


# -- as a program --------------------------------------------------------------------------------------------
def tried(faults: Mapping[str, Sequence[Fault]], limit_s: float) -> Iterator[Result]:
    """What became of each row's faults.

    Raises RuntimeError if a row's tests fail without a fault, or cannot be run with one.
    """
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        trees = Trees(ROOT, Path(folder), 1)
        for row in faults:
            tests = own_tests(row)
            status, said = trees.run(Fault("README.md", 1, "none", 0, 0, ""), tests, limit_s)
            if status != 0:
                raise RuntimeError(f"{row}: without a fault its tests end with {status}: {said}")
            for fault in faults[row]:
                status, said = trees.run(fault, tests, limit_s)
                if status is not None and status > 1:  # not by a signal
                    raise RuntimeError(f"{row}: with its fault pytest ends with {status}: {said}")
                yield Result(fault, status == 0, said, fault.diff((ROOT / fault.path).read_bytes()), tests)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Take away what rows ask for; report those whose own tests notice nothing."
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all that have a fault")
    parser.add_argument(
        "--limit", type=float, default=120, metavar="S", help="seconds a row's tests (default: 120)"
    )
    given = parser.parse_args()
    try:
        faults = read_faults()
    except ValueError as error:
        print(error)
        return 2
    if unknown := set(given.rows) - faults.keys():
        print(f"no fault in {TABLE.name} is of {' '.join(sorted(unknown))}")
        return 2
    return told(tried({row: faults[row] for row in given.rows or faults}, given.limit))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
