"""One call of an operator whose outputs a checkpointed region keeps: how it is remembered, and given again to
the recompute; and the generators of random numbers that it draws from.

One invariant: the recompute goes on as if the operator had run. A call is given again only to a call on
inputs of the same make, and random numbers after it are drawn from the state that it would have left.

Outputs are aliases: without grad_fn, so that what is kept never holds the graph that holds it; with the
version counter of the output itself, so that a change in place is found out by the read. Some operators
return the bytes of their input under a counter of their own; the call is told of those.

Generators that others share are torch's of a device, which a recompute puts back in every call
(region.py), and those of Python's and numpy's functions: a forward that moves one of these is not
recomputed from the next call on (net.py). States are equal as long as the generators are. To read Python's or
numpy's takes tens of microseconds.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from offload.errors import OffloadError
from offload.saved.filters import is_plain, is_wrapper
from offload.saved.handles import Handle, ModifiedError, Passed, modified
from offload.saved.hooks import WrapperHandle, wrapper_probe
from offload.transfer.block import DeviceBlock


class SharedGenerator(NamedTuple):
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]

    def get_state(self) -> bytes:
        return pickle.dumps(self.read())

    def set_state(self, state: bytes) -> None:
        self.write(pickle.loads(state))


def shared_generators() -> list[SharedGenerator]:
    found = [SharedGenerator("Python's random", random.getstate, random.setstate)]
    numpy: Any = getattr(sys.modules.get("numpy"), "random", None)
    if numpy is not None:
        found.append(SharedGenerator("numpy.random", partial(numpy.get_state, legacy=False), numpy.set_state))
    return found


class _ByModule:
    """The generator of a device whose module in torch has no list of them."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.get_state = partial(module.get_rng_state, device)
        self.set_state = partial(module.set_rng_state, device=device)


def generator_of(device: torch.device) -> Any:
    """torch's default generator of a device, by its `get_state` and `set_state`."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generators = getattr(module, "default_generators", ())
    return generators[device.index] if generators and device.index is not None else _ByModule(module, device)


Operator = OpOverload | HigherOrderOperator
Make = tuple[tuple[torch.Size, torch.dtype, bool], ...]
"""A call's tensor inputs: shape, dtype, and whether it is a parameter (what autocast casts once or twice)."""

_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd")

UNTRACKED_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)
"""Operators that return bytes of their first input, with version counters of their own: a linear layer
without a bias on three dimensions returns such a view of its matrix product."""


# -- operators -----------------------------------------------------------------------------------------------
def check_keepable(operator: object) -> Operator:
    """The operator. Raises ValueError for what is none, and for one that writes to its inputs or returns a
    view of one."""
    if isinstance(operator, OpOverloadPacket):
        raise ValueError(
            f"keep_ops names {operator}, which is a family of operators; name one of it, such as "
            f"{operator}.default"
        )
    if isinstance(operator, HigherOrderOperator):
        return operator
    if not isinstance(operator, OpOverload):
        raise ValueError(
            f"keep_ops holds {operator!r}, a {type(operator).__name__}; must be an operator such as "
            "torch.ops.aten.mm.default"
        )
    if writes_inputs(operator):
        raise ValueError(
            f"{operator} writes to its inputs, and a recompute that skipped it would not; take it off "
            "keep_ops"
        )
    if any(result.alias_info is not None for result in operator._schema.returns):
        raise ValueError(
            f"{operator} returns a view of its input: it has no bytes to keep, and recomputing it is free; "
            "take it off keep_ops"
        )
    return operator


def is_collective(operator: Any) -> bool:
    """Predicate: the operator communicates, and returns what it has received."""
    return isinstance(operator, OpOverload) and operator.namespace in _COLLECTIVES


def writes_inputs(operator: OpOverload) -> bool:
    """Predicate: the operator writes to its arguments. The schema of a batch norm does not say that it writes
    its statistics."""
    return operator._schema.is_mutable or any(
        argument.name == "running_mean" for argument in operator._schema.arguments
    )


