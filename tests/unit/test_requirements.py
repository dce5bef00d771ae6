"""docs/requirements.md and the tests tell one story: a row is proved exactly when something proves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.requirements_table import NOT_YET, STATES, Proof, Row, parse, read_marks, read_rows, refreshed

# The sources' last numbers; every block starts at 1 and has no gap.
LAST_NUMBER = {"S0": 74, "S1": 60, "S2": 105, "S3": 96, "S4": 48, "W": 15, "Q": 6}


def test_every_number_of_every_block_has_a_row() -> None:
    assert set(read_rows()) == {
        f"{block}-{i}" for block, last in LAST_NUMBER.items() for i in range(1, last + 1)
    }


def test_the_states_are_what_the_marks_of_the_tests_give_and_the_named_test_is_one_of_them() -> None:
    """So a proof that needs a GPU or Megatron says so. How many more tests there are is not compared here."""
    marks = read_marks()
    for number, row in read_rows().items():
        proofs = marks.get(number, [])
        assert row.state == refreshed(row, proofs).state, f"{number}: run scripts/requirements_table.py"
        named = row.proof.split()[:1]
        assert named == [] if not proofs else named[0] in {proof.test for proof in proofs}, number


def test_every_state_begins_with_one_of_four_and_only_what_is_proved_says_where() -> None:
    for number, row in read_rows().items():
        state, _, where = row.state.partition(" ")
        assert state in STATES, number
        assert not where or state in ("partly", "proved"), number
        assert not (state == "proved" and NOT_YET in row.text), number


def test_every_mark_names_a_row() -> None:
    assert {number: tests for number, tests in read_marks().items() if number not in read_rows()} == {}


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
        "S0-1": [Proof("test_marks.py")],
        "S0-2": [Proof("test_one")],
        "S0-3": [Proof("test_one"), Proof("test_three")],
        "S0-4": [Proof("TestTwo")],
    }


PROVES_NOTHING = {
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
    "always skipped": "@pytest.mark.skip(reason='later')\n@pytest.mark.req('S0-2')\ndef test_one(): ...\n",
    "a parameter set": "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=[pytest.mark.xfail, "
    "pytest.mark.req('S0-2')])])\n"
    "def test_one(n): ...\n",
}


@pytest.mark.parametrize("where", PROVES_NOTHING)
def test_a_mark_on_what_is_expected_to_fail_or_skipped_is_refused(where: str, tmp_path: Path) -> None:
    """Such a mark once made a row proved by the very test that showed that it does not hold."""
    (tmp_path / "test_wrong.py").write_text(PROVES_NOTHING[where])
    with pytest.raises(
        ValueError,
        match=r"test_wrong.py: test_one is (expected to fail|always skipped) and carries .*; remove one mark",
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
    assert read_marks(tmp_path) == {"S0-2": [Proof("test_one")], "S0-3": [Proof("test_one")]}


WHERE = {
    "": "@pytest.mark.skipif(not sys.platform.startswith('linux'), reason='/proc')\n",
    "on a GPU": "@pytest.mark.gpus(2)\n",
    "in the slow run": "@pytest.mark.slow\n",
    "with Megatron": "@needs_megatron\n",
}


@pytest.mark.parametrize("where", WHERE)
def test_a_proof_says_what_the_usual_run_lacks_for_it(where: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(f"{WHERE[where]}@pytest.mark.req('S0-2')\ndef test_one(): ...\n")
    assert read_marks(tmp_path) == {"S0-2": [Proof("test_one", where)]}


def test_a_whole_file_on_a_gpu_and_a_mark_with_a_name_are_followed(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures('a')]\n"
        "SLOW = pytest.mark.slow\n"
        "@pytest.mark.req('S0-2')\ndef test_one(): ...\n"
        "@SLOW\n@pytest.mark.req('S0-3')\ndef test_two(): ...\n"
    )
    assert read_marks(tmp_path) == {
        "S0-2": [Proof("test_one", "on a GPU")],
        "S0-3": [Proof("test_two", "in the slow run on a GPU")],
    }


@pytest.mark.parametrize(
    "skips",
    [
        "@pytest.mark.skipif(full_moon(), reason='')\n{}def test_one(): ...\n",
        "{}def test_one():\n    pytest.skip('?')\n",
    ],
)
def test_a_proof_that_skips_itself_for_an_unknown_reason_is_refused(skips: str, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(skips.format("@pytest.mark.req('S0-2')\n"))
    with pytest.raises(
        ValueError, match=r"test_one carries a req mark and skips itself by .*; say in CONDITIONS"
    ):
        read_marks(tmp_path)


GPU, USUAL = Proof("test_gpu", "on a GPU"), Proof("test_usual")


@pytest.mark.parametrize(
    ("text", "state", "proofs", "expected"),
    [
        ("text", "open", [], ("open", "")),
        ("text", "built", [], ("built", "")),
        ("text", "proved", [], ("built", "")),
        ("text", "proved on a GPU", [], ("built", "")),
        ("text", "open", [USUAL, USUAL, USUAL], ("proved", "test_usual +2")),
        ("text", "proved", [GPU], ("proved on a GPU", "test_gpu")),
        ("text", "open", [GPU, USUAL], ("proved", "test_usual +1")),
        (
            "text",
            "open",
            [Proof("test_m", "with Megatron"), GPU],
            ("proved on a GPU or with Megatron", "test_m +1"),
        ),
        ("text. Not yet: experts.", "proved", [USUAL], ("partly", "test_usual")),
        ("text. Not yet: experts.", "open", [GPU], ("partly on a GPU", "test_gpu")),
    ],
)
def test_state_follows_the_marks(
    text: str, state: str, proofs: list[Proof], expected: tuple[str, str]
) -> None:
    row = refreshed(Row("S0-1", text, state, "test_old"), proofs)
    assert (row.state, row.proof) == expected
