"""Parameters stepped on the host: gradients land in a bucket, the CPU optimizer steps views of it, new
weights go back.

The optimizer steps a view of flat memory for each parameter, so any class of torch.optim is right, parameters
without a gradient are left alone and each has its own step count. One invariant: a bucket's master weights
and moments change only between its gradients' landing and its weights' return, on one thread.

# [Order: land]
# hazard  RAW: `d2h` copies a gradient that `compute` is still writing.
# edge    an event is recorded on the lane that made the gradients, after them; d2h waits for it.
# alive   the bucket holds the gradients until the copy's event has passed (`let_go`).
# proof   tests/property/test_optim_edges.py, edge "land"
#
# [Order: weights out]
# hazard  WAR: `h2d` writes a weight that `compute` still reads, in the backward or forward before the step.
# edge    the event recorded on compute when the step was asked for; h2d waits for it before the return.
# alive   the parameter is the model's.
# proof   tests/property/test_optim_edges.py, edge "weights out"
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.device import CopyPair, Event
from offload.optim.buckets import Bucket, Piece
from offload.optim.classes import is_fused_adam, state_names
from offload.optim.host import HostSection
from offload.optim.parameters import Managed, same_bits
from offload.transfer.copier import OwnedCopies

__all__ = ["CpuBucket", "HostScalars"]


class HostScalars:
    """The factor of a step's gradients, made on the device and read on the host. Without a factor there is
    nothing to wait for."""

    __slots__ = ("event", "factor")

    def __init__(self, factor: Tensor | None = None, event: Event | None = None) -> None:
        """factor: a 0-dim host tensor that `event` fills."""
        self.factor = factor
        self.event = event


class CpuBucket:
    """One bucket of one section, with the weights that it holds as leaves of a CPU optimizer.

    members: by index. whole: the leaves have the parameters' shapes and are never cut.
    wide: gradients land in the master's dtype, cast on the device: for one optimizer that steps all buckets
    at once. Else they land as they are and `scratch` holds them in the master's dtype while the bucket is
    stepped.
    """

    def __init__(
        self,
        copies: OwnedCopies,
        section: HostSection,
        layout: Bucket,
        members: Mapping[int, Managed],
        master_dtype: torch.dtype,
        *,
        whole: bool,
        wide: bool,
    ) -> None:
        self.copies = copies
        self.device = copies.device
        self.section = section
        self.layout = layout
        self.members = [members[piece.parameter] for piece in layout.pieces]
        self.master_dtype = master_dtype
        self.wide = wide
        self.leaves = [
            self._leaf(piece, member, whole)
            for piece, member in zip(layout.pieces, self.members, strict=True)
        ]
        self.optimizer: Optimizer | None = None
        self.landed: Event | None = None
        self.returned: Event | None = None
        self.done = threading.Event()  # no worker has it
        self.done.set()
        self._sources: list[Tensor] = []  # gradients on the device, until their copy has passed
        self._outward: list[CopyPair] = []
        self._gradients: list[Tensor | None] = [None] * len(self.leaves)  # where they landed
        # of the step under way: device bytes of each piece that has a gradient, found on the training thread
        self._home: list[Tensor] = []
        self._home_of: list[int] = []

    def _leaf(self, piece: Piece, member: Managed, whole: bool) -> Tensor:
        view = self.section.view("master", piece.start, piece.numel, self.master_dtype)
        return member.shaped(view) if whole else view

    def adopt(self, optimizer: Optimizer) -> None:
        """Be stepped by `optimizer`; the state of a torch Adam lies in the section from the start."""
        self.optimizer = optimizer
        if not is_fused_adam(type(optimizer)):
            return
        group_of = {id(leaf): group for group in optimizer.param_groups for leaf in group["params"]}
        for piece, leaf in zip(self.layout.pieces, self.leaves, strict=True):
            group = group_of[id(leaf)]
            step = torch.zeros((), dtype=torch.float32 if group["fused"] else torch.get_default_dtype())
            moments = {
                name: self.section.view(name, piece.start, piece.numel, self.master_dtype)
                for name in state_names(group)
            }
            optimizer.state[leaf] = {"step": step, **moments}

    # -- gradients in ----------------------------------------------------------------------------------------
    def hold(self, gradients: Mapping[int, Tensor]) -> None:
        """Step these when told to. gradients: flat, by parameter, made on the current lane; one that is
        missing is not stepped.

        Blocks the host only while the step before is still at this bucket.
        """
        self.done.wait()
        # landed before, and not stepped: its sources go back to compute's allocator
        if not self.let_go() and self.landed is not None:
            self.device.wait(self.device.compute, self.landed, "gradients read")  # see stepping.py
        self._sources, self._home, self._home_of, self._outward = [], [], [], []
        self.landed = None
        for place, (piece, member) in enumerate(zip(self.layout.pieces, self.members, strict=True)):
            gradient = gradients.get(member.index)
            if gradient is None:
                self._gradients[place] = None
                continue
            source = gradient.narrow(0, piece.first, piece.numel)
            if self.wide or source.dtype != member.dtype:
                source = source.to(self.master_dtype)  # on the lane that made it; nothing where they are one
            landing = self.section.view("grad", piece.start, piece.numel, source.dtype)
            self._gradients[place] = landing
            self._sources.append(source)
            self._home.append(member.flat().narrow(0, piece.first, piece.numel))
            self._home_of.append(place)
            source_bytes = source.view(torch.uint8)
            self.device.note_write(self.device.compute, source_bytes)
            self._outward.append((landing.view(torch.uint8), source_bytes))

    def land(self, made: Event) -> None:
        """Copy the gradients held to the host. Blocks the host: never. Order: [Order: land].

        made: recorded after them, on a lane that has waited for the bucket's last return: so the slots, where
            half-precision weights are rounded on their way back, are free too.
        """
        device = self.device
        device.wait(device.d2h, made, "land")
        self.landed = self.copies.send(self._outward)

    def has_landed(self) -> bool:
        """Whether the host has the gradients held. Blocks the host: never."""
        return self.landed is not None and self.device.poll(self.landed)

    def weights(self) -> list[Tensor]:
        """The bucket's part of the device's weights, a 1-D tensor a piece."""
        return [
            member.flat().narrow(0, piece.first, piece.numel)
            for piece, member in zip(self.layout.pieces, self.members, strict=True)
        ]

    def let_go(self) -> bool:
        """Drop the gradients if their copy has passed. Whether it had. Blocks the host: never."""
        if self._sources and (self.landed is None or not self.device.poll(self.landed)):
            return False
        self._sources, self._outward = [], []
        return True

    # -- the step --------------------------------------------------------------------------------------------
    def load_gradients(self, scalars: HostScalars, scratch: Tensor | None) -> None:
        """Give each leaf its gradient, scaled. Blocks the host until it has landed and the last return has
        been read."""
        device = self.device
        assert self.landed is not None
        device.synchronize(self.landed)
        if self.returned is not None:
            device.synchronize(self.returned)
        if scalars.event is not None and scalars.factor is not None:
            device.synchronize(scalars.event)
            device.note_read(device.host, scalars.factor.reshape(1).view(torch.uint8))
        device.note_read(device.host, self.section.slot("grad", self.layout.start, self.layout.numel))
        for place, (piece, leaf) in enumerate(zip(self.layout.pieces, self.leaves, strict=True)):
            landing = self._gradients[place]
            if landing is None:
                leaf.grad = None
                continue
            if landing.dtype != self.master_dtype:
                assert scratch is not None
                landing = scratch.narrow(0, piece.start - self.layout.start, piece.numel).copy_(landing)
            if scalars.factor is not None:
                # in the master's dtype, and so one rounding wherever it was widened
                landing.mul_(scalars.factor)
            leaf.grad = landing.as_strided(leaf.shape, leaf.stride(), landing.storage_offset())

    def unload_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def give_back(self, released: Event) -> None:
        """Send the new weights. released: compute has read the old ones. Blocks the host: never. Order:
        [Order: weights out]."""
        device = self.device
        pairs: list[CopyPair] = []
        for place, home in zip(self._home_of, self._home, strict=True):
            piece = self.layout.pieces[place]
            weights = self.section.view("master", piece.start, piece.numel, self.master_dtype)
            if home.dtype != self.master_dtype:
                rounded = self.section.second_half("grad", piece.start, piece.numel, home.dtype)
                device.note_write(device.host, rounded)
                weights = rounded.copy_(weights)
            else:
                device.note_write(device.host, weights)
            pairs.append((home.view(torch.uint8), weights.view(torch.uint8)))
        device.wait(device.h2d, released, "weights out")
        self.returned = self.copies.fetch(pairs)

    def step(self, released: Event, scalars: HostScalars, scratch: Tensor | None) -> None:
        """Everything between landing and return, for an optimizer of this bucket alone: the job of a
        worker."""
        assert self.optimizer is not None
        self.load_gradients(scalars, scratch)
        self.optimizer.step()
        self.unload_gradients()
        self.give_back(released)

    # -- weights in ------------------------------------------------------------------------------------------
    def fetch(self, chosen: Collection[int]) -> list[tuple[int, Tensor]]:
        """Start to copy the device's weights of the parameters `chosen` to the host; (place, where they
        arrive).

        They are there once an event recorded on d2h after this has passed. Order: [Order: land].
        """
        device = self.device
        pairs: list[CopyPair] = []
        arriving: list[tuple[int, Tensor]] = []
        for place, (piece, member) in enumerate(zip(self.layout.pieces, self.members, strict=True)):
            if member.index not in chosen or piece.numel == 0:
                continue
            source = member.flat().narrow(0, piece.first, piece.numel).view(torch.uint8)
            landing = self.section.view("grad", piece.start, piece.numel, member.dtype)
            device.note_write(device.compute, source)
            pairs.append((landing.view(torch.uint8), source))
            arriving.append((place, landing))
        if pairs:
            device.wait(device.d2h, device.record(device.compute), "land")
            self.copies.send(pairs)
        return arriving

    def take_masters(self, arriving: Sequence[tuple[int, Tensor]]) -> None:
        """Make the fetched weights masters, but keep a master whose rounding is the very weight: it knows
        more than the weight does."""
        for place, weights in arriving:
            self.device.note_read(self.device.host, weights.view(torch.uint8))
            flat = self.section.view(
                "master", self.layout.pieces[place].start, weights.numel(), self.master_dtype
            )
            if not same_bits(flat.to(weights.dtype), weights):
                self.device.note_write(self.device.host, flat.view(torch.uint8))
                flat.copy_(weights)

    def reset_state(self, place: int) -> None:
        """Moments and count of one leaf as before the first step; only for state that lies in the section."""
        for value in self.state_of(place).values():
            value.zero_()

    # -- state -----------------------------------------------------------------------------------------------
    def state_of(self, place: int) -> dict[Any, Any]:
        assert self.optimizer is not None
        found: dict[Any, Any] = self.optimizer.state.get(self.leaves[place], {})
        return found
