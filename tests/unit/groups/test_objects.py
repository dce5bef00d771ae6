"""What a saved tensor leaves to Python's cyclic collector: few objects while it is alive, and no cycle after
its step.

The collector walks every container that is alive, again and again, so each object that a saved tensor keeps
is a cost of all others.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from offload import PipelineOffloadManager, group_commit, group_start, offload_hooks
from tests.unit.groups.stack import HELD, build_manager, installed, leaf

GROUPS, PER_GROUP = 100, 4
TENSORS = GROUPS * PER_GROUP
IN_FLIGHT = 16
"""Tensors, in each direction."""


@pytest.fixture(params=[1.0, 0.0], ids=["moved", "kept"])
def manager(request: pytest.FixtureRequest) -> Iterator[PipelineOffloadManager]:
    share: float = request.param
    caps = dict.fromkeys(("max_spilling_bytes", "max_restoring_bytes"), IN_FLIGHT * leaf().nbytes)
    manager = build_manager("early", activation_offload_fraction=share, host_reserve_bytes=HELD, **caps)
    with installed(manager):
        for _ in range(4):
            backward(manager, forward(manager))
        gc.collect()
        gc.disable()
        try:
            yield manager
        finally:
            gc.enable()


def forward(manager: PipelineOffloadManager) -> Tensor:
    manager.set_order([("F", 0, 0), ("B", 0, 0)])
    manager.begin_chunk(0, 0)
    x = leaf() * 1.0
    for _ in range(GROUPS):
        x = group_start(x, "act")
        with offload_hooks():
            for _ in range(PER_GROUP):
                x = torch.sin(x)
        x = group_commit(x, "act")
    manager.end_forward(0, 0)
    return x


def backward(manager: PipelineOffloadManager, x: Tensor) -> None:
    manager.begin_backward(0, 0, "B")
    x.backward(torch.ones_like(x))
    manager.end_backward(0, 0, "B")
    manager.step_end()


def tracked() -> Counter[str]:
    """Living objects that the collector walks, by type; without the simulated device's own, and without
    lists, dicts and tuples, of which it has as many as it likes."""
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in map(type, gc.get_objects()))
    return Counter(
        kind
        for kind in kinds
        if kind.startswith(("offload.", "torch.", "weakref.")) and not kind.startswith("offload.device.")
    )


def test_a_tensor_keeps_few_objects_alive_for_the_collector_to_walk(manager: PipelineOffloadManager) -> None:
    """Moved: handle, record, weak reference, probe, block; and of its group: its name, its saves, two marks,
    a transfer.
    Kept: handle, weak reference, alias, its storage; and of its group no transfer, but a pack hook and one
        record a piece."""
    before = tracked()
    x = forward(manager)
    grown = tracked() - before
    assert manager.engine.transfers.counts.saved == TENSORS
    moved = manager.engine.transfers.counts.spilled > 0
    own = {"Record": 1, "Block": 1} if moved else {"UntypedStorage": 1}
    of_group = {"Transfer": 1} if moved else {"StayingSaves": 1, "Record": 1}
    own |= {"Handle": 1, "ReferenceType": 1, "Tensor": 1}
    allowed = sum(own.values()) * TENSORS + (sum(of_group.values()) + 4) * GROUPS
    # a tensor and a storage of what is in flight either way; the group that a plan keeps
    spare = 2 * (2 * IN_FLIGHT) + 2 * PER_GROUP
    assert grown.total() <= allowed + spare, grown.most_common()
    assert not {
        kind for kind, count in grown.items() if count >= TENSORS and kind.rpartition(".")[2] not in own
    }, grown.most_common()
    backward(manager, x)


def test_a_step_leaves_no_cycle_to_the_collector(manager: PipelineOffloadManager) -> None:
    backward(manager, forward(manager))
    assert gc.collect() == 0
