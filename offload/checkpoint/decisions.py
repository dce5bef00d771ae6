"""Outputs that a selective checkpoint keeps: operators or calls that it was asked for, or whatever a policy
says; where nobody says which, operators that take long for the bytes that they make; and what a block decides
from its numbers, such as which expert gets which token: a recompute is given the decisions of its forward, so
it has the same rows even where a score comes out another in its last bit.

Two invariants: what is asked for may be kept, or it is refused by name. What is found here is kept in the
very call in which it is found; what nothing reads, such as the places of a maximum in a pooling, is let go
with that call.

A call decides if it makes whole numbers of others (topk, sort, argmax, nonzero of a mask, bucketize, an
operator of the user's own), or booleans, and a later call of the block reads the whole numbers, or takes rows
or a Python number by the booleans. So does a call that makes a Python number of others. Whole numbers of
whole numbers (counts, offsets, a sorted layout) are the same in every run. Kept with a decision are the
scores that it was made from: the router's gradient is then of the forward's scores, too. Where the call
itself cannot be kept (a cast, a write in place, the bits of a float, a number), what it was made from is.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS

from offload.checkpoint.kept import (
    KeptCall,
    Make,
    Operator,
    RandomStep,
    check_keepable,
    is_collective,
    make_of,
    plain_parts,
    sharing_versions,
    writes_inputs,
)
from offload.sizes import is_count
from offload.transfer.block import WeakStorage

IN_PLACE = "c10d"
"""Namespace of the collectives that write to what they are given."""

_MAKERS = ("empty", "zeros", "ones", "full", "new_", "arange", "eye", "scalar_tensor", "linspace")

_MATRIX_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_KERNELS = ("flash", "efficient", "cudnn")
_ATTENTION = (
    *(f"_scaled_dot_product_{kernel}_attention" for kernel in _KERNELS),
    *(f"_{kernel}_attention_forward" for kernel in _KERNELS),
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
_OVERLOADS = ("default", "dtype")  # mm.dtype: with a dtype of its own for the result


@cache
def default_operators() -> frozenset[Operator]:
    """Matrix products, and every form of attention that scaled_dot_product_attention and flex_attention call.

    Convolutions are not among them.
    """
    found: set[Operator] = set()
    for name in (*_MATRIX_PRODUCTS, *_ATTENTION):
        packet = getattr(torch.ops.aten, name, None)
        overloads = () if packet is None else packet.overloads()
        found.update(getattr(packet, overload) for overload in _OVERLOADS if overload in overloads)
    flex = getattr(torch.ops.higher_order, "flex_attention", None)
    if flex is not None:
        found.add(flex)
    return frozenset(check_keepable(operator) for operator in found)


def never_kept(operator: Any) -> str:
    """Why no output of the operator is ever kept; empty if one may be."""
    if not isinstance(operator, OpOverload):
        return "" if operator in default_operators() else "it is an operator of higher order"
    try:
        check_keepable(operator)
    except ValueError:
        return "it writes to its inputs" if writes_inputs(operator) else "it returns a view of its input"
    if operator.namespace == IN_PLACE:
        return "it communicates in place"
    name = operator._schema.name.partition("::")[2]
    if name in {"_to_copy", "to", "copy"}:
        return "it is a cast: autocast and FSDP2 make others in a recompute"
    if operator.namespace == "aten" and (name.startswith(_MAKERS) or name.endswith("_like")):
        return "it only makes a tensor, which others fill"
    return ""


Place = tuple[Operator, int]
"""One call: its operator, and its number among the calls of that one, from 0."""


@dataclass(slots=True, eq=False)
class KeepContext:
    """Context that a policy gets besides the call, as of torch's own: it is asked in the forward only, after
    the operator has run."""

    op_output: Any
    is_recompute: bool = False


class Keep:
    """Request for outputs to keep: a set of operators, a set of calls, or a policy.

    of_block: the set may be empty; until it has `learned` what the block decides, calls of every operator are
        counted; and no output is kept that was changed in place.
    calls: named after another forward; one that was written to since is not kept. copied: operators whose
    outputs are kept as copies.
    names: for the report of what was never called; none for a set of calls, which are another forward's.
    """

    def __init__(self, keep_ops: Collection[Any] | Callable[..., Any], *, of_block: bool = False) -> None:
        self.policy: Callable[..., Any] | None = None
        self.calls: frozenset[Place] = frozenset()
        self.copied: frozenset[Operator] = frozenset()
        self.names: tuple[str, ...] = ()
        self.key: Any = None
        self._whole: frozenset[Operator] = frozenset()
        self._without: frozenset[Place] = frozenset()
        if isinstance(keep_ops, Collection) and not isinstance(keep_ops, str):
            if not (keep_ops or of_block):
                raise ValueError(
                    "keep_ops is empty: every output would be recomputed, as a plain checkpoint does; name "
                    "some operators"
                )
            if any(isinstance(member, tuple) for member in keep_ops):
                self.calls = frozenset(map(_check_call, keep_ops))
                self.key = frozenset(check_keepable(operator) for operator, _ in self.calls)
            else:
                self.key = self._whole = frozenset(map(check_keepable, keep_ops))
            self.names = tuple(sorted(map(str, self._whole)))
        elif callable(keep_ops):
            self.policy = keep_ops
            name = getattr(keep_ops, "__qualname__", type(keep_ops).__qualname__)
            self.key = (getattr(keep_ops, "__module__", ""), name)
            self.names = (f"what policy {name} asks for",)
        else:
            raise ValueError(
                f"keep_ops is a {type(keep_ops).__name__}, must be a set of operators, a set of pairs "
                "(operator, call number), or a policy(ctx, op, *args, **kwargs)"
            )
        self.of_block = of_block
        self._numbers_all = of_block or self.policy is not None
        self._numbered = self._whole | {operator for operator, _ in self.calls}

    def learned(
        self, copied: frozenset[Operator], calls: frozenset[Place], without: frozenset[Place]
    ) -> Keep:
        """A copy with every call of the operators `copied`, and `calls`; but none of `without`."""
        keep = copy.copy(self)
        keep._without, keep._numbers_all = without, False
        keep.copied, keep.calls = copied - self._whole, self.calls | calls
        keep._whole = self._whole | copied
        keep._numbered = keep._whole | {operator for operator, _ in keep.calls}
        return keep

    def numbers(self, operator: Operator) -> bool:
        """Predicate: calls of this operator are counted: those that may be kept, in the forward and in the
        recompute alike."""
        return operator not in SAC_IGNORED_OPS if self._numbers_all else operator in self._numbered

    def may_want(self, operator: Operator, number: int) -> bool:
        """Predicate: a call may be kept. Asked before it, of an operator that is counted."""
        place = (operator, number)
        named = operator in self._whole and place not in self._without
        return self.policy is not None or named or place in self.calls

    def wants(self, operator: Operator, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if self.policy is None:
            return True
        answer = self.policy(KeepContext(output), operator, *args, **kwargs)
        name = getattr(answer, "name", "")
        if not isinstance(answer, bool) and not name.endswith(("_SAVE", "_CPU_OFFLOAD", "_RECOMPUTE")):
            raise ValueError(
                f"the policy answered {answer!r} for {operator}; must be a bool or a "
                "torch.utils.checkpoint.CheckpointPolicy"
            )
        if answer is False or name.endswith("_RECOMPUTE"):
            return False
        check_keepable(operator)
        return True


def _check_call(call: Any) -> Place:
    """The pair. Raises ValueError for what is none."""
    if not isinstance(call, tuple) or len(call) != 2 or not is_count(call[1]):
        raise ValueError(
            f"keep_ops holds {call!r} beside pairs; must be all operators, or all pairs of an operator and "
            "the number of its call, from 0"
        )
    return call


@functools.cache
def _why_never(operator: Operator) -> str:
    """Reason as of never_kept, or that the operator is a collective: whether one is found depends on a rank's
    sizes, and all ranks call it in their recompute, or none."""
    return never_kept(operator) or ("it communicates" if is_collective(operator) else "")


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)


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
        if (_is_whole(part) or part.dtype is torch.bool)
        and (writes or (part.untyped_storage()._cdata, part.dtype) not in dtypes)
    ]


def makes_number(operator: Any, given: Sequence[torch.Tensor]) -> bool:
    """Predicate: a call makes a Python number of others than whole ones."""
    return torch.Tag.data_dependent_output in getattr(operator, "tags", ()) and not all(map(_is_whole, given))


def decides(operator: Any, given: Sequence[torch.Tensor], output: Any) -> bool:
    """Predicate: a call decides, if what it makes is read."""
    return bool(choices_of(operator, given, output)) or makes_number(operator, given)


def is_decision(part: torch.Tensor, reader: Any) -> bool:
    """Predicate: `part`, which a call that decides has made, is a decision, since operator `reader` reads it.
    A view of it reads nothing."""
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
