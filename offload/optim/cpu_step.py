"""Parameters stepped on the host: gradients and weights are copied into a bucket there, the CPU optimizer
steps views of it, and new weights are copied back.

The weights are copied out with their gradients, because somebody may have written them on the device: the
device's weights are the ones that are stepped. Where the bucket keeps float32 masters of half-precision
weights, a master is stepped where rounding it gives the weight, else the weight is. The optimizer steps a
view of flat memory for each parameter. So any class of torch.optim is right, parameters without a gradient
are left alone, and each parameter has its own step count.

One invariant: a bucket's master weights and moments change only after its gradients have arrived and before
its weights return, on one thread.

# [Order: gradients out]
# hazard  RAW, WAR: `d2h` copies a gradient, or a weight, that `compute` is still writing; `h2d` then writes a
#         weight that `compute` still reads, in the backward or forward before the step.
# edge    an event is recorded on the lane that made the gradients, after them and all reads of the weights;
#         d2h waits for it, and nothing returns before the host has waited for these copies.
# alive   the bucket holds the gradients until `returned` was waited for, or has passed (`drop_gradients`).
# proof   tests/property/test_optim_edges.py, edge "gradients out"
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.device import CopyPair, Event
from offload.engine import OffloadEngine
from offload.optim.classes import is_fused_adam, state_names, step_alone
from offload.optim.host_part import HostBucket, HostPart
from offload.optim.parts import HostOptions, UserGroup, follow_groups
from offload.params.sections import FlatSpec
from offload.params.view import ParamView, lay_like, update_master
from offload.params.watched import Stepper


def as_bytes(pairs: Sequence[CopyPair]) -> list[CopyPair]:
    """Copies of tensors without gaps, of whatever dtype, as copies of their bytes."""
    return [(to.view(torch.uint8), source.view(torch.uint8)) for to, source in pairs]


@dataclass(eq=False)
class CpuBucket(HostBucket):
    """One bucket, with the weights that it holds as leaves of a CPU optimizer.

    whole: the leaves have the parameters' shapes and are never cut. Gradients arrive as they
    are, and `scratch` holds them in the master's dtype while the bucket is stepped. pins: whether the memory
    that they arrive in is pinned, which a section of streamed weights has from the first gradient on that
    does not wait on the host.
    """

    whole: bool
    pins: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        self.leaves = [self._leaf(position) for position in range(len(self.members))]
        self.optimizer: Optimizer | None = None
        self._copied: Event | None = None  # behind the gradients' way out

    def _leaf(self, position: int) -> Tensor:
        own = self.section.has("master")
        flat = self.flat("master", self.layout.pieces[position]) if own else self.master_on_host(position)
        return self.members[position].shaped(flat) if self.whole else flat

    def moved(self, position: int) -> None:
        """Point the leaf at the weight's new memory on the host (`Part.moved`)."""
        self.leaves[position].data = self._leaf(position)

    def on_host(self, position: int) -> Tensor:
        """The host bytes that the device's weights are copied to and new ones are rounded into. They are the
        master itself if it has the weights' dtype."""
        if self.members[position].home is not None:
            return self.master_on_host(position)
        dtype = self.members[position].dtype
        return self.flat(
            "weight" if dtype != self.master_dtype else "master", self.layout.pieces[position], dtype
        )

    def bind(self, optimizer: Optimizer) -> None:
        """Be stepped by `optimizer`, whose groups may have changed; the state of a torch Adam lies in the
        section."""
        self.optimizer = optimizer
        if not is_fused_adam(type(optimizer)):
            return
        group_of = {id(leaf): group for group in optimizer.param_groups for leaf in group["params"]}
        for piece, leaf in zip(self.layout.pieces, self.leaves, strict=True):
            if (group := group_of.get(id(leaf))) is None:
                continue  # its parameter is in no group
            dtype = torch.float32 if group["fused"] else torch.get_default_dtype()
            step = optimizer.state[leaf].get("step", torch.zeros((), dtype=dtype, device="cpu"))
            moments = {name: self.flat(name, piece) for name in state_names(group)}
            optimizer.state[leaf] = {"step": step, **moments}

    def follow_strides(self, position: int) -> None:
        """The parameter's elements lie in another order now; a leaf of its shape follows."""
        leaf, member = self.leaves[position], self.members[position]
        if leaf.shape == member.shape:
            leaf.data = member.shaped(leaf.data)
            lay_like(leaf, self.state_of(position))

    def state_of(self, position: int) -> dict[Any, Any]:
        """State that the class keeps of the piece; empty, and not kept, before it has made it."""
        assert self.optimizer is not None
        found: dict[Any, Any] = self.optimizer.state.get(self.leaves[position], {})
        return found

    def count_of(self, position: int) -> Tensor:
        count: Tensor = self.state_of(position)["step"]
        return count

    def _as_copied(self, gradient: Tensor, member: ParamView) -> Tensor:
        as_it_is = gradient.dtype == member.dtype or not self.device.owns(gradient)
        return gradient if as_it_is else gradient.to(self.master_dtype)

    def set_gradients(self, gradients: Mapping[int, Tensor], stepper: Stepper | None = None) -> None:
        found = (gradients[member.index] for member in self.members if member.index in gradients)
        if not self.section.has("grad") and any(map(self.device.owns, found)):
            self.section.add([FlatSpec("grad", self.master_dtype.itemsize, self.pins)])
        super().set_gradients(gradients, stepper)
        self._copied = None

    def gradient_on_host(self, position: int, dtype: torch.dtype) -> Tensor:
        """Where the gradient is copied to."""
        return self.flat("grad", self.layout.pieces[position], dtype)

    def copy_gradients(self, made: Event) -> None:
        """Copy the gradients set, and their weights, to the host. Blocks the host: never, but where its
        memory is not pinned. made: recorded after them, on a lane that has waited for the bucket's last
        return: so the host's side is free too. Order: [Order: gradients out]."""
        pairs: list[CopyPair] = []
        found = zip(self.stepped, self.gradients, self.weights, self.claims, strict=True)
        for position, gradient, weights, claim in found:
            if self.device.owns(gradient):
                pairs.append((self.gradient_on_host(position, gradient.dtype), gradient))
            if claim is None:
                pairs.append((self.on_host(position), weights))
        self.device.wait(self.device.d2h, made, "gradients out")
        self._copied = self.copies.send(as_bytes(pairs))

    def has_gradients(self) -> bool:
        """Return True if the gradients are copied to the host. Blocks the host: never."""
        return self._copied is not None and self.device.poll(self._copied)

    def load_gradients(self, scratch: Tensor | None) -> None:
        """Give each leaf its gradient, and its master what the weights say. Blocks the host until they have
        been copied and the last return has been read."""
        device = self.device
        assert self._copied is not None
        claimed = [event for claim in self.claims if claim is not None for event in claim.after]
        for event in (self._copied, self.returned, *claimed):
            if event is not None:
                device.synchronize(event)
        for position, source in zip(self.stepped, self.gradients, strict=True):
            piece, leaf = self.layout.pieces[position], self.leaves[position]
            weights, waited = self.on_host(position), not device.owns(source)
            gradient = source if waited else self.gradient_on_host(position, source.dtype)
            device.note_read(device.host, gradient.view(torch.uint8))
            device.note_read(device.host, weights.view(torch.uint8))
            if weights.dtype != self.master_dtype:
                update_master(self.flat("master", piece), weights)
            if gradient.dtype != self.master_dtype:
                assert scratch is not None
                gradient = scratch.narrow(0, piece.start - self.layout.start, piece.numel).copy_(gradient)
            leaf.grad = gradient.as_strided(leaf.shape, leaf.stride(), gradient.storage_offset())

    def give_back(self) -> None:
        """Send the new weights; the host has waited for the old ones. Blocks the host: never."""
        device = self.device
        pairs: list[CopyPair] = []
        for position, on_device, claim in zip(self.stepped, self.weights, self.claims, strict=True):
            weights = self.on_host(position)
            device.note_write(device.host, weights.view(torch.uint8))
            if weights.dtype != self.master_dtype:
                weights.copy_(self.flat("master", self.layout.pieces[position]))
            if claim is None or claim.on_device is not None:
                pairs.append((on_device, weights))
        self.returned = self.copies.fetch(as_bytes(pairs)) if pairs else self._copied

    def step(self, scratch: Tensor | None) -> None:
        """Wait for the gradients, step, and send the weights back, for an optimizer of this bucket alone. The
        job of a worker."""
        assert self.optimizer is not None
        try:
            self.load_gradients(scratch)
            step_alone(self.optimizer)
        finally:
            for leaf in self.leaves:
                leaf.grad = None
        self.give_back()
        self.end_claims()


