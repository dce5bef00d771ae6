"""Selective checkpoints whose kept outputs leave: a context_fn for torch.utils.checkpoint.

    y = checkpoint(block, x, use_reentrant=False, context_fn=selective_contexts({torch.ops.aten.mm.default}))

One invariant: keeping changes time and memory, never a bit. What was kept is what the operator returned, what
was not is recomputed.

# Note: [The life of a kept output] 1. The forward mode sees the operator's call and remembers it, by operator
# and number: KeptCall, still on the device. 2. autograd saves something of the region: the recompute will
# come past the call, so its outputs go to the group that was open when the operator ran, under their names,
# and leave like all of that group. No group was open: one named `group`, for this region. 3. Outputs after
# the last save of the region are let go when it ends: a recompute stops at that save and never reads them.
# One that does not stop (early_stop=False) calls the operator again. 4. Backward: the recompute mode numbers
# the calls from 0 in every pass and gives each kept one again, through the same read as autograd's own.
# A second pass (retain_graph, a split backward) finds everything where the first one did. 5. The last node of
# the region dies, with it the recompute's contexts, their calls, handles and records. No release waits for a
# read.
#
# [Order: operator]
# hazard  RAW: `d2h` copies an output that its operator's lane is still writing; step 2 may come while another
#         compute lane is current.
# edge    the record gets the operator's lane, and [Order: spill] of transfer/engine.py waits for that one.
# alive   the call that waits, then the record and its Transfer.
# proof   tests/property/test_selective_edges.py
#
# [Order: collective]
# hazard  RAW: `d2h` copies what a functional collective is still writing, on a lane of its own.
# edge    step 2 makes the current compute lane wait for the collective, and the record gets that lane.
# alive   as above; the collective's own work holds its output until then.
# proof   tests/integration/test_selective.py, a kept collective
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.checkpoint.decisions import Decisions, Finder, Keep, Place, decides
from offload.checkpoint.kept import (
    UNTRACKED_VIEWS,
    KeptCall,
    Operator,
    RandomStep,
    make_of,
    plain_parts,
    storages_of,
)
from offload.checkpoint.net import Comparison, Sample, net_of, telling
from offload.checkpoint.region import Contexts
from offload.device import Lane
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.saved.hooks import Scope, inside_checkpoint
from offload.transfer.block import DeviceBlock, WeakStorage

__all__ = ["CallMode", "Contexts", "Groups", "KeptGroup", "contexts_for", "is_traced"]


def contexts_for(
    keep_ops: Collection[Operator | Place] | Callable[..., Any] | Decisions,
    group: str | None,
    groups: Callable[[], Groups],
    *,
    compares: bool = False,
) -> Callable[[], Contexts]:
    """The context_fn of `offload.selective_contexts`.

    keep_ops: operators; a policy; or pairs of an operator and the number of one of its calls in a forward of
        the region, from 0. Of pairs, one that a forward does not come to is nothing to be said. Or the
        decisions of a block, which its first forward learns.
    group: None for what stays on the device. groups: asked at each checkpointed forward. compares: nobody
        else does it (net.py), so in some regions saves are compared with those of the recompute.
    """
    decisions, own = (keep_ops, None) if isinstance(keep_ops, Decisions) else (None, Keep(keep_ops))
    if group is not None and not (isinstance(group, str) and group):
        raise ValueError(f"group is {group!r}, must be a non-empty string such as 'selective'")

    def context_fn() -> Contexts:
        if is_traced():
            raise OffloadError(
                "torch.compile traces a checkpoint with selective_contexts() whole; a graph would keep what "
                "this one step keeps, and move nothing. Compile the function inside the checkpoint, or use "
                "torch's create_selective_checkpoint_contexts, which moves nothing"
            )
        manager = groups()
        engine = manager.engine
        keep = own if decisions is None else decisions.keep
        if keep is None:
            assert decisions is not None
            first = _FirstMode(decisions, manager, group)
            return first, _RecomputeMode(first)
        sample = net_of(engine).region_sample(engine, keep.key) if compares else None
        forward = _ForwardMode(keep, manager, group, sample)
        return forward, _RecomputeMode(forward)

    return context_fn


def is_traced() -> bool:
    """Predicate: torch.compile, or another tracer, makes a graph of what is called now."""
    keys = torch._C._TorchDispatchModeKey
    modes = map(torch._C._get_dispatch_mode, (keys.PROXY, keys.FUNCTIONAL))
    return any(mode is not None for mode in modes) or torch.compiler.is_compiling()


class KeptGroup(Protocol):
    """The group that the kept outputs of one region belong to, while its forward runs."""

    def begin(self) -> None: ...

    def scope(self, lane: Lane | None) -> Scope | None: ...

    def left(self, blocks: Iterable[DeviceBlock]) -> None: ...

    def end(self) -> None: ...


class Groups(Protocol):
    """The groups' manager, as far as a region asks it."""

    engine: OffloadEngine

    def needs_chunk(self) -> bool: ...

    def kept_group(self, name: str | None) -> KeptGroup: ...


