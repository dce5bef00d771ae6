"""The pages of docs/: they build, they name what there is, and what they quote is what the code says."""

from __future__ import annotations

import ast
import html
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

import offload
from offload import versions
from offload.config import MODES
from offload.memory.budget import DEFAULT_SHARE
from offload.modules import shared
from offload.modules.shared import marks_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SAYING = {"warning", "warn"}
WRAPPED = {
    ".wy-nav-content": "max-width: 1200px",
    ".wy-table-responsive table td,\n.wy-table-responsive table th": "white-space: normal",
    ".rst-content pre code": "white-space: pre-wrap",
}
"""Rules of docs/css/pages.css. Without one of them a window of 1,400 pixels hides columns of answers."""


def said_by(node: ast.AST) -> str:
    """The text of an expression: each string in it, and an ellipsis for each value that is put in."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.FormattedValue):
        return "…"
    return "".join(said_by(child) for child in ast.iter_child_nodes(node))


def trees() -> Iterator[ast.AST]:
    for package in ("offload", "moe"):
        yield from (ast.parse(path.read_text()) for path in sorted((ROOT / package).rglob("*.py")))


def warnings_of_the_code() -> list[str]:
    calls = (node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Call))
    said = [
        call.args
        for call in calls
        if (name := getattr(call.func, "attr", "")) in SAYING or (name == "_warn" and len(call.args) > 1)
    ]
    # `_warn(once, text)` has a text; `logger.warning(message)` in it passes that on, and has none
    return [text for arguments in said if (text := "".join(map(said_by, arguments)))]


def all_texts() -> str:
    texts = (
        said_by(node)
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Constant, ast.JoinedStr))
    )
    return "\n".join(texts)


def quoted_messages() -> list[str]:
    """The first cells of the tables that have a column of messages."""
    rows: list[str] = []
    in_messages = False
    for line in (DOCS / "troubleshooting.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        in_messages = bool(cells) and (in_messages or cells[0] == "message")
        if in_messages and cells[0].startswith("`"):
            rows.append(cells[0].strip("`"))
    return rows


def pattern(message: str) -> re.Pattern[str]:
    return re.compile(re.escape(message).replace("…", ".+?"), re.DOTALL)


def test_each_message_of_the_troubleshooting_page_is_one_that_the_code_gives() -> None:
    texts = all_texts()
    messages = quoted_messages()
    assert len(messages) > 30
    assert [message for message in messages if not pattern(message).search(texts)] == []


def test_each_warning_of_the_code_has_a_row_on_the_troubleshooting_page() -> None:
    patterns = [pattern(message) for message in quoted_messages()]
    found = warnings_of_the_code()
    assert len(found) > 20
    without = [text for text in found if not any(pattern.search(text) for pattern in patterns)]
    assert without == [], "give each a row in docs/troubleshooting.md: part of the text, cause, remedy"


def test_the_reference_has_every_public_name() -> None:
    page = "\n".join(each.read_text() for each in (DOCS / "reference").glob("*.md"))
    named = set(re.findall(r"^::: offload\.(?:\w+\.)*(\w+)$", page, flags=re.MULTILINE))
    named |= set(re.findall(r"\w+", " ".join(re.findall(r"members: \[(.*)\]", page))))
    assert set(offload.__all__) - {"__version__"} <= named


def test_what_pages_sell_is_public() -> None:
    """`compare`, `load_weights` and `Conductor` were in no `__all__`, so they could go without a warning. The
    sources' spellings, of offload.compat, have its promise."""
    inside = {"log.md", "design.md", "requirements.md", "benchmarks.md"}
    public = [*DOCS.glob("*.md"), *(DOCS / "project").glob("*.md")]
    pages = [ROOT / "README.md", *(each for each in public if each.name not in inside)]
    named = {name for page in pages for name in re.findall(r"\boffload\.(\w+)\b(?!/|\.\w)", page.read_text())}
    known = {name: getattr(offload, name) for name in named if callable(getattr(offload, name, None))}
    sold = {name for name, value in known.items() if not value.__module__.startswith("offload.compat.")}
    assert {"compare", "load_weights", "Conductor", "remove"} <= sold
    assert sold - set(offload.__all__) == set()


@pytest.mark.req("S4-29", "S4-38")
@pytest.mark.parametrize("page", ["README.md", "docs/modes.md"])
def test_a_table_of_modes_has_each_mode_and_so_has_the_help(page: str) -> None:
    table = re.search(
        r"^\| [^|]*mode[^|]*\|.*choose it when \|\n\|[-|]+\n((?:\|.*\n)+)",
        (ROOT / page).read_text(),
        re.MULTILINE,
    )
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()]
    assert [row[0] for row in rows if not row[-1]] == [], "each says when to choose it"
    listed = [mode for row in rows for mode in re.findall(r'`("\w+"|True|False)`', row[0])]
    written = {'"' + mode + '"' if isinstance(mode, str) else str(mode) for mode in MODES}
    assert written <= set(listed)
    help_text = str(offload.apply.__doc__)
    assert [mode for mode in written if f"{mode}:" not in help_text] == []


