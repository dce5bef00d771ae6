"""A parameter whose device memory comes and goes, and the optimizer that steps it: what the one asks of the
other, and neither imports the other.

One invariant: from `begin_step` until the step's copies are issued nobody else reads or writes the master,
and the device's bytes are either part of the step or old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from offload.device import Device, Event

use_count = torch._C._storage_Use_Count
"""Of a storage, by its `_cdata`."""

HOME = "_offload_weight"
"""Attribute of a tensor whose bytes come and go: a weak reference to its Home."""


class Stepper(Protocol):
    """Who steps a parameter, by index."""

    def is_under_way(self, index: int) -> bool:
        """Whether a step has claimed it, and not issued all of its copies. Blocks the host: never."""

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
        """Whose lanes move it."""

    @property
    def master(self) -> Tensor:
        """Pinned host bytes in the order of the device's memory: 1-D, uint8."""

    def is_of(self, parameter: Tensor) -> bool:
        """Whether it has the parameter's bytes still."""

    def begin_step(self, stepper: Stepper, index: int) -> Claim:
        """Claim the parameter for a step, perhaps again for another part of it. Raises OffloadError. Blocks
        the host: never, but for another optimizer's step of it that is not issued yet."""


def home_of(parameter: Tensor) -> Home | None:
    """None for one whose memory stays."""
    found: Any = vars(parameter).get(HOME)
    home: Home | None = found() if found is not None else None
    return home if home is not None and home.is_of(parameter) else None


def has_own_storage(tensor: Tensor) -> bool:
    """Whether nobody else has the tensor's storage, which can be freed and refilled and has no byte more."""
    return (
        is_alone(tensor)
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        and tensor.untyped_storage().resizable()
    )


def is_alone(tensor: Tensor) -> bool:
    """Whether nobody else has the tensor's storage."""
    return bool(use_count(tensor.untyped_storage()._cdata) == 2)  # the tensor, and the object that was asked
