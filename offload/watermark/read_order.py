"""The forwards of a step by when their backwards come, as the step before was seen to do.

What is read last leaves first. Of bytes that are to leave, as many are left for saves still to come that are
read even later: those of forwards that begin before this one is read, and are read after it.

One invariant: a forward that has nothing more to send is not visited. So the host time of a step grows with
what it saves and moves, however many forwards wait for their backward.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from offload.watermark.forward import Forward


class ReadOrder:
    """Each forward has a place: 0 is read last. One that the step before did not have is read before all that
    it had, the latest first, and waits for no saves to come.

    seen: by a forward's number, where in the step before it began, and where its backward did. bytes_of: what
    the forward of a number saved in it. forwards: by place; None where it has not begun.
    """

    def __init__(self, seen: Mapping[int, tuple[int, int]], bytes_of: Callable[[int], int]) -> None:
        last_first = sorted(seen, key=lambda number: -seen[number][1])
        reads = [-seen[number][1] for number in last_first]
        self.forwards: list[Forward | None] = [None] * len(seen)
        self._places = {number: place for place, number in enumerate(last_first)}
        # what comes at a place waits for is at the places behind it, up to those read before it begins
        self._ends = [bisect_left(reads, -seen[number][0]) for number in last_first]
        self._to_come = [0] * len(seen)
        self._steps = [0] * (len(seen) + 1)  # of bytes to come that are read later, from place to place
        for number, place in self._places.items():
            self._comes(place, bytes_of(number))
        # places where something may leave that nothing else holds; and any
        self._leaving: tuple[list[int], list[int]] = [], []

    def _comes(self, place: int, nbytes: int) -> None:
        self._to_come[place] += nbytes
        self._steps[place + 1] += nbytes
        self._steps[self._ends[place]] -= nbytes

    def enter(self, forward: Forward, number: int | None = None) -> None:
        """A forward begins to save. number: its own in this step; None for one of an earlier step."""
        new = len(self.forwards)
        forward.place = place = new if number is None else self._places.get(number, new)
        if place == new:
            self.forwards.append(None)
        self.forwards[place] = forward
        insort(self._leaving[False], place)
        if number is None:
            self.is_held(forward)

    def saved(self, forward: Forward, nbytes: int) -> None:
        """A forward has saved so many bytes."""
        if forward.place < len(self._to_come):
            self._comes(forward.place, -min(nbytes, self._to_come[forward.place]))

    def leaving(self, held: bool, nbytes: int, *, must: bool) -> Iterator[tuple[Forward, int]]:
        """Forwards of which something may leave, and how much of `nbytes` is not to, for what is to come.
        held: of what something else holds. must: nothing is left for what is to come."""
        to_come = [0] if must else [*accumulate(self._steps)]
        for place in [*self._leaving[held]]:
            later = to_come[min(place, len(to_come) - 1)]
            if later < nbytes and (forward := self.forwards[place]) is not None:
                yield forward, later

    def is_held(self, forward: Forward) -> None:
        """Something else may hold a save of this forward."""
        if forward.place not in self._leaving[True]:
            insort(self._leaving[True], forward.place)

    def is_empty(self, forward: Forward, held: bool) -> None:
        """Nothing more of this forward can leave."""
        if forward.place in self._leaving[held]:  # else an allocation that failed has sent it meanwhile
            self._leaving[held].remove(forward.place)
