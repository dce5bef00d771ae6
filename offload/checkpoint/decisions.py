"""What a block decides from its numbers, such as which expert gets which token: a recompute is given the
decisions of its forward, so it has the same rows even where a score comes out another in its last bit.

A call decides if it makes whole numbers of others (topk, sort, argmax, nonzero of a mask, bucketize, an
operator of the user's own), or booleans, and a later call of the block reads the whole numbers, or takes rows
or a Python number by the booleans. So does a call that makes a Python number of others. Whole numbers of
whole numbers (counts, offsets, a sorted layout) are the same in every run. Kept with a decision are the
scores that it was made from: the router's gradient is then of the forward's scores, too. Where the call
itself cannot be kept (a cast, a write in place, the bits of a float, a number), what it was made from is.

One invariant: what is found here is kept in the very call in which it is found. What nothing reads, such as
the places of a maximum in a pooling, is let go with that call.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from offload.checkpoint.keep import Keep, Place
from offload.checkpoint.kept import (
    KeptCall,
    Make,
    Operator,
    RandomStep,
    is_collective,
    make_of,
    plain_parts,
    sharing_versions,
)
from offload.checkpoint.operators import default_operators, never_kept
from offload.transfer.layout import WeakStorage


@functools.cache
def _why_never(operator: Operator) -> str:
    """As never_kept, and collectives: whether one is found depends on a rank's sizes, and all ranks call it
    in their recompute, or none."""
    return never_kept(operator) or ("it communicates" if is_collective(operator) else "")


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


def _chooses(tensor: torch.Tensor) -> bool:
    return _is_whole(tensor) or tensor.dtype is torch.bool


def choices_of(operator: Any, given: Sequence[torch.Tensor], output: Any) -> list[torch.Tensor]:
    """Whole numbers and booleans that a call makes of the other numbers among `given`, writes in place, or
    views as such. Attention makes seeds."""
    if all(map(_is_whole, given)) or operator in default_operators():
        return []
    writes = isinstance(operator, OpOverload) and operator._schema.is_mutable
    dtypes = {(part.untyped_storage()._cdata, part.dtype) for part in given}
    return [
        part
        for part in plain_parts(output)
        if _chooses(part) and (writes or (part.untyped_storage()._cdata, part.dtype) not in dtypes)
    ]


def makes_number(operator: Any, given: Sequence[torch.Tensor]) -> bool:
    """Whether a call makes a Python number of others than whole ones."""
    return torch.Tag.data_dependent_output in getattr(operator, "tags", ()) and not all(map(_is_whole, given))


def decides(operator: Any, given: Sequence[torch.Tensor], output: Any) -> bool:
    """Whether a call decides, if what it makes is read."""
    return bool(choices_of(operator, given, output)) or makes_number(operator, given)


def is_decision(part: torch.Tensor, reader: Any) -> bool:
    """Whether `part`, which a call that decides has made, is one, since operator `reader` reads it. A view
    of it reads nothing."""
    schema = getattr(reader, "_schema", None)
    if schema is not None and any(
        made.alias_info and not made.alias_info.is_write for made in schema.returns
    ):
        return False
    tags = getattr(reader, "tags", ())
    by_value = torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags
    return _is_whole(part) or (part.dtype is torch.bool and by_value)


class Decisions:
    """Decisions of one block, learned in its first forward under a checkpoint.

    keep: what to keep in each run, None until it is known. are_none: it decides nothing. written: calls whose
    outputs the block changes in place, so they are recomputed whatever was to be kept. most_elements: scores
    with more are recomputed.
    """

    def __init__(self, keep_ops: Collection[Operator]) -> None:
        self.base = Keep(keep_ops, of_block=True)
        self.written: frozenset[Place] = frozenset()
        self.keep: Keep | None = None
        self.are_none = False
        self.most_elements = 0

    def is_given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The arguments of a call of the block."""
        if self.keep is None:
            sizes = (leaf.numel() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            self.most_elements = max(sizes, default=0)

    def learn(
        self, operators: frozenset[Operator], scores: frozenset[Place], written: frozenset[Place]
    ) -> None:
        """The calls of these operators decide, from the scores that those calls make; and what the calls
        `written` return is changed in place."""
        self.written, self.are_none = written, not (operators or scores)
        self.keep = self.base.learned(operators, scores, written)


class _Maker(NamedTuple):
    """The call that made a storage. layout, dtype, version: of its output."""

    storage: WeakStorage
    place: Place
    make: Make
    layout: tuple[torch.Size, tuple[int, ...], int]
    dtype: torch.dtype
    version: int


class _Candidate(NamedTuple):
    """A call that makes whole numbers or booleans, of which `storage` is one; None: a Python number.

    kept: itself, if it may be, and its scores. sizes: of what it decides from, in elements: what is gathered
    by the decision, or by whole numbers made of it, from as many is a score, too.
    """

    storage: WeakStorage | None
    kept: dict[Place, KeptCall]
    sizes: frozenset[int]


class Finder:
    """Decisions that one forward makes. operators: whose calls decide. scores: calls that made what these
    decide from; one with more than `most_elements` is not among them."""

    def __init__(self, most_elements: int) -> None:
        self.operators: set[Operator] = set()
        self.scores: set[Place] = set()
        self._most_elements = most_elements
        self._makers: dict[int, _Maker] = {}
        self._candidates: dict[int, _Candidate] = {}

    def look(
        self,
        place: Place,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        random: RandomStep | None,
    ) -> Iterator[tuple[Place, KeptCall]]:
        """A call has run. Yields the calls that are kept since it has: it reads what they decided."""
        given = list(plain_parts((args, tuple(kwargs.values()))))
        keys = {part.untyped_storage()._cdata for part in given}
        for part in given:
            candidate = self._candidates.get(part.untyped_storage()._cdata)
            if candidate is not None and is_decision(part, place[0]):
                yield from self._found(candidate, given)
        made = [part for part in plain_parts(output) if part.untyped_storage()._cdata not in keys]
        why_not, make = _why_never(place[0]), make_of(args, kwargs)
        behind = [self._candidates[key] for key in keys & self._candidates.keys()]
        if decides(place[0], given, output):
            choices = choices_of(place[0], given, output)
            # a log may read numbers in one run only: what they are of is kept, and not the calls
            may_be = not (why_not or makes_number(place[0], given))
            own = {place: KeptCall(*place, make, output, random, copies=True)} if may_be else {}
            scores = self._scores(given)
            sizes = frozenset(score.numel() for score, _ in scores.values())
            kept = own
            if not own or any(map(_is_whole, choices)):
                kept = own | {at: call for at, (_, call) in scores.items()}
            for candidate in () if own else behind:  # booleans that a cast reads, or a write in place
                kept |= candidate.kept
                sizes |= candidate.sizes
            for storage in (part.untyped_storage() for part in choices):
                self._candidates[storage._cdata] = _Candidate(WeakStorage(storage), kept, sizes)
            if makes_number(place[0], given):
                yield from self._found(_Candidate(None, kept, sizes), given)
            return
        sizes = frozenset[int]().union(*(candidate.sizes for candidate in behind))
        for storage in (part.untyped_storage() for part in made if behind and _is_whole(part)):
            self._candidates[storage._cdata] = _Candidate(WeakStorage(storage), {}, sizes)
        if made and output is made[0] and not (why_not or random or output.is_inference()):
            storage = output.untyped_storage()
            layout = output.size(), output.stride(), int(output.storage_offset())
            maker = _Maker(WeakStorage(storage), place, make, layout, output.dtype, output._version)
            self._makers[storage._cdata] = maker

    def _found(
        self, candidate: _Candidate, given: Sequence[torch.Tensor]
    ) -> Iterator[tuple[Place, KeptCall]]:
        beside = self._scores(given)
        alike = {at: call for at, (score, call) in beside.items() if score.numel() in candidate.sizes}
        for place, call in (candidate.kept | alike).items():
            if call.copies:
                self.operators.add(place[0])
            else:
                self.scores.add(place)
            yield place, call
        candidate.kept.clear()

    def _scores(self, given: Sequence[torch.Tensor]) -> dict[Place, tuple[torch.Tensor, KeptCall]]:
        """The calls that made those of `given` that are no whole numbers, with what they made."""
        found = {}
        for part in given:
            maker = None if _is_whole(part) else self._makers.get(part.untyped_storage()._cdata)
            # one that was changed in place since is no output that a recompute could be given
            if maker is not None and (maker.dtype, maker.version) == (part.dtype, part._version):
                with sharing_versions():
                    score = part.as_strided(*maker.layout)  # `part` may be a view of it
                if score.numel() <= self._most_elements:
                    found[maker.place] = score, KeptCall(*maker.place, maker.make, score, None)
        return found
