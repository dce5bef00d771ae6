"""Parameters whose state is on the host and is stepped on the device: bucket by bucket through a ring of
slots.

State comes in on a lane of its own, "state in", while the bucket before is stepped and the one before that
goes out on `d2h`, so both directions of the link and the optimizer's own lane work at once. For float32
weights the weights themselves are the masters and only the moments travel: 8 bytes an element each way. One
invariant: the host's bytes of a bucket are read only after `d2h` wrote them in the step before.

# [Order: state in]
# hazard  RAW: "state in" reads a bucket's state that `d2h` has not finished writing in the last step.
# edge    the bucket keeps the event of its state's way out; "state in" waits for it.
# alive   the section owns the host bytes.
# proof   tests/property/test_optim_edges.py, edge "state in"
#
# [Order: ring]
# hazard  WAR: "state in" writes a slot of the ring while `d2h` still reads the bucket that was in it.
# edge    the slot keeps the event of the last way out; "state in" waits for it.
# alive   the ring owns the slot.
# proof   tests/property/test_optim_edges.py, edge "ring"
#
# [Order: master in]
# hazard  RAW: "state in" reads the one host copy of a weight that `d2h` still writes: somebody wrote the
#         weight on the device. WAR: `d2h` writes that copy while `h2d` still reads it, fetched ahead; where
#         the device's bytes stay, the optimizer's lane writes what `d2h` still reads.
# edge    the claim has the events of both; "state in", or the optimizer's lane, waits for them.
# alive   the weight's home owns the host bytes.
# proof   tests/property/test_optim_edges.py, edge "master in"
#
# [Order: state here]
# hazard  RAW: the optimizer's lane steps with state that "state in" has not finished writing.
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

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from offload.device import CopyPair, Event
from offload.engine import OffloadEngine
from offload.optim.classes import state_names
from offload.optim.host_part import HostBucket, HostPart
from offload.optim.parts import HostOptions, UserGroup
from offload.params.sections import RING_SLOTS, FlatSpec, Ring, slots_for
from offload.params.view import ParamView, update_master

_SLOTS_BESIDE_WEIGHTS = 5
"""Where steps run in the backward. A block of weights takes the link for as long as some buckets of state, 3
of 64 MiB where it has 233 M bf16 parameters: two more that have come before keep the other direction busy
meanwhile. Elsewhere they save no time, and others' copies to the host queue behind twice as many buckets."""

_OPTIONS = ("lr", "weight_decay", "eps", "maximize", "decoupled_weight_decay")


