"""The norm of all gradients and the factor that clips them, on the device, without the host ever learning
either.

One invariant: one factor, float32, made once a step; every place multiplies its gradients by that very
number.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.device import Event
from offload.memory.arena import Block, HostArena
from offload.optim.cpu_step import HostScalars
from offload.optim.parameters import local_of
from offload.transfer.copier import OwnedCopies

__all__ = ["ScalarDesk", "clip_factor", "total_norm"]


def total_norm(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all gradients as one vector, float32, 0-dim, as torch.nn.utils.get_total_norm for float32
    ones. Blocks the host: never.

    A DTensor counts whole: its norm is reduced over its mesh, by collectives that every rank of the mesh must
    take part in; so every rank gets the same number, a nan or inf of any of them in it. Plain gradients count
    as they are here: who splits a model in other ways reduces their norms himself, and gives clip_grad_norm_
    the `total`. Tensors of several meshes, or of both kinds, may be mixed.
    """
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
        widened = {} if kind[1] == torch.float32 else {"dtype": torch.float32}
        norms += torch._foreach_norm(chosen, norm_type, **widened)
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
    whole: Tensor = total if local_of(total) is total else total.full_tensor()
    return whole


def clip_factor(max_norm: float, norm: Tensor) -> Tensor:
    """What torch.nn.utils.clip_grads_with_norm_ multiplies with: max_norm / (norm + 1e-6), at most 1."""
    return torch.clamp(max_norm / (norm.float() + 1e-6), max=1.0)


class ScalarDesk:
    """Sends a step's factor to the host. Two places in host memory, used in turn: a worker may still read the
    last step's.

    # [Order: factor]
    # hazard  RAW: `d2h` copies the factor that `compute` is still making; then a worker reads what `d2h` is
    #         still writing. Allocator reuse: where nothing is stepped no worker waits for the copy, and the
    #         next factor takes the place of one that it still reads.
    # edge    d2h waits for an event recorded on compute; the worker synchronizes the event of the copy;
    #         compute waits for it before the desk lets go of that factor.
    # alive   the desk holds the device's number until the next one.
    # proof   tests/property/test_optim_edges.py, edge "factor"
    """

    def __init__(self, copies: OwnedCopies, arena: HostArena) -> None:
        self._copies = copies
        self._block: Block | None = None
        self._arena = arena
        self._source: Tensor | None = None
        self._sent: Event | None = None
        self._turn = 0

    def send(self, factor: Tensor) -> HostScalars:
        """factor: float32, 0-dim, on the device. Blocks the host: never, but for its memory at the first
        call."""
        device = self._copies.device
        if self._block is None:
            self._block = self._arena.contiguous(8)
        landing = self._block.extents[0].narrow(0, 4 * self._turn, 4)
        self._turn = 1 - self._turn
        source = factor.detach().reshape(1).view(torch.uint8)
        device.wait(device.d2h, device.record(device.compute), "factor")
        sent = self._copies.send([(landing, source)])
        if self._sent is not None:
            device.wait(device.compute, self._sent, "factor")
        self._sent = sent
        self._source = source
        return HostScalars(landing.view(torch.float32)[0], self._sent)

    def close(self) -> None:
        if self._block is not None:
            self._arena.give_back(self._block, None)
            self._block = None
