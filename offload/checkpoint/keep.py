"""What a selective checkpoint is asked to keep: operators, calls of operators, or whatever a policy says.

One invariant: what is asked for may be kept, or it is refused by name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch.utils.checkpoint import SAC_IGNORED_OPS

from offload.checkpoint.kept import Operator, check_keepable
from offload.sizes import is_count

Place = tuple[Operator, int]
"""One call: its operator, and its number among the calls of that one, from 0."""


@dataclass(slots=True, eq=False)
class KeepContext:
    """What a policy is told besides the call, as torch's own: it is asked in the forward only, after the
    operator has run."""

    op_output: Any
    is_recompute: bool = False


class Keep:
    """What is to be kept: a set of operators, a set of calls, or a policy.

    of_block: the set may be empty; until it has `learned` what the block decides, calls of every operator are
        counted; and no output is kept that was changed in place.
    calls: named after another forward; one that was written to since is not kept. copied: operators whose
    outputs are kept as copies.
    names: for the report of what was never called; none for a set of calls, which are another forward's.
    """

    def __init__(self, keep_ops: Collection[Any] | Callable[..., Any], *, of_block: bool = False) -> None:
        self.policy: Callable[..., Any] | None = None
        self.calls: frozenset[Place] = frozenset()
        self.copied: frozenset[Operator] = frozenset()
        self.names: tuple[str, ...] = ()
        self.key: Any = None
        self._whole: frozenset[Operator] = frozenset()
        self._without: frozenset[Place] = frozenset()
        if isinstance(keep_ops, Collection) and not isinstance(keep_ops, str):
            if not (keep_ops or of_block):
                raise ValueError(
                    "keep_ops is empty: every output would be recomputed, as a plain checkpoint does; name "
                    "some operators"
                )
            if any(isinstance(member, tuple) for member in keep_ops):
                self.calls = frozenset(map(_check_call, keep_ops))
                self.key = frozenset(check_keepable(operator) for operator, _ in self.calls)
            else:
                self.key = self._whole = frozenset(map(check_keepable, keep_ops))
            self.names = tuple(sorted(map(str, self._whole)))
        elif callable(keep_ops):
            self.policy = keep_ops
            name = getattr(keep_ops, "__qualname__", type(keep_ops).__qualname__)
            self.key = (getattr(keep_ops, "__module__", ""), name)
            self.names = (f"what policy {name} asks for",)
        else:
            raise ValueError(
                f"keep_ops is a {type(keep_ops).__name__}, must be a set of operators, a set of pairs "
                "(operator, call number), or a policy(ctx, op, *args, **kwargs)"
            )
        self.of_block = of_block
        self._numbers_all = of_block or self.policy is not None
        self._numbered = self._whole | {operator for operator, _ in self.calls}

    def learned(
        self, copied: frozenset[Operator], calls: frozenset[Place], without: frozenset[Place]
    ) -> Keep:
        """A copy with every call of the operators `copied`, and `calls`; but none of `without`."""
        keep = copy.copy(self)
        keep._without, keep._numbers_all = without, False
        keep.copied, keep.calls = copied - self._whole, self.calls | calls
        keep._whole = self._whole | copied
        keep._numbered = keep._whole | {operator for operator, _ in keep.calls}
        return keep

    def numbers(self, operator: Operator) -> bool:
        """Whether calls of this operator are counted: those that may be kept, in the forward and in the
        recompute alike."""
        return operator not in SAC_IGNORED_OPS if self._numbers_all else operator in self._numbered

    def may_want(self, operator: Operator, number: int) -> bool:
        """Whether a call may be kept: asked before it, of an operator that is counted."""
        place = (operator, number)
        named = operator in self._whole and place not in self._without
        return self.policy is not None or named or place in self.calls

    def wants(self, operator: Operator, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.policy is None:
            return True
        answer = self.policy(KeepContext(output), operator, *args, **kwargs)
        name = getattr(answer, "name", "")
        if not isinstance(answer, bool) and not name.endswith(("_SAVE", "_CPU_OFFLOAD", "_RECOMPUTE")):
            raise ValueError(
                f"the policy answered {answer!r} for {operator}; must be a bool or a "
                "torch.utils.checkpoint.CheckpointPolicy"
            )
        if answer is False or name.endswith("_RECOMPUTE"):
            return False
        check_keepable(operator)
        return True


def _check_call(call: Any) -> Place:
    """The pair. Raises ValueError for what is none."""
    if not isinstance(call, tuple) or len(call) != 2 or not is_count(call[1]):
        raise ValueError(
            f"keep_ops holds {call!r} beside pairs; must be all operators, or all pairs of an operator and "
            "the number of its call, from 0"
        )
    return call
