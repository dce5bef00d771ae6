"""What README shows is so. Its examples, and those of the docs, are run by test_installed.py."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest

import offload
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("no_manager")

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(page: Path, examples: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """The names that there are when these have run one after the other, as they are printed."""
    for example in examples:
        exec(compile(example, str(page), "exec"), names)
    return names


def _printed(rank: int, world: int, example: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        run(README, [example], {})
    return out.getvalue()


def test_the_readme_shows_an_example_of_marks_and_the_table_that_its_two_ranks_print(tmp_path: Path) -> None:
    """README once never showed the table of ranks."""
    marks = examples(README)[1]
    assert (ROOT / "examples" / "marks.py").read_text().endswith(marks)
    first, second = run_ranks(_printed, 2, tmp_path, marks)
    assert f"```\n{first}```" in README.read_text()
    assert second == ""


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 1500


def rows_underneath() -> list[tuple[list[str], Path]]:
    """Of each row of README's table of what is underneath: the names, and the file that it links to."""
    _, _, behind = README.read_text().partition("| what | name in `offload` | file | what it does |\n")
    cells = [line.split("|") for line in behind.partition("\n\n")[0].splitlines()[1:]]
    return [
        (re.findall(r"`(\w+)`", row[2]), ROOT / re.search(r"\]\((.*?)\)", row[3])[1])  # type: ignore[index]
        for row in cells
    ]


def test_each_name_of_the_table_of_what_is_underneath_imports_and_lies_in_its_file() -> None:
    """Who held the design card found half of its nouns: README had no word of the manager, the chunk
    handlers, the queue, the flush, the event records and the pool."""
    names = [name for row, _ in rows_underneath() for name in row]
    assert len(names) == len(set(names)) > 10
    for row, file in rows_underneath():
        for name in row:
            found = inspect.getsourcefile(inspect.unwrap(getattr(offload, name)))
            assert Path(str(found)) == file, name
    page = (DOCS / "project" / "microbatch.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []


def test_each_package_that_a_wheel_needs_is_named_with_what_it_serves() -> None:
    text, setup = README.read_text(), (ROOT / "setup.py").read_text()
    needed = re.findall(r'"(\w+)', setup.split("install_requires=[")[1].split("]")[0])
    assert len(needed) > 4
    assert [name for name in (*needed, "pytest-xdist", "setup.py") if f"`{name}`" not in text] == []


def anchors(page: Path) -> set[str]:
    """What a link may name behind a #: each heading, in small letters, with dashes for spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md", "CHANGELOG.md"])
def test_a_page_links_to_files_and_headings_that_there_are(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(((?!https?:)[^)]+)\)", (ROOT / page).read_text())
    dead = []
    for link in links:
        name, _, anchor = link.partition("#")
        target = folder / name if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []
