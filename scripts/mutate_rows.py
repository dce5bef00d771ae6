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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mutate import ROOT, Fault, Trees

TABLE = Path(__file__).with_suffix(".toml")


class RowFault(NamedTuple):
    """What one row asks for, taken away."""

    row: str
    file: str
    removes: str
    old: str
    new: str

    def fault(self, root: Path = ROOT) -> Fault:
        """Where it is planted. Raises ValueError if its text is not in the file just once."""
        source, old = (root / self.file).read_bytes(), self.old.encode()
        if (found := source.count(old)) != 1:
            raise ValueError(
                f"{self.row}: what its fault replaces is {found} times in {self.file}, must be once; "
                f"write it anew in {TABLE.name}: {self.old.strip().splitlines()[0]}"
            )
        start = source.index(old)
        return Fault(self.file, source[:start].count(b"\n") + 1, self.row, start, start + len(old), self.new)


def read_faults(table: Path = TABLE) -> list[RowFault]:
    """In the order of the file."""
    return [RowFault(**one) for one in tomllib.loads(table.read_text())["fault"]]


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
def tried(faults: Sequence[RowFault], limit_s: float) -> Iterator[tuple[RowFault, Fault, str, str]]:
    """(fault, where, what became of it, pytest's last line), row by row.

    Raises RuntimeError if a row's tests fail without a fault, or cannot be run with one.
    """
    places = {one: one.fault() for one in faults}
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        trees = Trees(ROOT, Path(folder), 1)
        for row in dict.fromkeys(one.row for one in faults):
            tests = own_tests(row)
            status, said = trees.run(Fault("README.md", 1, "none", 0, 0, ""), tests, limit_s)
            if status != 0:
                raise RuntimeError(f"{row}: without a fault its tests end with {status}: {said}")
            for one in (one for one in faults if one.row == row):
                status, said = trees.run(places[one], tests, limit_s)
                if status is not None and status > 1:  # not by a signal
                    raise RuntimeError(f"{row}: with its fault pytest ends with {status}: {said}")
                yield one, places[one], "SURVIVED" if status == 0 else "killed", said


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Take away what rows ask for; report those whose own tests notice nothing."
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="default: all that have a fault")
    parser.add_argument(
        "--limit", type=float, default=120, metavar="S", help="seconds a row's tests (default: 120)"
    )
    given = parser.parse_args()
    faults = read_faults()
    if unknown := set(given.rows) - {one.row for one in faults}:
        print(f"no fault in {TABLE.name} is of {' '.join(sorted(unknown))}")
        return 2
    faults = [one for one in faults if not given.rows or one.row in given.rows]
    survivors = 0
    try:
        for one, place, became, said in tried(faults, given.limit):
            survivors += became == "SURVIVED"
            print(f"{became} {one.row} {place.path}:{place.line}: {one.removes} ({said})", flush=True)
    except (RuntimeError, ValueError) as error:
        print(error)
        return 2
    print(f"{len(faults)} faults: {len(faults) - survivors} killed, {survivors} survived")
    return int(survivors > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
