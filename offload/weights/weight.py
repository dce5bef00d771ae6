"""One streamed weight, and the block that it goes with: where its bytes are, and whose copy is the newer.

A block and its weights hold each other, until the model or the stream ends.

One invariant: the parameter object, its autograd identity and its storage object stay the same from `apply`
to `remove`. Only the storage's bytes come and go, so views and saved aliases follow them.

    master    the weight's bytes in pinned host memory, in the order of the device's memory; of an INT8 weight
              its rows' scales and its values
    dirty     the device's bytes are newer than the master
    alias     a tensor over the same storage that a read from outside was given, watched as the weight is
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from offload.device import Device, Event, Lane
from offload.device.rows import expand_rows
from offload.errors import OffloadError
from offload.memory.arena import Block, HostArena
from offload.params.watched import HOME, Claim, Stepper, Watched, is_alone, untouched, use_count, watched_in
from offload.transfer.block import bytes_of

Close = Callable[[], object]
"""Ends what a forward has opened."""


def in_backward() -> bool:
    """Return True if this thread runs a backward."""
    return bool(torch._C._current_graph_task_id() != -1)


def written(weight: Weight) -> OffloadError:
    """Error for somebody who would change the bits of an INT8 weight."""
    return OffloadError(
        f"{weight.name} is held as INT8 and cannot be written or trained, because nothing is quantised again "
        f"silently: call dequantize({weight.block.name!r}) on apply's handle first, which makes the weights "
        "of its block plain"
    )


def give_memory(tensor: Tensor, own: Tensor) -> None:
    """The tensor has this memory from here on, and stays the object that it is. own: nobody else's. Of a
    tensor on meta torch refuses to set .data, but it exchanges all that two objects are."""
    if not tensor.is_meta:
        tensor.data = own
        return
    new = nn.Parameter(own, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own.detach()
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)


class Holder(Protocol):
    """Who brings a weight, or a gradient, to the device and takes it away, as its watched class asks."""

    def hold(self, weights: Collection[Weight]) -> AbstractContextManager[None]:
        """Inside, their blocks are on the device, for the current lane."""

    def wrote(self, weight: Weight) -> None:
        """The current lane has written it."""

    def set_data(self, weight: Weight, value: Tensor) -> None:
        """`weight.data = value`, whose elements are there."""

    def host_copy(self, weight: Weight) -> Tensor:
        """A view of its master on the CPU, which has the newest bytes."""

    def leave_device(self) -> None:
        """Everything that nobody uses leaves the device, until it is used."""


class BlockHolder(Holder, Protocol):
    """Who streams the weights of blocks, as hooks of modules ask."""

    def enter(self, block: BlockWeights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Close:
        """A forward of the block begins, or a recompute. Returns what is called at its end."""

    def leave(self, block: BlockWeights, close: Close) -> None:
        """It is over, or was left by an exception."""

    def adopt(self, weight: Weight) -> None:
        """The parameter that load_state_dict(assign=True) has put in its place streams from here on."""

    def claim(self, weight: Weight) -> Claim:
        """A step of an optimizer that keeps state on the host may use its bytes."""


def nobody(*_: object) -> None:
    """Return None, as a weak reference to nothing does."""


class Weight:
    """A parameter of a block, from the moment on which its bytes are in `master`.

    | name | | written by |
    |---|---|---|
    | parameter, storage | the user's parameter, and its storage on the device | `rest` |
    | on_device | the storage's bytes, with or without them: 1-D, uint8 | `rest` |
    | nbytes | of the parameter as it is now, on the device | `make_master` |
    | int8 | whether it waits, and crosses the link, as INT8 | `Parameters`, and who chooses |
    | uses | of experts: the kinds of its uses in forwards; None where they do not matter | `watched` |
    | experts | its ExpertWeight; None where it comes with its block | `experts` |
    | source | fills the master at `apply` where the values are not the parameter's | who has them |
    | module, attribute | where the module had it when it was found | the constructor |
    | master | pinned host bytes | `rest` |
    | dirty | the device's bytes are newer | whoever sees a write |
    | stale | the device's bytes, if any, are older: a step writes the master | `claim`, `Residency` |
    | stepped_here | the last step, or the one under way, uses the device's bytes | `claim`, `Residency` |
    | writes | how often the bytes were changed by others than the optimizer that steps it | whoever does |
    | version | of the parameter when it was last looked at | `WeightStream` |
    | generation | how often it was given other memory | `Parameters` |
    | origin | where apply found it; the CPU for one on meta | the constructor |
    | without_values | it is on meta, and waits for load_weights | `rest` |
    | block, holder | its BlockWeights, and a weak reference to its WeightStream | they |
    | use | has its block on the device, for the current lane; keeps who does alive | `WeightStream` |
    """

    is_gradient = False
    away = ""
    """Why nothing brings its bytes to the device for a call, and the way out; "" where something does."""

    def __init__(self, parameter: nn.Parameter, name: str, module: nn.Module, attribute: str) -> None:
        self.parameter: Tensor = parameter
        self.name, self.attribute = name, attribute
        self.module: Callable[[], nn.Module | None] = weakref.ref(module)
        self.without_values = parameter.is_meta
        self.origin = torch.device("cpu") if parameter.is_meta else parameter.device
        self.nbytes = parameter.numel() * parameter.element_size()
        self.source: Callable[[Weight], None] | None = None
        self.uses: set[str | None] | None = None
        self.experts: Any = None
        self.int8 = self.dirty = self.stale = self.stepped_here = False
        self.version = parameter._version
        self.writes = self.generation = 0
        self.block: BlockWeights
        self.holder: Callable[[], Holder | None] = nobody
        self.use: Callable[[Weight], None] = nobody
        self.unswappable: object = None  # a weak reference: torch.utils.swap_tensors refuses what has one
        self._lent: tuple[HostArena, Block] | None = None
        self._aliases: list[weakref.ref[Tensor]] = []
        self._on_host: Tensor | None = None
        self._array: Callable[[], object] = nobody  # whose memory the host's copy is
        self._host_version = 0
        # of an INT8 weight, in state dicts: version when written
        self._copies: Any = WeakTensorKeyDictionary()
        self._host_is_old = False  # a step has begun since it was given out
        self._stepped_by: tuple[Callable[[], Stepper | None], int] = nobody, 0
        self._others_step: tuple[Event, ...] = ()  # of the optimizer that stepped it before that one

    def make_master(self, arena: HostArena) -> Tensor:
        """Host bytes for the parameter as it is now. Blocks the host for the pinning. Raises
        HostBudgetError, and keeps what it had then."""
        self.nbytes = self.parameter.numel() * self.parameter.element_size()
        fits = self._lent is not None and self.master.numel() == self.link_bytes
        if not fits or self._reader_of_host_copy() is not None:
            block = arena.contiguous(self.link_bytes)
            self.close()
            self._lent = arena, block
            self.master: Tensor = block.extents[0]
        self._on_host = None
        return self.master

    @property
    def link_bytes(self) -> int:
        """Bytes of the master, and of each way across the link: a byte an element and 4 a row for INT8."""
        numel = self.parameter.numel()
        return numel + 4 * (numel // self.parameter.shape[-1]) if self.int8 else self.nbytes

    def int8_views(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """flat: an INT8 weight's master, or a copy of it. Its values, as the parameter, int8; and its rows'
        scales, (..., 1), float32, which come first."""
        shape = self.parameter.shape
        scales, values = flat.tensor_split((4 * (self.parameter.numel() // shape[-1]),))
        values = values.view(torch.int8).as_strided(shape, self.parameter.stride())
        return values, scales.view(torch.float32).view(*shape[:-1], 1)

    def elements(self, flat: Tensor) -> Tensor:
        """flat: the parameter's bytes, 1-D, uint8, such as a master that is not INT8. As the parameter."""
        return flat.view(self.parameter.dtype).as_strided(self.parameter.shape, self.parameter.stride())

    def _reader_of_host_copy(self) -> object | None:
        """Object alive while somebody else has the host's copy; None where nobody has. Our own is gone."""
        self._on_host = None
        return self._array()

    def rest(self) -> None:
        """The parameter's storage is its own from here on."""
        self.storage = self.parameter.untyped_storage()
        self.on_device = bytes_of(self.storage, 0, self.storage.nbytes())
        self.unswappable, self.without_values = weakref.ref(self.parameter), False
        self.version = self.parameter._version

    def replaced_by(self) -> nn.Parameter | None:
        """The parameter that its module has in its place; None where that is the weight, or there is none."""
        module = self.module()
        found = None if module is None else module._parameters.get(self.attribute)
        return found if type(found) is nn.Parameter and found is not self.parameter else None

    def close(self, after: Event | None = None) -> None:
        """Give the host memory back. after: comes after all copies of it, and no lock is taken then; None
        where none is in flight."""
        lent, self._lent = self._lent, None
        if lent is None:
            return
        arena, block = lent
        for known in self._copies.data.copy():
            if (tensor := known()) is not None:
                ExpandedLater.make_ready(tensor)
        array = self._reader_of_host_copy()
        if array is not None:  # somebody reads the host's copy, such as a state dict: it goes with them
            weakref.finalize(array, arena.give_back_later, block, after).atexit = False
        elif after is not None:
            arena.give_back_later(block, after)
        else:
            arena.give_back(block, None)

    # -- steps by an optimizer that keeps state on the host --------------------------------------------------
    @property
    def device(self) -> Device:
        return self.block.device

    def is_of(self, parameter: Tensor) -> bool:
        """Return True if the weight has the parameter's bytes still (`Home.is_of`)."""
        return self.parameter is parameter and self._lent is not None and self.holder() is not None

    def begin_step(self, stepper: Stepper, index: int) -> Claim:
        """Claim the parameter for a step (`Home.begin_step`)."""
        holder, (before, at) = self.holder(), self._stepped_by
        assert holder is not None  # `is_of` has looked
        if before() is not stepper or at != index:
            self.await_step()
            self.writes += 1
            self._others_step = tuple(self.ends_of_step())
        claim = cast(BlockHolder, holder).claim(self)
        self._stepped_by = weakref.ref(stepper), index
        self._host_is_old = self.is_read_on_host
        return claim._replace(after=claim.after + self._others_step)

    @property
    def is_under_way(self) -> bool:
        """Predicate: a step has claimed the weight, and is not issued."""
        stepper, index = self._stepped_by[0](), self._stepped_by[1]
        return stepper is not None and stepper.is_under_way(index)

    def await_step(self) -> None:
        """Order the current lane after the weight's step (`Stepper.await_weights`)."""
        if (stepper := self._stepped_by[0]()) is not None:
            stepper.await_weights((self._stepped_by[1],))

    def ends_of_step(self) -> list[Event]:
        """Events behind all that the weight's step reads and writes (`Stepper.ends_of`)."""
        stepper = self._stepped_by[0]()
        return [] if stepper is None else stepper.ends_of(self._stepped_by[1])

    # -- who else has it -------------------------------------------------------------------------------------
    def watch_alias(self, alias: Tensor) -> None:
        self._aliases = [known for known in self._aliases if known() is not None]
        self._aliases.append(weakref.ref(alias))

    def aliases(self) -> list[Tensor]:
        """Aliases that have not been given other memory since, and left to whoever has them."""
        found = [alias for known in self._aliases if (alias := known()) is not None]
        return [alias for alias in found if vars(alias).get(HOME, nobody)() is self]

    @property
    def tensors(self) -> list[Tensor]:
        """The parameter, and what was made of it."""
        return [self.parameter, *self.aliases()]

    @property
    def is_held_elsewhere(self) -> bool:
        """Predicate: there is an unwatched alias: a save of autograd that no hook saw, or a recompute's."""
        known = 2 + len(self.tensors)  # `storage` and `on_device`
        # a numpy array of a CPU tensor makes its storage one that cannot be resized
        return bool(use_count(self.storage._cdata) > known) or not self.storage.resizable()

    # -- the host's copy -------------------------------------------------------------------------------------
    def expand_later(self) -> Tensor:
        """An INT8 weight's values like the parameter, on the CPU, in memory that is written when somebody
        first touches it. They stay as they are, whatever becomes of the weight."""
        with torch.inference_mode(False), torch.no_grad():
            tensor = torch.empty_like(self.parameter, device="cpu")
        vars(tensor)["_offload_weight"] = self
        tensor.__class__ = ExpandedLater
        self._copies[tensor] = None
        return tensor

    def on_host(self) -> Tensor:
        """The master as a tensor like the parameter, on the CPU, whose storage has exactly its bytes. What
        this gives shares one version, which tells of writes. Of an INT8 weight: expanded, a copy."""
        if self.int8:
            ExpandedLater.make_ready(tensor := self.expand_later())
            return tensor
        with torch.inference_mode(False), torch.no_grad():
            # share_memory_() has moved what was given before to memory of its own
            if self._on_host is None or self._on_host.data_ptr() != self.master.data_ptr():
                array = self.master.numpy()
                self._array = weakref.ref(array)
                self._on_host = self.elements(torch.from_numpy(array))
                self._host_version = self._on_host._version
            self._host_is_old = False
            return self._on_host.detach().as_subclass(HostValue)

    def take_host_writes(self) -> bool:
        """Return True if somebody has written the host's copy since the last call. Raises OffloadError where
        it was an old one, and the device's bytes are the weight's then; and where it is of an INT8 weight."""
        if self.int8:
            for known, version in self._copies.data.copy().items():
                if type(copy := known()) is Tensor and copy._version != version:
                    self._copies[copy] = copy._version
                    raise written(self)
            return False
        if self._on_host is None or self._on_host._version == self._host_version:
            return False
        self._host_version = self._on_host._version
        if self.dirty or self._host_is_old:
            raise OffloadError(
                f"a state dict's {self.name} was written after the weight had been written on the device, "
                "or stepped, so it was an old one: that write is lost, or mixed with the step; load the "
                "weight, and call state_dict() again before writing to it"
            )
        return True

    @property
    def is_read_on_host(self) -> bool:
        """Predicate: the host's copy was given out."""
        return self._on_host is not None

    @property
    def is_old_to_readers(self) -> bool:
        """Predicate: somebody has the host's copy, and that is an old one."""
        given = self._on_host
        return (self.dirty or self._host_is_old) and given is not None and not is_alone(given)


