"""What one block of a model costs, call by call, and the menu that follows from it.

    call    one call of an operator in the block's forward, named by operator and number
    keep    the set of calls whose outputs wait for the backward, which then runs all others again

One invariant: numbers and names only. A recompute runs every call that is not kept, up to the last tensor
that autograd saves; so what a keep set costs is a sum over calls, and calls leave the set in the order of
their seconds for each byte, lowest first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from offload.policy.menu import Level, Menu, convex

Keep = frozenset[tuple[Any, int]] | None
Keeps = tuple[Keep, ...]

MOST_LEVELS = 8

_KEEPING_S = 20e-6
"""Of a call: one that computes for less is not kept, since a dispatch mode takes the host longer. Of 109
calls of a Gemma 3 block 25 have outputs too small to leave, so every level kept them for no byte. On an H200
a step of 16 such blocks took 399 to 430 ms under a plan that kept 29 or 30 calls of most, predicted 331.6,
and 376 under torch's checkpoint (docs/log.md, November 2026)."""


class SeenCall(NamedTuple):
    """One call of an operator in the forward of a block.

    operator, number: which call of which operator, from 0. nbytes: what waits if it is kept. saved_bytes:
        what autograd saves of its output, which a recompute makes again.
    again: whether a recompute comes past it. why_not: why its output cannot be kept; empty if it can. must:
        it is kept wherever the block is recomputed.
    together: calls with an equal mark are kept together or not at all, because other inputs may number them
        otherwise; None for a call by itself.
    squared: its seconds grow with the square of the sequence.
    """

    operator: Any
    number: int
    nbytes: int
    device_s: float
    saved_bytes: int = 0
    again: bool = True
    why_not: str = ""
    must: bool = False
    together: Hashable = None
    squared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockProfile:
    """Profile of one kind of block, for inputs of one shape.

    Built by `build`; a profile for other numbers of tokens by `scaled`.
    """

    calls: tuple[SeenCall, ...]
    input_bytes: int
    """The one argument that leaves when the block is recomputed."""
    plain_bytes: int
    """What autograd saves and may leave when the block is not recomputed, `given_bytes` included."""
    given_bytes: int
    """Of these, what the block was given and did not make: other blocks may save the same bytes."""
    forward_s: float
    """Device seconds of the plain forward."""
    collectives: frozenset[str]
    """Names of the process groups whose collectives the forward calls: ranks of one group follow one plan."""
    only: str = ""
    """Why the block has no level but the plain one; empty if it has."""
    whole: str = ""
    """Why the block has no level between plain and checkpoint; empty if it may have."""
    menu: Menu = ()
    keeps: Keeps = ()
    """By level of the menu: None for the plain block, else the calls that are kept; none for a checkpoint."""

    @staticmethod
    def build(**numbers: Any) -> BlockProfile:
        """A profile with the menu and the keep sets that follow from its other fields."""
        profile = BlockProfile(**numbers)
        menu, keeps = _menu_of(profile)
        return replace(profile, menu=menu, keeps=keeps)

    @property
    def why_not(self) -> dict[str, str]:
        """By call, why it is not kept at any level."""
        return {f"call {c.number} of {c.operator}": c.why_not for c in self.calls if c.why_not}

    def scaled(self, factor: float, *, sequence: float | None = None) -> BlockProfile:
        """The same block for `factor` times as many tokens, at the same levels: a place in the menu keeps the
        same calls whatever the length. Takes less than a millisecond for a hundred calls.

        sequence: by what a single sequence is longer; None where all of the factor is. Bytes and seconds grow
            with the tokens, those of attention also with the length.
        """
        squared = factor * (factor if sequence is None else sequence)
        calls = tuple(
            call._replace(
                nbytes=round(call.nbytes * factor),
                saved_bytes=round(call.saved_bytes * factor),
                device_s=call.device_s * (squared if call.squared else factor),
            )
            for call in self.calls
        )
        seen_s, seen_now_s = _seconds(self.calls), _seconds(calls)
        profile = replace(
            self,
            calls=calls,
            input_bytes=round(self.input_bytes * factor),
            plain_bytes=round(self.plain_bytes * factor),
            given_bytes=round(self.given_bytes * factor),
            forward_s=(self.forward_s - seen_s) * factor + seen_now_s,
        )
        return replace(profile, menu=_same_levels(profile))

    def timed(self, forward_s: float) -> BlockProfile:
        """The same with the seconds of a forward without a profiler, and without a hook."""
        seen_s = _seconds(self.calls)
        scale = min(1.0, forward_s / seen_s) if seen_s else 1.0
        numbers = {own.name: getattr(self, own.name) for own in fields(self)}
        numbers["calls"] = tuple(call._replace(device_s=call.device_s * scale) for call in self.calls)
        return BlockProfile.build(**{**numbers, "forward_s": forward_s})


