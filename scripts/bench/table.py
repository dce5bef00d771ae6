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


def reason_line(labels: Iterable[str], result: Mapping[str, Any]) -> str:
    """Line of a row without figures: its labels, its status and the reason."""
    return cells_line([*labels, f"{result['status']}: {result.get('reason', '')}"])
