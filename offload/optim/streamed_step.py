"""Parameters whose state lives on the host and is stepped on the device: bucket by bucket through a ring of
slots.

State comes in on `h2d` while the bucket before is stepped and the one before that goes out on `d2h`, so both
directions of the link and the optimizer's own lane work at once. For float32 weights the weights themselves
are the masters and only the moments travel: 8 bytes an element each way. One invariant: the host's bytes of a
bucket are read by `h2d` only after `d2h` wrote them in the step before.

# [Order: state in]
# hazard  RAW: `h2d` reads a bucket's state that `d2h` has not finished writing in the last step.
# edge    the bucket keeps the event of its state's way out; h2d waits for it before the state's way in.
# alive   the section owns the host bytes.
# proof   tests/property/test_optim_edges.py, edge "state in"
#
# [Order: ring]
# hazard  WAR: `h2d` writes a slot of the ring while `d2h` still reads the bucket that was in it.
# edge    the slot keeps the event of the last way out; h2d waits for it.
# alive   the ring owns the slot.
# proof   tests/property/test_optim_edges.py, edge "ring"
#
# [Order: state here]
# hazard  RAW: the optimizer's lane steps with state that `h2d` has not finished writing.
# edge    the event of the way in; the optimizer's lane waits for it.
# alive   the ring.
# proof   tests/property/test_optim_edges.py, edge "state here"
#
# [Order: gradients made]
# hazard  RAW and WAR: the optimizer's lane reads gradients that `compute` still writes, and writes weights
#         that it still reads.
# edge    the event recorded on compute when the step was asked for; the optimizer's lane waits for it.
# alive   the bucket holds the gradients until its step's event has passed.
# proof   tests/property/test_optim_edges.py, edge "gradients made"
#
# [Order: state out]
# hazard  RAW: `d2h` copies state that the optimizer's lane is still writing.
# edge    the event recorded on the optimizer's lane after the step; d2h waits for it.
# alive   the ring.
# proof   tests/property/test_optim_edges.py, edge "state out"
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from offload.device import CopyPair, Event
from offload.optim.classes import state_names
from offload.params.layout import Bucket, Piece
from offload.params.ring import Ring, Slot
from offload.params.sections import HostSection
from offload.params.view import ParamView, weights_win
from offload.transfer.copier import OwnedCopies

__all__ = ["StreamedBucket"]


class StreamedBucket:
    """One bucket: its state on the host, its weights and gradients on the device.

    master_dtype: of the arithmetic. Where it is the parameters' own the weights are stepped in place, else
        masters travel with the state.
    weights_on_host: weights and gradients live there too, as FSDP2's CPUOffloadPolicy keeps them, and travel
        with the state.
    """

    def __init__(
        self,
        copies: OwnedCopies,
        section: HostSection,
        layout: Bucket,
        members: Mapping[int, ParamView],
        master_dtype: torch.dtype,
        *,
        weights_on_host: bool = False,
    ) -> None:
        self.copies = copies
        self.device = copies.device
        self.section = section
        self.layout = layout
        self.members = [members[piece.parameter] for piece in layout.pieces]
        self.master_dtype = master_dtype
        self.groups: list[Mapping[str, Any]] = []
        """Values of each piece's param group, read at every step: `StreamedPart.regroup` gives them."""
        where = copies.device.torch_device
        self.steps = [torch.zeros((), dtype=torch.float32, device=where) for _ in layout.pieces]
        """Counts of each piece, on the device."""
        self.has_master = section.has("master")
        self.weights_on_host = weights_on_host
        self.stepped: Event | None = None
        self.left: Event | None = None
        self.done = threading.Event()
        self.done.set()
        self.weights: list[Tensor] = []  # of the step under way: the pieces that are stepped
        self._gradients: list[tuple[int, Tensor, Tensor]] = []  # place, gradient, weights

    def names(self) -> tuple[str, ...]:
        """The flats that travel."""
        moments = state_names({"amsgrad": any(group.get("amsgrad") for group in self.groups)})
        return (*moments, "master") if self.has_master else moments

    def hold(self, gradients: Mapping[int, Tensor]) -> None:
        """Keep the gradients until `step`. gradients: flat, by parameter; a parameter without one is not
        stepped. Blocks the host only while the step before still uses this bucket."""
        self.done.wait()
        self._gradients = []
        self.weights = []
        for place, (piece, member) in enumerate(zip(self.layout.pieces, self.members, strict=True)):
            gradient = gradients.get(member.index)
            if gradient is not None:
                part = gradient.narrow(0, piece.first, piece.numel)
                weights = member.flat.narrow(0, piece.first, piece.numel)
                self._gradients.append((place, part, weights))
                self.weights.append(weights)
                self.device.note_write(self.device.compute, part.view(torch.uint8))

    @property
    def returned(self) -> Event | None:
        """Recorded behind the new weights and the last use of the gradients."""
        return self.stepped

    def drop_gradients(self) -> None:
        """Release the gradients. Called once the lane that they were allocated on has waited for `returned`,
        or `returned` has passed."""
        self._gradients = []

    def step(self, ring: Ring, released: Event) -> None:
        """Fetch the state, step, send the state back. The job of a worker, or of the calling thread.

        Blocks the host: never. Order: [Order: ring], [Order: state in], [Order: state here], [Order:
        gradients made], [Order: state out].
        """
        device, layout = self.device, self.layout
        slot = ring.take()
        names = self.names()
        if slot.free is not None:
            device.wait(device.h2d, slot.free, "ring")
        if self.left is not None:
            device.wait(device.h2d, self.left, "state in")
        size = {name: self.master_dtype.itemsize * layout.numel for name in names}
        there = {name: slot.flats[name].narrow(0, 0, size[name]) for name in names}
        host = {name: self.section.slot(name, layout.start, layout.numel) for name in names}
        inward: list[CopyPair] = [(there[name], host[name]) for name in names]
        outward: list[CopyPair] = [(host[name], there[name]) for name in names]
        if self.weights_on_host:
            device.wait(device.h2d, released, "gradients made")
            for place, gradient, weights in self._gradients:
                piece = layout.pieces[place]
                of_slot = (
                    self._piece_of(slot.flats["weights"], piece),
                    self._piece_of(slot.flats["grad"], piece),
                )
                inward.append((of_slot[0].view(torch.uint8), weights.view(torch.uint8)))
                inward.append((of_slot[1].view(torch.uint8), gradient.view(torch.uint8)))
                outward.append((weights.view(torch.uint8), of_slot[0].view(torch.uint8)))
        try:
            device.wait(ring.lane, self.copies.fetch(inward), "state here")
            device.wait(ring.lane, released, "gradients made")
            with device.use_lane(ring.lane), torch.no_grad():
                for name in names:
                    device.note_write(ring.lane, there[name])
                self._compute(there, slot)
                self.stepped = device.record(ring.lane)
            device.wait(device.d2h, self.stepped, "state out")
            self.left = slot.free = self.copies.send(outward)
        except BaseException:  # some of it was issued: gradients, slot and state are free after that
            device.wait(ring.lane, device.record(device.h2d), "state here")
            self.stepped = device.record(ring.lane)
            device.wait(device.d2h, self.stepped, "state out")
            self.left = slot.free = device.record(device.d2h)
            raise

    def _piece_of(self, flat: Tensor, piece: Piece) -> Tensor:
        """The piece's elements in a flat of the slot."""
        size = self.master_dtype.itemsize
        return flat.narrow(0, (piece.start - self.layout.start) * size, piece.numel * size).view(
            self.master_dtype
        )

    def _compute(self, there: Mapping[str, Tensor], slot: Slot) -> None:
        """On the ring's lane: one call of torch's Adam for each param group in the bucket."""
        device = self.device
        groups: dict[int, list[tuple[int, Tensor, Tensor]]] = {}
        for place, gradient, weights in self._gradients:
            if self.weights_on_host:
                piece = self.layout.pieces[place]
                gradient, weights = (
                    self._piece_of(slot.flats["grad"], piece),
                    self._piece_of(slot.flats["weights"], piece),
                )
            device.note_read(device.compute, gradient.view(torch.uint8))
            device.note_write(device.compute, weights.view(torch.uint8))
            groups.setdefault(id(self.groups[place]), []).append((place, gradient, weights))
        for chosen in groups.values():
            pieces = [self.layout.pieces[place] for place, _, _ in chosen]
            group = self.groups[chosen[0][0]]

            def part(name: str, pieces: Sequence[Piece] = pieces) -> list[Tensor]:
                return [self._piece_of(there[name], piece) for piece in pieces]

            homes = [weights for _, _, weights in chosen]
            gradients = [gradient for _, gradient, _ in chosen]
            targets = part("master") if self.has_master else homes
            if self.has_master:
                widened = [self._piece_of(slot.flats["grad"], piece) for piece in pieces]
                for master, weights, room in zip(targets, homes, widened, strict=True):
                    weights_win(master, weights, room)
                torch._foreach_copy_(widened, gradients)
                gradients = widened
            else:
                # themselves, unless somebody gave another dtype
                gradients = [gradient.to(self.master_dtype) for gradient in gradients]
            amsgrad = bool(group["amsgrad"])
            adam(
                targets,
                gradients,
                part("exp_avg"),
                part("exp_avg_sq"),
                part("max_exp_avg_sq") if amsgrad else [],
                [self.steps[place] for place, _, _ in chosen],
                fused=True,
                amsgrad=amsgrad,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
                decoupled_weight_decay=group["decoupled_weight_decay"],
            )
            if self.has_master:
                torch._foreach_copy_(homes, targets)
