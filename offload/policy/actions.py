"""The words of every plan: one action of a schedule, the bytes of a chunk's groups, the rates of the link;
and a cursor in a step's list of actions, which says what is read next.

The bound, the simulation, the plan after warm-up and the benchmark take the same values. One invariant:
everything here but the cursor is an immutable number or name; nothing knows a tensor.

    chunk   what one forward saves, named by (stage, microbatch)
    group   one module's part of a chunk; groups are counted in forward order, from 0
    keeps   the groups that stay on the device, as (chunk, position of the group)

The cursor's answer is a hint: a step that departs from the list gets a shorter one, never a wrong result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

Kind = Literal["F", "B", "I", "W"]
"""F forward, B whole backward; I and W the halves of a split backward, by input and by weight. A chunk's last
read is in its B or its W."""

ChunkKey = tuple[int, int]
"""(virtual stage, microbatch)."""

_KINDS = frozenset("FBIW")


class Action(NamedTuple):
    """One entry of a schedule, printed `3F1`: virtual stage, kind, microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    @property
    def chunk(self) -> ChunkKey:
        return (self.stage, self.microbatch)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class GroupSize(NamedTuple):
    """The bytes of one group that could leave the device, once each.

    region: neighbours of one number other than 0 are read together, before any of their compute: what a
        checkpoint's recompute reads.
    weight: its part of its chunk's compute, relative to the other groups; by bytes where no group has one.
    again_s: seconds that are computed once more where its region is read, beside the action's compute.
    again_bytes: what that makes, on the device until its region's compute ends.
    half_bytes: what the W of a split backward reads of them, after its I; None for all.
    left_bytes: of `again_bytes`, what the I leaves on the device for a W that then reads nothing of the
        region and computes nothing again.
    passed_bytes: of `half_bytes`, what the I does not read; it comes back for the W alone.
    grown_bytes: that are on the device from its read to the end of the step, beside all groups: gradients of
        what was read before it.
    """

    name: str
    nbytes: int
    region: int = 0
    weight: float = 0.0
    again_s: float = 0.0
    again_bytes: int = 0
    half_bytes: int | None = None
    left_bytes: int = 0
    passed_bytes: int = 0
    grown_bytes: int = 0

    @property
    def w_bytes(self) -> int:
        """Bytes that its W reads after its I."""
        return self.nbytes if self.half_bytes is None else self.half_bytes


class GroupKey(NamedTuple):
    """One group of one chunk, by its place in forward order."""

    chunk: ChunkKey
    position: int


Keeps = frozenset[GroupKey]
ChunkSizes = Mapping[ChunkKey, Sequence[GroupSize]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of the link, in bytes per second."""

    d2h_bytes_per_s: float
    """Device to host with the other direction idle."""
    h2d_bytes_per_s: float
    """Host to device with the other direction idle."""
    duplex_bytes_per_s: float | None = None
    """Both directions together when both run. None: their sum, as if they did not disturb each other. Counted
    as no less than the faster direction alone, since an engine could take turns."""

    def __post_init__(self) -> None:
        for name in ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(
                    f"{name} is {value}, a rate must be above 0; measure the link or leave the direction out "
                    "of the plan"
                )

    @property
    def together_bytes_per_s(self) -> float:
        both = self.d2h_bytes_per_s + self.h2d_bytes_per_s
        if self.duplex_bytes_per_s is None:
            return both
        return min(max(self.duplex_bytes_per_s, self.d2h_bytes_per_s, self.h2d_bytes_per_s), both)

    @property
    def shared(self) -> tuple[float, float]:
        """(d2h, h2d) while both run: an equal share each; what a slower direction leaves over goes to the
        other."""
        h2d = min(self.h2d_bytes_per_s, self.together_bytes_per_s / 2)
        d2h = min(self.d2h_bytes_per_s, self.together_bytes_per_s - h2d)
        return d2h, min(self.h2d_bytes_per_s, self.together_bytes_per_s - d2h)


def checked_action(action: object) -> Action:
    """(kind, stage, microbatch) as an Action. Raises ValueError for anything else."""
    match action:
        case tuple((str(kind), int(stage), int(microbatch))) if (
            kind in _KINDS and min(stage, microbatch) >= 0
        ):
            return Action(cast(Kind, kind), stage, microbatch)
    raise ValueError(f"action {action!r} is not (F, B, I or W; stage >= 0; microbatch >= 0)")


def one_f_one_b(rank: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    """The order of one rank under 1F1B, to calculate with: `num_stages - 1 - rank` forwards, then forward and
    backward in turn, then the backwards left."""
    if not 0 <= rank < num_stages:
        raise ValueError(f"rank {rank} is not one of {num_stages} stages; give a rank in 0..{num_stages - 1}")
    if num_microbatches < 0:
        raise ValueError(f"num_microbatches is {num_microbatches}; give 0 or more")
    num_warmup = min(num_stages - 1 - rank, num_microbatches)
    order = [Action("F", rank, m) for m in range(num_warmup)]
    for m in range(num_warmup, num_microbatches):
        order += [Action("F", rank, m), Action("B", rank, m - num_warmup)]
    order += [Action("B", rank, m) for m in range(num_microbatches - num_warmup, num_microbatches)]
    return tuple(order)


class Life(NamedTuple):
    """The actions of a chunk, by their places: its forward, its I if it has one, its last read."""

    forward: int
    half_read: int | None
    last_read: int


def lives_of(actions: Sequence[Action]) -> dict[ChunkKey, Life]:
    """Each chunk's life, in the order of the last reads. Raises ValueError for an order that no chunk can
    have: made twice, read before it is made or after it is dead, or never read."""
    forwards: dict[ChunkKey, int] = {}
    half_reads: dict[ChunkKey, int] = {}
    lives: dict[ChunkKey, Life] = {}
    for at, action in enumerate(actions):
        chunk = action.chunk
        if action.kind == "F":
            if chunk in forwards:
                raise ValueError(
                    f"action {at}, {action}, runs a forward that action {forwards[chunk]} has run; give each "
                    "chunk one F"
                )
            forwards[chunk] = at
        elif chunk not in forwards or chunk in lives or (chunk in half_reads and action.kind != "W"):
            why = "that was read before" if chunk in forwards else "before its forward"
            raise ValueError(
                f"action {at}, {action}, reads a chunk {why}; give each chunk one F, then one B, or one "
                "I and one W"
            )
        elif action.kind == "I":
            half_reads[chunk] = at
        else:
            lives[chunk] = Life(forwards[chunk], half_reads.get(chunk), at)
    unread = [str(actions[at]) for chunk, at in forwards.items() if chunk not in lives]
    if unread:
        raise ValueError(
            f"{len(unread)} of {len(forwards)} forwards are never read ({', '.join(unread)}); give each its "
            "B or its W"
        )
    return lives


def require_sizes(actions: Sequence[Action], sizes: ChunkSizes) -> None:
    """Raise ValueError for a chunk without an entry in sizes; one without groups has an empty one."""
    for at, action in enumerate(actions):
        if action.chunk not in sizes:
            raise ValueError(
                f"action {at}, {action}, has no group sizes; sizes has {len(sizes)} chunks, add "
                f"{action.chunk}"
            )


def require_times(actions: Sequence[Action], compute_s: Sequence[float]) -> None:
    """Raise ValueError unless there is one time for each action."""
    if len(actions) != len(compute_s):
        raise ValueError(
            f"{len(actions)} actions and {len(compute_s)} compute times; give one time for each action"
        )


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
