"""What README and the first page of the docs show runs as it stands there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import offload
from offload import PipelineOffloadManager

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.fixture(autouse=True)
def _without_manager() -> Iterator[None]:
    PipelineOffloadManager.close_instance()
    yield
    PipelineOffloadManager.close_instance()


def examples(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run(page: Path, examples: list[str], names: dict[str, Any]) -> dict[str, Any]:
    """The names that there are when these have run one after the other, as they are printed."""
    for example in examples:
        exec(compile(example, str(page), "exec"), names)
    return names


def test_the_examples_of_the_readme_run_and_the_first_needs_nothing_else_and_keeps_its_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, *rest = examples(README)
    names = run(README, [first], {"__name__": "page"})
    figures = offload.report().as_dict()
    # of 6 blocks each saves two tensors of 4 MiB: what it is given, and what its activation is given
    assert figures["last_step"]["saved_bytes"] == 6 * 2 * 4096 * 256 * 4
    assert figures["moved_bytes"] > 0
    assert figures["peak_bytes"] <= 30_000_000
    assert "offload report: 4 steps since apply" in capsys.readouterr().out
    run(README, rest, names)
    assert isinstance(names["optimizer"], offload.HybridDeviceOptimizer)
    names["optimizer"].close()


def test_the_examples_of_getting_started_run_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "getting-started.md"
    names = run(page, examples(page), {"__name__": "page"})
    out = capsys.readouterr().out
    assert "<offload.apply(Sequential, mode='groups'): blocks: 4 modules, 0 to 3>" in out
    assert not any(module._forward_pre_hooks for module in names["model"].modules())


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 1500


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "examples/README.md", "CHANGELOG.md"])
def test_a_page_links_to_files_that_there_are(page: str) -> None:
    folder = (ROOT / page).parent
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text())
    assert [link for link in links if not (folder / link).exists()] == []
