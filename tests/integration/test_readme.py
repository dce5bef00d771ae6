"""What README and the first page of the docs show runs as it stands there."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import PipelineOffloadManager
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
GETTING_STARTED = DOCS / "getting-started.md"


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


OTHER_PAGES = sorted(page.name for page in DOCS.glob("*.md") if examples(page) and page != GETTING_STARTED)


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


def test_the_examples_of_the_readme_run_and_the_first_needs_nothing_else_and_keeps_its_total(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """README once began with a mode that loses, and its second example moved nothing."""
    first, marks, *rest = examples(README)
    names = run(README, [first], {"__name__": "page"})
    figures = offload.report().as_dict()
    # of 32 blocks each saves two tensors of 8 MiB: what it is given, and what its activation is given
    assert figures["last_step"]["saved_bytes"] == 32 * 2 * 8192 * 256 * 4
    assert figures["last_step"]["moved_bytes"] > 0
    assert figures["peak_bytes"] <= 400_000_000
    out = capsys.readouterr().out
    assert "8 steps since apply" in out
    assert "auto: the plan is settled" in out
    PipelineOffloadManager.close_instance()
    run(README, [marks], names)
    # each layer saves what up and down are given, and what act is given
    figures = offload.report().as_dict()
    assert figures["last_step"]["saved_bytes"] == 3 * 4096 * (256 + 1024 + 1024) * 4
    assert figures["last_step"]["moved_bytes"] > 0
    run(README, rest, names)
    assert isinstance(names["optimizer"], offload.HybridDeviceOptimizer)
    names["optimizer"].close()


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


def test_the_examples_of_getting_started_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    names = run(GETTING_STARTED, examples(GETTING_STARTED), {"__name__": "page"})
    out = capsys.readouterr().out
    assert "<offload.apply(Sequential, mode='auto'): blocks: 32 modules, 0 to 31>" in out
    assert "auto: the plan is settled" in out
    explained = GETTING_STARTED.read_text().split("| line of the report |")[1].split("\n\n")[0]
    lines = [row.split("|")[1].strip() for row in explained.splitlines()[2:]]
    assert len(lines) > 4
    assert [line for line in lines if line not in out] == []
    assert not any(module._forward_pre_hooks for module in names["model"].modules())


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_the_examples_of_a_page_run_by_themselves(page: str) -> None:
    names = run(DOCS / page, examples(DOCS / page), {"__name__": "page"})
    assert names["offload"] is offload


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
