"""What docs/benchmarks.md quotes of another engine's published figures: each is the requirement's own, each
ratio is their quotient, and each run that stands beside one can be made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from mixtures import configs
from mixtures.rows import ROWS_OF
from scripts.requirements_table import read_rows

ROOT = Path(__file__).resolve().parents[3]
PAIR = re.compile(r"([\d.]+(?:-[\d.]+)?)(?: GiB)?(?: min)?(?:/|, )([\d.]+K?)\b")
"""Of a requirement's text: GiB, or a range of them, and tokens a second."""
NEXT_TABLES = "next table gives"
"""In S3-89: what follows is of S3-90."""
NUMBERS = tuple(f"S3-{number}" for number in range(82, 91))


class Published(NamedTuple):
    """One row of the table, its cells without the thousands' commas."""

    label: str
    gib: str
    tokens: str
    gib_ratio: str
    tokens_ratio: str
    run: str


def section() -> str:
    (text,) = re.findall(
        r"^### What torchtitan's pull request 63 published\n(.*?)^## ",
        (ROOT / "docs" / "benchmarks.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    return str(text)


def tables() -> dict[str, list[Published]]:
    """Rows by the requirement that they are of."""
    found: dict[str, list[Published]] = {}
    number = ""
    for line in re.findall(r"^\| (?!published)(.*) \|$", section(), re.MULTILINE):
        first, *cells = (cell.strip().replace(",", "") for cell in line.split("|"))
        number = first or number
        found.setdefault(number, []).append(Published(*cells))
    return found


def published(number: str) -> set[tuple[str, float]]:
    """(GiB, tokens a second) of a requirement's text."""
    text = read_rows()[number].text.partition(NEXT_TABLES)[0]
    pairs = PAIR.findall(text)
    return {(gib, float(rate.removesuffix("K")) * (1000 if rate.endswith("K") else 1)) for gib, rate in pairs}


@pytest.mark.req("S3-82", "S3-83", "S3-84", "S3-85", "S3-86", "S3-87", "S3-88", "S3-89", "S3-90")
@pytest.mark.parametrize("number", NUMBERS)
def test_each_published_figure_stands_with_its_ratio_to_the_first_of_its_table(number: str) -> None:
    rows = tables()[number]
    figures = {(row.gib.replace(" to ", "-"), float(row.tokens)) for row in rows}
    assert figures == published(number)
    assert len(figures) == len(rows)
    first, is_range = rows[0], any(" to " in row.gib for row in rows)
    for row in rows if len(rows) > 1 else []:
        assert row.tokens_ratio == f"{float(row.tokens) / float(first.tokens):.3f}", row
        assert row.gib_ratio == ("" if is_range else f"{float(row.gib) / float(first.gib):.3f}"), row


def test_the_table_has_these_requirements_and_no_others() -> None:
    assert tuple(tables()) == NUMBERS


@pytest.mark.req("S3-82", "S3-85", "S3-86", "S3-87", "S3-88")
def test_a_published_row_has_a_run_here_or_says_why_it_has_none() -> None:
    known = {path.stem for path in configs.FILES}
    for rows in tables().values():
        for row in rows:
            run = re.fullmatch(r"`(\w+)`", row.run)
            assert run[1] in known if run else row.run.startswith(("not comparable: ", "no row: ")), row
    of_s3_88 = [row.run.strip("`") for row in tables()["S3-88"]]
    switches = [config(name) for name in of_s3_88]
    assert switches == [
        (None, False),
        ("save_on_cpu", False),
        ("checkpoint", False),
        ("both", False),
        (None, True),
        ("save_on_cpu", True),
    ]
    assert {config(row.run.strip("`")) for row in tables()["S3-87"]} == {
        (mode, fsdp) for mode in (None, "checkpoint") for fsdp in (False, True)
    }
    assert configs.read_config(path_of("full_checkpoint")).checkpoints == "full"


def path_of(name: str) -> Path:
    (path,) = (path for path in configs.FILES if path.stem == name)
    return path


def config(name: str) -> tuple[str | None, bool]:
    """(the experts' mode, FSDP's offload) of a run."""
    read = configs.read_config(path_of(name))
    assert read.checkpoints == "none"
    return read.settings.placement()["experts_mode"], read.settings.enable_cpu_offload


def test_what_contradicts_itself_is_said_with_its_figures() -> None:
    said = " ".join(section().split())
    for figures in (
        "14.3 to 5.2 GiB is -64%, and compares a peak with the least",
        "100 GiB and 444 or 518 tokens/s in S3-86 and S3-87, and 122 and 457 in S3-88 with the same setting",
        "1,559 at 169 GiB, where a B200 has about 180, and 6,149 at 162",
        "frees 36 GiB of 154 and leaves 0.165 of the tokens a second",
    ):
        assert figures in said
    (rows,) = re.findall(r"The rows `(\w+)` and `(\w+)` of the work \*layer\* compare both", said)
    assert set(rows) <= set(ROWS_OF["layer"])
