"""Parameters stepped on the host: gradients and weights are copied into a bucket there, the CPU optimizer
steps views of it, and new weights are copied back.

The weights travel with their gradients: the device's are the ones that count, whoever wrote them, and where
the bucket keeps float32 masters of half-precision weights, a master counts where rounding it gives the
weight. The optimizer steps a view of flat memory for each parameter, so any class of torch.optim is right,
parameters without a gradient are left alone and each has its own step count. One invariant: a bucket's master
weights and moments change only after its gradients have arrived and before its weights return, on one thread.

# [Order: land]
# hazard  RAW, WAR: `d2h` copies a gradient, or a weight, that `compute` is still writing; `h2d` then writes a
#         weight that `compute` still reads, in the backward or forward before the step.
# edge    an event is recorded on the lane that made the gradients, after them and all reads of the weights;
#         d2h waits for it, and nothing returns before the host has waited for what landed.
# alive   the bucket holds the gradients until `returned` was waited for, or has passed (`drop_gradients`).
# proof   tests/property/test_optim_edges.py, edge "land"
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.device import CopyPair, Event
from offload.optim.classes import is_fused_adam, state_names
from offload.params.layout import Bucket, Piece
from offload.params.sections import HostSection
from offload.params.view import ParamView, laid_like, weights_win
from offload.transfer.copier import OwnedCopies

__all__ = ["CpuBucket"]


class CpuBucket:
    """One bucket of one section, with the weights that it holds as leaves of a CPU optimizer.

    members: by index. whole: the leaves have the parameters' shapes and are never cut.
    wide: gradients land in the master's dtype, cast on the device: for one optimizer that steps all buckets
    at once. Else they land as they are, and `scratch` holds them in the master's dtype while the bucket is
    stepped.
    """

    def __init__(
        self,
        copies: OwnedCopies,
        section: HostSection,
        layout: Bucket,
        members: Mapping[int, ParamView],
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
            member.shaped(self._master(piece)) if whole else self._master(piece)
            for piece, member in zip(layout.pieces, self.members, strict=True)
        ]
        self.optimizer: Optimizer | None = None
        self.landed: Event | None = None
        self.returned: Event | None = None
        self.done = threading.Event()  # no worker has it
        self.done.set()
        # of the step under way, found on the training thread
        self.weights: list[Tensor] = []  # the device's, of the pieces that have a gradient
        self._stepped: list[int] = []  # which pieces those are
        self._sources: list[Tensor] = []  # gradients on the device
        self._outward: list[CopyPair] = []
        self._gradients: list[Tensor | None] = [None] * len(self.leaves)  # where they land

    def _master(self, piece: Piece) -> Tensor:
        return self.section.view("master", piece.start, piece.numel, self.master_dtype)

    def _landing(self, piece: Piece, member: ParamView) -> Tensor:
        """The host bytes that the device's weights are copied to and new ones are rounded into. They are the
        master itself if it has the weights' dtype."""
        name = "weight" if member.dtype != self.master_dtype else "master"
        return self.section.view(name, piece.start, piece.numel, member.dtype)

    def bind(self, optimizer: Optimizer) -> None:
        """Be stepped by `optimizer`, whose groups may have changed; the state of a torch Adam lies in the
        section."""
        self.optimizer = optimizer
        if not is_fused_adam(type(optimizer)):
            return
        group_of = {id(leaf): group for group in optimizer.param_groups for leaf in group["params"]}
        for piece, leaf in zip(self.layout.pieces, self.leaves, strict=True):
            group = group_of.get(id(leaf))
            if group is None:
                continue  # its parameter is in no group
            dtype = torch.float32 if group["fused"] else torch.get_default_dtype()
            step = optimizer.state[leaf].get("step", torch.zeros((), dtype=dtype))
            moments = {
                name: self.section.view(name, piece.start, piece.numel, self.master_dtype)
                for name in state_names(group)
            }
            optimizer.state[leaf] = {"step": step, **moments}

    def relay(self, place: int) -> None:
        """The parameter's elements lie in another order now; a leaf of its shape follows."""
        leaf, member = self.leaves[place], self.members[place]
        if leaf.shape == member.shape:
            leaf.data = member.shaped(leaf.data)
            for name, value in self.state_of(place).items():
                if isinstance(value, Tensor) and value.shape == leaf.shape:
                    self.state_of(place)[name] = laid_like(leaf, value)

    # -- gradients in ----------------------------------------------------------------------------------------
    def hold(self, gradients: Mapping[int, Tensor]) -> None:
        """Keep the gradients until `step`. gradients: flat, by parameter, made on the current lane. A
        parameter without one is not stepped.

        Blocks the host only while the step before is still at this bucket.
        """
        self.done.wait()
        self._sources, self.weights, self._stepped, self._outward = [], [], [], []
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
            home = member.flat.narrow(0, piece.first, piece.numel)
            self._gradients[place] = landing
            self._sources.append(source)
            self.weights.append(home)
            self._stepped.append(place)
            for there, here in ((landing, source), (self._landing(piece, member), home)):
                here_bytes = here.view(torch.uint8)
                self.device.note_write(self.device.compute, here_bytes)
                self._outward.append((there.view(torch.uint8), here_bytes))

    def land(self, made: Event) -> None:
        """Copy the gradients held, and their weights, to the host. Blocks the host: never. Order: [Order:
        land].

        made: recorded after them, on a lane that has waited for the bucket's last return: so the host's side
            is free too.
        """
        device = self.device
        device.wait(device.d2h, made, "land")
        self.landed = self.copies.send(self._outward)

    def has_landed(self) -> bool:
        """Whether the host has the gradients held. Blocks the host: never."""
        return self.landed is not None and self.device.poll(self.landed)

    def drop_gradients(self) -> None:
        """Release the gradients. Called once the lane that they were allocated on has waited for `returned`,
        or `returned` has passed."""
        self._sources, self._outward = [], []

    # -- the step --------------------------------------------------------------------------------------------
    def load_gradients(self, scratch: Tensor | None) -> None:
        """Give each leaf its gradient, and its master what the weights say. Blocks the host until they have
        landed and the last return has been read."""
        device = self.device
        assert self.landed is not None
        device.synchronize(self.landed)
        if self.returned is not None:
            device.synchronize(self.returned)
        device.note_read(device.host, self.section.slot("grad", self.layout.start, self.layout.numel))
        for place, (piece, member) in enumerate(zip(self.layout.pieces, self.members, strict=True)):
            landing, leaf = self._gradients[place], self.leaves[place]
            if landing is None:
                leaf.grad = None
                continue
            weights = self._landing(piece, member)
            device.note_read(device.host, weights.view(torch.uint8))
            if weights.dtype != self.master_dtype:
                weights_win(self._master(piece), weights)
            if landing.dtype != self.master_dtype:
                at = piece.start - self.layout.start
                wide = (
                    landing.to(self.master_dtype) if scratch is None else scratch.narrow(0, at, piece.numel)
                )
                landing = wide.copy_(landing)
            leaf.grad = landing.as_strided(leaf.shape, leaf.stride(), landing.storage_offset())

    def unload_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def give_back(self) -> None:
        """Send the new weights; the host has waited for the old ones. Blocks the host: never."""
        device = self.device
        pairs: list[CopyPair] = []
        for place, home in zip(self._stepped, self.weights, strict=True):
            piece = self.layout.pieces[place]
            weights = self._landing(piece, self.members[place])
            device.note_write(device.host, weights.view(torch.uint8))
            if weights.dtype != self.master_dtype:
                weights.copy_(self._master(piece))
            pairs.append((home.view(torch.uint8), weights.view(torch.uint8)))
        self.returned = self.copies.fetch(pairs)

    def step(self, scratch: Tensor | None) -> None:
        """Wait for the gradients, step, and send the weights back, for an optimizer of this bucket alone. The
        job of a worker."""
        assert self.optimizer is not None
        self.load_gradients(scratch)
        self.optimizer.step()
        self.unload_gradients()
        self.give_back()

    # -- state -----------------------------------------------------------------------------------------------
    def state_of(self, place: int) -> dict[Any, Any]:
        assert self.optimizer is not None
        found: dict[Any, Any] = self.optimizer.state.get(self.leaves[place], {})
        return found
