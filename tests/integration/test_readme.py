"""What README shows is so. Its examples, and those of the docs, are run by test_installed.py."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offload import PipelineOffloadManager
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.fixture(autouse=True)
def _without_manager() -> Iterator[None]:
    PipelineOffloadManager.close_instance()
    yield
    PipelineOffloadManager.close_instance()


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
