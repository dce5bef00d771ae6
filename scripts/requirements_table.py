"""Keep the state column of docs/requirements.md true to the tests: python scripts/requirements_table.py
[--check].

A row is *proved* if a test carries its number, `@pytest.mark.req("S2-13")`; *built* if the code is there and
nothing proves it yet; else *open*. A row whose text says what is "Not yet:" there is *partly* proved at most.
A row of which no proof is run by the README's test command, scripts/test.sh on a machine without a GPU, says
where one is run: "proved on a GPU", "proved with Megatron", "proved in the slow run". A row whose text says
what is proved "On a GPU:" alone is "proved in part on a GPU", or partly where no proof is run on one.

One invariant: only tests make a row proved, never a hand. A mark on what is expected to fail, is always
skipped or returns early is refused here; whether a test that carries one *ran* only a run can tell, and does:
`ProofsThatRan` is the part of pytest that tests/conftest.py puts in. The library half (read_rows, read_marks)
is what the tests of the table use.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs" / "requirements.md"
STATES = ("open", "built", "partly", "proved")
ROW = re.compile(
    r"^\| (?P<number>(?:S[0-4]|W|Q)-\d+) \| (?P<text>[^|]+) \| (?P<state>[^|]*) \|(?P<proof>[^|]*)\|$"
)
NOT_YET = "Not yet:"
ON_A_GPU = "On a GPU:"
IN_PART = "in part on a GPU"


class Proof(NamedTuple):
    """A test that carries a requirement's number."""

    test: str
    needs: str = ""
    """What the README's test command lacks to run it, as "on a GPU"; "" if it does run it."""


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


def read_marks(tests: Path = ROOT / "tests") -> dict[str, list[Proof]]:
    """The tests by the requirement that they carry. A mark outside any function, as in `pytestmark`, counts
    for its file.

    Raises ValueError for a mark on what proves nothing: on a function or class beside `xfail` or `skip`,
    below a class or in a file that has it, on one parameter set beside it, or on a test that may return
    before its end. A function of which some parameter sets fail still proves by the others.
    """
    marks: dict[str, list[Proof]] = defaultdict(list)
    for path in sorted(tests.rglob("test_*.py")):
        file = path.read_text()
        for number, proof in _File(path, file).marks() if "mark.req" in file else ():
            if proof not in marks[number]:
                marks[number].append(proof)
    return dict(marks)


class _File:
    """One file of tests."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.tree = path, ast.parse(text, str(path))
        # marks that have a name, such as ON_LINUX = pytest.mark.skipif(...); the last assignment is the one
        self.named = {
            ast.unparse(line.targets[0]): line.value
            for line in self.tree.body
            if isinstance(line, ast.Assign)
        }

    def marks(self) -> Iterator[tuple[str, Proof]]:
        """(requirement, its proof) of every mark."""
        yield from self._below(self.tree, self.path.name, self._members(self.named.get("pytestmark")))

    def _below(self, node: ast.AST, test: str, around: list[ast.AST]) -> Iterator[tuple[str, Proof]]:
        """around: the other marks that hold here: the file's, a class's, the function's own."""
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            test, around = node.name, [*around, *node.decorator_list, *_returns_in(node)]
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function.endswith("mark.req"):
                needs = " ".join(sorted({self._needs(mark, test) for mark in around} - {""}))
                for argument in node.args:
                    if isinstance(argument, ast.Constant):
                        yield str(argument.value), Proof(test, needs)
            elif function.endswith("pytest.param"):
                given = [keyword.value for keyword in node.keywords if keyword.arg == "marks"]
                around = [*around, *(mark for value in given for mark in self._members(value))]
        for child in ast.iter_child_nodes(node):
            yield from self._below(child, test, around)

    def _members(self, value: ast.expr | None) -> list[ast.expr]:
        if value is None:
            return []
        return list(value.elts) if isinstance(value, ast.List | ast.Tuple) else [value]

    def _needs(self, mark: ast.AST, test: str) -> str:
        """Where a test with this mark is run. ValueError if nowhere, or nobody knows."""
        mark = self.named.get(ast.unparse(mark), mark)
        name = ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
        who = f"{self.path.name}: {test}"
        if name.endswith(("mark.xfail", "mark.skip")):
            fails = "is expected to fail" if name.endswith("xfail") else "is always skipped"
            raise ValueError(f"{who} {fails} and carries a req mark, so it proves nothing; remove one mark")
        if name.endswith(("mark.gpu", "mark.gpus")):
            return "on a GPU"
        if name.endswith("mark.slow"):
            return "in the slow run"
        if name.endswith("needs_megatron"):
            return "with Megatron"
        if isinstance(mark, ast.Return):
            raise ValueError(
                f"{who} carries a req mark and returns in line {mark.lineno}, before its end, as if it had "
                "proved all of it; write if and else, or two tests"
            )
        return ""


