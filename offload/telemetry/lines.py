"""A file of JSON lines, to which telemetry appends.

One invariant: a path that cannot be written is an error before the first step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class JsonLines:
    """path: of the file, which need not be there yet; None writes none. off: how a user leaves it out. Raises
    ValueError for a path that cannot be written."""

    def __init__(self, path: str | None, *, off: str) -> None:
        self._path = None if path is None else Path(path).absolute()  # wherever the process goes
        if self._path is not None and not can_be_written(self._path):
            raise ValueError(
                f"telemetry_file is {path!r}, which cannot be written: give a file in a folder that is "
                f"there, or {off}"
            )

    def write(self, line: dict[str, Any]) -> None:
        """Append a line. Raises OSError where the file cannot be written."""
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def can_be_written(path: Path) -> bool:
    """A file that is there, or a new one in a folder that is."""
    if path.exists():
        return not path.is_dir() and os.access(path, os.W_OK)
    return path.parent.is_dir() and os.access(path.parent, os.W_OK)
