"""A named group: the tensors of one module in one chunk, that leave and come back together.

One invariant: a group object is recorded once and used again in every step; what it holds of a step is in
`saved`, which is new each time.
"""

from __future__ import annotations

from typing import NamedTuple

from offload.saved.chunk import SavedGroup

KEPT = "kept"
"""Group of the outputs that mode "auto" does not recompute. No user named it, so no warning blames it for
moving nothing."""

ROUTING = "routing"
"""Group of what a block decides whose other outputs are recomputed: beside the inputs, the only one."""

HEAD = "head"
"""What comes between the last block of a forward and its backward, in mode "auto": nothing of it leaves."""


class Cost(NamedTuple):
    """What the block computes that a group is of, for a plan.

    weight: its part of its chunk's compute, its recompute included, in any unit that the groups of a chunk
    share. again_bytes: what its recompute makes, where this group is the input of one.
    """

    weight: float
    again_bytes: int = 0


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
