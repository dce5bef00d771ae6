"""Parameters whose state is on the host: buckets of flat memory, and the state in it by name.

One invariant: all host memory, all slots of the ring and every sub-optimizer exist before a step begins; a
step only fills and moves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from offload.device import Event
from offload.engine import OffloadEngine
from offload.ids import Owner
from offload.optim.classes import MOMENTS, state_names
from offload.optim.parts import HostOptions, Part, UserGroup
from offload.params.sections import Bucket, FlatSpec, HostSection, Piece, check_budget, lay_out
from offload.params.view import ParamView
from offload.params.watched import Claim, Stepper
from offload.params.worker import Latch
from offload.transfer.copier import OwnedCopies

SECTION_BYTES = 256 << 20
"""Master weights of one section. Four flats of it are one registration of 1 GiB, which takes 60 ms to pin,
before step 1."""


@dataclass(eq=False)
class HostBucket(ABC):
    """One bucket of one section: its part of the state on the host, its weights and gradients elsewhere.

    members: of each piece. master_dtype: of the arithmetic.
    """

    copies: OwnedCopies
    section: HostSection
    layout: Bucket
    members: Sequence[ParamView]
    master_dtype: torch.dtype

    def __post_init__(self) -> None:
        self.device = self.copies.device
        self.rank = 0
        """Place in the order in which a forward needs the buckets."""
        self.returned: Event | None = None
        """Recorded behind the new weights and the last use of the gradients."""
        self.done = Latch(is_open=True)  # no worker has it
        self.is_due = False  # its gradients are set, and no worker has begun to step it
        # of the step under way: the pieces that have a gradient, by position, their gradients and weights
        self.stepped: list[int] = []
        self.gradients: list[Tensor] = []
        self.weights: list[Tensor] = []
        self.claims: list[Claim | None] = []
        """Of those weights that have a home; they are on the host where the claim has no device bytes."""
        self.writes = [-1] * len(self.members)
        """Of each piece, what its claim said when it was stepped last."""

    def set_gradients(self, gradients: Mapping[int, Tensor], stepper: Stepper | None = None) -> None:
        """Keep the gradients until the step. gradients: flat, by parameter, made on the current lane. A
        parameter without one is not stepped. stepper: claims weights that have a home. Blocks the host only
        while the step before is still at this bucket. Raises OffloadError as `Home.begin_step`."""
        self.done.wait()
        self.stepped, self.gradients, self.weights, self.claims = [], [], [], []
        for position, (piece, member) in enumerate(zip(self.layout.pieces, self.members, strict=True)):
            if (gradient := gradients.get(member.index)) is None:
                continue
            part = self._as_copied(gradient.narrow(0, piece.first, piece.numel), member)
            flat, claim = member.flat, None
            if member.home is not None and stepper is not None:
                claim = member.home.begin_step(stepper, member.index)
                flat = flat if claim.on_device is None else claim.on_device.view(member.dtype)
            weights = flat.narrow(0, piece.first, piece.numel)
            for each in (part, weights) if claim is None else (part,):
                if self.device.owns(each):
                    self.device.note_write(self.device.compute, each.view(torch.uint8))
            self.stepped.append(position)
            self.gradients.append(part)
            self.weights.append(weights)
            self.claims.append(claim)
        self.is_due = True

    def has_any(self, indices: Container[int]) -> bool:
        """Return True if one of these parameters has a piece in it."""
        return any(member.index in indices for member in self.members)

    def _as_copied(self, gradient: Tensor, member: ParamView) -> Tensor:
        """The gradient as it leaves, on the lane that made it."""
        return gradient

    def drop_gradients(self) -> None:
        """Release the gradients. Called once the lane that they were allocated on has waited for `returned`,
        or `returned` has passed."""
        self.gradients = []

    def end_claims(self) -> None:
        """All that the step does to weights that have a home is issued: hold their bytes no longer."""
        claims, self.claims = self.claims, []
        self.weights = [w for w, claim in zip(self.weights, claims, strict=True) if claim is None]

    def master_on_host(self, position: int) -> Tensor:
        """The piece in the one host copy of a weight that has a home: 1-D."""
        piece, member = self.layout.pieces[position], self.members[position]
        return member.flat.narrow(0, piece.first, piece.numel)

    @property
    def ends(self) -> list[Event]:
        """Behind all that its last step reads and writes. Nothing of it is to be issued any more."""
        return [] if self.returned is None else [self.returned]

    def flat(self, name: str, piece: Piece, dtype: torch.dtype | None = None) -> Tensor:
        """The piece's elements in a flat of the section. dtype: None is the master's."""
        return self.section.view(name, piece.start, piece.numel, dtype or self.master_dtype)

    @abstractmethod
    def count_of(self, position: int) -> Tensor:
        """The piece's count of steps, of torch's Adam."""


B = TypeVar("B", bound=HostBucket)


class HostPart(Part, Generic[B]):
    """Parameters whose state is on the host, in sections by dtype, made in the order of the parameters.

    whole: a parameter is never cut, and its state is the class's own; else it is that of torch's Adam.
    """

    described: str
    """What messages call the parameters."""

    def __init__(
        self, engine: OffloadEngine, options: HostOptions, new_bucket: Callable[..., B], *, whole: bool
    ) -> None:
        super().__init__(options)
        self.engine = engine
        self.whole = whole
        self._new_bucket = new_bucket
        self.sections: list[HostSection] = []
        # of each parameter: its section, and where it starts there
        self.ranges: dict[int, tuple[HostSection, int]] = {}
        self.buckets: list[B] = []
        self._pieces_of: dict[int, list[tuple[B, int]]] = {}  # and its pieces, by bucket and position
        self._group_of: dict[int, dict[str, Any]] = {}  # the group's snapshot of each parameter in one
        self._homes: dict[int, dict[str, list[Tensor]]] = {}  # what `homes` has found
        self.stateless: set[int] = set()
        """Parameters of torch's Adam that have no state yet."""

    @abstractmethod
    def _specs(self, dtype: torch.dtype, master_dtype: torch.dtype, has_home: bool) -> list[FlatSpec]:
        """The flats of a section of parameters of `dtype`. has_home: their weights are on the host
        already."""

    def add(self, members: Sequence[ParamView]) -> None:
        """Pin their memory, which blocks the host. Raises HostBudgetError, before anything is
        pinned."""
        kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[tuple[int, int]]] = {}
        for member in members:
            self.members[member.index] = member
            kind = member.dtype, self.options.master_dtype(member), member.home is not None
            kinds.setdefault(kind, []).append((member.index, member.numel))
        plan = [
            (layout, self._specs(dtype, master_dtype, has_home), master_dtype)
            for (dtype, master_dtype, has_home), chosen in kinds.items()
            for layout in lay_out(
                chosen,
                bucket_numel=self.options.bucket_bytes // master_dtype.itemsize,
                section_numel=max(self.options.bucket_bytes, SECTION_BYTES) // master_dtype.itemsize,
                whole=self.whole,
            )
        ]
        arena = self.engine.arena
        needed = sum(spec.element_bytes * layout.numel for layout, specs, _ in plan for spec in specs)
        check_budget(arena, needed, f"the {self.described} parameters")
        with ExitStack() as opened:  # if one cannot be made, those before it are closed
            sections = [
                opened.enter_context(closing(HostSection(arena, layout, specs))) for layout, specs, _ in plan
            ]
            opened.pop_all()
        self.sections.extend(sections)
        made: list[B] = []
        for section, (layout, _, master_dtype) in zip(sections, plan, strict=True):
            self.ranges.update((index, (section, start)) for index, start, _ in layout.parameters)
            for cut in layout.buckets:
                copies = self.engine.copier.of(Owner("optim", f"bucket {len(self.buckets) + len(made)}"))
                pieces_of = [self.members[piece.parameter] for piece in cut.pieces]
                made.append(self._new_bucket(copies, section, cut, pieces_of, master_dtype))
        made.sort(key=lambda bucket: bucket.layout.pieces[0].parameter)
        for bucket in made:
            for position, member in enumerate(bucket.members):
                self._pieces_of.setdefault(member.index, []).append((bucket, position))
        self.buckets.extend(made)
        if not self.whole:
            self.stateless.update(member.index for member in members)

    def regroup(self, groups: Sequence[UserGroup]) -> None:
        """Follow the groups, with memory for the moments that they name: amsgrad may be asked for later, as a
        checkpoint does."""
        self._group_of = {index: group.snapshot for group in groups for index in group.indices}
        for section in self.sections if not self.whole else ():
            for index, _, _ in section.layout.parameters:
                for name in self.names_of(index):
                    if not section.has(name):
                        size = self.options.master_dtype(self.members[index]).itemsize
                        section.add([FlatSpec(name, size, self.options.pin_params, zero=True)])
                        self._homes.clear()

    def names_of(self, index: int) -> tuple[str, ...]:
        """The moments of the parameter, by what its group says."""
        return state_names(self._group_of.get(index, {}))

    def note_stepped(self, indices: Collection[int]) -> None:
        """These parameters have been stepped: they have state from now on."""
        self.stateless.difference_update(indices)

    def flats_of(self, member: ParamView) -> Iterator[tuple[str, Tensor]]:
        """The parameter's own range of each flat that has masters or moments, in its shape."""
        section, start = self.ranges[member.index]
        for name in ("master", *MOMENTS):
            if section.has(name):
                flat = section.view(name, start, member.numel, self.options.master_dtype(member))
                yield name, member.shaped(flat)

    def master(self, member: ParamView) -> Tensor:
        own = member.parameter if member.home is None else member.shaped(member.flat)
        return dict(self.flats_of(member)).get("master", own)

    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        for _, flat in self.flats_of(member):
            flat.copy_(flat.as_strided(member.shape, before, flat.storage_offset()).clone())
        self._homes.pop(member.index, None)

    def homes(self, member: ParamView) -> dict[str, list[Tensor]]:
        if self.whole:
            return {}
        if member.index not in self._homes:
            moments = {name: [flat] for name, flat in self.flats_of(member) if name != "master"}
            # of each of its pieces
            counts = [bucket.count_of(position) for bucket, position in self._pieces_of[member.index]]
            self._homes[member.index] = {"step": counts, **moments}
        return self._homes[member.index]

    def kept(self, member: ParamView) -> Sequence[str]:
        has = not self.whole and member.index not in self.stateless
        return ("step", *self.names_of(member.index)) if has else ()

    def note_state(self, member: ParamView, has: bool) -> None:
        (self.stateless.discard if has or self.whole else self.stateless.add)(member.index)
        for bucket, position in self._pieces_of[member.index]:
            bucket.writes[position] = -1  # its master may be another one

    def forget(self, member: ParamView) -> None:
        """Forget the parameter. Host memory goes back once no parameter of the section is left."""
        super().forget(member)
        self.stateless.discard(member.index)
        self._homes.pop(member.index, None)
        del self._pieces_of[member.index]
        section, _ = self.ranges.pop(member.index)
        if not any(other is section for other, _ in self.ranges.values()):
            self.sections.remove(section)
            self.buckets = [bucket for bucket in self.buckets if bucket.section is not section]
            section.close()

    @property
    def host_bytes(self) -> int:
        return sum(section.nbytes for section in self.sections)

    def close(self) -> None:
        for section in self.sections:
            section.close()