def sharing_versions() -> Any:
    """Inside a dispatch mode `detach` gives an alias a version counter of its own; inside this context it
    shares the tensor's."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    with sharing_versions():
        return tensor.detach()


def version_probe(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor that counts versions with `tensor` and holds none of its bytes; None where there is none."""
    if not is_plain(tensor):
        with sharing_versions():
            return wrapper_probe(tensor) if is_wrapper(tensor) else None
    if tensor.is_inference() or tensor.layout is not torch.strided or tensor.is_quantized:
        return None
    probe = alias_of(tensor)
    blank = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    probe.data = torch.nested.nested_tensor([blank]) if tensor.is_nested else blank
    return probe


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors in lists and tuples."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def looks_of(tensor: torch.Tensor) -> str:
    """Type and shape, for messages."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def make_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Make:
    found = tensors_in((*args, *kwargs.values()))
    return tuple((tensor.size(), tensor.dtype, isinstance(tensor, torch.nn.Parameter)) for tensor in found)


def plain_parts(values: Any) -> Iterator[torch.Tensor]:
    """The tensors with storages of their own in a call's arguments or outputs: of a wrapper, those that it is
    made of."""
    for tensor in tensors_in((values,)):
        if is_plain(tensor) or not is_wrapper(tensor):
            if tensor.layout is torch.strided and not isinstance(tensor, FakeTensor):
                yield tensor
        else:
            names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            yield from plain_parts([getattr(tensor, name) for name in names])


def storages_of(values: Any) -> Iterator[torch.UntypedStorage]:
    """Storages of the plain parts of these values."""
    for part in plain_parts(values):
        with torch._C.DisableTorchFunctionSubclass():  # a weight may be watched
            storage = part.untyped_storage()
        yield storage


# -- random numbers ------------------------------------------------------------------------------------------
class RandomStep(NamedTuple):
    """Change that a call made to the random state of its device. Its bytes are on the host: 16 of a GPU's
    generator, 5,056 of the CPU's."""

    device: torch.device
    before: torch.Tensor
    after: torch.Tensor

    @staticmethod
    def start(
        operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[torch.device, torch.Tensor] | None:
        """The device and its state before the call; None for an operator that draws no numbers, or from a
        generator that it was given."""
        seeded = (
            isinstance(operator, HigherOrderOperator) or torch.Tag.nondeterministic_seeded in operator.tags
        )
        if not (seeded or operator.namespace != "aten") or kwargs.get("generator") is not None:
            return None
        device = next(
            (tensor.device for tensor in tensors_in((*args, *kwargs.values()))), kwargs.get("device")
        )
        device = torch.device("cpu") if device is None else torch.device(device)
        state = _random_state(device)
        return None if state is None else (device, state)

    @classmethod
    def end(cls, started: tuple[torch.device, torch.Tensor] | None) -> RandomStep | None:
        """None where the call drew nothing, as attention without dropout."""
        if started is None:
            return None
        device, before = started
        after = _random_state(device)
        return None if after is None or torch.equal(before, after) else cls(device, before, after)

    def skip(self) -> None:
        """Leave the state that the call would have left, unless the state is not the one before the call: the
        checkpoint was told not to preserve it, and the numbers of others are left alone."""
        state = _random_state(self.device)
        if state is not None and torch.equal(state, self.before):
            generator_of(self.device).set_state(self.after)


def _random_state(device: torch.device) -> torch.Tensor | None:
    """None where it cannot be asked for: a device without bytes, a capture."""
    if device.type == "meta" or (
        device.type == "cuda"
        and (not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing())
    ):
        return None
    state: torch.Tensor = generator_of(device).get_state()
    return state


# -- a call --------------------------------------------------------------------------------------------------
class KeptCall:
    """The outputs of one call. They stay on the device, in its keeping, until `leave` gives them to an
    engine.

    make: of what it was called on. copies: the block may write to what the call returns, so copies are kept,
    and copies of them given again.
    """

    __slots__ = ("_leaves", "_make", "_random", "_spec", "_watched", "copies", "is_collective", "name")

    def __init__(
        self,
        operator: Operator,
        number: int,
        make: Make,
        outputs: Any,
        random: RandomStep | None,
        *,
        copies: bool = False,
    ) -> None:
        self.name = f"call {number} of {operator}"
        self.is_collective = is_collective(operator)
        self._make = make
        self._random = random
        self.copies = copies
        self._watched: list[tuple[torch.Tensor, torch.Size, int]] = []
        leaves, self._spec = tree_flatten(outputs)
        mine = torch.clone if copies else alias_of
        self._leaves = [Passed(mine(leaf)) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def leave(self, pack: Callable[[torch.Tensor], Any]) -> list[DeviceBlock]:
        """Give the outputs to `pack`. What was changed in place since stays as it is, for the read to say so.
        Returns the blocks made."""
        with sharing_versions():
            for position, leaf in enumerate(self._leaves):
                if (
                    isinstance(leaf, Passed)
                    and leaf.version is not None
                    and leaf.version == leaf.tensor._version
                ):
                    if self.is_collective:
                        torch.ops._c10d_functional.wait_tensor(leaf.tensor)
                    self._leaves[position] = pack(leaf.tensor)
        return [handle.record.block for leaf in self._leaves for handle in _handles(leaf)]

    def watch(self, views: Any) -> None:
        """views: what an operator of UNTRACKED_VIEWS has made of the outputs."""
        for view in tensors_in((views,)):
            probe = version_probe(view)
            if probe is not None:
                self._watched.append((probe, view.size(), probe._version))

    def is_written(self) -> bool:
        """Predicate: an output was modified in place since."""
        held = [(probe, version) for probe, _, version in self._watched]
        for leaf in self._leaves:
            if isinstance(leaf, Passed) and leaf.version is not None:
                held.append((leaf.tensor, leaf.version))
            elif isinstance(leaf, (Handle, WrapperHandle)) and leaf.probe is not None:
                held.append((leaf.probe, leaf.version))
        return any(probe._version != version for probe, version in held)

    def again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], unpack: Callable[[Any], torch.Tensor]
    ) -> Any:
        """The outputs, on the device, as the call would return them now. May be asked any number of times.
        Blocks the host: never.

        Raises OffloadError for a call on other inputs, or if an output, or an untracked view of one, was
        modified in place after it was kept.
        """
        make = make_of(args, kwargs)
        if make != self._make:
            raise OffloadError(
                f"{self.name} in a checkpointed region had inputs {_said(self._make)} in the forward and "
                f"{_said(make)} in the recompute: the region did not call the same operators in the same "
                "order; make it repeat itself, or take the operator off keep_ops, or the block out with "
                "no_recompute="
            )
        try:
            for probe, size, version in self._watched:
                if probe._version != version:
                    raise modified(probe.dtype, size, probe._version, version)
            with sharing_versions():
                leaves = [_given(leaf, unpack) for leaf in self._leaves]
            if self.copies:
                leaves = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        except ModifiedError as error:
            raise OffloadError(
                f"the output of {self.name} is kept for the recompute of a checkpointed region, and was "
                f"changed in place after the operator ({error}). Make that change out of place, such as "
                "ReLU(inplace=False); or use mode='hidden_states', or keep_ops without the operator, which "
                "recompute it"
            ) from error
        if self._random is not None:
            self._random.skip()
        return tree_unflatten(leaves, self._spec)


def _given(leaf: Any, unpack: Callable[[Any], torch.Tensor]) -> Any:
    # kept for the next read too, and autograd makes what a call returns a part of its graph
    if isinstance(leaf, Passed):
        return leaf.read().detach()
    return unpack(leaf) if isinstance(leaf, (Handle, WrapperHandle)) else leaf


def _handles(packed: Any) -> Iterator[Handle]:
    if isinstance(packed, Handle):
        yield packed
    elif isinstance(packed, WrapperHandle):
        for inner in packed.inner.values():
            yield from _handles(inner)


def _said(make: Make) -> str:
    return ", ".join(f"{str(dtype).removeprefix('torch.')}{list(size)}" for size, dtype, _ in make) or "none"
