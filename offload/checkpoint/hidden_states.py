"""Calls of a block whose intermediates are recomputed, and of whose inputs one waits on the host.

    call = RecomputedCall(manager, block, args, kwargs)     # in a forward pre-hook of the block
    call.begin()
    ...                                                     # its forward
    call.end(output)                                        # in its forward hook

One invariant: gradients, random numbers, buffers and plain attributes are those of a block that runs once.
Nothing wraps the block: its hooks begin and end a `Region` (region.py), whose recompute calls it again.

The region does what torch's non-reentrant checkpoint does. What is added here: tensors given by keyword are
saved like those given by position; buffers (buffers.py) and members (members.py) are as in the forward, and
plain attributes as the forward left them;
parameters must be as in the forward, and in some calls what is recomputed is compared with what it saved
(net.py); and one argument leaves, in a group of its own that the call commits as soon as
autograd has packed it, so its copy runs beside the block.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError

from offload.checkpoint.arguments import TensorsBefore, is_cache, refuse_cache
from offload.checkpoint.buffers import BuffersBefore
from offload.checkpoint.halves import Reads, SplitCall
from offload.checkpoint.members import MembersBefore, inner_modules, is_trained
from offload.checkpoint.net import Watch, WatchedCall, is_sharded
from offload.checkpoint.region import Contexts, Region
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.saved.filters import waited

__all__ = ["HIDDEN_STATES", "BeforeAgain", "InputGroup", "Manager", "RecomputedCall", "is_recompute"]

HIDDEN_STATES = "hidden_states"
"""The group of the inputs."""

BeforeAgain = Callable[[], Callable[[float], None] | None]


class InputGroup(Protocol):
    """Whose the inputs of one call are."""

    def open(self, arguments: Sequence[torch.Tensor]) -> None: ...

    def send(self) -> None: ...

    def reads(self) -> Reads | None: ...

    def close(self, output: Any) -> None: ...


class Manager(Protocol):
    """The groups' manager, as far as a call asks it."""

    engine: OffloadEngine

    def input_group(self, name: str, *, alone: bool = True, cost: Any = None) -> InputGroup: ...


class _Due(threading.local):
    """The module whose next call in this thread is a recompute."""

    module: nn.Module | None = None


_due = _Due()


def is_recompute(module: nn.Module) -> bool:
    """Whether the call of `module` that begins now is a recompute, which its hooks let pass. Ask once a call,
    first: the next call of it is none."""
    if _due.module is not module:
        return False
    _due.module = None
    return True


def _are_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether there is nothing to look into, as in most calls of most blocks."""
    return not kwargs and all(type(value) is torch.Tensor for value in args)


class RecomputedCall:
    """One call of `module`. `begin` before its forward, then `end`, or `abort` after an exception, in the
    same thread; calls inside it are ended first.

    args, kwargs: of the call, as its forward gets them; tensors inside tuples, lists and dicts are found, in
        other objects they stay with the graph. context_fn: as of torch's checkpoint; `contexts_for` makes one
        that keeps some outputs.
    watch, name: of the model, and of the block in it; without, the call is a first one by itself.
    may_stay: a plan may keep the input on the device; None where outputs are kept. before_again: called at
        the begin of each recompute; returns what is called at its end, if anything is, with the host
        seconds that comparing its saves took. cost: of the block, for the plan.
    compared_s: host seconds that comparing took so far. 0 for most calls.
    Without gradients, or where neither a tensor argument nor a parameter requires one, the call is as without
    hooks: there is nothing to recompute for.
    The one tensor that leaves is the first argument that may, by position and then by keyword, in a group
    called `hidden_states` of the current chunk. While no chunk is current the call is recomputed all the
    same, and nothing leaves, which is said once. In the backward the recompute runs hooks of the module other
    than the caller's again.
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        context_fn: Callable[[], Contexts] | None = None,
        *,
        watch: Watch | None = None,
        name: str = "",
        may_stay: bool | None = None,
        before_again: BeforeAgain | None = None,
        cost: Any = None,
    ) -> None:
        self._manager = manager
        self._alone = context_fn is None if may_stay is None else not may_stay
        self._before_again = before_again
        self._cost = cost
        self._module = module
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._context_fn = context_fn
        self._watch = Watch() if watch is None else watch
        self._name = name or f"a {type(module).__name__}"
        self._region: Region | None = None
        self._group: InputGroup | None = None
        self._buffers: BuffersBefore | None = None
        self._given: TensorsBefore | None = None
        self._again: _Again | None = None
        self._split: torch.autograd.graph.saved_tensors_hooks | None = None
        self.compared_s = 0.0

    def begin(self) -> None:
        """The forward begins. Blocks the host: once, as BuffersBefore. Raises CaptureError in a CUDA graph
        captured outside of `capturing()`, OffloadError for an argument that is a cache of keys and values;
        the call is then as without hooks."""
        arguments, self._arguments = self._arguments, None
        assert arguments is not None, "a RecomputedCall begins once"
        if not torch.is_grad_enabled():
            return
        tensors, again = _taken_apart(self._module, *arguments)
        modules = inner_modules(self._module)
        if not any(tensor.requires_grad for tensor in tensors) and not is_trained(modules):
            return
        if any(leaf is not None for leaf in again.leaves):
            refuse_cache(self._module, again.leaves)
        again.before = self._before_again
        group = self._manager.input_group(HIDDEN_STATES, alone=self._alone, cost=self._cost)
        buffers = again.buffers = BuffersBefore(self._module, modules)
        again.members = MembersBefore(modules)
        watched = again.watched = WatchedCall(self._watch, self._manager.engine, self._name, modules)
        region = Region(again, self._context_fn, watched)
        try:
            group.open(tensors)
            region.begin(tensors)
        except BaseException:
            group.send()
            group.close(None)
            raise
        group.send()
        reads = group.reads()
        if reads is not None and not is_sharded(modules):
            self._split = SplitCall(reads, self._module).hooks()
            self._split.__enter__()
        self._region, self._group, self._buffers, self._again = region, group, buffers, again
        self._given = TensorsBefore(self._module, tensors)

    def end(self, output: Any) -> None:
        """The forward is over. output: what it returned, None if it raised after all. Raises OffloadError if
        the forward wrote to an argument; the hooks are gone then too."""
        region, self._region = self._region, None
        again, self._again = self._again, None
        if region is None:
            return
        assert again is not None
        assert self._buffers is not None
        self._leave_split()
        try:
            region.end()
        finally:
            self._leave(output)
        self._buffers.learn()
        assert again.watched is not None
        again.watched.ends()
        self.compared_s = again.watched.host_s
        given, self._given = self._given, None
        assert given is not None
        given.refuse_written()

    def abort(self, *, interrupted: bool = False) -> None:
        """The forward raised. interrupted: a while ago, and nobody was told: what autograd has saved since,
        wherever, cannot be read."""
        region, self._region = self._region, None
        again, self._again = self._again, None
        self._given = None
        if again is not None:
            again.interrupted = interrupted
        if region is not None:
            self._leave_split()
            try:
                region.end(*sys.exc_info())
            finally:
                self._leave(None)

    def _leave_split(self) -> None:
        split, self._split = self._split, None
        if split is not None:
            split.__exit__()

    def _leave(self, output: Any) -> None:
        group, self._group = self._group, None
        assert group is not None
        group.close(output)