@dataclass(eq=False)
class StreamedBucket(HostBucket):
    """One bucket: its state on the host, its weights and gradients on the device.

    Where the master's dtype is the parameters' own the weights are stepped in place, else masters travel with
    the state. weights_on_host: weights and gradients are there too, as FSDP2's CPUOffloadPolicy keeps them,
    and travel with the state. A weight that has a home goes there after its step. It is stepped where it is
    if its device bytes stay valid, else in the ring; there it comes in where its master does not know all of
    it: it has none, or others wrote the weight.
    """

    weights_on_host: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.groups: list[Mapping[str, Any]] = []
        """Values of each piece's param group, read at every step: `StreamedPart.regroup` gives them."""
        where = self.device.torch_device
        self.steps = [torch.zeros((), dtype=torch.float32, device=where) for _ in self.members]
        """Counts of each piece, on the device."""
        self.has_master = self.section.has("master")
        self._state_out: Event | None = None
        self.resident: dict[str, Tensor] = {}
        """State that stays on the device between steps, by name; empty where it comes and goes."""
        self._is_here = False  # the resident state is that of the last step, else the host's is

    def names(self) -> tuple[str, ...]:
        """The flats that travel."""
        moments = state_names({"amsgrad": any(group.get("amsgrad") for group in self.groups)})
        return (*moments, "master") if self.has_master else moments

    def count_of(self, position: int) -> Tensor:
        return self.steps[position]

    def _as_copied(self, gradient: Tensor, member: ParamView) -> Tensor:
        return gradient.to(self.master_dtype) if self.weights_on_host else gradient

    def step(self, ring: Ring, released: Event, before_out: Callable[[], object] = int) -> None:
        """Fetch the state, step, send the state back. Blocks the host in `before_out` alone, which is called
        before the state is sent. Order: all notes above. released: recorded on compute behind the gradients
        and all reads of the weights."""
        device, slot = self.device, ring.next_slot()
        device.wait(ring.inward, slot.free, "ring")
        if self._state_out is not None:
            device.wait(ring.inward, self._state_out, "state in")
        nbytes = self.flat_bytes
        lent = [not (self.weights_on_host or device.owns(each)) for each in self.gradients]
        state = self.resident or {name: slot.flats[name].narrow(0, 0, nbytes) for name in self.names()}
        inward = [] if self._is_here else self._on_host(state)
        outward: list[CopyPair] = [] if self.resident else [(on_host, flat) for flat, on_host in inward]
        pieces = {name: self._pieces_in(flat) for name, flat in (slot.flats | self.resident).items()}
        gradients, weights = self.gradients, [*self.weights]
        if self.weights_on_host:
            device.wait(ring.inward, released, "gradients made")
            gradients = pieces["grad"]
            inward += zip(map(_bytes_of, gradients), map(_bytes_of, self.gradients), strict=True)
        if any(lent):
            device.wait(ring.inward, released, "gradients made")
            room = self._pieces_in(slot.flats["lent"])
            gradients = [
                _first_bytes(piece, each) if waits else each
                for piece, each, waits in zip(room, gradients, lent, strict=True)
            ]
            pairs = zip(map(_bytes_of, gradients), map(_bytes_of, self.gradients), lent, strict=True)
            inward += [(here, on_host) for here, on_host, waits in pairs if waits]
        fresh: set[int] = set()  # whose masters know all of them
        for number, (position, claim) in enumerate(zip(self.stepped, self.claims, strict=True)):
            if claim is None and not self.weights_on_host:
                continue
            on_host = self.master_on_host(position)
            if claim is not None and claim.on_device is not None:
                for event in claim.after:
                    device.wait(ring.lane, event, "master in")
            else:
                weights[number] = _first_bytes(pieces["weights"][number], on_host)
                for event in () if claim is None else claim.after:
                    device.wait(ring.inward, event, "master in")
                if self.has_master and claim is not None and claim.writes == self.writes[position]:
                    fresh.add(number)
                else:
                    inward.append((_bytes_of(weights[number]), _bytes_of(on_host)))
            # what others still copy from there is in the claim's events, which `d2h` comes after
            outward.append((_bytes_of(on_host), _bytes_of(weights[number])))
        try:
            came = self.copies.fetch(inward, ring.inward) if inward else device.record(ring.inward)
            device.wait(ring.lane, came, "state here")
            device.wait(ring.lane, released, "gradients made")
            with device.use_lane(ring.lane), torch.no_grad():
                for flat in state.values():
                    device.note_write(ring.lane, flat)
                for gradient, weight in zip(gradients, weights, strict=True):
                    device.note_read(ring.lane, _bytes_of(gradient))
                    device.note_write(ring.lane, _bytes_of(weight))
                self._compute(pieces, gradients, weights, fresh)
                stepped = device.record(ring.lane)
            before_out()
            self._is_here = bool(self.resident)
            self._state_out = slot.free = stepped
            if outward:
                device.wait(device.d2h, stepped, "state out")
                self._state_out = slot.free = self.copies.send(outward)
            here = any(claim is not None and claim.on_device is not None for claim in self.claims)
            # who writes those waits for their way out, too
            self.returned = self._state_out if here else stepped
            for position, claim in zip(self.stepped, self.claims, strict=True):
                self.writes[position] = -1 if claim is None else claim.writes
            self.end_claims()
        except BaseException:  # some of it was issued: gradients, slot and state are free after that
            device.wait(ring.lane, device.record(ring.inward), "state here")
            self.returned = device.record(ring.lane)
            device.wait(device.d2h, self.returned, "state out")
            self._state_out = slot.free = device.record(device.d2h)
            raise

    @property
    def flat_bytes(self) -> int:
        """Bytes of one flat of the state."""
        return self.layout.numel * self.master_dtype.itemsize

    def _on_host(self, state: Mapping[str, Tensor]) -> list[CopyPair]:
        """Each flat, and its bytes on the host."""
        start, numel = self.layout.start, self.layout.numel
        return [(flat, self.section.slot(name, start, numel)) for name, flat in state.items()]

    def stay(self, *, stays: bool) -> None:
        """The state stays on the device from the next step on, or comes and goes. After `look`, with nothing
        in flight. Raises torch.OutOfMemoryError; it comes and goes then. Order: [Order: state in], for memory
        that is allocated on compute."""
        names = self.names() if stays else ()
        if {*names} != {*self.resident}:
            self.resident = {}
            self.resident = {name: self.device.empty(self.flat_bytes) for name in names}
            self._state_out = self.device.record(self.device.compute)

    def look(self, ring: Ring) -> None:
        """The host may read and write the state once the optimizer's lane, which has stepped it, has done
        what is issued; the next step takes it from there."""
        if self._is_here:
            self._is_here = False
            pairs = [(on_host, flat) for flat, on_host in self._on_host(self.resident)]
            self._state_out = self.copies.send(pairs, ring.lane)

    def _pieces_in(self, flat: Tensor) -> list[Tensor]:
        """The elements of each piece that is stepped, in a flat of the slot."""
        dtype, first = self.master_dtype, self.layout.start
        return [
            flat.narrow(0, (piece.start - first) * dtype.itemsize, piece.numel * dtype.itemsize).view(dtype)
            for piece in (self.layout.pieces[position] for position in self.stepped)
        ]

    @property
    def ends(self) -> list[Event]:
        return super().ends + ([] if self._state_out is None else [self._state_out])

    def _compute(
        self,
        pieces: Mapping[str, Sequence[Tensor]],
        gradients: Sequence[Tensor],
        weights: Sequence[Tensor],
        fresh: Collection[int],
    ) -> None:
        """On the ring's lane: one call of torch's Adam for each param group in the bucket. fresh: weights, by
        number, that the masters need not be compared with."""
        groups: dict[int, list[int]] = {}
        for number, position in enumerate(self.stepped):
            groups.setdefault(id(self.groups[position]), []).append(number)
        for chosen in groups.values():
            group = self.groups[self.stepped[chosen[0]]]
            amsgrad = bool(group["amsgrad"])

            def of_group(each: Sequence[Tensor], chosen: list[int] = chosen) -> list[Tensor]:
                return [each[number] for number in chosen]

            targets = own_weights = of_group(weights)
            if self.has_master:
                targets, widened = of_group(pieces["master"]), of_group(pieces["grad"])
                for number, *masters in zip(chosen, targets, own_weights, widened, strict=True):
                    if number not in fresh:
                        update_master(*masters)
                torch._foreach_copy_(widened, of_group(gradients))
            else:  # themselves, unless somebody gave another dtype
                widened = [gradient.to(self.master_dtype) for gradient in of_group(gradients)]
            adam(
                targets,
                widened,
                of_group(pieces["exp_avg"]),
                of_group(pieces["exp_avg_sq"]),
                of_group(pieces["max_exp_avg_sq"]) if amsgrad else [],
                [self.steps[self.stepped[number]] for number in chosen],
                fused=True,
                amsgrad=amsgrad,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                **{key: group[key] for key in _OPTIONS},
            )
            if self.has_master:
                torch._foreach_copy_(own_weights, targets)


