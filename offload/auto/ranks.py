"""Mode "auto" on ranks whose blocks communicate with each other: they agree on profiles at the ends of steps,
and then follow one plan, that of the rank with the least room.

If one rank recomputes a block and another does not, a collective that the recompute calls again meets another
one, or none: a wrong sum, or a wait for ever. So ranks that share a process group whose collectives a block's
forward calls share its profile, its levels and the step from which these hold. Other ranks plan alone.

    end n of a step    each rank tells its profiles, and the ranks that its own blocks communicate with. Who
                       is reached by way of others takes part, and each block has the profile of the rank
                       that saves most, less what may not be kept on any
                       each tells what it has room for, or that it cannot plan yet
                       the rank with the least room plans for all

# Note: [Where ranks agree]
# hazard  ranks wait for each other at different points of their programs.
# edge    the end of a step that an optimizer's step() or a step_end() makes, counted from the first forward.
#         Ranks with a collective in a forward run the same forwards, so their counts are equal. An end that
#         is guessed from what is alive is not counted: its moment differs by rank. Nothing is agreed in a
#         forward, a backward or a hook of one.
# means   values in the job's store, not collectives: no communicator, no stream and no order of collectives
#         is touched. What the others still need of a step was issued before its end. A rank that does not
#         come (an exception, a step() that is skipped on one rank) ends the wait with an error that names it.
# proof   tests/integration/test_auto_ranks.py, which also shows what happens without.

One invariant: what is followed is a function of what all members told, so it is the same on each, from the
same step on.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from offload.auto.calls import BlockCalls
from offload.auto.ladder import Facts
from offload.auto.memory import AutoMemory
from offload.auto.plan import AutoPlan
from offload.errors import OffloadError
from offload.groups.manager import GroupsManager
from offload.planner.profile import BlockProfile, SeenCall
from offload.policy.mixture import MixedPlan
from offload.telemetry.speaker import Once, speaker

T = TypeVar("T")

_TIMEOUT_S = 600.0
"""Of a wait for another rank; torch's own for NCCL."""
_EVERY = 16
"""Ends; more than it takes to come to the third plan of a shape of step."""

_agreements = itertools.count()


def is_point(end: int) -> bool:
    """Whether ranks agree at this end of a step, from 1. Later ends are spaced: a wait for the slowest host
    costs little, but not nothing."""
    return end <= _EVERY or end % _EVERY == 0


class Room(NamedTuple):
    """What a rank can plan with.

    shape: what it runs, equal on ranks that can follow one plan. limit_bytes: for saved tensors and what is
    made again; None for as much as they take. wants_plan: whether another one shall be made now.
    """

    shape: object
    limit_bytes: int | None
    wants_plan: bool = True


class _Told(NamedTuple):
    peers: frozenset[int]
    profiles: Sequence[_Seen | None]


class _Seen(NamedTuple):
    """A profile whose operators are names, and the bytes of its call's input."""

    profile: BlockProfile
    input_bytes: int


