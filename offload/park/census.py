"""Which storages a model, its gradients, its optimizers and what else is named have on the device, and every
tensor that is known to hold one of them.

One invariant: a storage may leave only if all that hold it are known here, so that each of them can be
watched; who reads a freed storage past that ends the process. Holders are tensors, by identity, and the
storage's use count says how many there are.

    plain tensor        holds its storage once, and so does the base that it is a view of
    wrapper             holds none: a DTensor's local shard does, and the inner tensors of a quantized one
    FSDP2's shard       is held by FSDPParam as well; parameters of HybridDeviceOptimizer by its ParamViews

Host memory of one kind is sections with a place for each storage, kept from one cycle to the next: as long as
the storages have the sizes of the last cycle, nothing is pinned or allocated. The memory goes back with its
object, so whoever holds that, such as a state dict, has the bytes.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import chain
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from offload.device import Device, Event
from offload.errors import HostBudgetError
from offload.memory.arena import HostArena
from offload.params.sections import FlatSpec, HostSection, lay_out
from offload.params.view import inner_parts
from offload.params.watched import HOME, use_count
from offload.park.report import Kind
from offload.weights.weight import Holder, Weight, nobody

KINDS: tuple[Kind, ...] = get_args(Kind)
_REGISTERED = ("_parameters", "_buffers", "_modules")


class Entry(Weight):
    """A storage that leaves the device, and the host's copy of it.

    | name | |
    |---|---|
    | kinds | all that it is part of: it is on the device while one of them is awake |
    | home, memory | the kind whose memory has its bytes, and that |
    | storage | the tensors' own, without bytes while parked |
    | holders, wrappers | tensors by id, until it is parked; then weak references, as aliases of a Weight |
    | master | its bytes on the host: 1-D, uint8 |
    """

    int8 = dirty = _host_is_old = False
    experts = uses = None
    parameter = torch.empty(0)
    """None: each tensor over the storage is an alias."""
    home: Kind
    memory: KindMemory

    def __init__(self, name: str, storage: torch.UntypedStorage) -> None:
        # not as a Weight, which is of a module's parameter
        self.name, self.storage, self.nbytes = name, storage, storage.nbytes()
        self.kinds: set[Kind] = set()
        self.holders: dict[int, Tensor] = {}
        self.wrappers: dict[int, Tensor] = {}
        self._aliases: list[weakref.ref[Tensor]] = []
        self._on_host, self._array, self._host_version = None, nobody, 0

    def belongs_to(self, parked: Any) -> None:
        """Whoever touches one of its tensors asks `parked` for the host's bytes, or is told to wake it."""
        self.holder = weakref.ref(parked)
        kinds = ", ".join(f'"{kind}"' for kind in KINDS if kind in self.kinds)
        self.away = (
            f"which is parked: call wake({kinds}) on what offload.park() returned first. state_dict(), "
            "torch.save() and .cpu() read its bytes on the host"
        )

    @property
    def is_shared(self) -> bool:
        """Predicate: somebody holds the storage that is not known here."""
        return bool(use_count(self.storage._cdata) > len(self.holders) + 1)  # the object that was asked

    @property
    def reader(self) -> object | None:
        """Object that lives as long as somebody has the host's copy."""
        return self._reader_of_host_copy()

    def elements(self, flat: Tensor) -> Tensor:
        """Return `flat`: the elements of a storage are its bytes (`Weight.elements`)."""
        return flat


class Census:
    """Inventory of one device.

    entries: by storage. streams: who has other tensors of the model on the host already. others: name, bytes
    and kind of what is on another device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.entries: dict[int, Entry] = {}
        self.streams: dict[Holder, Kind] = {}
        self.others: list[tuple[str, int, Kind]] = []

    def add(self, kind: Kind | None, named: Iterable[tuple[str, Tensor]]) -> None:
        """These tensors are of that kind; None: they may hold storages that are noted by then."""
        with torch._C.DisableTorchFunctionSubclass():
            for name, tensor in named:
                self._note(kind, name, tensor, ())

    def _note(self, kind: Kind | None, name: str, tensor: Tensor, wrappers: tuple[Tensor, ...]) -> None:
        if (owner := vars(tensor).get(HOME, nobody)()) is not None:
            if kind is not None and not owner.away and (holder := owner.holder()) is not None:
                self.streams.setdefault(holder, kind)
        elif inner := inner_parts(tensor):
            for attribute, part in inner.items():
                self._note(kind, f"{name}.{attribute}", part, (*wrappers, tensor))
        elif tensor.layout is torch.strided and self._device.owns(tensor):
            storage = tensor.untyped_storage()
            if kind is not None and storage.nbytes():
                self.entries.setdefault(storage._cdata, Entry(name, storage)).kinds.add(kind)
            if (entry := self.entries.get(storage._cdata)) is not None:
                entry.holders |= {id(t): t for t in (tensor, tensor._base) if t is not None}
                entry.wrappers |= {id(t): t for t in wrappers}
        elif kind is not None and tensor.device.type not in ("cpu", "meta"):
            self.others.append((name, tensor.numel() * tensor.element_size(), kind))

    @cached_property
    def _unknown(self) -> Counter[int]:
        """By storage, how many of Python's tensors have it that are not known here. Looks at all objects."""
        known = {at for entry in self.entries.values() for at in entry.holders}
        tensors = (
            each for each in gc.get_objects() if issubclass(type(each), Tensor) and id(each) not in known
        )
        found: Counter[int] = Counter()
        for each in tensors:
            with suppress(Exception), torch._C.DisableTorchFunctionSubclass():  # a wrapper has none
                found[each.untyped_storage()._cdata] += 1
        return found

    def is_saved(self, entry: Entry) -> bool:
        """Return True if a graph has a view of the storage for its backward: what else holds that is no
        object of Python's, and a graph leads to a parameter over it."""
        key = entry.storage._cdata
        others = use_count(key) - len(entry.holders) - 1 - self._unknown[key]
        return others > 0 and any(_is_in_graph(t) for t in entry.holders.values() if t.requires_grad)

    def add_model(self, model: nn.Module) -> dict[int, str]:
        """Parameters, buffers and gradients, and what else holds them. Names of parameters by id."""
        parameters = [*model.named_parameters(remove_duplicate=False)]
        self.add("weights", chain(parameters, model.named_buffers(remove_duplicate=False)))
        for attribute in ("grad", "main_grad", "decoupled_grad"):
            found = [(f"{name}.{attribute}", getattr(each, attribute, None)) for name, each in parameters]
            self.add("gradients", [(name, each) for name, each in found if isinstance(each, Tensor)])
        for module in model.modules():
            beside = [value for name, value in vars(module).items() if name not in _REGISTERED]
            self.add(None, tensors_in("", [*beside, *(vars(each) for each in _fsdp_params(module))]))
        return {id(each): name for name, each in parameters}

    def add_optimizer(self, optimizer: Any, names: Mapping[int, str], prefix: str) -> None:
        """State, and masters in its groups, which are no parameters of a model's."""
        if (own := own_optimizer(optimizer)) is None:
            return
        for at, group in enumerate(own.param_groups):
            masters = (p for p in group["params"] if own is not optimizer or type(p) is not nn.Parameter)
            found = ((f"{prefix}param_groups[{at}]", each) for each in masters if id(each) not in names)
            self.add("optimizer", found)
        for key, entry in own.state.items():
            self.add("optimizer", tensors_in(f"{prefix}state of {names.get(id(key), 'a parameter')}", entry))


