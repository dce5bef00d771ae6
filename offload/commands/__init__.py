"""The console command `offload`, and `python -m offload`: three questions, each with a module that is loaded
when it is asked.

One invariant: a question that makes no sense is one line on stderr and code 2; Ctrl-C and a reader that went
away end it without a traceback.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module

import offload

__all__ = ["main"]

_COMMANDS = {
    "doctor": ("offload.commands.doctor", "is the machine right? the link, pinning, limits: what to change"),
    "plan": ("offload.parallel.plan", "what does a job need? memory and time without a GPU"),
    "compare": ("offload.commands.compare", "which mode? each is tried on the model and step of a script"),
}
"""A command's module, which has `main(arguments) -> exit code`, and what it answers. By name, since `offload`
imports nothing of `offload.parallel`."""


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return its exit code. arguments: None for those of the process."""
    parser = argparse.ArgumentParser(
        prog="offload",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="\n".join(f"{name:8} {what}" for name, (_, what) in _COMMANDS.items()),
        epilog="offload COMMAND --help has the arguments of each",
    )
    parser.add_argument("--version", action="version", version=f"offload {offload.__version__}")
    parser.add_argument("command", choices=_COMMANDS, help="which")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="of that command")
    given = parser.parse_args((sys.argv[1:] if arguments is None else arguments) or ["--help"])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name that the locale cannot write is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        code = int(import_module(_COMMANDS[given.command][0]).main(given.arguments))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `offload doctor | head`
        # what is flushed at the end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
