#!/usr/bin/env python3
"""Plant small faults in the source, one at a time, and report those that no test notices.

    python scripts/mutate.py offload/memory --count 20 --seed 1
    python scripts/mutate.py offload/transfer offload/saved --count 50 --tests tests/unit tests/property
    python scripts/mutate.py offload/memory --count 20 --seed 1 --start 12     # goes on with the 13th
    python scripts/mutate.py offload/policy --count 5 --list
    python scripts/mutate.py offload/policy --tests tests/unit/policy --count 60 --matrix policy.json

A fault is one of these: a negated condition or comparison, a shifted bound, `and` for `or`, an integer off by
one, a call or a keyword argument left out (waits, releases and counts are such calls), a lock that is not
taken, another default or constant, a reference not let go, a sum of the wrong sign, a result that is not
returned. The same seed plants the same faults in the same source.

One invariant: the working tree is never written. Each process has a scratch copy of it, plants a fault there,
runs pytest until its first failure, and puts the file back. The tests run once without a fault, and it is
noted which of them call which functions: a fault is shown only to those that call its function, or to all
where it is outside of one. Those that call the fewest others come first. A fault is *killed* if a test fails
or cannot be collected, or if the time limit passes; else it *survived*, and is printed with its place and a
diff. Each result is printed as soon as it is known, so a run that is cut short loses none. Exit status 0: at
most --allow survived; 1: more did; 2: the tests fail without any fault.

Each survivor wants a look: a test is missing, a line is needed by nobody, or nothing that can be seen changes
(one poll more, a limit at the very byte).

--matrix FILE runs all tests of a fault to the end and writes which of them kill it, as JSON; a FILE that is
there is added to. A test is a function, with all its parameters. At the end it prints those that are
*dominated*: without all of them the others still kill each fault of FILE that any test kills, and each row of
docs/requirements.md has a proof as before. The faults are a sample: a dominated test may hold what none of
them touches, so each is read before it goes. If a fault hangs or ends the process, tests that had not begun
count as passed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, NamedTuple

from requirements_table import read_marks

ROOT = Path(__file__).resolve().parent.parent
OTHER_BOUND: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
NO_LOCK = "__import__('contextlib').nullcontext()"
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutate", "--tb=no")
SPOKEN = ("logger.", "warnings.", "print(")
"""How calls begin that only say something."""


class Fault(NamedTuple):
    """One planted fault: `text` in place of the bytes [start, end) of a file."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def planted(self, source: bytes) -> bytes:
        """The file with the fault in it."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def diff(self, source: bytes) -> str:
        """The lines that change."""
        before, after = (text.decode().splitlines() for text in (source, self.planted(source)))
        lines = difflib.unified_diff(before, after, n=0, lineterm="")
        return "\n".join(f"    {line}" for line in list(lines)[3:])


class Result(NamedTuple):
    """What became of a fault."""

    fault: Fault
    survived: bool
    said: str
    """The test that failed and pytest's last line, or that the time limit passed."""
    diff: str
    shown: Sequence[str]
    """The tests that call its function."""
    failed: Sequence[str] = ()
    """Those of them that kill it: in a matrix all, else none."""


def faults_in(path: str, source: bytes) -> list[Fault]:
    """Every fault that can be planted in a file, in the order of its lines."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def fault(kind: str, node: ast.expr | ast.stmt, text: str) -> Fault:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[node.end_lineno - 1] + node.end_col_offset
        return Fault(path, node.lineno, kind, start, end, text)

    found = [fault(*planted) for node in _code(ast.parse(source)) for planted in _changes(node)]
    return sorted(set(found), key=lambda one: (one.start, one.end, one.text))


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node whose value a run can notice: no messages, annotations, assertions, or imports for types."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg):
            continue
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.FunctionDef) and child.name in ("__repr__", "__str__"):
            continue
        if isinstance(child, ast.Expr) and ast.unparse(child).startswith(SPOKEN):
            continue
        if isinstance(child, ast.Call) and ast.unparse(child.func) == "dataclass":
            continue
        if isinstance(child, ast.AnnAssign) and child.value is None:
            continue
        yield child
        yield from _code(child)


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(kind, what is replaced, by what) of the faults at this node alone."""
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "condition", node.test, f"not ({ast.unparse(node.test)})"
    elif isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
        kind, others = ("bound", OTHER_BOUND) if type(node.ops[0]) in OTHER_BOUND else ("equality", OPPOSITE)
        yield kind, node, f"({left} {others[type(node.ops[0])]} {right})"
    elif isinstance(node, ast.BoolOp):
        word = " and " if isinstance(node.op, ast.Or) else " or "
        yield "and-or", node, f"({word.join(f'({ast.unparse(value)})' for value in node.values)})"
    elif isinstance(node, ast.BinOp | ast.Slice):
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.Constant) and type(part.value) is int:
                yield "off-by-one", part, str(part.value + 1)
    elif isinstance(node, ast.Call):
        for keyword in node.keywords if node.args or len(node.keywords) > 1 else ():
            left_out = ast.Call(
                node.func, node.args, [other for other in node.keywords if other is not keyword]
            )
            yield "argument", node, ast.unparse(left_out)
    elif isinstance(node, ast.With):
        for item in node.items:
            if ast.unparse(item.context_expr).endswith("lock"):
                yield "lock", item.context_expr, NO_LOCK
    elif isinstance(node, ast.FunctionDef):
        for default in filter(None, (*node.args.defaults, *node.args.kw_defaults)):
            if changed := _other(default):
                yield "default", default, changed
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if "super()" not in ast.unparse(node):
            yield "call", node, "pass"
    elif isinstance(node, ast.Delete):
        yield "release", node, "pass"
    elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).lstrip("_").isupper():
        if changed := _other(node.value):
            yield "constant", node.value, changed
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        if isinstance(node.value, ast.Constant) and node.value.value is None:
            yield "release", node, "pass"
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub):
        sign = "-=" if isinstance(node.op, ast.Add) else "+="
        yield "sign", node, f"{ast.unparse(node.target)} {sign} {ast.unparse(node.value)}"
    elif isinstance(node, ast.Return) and ast.unparse(node) != "return None":
        yield "return", node, "pass" if node.value is None else "return None"


