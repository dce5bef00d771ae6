"""Words of the engine's docstrings: they begin with their subject, or with the verb of what is done."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "offload"
NO_SUBJECT = ("What ", "Whether ", "As ", "Of ", "Those ", "Whose ")
MOST = 19
"""That begin with one of these words. It falls, and never rises."""


def test_docstrings_begin_with_their_subject() -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno} {text.splitlines()[0]}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, kinds) and (text := ast.get_docstring(node) or "").startswith(NO_SUBJECT)
    ]
    assert len(found) <= MOST, "\n".join(found)
