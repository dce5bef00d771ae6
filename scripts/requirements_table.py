"""Keep the state column of docs/requirements.md true to the tests: python scripts/requirements_table.py
[--check].

A row is *proved* if a test carries its number, `@pytest.mark.req("S2-13")`, or if its proof column names a
script of this repository; *built* if the code is there and nothing proves it yet; else *open*. One invariant:
only tests and scripts make a row proved, never a hand; and a test that is expected to fail is no proof, so a
mark on one is refused. The library half (read_rows, read_marks) is what the tests of the table use.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "requirements.md"
STATES = ("open", "built", "proved")
ROW = re.compile(
    r"^\| (?P<number>(?:S[0-4]|W|Q)-\d+) \| (?P<text>[^|]+) \| (?P<state>[^|]*) \|(?P<proof>[^|]*)\|$"
)
SCRIPT = re.compile(r"scripts/[\w.]+\.(?:py|sh)")


class Row(NamedTuple):
    """One requirement, as the table holds it."""

    number: str
    text: str
    state: str
    proof: str

    def __str__(self) -> str:
        return f"| {self.number} | {self.text} | {self.state} |{f' {self.proof} ' if self.proof else ' '}|"


def parse(line: str) -> Row | None:
    """The row in this line; None for any other line. A line that looks like a row and is not one is a
    ValueError."""
    match = ROW.match(line)
    if match:
        return Row(*(match[field].strip() for field in Row._fields))
    if re.match(r"^\| *(S\d|W|Q)-", line):
        raise ValueError(
            f"not a row `| number | requirement | state | proof |`: {line!r}; a cell must not hold a |"
        )
    return None


def read_rows(table: Path = TABLE) -> dict[str, Row]:
    """The rows by number, in the table's order. A number that occurs twice is a ValueError."""
    rows: dict[str, Row] = {}
    for row in filter(None, map(parse, table.read_text().splitlines())):
        if row.number in rows:
            raise ValueError(f"{table.name} has {row.number} twice; remove one row")
        rows[row.number] = row
    return rows


def read_marks(tests: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Names of the tests by the requirement that they carry. A mark outside any function, as in `pytestmark`,
    counts for its file.

    Raises ValueError for a mark on what is expected to fail: on a function or class beside `xfail`, below a
    class or in a file that has it, or on one parameter set beside it. A function of which some parameter sets
    fail still proves by the others.
    """
    marks: dict[str, list[str]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        for number, test, fails in _marks_in(ast.parse(path.read_text(), str(path)), path.name, fails=False):
            if fails:
                said = f"{test} is expected to fail and carries req({number!r}), so it proves nothing"
                raise ValueError(f"{path.name}: {said}; remove one mark")
            if test not in marks[number]:
                marks[number].append(test)
    return dict(marks)


def _marks_in(node: ast.AST, test: str, *, fails: bool) -> Iterator[tuple[str, str, bool]]:
    """(requirement, test, whether that test is expected to fail) of every mark below `node`."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        test = node.name
        fails = fails or any(_is_xfail(decorator) for decorator in node.decorator_list)
    elif isinstance(node, ast.Module):
        own = [
            line.value
            for line in node.body
            if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "pytestmark"
        ]
        fails = any(
            _is_xfail(mark)
            for value in own
            for mark in (value.elts if isinstance(value, ast.List | ast.Tuple) else [value])
        )
    elif isinstance(node, ast.Call):
        if ast.unparse(node.func).endswith("mark.req"):
            yield from (
                (str(argument.value), test, fails)
                for argument in node.args
                if isinstance(argument, ast.Constant)
            )
        elif ast.unparse(node.func).endswith("pytest.param"):
            given = [keyword.value for keyword in node.keywords if keyword.arg == "marks"]
            fails = fails or any(_is_xfail(part) for value in given for part in ast.walk(value))
    for child in ast.iter_child_nodes(node):
        yield from _marks_in(child, test, fails=fails)


def _is_xfail(mark: ast.AST) -> bool:
    """`pytest.mark.xfail`, called or not. Strict or not: what may fail proves nothing either."""
    return ast.unparse(mark.func if isinstance(mark, ast.Call) else mark).endswith("mark.xfail")


def named_scripts(row: Row) -> list[str]:
    """The scripts that the proof column names and that exist."""
    return [name for name in SCRIPT.findall(row.proof) if (ROOT / name).is_file()]


def refreshed(row: Row, tests: list[str]) -> Row:
    """The row with the state and the proof that these tests, and the scripts it names, give it."""
    scripts = named_scripts(row)
    if not tests and not scripts:
        # It was proved once, so the code is there: its test has gone, or lost the mark.
        return row._replace(state="built", proof="") if row.state == "proved" else row
    more = [f"+{len(tests) - 1}"] if len(tests) > 1 else []
    return row._replace(state="proved", proof=" ".join([*tests[:1], *more, *scripts]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Rewrite the state and proof columns of docs/requirements.md from the marks in tests/."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a row would change")
    check_only = parser.parse_args().check

    rows, marks = read_rows(), read_marks()
    if unknown := sorted(set(marks) - set(rows)):
        named = ", ".join(f"{number} ({marks[number][0]})" for number in unknown)
        print(f"no row in {TABLE.name} for {named}; correct the mark or add the row")
        return 1
    new = {number: refreshed(row, marks.get(number, [])) for number, row in rows.items()}
    changed = [number for number in rows if new[number] != rows[number]]
    if changed and not check_only:
        lines = [
            str(new[row.number]) if (row := parse(line)) else line for line in TABLE.read_text().splitlines()
        ]
        TABLE.write_text("\n".join(lines) + "\n")
    counts = ", ".join(f"{sum(row.state == state for row in new.values())} {state}" for state in STATES)
    verb = "would change" if check_only else "changed"
    print(f"{len(rows)} requirements: {counts}; {len(changed)} {verb} {' '.join(changed)}".rstrip())
    return 1 if changed and check_only else 0


if __name__ == "__main__":
    sys.exit(main())