class HostValue(Watched):
    """A weight in a state dict, or an alias of it: the host's own bytes. `.cpu()` and `.to("cpu")` copy them,
    as they do those of a GPU."""

    def __setattr__(self, name: str, value: Any) -> None:
        """nn.Parameter() of it is a plain one, as it is of a plain tensor."""
        super().__setattr__(*(("__class__", nn.Parameter) if name == "_is_param" else (name, value)))

    @classmethod
    def touch(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if func is Tensor.__reduce_ex__:
            args = (untouched(Tensor.detach, args[:1], {}), *args[1:])
        if func in (Tensor.cpu, Tensor.__deepcopy__):
            return untouched(Tensor.clone, args[:1], {})
        if func is Tensor.detach:  # no view: as a Parameter's `_base` it would hold the host's bytes
            return untouched(Tensor._make_subclass, (cls, args[0]), {})
        result = untouched(func, args, kwargs)
        if func is Tensor.to and result is args[0]:  # on a GPU that is so where no device is named
            named = [v for v in (*args[1:], *kwargs.values()) if isinstance(v, (str, torch.device, Tensor))]
            return untouched(Tensor.clone, args[:1], {}) if named else result
        mine = type(args and args[0]) is cls and type(result) is Tensor
        return result.as_subclass(cls) if mine and torch._C._is_alias_of(result, args[0]) else result  # type: ignore[attr-defined]


class ExpandedLater(Watched):
    """An INT8 weight in a state dict, whose memory nobody has written yet."""

    @classmethod
    def touch(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Raises OffloadError for a write, which the weight does not get."""
        owners = [vars(tensor)["_offload_weight"] for tensor in watched_in((args, kwargs), ExpandedLater)]
        cls.make_ready((args, kwargs))
        result = func(*args, **kwargs)
        for weight in owners:
            weight.take_host_writes()
        return result

    @classmethod
    def make_ready(cls, found: Any) -> None:
        for tensor in watched_in(found, ExpandedLater):
            weight: Weight = vars(tensor).pop("_offload_weight")
            plain: Any = Tensor
            tensor.__class__ = plain
            values, scales = weight.int8_views(weight.master)
            expand_rows(values, scales, tensor)
            weight._copies[tensor] = tensor._version


@dataclass(eq=False)
class BlockWeights:
    """The streamed weights of one block, which come and go together.

    | name | |
    |---|---|
    | index, name | of the block, in the order of the model; -1 for a weight alone |
    | nbytes | of its weights on the device, as `count` found them |
    | link_bytes | that cross the link, which are on the device while `staged` has some |
    | expanded_bytes | of nbytes, those of INT8 weights |
    | staged | its INT8 weights, and their bytes on the device, until they are expanded |
    | present | its storages have bytes |
    | entered | forwards of it under way, and calls that use its weights |
    | keep | the plan has it stay |
    | compiled | its module is, so that the class of its weights is plain inside |
    | pinned | something may read its weights unseen, so it stays |
    | arrived | the event after its last way in |
    | left | the event after its last way out: the master is whole then |
    | left_unseen | that is later than `arrived`: who waits for the one has not waited for the other |
    | home | the lane that its bytes were allocated on |
    | readers | lanes that have waited for `arrived`, by id |
    | called | where other threads stood when its last forward ended, which may read its weights unseen |
    """

    index: int
    name: str
    device: Device
    weights: list[Weight]
    present: bool = False
    entered: int = 0
    keep: bool = False
    compiled: bool = False
    pinned: bool = False
    arrived: Event | None = None
    left: Event | None = None
    left_unseen: bool = False
    home: Lane | None = None
    readers: dict[int, Lane] = field(default_factory=dict)
    called: dict[int, tuple[int, int]] = field(default_factory=dict)

    nbytes: int = 0
    link_bytes: int = 0
    expanded_bytes: int = 0
    staged: list[tuple[Weight, Tensor]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for weight in self.weights:
            weight.block = self
        self.count()

    def count(self) -> None:
        """Its weights have other dtypes than before."""
        self.nbytes = sum(weight.nbytes for weight in self.weights)
        self.link_bytes = sum(weight.link_bytes for weight in self.weights)
        self.expanded_bytes = sum(weight.nbytes for weight in self.weights if weight.int8)

    def refuse_inside(self, what: str) -> None:
        """Raises OffloadError for `what` in a forward of the block."""
        if self.entered:
            raise OffloadError(f"{what} inside a forward of {self.name}, which uses it; do it outside")

    @property
    def held_bytes(self) -> int:
        """That it has on the device."""
        return 0 if not self.present else self.link_bytes if self.staged else self.nbytes

    @property
    def may_leave(self) -> bool:
        """Predicate: nobody uses the block, no step either, and nobody has an alias that would be read
        without a load."""
        unused = self.present and not (self.entered or self.pinned)
        return unused and not any(
            w.is_held_elsewhere or (w.stepped_here and w.is_under_way) for w in self.weights
        )
