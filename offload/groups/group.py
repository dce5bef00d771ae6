"""A named group: the tensors of one module in one chunk, that leave and come back together; how many groups
of one name may be on their way out at once, and how far ahead the inputs of recomputed calls are fetched.

One invariant: a group object is recorded once and used again in every step; what it holds of a step is in
`saved`, which is new each time. Past a cap of groups on their way out compute waits for the oldest, and the
host never does.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

from offload.engine import OffloadEngine
from offload.saved.handles import SavedGroup
from offload.transfer.block import Transfer

KEPT = "kept"
"""Group of the outputs that mode "auto" does not recompute. No user named it, so no warning blames it for
moving nothing."""

ROUTING = "routing"
"""Group of what a block decides whose other outputs are recomputed: beside the inputs, the only one."""

HEAD = "head"
"""What comes between the last block of a forward and its backward, in mode "auto": nothing of it leaves."""


class Cost(NamedTuple):
    """Compute of the block that a group is of, for a plan.

    weight: its part of its chunk's compute, its recompute included, in any unit that the groups of a chunk
    share. again_bytes: what its recompute makes, where this group is the input of one. grown_bytes: as of
    GroupSize.
    """

    weight: float
    again_bytes: int = 0
    grown_bytes: int = 0


class Group:
    """One group of a chunk.

    total_offload_bytes, total_tensor_count: what was eligible to leave in the last step, one count a storage.
    logical_bytes: the same, one count a saved tensor, so that it does not depend on what shared a copy: a
        partial view does only while its storage has not left.
    slot_bytes: the same tensor by tensor, as (slot, bytes) in the order in which they were saved.
    regions: by slot, the number of the checkpoint region whose recompute reads it. half_slots: those that the
    weight half of a split backward reads, None where none was seen. passed_slots: of these, those that its
    input half does not read. left_bytes: of what a call makes again whose input this is, what its I leaves on
    the device for its W. refused_bytes: should have left in the last step, and found no host memory.
    since: autograd's number of the first node after its start. replayed: of saved
    tensors that stay because CUDA graphs of torch.compile own their memory, bytes by address. stays: the plan
    keeps it on the device. required: it leaves whatever the plan would keep. cost: None where it is not
    known. hooked: its saves were asked for since its start. encloses: another group was started in it.
    committed: its end was marked. sent: what it saved until then has been sent, which a delayed commit does
    later.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"a group's name is {name!r}, must be a non-empty string such as 'core_attn'")
        self.name = name
        self.cost: Cost | None = None
        self.stays = False
        self.required = False
        self.hooked = False
        self.encloses = False
        self.total_offload_bytes = 0
        self.total_tensor_count = 0
        self.logical_bytes = 0
        self.slot_bytes: tuple[tuple[int, int], ...] = ()
        self.regions: dict[int, int] = {}
        self.half_slots: frozenset[int] | None = None
        self.passed_slots: frozenset[int] = frozenset()
        self.left_bytes = self.refused_bytes = 0
        self.saved: SavedGroup | None = None
        self.since = 0
        self.replayed: dict[int, int] = {}
        self.committed = False
        self.sent = False


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
            cap, nbytes = limits.inputs_in_flight, max(saved.nbytes, 1)
            if self._inputs_bytes is not None and nbytes > self._inputs_bytes:
                self._inputs_bytes = nbytes
                self._ahead.bound("inputs_ahead_bytes", nbytes)  # how far the prefetch looks
        elif saved.nbytes and self._inputs_bytes is not None:
            self._inputs_bytes = None
            self._ahead.end()
        if cap is not None and saved.transfers:
            pending = self._pending[group.name]
            pending.append(saved.transfers)
            while len(pending) > cap:
                self._settle(pending.popleft())

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
