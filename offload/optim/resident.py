"""Parameters that one optimizer steps as whole tensors: those that stay on the device, those that are on the
host while the device is a GPU, and all of a class that may look at all of its parameters.

One invariant: the class is given the parameter itself, its float32 master, or its copy on the host, with its
gradient; weights and gradients are the model's again when it returns, and while its closure runs. So any
class does here what it does alone.

Copies on the host lie in pinned memory, and all of them move as one piece. Where the class or the user has
given a tensor other memory (`p.data = ...`), that tensor alone is copied by torch.

A step that may fail half-way is taken back. Not every class writes its state where torch's do: it lies in
lists (SOAP), in objects (Shampoo), in inner optimizers (SAM) and in the optimizer's own attributes. So all
that the object holds is looked through before the step. After an error everything found is the same object
with the same contents, and what cannot be put back is named in the error.

# [Order: whole out]
# hazard  RAW: `d2h` copies weights and gradients that `compute` is still writing.
# edge    an event is recorded on compute; d2h waits for it, and the host waits for the copies.
# alive   the list of pairs, until the host has waited.
# proof   tests/property/test_optim_edges.py, edge "whole out"
#
# [Order: whole back]
# hazard  WAR: `h2d` writes weights that `compute` still reads; RAW: `compute` reads them before; WAR: the
#         host writes its copies while `h2d` still reads them.
# edge    h2d waits for compute, and compute for h2d. Before the host writes again it waits for d2h, which has
#         waited for compute.
# alive   the section owns the host's bytes, the parameter the device's.
# proof   tests/property/test_optim_edges.py, edge "whole back"
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.device import CopyPair
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.ids import Owner
from offload.optim.classes import step_alone, steps_each_alone
from offload.optim.cpu_step import CpuPart, as_bytes
from offload.optim.parts import HostOptions, Part, UserGroup, follow_groups, parts_of
from offload.params.view import (
    ParamView,
    count_write,
    is_writable,
    laid_like,
    lay_like,
    local_of,
    update_master,
)

_FIXED = (
    *(bool, int, float, complex, str, bytes, range, slice, type, Enum, types.NoneType, types.ModuleType),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, weakref.ref),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types whose objects no step changes, as far as can be seen: what a function closes over cannot be."""


@contextmanager
def undone_on_error(optimizer: Optimizer, not_ours: Sequence[BaseException]) -> Iterator[None]:
    """The optimizer steps all or nothing: an exception puts back weights, gradients, state, groups and
    attributes. An error that is not the closure's is raised as an OffloadError. not_ours: what the closure
    has raised."""
    undo, unseen = _remembered(vars(optimizer))
    try:
        yield
    except BaseException as error:
        with torch.no_grad():
            for put_back in undo:
                put_back()
        if not isinstance(error, Exception) or any(error is each for each in not_ours):
            raise
        but = f", but for what these hold, which was not put back: {', '.join(unseen)}" if unseen else ""
        raise OffloadError(
            f"the step failed in {type(optimizer).__name__} ({type(error).__name__}: {error}); weights "
            f"and state are those of the last whole step{but}"
        ) from error


@torch.no_grad()
def _remembered(root: dict[str, Any]) -> tuple[list[Callable[[], object]], list[str]]:
    """Functions that put back all that can be reached, and the names of what cannot be looked into."""
    undo: list[Callable[[], object]] = []
    unseen: list[str] = []
    seen: dict[int, Any] = {}
    left: list[tuple[str, Any]] = [("", root)]
    while left:
        name, value = left.pop()
        if isinstance(value, _FIXED) or id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Tensor):
            held = vars(value) if parts_of(value) else None
            left += [(name, value.grad if value.is_leaf else None), (name, held)]
            undo += [functools.partial(_write, value, value.data, value.clone())] if held is None else []
        elif isinstance(value, MutableMapping):
            undo.append(functools.partial(_refill, value, {**value}))
            left += [(key if isinstance(key, str) else name, each) for key, each in value.items()]
        elif isinstance(value, (MutableSequence, set, tuple, frozenset)):
            undo += [functools.partial(_refill, value, [*value])] if hasattr(value, "clear") else []
            left += [(name, each) for each in value]
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            left.append((name, vars(value)))
        else:
            unseen.append(f"{name} ({type(value).__name__})")
    return undo, list(dict.fromkeys(unseen))


def _refill(container: Any, contents: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, MutableSequence) else container.update)(contents)


def _write(tensor: Tensor, memory: Tensor, saved: Tensor) -> None:
    strided = tensor.layout is torch.strided
    if strided and local_of(tensor).data_ptr() != local_of(memory).data_ptr():
        tensor.data = memory  # which the class may have exchanged
    if not strided or is_writable(local_of(tensor)):
        tensor.copy_(saved)


