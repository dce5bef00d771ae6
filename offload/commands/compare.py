"""Which mode suits a script's model? `offload.compare` on what one function of it returns.

    offload compare train.py:build
    offload compare train.py:build --within 24GB --modes off,groups,auto
    torchrun --nproc-per-node 2 -m offload compare train.py:build

The function takes no argument and returns (model, step), or (model, step, stateful): a model on its device, a
callable that does one whole training step, and what else a step changes and has state_dict() (schedulers, a
GradScaler). The script is loaded as an import loads it, so what stands under `if __name__ == "__main__":`
does not run; its folder is on sys.path, and sys.argv has what stands after `--`.

    # train.py
    def build():
        model, optimizer = ...

        def step():
            model(next(batches)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

One invariant: the exit code is 0 where a mode can be taken, 3 where none can, 2 with one line where the
question makes no sense; an error of the script is its own traceback, and code 1.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn

from offload.compare import Comparison, compare
from offload.config import check_mode

TAKEN, NO_QUESTION, NONE_CAN = 0, 2, 3
_NO_TEXT = {"False": False, "True": True}
"""Modes of `apply` that are no text."""


def main(arguments: list[str] | None = None) -> int:
    own = sys.argv[1:] if arguments is None else arguments
    ends = own.index("--") if "--" in own else len(own)
    given = _parser().parse_args(own[:ends], argparse.Namespace(script_arguments=own[ends + 1 :]))
    try:
        # what the script prints is no part of the answer
        with redirect_stdout(sys.stderr):
            table = _compared(given)
    except _NoQuestionError as error:
        print(f"offload compare: {error}", file=sys.stderr)
        return NO_QUESTION
    can = any(not row.why_not for row in table.rows)
    if not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0:
        if given.json:
            more = {"best": table.best_row.named if can else None, "simulated": bool(table.link)}
            print(json.dumps(table.as_dict() | more, indent=1))
        else:
            print(table)
            print(_last_line(table) if can else "no mode can be taken")
    return TAKEN if can else NONE_CAN


def _last_line(table: Comparison) -> str:
    if table.link:
        return "no GPU: a row without a reason works; which is fastest only a GPU shows"
    return f"take offload.apply(model, {table.best_row.text})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offload compare",
        usage="%(prog)s [options] script.py:function [-- arguments of the script]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("function", metavar="script.py:function", help="returns (model, step)")
    add("--within", help='most active bytes on the device: "24GB", or a share of the GPU, "60%%"')
    add("--modes", help="names of modes, with commas, `off` for the model as it is (the usual ones)")
    add("--budget-s", type=float, default=120.0, help="seconds for all modes together (%(default)g)")
    add("--json", action="store_true", help="all figures, in bytes and milliseconds")
    return parser


class _NoQuestionError(Exception):
    """The question makes no sense."""


def _compared(given: argparse.Namespace) -> Comparison:
    path, _, name = given.function.rpartition(":")
    if not path or not name.isidentifier():
        raise _NoQuestionError(f"{given.function!r} names no function of a script; write script.py:function")
    script = Path(path)
    if not script.is_file():
        raise _NoQuestionError(f"there is no script {path}, seen from {Path.cwd()}")
    try:
        modes = None if given.modes is None else [_mode(each) for each in given.modes.split(",")]
    except ValueError as error:
        raise _NoQuestionError(str(error)) from error
    sys.argv = [path, *given.script_arguments]
    with _within(f"loading {path}"):
        module = _loaded(script)
    function = getattr(module, name, None)
    if not callable(function):
        there = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise _NoQuestionError(f"{path} has no function {name!r}; it has {', '.join(there) or 'none'}")
    with _within(f"calling {given.function}()"):
        found = function()
    model, step, stateful = _parts(found, given.function)

    def watched() -> None:
        with _within(f"the step of {given.function}"):
            step()

    try:
        return compare(model, watched, given.within, modes, stateful=stateful, budget_s=given.budget_s)
    except ValueError as error:
        if hasattr(error, "__notes__"):
            raise  # of the step
        raise _NoQuestionError(str(error)) from error


def _mode(name: str) -> dict[str, Any]:
    """The mode as `compare` takes it. Raises ValueError for a slip."""
    return {"mode": check_mode("--modes", _NO_TEXT.get(name.strip(), name.strip()))}


def _loaded(script: Path) -> ModuleType:
    """The script as a module of its name: what it defines can be pickled for workers."""
    path = script.resolve()
    if path.stem in sys.modules:
        raise _NoQuestionError(f"{path.name} has the name of a module that is loaded already; rename it")
    spec = spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise _NoQuestionError(f"{path.name} is no Python file; write script.py:function")
    module = sys.modules[path.stem] = module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _parts(found: Any, name: str) -> tuple[nn.Module, Callable[[], object], Sequence[Any]]:
    parts = found if isinstance(found, tuple) else (found,)
    if len(parts) in (2, 3) and isinstance(parts[0], nn.Module) and callable(parts[1]):
        return parts[0], parts[1], parts[2] if len(parts) == 3 else ()
    kinds = ", ".join(type(each).__name__ for each in parts)
    raise _NoQuestionError(
        f"{name}() returned ({kinds}); return (model, step): an nn.Module, and a callable that does one "
        "training step"
    )


@contextmanager
def _within(what: str) -> Iterator[None]:
    """Errors of the user's code say at what they came."""
    try:
        yield
    except Exception as error:
        error.add_note(f"offload compare: while {what}")
        raise
