"""The options of a command line, written as its --help shows them: a line an option.

    --samples int=5     timed steps a row
    --rows text         a kind without a default: None
    --work a|b=a        one of several values
    --verify            no kind: a flag

One invariant: an option's line has all that there is to it: its name, kind, default and meaning.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["RaisingParser", "add_options"]

_KINDS: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "text": str, "path": Path}


class RaisingParser(argparse.ArgumentParser):
    """Raises ValueError instead of printing its usage, so that several ranks say one line together."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the options)")


def add_options(parser: argparse._ActionsContainer, text: str, **kinds: Callable[[str], Any]) -> None:
    """Add the options that the text names; a line that begins otherwise goes on with the one before.
    kinds: further ones, by name; each raises ValueError or ArgumentTypeError."""
    for entry in re.split(r"\n\s*(?=--)", text.strip()):
        head, _, meaning = re.sub(r"\s+", " ", re.sub(r"\s{2,}", "\0", entry, count=1)).partition("\0")
        name, _, kind = head.partition(" ")
        kind, _, default = kind.partition("=")
        if not kind:
            parser.add_argument(name, action="store_true", help=meaning)
            continue
        shown = f"{meaning} (%(default)s)".strip() if default else meaning
        given: dict[str, Any] = {"default": default or None, "help": shown}
        if "|" in kind:
            given["choices"] = kind.split("|")
        else:
            given |= {"type": (_KINDS | kinds)[kind], "metavar": kind.upper()}
        parser.add_argument(name, **given)