def _other(value: ast.expr) -> str:
    """Another value of a number or a truth value; "" for any other."""
    if not isinstance(value, ast.Constant) or not isinstance(value.value, bool | int | float):
        return ""
    return str(not value.value if isinstance(value.value, bool) else value.value + 1)


def planted(root: Path, folders: Sequence[str], count: int, seed: int) -> list[Fault]:
    """`count` faults of all that the folders offer, chosen by the seed."""
    paths = sorted({path for folder in folders for path in (root / folder).rglob("*.py")})
    paths += [root / folder for folder in folders if (root / folder).is_file()]
    if not paths:
        raise ValueError(f"there is no Python file in {' '.join(folders)}; give folders of {root}")
    every = [one for path in paths for one in faults_in(str(path.relative_to(root)), path.read_bytes())]
    return random.Random(seed).sample(every, min(count, len(every)))


class CallsByTest:
    """pytest's plugin in the run without a fault: which functions each test calls, on any thread.

    What another process calls is not seen, and what a fixture of several tests calls counts for the first.
    """

    def __init__(self, tree: str, found: str) -> None:
        self._tree = tree + os.sep
        self._found = Path(found)
        self._seen: dict[int, CodeType] = {}
        self._calls: dict[str, list[str]] = {}

    def pytest_runtest_logstart(self) -> None:
        self._seen = {}
        threading.settrace(self._see)
        sys.settrace(self._see)

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        self._seen.setdefault(id(frame.f_code), frame.f_code)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        own = [code for code in self._seen.copy().values() if code.co_filename.startswith(self._tree)]
        self._calls[nodeid] = sorted({_function(code, self._tree) for code in own})

    def pytest_sessionfinish(self) -> None:
        self._found.write_text(json.dumps(self._calls))


def _function(code: CodeType, tree: str) -> str:
    """Its file and the function that its text is in."""
    return f"{code.co_filename.removeprefix(tree)}:{code.co_qualname.partition('.<locals>')[0]}"


