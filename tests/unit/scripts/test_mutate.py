"""Faults that scripts/mutate.py plants, and what it says of those that no test notices.

pytest tests/unit/scripts/test_mutate.py
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.mutate import faults_in, planted, selected_tests, tried

SOURCE = '''"""Said only: not (a < b)."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import unseen


def used(waits, size: int, rest=None) -> int:
    if size < 3:
        waits.synchronize()
        logger.info("%d", size + 1)
        return size + 1
    self.block = None
    self.count += size
    del rest
    assert size > 2
    if size or rest:
        raise ValueError(f"{size + 1} is above {size - 1}")
    return None
'''


def test_every_kind_of_fault_is_planted_where_a_run_could_notice() -> None:
    found = {
        (one.line, one.kind, one.planted(SOURCE.encode()).decode().splitlines()[one.line - 1].strip())
        for one in faults_in("a.py", SOURCE.encode())
    }
    assert found == {
        (8, "condition", "if not (size < 3):"),
        (8, "bound", "if (size <= 3):"),
        (9, "call", "pass"),
        (11, "off-by-one", "return size + 2"),
        (11, "return", "return None"),
        (12, "release", "pass"),
        (13, "sign", "self.count -= size"),
        (14, "release", "pass"),
        (16, "condition", "if not (size or rest):"),
        (16, "and-or", "if ((size) and (rest)):"),
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


def test_faults_are_not_called_killed_by_tests_that_fail_anyway(project: Path) -> None:
    (project / "tests/test_far.py").write_text("def test_far():\n    assert False\n")
    with pytest.raises(RuntimeError, match=r"without any fault .* ends with 1: FAILED tests/test_far"):
        list(tried(planted(project, ["pkg/limits.py"], 1, 0), ["tests"], root=project, limit_s=60))


def test_a_result_is_told_as_soon_as_it_is_known(project: Path) -> None:
    """A run without faults takes minutes. What is known by then was lost where a time limit cut it short."""
    done = project / "done"
    (project / "tests/test_far.py").write_text(
        f"import pathlib, time\n\ndef test_far():\n    while not pathlib.Path({str(done)!r}).exists():\n"
        "        time.sleep(0.05)\n"
    )
    faults = [one for one in planted(project, ["pkg/limits.py"], 100, 0) if one.line == 2]
    results = tried(faults, ["tests"], root=project, jobs=2, limit_s=60)
    first = [next(results), next(results)]  # each fault is killed before it comes to test_far
    done.touch()
    assert {one.fault for one in first} == set(faults)
    assert list(results) == []


def test_a_seed_plants_the_same_faults_and_the_tests_that_import_a_file_come_first(project: Path) -> None:
    assert planted(project, ["pkg"], 2, 1) == planted(project, ["pkg"], 2, 1)
    assert len({tuple(planted(project, ["pkg"], 2, seed)) for seed in range(8)}) > 1
    assert selected_tests(project, "pkg/limits.py", ["tests"]) == [
        "tests/test_limits.py",
        "tests/test_far.py",
    ]
    assert selected_tests(project, "pkg/other.py", ["tests/test_far.py"]) == ["tests/test_far.py"]
    with pytest.raises(ValueError, match="there is no Python file in absent; give folders of"):
        planted(project, ["absent"], 1, 0)
