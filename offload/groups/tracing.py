"""Functions that torch.compile calls instead of looking into them.

One invariant: nothing of the engine is ever traced, for a graph would keep its effects of one step and replay none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar, cast

from torch._compile import _disable_dynamo

__all__ = ["import_compiler", "untraced"]

F = TypeVar("F", bound=Callable[..., object])


def untraced(function: F) -> F:
    """`function`, run eagerly wherever a compiled function calls it: one graph break a call.

    What torch's own checkpoint and optimizers use, rather than torch.compiler.disable: the compiler is imported by the first call.
    """
    return cast(F, _disable_dynamo(function))


def import_compiler() -> None:
    """What the first call of an untraced function would import otherwise: 2 s, once a process, which set-up shall pay and not step 1."""
    importlib.import_module("torch._dynamo")
