"""How many groups of one name may be on their way out at once, and how far ahead the inputs of recomputed
calls are fetched.

One invariant: past a cap compute waits for the oldest, and the host never does.
"""

from __future__ import annotations

from collections import defaultdict, deque

from offload.engine import OffloadEngine
from offload.groups.group import Group
from offload.transfer.block import Transfer


class LeavingGroups:
    """Groups of one engine that are on their way out. Callers hold its lock.

    input_names: groups that have one input of a recomputed call each, of which nothing else leaves.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.input_names: set[str] = set()
        self._pending: dict[str, deque[list[Transfer]]] = defaultdict(deque)
        self._ahead = engine.limits.contributor("inputs", self)
        self.bounds = engine.limits.contributor("groups", self)
        self.bound(engine.config.max_inflight_offloads)
        self._inputs_bytes: int | None = 0  # the largest input of a step that saved nothing else so far

    def bound(self, number: int | None) -> None:
        """Groups of one name that may be pending; None for no such cap."""
        self.bounds.bound("groups_in_flight", number)

    def sent(self, group: Group) -> None:
        """The group has been sent."""
        saved, limits = group.saved, self._engine.limits
        if saved is None:
            return
        cap = limits.groups_in_flight
        if group.name in self.input_names:
            cap = limits.inputs_in_flight
            self._input_sent(saved.nbytes)
        elif saved.nbytes and self._inputs_bytes is not None:
            self._inputs_bytes = None
            self._ahead.end()
        if cap is not None and saved.transfers:
            pending = self._pending[group.name]
            pending.append(saved.transfers)
            while len(pending) > cap:
                self._settle(pending.popleft())

    def _input_sent(self, nbytes: int) -> None:
        """Set how far the prefetch looks."""
        if self._inputs_bytes is not None and max(nbytes, 1) > self._inputs_bytes:
            self._inputs_bytes = max(nbytes, 1)
            self._ahead.bound("inputs_ahead_bytes", self._inputs_bytes)

    def settle_freed_inputs(self) -> None:
        """Let the sources of copies under way go that the backward is done with, of inputs: no later copy
        would make compute wait for them."""
        for name in self.input_names:
            pending = self._pending[name]
            for transfers in [*pending]:
                if all(block.is_freed for transfer in transfers for block in transfer.blocks):
                    pending.remove(transfers)
                    self._settle(transfers)

    def step_ends(self) -> None:
        """Nothing is pending any more, and the next step shows anew what it saves."""
        self._pending.clear()
        if self._inputs_bytes:
            self._ahead.end()
        self._inputs_bytes = 0

    def _settle(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            self._engine.transfers.settle_spill(transfer)
