"""Functions that torch.compile calls instead of looking into them.

One invariant: nothing of the engine is ever traced, for a graph would keep its effects of one step and replay none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from torch._compile import _disable_dynamo

__all__ = ["untraced"]

F = TypeVar("F", bound=Callable[..., object])


def untraced(function: F) -> F:
    """`function`, run eagerly wherever a compiled function calls it: one graph break a call.

    What torch's own checkpoint and optimizers use, rather than torch.compiler.disable: that imports the compiler with this package, 2 s.
    """
    return cast(F, _disable_dynamo(function))
