"""What an optimizer has to know of the other ranks: whether there are any, whose a gradient still is, and the
norm of gradients that are spread over them.

One invariant: nothing here waits for another rank beyond torch's own collectives, so a rank that has failed,
or has no optimizer, blocks none. Collectives of a step (a norm over shards) run in the order of the param
groups, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from offload.params.view import local_of


def several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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


def total_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all gradients as one vector, 0-dim, as torch.nn.utils.get_total_norm; of half precision in
    float32. Blocks the host: never. A DTensor counts whole: its norm is reduced over its mesh, by collectives
    that every rank of the mesh must take part in; so every rank gets the same number, a nan or inf of any of
    them in it. Plain gradients count as they are here: who splits a model in other ways reduces their norms
    himself, and gives clip_grad_norm_ the `total`. Tensors of several meshes, or of both kinds, may be
    mixed."""
    norm_type = float(norm_type)
    if not gradients:
        return torch.zeros((), device=device)
    kinds: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms = [_norm_of_one_mesh(chosen, norm_type).to(device) for chosen in kinds.values()]
    joined: Tensor = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return joined


def _norm_of_one_mesh(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    """The operations and the order of torch.nn.utils.get_total_norm, and so its bits and its collectives."""
    norms: list[Tensor] = []
    for kind in dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients):
        chosen = [gradient for gradient in gradients if (gradient.device, gradient.dtype) == kind]
        widened = {"dtype": torch.float32} if kind[1].itemsize < 4 else {}
        norms += torch._foreach_norm(chosen, norm_type, **widened)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    whole: Tensor = total if local_of(total) is total else total.full_tensor()
    return whole


def clip_(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place as torch.nn.utils.clip_grads_with_norm_: by max_norm / (norm + 1e-6), at most
    1. Blocks the host only for gradients that lie elsewhere than the norm."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    shards = [local_of(gradient).detach() for gradient in gradients]
    for device, dtype in dict.fromkeys((shard.device, shard.dtype) for shard in shards):
        chosen = [shard for shard in shards if (shard.device, shard.dtype) == (device, dtype)]
        torch._foreach_mul_(chosen, factor.to(device))