class _Again:
    """Calls a block again, on the tensors of its first call. It holds none of them: autograd does.

    places: of each leaf of the arguments, its position among the tensors, None for one that is no tensor.
    spec: None where the leaves are the arguments by position.
    """

    __slots__ = (
        "_module",
        "_places",
        "_spec",
        "before",
        "buffers",
        "interrupted",
        "leaves",
        "members",
        "watched",
    )

    def __init__(
        self, module: nn.Module, leaves: list[Any], places: list[int | None], spec: TreeSpec | None
    ) -> None:
        self._module = module
        self.leaves = leaves
        self._places = places
        self._spec = spec
        self.buffers: BuffersBefore | None = None
        self.members: MembersBefore | None = None
        self.watched: WatchedCall | None = None
        self.before: BeforeAgain | None = None
        self.interrupted = False

    def __call__(self, *tensors: torch.Tensor) -> None:
        if self.interrupted:
            raise OffloadError(
                f"the forward of a {type(self._module).__name__} that is recomputed was interrupted "
                "(KeyboardInterrupt), and what autograd saved from then on to the next call of its model "
                "cannot be read: run the forward after the interrupt again"
            )
        leaves = [
            leaf if place is None else tensors[place]
            for leaf, place in zip(self.leaves, self._places, strict=True)
        ]
        assert self.watched is not None
        compared_s = self.watched.host_s
        after = None if self.before is None else self.before()
        leaves = _cast_as_fsdp(self._module, leaves)
        args, kwargs = (leaves, {}) if self._spec is None else tree_unflatten(leaves, self._spec)
        assert self.members is not None
        assert self.buffers is not None
        with (
            self.watched.in_place(),
            self.members.in_place(),
            _attributes_left(self._module),
            self.buffers.in_place(),
        ):
            _due.module = self._module
            try:
                self._module(*args, **kwargs)
            except Exception as error:
                if not isinstance(error, _StopRecomputationError):
                    after = None  # it did not come to its end
                    error.add_note(
                        f"raised while a {type(self._module).__name__} was recomputed for its backward: what "
                        "its forward read may have changed since; leave the block out with no_recompute="
                    )
                raise
            finally:
                _due.module = None
                if after is not None:
                    after(self.watched.host_s - compared_s)


@contextmanager
def _attributes_left(module: nn.Module) -> Iterator[None]:
    """Plain attributes that are bound inside are bound at the end to what they were before."""
    found = [(owner, vars(owner).copy()) for owner in inner_modules(module)]
    try:
        yield
    finally:
        for owner, values in found:
            for name in vars(owner).keys() - values.keys():
                del vars(owner)[name]
            vars(owner).update(values)


def _cast_as_fsdp(module: nn.Module, leaves: list[Any]) -> list[Any]:
    """The leaves with the dtype that FSDP2 gives the inputs of a forward. Before torch 2.13 its hook does not
    do it in a recompute, and the tensors were saved before that hook ran."""
    state = getattr(type(module), "_get_fsdp_state", None)  # of a module itself a missing one is dear to ask
    policy = None if state is None else getattr(state(module), "_mp_policy", None)
    if policy is None or policy.param_dtype is None or not policy.cast_forward_inputs:
        return leaves
    return [
        leaf.to(policy.param_dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]


def _taken_apart(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], _Again]:
    """The tensors of a call, each once however often it is given, and what calls the module on them again."""
    leaves, spec = (
        (list(args), None) if _are_tensors(args, kwargs) else tree_flatten((args, kwargs), is_leaf=is_cache)
    )
    tensors: list[torch.Tensor] = []
    known: dict[int, int] = {}
    places: list[int | None] = []
    for number, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor) or leaf.is_inference():  # autograd would not save that
            places.append(None)
            continue
        if id(leaf) not in known:
            known[id(leaf)] = len(tensors)
            tensors.append(waited(leaf))
        places.append(known[id(leaf)])
        leaves[number] = None
    return tensors, _Again(module, leaves, places, spec)
