"""Steps that were seen, as the mixture's program wants them: blocks with menus, and seconds of what is around
them; and which step to plan for, from the last ones.

One invariant: nothing here depends on the levels that a step ran at. What its backward computed again is
taken off, by the profile. Where a step comes again as it was, the step to plan for is that one; where lengths
vary it is the typical one (policy/lengths.py), with the blocks and seconds of a step that was timed, scaled
to its lengths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import add
from statistics import median
from typing import NamedTuple

from offload.planner.profile import BlockProfile
from offload.policy.actions import Action, ChunkKey
from offload.policy.lengths import STEPS, Lengths
from offload.policy.menu import Block, Level, Menu

_BACKWARD = 2.2
"""Seconds of a backward over those of its forward, where neither was measured. Source: W2 and W5 of the
benchmarks, one H200: 276 ms over 124, and 26.2 over 12.1."""

_WEIGHT_PART = 0.5
"""Of a split backward's seconds, its W's, where they were not measured."""

_IDLE = 0.05
"""Of the Ws of a stage: Is that took less did nothing. The first stage of a pipeline asks no gradient of its
input, and torch computes its whole backward in the W. Two halves that both compute differ far less."""

ReadParts = tuple[float, float]
"""Of what a plain block saves, what its W reads, and what its W alone reads."""


class Ran(NamedTuple):
    """One call of a block. profile: for its number of tokens; None in the step that profiles. level: its
    place in the menu. input_bytes: the measure of its tokens. weight_bytes: what the W of a split backward
    was seen to read of it; None where none was, and of a plain call. passed_bytes: of these, what the I did
    not read.
    left: its I left all that its W reads, which computed nothing again. grown_bytes: as of Block."""

    profile: BlockProfile | None
    level: int
    input_bytes: int = 1
    weight_bytes: int | None = None
    passed_bytes: int = 0
    left: bool = False
    grown_bytes: int = 0


def with_halves(calls: Sequence[Ran], reads: Sequence[tuple[int, int, bool]]) -> list[Ran]:
    """The calls of one chunk. reads: of the recomputed ones, in order, what their W read, what of that the I
    did not, and whether it was left; of another number where that is not known of all."""
    again = [at for at, call in enumerate(calls) if call.level != 0]
    found = list(calls)
    for at, (read, passed, left) in zip(again, reads, strict=False) if len(again) == len(reads) else ():
        found[at] = found[at]._replace(weight_bytes=read, passed_bytes=passed, left=left)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """actions: of the rank, in order. blocks: of each chunk, in forward order. rest_s: device seconds of each
    action outside of its blocks."""

    actions: Sequence[Action]
    blocks: Mapping[ChunkKey, Sequence[Block]]
    rest_s: Mapping[Action, float]

    @property
    def shape(self) -> object:
        """Shape of a plan: the actions, and how many blocks each chunk has beside what only needs room. A
        backward in halves is as a whole one: which it is here was measured, and ranks are to agree."""
        counts = {
            chunk: sum(block.menu[0].saved_bytes > 0 for block in own) for chunk, own in self.blocks.items()
        }
        whole = tuple(
            action._replace(kind="B") if action.kind == "W" else action
            for action in self.actions
            if action.kind != "I"
        )
        return whole, tuple(counts.items())

    @classmethod
    def of(
        cls,
        actions: Sequence[Action],
        seconds: Mapping[Action, float],
        ran: Mapping[ChunkKey, Sequence[Ran]],
        head_bytes: int = 0,
        read_parts: Mapping[tuple[int, int], ReadParts] = {},
    ) -> StepWork | None:
        """actions, seconds: of one step. ran: what it called. head_bytes: what the head and the loss need
        beyond a block, which makes them a block that saves nothing. None where a chunk's blocks are not
        known. read_parts: as `read_parts_of` an earlier step, for blocks that this one did not recompute.

        The profile's seconds say how the blocks share a forward; how long it takes is what was measured. In a
        backward each block has its share of what is left when its recompute is taken off. A backward whose I
        does nothing is whole, at the place of its W.
        """
        actions, seconds = _whole_where_idle(actions, seconds)
        blocks: dict[ChunkKey, list[Block]] = {}
        rest_s: dict[Action, float] = {}
        seconds = _typical(actions, seconds, ran)
        forward_s = {action.chunk: seconds[action] for action in actions if action.kind == "F"}
        backward_s: dict[ChunkKey, float] = {}
        split = {action.chunk for action in actions if action.kind == "I"}
        read_parts = {**read_parts, **read_parts_of(ran)}
        for action in actions:
            if action.kind != "F":
                backward_s[action.chunk] = backward_s.get(action.chunk, 0.0) + seconds[action]
        for chunk, measured_s in forward_s.items():
            profiles = [call.profile for call in ran.get(chunk, ()) if call.profile is not None]
            if not profiles or len(profiles) < len(ran[chunk]):
                return None
            inside_s = sum(profile.forward_s for profile in profiles)
            if inside_s == 0:
                return None
            is_untimed = measured_s == 0 or backward_s[chunk] == 0  # of a device without a clock
            if is_untimed:
                measured_s = inside_s
            # a profile's events may count gaps between launches, which a whole forward has not
            scale = min(1.0, measured_s / inside_s)
            menus = [_timed(profile.menu, scale) for profile in profiles]
            again_s, weight_again_s = _again_s(ran[chunk], menus, chunk in split)
            weight_s = seconds[Action("W", *chunk)] if chunk in split and not is_untimed else None
            if is_untimed:
                backward_s[chunk] = _BACKWARD * measured_s + again_s + weight_again_s
            plain_s = backward_s[chunk] - again_s - weight_again_s
            ratio = max(plain_s / measured_s, 1.0)
            weight_part = _WEIGHT_PART
            if weight_s is not None and plain_s > 0:
                weight_part = min(1.0, max(0.0, (weight_s - weight_again_s) / plain_s))
            whole = read_parts.get((chunk[0], -1), (1.0, 0.0))
            parts = [read_parts.get((chunk[0], place), whole) for place in range(len(profiles))]
            blocks[chunk] = [
                Block(
                    menu=menu,
                    forward_s=profile.forward_s * scale,
                    backward_s=profile.forward_s * scale * ratio,
                    weight_part=weight_part,
                    w_reads=w_reads,
                    i_passes=i_passes,
                    grown_bytes=call.grown_bytes,
                )
                for menu, profile, (w_reads, i_passes), call in zip(
                    menus, profiles, parts, ran[chunk], strict=True
                )
            ]
            if head_bytes:
                blocks[chunk].append(
                    Block(menu=(Level("head", 0, 0.0, head_bytes),), forward_s=0.0, backward_s=0.0)
                )
            outside_s = measured_s - inside_s * scale
            for action in actions:
                if action.chunk == chunk:
                    part = (
                        1.0 if action.kind == "F" else ratio * seconds[action] / max(backward_s[chunk], 1e-12)
                    )
                    rest_s[action] = outside_s * part
        return cls(actions=tuple(actions), blocks=blocks, rest_s=rest_s)

    def scaled(self, factors: Mapping[ChunkKey, float]) -> StepWork:
        """The same step with so many times as many tokens in each chunk."""
        return replace(
            self,
            blocks={
                chunk: own if factors[chunk] == 1.0 else [block.scaled(factors[chunk]) for block in own]
                for chunk, own in self.blocks.items()
            },
            rest_s={action: seconds * factors[action.chunk] for action, seconds in self.rest_s.items()},
        )


def _whole_where_idle(
    actions: Sequence[Action], seconds: Mapping[Action, float]
) -> tuple[Sequence[Action], Mapping[Action, float]]:
    """A B in place of each W of a stage whose Is did nothing."""
    split: dict[int, dict[str, float]] = {}
    for action in actions:
        if action.kind in ("I", "W"):
            halves = split.setdefault(action.stage, {"I": 0.0, "W": 0.0})
            halves[action.kind] += seconds[action]
    stages = {stage for stage, halves in split.items() if halves["I"] < _IDLE * halves["W"]}
    idle = {action.chunk for action in actions if action.kind == "I" and action.stage in stages}
    whole = {
        action: Action("B", *action.chunk)
        for action in actions
        if action.chunk in idle and action.kind == "W"
    }
    left = [action for action in actions if action.chunk not in idle or action.kind != "I"]
    return (
        [whole.get(action, action) for action in left],
        {whole.get(action, action): seconds[action] for action in left},
    )


def _typical(
    actions: Sequence[Action], seconds: Mapping[Action, float], ran: Mapping[ChunkKey, Sequence[Ran]]
) -> dict[Action, float]:
    """Median seconds of each action, over those that did the same: a pause of Python's collector makes one of
    them twice as long."""
    alike: dict[Hashable, list[Action]] = {}
    for action in actions:
        calls = ran.get(action.chunk, ())
        did = tuple((id(call.profile), call.level, call.input_bytes, call.left) for call in calls)
        alike.setdefault((action.kind, action.chunk[0], did), []).append(action)
    medians = [(same, median(seconds[action] for action in same)) for same in alike.values()]
    return {action: typical_s for same, typical_s in medians for action in same}


def _again_s(calls: Sequence[Ran], menus: Sequence[Menu], is_split: bool) -> tuple[float, float]:
    """Seconds that a chunk's backward computed again: in its B or its I, and in its W."""
    again_s = [menu[call.level].recompute_s for menu, call in zip(menus, calls, strict=True)]
    twice_s = sum(own_s for own_s, call in zip(again_s, calls, strict=True) if not call.left)
    return sum(again_s), twice_s if is_split else 0.0