class FailedTests:
    """pytest's plugin in a run for a matrix: a line for each test that begins, and for each that fails."""

    def __init__(self, found: str) -> None:
        self._found = Path(found)

    def _note(self, what: str, nodeid: str) -> None:
        with self._found.open("a") as file:
            file.write(f"{what} {nodeid}\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note("begins", nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._note("fails", report.nodeid)

    @staticmethod
    def read(found: Path, status: int | None, shown: Sequence[str]) -> list[str]:
        """The tests that fail; all that are shown if none could begin."""
        if status == 0:
            return []
        noted = [line.split(" ", 1) for line in found.read_text().splitlines()] if found.exists() else []
        failed = {test for what, test in noted if what == "fails"}
        if noted and status != 1:  # the process ended, or was ended, in a test
            failed.add(noted[-1][1])
        return sorted(failed) if noted else list(shown)


def pytest_configure(config: Any) -> None:
    if found := os.environ.get("MUTATE_CALLS"):
        config.pluginmanager.register(CallsByTest(os.getcwd(), found))
    if found := os.environ.get("MUTATE_FAILED"):
        config.pluginmanager.register(FailedTests(found))


def function_of(fault: Fault, source: bytes) -> str | None:
    """The function that a fault is in, as `CallsByTest` names it; None outside of any."""
    names, inside = [fault.path + ":"], list(ast.parse(source).body)
    while inside:
        node = inside.pop()
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= fault.line <= node.end_lineno:
            names.append(node.name)
            if isinstance(node, ast.FunctionDef):
                return names[0] + ".".join(names[1:])
            inside = list(node.body)
    return None


def selected_tests(function: str | None, calls: Mapping[str, Sequence[str]]) -> list[str]:
    """The tests that call it, those first that call the fewest others; all where it is None."""
    calling = [test for test in calls if function is None or function in calls[test]]
    return sorted(calling, key=lambda test: len(calls[test]))


class Trees:
    """Scratch copies of the working tree, one a process."""

    def __init__(self, root: Path, folder: Path, jobs: int) -> None:
        self.free: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            tree = folder / str(job)
            shutil.copytree(root, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "dist"))
            self.free.put(tree)

    def calls(self, tests: Sequence[str]) -> Mapping[str, Sequence[str]]:
        """The functions that each test calls. Raises RuntimeError if the tests fail."""
        tree = self.free.get()
        found = tree.with_suffix(".json")
        command = [sys.executable, *PYTEST, "-x", *tests]
        status, said = _ended(command, tree, None, MUTATE_CALLS=str(found))
        if status != 0:
            raise RuntimeError(f"without any fault pytest {' '.join(tests)} ends with {status}: {said}")
        self.free.put(tree)
        calls: dict[str, list[str]] = json.loads(found.read_text())
        return calls

    def run(
        self, fault: Fault, tests: Sequence[str], limit_s: float, failed: Path | None = None
    ) -> tuple[int | None, str]:
        """pytest's exit status, None where the time limit passed, and what it said last.

        failed: where `FailedTests` notes; with None the first failure ends the run.
        """
        tree = self.free.get()
        file = tree / fault.path
        source, times = file.read_bytes(), (file.stat().st_atime, file.stat().st_mtime)
        try:
            file.write_bytes(fault.planted(source))
            if failed is None:
                return _ended([sys.executable, *PYTEST, "-x", *tests], tree, limit_s)
            return _ended([sys.executable, *PYTEST, *tests], tree, limit_s, MUTATE_FAILED=str(failed))
        finally:
            file.write_bytes(source)
            os.utime(file, times)
            self.free.put(tree)


def _ended(
    command: list[str], tree: Path, limit_s: float | None, **environment: str
) -> tuple[int | None, str]:
    """Run it in a session of its own, of which nothing is left behind."""
    paths = os.pathsep.join((str(tree), str(Path(__file__).parent)))
    # the seed: tests have the same names in each run
    fixed = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment = {**os.environ, **fixed, **environment}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=tree, env=environment, start_new_session=True, **output)
    try:
        said, _ = process.communicate(timeout=limit_s)
        lines = said.strip().splitlines() or [""]
        failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
        return process.returncode, "; ".join([*failed[:1], lines[-1]])
    except subprocess.TimeoutExpired:
        return None, f"the time limit of {limit_s:g} s passed"
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test may have started others
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def tried(
    faults: Sequence[Fault],
    tests: Sequence[str],
    *,
    root: Path = ROOT,
    jobs: int = 1,
    limit_s: float = 600,
    to_the_end: bool = False,
) -> Iterator[Result]:
    """What becomes of each fault, as soon as it is known. to_the_end: of all its tests, for a matrix.

    Raises RuntimeError if the tests fail without a fault, which is tried first.
    """
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees = Trees(root, Path(folder), jobs)
        # as they are now: somebody may edit them meanwhile
        sources = {fault.path: (root / fault.path).read_bytes() for fault in faults}
        calls = trees.calls(tests)

        def outcome(number: int, fault: Fault) -> Result:
            shown = selected_tests(function_of(fault, sources[fault.path]), calls)
            noted = Path(folder) / f"{number}.failed" if to_the_end else None
            status, said = trees.run(fault, shown, limit_s, noted) if shown else (0, "no test calls it")
            failed = FailedTests.read(noted, status, shown) if noted else []
            return Result(fault, status == 0, said, fault.diff(sources[fault.path]), shown, failed)

        pending = [pool.submit(outcome, *numbered) for numbered in enumerate(faults)]
        try:
            for ended in as_completed(pending):
                yield ended.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def dominated(holders: Mapping[str, Iterable[str]], lines: Mapping[str, int]) -> list[str]:
    """The tests of `lines`, code lines a test, without which all is still held. The longest comes first.

    holders: the tests that hold a thing, here that kill a fault or prove a row. Who holds the fewest things a
    line goes first.
    """
    held = [set(tests) for tests in holders.values()]
    num_held = Counter(test for tests in held for test in tests)
    spare = []
    for test in sorted(lines, key=lambda test: (num_held[test] / lines[test], test)):
        mine = [tests for tests in held if test in tests]
        if all(len(tests) > 1 for tests in mine):
            spare.append(test)
            for tests in mine:
                tests.remove(test)
    return sorted(spare, key=lambda test: (-lines[test], test))


