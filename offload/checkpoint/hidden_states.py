"""Calls of a block whose intermediates are recomputed, and of whose inputs one waits on the host.

    call = RecomputedCall(manager, block, args, kwargs)     # in a forward pre-hook of the block
    call.begin()
    ...                                                     # its forward
    call.end(output)                                        # in its forward hook

One invariant: gradients, random numbers, buffers and attributes are those of a block that runs once. Nothing
wraps the block: its hooks begin and end a `Region` (region.py), whose recompute calls the block.

The region does what torch's non-reentrant checkpoint does. What is added here: tensors given by keyword are
saved like those given by position; what the block's modules are bound to is as in the forward (members.py);
parameters must be, and in some calls what is recomputed is compared with what it saved (net.py); one argument
leaves, in a group of its own that the call commits as soon as autograd has packed it, so its copy runs beside
the block; and a half of a split backward has one recompute (`SplitCall`), or both have one.

torch's W runs a backward for each group of parameters, so a checkpoint recomputes a block once for each:
seven times for a block of two norms and five linears with one recompute in its I. Each of them leaves on the
device what it does not read, until the whole W has ended. Here a half unpacks all saves of a call with its
first read. The other reads of that half find them; and what the W will read the I may leave for it. What a
read gives is what the region gave, from one recompute or from another. A whole backward passes through.

A graph task gets each save once from one recompute. So nothing that a task may still read is let go before it
has ended: in a W that is when another task reads another call.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import _StopRecomputationError

from offload.checkpoint.kept import looks_of, storages_of
from offload.checkpoint.members import (
    MembersBefore,
    inner_modules,
    is_cache,
    is_sharded,
    is_trained,
    refuse_cache,
    refuse_nested,
    refuse_written,
)
from offload.checkpoint.net import Sample, Watch
from offload.checkpoint.region import Contexts, Region
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.saved.filters import waited
from offload.saved.handles import is_read

_graph_task = torch._C._current_graph_task_id


class Reads(Protocol):
    """The groups' knowledge of the backward of one call. Callers hold no lock."""

    @property
    def half(self) -> str:
        """ "I" or "W" while that half of the chunk's backward runs, else empty."""

    def begin(self, call: SplitCall, num_saves: int) -> Collection[int]:
        """A half reads the call for the first time. Returns the numbers of the saves that an I is to
        leave."""

    def leave(self, nbytes: int) -> None:
        """An I leaves so many bytes for its W."""

    def weight_half_read(
        self, saves: Collection[int], num_saves: int, nbytes: int, passed_bytes: int
    ) -> None:
        """A W is done with the call. nbytes: of what it read, without parameters. passed_bytes: of these,
        what the I did not read."""


class _Save:
    """The object that autograd keeps of one save. held: what the checkpoint gave for it."""

    __slots__ = ("__weakref__", "held", "number")

    def __init__(self, number: int, held: Any) -> None:
        self.number = number
        self.held = held


class SplitCall:
    """One call of `module`, inside a `Region`."""

    def __init__(self, reads: Reads, module: torch.nn.Module) -> None:
        self._reads = reads
        self._module = weakref.ref(module)
        self._saves: list[weakref.ref[_Save]] = []
        self._unpack: Any = None
        self._half = ""
        self._task = -1  # that read last
        self._made: dict[int, torch.Tensor] = {}  # computed again, by number
        self._sizes: dict[int, dict[int, int]] = {}  # of those, bytes by storage; none of parameters
        self._wanted: Collection[int] = ()  # what the I that runs leaves
        self._read: set[int] = set()  # in the half that runs
        self._passed: set[int] = set()  # of these, what the I asks for and does not read
        self._passed_bytes = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """To enter inside the checkpoint's pair, which has to be the innermost one, and to leave before
        it."""
        pack, self._unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        saves = self._saves

        @functools.wraps(pack)  # still the checkpoint's, to whoever looks at the innermost pair
        def packed(tensor: torch.Tensor) -> _Save:
            save = _Save(len(saves), pack(tensor))
            saves.append(weakref.ref(save))
            return save

        return torch.autograd.graph.saved_tensors_hooks(packed, self._read_save)

    def let_go(self, *, ended: bool) -> bool:
        """Another call is read, or the half has `ended`: keep only what an I leaves. False if the task under
        way may still read something."""
        if not ended and self._task == _graph_task():
            return False
        if self._half == "W":
            self._made.clear()
            nbytes = self._nbytes(self._read)
            self._reads.weight_half_read(
                frozenset(self._read), len(self._saves), nbytes, min(nbytes, self._passed_bytes)
            )
        else:
            self._passed_bytes = self._nbytes(self._read) - self._nbytes(self._read - self._passed)
            self._made = {number: self._made[number] for number in self._wanted if number in self._made}
        self._half, self._wanted, self._task = "", (), -1
        return True

    def _read_save(self, save: _Save) -> Any:
        half = self._reads.half
        if not half:
            return self._unpack(save.held)
        if half == "W" and not is_read(save, SplitCall):
            # a weight, most likely: an I that left an alias of it would keep a streamed block on the device
            self._made.pop(save.number, None)
            shape, dtype, _ = save.held.looks
            return torch.empty(shape, dtype=dtype, device="meta")
        if half != self._half:
            self._wanted = self._reads.begin(self, len(self._saves))
            self._half = half
            self._read, self._passed = set(), set()
        self._task = _graph_task()
        if save.number not in self._made:
            self._compute_again()
        self._read.add(save.number)
        if half == "I" and not is_read(save, SplitCall):
            self._passed.add(save.number)
        # each is read once in a half, and goes as it does in torch's
        return self._made[save.number] if save.number in self._wanted else self._made.pop(save.number)

    def _compute_again(self) -> None:
        """Unpack whatever a graph still holds: the checkpoint computes it with the first. What is there
        already is the same."""
        module = self._module()
        parameters = [] if module is None else list(module.parameters())
        known = {storage._cdata for storage in storages_of(parameters)}
        for number, reference in enumerate(self._saves):
            save = reference()
            if save is not None and number not in self._made:
                made = self._made[number] = self._unpack(save.held)
                self._sizes[number] = {
                    storage._cdata: storage.nbytes()
                    for storage in storages_of(made)
                    if storage._cdata not in known
                }
        if self._wanted:
            self._reads.leave(self._nbytes(self._wanted))

    def _nbytes(self, numbers: Collection[int]) -> int:
        """Bytes of the storages that these saves are of, without parameters."""
        found: dict[int, int] = {}
        for number in numbers:
            found |= self._sizes.get(number, {})
        return sum(found.values())


HIDDEN_STATES = "hidden_states"
"""The group of the inputs."""

_FLAT = frozenset([torch.Tensor, type(None), bool, int, float, str])
"""Types of arguments that have no parts."""

BeforeAgain = Callable[[], Callable[[], None] | None]


class InputGroup(Protocol):
    """The group that the inputs of one call belong to."""

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
    """Predicate: the call of `module` that begins now is a recompute, which its hooks let pass. Ask once a
    call, first: the next call of it is none."""
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
        """Recompute the block, on the tensors of its first call."""
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
