"""Lines of a table in Markdown. A row is printed as soon as it is measured: no column's width depends on the
rows after it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def ruled(header: str) -> str:
    """The header line and the rule below it. header: with its bars."""
    return f"{header}\n{'|---' * header.count(' | ')}|---|"


def cells_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def reason_of(result: Mapping[str, Any]) -> str:
    """Status of a row without figures, and the reason."""
    status, reason = result["status"], str(result.get("reason", ""))
    return reason if reason.startswith(status) else f"{status}: {reason}"


def aligned(cells: Iterable[str], columns: Iterable[tuple[str, int]]) -> str:
    """Cells of fixed widths, in characters. columns: name and width, negative to align to the left."""
    pairs = zip(cells, columns, strict=True)
    return " ".join(f"{cell:{'<' if width < 0 else '>'}{abs(width)}}" for cell, (_, width) in pairs)


def reason_line(labels: Iterable[str], result: Mapping[str, Any]) -> str:
    """Line of a row without figures: its labels, its status and the reason."""
    return cells_line([*labels, reason_of(result)])


class Columns:
    """A Markdown table by its columns: `title = name` of a row's value, `title = name:.3f` with its format,
    or `title = name:GB` in GB of 1e9; separated by |."""

    def __init__(self, text: str) -> None:
        self._columns = [[part.strip() for part in column.split(" = ")] for column in text.split("|")]

    @property
    def header(self) -> str:
        """The header and the rule below it."""
        return ruled(cells_line(title for title, _ in self._columns))

    def line(self, row: Mapping[str, Any]) -> str:
        """A value that the row lacks, or that is None, is an empty cell."""
        return cells_line(_cell(row, value) for _, value in self._columns)


def _cell(row: Mapping[str, Any], value: str) -> str:
    name, _, form = value.partition(":")
    found = row.get(name)
    if found is None:
        return ""
    return f"{found / 1e9:.2f}" if form == "GB" else format(found, form)
