"""Mode "auto" on ranks whose blocks communicate: at the ends of steps they agree on profiles, and then on the
plan of the rank with the least room (offload/planner/agreement.py).

One invariant: what is followed here is what all these ranks follow, from the same step on.
"""

from __future__ import annotations

from offload.auto.calls import BlockCalls
from offload.auto.ladder import Facts
from offload.auto.memory import AutoMemory
from offload.auto.plan import AutoPlan
from offload.groups.manager import GroupsManager
from offload.planner.agreement import Agreement, Room, is_point
from offload.telemetry.speaker import Once, speaker

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
        """Of all ranks that blocks communicate with, what they tell of a step. Blocks the host for them."""
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
