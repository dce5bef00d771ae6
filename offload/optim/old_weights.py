"""The weights of one bucket as they were before a step that may be undone: taken on the optimizer's lane, and
put back there.

They are kept whatever the weights' type is. Half-precision weights could be rounded again from their old
masters, but not to the same bits where a weight is a nan with a payload, or was written in a way that torch
cannot see; and they need 2 bytes where float32 needs 4. One invariant: the memory goes back to compute only
when compute is ordered behind all that the optimizer's lane does with it.

# [Order: old weights]
# hazard  allocator reuse: compute gets the memory of old weights while the optimizer's lane still copies into
#         it.
# edge    the bucket's step, recorded on the optimizer's lane, comes after the copy; the lane that allocated
#         the memory waits for it.
# alive   the bucket, until then or until the host has seen the step pass. Its allocation is ordered by
#         "gradients made".
# proof   tests/property/test_undo_edges.py, edge "old weights"
#
# [Order: undone]
# hazard  RAW, allocator reuse: compute reads weights that the optimizer's lane is still putting back, or gets
#         the memory they come from.
# edge    an event recorded on the optimizer's lane behind the last of them; compute, and the lane that
#         allocated, wait for it.
# alive   the bucket, until that wait is issued.
# proof   tests/property/test_undo_edges.py, edge "undone"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offload.device import Device, Event, Lane

__all__ = ["OldWeights"]


class OldWeights:
    """Room for one bucket's weights, allocated on the calling thread's compute lane.

    homes: the weights, a 1-D tensor a piece. given_up: whether a step that has not begun must not begin any
    more. Raises torch.OutOfMemoryError.
    """

    __slots__ = ("_homes", "_parts", "_room", "given_up", "lane", "taken")

    def __init__(self, device: Device, homes: Sequence[Tensor], given_up: Callable[[], bool]) -> None:
        self.lane: Lane = device.compute
        self.given_up = given_up
        self.taken = False  # the copy is issued: by the worker; read when it is known to be done
        self._room = device.empty(nbytes_of(homes))
        self._homes = list(homes)
        self._parts: list[Tensor] = []
        at = 0
        for home in homes:
            nbytes = home.numel() * home.itemsize
            self._parts.append(self._room.narrow(0, at, nbytes).view(home.dtype))
            at += nbytes

    def take(self, device: Device) -> None:
        """Copy the weights, on the current lane: the optimizer's, which has waited for compute's last use of
        them."""
        for home in self._homes:
            device.note_read(device.compute, home.view(torch.uint8))
        device.note_write(device.compute, self._room)
        torch._foreach_copy_(self._parts, self._homes)
        self.taken = True

    def put_back(self, device: Device) -> None:
        """Make them the weights again, on the same lane. Order: [Order: undone]."""
        device.note_read(device.compute, self._room)
        for home in self._homes:
            device.note_write(device.compute, home.view(torch.uint8))
        torch._foreach_copy_(self._homes, self._parts)

    def order(self, device: Device, stepped: Event) -> None:
        """The memory may be dropped after this. stepped: after its last use. Blocks the host: never. Order:
        [Order: old weights]."""
        device.wait(self.lane, stepped, "old weights")


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)
