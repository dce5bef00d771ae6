"""Calls of a block whose intermediates are recomputed, and of whose inputs one waits on the host.

    call = RecomputedCall(manager, block, args, kwargs)     # in a forward pre-hook of the block
    call.begin()
    ...                                                     # its forward
    call.end(output)                                        # in its forward hook

One invariant: gradients, random numbers, buffers and attributes are those of a block that runs once.
Nothing wraps the block: its hooks begin and end a `Region` (region.py), whose recompute calls it again.

The region does what torch's non-reentrant checkpoint does. What is added here: tensors given by keyword are
saved like those given by position; what the block's modules are bound to is as in the forward (members.py);
parameters must be, and in some calls what is recomputed is compared with what it saved (net.py); and one
argument leaves, in a group of its own that the call commits as soon as autograd has packed it, so its copy
runs beside the block.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError

from offload.checkpoint.arguments import is_cache, refuse_cache, refuse_nested, refuse_written
from offload.checkpoint.halves import Reads, SplitCall
from offload.checkpoint.members import MembersBefore, inner_modules, is_sharded, is_trained
from offload.checkpoint.net import Sample, Watch, looks_of
from offload.checkpoint.region import Contexts, Region
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.saved.filters import waited

HIDDEN_STATES = "hidden_states"
"""The group of the inputs."""

_FLAT = frozenset([torch.Tensor, type(None), bool, int, float, str])
"""Types of arguments that have no parts."""

BeforeAgain = Callable[[], Callable[[], None] | None]


class InputGroup(Protocol):
    """Whose the inputs of one call are."""

    def open(self, arguments: Sequence[torch.Tensor]) -> None: ...

    def send(self) -> None: ...

    def reads(self) -> Reads | None: ...

    def close(self, output: Any) -> None: ...


class Manager(Protocol):
    """The groups' manager, as far as a call asks it."""

    engine: OffloadEngine

    def input_group(self, name: str, *, alone: bool, leaves: bool, cost: Any) -> InputGroup: ...


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