def code_lines(test: str, root: Path = ROOT) -> int:
    """Lines of a test's function, its decorators among them, without docstring, comments and blank lines."""
    path, *_, name = test.split("::")
    text = (root / path).read_text()
    node = next(one for one in ast.walk(ast.parse(text)) if getattr(one, "name", None) == name)
    first = min(one.lineno for one in (node, *node.decorator_list))
    own = dict(enumerate(text.splitlines()[first - 1 : node.end_lineno], first))
    if ast.get_docstring(node) is not None:
        own = {line: own[line] for line in own if not node.body[0].lineno <= line <= node.body[0].end_lineno}
    return sum(line.strip() != "" and not line.strip().startswith("#") for line in own.values())


def into_matrix(results: Iterable[Result], file: Path, root: Path = ROOT) -> Iterator[Result]:
    """The same results. Each is added to the file; the tests that are dominated are printed at the end."""
    faults = json.loads(file.read_text())["faults"] if file.exists() else {}
    for result in results:
        fault = result.fault
        faults[f"{fault.path}:{fault.line}: {fault.kind}: {fault.start} {fault.text}"] = {
            what: sorted({test.partition("[")[0] for test in tests})
            for what, tests in (("shown", result.shown), ("failed", result.failed))
        }
        file.write_text(json.dumps({"faults": faults, "tests": _kills(faults)}, indent=1))
        yield result
    kills = _kills(faults)
    lines = {test: code_lines(test, root) for test in kills}
    holders = {name: one["failed"] for name, one in faults.items()}
    paths = {test.rpartition("::")[2]: test for test in kills}
    for row, proofs in read_marks(root / "tests").items():
        holders[row] = [paths.get(proof.test, proof.test) for proof in proofs]
    spare = dominated(holders, lines)
    for test in spare:
        shown = sum(test in one["shown"] for one in faults.values())
        print(f"dominated {test}: {lines[test]} lines, kills {len(kills[test])} of {shown} shown")
    print(f"{len(spare)} of {len(kills)} tests are dominated: {sum(lines[test] for test in spare)} lines")


def _kills(faults: Mapping[str, Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """The faults that each test kills, of all tests that any is shown to."""
    tests = sorted({test for one in faults.values() for test in one["shown"]})
    return {test: [name for name, one in faults.items() if test in one["failed"]] for test in tests}


def told(results: Iterable[Result], allowed: int = 0) -> int:
    """Print each result as soon as it is known, then how many there were. Returns the exit status."""
    survived = []
    try:
        for result in results:
            survived.append(result.survived)
            fault, what = result.fault, "SURVIVED" if result.survived else "killed"
            print(f"{what} {fault.path}:{fault.line}: {fault.kind} ({result.said})", flush=True)
            if result.survived:
                print(result.diff, flush=True)
    except (RuntimeError, ValueError) as error:
        print(error)
        return 2
    print(f"{len(survived)} faults: {len(survived) - sum(survived)} killed, {sum(survived)} survived")
    return int(sum(survived) > allowed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plant faults in the source; report those that no test notices."
    )
    parser.add_argument(
        "folders", nargs="+", metavar="FOLDER", help="where faults are planted; a file will do"
    )
    parser.add_argument("--count", type=int, default=20, metavar="N", help="faults to plant (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="another seed plants others (default: 0)")
    parser.add_argument(
        "--tests", nargs="+", default=["tests/unit"], metavar="PATH", help="default: tests/unit"
    )
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at a time"
    )
    parser.add_argument(
        "--limit", type=float, default=600, metavar="S", help="seconds a fault (default: 600)"
    )
    parser.add_argument("--allow", type=int, default=0, metavar="N", help="survivors that are no failure")
    parser.add_argument("--start", type=int, default=0, metavar="N", help="pass over the first N of them")
    parser.add_argument("--matrix", type=Path, metavar="FILE", help="write which test kills which fault")
    parser.add_argument("--list", action="store_true", help="show the faults and run nothing")
    given = parser.parse_args()
    faults = planted(ROOT, given.folders, given.count, given.seed)[given.start :]
    if given.list:
        for fault in faults:
            print(f"{fault.path}:{fault.line}: {fault.kind}\n{fault.diff((ROOT / fault.path).read_bytes())}")
        return 0
    to_the_end = given.matrix is not None
    results = tried(faults, given.tests, jobs=given.jobs, limit_s=given.limit, to_the_end=to_the_end)
    return told(into_matrix(results, given.matrix) if to_the_end else results, given.allow)


if __name__ == "__main__":
    sys.exit(main())
