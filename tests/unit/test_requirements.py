"""docs/requirements.md and the tests tell one story: a row is proved exactly when something proves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.requirements_table import STATES, Row, named_scripts, parse, read_marks, read_rows, refreshed

# The sources' last numbers; every block starts at 1 and has no gap.
LAST_NUMBER = {"S0": 73, "S1": 60, "S2": 105, "S3": 96, "S4": 48, "W": 15, "Q": 6}


def test_every_number_of_every_block_has_a_row() -> None:
    assert set(read_rows()) == {
        f"{block}-{i}" for block, last in LAST_NUMBER.items() for i in range(1, last + 1)
    }


def test_every_state_is_one_of_three() -> None:
    assert {number: row.state for number, row in read_rows().items() if row.state not in STATES} == {}


def test_every_proved_row_has_a_test_or_a_script() -> None:
    marks = read_marks()
    unproved = [
        number
        for number, row in read_rows().items()
        if row.state == "proved" and number not in marks and not named_scripts(row)
    ]
    assert unproved == [], "run scripts/requirements_table.py"


def test_every_mark_names_a_row() -> None:
    assert {number: tests for number, tests in read_marks().items() if number not in read_rows()} == {}


def test_no_test_proves_a_row_that_is_still_open() -> None:
    rows = read_rows()
    open_but_marked = {
        number: tests
        for number, tests in read_marks().items()
        if number in rows and rows[number].state == "open"
    }
    assert open_but_marked == {}, "run scripts/requirements_table.py"


def test_a_row_is_written_as_it_was_read() -> None:
    for line in (
        "| S2-13 | free costs one lookup | open | |",
        "| W-2 | moves are checked | proved | test_moves +2 |",
    ):
        assert str(parse(line)) == line


def test_a_cell_with_a_bar_is_refused_rather_than_skipped() -> None:
    with pytest.raises(ValueError, match="must not hold a"):
        parse("| S2-13 | free | costs one lookup | open | |")


def test_marks_are_found_on_functions_classes_parameters_and_files(tmp_path: Path) -> None:
    (tmp_path / "test_marks.py").write_text(
        "pytestmark = pytest.mark.req('S0-1')\n"
        "@pytest.mark.req('S0-2', 'S0-3')\n"
        "def test_one(): ...\n"
        "@pytest.mark.req('S0-4')\n"
        "class TestTwo:\n"
        "    @pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.req('S0-3'))])\n"
        "    def test_three(self, n): ...\n"
    )
    assert read_marks(tmp_path) == {
        "S0-1": ["test_marks.py"],
        "S0-2": ["test_one"],
        "S0-3": ["test_one", "test_three"],
        "S0-4": ["TestTwo"],
    }


EXPECTED_TO_FAIL = {
    "a function": (
        "@pytest.mark.req('S0-2')\n@pytest.mark.xfail(strict=True, reason='not yet')\ndef test_one(): ...\n"
    ),
    "a function, not called": "@pytest.mark.xfail\n@pytest.mark.req('S0-2')\ndef test_one(): ...\n",
    "a class around it": (
        "@pytest.mark.xfail(strict=True)\nclass TestOne:\n    @pytest.mark.req('S0-2')\n "
        "   def test_one(self): ...\n"
    ),
    "the file": (
        "pytestmark = [pytest.mark.gpu, pytest.mark.xfail]\n@pytest.mark.req('S0-2')\ndef test_one(): ...\n"
    ),
    "a parameter set": "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=[pytest.mark.xfail, "
    "pytest.mark.req('S0-2')])])\n"
    "def test_one(n): ...\n",
}


@pytest.mark.parametrize("where", EXPECTED_TO_FAIL)
def test_a_mark_on_what_is_expected_to_fail_is_refused(where: str, tmp_path: Path) -> None:
    """Such a mark once made a row proved by the very test that showed that it does not hold."""
    (tmp_path / "test_wrong.py").write_text(EXPECTED_TO_FAIL[where])
    with pytest.raises(
        ValueError,
        match=r"test_wrong.py: test_one is expected to fail and carries req\('S0-2'\).*; remove one mark",
    ):
        read_marks(tmp_path)


def test_parameter_sets_that_pass_prove_although_another_is_expected_to_fail(tmp_path: Path) -> None:
    (tmp_path / "test_edges.py").write_text(
        "@pytest.mark.req('S0-2')\n"
        "@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.req('S0-3')), pytest.param(2, "
        "marks=pytest.mark.xfail)])\n"
        "def test_one(n): ...\n"
        "@pytest.mark.xfail(strict=True)\n"
        "def test_twin(): ...\n"
    )
    assert read_marks(tmp_path) == {"S0-2": ["test_one"], "S0-3": ["test_one"]}


@pytest.mark.parametrize(
    ("state", "proof", "tests", "expected"),
    [
        ("open", "", [], ("open", "")),
        ("built", "", [], ("built", "")),
        ("open", "", ["test_a", "test_b", "test_c"], ("proved", "test_a +2")),
        ("proved", "test_gone", [], ("built", "")),
        ("open", "scripts/test.sh", [], ("proved", "scripts/test.sh")),
        ("open", "scripts/absent.py", [], ("open", "scripts/absent.py")),
        ("proved", "test_old scripts/test.sh", ["test_new"], ("proved", "test_new scripts/test.sh")),
    ],
)
def test_state_follows_the_marks_and_the_named_scripts(
    state: str, proof: str, tests: list[str], expected: tuple[str, str]
) -> None:
    row = refreshed(Row("S0-1", "text", state, proof), tests)
    assert (row.state, row.proof) == expected
