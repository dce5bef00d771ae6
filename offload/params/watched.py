"""Tensors whose bytes are not all there: whoever touches one from Python goes through here first. And a
parameter whose device memory comes and goes, with the optimizer that steps it: what the one asks of the
other, and neither imports the other.

Features put a subclass of `Watched` in place of a tensor's class, and take it out again. One invariant: a
call that reads or writes no element passes without a wait; every other call first meets the `touch` of the
feature that watches. From `begin_step` until the step's copies are issued nobody but the optimizer reads or
writes the master, and the device's bytes are either part of the step or old.

C++ that is called without torch's Python bindings (collectives of torch.distributed, kernels of other
packages) calls no `__torch_function__`, and so is not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils import _foreach_utils

from offload.device import Device, Event

use_count = torch._C._storage_Use_Count
"""Of a storage, by its `_cdata`."""

HOME = "_offload_weight"
"""Attribute of a tensor whose bytes come and go: a weak reference to its Home."""


class Stepper(Protocol):
    """Who steps a parameter, by index."""

    def is_under_way(self, index: int) -> bool:
        """Return True if a step has claimed it, and not issued all of its copies. Blocks the host: never."""

    def await_weights(self, indices: Iterable[int] | None) -> None:
        """The current lane's work from here on comes after the step. Blocks the host until that is issued.
        Raises OffloadError where it failed, or where the loop has promised not to touch the weight."""

    def ends_of(self, index: int) -> list[Event]:
        """Events behind all that the step reads and writes. Blocks the host until the step is issued."""


class Claim(NamedTuple):
    """A step may use a parameter's bytes.

    on_device: its bytes on the device, which stay valid (1-D, uint8): the step writes both places. None: the
        step writes the master only.
    writes: a number that changes when others write the parameter.
    after: events of what still reads or writes the master.
    """

    on_device: Tensor | None
    writes: int
    after: tuple[Event, ...]


class Home(Protocol):
    """The host's side of one parameter."""

    name: str
    module: Callable[[], nn.Module | None]
    """The module with which the master's memory goes."""
    version: int
    """Of the parameter, as last looked at: another one tells of a write on the device."""

    @property
    def device(self) -> Device:
        """Device whose lanes move it."""

    @property
    def master(self) -> Tensor:
        """Pinned host bytes in the order of the device's memory: 1-D, uint8."""

    def is_of(self, parameter: Tensor) -> bool:
        """Return True if this home has the parameter's bytes still."""

    def begin_step(self, stepper: Stepper, index: int) -> Claim:
        """Claim the parameter for a step, perhaps again for another part of it. Raises OffloadError. Blocks
        the host: never, but for another optimizer's step of it that is not issued yet."""


def home_of(parameter: Tensor) -> Home | None:
    """None for one whose memory stays."""
    found: Any = vars(parameter).get(HOME)
    home: Home | None = found() if found is not None else None
    return home if home is not None and home.is_of(parameter) else None


def has_own_storage(tensor: Tensor) -> bool:
    """Predicate: the tensor alone has its storage, which can be freed and refilled and has no byte more."""
    return (
        is_alone(tensor)
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and tensor.untyped_storage().resizable()
    )


def is_alone(tensor: Tensor) -> bool:
    """Return True if nobody else has the tensor's storage."""
    return bool(use_count(tensor.untyped_storage()._cdata) == 2)  # the tensor, and the object that was asked


def methods(names: str, owner: Any = Tensor) -> frozenset[Any]:
    """Functions of a class or module that this torch has. names: with blanks between."""
    return frozenset(getattr(owner, name) for name in names.split() if hasattr(owner, name))


def accessors(names: str, *which: str) -> frozenset[Any]:
    """The same of attributes of a tensor. which: of "__get__", "__set__" and "__delete__"."""
    return frozenset(getattr(found, each) for found in methods(names) for each in which)


READ_NO_BYTES = (
    accessors("grad", "__get__", "__set__", "__delete__")
    | accessors("requires_grad is_leaf grad_fn shape ndim dtype device layout _version", "__get__")
    | methods("size stride numel dim element_size is_contiguous is_floating_point")
)
"""What reads and writes no element."""

W = TypeVar("W", bound=Tensor)


def untouched(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The call as torch makes it for plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


class Watched(Tensor):
    """Never made, only put in place of a tensor's class. comes_and_goes: its bytes are freed between uses."""

    comes_and_goes = False
    asked_by_collectives = methods("is_complex")
    """What functions of torch.distributed ask, before they hand a tensor to C++."""

    def __init_subclass__(cls) -> None:
        """Register the class as DTensor is: optimizers, and clip_grad_norm_, whose loop gives other bits than
        its list, take lists by default where all tensors are of these types."""
        for types in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
            types.append(cls)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in READ_NO_BYTES:
            return untouched(func, args, kwargs)
        return cls.touch(func, args, kwargs or {})

    @classmethod
    def of_collectives(cls, func: Callable[..., Any]) -> bool:
        """Return True if the `touch` that calls this is told of a collective of torch.distributed, or asked
        by one."""
        asks = sys._getframe(3).f_globals if func in cls.asked_by_collectives else {}
        module = getattr(func, "__module__", "")
        return "torch.distributed.distributed_c10d" in (module, asks.get("__name__"))

    @classmethod
    def touch(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Do what was asked, once the bytes may be read and written."""
        cls.make_ready((args, kwargs))
        return untouched(func, args, kwargs)

    @classmethod
    def stay(cls, tensor: Any) -> None:
        """The bytes stay on the device from here on, and the tensor is torch's own."""

    @classmethod
    def lend(cls, tensor: Any, returned: Callable[[], None]) -> Tensor | None:
        """The tensor's elements in host memory, in the order of the device's, 1-D; None where there are none.
        They are there for what the current lane does next, and stay until `returned` is called, which waits
        for who has them: it is called before they change."""
        return None

    @classmethod
    def make_ready(cls, found: Any) -> None:
        """The bytes of all that this class watches among `found` may be used from here on, until the call
        that asked ends. Here: they may be at any time."""


def watched_in(found: Any, kind: type[W]) -> Iterator[W]:
    """The tensors of that class in tuples, lists and dictionaries, nested ones too."""
    if isinstance(found, kind):
        yield found
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from watched_in(each, kind)
    elif isinstance(found, dict):
        for each in found.values():
            yield from watched_in(each, kind)
