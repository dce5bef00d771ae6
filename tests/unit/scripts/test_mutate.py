"""Faults that scripts/mutate.py plants, and what it says of those that no test notices.

pytest tests/unit/scripts/test_mutate.py
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.mutate import (
    code_lines,
    dominated,
    faults_in,
    function_of,
    into_matrix,
    planted,
    selected_tests,
    tried,
)

SOURCE = '''"""Said only: not (a < b)."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import unseen

_SIZE = 3
name = 3


def used(waits, size: int, rest=None, *, many=False, least=2) -> int:
    if size < 3:
        waits.synchronize(size, lane=rest)
        logger.info("%d", size + 1)
        return size + 1
    self.block = None
    self.count += size
    del rest
    assert size > 2
    with self._lock, other:
        found = size is rest
    if size or rest:
        raise ValueError(f"{size + 1} is above {size - 1}")
    return None
'''


def test_every_kind_of_fault_is_planted_where_a_run_could_notice() -> None:
    found = {
        (one.line, one.kind, one.planted(SOURCE.encode()).decode().splitlines()[one.line - 1].strip())
        for one in faults_in("a.py", SOURCE.encode())
    }
    head = "def used(waits, size: int, rest=None, *, many={}, least={}) -> int:"
    assert found == {
        (6, "constant", "_SIZE = 4"),
        (10, "default", head.format(True, 2)),
        (10, "default", head.format(False, 3)),
        (11, "condition", "if not (size < 3):"),
        (11, "bound", "if (size <= 3):"),
        (12, "call", "pass"),
        (12, "argument", "waits.synchronize(size)"),
        (14, "off-by-one", "return size + 2"),
        (14, "return", "return None"),
        (15, "release", "pass"),
        (16, "sign", "self.count -= size"),
        (17, "release", "pass"),
        (19, "lock", "with __import__('contextlib').nullcontext(), other:"),
        (20, "equality", "found = (size is not rest)"),
        (21, "condition", "if not (size or rest):"),
        (21, "and-or", "if ((size) and (rest)):"),
    }


def test_a_fault_over_several_lines_and_behind_umlauts_replaces_just_its_own_bytes() -> None:
    source = 'text = "äöü"; copy(\n    "ß",\n)  # said\nwait()\n'
    assert [one.planted(source.encode()).decode() for one in faults_in("a.py", source.encode())] == [
        'text = "äöü"; pass  # said\nwait()\n',
        'text = "äöü"; copy(\n    "ß",\n)  # said\npass\n',
    ]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A package of which a half is tested."""
    files = {
        "pkg/__init__.py": "",
        "pkg/limits.py": "def fits(n):\n    return n < 3\n\n\ndef unseen(size):\n    return size + 1\n",
        "pkg/other.py": "",
        "tests/test_far.py": "def test_far(): ...\n",
        "tests/test_limits.py": (
            "from pkg.limits import fits\n\ndef test_fits():\n    assert fits(2) and not fits(3)\n"
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
def test_what_no_test_notices_survives_and_the_working_tree_is_not_written(project: Path) -> None:
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    faults = planted(project, ["pkg"], 100, 0)
    results = list(tried(faults, ["tests"], root=project, limit_s=60))
    assert sorted((one.fault.line, one.fault.kind, one.survived) for one in results) == [
        (2, "bound", False),
        (2, "return", False),
        (6, "off-by-one", True),
        (6, "return", True),
    ]
    survivor = next(one.fault for one in results if one.fault.kind == "off-by-one")
    assert (
        survivor.diff((project / survivor.path).read_bytes())
        == "    -    return size + 1\n    +    return size + 2"
    )
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_faults_are_not_called_killed_by_tests_that_fail_anyway(project: Path) -> None:
    (project / "tests/test_far.py").write_text("def test_far():\n    assert False\n")
    with pytest.raises(RuntimeError, match=r"without any fault .* ends with 1: FAILED tests/test_far"):
        list(tried(planted(project, ["pkg/limits.py"], 1, 0), ["tests"], root=project, limit_s=60))


@pytest.mark.slow
def test_a_result_is_told_as_soon_as_it_is_known(project: Path) -> None:
    """A time limit that cut a run short lost all that was known by then."""
    done = project / "done"
    (project / "tests/test_far.py").write_text(
        "import pathlib, time\nfrom pkg.limits import unseen\n\ndef test_far():\n    unseen(1)\n"
        f"    while unseen(1) != 2 and not pathlib.Path({str(done)!r}).exists():\n        time.sleep(0.05)\n"
    )
    faults = planted(project, ["pkg/limits.py"], 100, 0)
    slow = next(one for one in faults if one.kind == "off-by-one")
    quick = next(one for one in faults if one.line == 2)
    results = tried([slow, quick], ["tests"], root=project, jobs=2, limit_s=60)
    assert next(results).fault == quick
    done.touch()
    last = next(results)
    assert (last.fault, last.survived) == (slow, True)


@pytest.mark.slow
def test_a_fault_is_shown_to_the_tests_that_call_its_function(project: Path) -> None:
    (project / "tests/test_far.py").write_text(
        "import threading\nfrom pkg import limits\n\ndef test_far(): ...\n\ndef test_thread():\n"
        "    threading.Thread(target=limits.unseen, args=(1,)).start()\n"
    )
    fault = next(one for one in planted(project, ["pkg"], 100, 0) if one.line == 6)
    (result,) = tried([fault], ["tests"], root=project)
    assert result.said.startswith("1 passed"), "on a thread of test_thread"
    (project / "tests/test_far.py").unlink()
    (result,) = tried([fault], ["tests"], root=project)
    assert (result.survived, result.said, result.shown) == (True, "no test calls it", [])


def test_a_fault_belongs_to_the_function_that_its_text_is_in() -> None:
    source = b"""LIMIT = 2 + 1


class Outer:
    size = 1 + 1

    def method(self):
        def inner():
            return 1 + 1
        return inner
"""
    faults = {one.line: function_of(one, source) for one in faults_in("a.py", source)}
    assert faults == {1: None, 5: None, 9: "a.py:Outer.method", 10: "a.py:Outer.method"}


def test_tests_that_call_the_fewest_functions_come_first() -> None:
    calls = {"all": ["a:f", "a:g", "b:h"], "f alone": ["a:f"], "g alone": ["a:g"], "f and h": ["a:f", "b:h"]}
    assert selected_tests("a:f", calls) == ["f alone", "f and h", "all"]
    assert selected_tests("c:i", calls) == []
    assert set(selected_tests(None, calls)) == set(calls)


def test_a_seed_plants_the_same_faults(project: Path) -> None:
    assert planted(project, ["pkg"], 2, 1) == planted(project, ["pkg"], 2, 1)
    assert len({tuple(planted(project, ["pkg"], 2, seed)) for seed in range(8)}) > 1
    with pytest.raises(ValueError, match="there is no Python file in absent; give folders of"):
        planted(project, ["absent"], 1, 0)


def test_tests_are_dominated_without_which_the_others_hold_all() -> None:
    lines = {"one line": 1, "two": 2, "five": 5, "six": 6, "idle": 4}
    holders = {
        "fault a": ["one line", "five"],
        "fault b": ["two", "five"],
        "fault c": ["six", "two"],
        "survivor": [],
        "row": ["six"],
        "row with a proof elsewhere": ["idle", "of another folder"],
    }
    assert dominated(holders, lines) == ["five", "idle"]
    assert dominated({**holders, "fault d": ["five"]}, lines) == ["idle", "two", "one line"]


def test_lines_of_a_test_are_its_decorators_and_code(project: Path) -> None:
    (project / "tests/test_far.py").write_text(
        'import pytest\n\n\n@pytest.mark.slow\ndef test_far():\n    """Said\n    only."""\n    # why\n\n'
        "    assert (\n        True\n    )\n"
    )
    assert code_lines("tests/test_far.py::test_far", project) == 5
    assert code_lines("tests/test_limits.py::test_fits[1]".partition("[")[0], project) == 2


@pytest.mark.slow
def test_a_matrix_says_which_tests_kill_which_faults(project: Path, capsys: pytest.CaptureFixture) -> None:
    (project / "tests/test_far.py").write_text(
        "import os\nimport pytest\nfrom pkg.limits import fits, unseen\n\n"
        "@pytest.mark.parametrize('n', [1, 4])\ndef test_far(n):\n    assert fits(n) == (n < 3)\n\n"
        "def test_dies():\n    if unseen(1) != 2:\n        os._exit(3)\n"
    )
    file, faults = project / "matrix.json", planted(project, ["pkg"], 100, 0)
    for some in (faults[:1], faults[1:]):
        results = tried(some, ["tests"], root=project, limit_s=60, to_the_end=True)
        assert len(list(into_matrix(results, file, project))) == len(some)
    kills = {
        test: sorted(f"{line} {kind}" for _, line, kind, _ in (name.split(":", 3) for name in names))
        for test, names in json.loads(file.read_text())["tests"].items()
    }
    assert kills == {
        "tests/test_far.py::test_dies": ["6  off-by-one", "6  return"],
        "tests/test_far.py::test_far": ["2  return"],
        "tests/test_limits.py::test_fits": ["2  bound", "2  return"],
    }
    said = capsys.readouterr().out.splitlines()[-2:]
    assert said == [
        "dominated tests/test_far.py::test_far: 3 lines, kills 1 of 2 shown",
        "1 of 3 tests are dominated: 3 lines",
    ]
