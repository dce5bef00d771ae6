"""Shows docstrings in the pages as `help()` shows them: an extension of griffe, which mkdocs.yml names.

The docstrings are plain text. Read as markdown they lose their lines and their asterisks. One invariant: no
word of a docstring is lost; one without lists and code is set as paragraphs, any other keeps its lines.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["PlainDocstrings", "as_markdown"]

CODE = re.compile(r"(`[^`]+`)")


def as_markdown(text: str) -> str:
    """The markdown that shows this text."""
    lines = text.splitlines()
    in_paragraphs = not any(line.startswith(" ") or re.match(r"[\w, ]+: ", line) for line in lines)
    if not in_paragraphs:
        return f"```text\n{text}\n```"
    parts = CODE.split(text)
    parts[::2] = [re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2]]  # the others are code
    return "".join(parts)


class PlainDocstrings(griffe.Extension):
    """Each docstring that is loaded, as `as_markdown` has it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