def read_parts_of(ran: Mapping[ChunkKey, Sequence[Ran]]) -> dict[tuple[int, int], ReadParts]:
    """By stage and place of a block, what a W reads of what the plain block saves, and what it alone reads;
    by stage and -1, of all blocks of which that was seen."""
    found: dict[tuple[int, int], ReadParts] = {}
    sums: dict[int, list[int]] = {}
    for (stage, _), calls in ran.items():
        for place, call in enumerate(calls):
            if call.weight_bytes is None or call.profile is None:
                continue
            plain_bytes = max(1, call.profile.menu[0].saved_bytes)
            amounts = call.weight_bytes, call.passed_bytes, plain_bytes
            found[stage, place] = _parts(*amounts)
            sums[stage] = list(map(add, sums.get(stage, (0, 0, 0)), amounts))
    return found | {(stage, -1): _parts(*amounts) for stage, amounts in sums.items()}


def _parts(read: int, passed: int, plain: int) -> ReadParts:
    return min(1.0, read / plain), min(1.0, passed / plain)


def _timed(menu: Menu, scale: float) -> Menu:
    return tuple(level._replace(recompute_s=level.recompute_s * scale) for level in menu)


class _Seen(NamedTuple):
    """A step that has ended. amounts: bytes of its blocks' inputs, by chunk."""

    actions: Sequence[Action]
    ran: Mapping[ChunkKey, Sequence[Ran]]
    amounts: Mapping[ChunkKey, float]