class CallMode(TorchDispatchMode):
    """A mode that sees the calls of a region: a compiled function inside still runs compiled, and operators
    of higher order are calls like others."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _ForwardMode(CallMode):
    """One run of a checkpointed function: remembers its calls. See Note: [The life of a kept output].

    kept: by operator and number. calls: of each operator that may be kept.
    """

    def __init__(self, keep: Keep, groups: Groups, name: str | None, sample: Sample | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keep = keep
        self.sample = sample
        self.engine = groups.engine
        self.kept: dict[tuple[Operator, int], KeptCall] = {}
        self.calls: Counter[Operator] = Counter()
        # by storage, the kept call that made it; the reference keeps the address from naming another one
        self._made: dict[int, tuple[WeakStorage, KeptCall]] = {}
        self._groups = groups
        self._group = groups.kept_group(name)
        self._report = net_of(groups.engine).keeps
        # for a save to come after it
        self._waiting: tuple[tuple[Operator, int], KeptCall, Scope | None] | None = None
        self._pair: torch.autograd.graph.saved_tensors_hooks | None = None
        self._matched: set[str] = set()
        self._called: dict[Operator, None] = {}  # in the order of their first calls

    def __enter__(self) -> _ForwardMode:
        self._group.begin()
        if self._groups.needs_chunk() and self.keep.key:
            self._report.no_chunk()
        if inside_checkpoint():
            self._pair = _hooks_telling(self._saves)
            self._pair.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._pair is None:
            self._pass_on()
        else:
            self._pair.__exit__()
            self._pair = self._waiting = None
        self._made.clear()
        self._drop_written()
        self._group.end()
        # in a backward an outer recompute runs this forward again
        if self.keep.names and torch._C._current_graph_task_id() == -1:
            self._report.region(self.keep.key, self.keep.names, self._matched, map(str, self._called))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if self.engine.at_work():
            return func(*args, **kwargs)
        if not self._matched and self.keep.names:
            self._called[func] = None
        output = self._run(func, args, kwargs)
        if func in UNTRACKED_VIEWS:
            for storage in storages_of(args[0]):
                if storage._cdata in self._made:
                    self._made[storage._cdata][1].watch(output)
        return output

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.keep.numbers(func):
            return func(*args, **kwargs)
        number = self.calls[func]
        self.calls[func] += 1
        if not self.keep.may_want(func, number):
            return func(*args, **kwargs)
        random = RandomStep.start(func, args, kwargs)
        output = func(*args, **kwargs)
        if func in self.keep.copied and (func, number) not in self.keep.calls:
            given = list(plain_parts((args, tuple(kwargs.values()))))
            if not decides(func, given, output):  # another call of an operator that decides elsewhere
                return output
        if self.keep.wants(func, output, args, kwargs):
            self._pass_on()
            if self.keep.names:
                self._matched.add(str(func) if self.keep.policy is None else self.keep.names[0])
            with self.engine.lock:
                make, copies = make_of(args, kwargs), func in self.keep.copied
                call = KeptCall(func, number, make, output, RandomStep.end(random), copies=copies)
                if not copies:
                    for storage in storages_of(output):
                        self._made[storage._cdata] = WeakStorage(storage), call
                lane = None if call.is_collective else self.engine.device.compute
                self._waiting = ((func, number), call, self._group.scope(lane))
        return output

    def _saves(self, tensor: torch.Tensor) -> None:
        self._pass_on()
        if self.sample is not None:
            self.sample.add(tensor)

    def _pass_on(self) -> None:
        """The recompute will come past the call that waits."""
        if self._waiting is not None:
            (place, call, scope), self._waiting = self._waiting, None
            self._keep(place, call, scope)

    def _keep(self, place: Place, call: KeptCall, scope: Scope | None) -> None:
        self.kept[place] = call
        if scope is not None:
            with self.engine.lock:
                self._group.left(call.leave(functools.partial(self.engine.hooks.pack_for, scope)))

    def _drop_written(self) -> None:
        """Let calls go whose outputs were changed in place after all: the recompute makes them again. Named
        after another forward, in which nothing wrote to them, they may be."""
        may_be = self.kept.keys() if self.keep.of_block else self.kept.keys() & self.keep.calls
        self._written = {place for place in may_be if self.kept[place].is_written()}
        for place in self._written:
            del self.kept[place]


class _FirstMode(_ForwardMode):
    """The first run of a block under a checkpoint: finds what it decides, and keeps that."""

    def __init__(self, decisions: Decisions, groups: Groups, name: str | None) -> None:
        super().__init__(decisions.base, groups, name, None)
        self._decisions = decisions
        self._finder = Finder(decisions.most_elements)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.keep.numbers(func):
            return func(*args, **kwargs)
        place = func, self.calls[func]
        random = RandomStep.start(func, args, kwargs)
        output = super()._run(func, args, kwargs)
        for found, call in self._finder.look(place, args, kwargs, output, RandomStep.end(random)):
            if found not in self.kept and (self._waiting is None or self._waiting[0] != found):
                with self.engine.lock:  # its reader is ordered after it on the current lane
                    scope = self._group.scope(self.engine.device.compute)
                self._keep(found, call, scope)
        return output

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        finder, self._finder = self._finder, Finder(0)
        if exception[:1] == (None,):
            scores = finder.scores & self.kept.keys()
            self._decisions.learn(frozenset(finder.operators), frozenset(scores), frozenset(self._written))


def _hooks_telling(saved: Callable[[torch.Tensor], None]) -> torch.autograd.graph.saved_tensors_hooks:
    """The innermost pair of hooks once more."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return torch.autograd.graph.saved_tensors_hooks(telling(saved, pack), unpack)


