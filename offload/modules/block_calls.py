"""How one call of a block runs in mode "auto": profiled, at the level that the plan of now says, or
recomputed where there is none.

One invariant: nothing here changes the plan, no forward blocks the host, and a block that a recompute would
give other bits is never recomputed. So the first call of each kind runs plain, and its tensors all leave;
what it was seen to do says how the next one may run.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from offload.checkpoint.hidden_states import BeforeAgain
from offload.checkpoint.selective import Contexts, contexts_for
from offload.device import Device, Event
from offload.engine import OffloadEngine
from offload.groups.group import KEPT, Cost
from offload.groups.manager import GroupsManager
from offload.ids import ChunkId
from offload.modules.root import ModelRoot
from offload.planner.agreement import peers_of, with_levels_of
from offload.planner.host_seconds import HostSeconds, Way
from offload.planner.kinds import kind_of, look_of
from offload.planner.profile import BlockProfile, kept_always
from offload.planner.profiler import BlockProfiler
from offload.planner.work import Ran
from offload.policy.actions import ChunkKey
from offload.policy.lengths import nearest
from offload.telemetry.speaker import speaker

__all__ = ["BlockCalls", "Chosen", "Timing"]

logger = speaker(__name__)

Kept = frozenset[tuple[Any, int]]
"""Calls of a block whose outputs are kept: operators and numbers."""

_MOST_LENGTHS = 1024
"""Of which profiles are at hand; another one takes well below a millisecond."""

_LOOK_EVERY = 61
"""Steps: in one of them calls that are known to save alike are looked at, since a block may save more for a
reason that it does not show."""

_PASSES = 3
"""A block's forward and backward together, in forwards."""


class _Note(Protocol):
    def __call__(self, seconds: float, *, paced: bool, own: bool) -> None: ...


class Timing:
    """One forward or recompute of a block on the host's clock, and on the device's if it is `timed`.

    note: told of the host's seconds, whether they are `paced` (planner/host_seconds.py), and whether they are
    the block's own: a plain one that sends what it saves has those of its copies, too.
    """

    def __init__(self, device: Device, note: _Note, *, timed: bool = False) -> None:
        self._device = device
        self._note = note
        self._timed = timed
        self._events: tuple[Event, Event] | None = None
        # what is captured is not run here, so nothing of it can be polled
        self._start = None if device.is_capturing() else device.record(device.compute, timed=timed)
        self._began_s = time.perf_counter()
        self.host_s = 0.0

    def end(self, compared_s: float = 0.0, *, own: bool = True) -> None:
        """It is over. compared_s: host seconds of comparing saves (checkpoint/net.py), which few calls have.
        own: a plain block has sent nothing; what others send is theirs at each call."""
        self.host_s = time.perf_counter() - self._began_s - compared_s
        if self._start is None:
            return
        if self._timed:
            self._events = self._start, self._device.record(self._device.compute, timed=True)
        self._note(self.host_s, paced=self._is_paced(self._start), own=own)

    def _is_paced(self, start: Event) -> bool:
        return self._device.poll(start)

    def device_s(self) -> float | None:
        """None for a forward that raised. The device must have passed its end. Where compute is on the host,
        the host's time."""
        if self._events is None:
            return None
        return self._device.elapsed_ms(*self._events) / 1e3 if self._device.pins else self.host_s


class Chosen(NamedTuple):
    """How one call of a block runs.

    is_plain: nothing of it is recomputed. contexts: keeps some outputs; None keeps none. before_again: as of
    RecomputedCall. cost: None where it is not known. timing: begins a measurement of its forward, None where
    none is wanted. profiler: of its forward. required: what a plain call saves leaves, whatever the groups'
    plan would keep. alike: calls for which it is equal save alike; None where the host need not be spared
    looking at them.
    """

    is_plain: bool
    contexts: Callable[[], Contexts] | None = None
    before_again: BeforeAgain | None = None
    cost: Cost | None = None
    timing: Callable[[], Timing] | None = None
    profiler: BlockProfiler | None = None
    required: bool = False
    alike: Hashable = None