def _first_bytes(room: Tensor, like: Tensor) -> Tensor:
    """View of as many elements as `like` has, of its dtype, at the beginning of `room`: 1-D."""
    return room.view(torch.uint8)[: like.numel() * like.element_size()].view(like.dtype)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


class StreamedPart(HostPart[StreamedBucket]):
    """Parameters whose state is streamed through the device. weights_on_host: the parameters themselves
    too."""

    described = "streamed"
    ring: Ring
    """Made by the first `regroup` with buckets."""

    def __init__(self, engine: OffloadEngine, options: HostOptions, *, weights_on_host: bool = False) -> None:
        new_bucket = functools.partial(StreamedBucket, weights_on_host=weights_on_host)
        super().__init__(engine, options, new_bucket, whole=False)
        self._weights_on_host = weights_on_host
        self.takes_lent = False
        """The ring has room for gradients that wait on the host."""
        self.in_backward = False
        """Its steps run in the backward."""
        self.resident_most_bytes = 0
        """Of state, that may stay on the device."""
        self._ring_of: tuple[int, int, list[tuple[str, int]]] = (0, 0, [])

    def _specs(self, dtype: torch.dtype, master_dtype: torch.dtype, has_home: bool) -> list[FlatSpec]:
        names = [*state_names({}), *(["master"] if dtype != master_dtype else [])]
        return [FlatSpec(name, master_dtype.itemsize, self.options.pin_params, zero=True) for name in names]

    def regroup(self, groups: Sequence[UserGroup]) -> None:
        """Follow the groups, and make room on the device for the buckets that are on it at once."""
        super().regroup(groups)
        self.make_ring()

    def make_ring(self) -> None:
        """Between steps, with nothing in flight. Blocks the host for state that is on the device."""
        if not self.buckets:
            return
        self.look()
        for bucket in self.buckets:
            bucket.groups = [self._group_of.get(member.index, {}) for member in bucket.members]
        numel = max(bucket.layout.numel for bucket in self.buckets)
        names = {name for bucket in self.buckets for name in bucket.names()}
        size = max(bucket.master_dtype.itemsize for bucket in self.buckets)
        streams = any(m.home is not None for bucket in self.buckets for m in bucket.members)
        also = ["weights"] if self._weights_on_host or streams else []
        also += ["grad"] if self._weights_on_host or "master" in names else []
        also += ["lent"] if self.takes_lent else []
        flats = [(name, size) for name in (*sorted(names), *also)]
        most = _SLOTS_BESIDE_WEIGHTS if streams and self.in_backward else RING_SLOTS
        slots = slots_for(sum(bucket.layout.numel for bucket in self.buckets), numel, most)
        if (slots, numel, flats) != self._ring_of:  # between steps
            self.ring = Ring(self.engine.device, numel, flats, slots)
            self._ring_of = slots, numel, flats
        left = self.resident_most_bytes
        for bucket in self.buckets:
            needed = bucket.flat_bytes * len(bucket.names())
            bucket.stay(stays=needed <= left)
            left -= needed if bucket.resident else 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of state that stays on the device."""
        return sum(flat.numel() for bucket in self.buckets for flat in bucket.resident.values())

    def look(self) -> None:
        """The host may read and write all state. Blocks the host for what is on the device."""
        found = [bucket for bucket in self.buckets if bucket.resident]
        for bucket in found:
            bucket.look(self.ring)
        if found:
            self.engine.device.synchronize(self.engine.device.record(self.ring.lane))

    def drop_ring(self) -> None:
        """Between steps, with nothing in flight and the state on the host: no step until `make_ring`."""
        for bucket in self.buckets:
            bucket.stay(stays=False)
        vars(self).pop("ring", None)
        self._ring_of = (0, 0, [])

    @property
    def ring_bytes(self) -> int:
        """Device memory of the buckets on the device."""
        return self.ring.nbytes if "ring" in vars(self) else 0

    def wait_for_slot(self) -> None:
        """Block the host until the ring, and `buckets_in_flight`, have room for another bucket."""
        self.ring.wait_for_slot(self.engine.limits.buckets_in_flight)