def _seconds(calls: Iterable[SeenCall]) -> float:
    return sum(call.device_s for call in calls)


# -- the menu ------------------------------------------------------------------------------------------------
class _Class(NamedTuple):
    """Calls that are kept together, those that a recompute comes past."""

    names: frozenset[tuple[Any, int]]
    num_calls: int
    nbytes: int
    saved_bytes: int
    seconds: float
    must: bool


def _menu_of(profile: BlockProfile) -> tuple[Menu, Keeps]:
    plain = Level("plain", profile.plain_bytes, 0.0)
    if profile.only:
        return (plain,), (None,)
    classes = [] if profile.whole else _classes(profile.calls)
    must = [found for found in classes if found.must]
    may = [found for found in classes if not found.must and found.seconds > _KEEPING_S * found.num_calls]
    may.sort(key=lambda found: found.seconds / max(found.nbytes, 1), reverse=True)
    entering = [*must, *may]
    again_s = _again_seconds(profile)
    made_bytes = profile.plain_bytes - profile.given_bytes
    levels, num_kept = [plain], dict[str, int]()
    waiting, num_calls = profile.input_bytes, 0
    for number in range(len(entering) + 1):
        if number >= len(must):
            name = f"keep {num_calls} calls" if num_calls else "checkpoint"
            levels.append(Level(name, waiting, max(0.0, again_s), max(0, made_bytes)))
            num_kept[name] = number
        if number < len(entering):
            found = entering[number]
            waiting += found.nbytes
            num_calls += found.num_calls
            made_bytes -= found.saved_bytes
            again_s -= found.seconds
    menu = convex(levels)
    if menu[0] is not plain:  # a level whose recompute costs no device seconds still costs the host's
        menu = (plain, *menu)
    menu = _thinned(menu)
    nothing = frozenset[tuple[Any, int]]()
    return menu, (
        None,
        *(nothing.union(*(found.names for found in entering[: num_kept[level.name]])) for level in menu[1:]),
    )


def _again_seconds(profile: BlockProfile) -> float:
    """Seconds of a recompute that retains nothing: with kernels that no operator launches, and where the
    device waits for launches."""
    again_s = _seconds(call for call in profile.calls if call.again)
    return again_s + max(0.0, profile.forward_s - _seconds(profile.calls))


def _same_levels(profile: BlockProfile) -> Menu:
    """The levels of the profile's menu, with the numbers that follow from its other fields."""
    classes, again_s = _classes(profile.calls), _again_seconds(profile)
    made_bytes = profile.plain_bytes - profile.given_bytes
    levels: list[Level] = []
    for level, keep in zip(profile.menu, profile.keeps, strict=True):
        if keep is None:
            levels.append(level._replace(saved_bytes=profile.plain_bytes))
            continue
        kept = [found for found in classes if found.names <= keep]
        levels.append(
            level._replace(
                saved_bytes=profile.input_bytes + sum(found.nbytes for found in kept),
                recompute_s=max(0.0, again_s - sum(found.seconds for found in kept)),
                made_again_bytes=max(0, made_bytes - sum(found.saved_bytes for found in kept)),
            )
        )
    return tuple(levels)