class Agreement:
    """Of one planner, with those of other ranks that are the first, the second, ... of their processes as it
    is. store: for values of this planner alone. timeout_s: of a wait for another rank. Its calls block the
    host."""

    def __init__(self, store: c10d.Store, rank: int, timeout_s: float = _TIMEOUT_S) -> None:
        self.members: frozenset[int] = frozenset()
        """Ranks that agreed last, this one among them."""
        self._rank = rank
        self._store = store
        self._timeout_s = timeout_s
        self._end = 0
        self._posted: list[str] = []  # keys at this end
        self._posted_before: list[str] = []

    @classmethod
    def of_process(cls) -> Agreement:
        """The next one, in the store of the default process group."""
        prefix = f"offload/plans/{next(_agreements)}"
        return cls(c10d.PrefixStore(prefix, c10d._get_default_store()), dist.get_rank())

    def profiles(
        self, end: int, peers: frozenset[int], own: Sequence[tuple[BlockProfile, int] | None]
    ) -> list[tuple[BlockProfile, int] | None]:
        """The common profiles, with the bytes of the input that they are for; None where a rank has none yet.

        end: of which step, counted alike on all ranks. own: by kind of block, in the order of their first
        calls; None for a block that has no profile yet.
        """
        self._end = end
        self._posted_before, self._posted = self._posted, []
        seen = [None if one is None else _Seen(_named(one[0]), one[1]) for one in own]
        found = {self._rank: self._tell("profiles", _Told(peers, seen))}
        ahead = set(peers)
        while ahead:
            found |= self._hear("profiles", ahead)
            ahead = {peer for told in found.values() for peer in told.peers} - found.keys()
        self.members = frozenset(found)
        # all members are at this end, so each has read what was told at the one before
        for key in self._posted_before:
            self._store.delete_key(key)
        common: list[tuple[BlockProfile, int] | None] = []
        columns = zip(*(told.profiles for _, told in sorted(found.items())), strict=False)
        for mine, column in zip(own, columns, strict=False):
            all_seen = [one for one in column if one is not None]
            if mine is None or len(all_seen) < len(column):
                common.append(None)
            else:
                profile, at = common_profile(mine[0], [one.profile for one in all_seen])
                common.append((profile, all_seen[at].input_bytes))
        return [*common, *[None] * (len(own) - len(common))]

    def rooms(self, room: Room | None) -> Mapping[int, Room | None]:
        """By member. room: of this rank; None if it has nothing to plan with at this end."""
        return self.exchange("room", room)

    def exchange(self, what: str, value: T) -> Mapping[int, T]:
        """What each member tells of this, by rank, once an end."""
        told: dict[int, T] = {self._rank: self._tell(what, value)}
        return told | self._hear(what, self.hears)

    def tell_plan(self, choose: Callable[[], MixedPlan | None]) -> MixedPlan | None:
        """What `choose` returns, for all others too. They are told if it raises."""
        try:
            plan = choose()
        except Exception as error:
            self._tell("plan", (None, f"{type(error).__name__}: {error}"))
            raise
        self._tell("plan", (plan, ""))
        return plan

    @property
    def hears(self) -> frozenset[int]:
        """The other members."""
        return self.members - {self._rank}

    def hear_plan(self, rank: int) -> MixedPlan | None:
        """What `rank` chose. Raises OffloadError if it failed."""
        plan, error = self._hear("plan", {rank})[rank]
        if error:
            raise OffloadError(
                f"mode='auto': rank {rank} plans for ranks {sorted(self.members)}, whose blocks communicate, "
                f"and it failed: {error}"
            )
        found: MixedPlan | None = plan
        return found

    def _tell(self, what: str, value: Any) -> Any:
        key = self._key(what, self._rank)
        post: Any = self._store.set  # takes bytes, whatever its stub says
        post(key, pickle.dumps(value))
        self._posted.append(key)
        return value

    def _hear(self, what: str, ranks: Collection[int]) -> dict[int, Any]:
        keys = {rank: self._key(what, rank) for rank in sorted(ranks)}
        if not keys:
            return {}
        try:
            self._store.wait(list(keys.values()), timedelta(seconds=self._timeout_s))
        except RuntimeError as error:  # dist.DistError, but of a FileStore
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            raise OffloadError(
                f"mode='auto': rank {self._rank} waited {self._timeout_s:g} s at the end of its step "
                f"{self._end} for ranks {missing}, whose blocks communicate with its own and follow one plan "
                "with them. Each must call apply() before the same step, and end the same steps, by the "
                "optimizer's step() or step_end(): look there for an exception, or a step that was skipped "
                "on some ranks only"
            ) from error
        return {rank: pickle.loads(self._store.get(key)) for rank, key in keys.items()}

    def _key(self, what: str, rank: int) -> str:
        return f"{self._end}/{what}/{rank}"


def _named(profile: BlockProfile) -> BlockProfile:
    """Without operators, which cannot be sent. A menu follows from the rest."""
    calls = tuple(
        call._replace(
            operator=str(call.operator), together=None if call.together is None else str(call.together)
        )
        for call in profile.calls
    )
    return replace(profile, calls=calls, menu=(), keeps=())


def common_profile(own: BlockProfile, of_members: Sequence[BlockProfile]) -> tuple[BlockProfile, int]:
    """One profile for a block on all members, and whose numbers it has, a place in `of_members`: those of the
    one that saves most, so that a plan fits everywhere. What one may not keep, or must, none may or all must.

    own: of this rank, with operators. of_members: by rank, operators named; the same on every rank.
    """
    at = max(range(len(of_members)), key=lambda place: (of_members[place].plain_bytes, -place))
    base = of_members[at]
    operators = {str(call.operator): call.operator for call in own.calls}
    by_call = [{(call.operator, call.number): call for call in profile.calls} for profile in of_members]
    calls = []
    for call in base.calls:
        same = [found.get((call.operator, call.number)) for found in by_call]
        calls.append(_common_call(call, same)._replace(operator=operators.get(call.operator, call.operator)))
    numbers = {field.name: getattr(base, field.name) for field in fields(base)}
    numbers |= {
        "calls": tuple(calls),
        "collectives": own.collectives,
        "only": next((profile.only for profile in of_members if profile.only), ""),
        "whole": next((profile.whole for profile in of_members if profile.whole), ""),
    }
    return BlockProfile.build(**numbers), at


