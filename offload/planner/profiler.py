"""The profile of one call of a block, taken while the block runs plain: nothing of this call is recomputed.

    profiler = BlockProfiler(module, engine, args, kwargs)
    profiler.begin()
    ...                                       # the block's forward
    profiler.end(failed=False)
    if profiler.only(): ...                   # no call of such a block may be recomputed
    if profiler.ready(): profile = profiler.profile()

One invariant: it only observes. The block computes, saves and draws what it would without.

What a recompute may skip is found out by what happens to the bytes. A call is not kept if its output is
written later, by the block (its storage is an argument that an operator writes), after it (its version moves
until the profile is read), or inside a custom autograd.Function by a kernel that no operator shows (its bytes
change). So is whether there may be a recompute at all: not of a block that writes to anything that it did not
make, its buffers apart, because that is another thing by then. What autograd saves is told by the innermost
pair of hooks.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import SAC_IGNORED_OPS
from torch.utils.flop_counter import flop_registry

from offload.checkpoint.decisions import choices_of, decides, is_decision, makes_number, never_kept
from offload.checkpoint.kept import (
    UNTRACKED_VIEWS,
    SharedGenerator,
    is_collective,
    plain_parts,
    shared_generators,
    storages_of,
    version_probe,
)
from offload.checkpoint.members import cache_written
from offload.checkpoint.net import telling
from offload.checkpoint.selective import CallMode
from offload.device import Event
from offload.engine import OffloadEngine
from offload.planner.operators import (
    SavedBytes,
    UnseenWrites,
    can_leave,
    collective_groups,
    communicates_in_place,
    draws_by_itself,
    is_attention,
    may_differ,
    waiting_bytes,
    writes_of,
)
from offload.planner.profile import BlockProfile, SeenCall, TimedCall, kept_always, settled_seconds
from offload.saved.filters import is_dtensor
from offload.transfer.block import WeakStorage


@dataclass(slots=True, eq=False)
class _Call:
    """One call as it is seen.

    made: the storages that it made, with the bytes of each that would wait. elements: of the largest.
        probes: tensors that count the versions of its outputs, with the versions that they had. decides: as a
        router does (checkpoint/decisions.py). scores: sizes of what it decides from. makers: of its inputs.
    """

    operator: Any
    number: int
    why_not: str
    must: bool = False
    together: Hashable = None
    host_s: float = 0.0
    events: tuple[Event, Event] | None = None
    flops: int = 0
    touched_bytes: int = 0
    made_bytes: int = 0
    made: dict[int, int] = field(default_factory=dict)
    elements: int = 0
    probes: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    decides: bool = False
    scores: frozenset[int] = frozenset()
    makers: list[_Call] = field(default_factory=list)


class BlockProfiler:
    """Profiler of one call of `module`, which is given `args` and `kwargs`.

    min_elements: a tensor of fewer does not leave; None takes the engine's setting. may_be_recomputed: no
        call of such a block may be, if False, whatever is seen.
    """

    def __init__(
        self,
        module: nn.Module,
        engine: OffloadEngine,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        min_elements: int | None = None,
        may_be_recomputed: bool = True,
    ) -> None:
        least = engine.config.min_offloaded_tensor_size if min_elements is None else min_elements
        self._compiled = getattr(module, "_compiled_call_impl", None) is not None
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        leaving = next((tensor for tensor in given if can_leave(tensor, engine, least)), None)
        self._input_bytes = 0 if leaving is None else sum(waiting_bytes(leaving, engine, least).values())
        buffers = frozenset(storage._cdata for buffer in module.buffers() for storage in storages_of(buffer))
        self._mode = _ProfileMode(engine, least, buffers, max((leaf.numel() for leaf in given), default=0))
        probes = [probe for tensor in given if (probe := version_probe(tensor)) is not None]
        self._given = [(probe, probe._version) for probe in probes]
        self._states: list[tuple[SharedGenerator, bytes]] = []
        self._mode.only = "" if may_be_recomputed else "it is refused"
        cache = cache_written(module, (args, kwargs))
        if cache is not None:
            self._mode.only = f"it adds to a {type(cache).__name__}"

    def begin(self) -> None:
        """The forward begins, in this thread."""
        self._states = [(generator, generator.get_state()) for generator in shared_generators()]
        self._mode.__enter__()

    def end(self, *, failed: bool) -> None:
        """It is over. failed: it raised, so there is no profile."""
        self._mode.failed = failed
        self._mode.__exit__(None, None, None)
        states, self._states = self._states, []
        for generator, state in states:
            if generator.get_state() != state:
                self._mode.only = self._mode.only or f"it draws from {generator.name}"
        self._look_at_given("it writes to what it was given")

    @property
    def failed(self) -> bool:
        return self._mode.failed

    def only(self) -> str:
        """Why no call of such a block may be recomputed, as far as that is known now; empty if it may."""
        if not self._mode.ended:
            return "its forward is not over"
        self._look_at_given("what it was given is written after it")
        self._mode.settle()
        return self._mode.only

    def backward_begins(self, gradients: object = None) -> None:
        """Check what the block was given for writes; it may be written from here on."""
        self._look_at_given("what it was given is written after it")
        self._given = []

    def kept_always(self) -> frozenset[tuple[Any, int]]:
        """The calls that every recompute keeps, as far as they are known now."""
        self._mode.settle()
        return kept_always(self._seen([0.0] * len(self._mode.calls)))

    def _look_at_given(self, written: str) -> None:
        if any(probe._version != version for probe, version in self._given):
            self._mode.only = self._mode.only or written

    def ready(self) -> bool:
        """Return True if the forward is over, on the device too. Never blocks the host."""
        return self._mode.ready()

    def profile(self) -> BlockProfile:
        """Profile of what was seen, once it is `ready`; the later, the more writes to outputs are known.
        Blocks the host: never. Seconds are the sums over calls, the profiler's own not among them."""
        mode = self._mode
        assert mode.ready(), "a profile is read once it is ready"
        seconds = mode.device_seconds()
        mode.settle()
        saved = mode.saved
        calls = self._seen(seconds)
        return BlockProfile.build(
            calls=calls,
            input_bytes=self._input_bytes,
            plain_bytes=saved.total(),
            given_bytes=saved.total() - sum(call.saved_bytes for call in calls),
            forward_s=sum(seconds),
            collectives=frozenset(mode.collectives),
            only=mode.only,
            whole="the block is compiled: its calls are not seen" if self._compiled else "",
        )

    def _seen(self, seconds: Sequence[float]) -> tuple[SeenCall, ...]:
        mode = self._mode
        return tuple(
            SeenCall(
                call.operator,
                call.number,
                sum(call.made.values()),
                device_s,
                sum(mode.saved.of_storage(key) for key in call.made),
                at < mode.last_save,
                call.why_not,
                call.must,
                call.together,
                is_attention(call.operator),
            )
            for at, (call, device_s) in enumerate(zip(mode.calls, seconds, strict=True))
        )