class _Timed:
    """A step whose times are known. work: made when it is first asked for; None where a chunk's blocks are
    not known."""

    def __init__(self, amounts: Mapping[ChunkKey, float], make: Callable[[], StepWork | None]) -> None:
        self.amounts = amounts
        self._make = make

    @cached_property
    def work(self) -> StepWork | None:
        return self._make()


class RecentSteps:
    """Of one rank."""

    def __init__(self) -> None:
        self.lengths = Lengths()
        self._before: _Seen | None = None
        self._read_parts: dict[tuple[int, int], ReadParts] = {}
        self._timed: deque[_Timed] = deque(maxlen=STEPS)

    def ended(
        self,
        actions: Sequence[Action],
        ran: Mapping[ChunkKey, Sequence[Ran]],
        seconds_before: Mapping[Action, float] | None,
        head_bytes: int = 0,
    ) -> None:
        """A step has ended. actions, ran: that it did. seconds_before: of the actions of the step before it,
        None where they are not known. head_bytes: as of `StepWork.of`."""
        before = self._before
        amounts = {
            chunk: float(max(1, sum(call.input_bytes for call in ran.get(chunk, ()))))
            for chunk in dict.fromkeys(action.chunk for action in actions)
        }
        self._before = _Seen(tuple(actions), ran, amounts)
        self.lengths.note(amounts)
        if before is None or seconds_before is None or any(of not in seconds_before for of in before.actions):
            return
        parts = self._read_parts = self._read_parts | read_parts_of(before.ran)
        make = partial(StepWork.of, before.actions, seconds_before, before.ran, head_bytes, parts)
        self._timed.append(_Timed(before.amounts, make))

    def step(self) -> StepWork | None:
        """To plan for; None where too little is known."""
        if not self.lengths.vary:
            work, amounts = next(self._known(), (None, None))
            return work if amounts == self.lengths.last else None
        may_come = [timed for timed in self._known() if self.lengths.may_come_again(timed[1])]
        if not may_come:
            return None
        work, amounts = max(may_come, key=lambda timed: len(timed[0].actions))
        return work.scaled(self.lengths.factors(amounts))

    def _known(self) -> Iterator[tuple[StepWork, Mapping[ChunkKey, float]]]:
        """The last one first."""
        for timed in reversed(self._timed):
            if timed.work is not None:
                yield timed.work, timed.amounts
