"""Which chunks will be read next: a cursor in the step's list of actions.

One invariant: the answer is a hint. A step that departs from the list gets a shorter hint, never a wrong
result.

The list is the schedule's own where there is one, else what the last step was seen to do. An action is (kind,
stage, microbatch) with kind F, B, I (input half of a split backward) or W (weight half).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

__all__ = ["ActionKey", "Lookahead"]

ActionKey = tuple[str, int, int]
"""(kind, virtual stage, microbatch)."""

_KINDS = frozenset("FBIW")


class Lookahead:
    """The coming backwards of one rank."""

    def __init__(self) -> None:
        self._given: tuple[ActionKey, ...] | None = None
        self._observed: tuple[ActionKey, ...] = ()
        self._log: list[ActionKey] = []
        self._position = 0
        self._lost = False

    def give(self, actions: Sequence[ActionKey] | None) -> None:
        """Set the step's actions for every step from the next one on; None goes back to what was observed.

        Raises ValueError for an action whose kind is unknown or whose indices are negative.
        """
        if actions is not None:
            if isinstance(actions, str) or not isinstance(actions, Sequence):
                raise ValueError(
                    f"the step's actions are {actions!r}, must be a list of (kind, stage, microbatch), or "
                    "None if not known"
                )
            for action in actions:
                if not _is_action(action):
                    raise ValueError(f"action {action!r} is not (F, B, I or W; stage >= 0; microbatch >= 0)")
        self._given = None if actions is None else tuple(actions)
        self._position = 0
        self._lost = False

    @property
    def actions(self) -> tuple[ActionKey, ...]:
        return self._observed if self._given is None else self._given

    @property
    def seen(self) -> tuple[ActionKey, ...]:
        """What this step has done so far."""
        return tuple(self._log)

    def advance(self, action: ActionKey) -> None:
        """The step does `action` now."""
        self._log.append(action)
        actions = self.actions
        try:
            self._position = actions.index(action, self._position) + 1
            self._lost = False
        except ValueError:
            self._lost = True

    def coming(self) -> Iterator[ActionKey]:
        """The backward actions that come next, soonest first, up to the first whose forward is still to come:
        until that is made, nobody knows how much is read before what follows. Nothing where the step has left
        the list."""
        if self._lost:
            return
        unmade: set[tuple[int, int]] = set()
        for kind, stage, microbatch in self.actions[self._position :]:
            if kind == "F":
                unmade.add((stage, microbatch))
            elif (stage, microbatch) in unmade:
                return
            else:
                yield kind, stage, microbatch

    def end_step(self) -> None:
        """Start over; what was seen becomes the next hint where no list was given."""
        seen = self.seen
        if any(kind != "F" for kind, _, _ in seen):
            self._observed = seen
        self._log.clear()
        self._position = 0
        self._lost = False


def _is_action(action: object) -> bool:
    if not isinstance(action, tuple) or len(action) != 3 or action[0] not in _KINDS:
        return False
    return all(isinstance(index, int) and index >= 0 for index in action[1:])
