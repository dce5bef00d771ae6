"""docs/requirements.md and the tests tell one story: a row is proved exactly when something proves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.requirements_table import (
    NOT_YET,
    STATES,
    Proof,
    ProofsThatRan,
    Row,
    parse,
    read_marks,
    read_rows,
    refreshed,
)

pytest_plugins = ["pytester"]

# The sources' last numbers; every block starts at 1 and has no gap.
LAST_NUMBER = {"S0": 74, "S1": 60, "S2": 105, "S3": 96, "S4": 48, "W": 15, "Q": 6}


def test_every_number_of_every_block_has_a_row() -> None:
    assert set(read_rows()) == {
        f"{block}-{i}" for block, last in LAST_NUMBER.items() for i in range(1, last + 1)
    }


def test_the_states_are_what_the_marks_of_the_tests_give_and_the_named_test_is_one_of_them() -> None:
    """So a proof that needs a GPU or Megatron says so. How many more tests there are is not compared here.
    That each mark names a row is checked where tests are collected."""
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


def test_a_proof_that_returns_before_its_end_is_refused_and_one_with_a_function_that_returns_is_not(
    tmp_path: Path,
) -> None:
    """A skip of which no run tells: the test passes."""
    file = tmp_path / "test_one.py"
    file.write_text("@pytest.mark.req('S0-2')\ndef test_one():\n    def two():\n        return 2\n")
    assert read_marks(tmp_path) == {"S0-2": [Proof("test_one")]}
    file.write_text("@pytest.mark.req('S0-2')\ndef test_one():\n    if not GPU:\n        return\n")
    with pytest.raises(ValueError, match="test_one carries a req mark and returns in line 4, before its end"):
        read_marks(tmp_path)


WAYS_NOT_TO_RUN = {
    "skipif by an expression": "@pytest.mark.skipif('1 + 1 == 2', reason='')\n{mark}def test_one(): ...\n",
    "skipif by a name": "odd = pytest.mark.skipif(True, reason='')\n@odd\n{mark}def test_one(): ...\n",
    "a module that is not there": "pytest.importorskip('no_such_module')\n{mark}def test_one(): ...\n",
    "the whole file": "pytest.skip('', allow_module_level=True)\n{mark}def test_one(): ...\n",
    "in the test": "{mark}def test_one():\n    pytest.importorskip('no_such_module')\n",
    "a fixture": "@pytest.fixture\ndef one():\n    pytest.skip('')\n{mark}def test_one(one): ...\n",
    "a fixture of every test": "@pytest.fixture(autouse=True)\ndef one():\n    pytest.skip('')\n"
    "{mark}def test_one(): ...\n",
    "a helper": "def needs_one():\n    pytest.skip('')\n{mark}def test_one():\n    needs_one()\n",
    "another's exception": "import unittest\n{mark}def test_one():\n    raise unittest.SkipTest\n",
    "before each of a class": "class TestOne:\n    def setup_method(self):\n        pytest.skip('')\n"
    "    {mark}    def test_one(self): ...\n",
    "no set of parameters": "@pytest.mark.parametrize('n', [])\n{mark}def test_one(n): ...\n",
    "only sets that are skipped": "@pytest.mark.parametrize('n', [pytest.param(1, marks=pytest.mark.skip)])\n"
    "{mark}def test_one(n): ...\n",
    "expected to fail from within": "{mark}def test_one():\n    pytest.xfail('')\n",
    "expected to fail by a fixture": "@pytest.fixture\ndef one(request):\n"
    "    request.applymarker(pytest.mark.xfail)\n{mark}def test_one(one):\n    assert False\n",
    "left out by name": "{mark}def test_of_slow_things(): ...\n",
    "not collected": "{mark}def one(): ...\n",
}


def test_a_row_whose_proof_did_not_run_is_not_proved_in_that_run(pytester: pytest.Pytester) -> None:
    """Whatever the form of the skip: outcomes are read, not sources."""
    some = "@pytest.mark.parametrize('n', [1, pytest.param(2, marks=pytest.mark.skip)])\n"
    ways = [*WAYS_NOT_TO_RUN, "ran", "ran with one of two sets"]
    rows = {way: Row(way, "text", "proved", "") for way in ways}
    rows["needs a GPU"] = Row("", "text", "proved on a GPU", "")
    rows["a fixture"] = rows["a fixture"]._replace(state="proved in part on a GPU")
    sources = {
        **WAYS_NOT_TO_RUN,
        "ran": "{mark}def test_one(): ...\n",
        "ran with one of two sets": some + "{mark}def test_one(n): ...\n",
    }
    for i, (way, source) in enumerate(sources.items()):
        marked = source.format(mark=f'@pytest.mark.req("{way}")\n')
        pytester.makepyfile(**{f"test_{i}": f"import pytest\n{marked}"})
    ran = ProofsThatRan(rows)
    pytester.inline_run("-k", "not slow", "-p", "no:cacheprovider", plugins=[ran])
    assert ran.unproved(every_row=True).keys() == WAYS_NOT_TO_RUN.keys()
    # a run that was asked for less says what it met and did not run
    unmet = {"a module that is not there", "the whole file", "left out by name", "not collected"}
    assert ran.unproved(every_row=False).keys() == WAYS_NOT_TO_RUN.keys() - unmet


@pytest.mark.parametrize("every_row", [True, False])
def test_a_run_of_all_tests_fails_for_a_row_without_a_proof_and_says_which(
    pytester: pytest.Pytester, every_row: bool
) -> None:
    pytester.makepyfile("import pytest\n@pytest.mark.req('S0-1')\ndef test_one(): pytest.skip('no link')\n")
    pytester.makeconftest(
        "from scripts.requirements_table import ProofsThatRan, Row\n"
        "def pytest_addoption(parser): parser.addoption('--every-row', action='store_true')\n"
        "def pytest_configure(config): config.pluginmanager.register(ProofsThatRan({\n"
        "    'S0-1': Row('S0-1', '', 'proved', ''), 'S0-2': Row('S0-2', '', 'proved', '')}))\n"
    )
    result = pytester.runpytest("-p", "no:cacheprovider", *(["--every-row"] if every_row else []))
    assert result.ret == int(every_row)
    result.stdout.fnmatch_lines("S0-1 is not proved in this run: *::test_one: Skipped: no link")
    if every_row:
        result.stdout.fnmatch_lines("S0-2 is not proved in this run: no proof of it ran")


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
        ("text. On a GPU: pinned.", "open", [USUAL, GPU], ("proved in part on a GPU", "test_usual +1")),
        ("text. On a GPU: pinned.", "open", [USUAL], ("partly", "test_usual")),
        ("text. On a GPU: pinned.", "open", [GPU], ("proved on a GPU", "test_gpu")),
    ],
)
def test_state_follows_the_marks(
    text: str, state: str, proofs: list[Proof], expected: tuple[str, str]
) -> None:
    row = refreshed(Row("S0-1", text, state, "test_old"), proofs)
    assert (row.state, row.proof) == expected