def _classes(calls: Sequence[SeenCall]) -> list[_Class]:
    """Classes of calls that are kept together. One that may not be kept is enough for none to be: with other
    inputs its number may be another call's."""
    by_mark: dict[Hashable, list[SeenCall]] = {}
    for call in calls:
        mark = (call.operator, call.number) if call.together is None else call.together
        by_mark.setdefault(mark, []).append(call)
    found = []
    for together in by_mark.values():
        again = [call for call in together if call.again]
        if not again or any(call.why_not for call in together):
            continue
        numbers = {call.number for call in together}
        if together[0].together is not None:  # another forward may call it more often
            numbers |= set(range(min(numbers), 2 * max(numbers) + 2))
        found.append(
            _Class(
                frozenset((together[0].operator, number) for number in numbers),
                len(again),
                sum(call.nbytes for call in again),
                sum(call.saved_bytes for call in again),
                _seconds(again),
                any(call.must for call in together),
            )
        )
    return found


def kept_always(calls: Sequence[SeenCall]) -> frozenset[tuple[Any, int]]:
    """Names of the calls that every recompute of a block retains."""
    nothing = frozenset[tuple[Any, int]]()
    return nothing.union(*(found.names for found in _classes(calls) if found.must))


def _thinned(menu: Menu) -> Menu:
    """At most MOST_LEVELS of them: those go between whose neighbours, mixed, least is lost."""
    levels = list(menu)
    while len(levels) > MOST_LEVELS:
        lost = {at: _lost(*levels[at - 1 : at + 2]) for at in range(1, len(levels) - 1)}
        del levels[min(lost, key=lambda at: lost[at])]
    return tuple(levels)


def _lost(more: Level, level: Level, less: Level) -> float:
    """Twice the area between the level and the line of its neighbours: bytes times seconds."""
    return abs(
        (more.saved_bytes - less.saved_bytes) * (level.recompute_s - less.recompute_s)
        - (level.saved_bytes - less.saved_bytes) * (more.recompute_s - less.recompute_s)
    )


# -- seconds -------------------------------------------------------------------------------------------------
class TimedCall(NamedTuple):
    """event_s: between two events around the call. host_s: of the host between their records. flops: 0 where
    they are not known. touched_bytes: of inputs and outputs. made_bytes: of outputs that are no views."""

    event_s: float
    host_s: float
    flops: int
    touched_bytes: int
    made_bytes: int


_TRUSTED = 4.0  # event_s over host_s: of such a pair the launch is a quarter at most

_KERNEL_S = 50e-6
"""A call whose pair takes so long has a kernel, or waited for the host: making an empty tensor takes less."""

_MOST_TOUCHED = 4
"""Bytes that a call reads and writes at most for each that it makes: a gather has a whole table as its input,
and reads little of it."""


def settled_seconds(calls: Sequence[TimedCall]) -> list[float]:
    """Device seconds of each call, from event pairs that may have caught the host.

    Where the device waits for the host, a pair contains the launch: a call's seconds lie between event_s -
    host_s and event_s. Calls far longer than their launch tell the rate at which this block computes, where
    flops are known; elsewhere the bytes of any call do, as no pair is shorter than its kernel. A call that is
    not far longer than its launch is taken at the best of these rates, within its bounds. Without any long
    call it is what the launch does not explain.

    Source: five plans for one kind of block on an H200, made while long calls alone told the rate of bytes,
        took a recompute of its norms and activations for 1.0 to 3.3 ms; the 3 GB that it touches are 0.8 ms
        at the memory's rate (docs/log.md, November 2026).
    """
    flop_rate = max((c.flops / c.event_s for c in calls if c.flops and _is_trusted(c)), default=0.0)
    byte_rate = max(
        (
            min(c.touched_bytes, _MOST_TOUCHED * c.made_bytes) / c.event_s
            for c in calls
            if not c.flops and c.event_s >= _KERNEL_S
        ),
        default=0.0,
    )
    found = []
    for call in calls:
        work, rate = (call.flops, flop_rate) if call.flops else (call.touched_bytes, byte_rate)
        least = max(0.0, call.event_s - call.host_s)
        guess = work / rate if rate else least
        found.append(call.event_s if _is_trusted(call) else min(call.event_s, max(least, guess)))
    return found


def _is_trusted(call: TimedCall) -> bool:
    return call.event_s > 0.0 and call.event_s >= _TRUSTED * call.host_s