class CpuPart(HostPart[CpuBucket]):
    """Parameters that the host steps."""

    described = "offloaded"

    def __init__(
        self, engine: OffloadEngine, options: HostOptions, cls: type[Optimizer], kwargs: Mapping[str, Any]
    ) -> None:
        whole = not (is_fused_adam(cls) and options.in_buckets)
        new_bucket = functools.partial(CpuBucket, whole=whole, pins=options.pin_grads)
        super().__init__(engine, options, new_bucket, whole=whole)
        self._new_optimizer: Callable[..., Optimizer] = functools.partial(cls, **kwargs)
        self.scratch: Tensor | None = None
        """Room for the gradients of one bucket in the master's dtype, where they come in another."""

    @property
    def optimizers(self) -> list[Optimizer]:
        """One a bucket, so that copies and steps of different buckets go on together."""
        return [bucket.optimizer for bucket in self.buckets if bucket.optimizer is not None]

    def _specs(self, dtype: torch.dtype, master_dtype: torch.dtype, has_home: bool) -> list[FlatSpec]:
        size, pinned = master_dtype.itemsize, self.options.pin_params
        specs = [] if has_home else [FlatSpec("grad", size, self.options.pin_grads)]
        if dtype != master_dtype or not has_home:
            # rounding zero gives no weight but zero: the first step takes the weights over
            specs.append(FlatSpec("master", size, pinned, zero=True))
        if dtype != master_dtype and not has_home:
            specs.append(FlatSpec("weight", dtype.itemsize, pinned))
        moments = () if self.whole else state_names({})
        return specs + [FlatSpec(name, size, pinned, zero=True) for name in moments]

    def regroup(self, groups: Sequence[UserGroup]) -> None:
        super().regroup(groups)
        narrow = [
            bucket.layout.numel
            for bucket in self.buckets
            if any(member.dtype != bucket.master_dtype for member in bucket.members)
        ]
        if narrow:
            self.scratch = torch.empty(max(narrow), dtype=torch.float32, device="cpu")
        for bucket in self.buckets:
            pairs = zip(bucket.members, bucket.leaves, strict=True)
            leaves = {member.index: [leaf] for member, leaf in pairs}
            # workers read what the user may already change
            bucket.bind(follow_groups(bucket.optimizer, self._new_optimizer, leaves, groups, live=False))

    def moved(self, member: ParamView) -> None:
        for bucket, position in self._pieces_of[member.index]:
            bucket.moved(position)

    def flats_on_host(self, member: ParamView) -> tuple[Tensor, Tensor, Tensor]:
        """Flats of a parameter that is never cut: what is stepped, its weights and its gradient; 1-D."""
        ((bucket, at),) = self._pieces_of[member.index]
        return (
            bucket.flat("master", bucket.layout.pieces[at]),
            bucket.on_host(at),
            bucket.gradient_on_host(at, bucket.master_dtype),
        )

    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        super().reorder(member, before)
        for bucket, position in self._pieces_of[member.index]:
            bucket.follow_strides(position)

    def inside(self) -> list[tuple[Optimizer, list[tuple[ParamView, Tensor]]]]:
        return [
            (bucket.optimizer, list(zip(bucket.members, bucket.leaves, strict=True)))
            for bucket in self.buckets
            if self.whole and bucket.optimizer is not None
        ]

    def forget(self, member: ParamView) -> None:
        for bucket, position in self._pieces_of[member.index]:
            if bucket.optimizer is not None:
                bucket.optimizer.state.pop(bucket.leaves[position], None)
        super().forget(member)