class ResidentPart(Part):
    """One optimizer over whole tensors. on_host: parameters of the device are stepped as copies on the
    host."""

    def __init__(
        self,
        engine: OffloadEngine,
        cls: type[Optimizer],
        kwargs: Mapping[str, Any],
        options: HostOptions,
        *,
        on_host: bool,
    ) -> None:
        super().__init__(options)
        self._device = engine.device
        self._copies = engine.copier.of(Owner("optim", "whole parameters"))
        self.memory = CpuPart(engine, options, cls, kwargs)
        """The memory of the copies on the host: their weights, gradients and masters."""
        self._new_optimizer: Callable[..., Optimizer] = functools.partial(cls, **kwargs)
        self._on_host = on_host
        self.may_write_all = not steps_each_alone(cls)
        """The class is not torch's."""
        self.optimizer: Optimizer | None = None
        self.undone = False
        """Whether an exception in the last step left weights and state as they were."""
        self._inner: dict[int, Tensor] = {}  # by index: what is stepped
        # of copies on the host, by index: what is stepped, weights as the model has them, and gradients; 1-D
        self._flats: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._fetched: dict[int, tuple[Tensor | None, Tensor | None]] = {}  # gradients before and in a call

    def add(self, members: Sequence[ParamView]) -> None:
        copies = [m for m in members if self._on_host and m.device.owns(local_of(m.parameter).detach())]
        self.memory.add(copies)
        for member in members:
            self.members[member.index] = member
            inner, dtype = member.parameter, self.options.master_dtype(member)
            if member.index in self.memory.members:
                flats = self._flats[member.index] = self.memory.flats_on_host(member)
                # `.data` has a version counter of its own
                inner = member.shaped(flats[0]).data.copy_(local_of(inner).detach())
            elif dtype != member.dtype:
                inner = inner.detach().to(dtype, copy=True)
            if inner is not member.parameter:  # a class may ask for all of these
                inner = nn.Parameter(inner, member.parameter.requires_grad)
                said = vars(member.parameter).items()
                vars(inner).update({k: v for k, v in said if k[0] != "_" and k != "decoupled_grad"})
            self._inner[member.index] = inner

    def _lies_flat(self, member: ParamView) -> bool:
        """Return True if both sides lie where they lay when the step began: bytes can be copied."""
        if member.index not in self._flats:
            return False
        inner, local = self._inner[member.index], local_of(member.parameter)
        found = inner.data_ptr(), inner.stride(), local.data_ptr(), local.stride()
        flat = self._flats[member.index][0]
        return found == (flat.data_ptr(), member.stride, member.address, member.stride)

    def regroup(self, groups: Sequence[UserGroup]) -> None:
        if self._inner:
            tensors = {index: [inner] for index, inner in self._inner.items()}
            make, whole = self._as_alone, self.options.flat is not None
            self.optimizer = follow_groups(self.optimizer, make, tensors, groups, live=True, whole=whole)

    def _as_alone(self, views: list[Any]) -> Optimizer:
        """The optimizer, made with what the user gave: parameters or groups, with or without names."""
        for view in views:
            if "param_names" in view:  # not of a class of torch's
                view["params"] = list(zip(view["param_names"], view["params"], strict=True))
        return self._new_optimizer(views[0]["params"] if self.options.flat else views)

    def master(self, member: ParamView) -> Tensor:
        return self._inner[member.index]

    @torch.no_grad()
    def fetch(self, gradients: Mapping[int, Tensor]) -> None:
        """Give the class's tensors the model's weights and these gradients, by parameter; one that is missing
        is None. Blocks the host for what is on a device. Raises OffloadError for one with a graph. Order:
        [Order: whole out]."""
        for index in gradients.keys() & self._flats.keys() if self.may_write_all else ():
            if gradients[index].grad_fn is not None:
                raise OffloadError(
                    f"the gradient of {self.members[index]} has a graph (create_graph=True), and "
                    f"{type(self.optimizer).__name__} would be given a copy on the host, which has none; use "
                    "offload_fraction=0"
                )
        pairs: list[CopyPair] = []
        masters: list[ParamView] = []
        for index, inner in self._inner.items():
            member, before, gradient = self.members[index], inner.grad, gradients.get(index)
            flats = self._flats[index] if self._lies_flat(member) else None
            if inner is not member.parameter and (gradient is not None or self.may_write_all):
                inner.requires_grad_(member.parameter.requires_grad)
                if flats is None:
                    self.refresh_master(member)
                else:
                    pairs.append((flats[1], member.flat))
                    masters += [member] if self.has_master(member) else []
            if gradient is not None and gradient.layout is torch.strided:
                if flats is not None:
                    pairs.append((flats[2], member.flat_gradient(gradient).to(inner.dtype)))
                    gradient = member.shaped(flats[2])
                else:
                    here = gradient if local_of(inner) is not inner else local_of(gradient)
                    gradient = laid_like(inner, here.to(inner.device, inner.dtype))
            self._fetched[index] = before, gradient
            if before is not gradient:
                inner.grad = gradient
        if pairs:
            device, pairs = self._device, as_bytes(pairs)
            for _, source in pairs:
                device.note_write(device.compute, source)
            device.wait(device.d2h, device.record(device.compute), "whole out")
            device.synchronize(self._copies.send(pairs))
            for to, _ in pairs:
                device.note_read(device.host, to)
        for member in masters:
            update_master(*self._flats[member.index][:2])
        for index in self._flats if self.may_write_all else ():
            before, gradient = self._fetched[index]
            if gradient is not None:  # the class may keep it, and its memory has the next one
                self._inner[index].grad = kept = gradient.clone()
                self._fetched[index] = before, kept

    @torch.no_grad()
    def give_back(self) -> None:
        """Give the model the weights, and the gradients that the class may have written. Order:
        [Order: whole back]."""
        pairs: list[CopyPair] = []
        for index, (before, gradient) in list(self._fetched.items()):
            member, inner = self.members[index], self._inner[index]
            found, parameter = inner.grad, member.parameter
            if inner is not parameter and (self.may_write_all or gradient is not None):
                if self.may_write_all:
                    member.write_gradient(found)
                if self._lies_flat(member):
                    stepped, weights, _ = self._flats[index]
                    if self.has_master(member):
                        weights.copy_(stepped)
                    pairs.append((member.flat, weights))
                    count_write([member] if gradient is not None else [])
                else:  # of whom has no gradient autograd need not know
                    to = local_of(parameter) if gradient is not None else local_of(parameter).data
                    to.copy_(local_of(inner))
            if found is gradient and gradient is not before:
                inner.grad = before
            del self._fetched[index]
        if pairs:
            device, pairs = self._device, as_bytes(pairs)
            for _, source in pairs:
                device.note_write(device.host, source)
            device.wait(device.h2d, device.record(device.compute), "whole back")
            device.wait(device.compute, self._copies.fetch(pairs), "whole back")
            for to, _ in pairs:
                device.note_read(device.compute, to)

    def step(self, *given: Any, atomic: bool, not_ours: Sequence[BaseException] = (), **named: Any) -> Any:
        """Step, and return what the class's step returns; after `fetch`. given, named: its arguments. atomic:
        an error in it leaves weights and state as they were. not_ours: what the closure has raised."""
        assert self.optimizer is not None
        self.undone = False
        try:
            with undone_on_error(self.optimizer, not_ours) if atomic else nullcontext():
                found = step_alone(self.optimizer, *given, **named)
        except BaseException:
            self.give_back()
            with torch.no_grad():  # of all: a closure's weights may be in the model
                for index, inner in self._inner.items() if atomic and self.may_write_all else ():
                    local_of(self.members[index].parameter).data.copy_(local_of(inner))
            self.undone = atomic
            raise
        self.give_back()
        return found

    def reorder(self, member: ParamView, before: tuple[int, ...]) -> None:
        """Lay a tensor that is no parameter itself, and its state, as the weights lie now. Where the
        parameter itself is stepped its class decides what becomes of the state."""
        inner = self._inner[member.index]
        if inner is not member.parameter:
            assert self.optimizer is not None
            inner.data = laid_like(local_of(member.parameter), inner.data)
            lay_like(inner, self.optimizer.state.get(inner, {}))

    def inside(self) -> list[tuple[Optimizer, list[tuple[ParamView, Tensor]]]]:
        if self.optimizer is None:
            return []
        return [(self.optimizer, [(self.members[index], inner) for index, inner in self._inner.items()])]

    def forget(self, member: ParamView) -> None:
        super().forget(member)
        inner = self._inner.pop(member.index)
        entry = self.optimizer.state.pop(inner, {}) if self.optimizer is not None else {}
        if (flats := self._flats.pop(member.index, None)) is not None:
            for value in entry.values():  # the entry is the user's, and may have taken the weights' memory
                is_plain = isinstance(value, Tensor) and not parts_of(value)
                if is_plain and value.data_ptr() == flats[0].data_ptr():
                    value.set_(value.clone())
            self.memory.forget(member)
