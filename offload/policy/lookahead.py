"""Which chunks will be read next: a cursor in the step's list of actions, the schedule's own where there is
one, else what the last step was seen to do.

One invariant: the answer is a hint. A step that departs from the list gets a shorter hint, never a wrong
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offload.policy.actions import Action, ChunkKey, checked_action


class Lookahead:
    """The coming backwards of one rank."""

    def __init__(self) -> None:
        self._given: tuple[Action, ...] | None = None
        self._observed: tuple[Action, ...] = ()
        self._log: list[Action] = []
        self._position = 0
        self._lost = False

    def give(self, actions: Sequence[tuple[str, int, int]] | None) -> None:
        """Set the step's actions for every step from the next one on; None goes back to what was observed.

        Raises ValueError for what is no list of actions.
        """
        if isinstance(actions, str) or not isinstance(actions, Sequence | None):
            raise ValueError(
                f"the step's actions are {actions!r}, must be a list of (kind, stage, microbatch), or None "
                "if not known"
            )
        self._given = None if actions is None else tuple(map(checked_action, actions))
        self._position = 0
        self._lost = False

    @property
    def actions(self) -> tuple[Action, ...]:
        return self._observed if self._given is None else self._given

    @property
    def seen(self) -> tuple[Action, ...]:
        """What this step has done so far."""
        return tuple(self._log)

    def advance(self, action: Action) -> None:
        """The step does `action` now."""
        self._log.append(action)
        if self._position == len(self.actions) and self.actions[:1] == (action,):
            self._position = 0  # a schedule that runs again in one step, into the same gradients
        self._lost = action not in self.actions[self._position :]
        if not self._lost:
            self._position = self.actions.index(action, self._position) + 1

    def coming(self) -> Iterator[Action]:
        """The backward actions that come next, soonest first, up to the first whose forward is still to come:
        until that is made, nobody knows how much is read before what follows. Nothing where the step has left
        the list."""
        if self._lost:
            return
        unmade: set[ChunkKey] = set()
        for action in self.actions[self._position :]:
            if action.kind == "F":
                unmade.add(action.chunk)
            elif action.chunk in unmade:
                return
            else:
                yield action

    def end_step(self) -> None:
        """Start over; what was seen becomes the next hint where no list was given."""
        seen = self.seen
        if any(action.kind != "F" for action in seen):
            self._observed = seen
        self._log.clear()
        self._position = 0
        self._lost = False
