"""Whose a profile is (blocks of one kind share one), and what it is made of: what is known of an operator by
itself (whether its output may be kept, what it writes, with whom it communicates); writes by kernels that are
no operators, inside custom autograd.Functions; and the bytes that autograd saves in a block, as the groups
would count them: one copy for each storage at a version, of the range that its views span.

One invariant: what is not known is not relied on. What is not known to be safe is not kept, and what changes
the calls of a forward or their sizes, as far as a module shows it, makes another kind. What the groups leave
on the device (parameters, small tensors, foreign ones) is not counted. It only reads: an output is held until
the block's forward ends, no longer.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_leaves

from offload.checkpoint.checksum import checksum, to_host
from offload.checkpoint.decisions import IN_PLACE
from offload.checkpoint.kept import alias_of, is_collective, plain_parts
from offload.engine import OffloadEngine
from offload.saved.filters import Verdict, is_parameter, judge, waited
from offload.saved.store import GATHER_BELOW
from offload.transfer.block import ViewLayout, WeakStorage, overlaps_itself, span_of


def kind_of(module: nn.Module) -> Hashable:
    """Of a block: the class, training and settings of each module inside, the make of each parameter and
    buffer, and whether it is compiled.

    Of a fraction among the settings it counts whether it is 0: a dropout of 0 saves nothing, and rates that
    rise from layer to layer save alike. Whole numbers of the model's own modules are left out: a layer's own
    index is one. Those of torch's modules count, and those in tuples: strides and sizes.
    """
    return (
        getattr(module, "_compiled_call_impl", None) is not None,
        tuple((name, type(part), part.training, _settings(part)) for name, part in module.named_modules()),
        tuple((name, _make(tensor)) for name, tensor in module.named_parameters()),
        tuple((name, _make(tensor)) for name, tensor in module.named_buffers()),
    )


def look_of(module: nn.Module) -> Hashable:
    """What may change of a block between two steps, at a tenth of the price of its kind: its parts, what is
    frozen, switches, and whether a rate is 0."""
    found: list[object] = []
    parts, seen = [module], {id(module)}
    for part in parts:
        found += [value != 0 for value in vars(part).values() if type(value) in (bool, float)]
        for tensor in part._parameters.values():
            found += (None,) if tensor is None else (tensor.requires_grad, tensor.numel())
        for child in part._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                parts.append(child)
    return (*map(id, parts), *map(type, parts), *found)


def _make(tensor: torch.Tensor) -> Hashable:
    return type(tensor), tensor.size(), tensor.dtype, tensor.requires_grad, tensor.device


def _settings(module: nn.Module) -> Hashable:
    """Plain attributes: switches, words and functions, fractions as switches, and of the rest whether it is
    there."""
    of_torch = type(module).__module__.startswith("torch.nn.")
    return tuple(
        (name, value if of_torch and isinstance(value, int) else _setting(value))
        for name, value in sorted(vars(module).items())
        if not name.startswith("_") and name != "training"
    )


def _setting(value: object) -> object:
    if isinstance(value, (bool, Enum, torch.dtype)) or _is_word(value):
        return value
    if isinstance(value, float):
        return float, value != 0.0
    if isinstance(value, tuple):
        return tuple(part if isinstance(part, int) else _setting(part) for part in value)
    if isinstance(value, BuiltinFunctionType):
        return value
    return getattr(value, "__code__", type(value))


def _is_word(value: object) -> bool:
    """A name with a number in it may be the layer's own."""
    return isinstance(value, str) and not any(letter.isdigit() for letter in value)


_DIFFERING = {
    "bincount",
    "cumsum",
    "histc",
    "index_add",
    "index_copy",
    "index_put",
    "index_reduce",
    "kthvalue",
    "nll_loss2d_forward",
    "put",
    "scatter_add",
    "scatter_reduce",
}
_ATTENTION = ("attention", "attn")


def communicates_in_place(operator: Any) -> bool:
    return isinstance(operator, OpOverload) and (
        operator.namespace == IN_PLACE or (is_collective(operator) and operator._schema.is_mutable)
    )