def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="needs the extra docs")
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*mkdocs, "--site-dir", str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "reference" / "apply" / "index.html").read_text()
    shown = html.unescape(re.sub(r"<[^>]+>", "", page))
    assert "Bytes pinned at construction, so that the first step finds its blocks." in shown
    help_of_mode = re.search(r"    mode: .*?\n    blocks:", str(offload.apply.__doc__), re.DOTALL)
    assert textwrap.dedent(help_of_mode[0]) in shown, "with its lines and asterisks"
    paragraphs = [
        text
        for built in (tmp_path / "site").rglob("index.html")
        for text in re.findall(r"<p>(.*?)</p>", built.read_text(), re.DOTALL)
    ]
    run_on = [text[:60] for text in paragraphs if re.search(r"\n(- |\d+\. )", text)]
    assert run_on == [], "a list needs an empty line before it"
    # a signature that is one line is clipped, and a table whose cells do not wrap hides its last column
    assert "apply(\n    model: Module,\n" in shown
    assert 'href="../../css/pages.css"' in page
    style = (tmp_path / "site" / "css" / "pages.css").read_text()
    for selector, rule in WRAPPED.items():
        (rules,) = re.findall(rf"^{re.escape(selector)} {{(.*?)}}", style, re.DOTALL | re.MULTILINE)
        assert rule in rules, selector


def measured() -> set[tuple[float, float]]:
    """(active GB, step time over that of nothing) of each row in docs/benchmarks.md, rounded as pages do."""
    text = (DOCS / "benchmarks.md").read_text()
    (taken,) = re.findall(r"With nothing offloaded 65,536 tokens took (\d+) ms and ([\d.]+) GB", text)
    nothing_ms, nothing_gb = map(float, taken)
    found = {(round(nothing_gb, 1), 1.0)}
    header: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells or not header:
            header = cells
            continue
        if not line.strip("|-"):
            continue
        row = dict(zip(header, cells, strict=True))
        over_nothing = row.get("/ nothing") or (float(row["step ms"]) / nothing_ms if "tokens" in row else "")
        if row.get("active") and over_nothing:
            found.add((round(float(row["active"]), 1), round(float(over_nothing), 2)))
    return found


def test_what_pages_say_of_costs_is_what_was_measured() -> None:
    """A row of 3509.2 ms over 3234.9 once stood as 1.09 on both pages."""
    readme, modes = (ROOT / "README.md").read_text(), (DOCS / "modes.md").read_text()
    quoted = re.findall(r"\| ([\d.]+) GB \| ([\d.]+) \|", readme)
    assert len(quoted) > 8
    of_modes = re.findall(r"([\d.]+) at ([\d.]+) GB", modes)
    assert len(of_modes) > 10
    quoted += [(gigabytes, ratio) for ratio, gigabytes in of_modes]
    rows = measured()
    assert [pair for pair in quoted if (float(pair[0]), float(pair[1])) not in rows] == []
    (sold,) = re.findall(r"\*\*([\d.]+) to ([\d.]+) GB of device memory for\s+(\d+)% more time\*\*", readme)
    assert {(float(sold[0]), 1.0), (float(sold[1]), 1 + int(sold[2]) / 100)} <= rows


def test_versions_and_defaults_that_pages_give_are_those_of_the_code() -> None:
    setup = (ROOT / "setup.py").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', setup)
    first, last = ("{}.{}".format(*each) for each in (versions.FIRST, versions.LAST))
    assert f'"torch>={first}",' in setup, "without an upper bound, which a release would outrun"
    torchs = f"torch {first} to {last}"
    assert f"Python {' or '.join(pythons)}, {torchs}" in (ROOT / "README.md").read_text()
    tested = f"Python {pythons[0]} or later (tested on {' and '.join(pythons)}), {torchs}"
    assert tested in (DOCS / "getting-started.md").read_text()
    assert f'python_requires=">={pythons[0]}"' in setup
    assert f"None: {DEFAULT_SHARE:.0%} of the machine's memory" in (DOCS / "limits.md").read_text()
    assert "stops: 15/16 of" in str(offload.apply.__doc__)
    assert marks_of("16kB", None) == (16_000, 15_000)
    with patch.object(shared, "device_bytes", lambda: 16_000):
        assert 'None for high: "90%"' in " ".join(str(offload.apply.__doc__).split())
        assert marks_of(None, None) == (14_400, 13_500)


def test_the_quickstart_starts_a_rank_a_gpu_or_two_on_the_cpu_and_passes_arguments_on(tmp_path: Path) -> None:
    """With an interpreter that says what it was asked to run; what runs is what test_train.py runs."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in *device_count*) echo "$GPUS" ;; "-c import torch") ;; -c*) echo 8 ;; '
        '*) echo "$OMP_NUM_THREADS: $*" ;; esac\n'
    )
    python.chmod(0o755)
    for gpus, ranks, threads in ((0, 2, 4), (1, 1, 8), (4, 4, 2)):
        environment = {**os.environ, "OFFLOAD_PYTHON": str(python), "GPUS": str(gpus)}
        environment.pop("OMP_NUM_THREADS", None)
        command = [str(ROOT / "scripts" / "quickstart.sh"), "--steps", "50"]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert said == (
            f"{threads}: -m torch.distributed.run --standalone --nproc-per-node {ranks} scripts/train.py "
            "--preset tiny --steps 20 --check-end 5 --steps 50\n"
        )