class _ProfileMode(CallMode):
    """calls: those that a recompute makes as well. last_save: how many of them had run when autograd saved
    the last tensor. only: why the block must not be recomputed."""

    def __init__(
        self, engine: OffloadEngine, min_elements: int, buffers: frozenset[int], most_elements: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[_Call] = []
        self.last_save = 0
        self.collectives: set[str] = set()
        self.only = ""
        self.saved = SavedBytes(engine, min_elements)
        self._engine = engine
        self._min_elements = min_elements
        self._most_elements = most_elements  # of scores that are kept
        self._buffers = buffers
        self._times = engine.device.torch_device.type != "cpu"
        self._counts: Counter[Any] = Counter()
        self._made: dict[int, tuple[WeakStorage, _Call]] = {}
        # by storage, what made, wrote or views whole numbers or booleans in it
        self._deciders: defaultdict[int, list[tuple[WeakStorage, _Call]]] = defaultdict(list)
        self._pair: AbstractContextManager[Any] | None = None
        self._with_grad = False
        self._depends_on_data = False
        self._outside: set[Any] = set()  # operators that hooks of the block call, and its recompute does not
        self._unseen = UnseenWrites[_Call]()
        self._over: Event | None = None
        self.ended = self.failed = False

    # -- the forward -----------------------------------------------------------------------------------------
    def __enter__(self) -> _ProfileMode:
        self._with_grad = torch.is_grad_enabled()
        hooks = self._engine.hooks
        pair = torch._C._autograd._top_saved_tensors_default_hooks(True) or (hooks.pack, hooks.unpack)
        self._pair = torch.autograd.graph.saved_tensors_hooks(telling(self._save, pair[0]), pair[1])
        self._pair.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        assert self._pair is not None
        self._pair.__exit__(*exception)
        self._pair = None  # it leads to what a group holds
        self._made.clear()
        self._deciders.clear()
        if self.failed:
            return  # never ready
        self._unseen.end()
        if self._times:
            device = self._engine.device
            self._over = device.record(device.compute)
        self.ended = True

    def _save(self, tensor: torch.Tensor) -> None:
        self.last_save = len(self.calls)
        self.saved.add(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func in SAC_IGNORED_OPS or self._engine.at_work():
            return func(*args, **kwargs)
        if _inside_fsdp():
            self._outside.add(func)
            return func(*args, **kwargs)
        call = _Call(func, self._counts[func], never_kept(func))
        self._counts[func] += 1
        output = self._timed(call, func, args, kwargs)
        self.calls.append(call)
        self._look_at(call, args, kwargs, output)
        return output

    def _timed(self, call: _Call, func: Any, args: Any, kwargs: Any) -> Any:
        device = self._engine.device
        start = device.record(device.compute, timed=True) if self._times else None
        began = time.perf_counter()
        output = func(*args, **kwargs)
        call.host_s = time.perf_counter() - began
        if start is not None:
            call.events = start, device.record(device.compute, timed=True)
        return output

    def _look_at(self, call: _Call, args: Any, kwargs: Any, output: Any) -> None:
        func = call.operator
        packet = getattr(func, "_overloadpacket", func)
        if packet in flop_registry:
            with suppress(AssertionError):  # torch 2.11 knows no attention with fewer heads of keys
                call.flops = int(flop_registry[packet](*args, **kwargs, out_val=output))
        inputs = [part for leaf in tree_leaves((args, kwargs)) for part in plain_parts(leaf)]
        outputs = [part for leaf in tree_leaves(output) for part in plain_parts(leaf)]
        touched = {id(part): part.nbytes for part in (*inputs, *outputs)}
        call.touched_bytes = sum(touched.values())
        if any(part.is_nested for part in (*inputs, *outputs)):
            self.only = self.only or "it computes with a strided nested tensor, which has no sizes"
        self._note_collective(func, args, kwargs)
        if draws_by_itself(func, kwargs):
            self.only = self.only or f"{func} draws from a generator of the block's own"
        if func is torch.ops.aten._nested_view_from_jagged.default and (
            args[1].untyped_storage()._cdata in self._made  # its offsets
        ):
            self.only = self.only or "it makes a jagged tensor, whose size is another symbol each time"
        for leaf in tree_leaves((args, kwargs)):
            if is_dtensor(leaf):  # its operators communicate below what a mode sees
                self.collectives.update(group.group_name for group in leaf.device_mesh.get_all_groups())
        for written in writes_of(func, args, kwargs):
            self._note_write(call, written)
        given = {part.untyped_storage()._cdata for part in inputs}
        for part in inputs:
            found = self._made.get(part.untyped_storage()._cdata)
            if found is not None:
                maker = found[1]
                call.makers.append(maker)
            if is_decision(part, func):
                for _, maker in self._deciders.get(part.untyped_storage()._cdata, ()):
                    self._decided(maker, inputs)
        if func in UNTRACKED_VIEWS:
            for key in given & self._made.keys():
                self._probe(self._made[key][1], output)
        made = [part for part in outputs if part.untyped_storage()._cdata not in given]
        if len(made) < len(outputs) and not call.why_not:
            call.why_not = "it returns bytes of its input"
        call.made_bytes = sum(part.nbytes for part in made)
        for part in made:
            storage = part.untyped_storage()
            self._made[storage._cdata] = WeakStorage(storage), call
        if not outputs and not call.why_not:
            call.why_not = "it returns no tensor"
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                for key, nbytes in waiting_bytes(leaf, self._engine, self._min_elements).items():
                    if key not in given:
                        call.made[key] = max(call.made.get(key, 0), nbytes)
        if self._depends_on_data:
            call.together = func
        tags = getattr(func, "tags", ())
        if torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags:
            self._depends_on_data = True
        call.elements = max((part.numel() for part in made), default=0)
        call.decides = decides(func, inputs, output)
        behind = {found for key in given for _, found in self._deciders.get(key, ())}
        if call.decides:
            elements = (maker.elements for maker in call.makers)
            sizes = frozenset(number for number in elements if 0 < number <= self._most_elements)
            call.scores = sizes.union(*(found.scores for found in behind))
            behind = {call}
        for part in choices_of(func, inputs, output) if call.decides else made:
            storage = part.untyped_storage()
            self._deciders[storage._cdata] += [(WeakStorage(storage), found) for found in behind]
        if makes_number(func, inputs):
            self._decided(call, inputs)
        call.must |= bool(made) and is_collective(func)
        if call.why_not:
            return
        call.must |= may_differ(func, args, kwargs)
        self._probe(call, output)
        # a collective writes its output until it is waited for
        if self._with_grad and not torch.is_grad_enabled() and not is_collective(func):
            for part in made:
                self._unseen.add(call, part)

    def _decided(self, maker: _Call, inputs: Sequence[torch.Tensor]) -> None:
        """`maker` has decided, and is read beside other `inputs`."""
        maker.must = True
        floats = (part for part in inputs if part.is_floating_point())
        beside = (self._made.get(part.untyped_storage()._cdata) for part in floats)
        for call in (*maker.makers, *(found[1] for found in beside if found is not None)):
            call.must |= call.elements in maker.scores and not call.why_not

    def _probe(self, call: _Call, output: Any) -> None:
        for leaf in tree_leaves(output):
            probe = version_probe(leaf) if isinstance(leaf, torch.Tensor) else None
            if probe is not None:
                call.probes.append((probe, probe._version))

    def _note_write(self, call: _Call, written: torch.Tensor) -> None:
        for storage in storages_of(written):
            found = self._made.get(storage._cdata)
            if found is None:
                if storage._cdata not in self._buffers and not self.only:
                    self.only = f"{call.operator} writes to what the block was given"
            elif found[1] is not call and not found[1].why_not:
                found[1].why_not = f"its output is written by {call.operator}"

    def _note_collective(self, func: Any, args: Any, kwargs: Any) -> None:
        if communicates_in_place(func):
            self.only = self.only or f"{func} communicates in place, and a recompute would do it again"
        elif not is_collective(func):
            return
        self.collectives.update(collective_groups(func, args, kwargs))

    # -- afterwards ------------------------------------------------------------------------------------------
    def ready(self) -> bool:
        return self.ended and (self._over is None or self._engine.device.poll(self._over))

    def device_seconds(self) -> list[float]:
        device = self._engine.device
        if not self._times:
            return [call.host_s for call in self.calls]
        timed = []
        for call in self.calls:
            assert call.events is not None
            event_s = device.elapsed_ms(*call.events) / 1e3
            numbers = call.flops, call.touched_bytes, call.made_bytes
            timed.append(TimedCall(event_s, call.host_s, *numbers))
        return settled_seconds(timed)

    def settle(self) -> None:
        """Find out which outputs were written since in a way that no operator of the block shows, and what is
        kept in place of a call that must be and cannot: as far as that is known now."""
        unseen = self._unseen.written() if self.ready() else set()
        for call in self.calls:
            if call.why_not:
                continue
            if any(probe._version != version for probe, version in call.probes):
                call.why_not = "its output is written after the block"
            elif call.operator in self._outside:
                call.why_not = "hooks around the block call the operator too, and not in a recompute"
            elif call in unseen:
                call.why_not = "a kernel that is no operator writes its output"
        waiting = [
            call
            for call in self.calls
            if call.must and call.why_not and (call.decides or is_collective(call.operator))
        ]
        while waiting:
            call = waiting.pop()
            if is_collective(call.operator):
                self.only = self.only or f"{call.operator} communicates, and cannot be kept: {call.why_not}"
            for maker in call.makers:  # from equal inputs the call makes equal outputs
                if not maker.must:
                    maker.must = True
                    waiting += [maker] if maker.why_not else []


_MODULE_CALL = nn.Module._call_impl.__code__


def _inside_fsdp() -> bool:
    """Predicate: a hook of FSDP2 around the block calls, and not the block: a recompute gathers nothing."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code is not _MODULE_CALL:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