class RecomputedCall:
    """One call of `module`. `begin` before its forward, then `end`, or `abort` after an exception, in the
    same thread; calls inside it are ended first.

    args, kwargs: of the call, as its forward gets them; tensors inside tuples, lists and dicts are found, in
        other objects they stay with the graph. context_fn: as of torch's checkpoint; `contexts_for` makes one
        that keeps some outputs.
    watch, name: of the model, and of the block in it; without, the call is a first one by itself.
    may_stay: a plan may keep the input on the device; None where outputs are kept. moves: False for an input
        that always stays. before_again: called at the begin of each recompute; returns what is called at
        its end, if anything is. cost: of the block, for the plan.
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
        moves: bool = True,
        before_again: BeforeAgain | None = None,
        cost: Any = None,
    ) -> None:
        self._manager = manager
        self._alone = context_fn is None if may_stay is None else not may_stay
        self._moves = moves
        self._before_again = before_again
        self._cost = cost
        self._module = module
        self._arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._context_fn = context_fn
        self._watch = Watch() if watch is None else watch
        self._whose = name or f"a {type(module).__name__}", type(module)
        self._region: Region | None = None
        self._group: InputGroup | None = None
        self._given: list[tuple[torch.Tensor, int]] = []  # with their versions
        self._members: MembersBefore | None = None
        self._sample: Sample | None = None
        self._split: torch.autograd.graph.saved_tensors_hooks | None = None
        self._interrupted = False

    def begin(self) -> None:
        """The forward begins. Blocks the host: once, as MembersBefore. Raises CaptureError in a CUDA graph
        captured outside of `capturing()`, OffloadError for an argument that is a cache of keys and values;
        the call is then as without hooks."""
        arguments, self._arguments = self._arguments, None
        assert arguments is not None, "a RecomputedCall begins once"
        if not torch.is_grad_enabled():
            return
        tensors = self._take_apart(*arguments)
        modules = inner_modules(self._module)
        if not any(tensor.requires_grad for tensor in tensors) and not is_trained(modules):
            return
        if any(map(is_cache, self._leaves)):
            refuse_cache(self._module, self._leaves)
        refuse_nested(self._module, tensors)
        group = self._manager.input_group(
            HIDDEN_STATES, alone=self._alone, leaves=self._moves, cost=self._cost
        )
        self._members = MembersBefore(modules)
        self._sample = self._watch.sample(self._manager.engine, *self._whose)
        failed = partial(self._watch.failed, *self._whose)
        region = Region(self._again, self._context_fn, self._sample, failed)
        try:
            group.open(tensors)
            region.begin(tensors)
        except BaseException:
            group.send()
            group.close(None)
            raise
        self._region, self._group = region, group
        try:
            group.send()
            reads = group.reads()
            if reads is not None and not is_sharded(modules):
                split = SplitCall(reads, self._module).hooks()
                split.__enter__()
                self._split = split
        except BaseException:
            self._close(None, *sys.exc_info())
            raise
        self._given = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def end(self, output: Any) -> None:
        """The forward is over. output: what it returned, None if it raised after all. Raises OffloadError if
        the forward wrote to an argument; the hooks are gone then too."""
        if self._region is not None:
            given, self._given = self._given, []
            self._close(output)
            assert self._members is not None
            self._members.learn()
            refuse_written(self._module, given)

    def abort(self, *, interrupted: bool = False) -> None:
        """The forward raised. interrupted: a while ago, and nobody was told: what autograd has saved since,
        wherever, cannot be read."""
        self._given = []
        self._interrupted = interrupted
        if self._region is not None:
            self._close(None, *sys.exc_info())

    def _close(self, output: Any, *exception: Any) -> None:
        region, self._region = self._region, None  # which holds this call
        group, self._group = self._group, None
        split, self._split = self._split, None
        assert region is not None
        assert group is not None
        if split is not None:
            split.__exit__()
        try:
            region.end(*exception)
        finally:
            group.close(output)

    def _take_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, each once however often it is given. Nothing here holds them: autograd
        does."""
        # how to put the arguments together again: of each leaf, its position among the tensors, None for one
        # that is no tensor; spec: None where the leaves are the arguments, the last ones by these keywords
        self._places: list[int | None] = []
        self._keywords = tuple(kwargs)
        self._spec: TreeSpec | None = None
        leaves = [*args, *kwargs.values()]
        if not _FLAT.issuperset(map(type, leaves)):
            leaves, self._spec = tree_flatten((args, kwargs), is_leaf=is_cache)
        tensors: list[torch.Tensor] = []
        known: dict[int, int] = {}
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor) or leaf.is_inference():  # autograd would not save that
                self._places.append(None)
                continue
            if id(leaf) not in known:
                known[id(leaf)] = len(tensors)
                tensors.append(waited(leaf))
            self._places.append(known[id(leaf)])
            leaves[number] = None
        self._leaves = leaves
        return tensors

    def _again(self, *tensors: torch.Tensor) -> None:
        """Call the block again, on the tensors of its first call."""
        if self._interrupted:
            raise OffloadError(
                f"the forward of a {type(self._module).__name__} that is recomputed was interrupted "
                "(KeyboardInterrupt), and what autograd saved from then on to the next call of a module "
                "with hooks cannot be read: run the forward after the interrupt again"
            )
        after = None if self._before_again is None else self._before_again()
        places = zip(self._leaves, self._places, strict=True)
        leaves = _cast_as_fsdp(self._module, [leaf if at is None else tensors[at] for leaf, at in places])
        first = len(leaves) - len(self._keywords)  # by keyword
        args, kwargs = leaves[:first], dict(zip(self._keywords, leaves[first:], strict=False))
        if self._spec is not None:
            args, kwargs = tree_unflatten(leaves, self._spec)
        assert self._members is not None
        if (written := self._members.written()) is not None:
            what = f"parameter {looks_of(written)} was written in place after the forward"
            self._watch.differs(*self._whose, f"{what}, as by an optimizer's step")
        self._watch.recomputes += 1
        with self._members.in_place():
            _due.module = self._module
            try:
                self._module(*args, **kwargs)
            except Exception as error:
                if not isinstance(error, _StopRecomputationError):
                    after = None  # it did not come to its end
                raise
            finally:
                _due.module = None
                if after is not None:
                    after()


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