def collective_groups(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Names of the process groups that a call communicates in."""
    if not isinstance(operator, OpOverload):
        return
    for at, argument in enumerate(operator._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.name == "group_name" and isinstance(value, str):
            yield value
        elif argument.name == "process_group":
            group = ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else value
            yield str(getattr(group, "group_name", group))


def peers_of(groups: Collection[str]) -> frozenset[int]:
    """Ranks of the world in these process groups, without this one. groups: names."""
    if not groups or not dist.is_initialized():
        return frozenset()
    of: Any = vars(c10d)["_resolve_process_group"]  # whose stubs want a type of name that torch 2.11 has not
    found = {rank for name in groups for rank in dist.get_process_group_ranks(of(name))}
    return frozenset(found - {dist.get_rank()})


def may_differ(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a second call on the same inputs may give other bits: what
    torch.use_deterministic_algorithms refuses in a forward on a GPU."""
    name = getattr(operator, "_schema", None) and operator._schema.name.removeprefix("aten::").rstrip("_")
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return name in _DIFFERING and any(tensor.device.type != "cpu" for tensor in tensors)


def writes_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    if not isinstance(operator, OpOverload):
        return
    everything = operator.namespace == IN_PLACE  # its schema does not say which
    given = {
        argument.name: args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(operator._schema.arguments)
    }
    # nor that of a batch norm: an instance norm gives it copies that it has made of its statistics
    hidden = ("running_mean", "running_var") if given.get("training") else ()
    for argument in operator._schema.arguments:
        said = argument.alias_info is not None and argument.alias_info.is_write
        if everything or said or argument.name in hidden:
            value = given[argument.name]
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def draws_by_itself(operator: Any, kwargs: dict[str, Any]) -> bool:
    """Predicate: it draws random numbers from a given generator, whose state no checkpoint keeps."""
    return isinstance(operator, OpOverload) and kwargs.get("generator") is not None


def is_attention(operator: Any) -> bool:
    """Return True if the operator's time grows with the square of a sequence."""
    name = str(operator)
    return any(part in name for part in _ATTENTION)


Key = TypeVar("Key", bound=Hashable)


class UnseenWrites(Generic[Key]):
    """Compares the bytes of outputs right after their calls with those at the end of the block. Blocks the
    host: never."""

    def __init__(self) -> None:
        self._keys: list[Key] = []
        self._outputs: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._same: torch.Tensor | None = None

    def add(self, key: Key, output: torch.Tensor) -> None:
        """output: what the call `key` has just made."""
        before = checksum(output)
        if before is not None:
            self._keys.append(key)
            self._outputs.append(alias_of(output))
            self._before.append(before)

    def end(self) -> None:
        """The block's forward has ended. The comparison has arrived where an event recorded after this has
        passed."""
        outputs, self._outputs = self._outputs, []
        before, self._before = self._before, []
        if outputs:
            # without bytes by now: nothing was written that a reader could find
            after = [checksum(output) for output in outputs]
            same = [one if other is None else other for one, other in zip(before, after, strict=True)]
            self._same = to_host(torch.stack(before) == torch.stack(same))

    def written(self) -> set[Key]:
        """The calls of which an output has other bytes."""
        if self._same is None:
            return set()
        return {key for key, same in zip(self._keys, self._same.tolist(), strict=True) if not same}


def can_leave(tensor: torch.Tensor, engine: OffloadEngine, min_elements: int) -> bool:
    """Whether a group would take it; of a wrapper, one of the tensors that it is made of."""
    return not is_parameter(tensor) and any(
        judge(part, engine.device, engine.externals, min_elements) is Verdict.ELIGIBLE
        for part in plain_parts(tensor)
    )


def waiting_bytes(tensor: torch.Tensor, engine: OffloadEngine, min_elements: int) -> dict[int, int]:
    """By storage, the bytes that wait while a group has the tensor."""
    saved = SavedBytes(engine, min_elements)
    saved.add(tensor)
    return {key: saved.of_storage(key) for key in saved.storages()}


@dataclass(slots=True)
class _Range:
    start: int
    stop: int
    layouts: set[ViewLayout] = field(default_factory=set)

    def nbytes(self) -> int:
        """A lone view of few of the bytes that it spans is packed."""
        if len(self.layouts) == 1:
            (layout,) = self.layouts
            packed = layout.size.numel() * layout.dtype.itemsize
            if packed < GATHER_BELOW * (self.stop - self.start) and not overlaps_itself(layout):
                return packed
        return self.stop - self.start


class SavedBytes:
    """What was added, each storage and version once."""

    def __init__(self, engine: OffloadEngine, min_elements: int) -> None:
        self._engine = engine
        self._min_elements = min_elements
        self._ranges: dict[tuple[int, int], _Range] = {}
        self._storages: dict[int, WeakStorage] = {}  # their addresses name no other storage meanwhile

    def add(self, tensor: torch.Tensor) -> None:
        tensor = waited(tensor)
        if is_parameter(tensor):
            return
        for part in plain_parts(tensor):
            if tensor.is_nested and not part.is_floating_point():
                continue
            verdict = judge(part, self._engine.device, self._engine.externals, self._min_elements)
            if verdict is not Verdict.ELIGIBLE:
                continue
            storage = part.untyped_storage()
            key = storage._cdata
            self._storages.setdefault(key, WeakStorage(storage))
            start, stop = span_of(part, storage.nbytes())
            found = self._ranges.setdefault((key, part._version), _Range(start, stop))
            found.start, found.stop = min(found.start, start), max(found.stop, stop)
            layout = ViewLayout(part.size(), part.stride(), int(part.storage_offset()), part.dtype)
            found.layouts.add(layout)

    def storages(self) -> set[int]:
        return {key for key, _ in self._ranges}

    def of_storage(self, key: int) -> int:
        return sum(found.nbytes() for (storage, _), found in self._ranges.items() if storage == key)

    def total(self) -> int:
        return sum(found.nbytes() for found in self._ranges.values())
