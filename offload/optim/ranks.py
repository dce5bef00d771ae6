"""What an optimizer has to know of the other ranks: whether there are any, and whose a gradient still is.

One invariant: nothing here waits for another rank, so a rank that has failed, or has no optimizer, holds up
none. What a step does together with others (a norm over shards) it does in the order of the param groups, the
same on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from offload.optim.parameters import local_of

__all__ = ["is_split", "may_be_reduced_in_place", "reduced_before_its_hook", "several_ranks"]


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def reduced_before_its_hook() -> bool:
    """Asked in a post-accumulate hook: whether somebody else than autograd calls it.

    FSDP2 calls these hooks when its reduction is done (tests/unit/optim/test_fsdp_step.py holds torch to it).
    Autograd calls them at once, and an all-reduce of DistributedDataParallel, or by hand, comes later.
    """
    node = torch._C._current_autograd_node()
    return node is None or not node.name().endswith("AccumulateGrad")


def may_be_reduced_in_place(gradient: Tensor) -> bool:
    """Whether a plain gradient is a view of a buffer that somebody may still reduce, as
    DistributedDataParallel with gradient_as_bucket_view does: collectives move no version counter, so a copy
    made now could not be told from the reduced one."""
    return local_of(gradient) is gradient and gradient._is_view() and several_ranks()


def is_split(parameter: Tensor) -> bool:
    """Whether this rank has a part of the parameter only."""
    if local_of(parameter) is parameter:
        return False
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return any(not place.is_replicate() and mesh.size(at) > 1 for at, place in enumerate(placements))
