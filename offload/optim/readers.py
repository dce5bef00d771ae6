"""Weights that are read past their modules: found out while none is on its way, and waited for by `step()`
from then on.

A module's hook waits for the weights that the module owns. A fused layer, or a tied output layer, reads
weights of a module that it does not call: no hook runs. But such a weight has a gradient at the step, and no
forward with gradients has asked for it since the step before.

One invariant: a weight that has a gradient was asked for by a module in the backward's own step, or is waited
for when it is stepped. What a first step teaches is in time: nothing is on its way in its forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from offload.optim.parameters import Managed

__all__ = ["Readers"]

logger = logging.getLogger(__name__)

_NAMED = 3  # weights that a warning names


class Readers:
    """Who asked, step by step. outside: places of the parameters that no module of the model owns."""

    def __init__(self) -> None:
        self.outside: frozenset[int] = frozenset()
        self._past: set[int] = set()  # seen to be read past their modules
        self._asked: set[int] = set()  # since the last step
        self._steps = 0
        self._warned = False

    def ask(self, indices: Iterable[int]) -> None:
        self._asked.update(indices)

    def unasked(self, stepped: Sequence[Managed]) -> Sequence[int] | None:
        """The step of these parameters begins: places of those that it has to wait for itself, None for all.
        Forgets who asked.

        All, where nobody asked for anything: the forward came before the hooks, or runs none. That says
        nothing of the next step.
        """
        asked, self._asked = self._asked, set()
        self._steps += 1
        if not asked:
            if self._steps > 1 and not self._warned:
                self._warned = True
                logger.warning(
                    "no module of the optimizer's model was called since its last step, and there are "
                    "gradients: step() waits for all "
                    "weights. Give `model` the modules that are called, or leave it out"
                )
            return None
        missed = [member for member in stepped if member.index not in asked | self.outside | self._past]
        if missed:
            self._past.update(member.index for member in missed)
            logger.warning(
                "%s of %s weights are read past the modules that own them, which were not called (%s): "
                "step() waits for them from now on. "
                "Call the module instead to have its weights arrive beside other work",
                f"{len(missed):,}",
                f"{len(stepped):,}",
                ", ".join(str(member) for member in missed[:_NAMED])
                + (", ..." if len(missed) > _NAMED else ""),
            )
        return sorted(self.outside | self._past)