def _returns_in(node: ast.AST) -> Iterator[ast.AST]:
    """The returns of a test function itself, not of functions in it."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.Return):
            yield inner
        elif not isinstance(inner, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            yield from _returns_in(inner)


class ProofsThatRan:
    """pytest's plugin: the rows that a run of tests has proved, whatever was skipped, and by what means.

    With `pytest --every-row`, as scripts/test.sh runs all tests, a row that the table calls proved without
    saying where, and of which no proof ran to its end and passed, fails the run. Any other run names the
    rows whose proofs it met and did not run.
    """

    def __init__(self, rows: dict[str, Row]) -> None:
        self._expected = {
            number for number, row in rows.items() if row.state in ("proved", "partly", f"proved {IN_PART}")
        }
        self._proved: set[str] = set()
        self._met: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: Sequence[Any]) -> None:
        for item in items:
            numbers = [number for mark in item.iter_markers("req") for number in mark.args]
            item.user_properties.append(("req", numbers))  # with the reports, also from another process

    def pytest_runtest_logreport(self, report: Any) -> None:
        for number in dict(report.user_properties).get("req", ()):
            if report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
                self._proved.add(number)
            elif report.skipped:
                why = "is expected to fail" if hasattr(report, "wasxfail") else report.longrepr[2]
                self._met[number] = f"{report.nodeid}: {why}"

    def unproved(self, every_row: bool) -> dict[str, str]:
        """What became of the proof, by row."""
        asked = self._expected if every_row else self._met.keys()
        return {row: self._met.get(row, "no proof of it ran") for row in sorted(asked - self._proved)}

    def pytest_sessionfinish(self, session: Any) -> None:
        config = session.config
        asked = config.getoption("--every-row", False) and not hasattr(config, "workerinput")
        if asked and self.unproved(every_row=True):
            session.exitstatus = session.exitstatus or 1

    def pytest_terminal_summary(self, terminalreporter: Any, config: Any) -> None:
        for number, why in self.unproved(config.getoption("--every-row", False)).items():
            terminalreporter.write_line(f"{number} is not proved in this run: {why}")


def refreshed(row: Row, proofs: list[Proof]) -> Row:
    """The row with the state and the proof that these tests give it."""
    if not proofs:
        # It was proved once, so the code is there: its test has gone, or lost the mark.
        return row._replace(state=row.state if row.state in ("open", "built") else "built", proof="")
    # The README's command comes first: what it runs is the proof that a reader can have.
    proofs = sorted(proofs, key=lambda proof: proof.needs != "")
    elsewhere = ON_A_GPU in row.text
    open_part = NOT_YET in row.text or (elsewhere and not any("GPU" in proof.needs for proof in proofs))
    state = "partly" if open_part else "proved"
    needs = " or ".join(sorted({proof.needs for proof in proofs}))
    if proofs[0].needs == "":
        needs = IN_PART if elsewhere and not open_part else ""
    more = [f"+{len(proofs) - 1}"] if len(proofs) > 1 else []
    return row._replace(state=f"{state} {needs}".strip(), proof=" ".join([proofs[0].test, *more]))


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Rewrite the state and proof columns of docs/requirements.md from the marks in tests/."
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a row would change")
    check_only = parser.parse_args().check

    rows, marks = read_rows(), read_marks()
    if unknown := sorted(set(marks) - set(rows)):
        named = ", ".join(f"{number} ({marks[number][0].test})" for number in unknown)
        print(f"no row in {TABLE.name} for {named}; correct the mark or add the row")
        return 1
    new = {number: refreshed(row, marks.get(number, [])) for number, row in rows.items()}
    changed = [number for number in rows if new[number] != rows[number]]
    if changed and not check_only:
        lines = [
            str(new[row.number]) if (row := parse(line)) else line for line in TABLE.read_text().splitlines()
        ]
        TABLE.write_text("\n".join(lines) + "\n")
    states = Counter(row.state for row in new.values())
    counts = ", ".join(f"{states[state]} {state}" for state in sorted(states))
    verb = "would change" if check_only else "changed"
    print(f"{len(rows)} requirements: {counts}; {len(changed)} {verb} {' '.join(changed)}".rstrip())
    return 1 if changed and check_only else 0


if __name__ == "__main__":
    sys.exit(main())