class _Kind:
    """Of blocks that save alike, one for all of them. What tells kinds apart is long, and each forward of a
    block looks its kind up a dozen times."""

    __slots__ = ()


@dataclass(slots=True)
class Called:
    """A call of a block. level: its place in the menu of its profile, which may come later; -1 is the last
    one. paced: as HostSeconds has it, of its forward."""

    kind: _Kind
    level: int
    input_bytes: int
    paced: bool = False


class BlockCalls:
    """Of all models of one engine, with what was seen of their blocks in the step under way. manager: asked
    at each forward.

    profiles: that are followed, by kind of block. levels: of the blocks of each chunk under the plan; None
    where there is none. names: of the blocks that ran last, by chunk. peers: ranks that blocks communicate
    with.
    """

    def __init__(self, manager: Callable[[], GroupsManager]) -> None:
        self.profiles: dict[_Kind, BlockProfile] = {}
        self.levels: Mapping[ChunkKey, tuple[int, ...]] | None = None
        self.names: dict[ChunkKey, list[str]] = {}
        self.peers = frozenset[int]()
        self._manager = manager
        self._timings: dict[_Kind, list[Timing]] = {}  # of the other blocks of each kind, in step 1
        self._step = 0
        # how a block was last: the step, whether it trained and may not be recomputed; what it looked like
        self._kinds = weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, bool, bool], Hashable, _Kind]]()
        self._kind_by: dict[Hashable, _Kind] = {}
        self._own: dict[_Kind, BlockProfile] = {}  # as they were seen here; `profiles` are followed
        self._own_input_bytes: dict[_Kind, int] = {}
        self._profilers: dict[_Kind, BlockProfiler | None] = {}  # None: it has ended
        self._input_bytes: dict[_Kind, int] = {}  # of the profiled call
        self._scaled: dict[tuple[_Kind, float], BlockProfile] = {}
        self._spared: dict[_Kind, tuple[BlockProfile, bool]] = {}
        self._contexts: dict[Kept, Callable[[], Contexts]] = {}
        self._hosts = defaultdict[_Kind, HostSeconds](HostSeconds)
        self._always: dict[_Kind, Kept] = {}  # what is kept in step 1 of a kind that is recomputed
        self._ran: dict[ChunkId, tuple[object, list[Called]]] = {}

    # -- a forward -------------------------------------------------------------------------------------------
    def chosen(
        self,
        manager: GroupsManager,
        root: ModelRoot,
        name: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Chosen:
        """How this call of block `name` of `root` runs. Blocks the host: never."""
        engine = manager.engine
        handler = manager.active_handler()
        never = root.watch.refuses(name, module)
        kind = self._kind_now(module, root.min_elements, never)
        if handler is None:  # nothing may leave, and no plan is for it
            return self._unplanned(kind, root, module, args, kwargs, engine, None, never)
        chunk = handler.id
        begun, ran = self._ran.get(chunk, (None, []))
        if begun is not handler.saved:
            ran = []
            self._ran[chunk] = (handler.saved, ran)
            self.names[chunk] = []
        self.names[chunk].append(name)
        input_bytes = _input_bytes(args, kwargs)
        called = Called(kind, -1, input_bytes)
        ran.append(called)
        if kind not in self.profiles:
            unplanned = self._unplanned(kind, root, module, args, kwargs, engine, called, never)
            if unplanned.is_plain:
                called.level = 0
            return unplanned
        profile = self._profile_for(kind, input_bytes / self._input_bytes[kind])
        level = last = len(profile.menu) - 1
        if self.levels is not None:
            followed = nearest(chunk, self.levels)
            planned = () if followed is None else self.levels[followed]
            level = min(planned[len(ran) - 1], last) if len(ran) <= len(planned) else last
        called.level = level
        chosen, keeps = profile.menu[level], profile.keeps[level]
        way, host = _way_of(keeps), self._hosts[kind]
        timing, note_again = None, None
        if host.is_due(way):
            note_forward, note_again = self._notes(kind, way, called)
            timing = partial(Timing, engine.device, note_forward)
        else:
            called.paced = host.was_paced[way]

        def before_again() -> Callable[[float], None] | None:
            with engine.lock:
                engine.transfers.claim(chosen.made_again_bytes)
            return None if note_again is None else Timing(engine.device, note_again).end

        return Chosen(
            is_plain=keeps is None,
            contexts=self._contexts_for(keeps) if keeps else None,
            before_again=before_again,
            timing=timing,
            cost=Cost(profile.forward_s * _PASSES + chosen.recompute_s, chosen.made_again_bytes),
            required=self.levels is None,
            alike=(kind, input_bytes)
            if self._step % _LOOK_EVERY and self._may_be_spared(kind, profile)
            else None,
        )

    def _kind_now(self, module: nn.Module, min_elements: int | None, never: bool) -> _Kind:
        """The block's kind, looked at once a step: it is another one when a part is unfrozen, exchanged or
        switched."""
        state = self._step, module.training, never
        known = self._kinds.get(module)
        if known is not None and known[0] == state:
            return known[2]
        look = look_of(module), never
        if known is not None and known[1] == look:
            kind = known[2]
        else:
            kind = self._kind_by.setdefault((kind_of(module), min_elements, never), _Kind())
        self._kinds[module] = state, look, kind
        return kind

    def _may_be_spared(self, kind: _Kind, profile: BlockProfile) -> bool:
        """Whether plain calls of this profile that save alike need not be looked at."""
        known = self._spared.get(kind)
        if known is None or known[0] is not profile:
            spared = profile.is_host_bound and not profile.depends_on_data
            known = self._spared[kind] = profile, spared
        return known[1]

    def _notes(self, kind: _Kind, way: Way, called: Called | None) -> tuple[_Note, _Note]:
        """What is told of a forward, and of its recompute."""
        host = self._hosts[kind]

        def note_forward(seconds: float, *, paced: bool, own: bool) -> None:
            host.was_paced[way] = paced
            if called is not None:
                called.paced = paced
            host.note_forward(way, seconds, paced=paced and own)

        def note_again(seconds: float, *, paced: bool, own: bool) -> None:
            host.note_again(way, seconds, paced=paced and own)

        return note_forward, note_again

    def take_ran(self) -> dict[ChunkKey, list[Ran]]:
        """The calls of the step that ended, by chunk."""
        ran, self._ran = self._ran, {}
        self._step += 1
        return {chunk: [self._known(call) for call in calls] for chunk, (_, calls) in ran.items()}

    def _known(self, call: Called) -> Ran:
        """The call with the profile that its kind has by now."""
        if call.kind not in self.profiles:
            return Ran(None, call.level, call.input_bytes, call.paced)
        profile = self._profile_for(call.kind, call.input_bytes / self._input_bytes[call.kind])
        return Ran(profile, call.level, call.input_bytes, call.paced)

    def _profile_for(self, kind: _Kind, factor: float) -> BlockProfile:
        if factor == 1.0:
            return self.profiles[kind]
        profile = self._scaled.get((kind, factor))
        if profile is None:
            if len(self._scaled) >= _MOST_LENGTHS:
                self._scaled.clear()
            profile = self.profiles[kind].scaled(factor)
            if self.peers:
                profile = with_levels_of(self.profiles[kind], profile, factor)
            self._scaled[kind, factor] = profile
        return profile

    def _unplanned(
        self,
        kind: _Kind,
        root: ModelRoot,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        engine: OffloadEngine,
        called: Called | None,
        never: bool,
    ) -> Chosen:
        """A call that no plan is for: the first of a kind is profiled, the others are recomputed where that
        may be, keeping what every level keeps, and timed until the profile is read. never: none may be,
        whatever is seen."""
        profiler = self._profilers.get(kind)
        if kind in self._own:  # and not followed yet
            profile = self._own[kind]
            only, keeps = profile.only, kept_always(profile.calls)
        elif profiler is None or profiler.failed:
            profiler = BlockProfiler(
                module, engine, args, kwargs, min_elements=root.min_elements, may_be_recomputed=not never
            )
            self._profilers[kind] = profiler
            self._own_input_bytes[kind] = max(1, _input_bytes(args, kwargs))
            return Chosen(is_plain=True, profiler=profiler, required=True)
        else:
            only = profiler.only()
            if not only and kind not in self._always:
                self._always[kind] = profiler.kept_always()
            keeps = self._always.get(kind, frozenset())
        if only:
            return Chosen(is_plain=True, required=True)

        note_forward, note_again = self._notes(kind, _way_of(keeps), called)

        def timing() -> Timing:
            timed = kind not in self._own
            measured = Timing(engine.device, note_forward, timed=timed)
            if timed:
                self._timings.setdefault(kind, []).append(measured)
            return measured

        return Chosen(
            is_plain=False,
            contexts=self._contexts_for(keeps) if keeps else None,
            before_again=lambda: Timing(engine.device, note_again).end,
            timing=timing,
        )

    # -- profiles --------------------------------------------------------------------------------------------
    def take_profiles(self, device: Device) -> None:
        """Read what was profiled and measured in the step that ended. Blocks the host until the device is
        done with what was profiled."""
        waiting = [(kind, profiler) for kind, profiler in self._profilers.items() if profiler is not None]
        if waiting:
            device.synchronize(device.record(device.compute))
        for kind, profiler in waiting:
            self._profilers[kind] = None
            timings = self._timings.pop(kind, [])
            device_s = [seconds for timing in timings if (seconds := timing.device_s()) is not None]
            if device_s:
                # the least: a full queue of launches, and what runs for the first time, hold some up
                profiler.note_plain(min(timing.host_s for timing in timings if timing.host_s), min(device_s))
            if profiler.ready():  # else its forward raised, and the next call is profiled
                profile = self._own[kind] = profiler.profile()
                self.peers |= peers_of(profile.collectives)
                if profile.only:
                    logger.info("auto: one kind of block is never recomputed: %s", profile.only)
                for call, why in profile.why_not.items():
                    logger.debug("auto: %s is not kept: %s", call, why)

        for kind, profile in self._own.items():
            by_way = self._hosts[kind].by_way()
            if by_way is not None and by_way != profile.host_by_way:
                self._own[kind] = profile.with_host(by_way)
                self._scaled.clear()

    def follow_own(self) -> None:
        """From now on the profiles are those that were seen here."""
        self.profiles |= self._own
        self._input_bytes |= self._own_input_bytes

    def own_profiles(self) -> list[tuple[BlockProfile, int] | None]:
        """Those that were seen here, with the bytes of their input, in the order of the first calls; None for
        a kind that has none yet."""
        return [
            (self._own[kind], self._own_input_bytes[kind]) if kind in self._own else None
            for kind in self._profilers
        ]

    def follow_common(self, common: Sequence[tuple[BlockProfile, int] | None]) -> None:
        """From now on the profiles are these, which other ranks have seen as well. In the order of
        `own_profiles`."""
        self._scaled.clear()
        for kind, found in zip(self._profilers, common, strict=True):
            if found is not None:
                self.profiles[kind], self._input_bytes[kind] = found

    def _contexts_for(self, keeps: Kept) -> Callable[[], Contexts]:
        contexts = self._contexts.get(keeps)
        if contexts is None:
            contexts = self._contexts[keeps] = contexts_for(keeps, KEPT, self._manager)
        return contexts


def _way_of(keeps: Kept | None) -> Way:
    return Way.PLAIN if keeps is None else Way.SELECTIVE if keeps else Way.CHECKPOINT


def _input_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the first tensor that a call is given: the measure of its tokens."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
    return 1