def check_kinds(kinds: Iterable[object]) -> None:
    """Raises ValueError for what is no kind."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"{kind!r} is no kind of what is parked: {', '.join(map(repr, KINDS))}")


def own_optimizer(optimizer: Any) -> Any:
    """The optimizer whose state is on the device; None where none has any there."""
    return optimizer.gpu_optimizer if hasattr(optimizer, "placed") else optimizer


def tensors_in(name: str, value: Any, depth: int = 8) -> Iterator[tuple[str, Tensor]]:
    """The tensors in a module, or nested in so many dictionaries and lists, with names that begin with
    `name`."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, nn.Module):
        for below in (value.named_parameters, value.named_buffers):
            yield from ((f"{name}.{each}", found) for each, found in below(remove_duplicate=False))
    elif isinstance(value, Mapping):
        for key, each in value.items() if depth else ():
            yield from tensors_in(f"{name}.{key}" if isinstance(key, (str, int)) else name, each, depth - 1)
    elif isinstance(value, (list, tuple, set, deque)) and not isinstance(next(iter(value), 0), str):
        for place, each in enumerate(value) if depth else ():
            yield from tensors_in(f"{name}[{place}]", each, depth - 1)


class _Token:
    """Lives as long as the node of autograd's graph whose metadata has it."""


def _is_in_graph(leaf: Tensor) -> bool:
    node: Any = get_gradient_edge(leaf).node
    token = weakref.ref(node.metadata.setdefault("offload", _Token()))
    del node
    return token() is not None


def _fsdp_params(module: Any) -> Iterator[Any]:
    """FSDP2's own objects for the parameters of a module, of which torch has no public look."""
    state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    for group in getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]):
        yield from () if group is None else group.fsdp_params


SECTION_BYTES = 1 << 30
"""Of one section, which is one piece of a copy to the host and one registration: 60 ms to pin."""


class KindMemory:
    """Sections of an arena. arrived: the event after the last copy from it, to which wake() writes."""

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena
        self.sizes: tuple[int, ...] = ()
        self._sections: list[HostSection] = []
        self.slots: list[list[tuple[int, Tensor]]] = []
        """By section: a storage's number in `sizes`, and its place, 1-D, uint8."""
        self.nbytes = self.pageable_bytes = 0
        self.arrived: list[Event] = []
        weakref.finalize(self, _give_back, self._sections, self.arrived, later=True).atexit = False

    def make(self, sizes: Sequence[int], *, pageable: bool) -> None:
        """Have places for storages of these sizes, in bytes. pageable: in ordinary memory where the budget
        has no more. Blocks the host for the pinning. Raises HostBudgetError, and has nothing then."""
        self.close()
        options = {"bucket_numel": SECTION_BYTES, "section_numel": SECTION_BYTES, "whole": True}
        try:
            for layout in lay_out([*enumerate(sizes)], **options):  # type: ignore[arg-type]
                try:
                    section = HostSection(self._arena, layout, [FlatSpec("bytes", 1, pinned=True)])
                except HostBudgetError:
                    if not pageable:
                        raise
                    section = HostSection(self._arena, layout, [FlatSpec("bytes", 1, pinned=False)])
                    self.pageable_bytes += section.nbytes
                self.nbytes += section.nbytes
                self._sections.append(section)
                places = ((at, section.slot("bytes", start, size)) for at, start, size in layout.parameters)
                self.slots.append([*places])
        except BaseException:
            self.close()
            raise
        self.sizes = tuple(sizes)

    def close(self) -> None:
        """Give the memory back. Nothing may use it any more but copies before `arrived`."""
        _give_back(self._sections, self.arrived, later=False)
        self.sizes, self.slots, self.nbytes, self.pageable_bytes = (), [], 0, 0


def _give_back(sections: list[HostSection], arrived: list[Event], *, later: bool) -> None:
    """later: from a finaliser, without a lock."""
    while sections:
        sections.pop().close(after=arrived[-1] if arrived else None, later=later)