class _RecomputeMode(CallMode):
    """Returns kept outputs instead of running their operators."""

    def __init__(self, forward: _ForwardMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forward = forward
        self._calls: Counter[Operator] = Counter()
        self._compared: tuple[Comparison, torch.autograd.graph.saved_tensors_hooks] | None = None

    def __enter__(self) -> _RecomputeMode:
        self._calls.clear()  # every pass counts from 0
        if self._forward.sample is not None:
            again = self._forward.sample.again()
            self._compared = again, _hooks_telling(again.add)
            self._compared[1].__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._compared is not None:
            (again, hooks), self._compared = self._compared, None
            hooks.__exit__()
            again.ends()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        forward = self._forward
        if not forward.keep.numbers(func) or forward.engine.at_work():
            return func(*args, **kwargs)
        number = self._calls[func]
        self._calls[func] += 1
        call = forward.kept.get((func, number))
        if call is not None:
            with forward.engine.lock:
                return call.again(args, kwargs, forward.engine.hooks.unpack)
        if number >= forward.calls[func] and any(operator is func for operator, _ in forward.kept):
            raise OffloadError(
                f"{func} was called {forward.calls[func]:,} times in the forward of a checkpointed region "
                "and once more in its recompute, so it is not known which call is which; make the region "
                "repeat itself; or take the operator off keep_ops, or the block out with no_recompute="
            )
        return func(*args, **kwargs)