def _common_call(call: SeenCall, same: Sequence[SeenCall | None]) -> SeenCall:
    found = [one for one in same if one is not None]
    why_not = "" if len(found) == len(same) else "not every rank that follows this plan calls it"
    return call._replace(
        why_not=next((one.why_not for one in found if one.why_not), why_not),
        must=any(one.must for one in found),
        together=next((one.together for one in found if one.together is not None), None),
    )


logger = speaker(__name__)

_GUESSED_ENDS = 3
"""So many before the first step of an optimizer are the microbatches of one step, maybe."""


class AutoRanks:
    """This rank and those that its blocks communicate with."""

    def __init__(self, calls: BlockCalls, memory: AutoMemory, plan: AutoPlan) -> None:
        self._calls = calls
        self._memory = memory
        self._plan = plan
        self._agreement: Agreement | None = None
        self._announced_ends = self._guessed_ends = 0
        self._said = Once()

    def agree_on_profiles(self, *, end_was_guessed: bool) -> bool:
        """Follow what was seen here; or, with ranks that blocks communicate with, what all of them saw.
        Returns whether they are at a point where they agree on a plan, too. Note: [Where ranks agree].
        Blocks the host there: for the other ranks."""
        calls = self._calls
        self._guessed_ends += end_was_guessed
        self._announced_ends += not end_was_guessed
        if not calls.peers:
            calls.follow_own()
            return False
        if end_was_guessed:
            is_odd = self._guessed_ends > _GUESSED_ENDS and not self._announced_ends
            if is_odd and self._said.first("guessed"):
                logger.warning(
                    f"blocks communicate with ranks {sorted(calls.peers)}, which are to follow one plan, and "
                    "no optimizer's step() ends a step: its end is guessed, at moments that may differ by "
                    "rank. mode='auto' recomputes every block until all of these ranks call "
                    "offload.step_end() after each step"
                )
            return False
        if not is_point(self._announced_ends):
            return False
        if self._agreement is None:
            self._agreement = Agreement.of_process()
        members = self._agreement.members
        common = self._agreement.profiles(self._announced_ends, calls.peers, calls.own_profiles())
        if members != self._agreement.members:
            calls.levels = None  # of fewer ranks, which may have had other menus
        calls.follow_common(common)
        return True

    def common(self, facts: Facts) -> Facts:
        """Facts of a step in common, of all ranks that blocks communicate with. Blocks the host for them."""
        if not self._calls.peers or self._agreement is None:
            return facts
        return Facts.common([told for _, told in sorted(self._agreement.exchange("facts", facts).items())])

    def agree_on_plan(self, manager: GroupsManager) -> None:
        """Follow the plan of the rank that has the least room, if any rank wants another one. Blocks the host
        for the other ranks, and as `AutoPlan.follow`."""
        agreement, plan, work = self._agreement, self._plan, self._plan.recent.step()
        assert agreement is not None
        room = None
        if work is not None and self._memory.is_known:
            limit_bytes = None if self._memory.total is None else self._memory.limit_bytes or 0
            room = Room(work.shape, limit_bytes, plan.is_wanted)
        rooms = agreement.rooms(room)
        found = {rank: room for rank, room in rooms.items() if room is not None}
        if work is None or len(found) < len(rooms) or not any(room.wants_plan for room in found.values()):
            return  # as every member sees
        if len({room.shape for room in found.values()}) > 1:
            plan.follow_none()
            if self._said.first("shapes"):
                logger.warning(
                    f"blocks of ranks {sorted(found)} communicate, and the ranks run other forwards or in "
                    "another order: no plan is for all of them, and mode='auto' recomputes every block"
                )
            return
        least = {rank: room.limit_bytes for rank, room in found.items() if room.limit_bytes is not None}
        planner = min(least or found, key=lambda rank: (least.get(rank, 0), rank))
        if planner in agreement.hears:
            chosen = agreement.hear_plan(planner)
            plan.count_plan()
        else:
            chosen = agreement.tell_plan(lambda: plan.choose(manager.engine, work))
        if chosen is not None or (room is not None and room.limit_bytes == 0):
            plan.follow(manager, chosen)
        else:  # another rank has no room
            plan.follow_none()
