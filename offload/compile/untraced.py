"""Keeping torch.compile out of the engine: functions that it calls instead of looking into them, and a
package that it passes over.

One invariant: nothing of the engine is ever traced, for a graph would keep its effects of one step and replay
none of them.

A mark that a compiled function calls is `untraced`: one graph break a call. What the compiler meets without a
call of the model, the hooks of commits and the reads of saved tensors under compiled autograd, lies in files
that it skips: to wrap those would cost each call a look at whether the compiler is listening.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from torch._C._dynamo import eval_frame as frames
from torch._compile import _disable_dynamo

_TRACED = "offload.checkpoint.selective"
"""The file that the compiler looks into: a context_fn that is traced raises an error of its own."""

F = TypeVar("F", bound=Callable[..., object])

_REASON = (
    "a mark of the offload engine, or a hook of offload.apply, moves tensors, and a graph cannot hold that: "
    "compile without fullgraph=True, which costs one graph break a mark and two a block, or keep marks, "
    "offload_hooks() and the blocks' calls outside of the compiled function. torch.export takes a model "
    "without hooks: call remove() first"
)
# a code object by itself
_PASS_OVER = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)


def untraced(function: F) -> F:
    """`function`, run eagerly wherever a compiled function calls it: one graph break a call, and under
    fullgraph=True torch's error. The compiler is imported by the first call that it could trace, as by
    torch's own checkpoint and optimizers; torch.compiler.disable would import it now."""
    unwatched = _disable_dynamo(function)

    @functools.wraps(function)
    def mark(*arguments: Any, **keywords: Any) -> object:
        if frames.get_eval_frame_callback() is None:  # to switch it off and on again is 13 calls
            return function(*arguments, **keywords)
        return unwatched(*arguments, **keywords)

    wrapper: Any = mark
    # a compiled function calls this after its graph break, with the compiler watching: it shall not take the
    # wrapper for a model's frame
    frames.set_code_exec_strategy(wrapper.__code__, _PASS_OVER)
    wrapper._torchdynamo_disable = True  # so that the error and the list of graph breaks give the reason
    wrapper._torchdynamo_disable_msg = _REASON
    return cast(F, wrapper)


class Unscripted:
    """A module's hook that torch.jit.script cannot compile with the module: it asks for the name first."""

    __slots__ = ()

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script compiles the hooks of a module with it, and those of offload.apply and of "
            'overlap="forward" are of Python: call remove() on the handle, or close() on the optimizer, first'
        )


@functools.cache
def import_compiler() -> None:
    """Have the compiler pass over this package: an import of 2 s, once a process, which set-up shall pay and
    not step 1."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    # every part of the package but `_TRACED`; the compiler passes over all files of a part
    package, _, beside = _TRACED.rpartition(".")[0].partition(".")
    root = Path(__file__).parents[1]
    for folder, prefix in ((root, f"{package}."), (root / beside, f"{package}.{beside}.")):
        for part in pkgutil.iter_modules([str(folder)], prefix):
            if part.name not in (_TRACED, f"{package}.{beside}"):
                rules.add(part.name)
