"""How one call of a block runs in mode "auto": profiled, at the level that the plan of now says, or
recomputed where there is none.

One invariant: nothing here changes the plan, no forward blocks the host, and a block that a recompute would
give other bits is never recomputed. So the first call of each kind runs plain, and its tensors all leave;
what it was seen to do says how the next one may run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

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
from offload.planner.operators import kind_of, look_of, peers_of
from offload.planner.profile import BlockProfile, kept_always
from offload.planner.profiler import BlockProfiler
from offload.planner.work import Ran
from offload.policy.actions import ChunkKey
from offload.policy.lengths import nearest
from offload.policy.rule import NO_GROWTH, Rule, Trace
from offload.policy.rule import Cost as KindCost
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

Kept = frozenset[tuple[Any, int]]
"""Calls of a block whose outputs are kept: operators and numbers."""

_MOST_LENGTHS = 1024
"""Of which profiles are at hand; another one takes well below a millisecond."""

_PASSES = 3
"""A block's forward and backward together, in forwards."""


class Look:
    """One forward or recompute of a block: seconds, those of the host, and the device's active bytes at its
    begin and its end.

    None where a graph is captured: what is captured is not run here. Blocks the host: never.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._start = None if device.is_capturing() else device.record(device.compute, timed=True)
        self._end: Event | None = None
        self.begin_bytes, self.end_bytes = device.active_bytes(), 0
        self.host_s = -perf_counter()

    def end(self) -> None:
        """It is over."""
        self.host_s += perf_counter()
        self.end_bytes = self._device.active_bytes()
        if self._start is not None:
            self._end = self._device.record(self._device.compute, timed=True)

    def seconds(self) -> float | None:
        """Seconds on the device, which must have passed the look's end; None for a forward that raised."""
        if self._start is None or self._end is None:
            return None
        return self._device.elapsed_ms(self._start, self._end) / 1e3


@dataclass(slots=True)
class KindLooks:
    """At blocks of one kind, with the bytes of their input: forwards that ran plain and that are recomputed,
    and recomputes."""

    plain: list[tuple[int, Look]] = field(default_factory=list)
    recomputed: list[tuple[int, Look]] = field(default_factory=list)
    again: list[Look] = field(default_factory=list)


class Chosen(NamedTuple):
    """How one call of a block runs.

    is_plain: nothing of it is recomputed. contexts: keeps some outputs; None keeps none. moves: its input may
    leave; of a plain call, what it saves. before_again: as of RecomputedCall. cost: None where it is not
    known. look: begins a look at its forward, None where none is wanted. profiler: of its forward. required:
    what a plain call saves leaves, whatever the groups' plan would keep."""

    is_plain: bool
    contexts: Callable[[], Contexts] | None = None
    before_again: BeforeAgain | None = None
    cost: Cost | None = None
    look: Callable[[], Look] | None = None
    profiler: BlockProfiler | None = None
    required: bool = False
    moves: bool = True
    place: tuple[ChunkKey, int] | None = None
    """Of the call: its chunk, and its place in that."""


class Kind:
    """Identity of blocks that save alike, one object for all of them. What tells kinds apart is long, and
    each forward of a block looks its kind up a dozen times."""

    __slots__ = ()


@dataclass(slots=True)
class Called:
    """A call of a block. level: its place in the menu of its profile, which may come later; -1 is the last
    one."""

    kind: Kind
    level: int
    input_bytes: int


class BlockCalls:
    """Calls of the blocks of all models of one engine, with what was seen of them in the step under way.
    manager: asked at each forward.

    profiles: that are followed, by kind of block. levels: of the blocks of each chunk under the plan; None
    where there is none. rule_for: without levels, the rule of a chunk's forward of so many times as many
    tokens as the traced one had; None before one was measured. trace: of the step under way, if it is
    measured. looks: by kind, None where nothing is to be looked at. resting: of blocks without hooks, by
    stage and place, name, kind and bytes of the input. names: of the blocks that ran last, by chunk.
    peers: ranks that blocks communicate with. growth: of a step, which is counted where there is a plan.
    """

    def __init__(self, manager: Callable[[], GroupsManager]) -> None:
        self.profiles: dict[Kind, BlockProfile] = {}
        self.levels: Mapping[ChunkKey, tuple[int, ...]] | None = None
        self.rule_for: Callable[[float, ChunkKey], Rule] | None = None
        self.trace: Trace | None = None
        self.looks: dict[Kind, KindLooks] | None = None
        self.resting: dict[int, dict[int, tuple[str, Any, int]]] = {}
        self.names: dict[ChunkKey, list[str]] = {}
        self.peers = frozenset[int]()
        self.growth = NO_GROWTH
        self._grown_before = 0  # the step under way
        self._manager = manager
        self._first_bytes: dict[int, int] = {}  # of each stage's first block, in the traced step
        self._rules: dict[ChunkId, Rule] = {}  # of the chunks under way
        self._step = 0
        # how a block was last: the step, whether it trained and may not be recomputed; what it looked like
        self._kinds = weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, bool, bool], Hashable, Kind]]()
        self._kind_by: dict[Hashable, Kind] = {}
        self._own: dict[Kind, BlockProfile] = {}  # as they were seen here; `profiles` are followed
        self._own_input_bytes: dict[Kind, int] = {}
        self._profilers: dict[Kind, BlockProfiler | None] = {}  # None: it has ended
        self._input_bytes: dict[Kind, int] = {}  # of the profiled call
        self._scaled: dict[tuple[Kind, float], BlockProfile] = {}
        self._contexts: dict[Kept, Callable[[], Contexts]] = {}
        # what every recompute keeps, by the profile, or in step 1 by what is seen of it
        self._always: dict[Kind, tuple[BlockProfile | None, Kept]] = {}
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
        handler = manager.scopes.active_handler()
        never = root.watch.refuses(name, module)
        kind = self._kind_now(module, root.min_elements, never)
        if handler is None:  # nothing may leave, and no plan is for it
            return self._unplanned(kind, root, module, args, kwargs, engine, None, never)
        chunk = handler.id
        begun, ran = self._ran.get(chunk, (None, []))
        if begun is not handler.saved:
            if not self._ran:
                self._step_begins(engine)
            ran = []
            self._ran[chunk] = (handler.saved, ran)
            self.names[chunk] = []
            self._rules.pop(chunk, None)
        input_bytes = _input_bytes(args, kwargs)
        if self.resting:
            self._pass_resting(chunk, ran, input_bytes)
        self.names[chunk].append(name)
        called = Called(kind, -1, input_bytes)
        ran.append(called)
        if self.trace is not None:
            if not self.trace.kinds:  # at the step's end before, gradients were there, too
                self.trace.resident_bytes = engine.device.active_bytes()
            self.trace.kinds.setdefault(chunk, []).append(kind)
        if kind not in self.profiles:
            unplanned = self._unplanned(kind, root, module, args, kwargs, engine, called, never)
            if unplanned.is_plain:
                called.level = 0
            return unplanned
        if self.levels is None and self.rule_for is not None:
            return self._by_rule(self.rule_for, engine, chunk, called, len(ran) - 1)
        profile = self._profile_for(kind, input_bytes / self._input_bytes[kind])
        level = last = len(profile.menu) - 1
        if self.levels is not None:
            followed = nearest(chunk, self.levels)
            planned = () if followed is None else self.levels[followed]
            level = min(planned[len(ran) - 1], last) if len(ran) <= len(planned) else last
        called.level = level
        chosen, keeps, at = profile.menu[level], profile.keeps[level], (chunk, len(ran) - 1)

        def before_again() -> None:
            with engine.lock:
                engine.transfers.grow(self.grown_at(at))
                engine.transfers.claim(chosen.made_again_bytes)

        return Chosen(
            is_plain=keeps is None,
            contexts=self._contexts_for(keeps) if keeps else None,
            before_again=before_again,
            cost=Cost(
                profile.forward_s * _PASSES + chosen.recompute_s,
                chosen.made_again_bytes,
                self.growth.come.get(at, 0),
            ),
            required=self.levels is None,
            place=at,
        )

    def _kind_now(self, module: nn.Module, min_elements: int | None, never: bool) -> Kind:
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
            kind = self._kind_by.setdefault((kind_of(module), min_elements, never), Kind())
        self._kinds[module] = state, look, kind
        return kind

    def _pass_resting(self, chunk: ChunkId, ran: list[Called], input_bytes: int) -> None:
        """Count the calls up to this one whose blocks rest."""
        own = self.resting.get(chunk.stage, {})
        factor = (ran[0].input_bytes if ran else input_bytes) / self._first_bytes.get(
            chunk.stage, input_bytes
        )
        while (found := own.get(len(ran))) is not None:
            name, kind, given_bytes = found
            self.names[chunk].append(name)
            ran.append(Called(kind, 0, round(given_bytes * factor)))

    def _by_rule(
        self,
        rule_for: Callable[[float, ChunkKey], Rule],
        engine: OffloadEngine,
        chunk: ChunkId,
        called: Called,
        place: int,
    ) -> Chosen:
        """A call of the rule: plain without a hook, or recomputed as modes "checkpoint" and "hidden_states"
        do; moved whole where it may not be recomputed and does not fit."""
        kind, at = called.kind, (chunk, place)
        if chunk not in self._rules:
            first_bytes = self._first_bytes.setdefault(chunk.stage, called.input_bytes)
            self._rules[chunk] = rule_for(called.input_bytes / first_bytes, chunk)
        rule, profile, looks = self._rules[chunk], self.profiles[kind], self.looks
        is_plain = rule.is_plain(chunk, place)
        look, device = None, engine.device
        if looks is not None:

            def look() -> Look:
                begun = Look(device)
                own = looks.setdefault(kind, KindLooks())
                (own.plain if is_plain else own.recomputed).append((called.input_bytes, begun))
                return begun

        if is_plain or profile.only:
            called.level = 0
            return Chosen(is_plain=True, moves=not is_plain, required=True, look=look, place=at)
        keeps = self._always_of(kind, profile)

        def before_again() -> Callable[[], None]:
            assert looks is not None
            with engine.lock:  # so that what is made again is not taken for what the engine does not count
                engine.transfers.claim(profile.menu[-1].made_again_bytes)
            begun = Look(device)
            looks.setdefault(kind, KindLooks()).again.append(begun)

            def ended() -> None:
                begun.end()
                self.backward_reads(engine, at, begun.end_bytes)

            return ended

        return Chosen(
            is_plain=False,
            contexts=self._contexts_for(keeps) if keeps else None,
            moves=rule.moves,
            before_again=None if looks is None else before_again,
            look=look,
            place=at,
        )

    def _always_of(self, kind: Kind, profile: BlockProfile) -> Kept:
        """Calls that are retained even by a recompute that retains nothing else: a menu's last level retains
        what costs no bytes, too, and each call that is retained takes the host time."""
        known = self._always.get(kind)
        if known is None or known[0] is not profile:
            known = self._always[kind] = profile, kept_always(profile.calls)
        return known[1]

    def backward_reads(
        self, engine: OffloadEngine, at: tuple[ChunkKey, int], active_bytes: int, to_come_bytes: int = 0
    ) -> None:
        """All that the backward of a call reads is on the device, but for what is to come."""
        if self.trace is not None:
            rest_bytes = active_bytes - engine.transfers.device_bytes
            self.trace.backward_reads(*at, active_bytes + to_come_bytes, rest_bytes)

    def _step_begins(self, engine: OffloadEngine) -> None:
        """Count gradients that are there already, as where a loop keeps them for another step, from the begin
        on."""
        self._grown_before = 0
        if self.levels is None or not self.growth.most:
            return
        rest_bytes = engine.device.active_bytes() - engine.transfers.device_bytes
        self._grown_before = min(self.growth.most, max(0, rest_bytes - self.growth.resident))
        with engine.lock:
            engine.transfers.grow(self._grown_before)

    def grown_at(self, at: tuple[ChunkKey, int]) -> int:
        """Bytes that the step has made by the backward of a call, or had before; all of them where that did
        not run in the step that was measured."""
        return max(self._grown_before, self.growth.by_call.get(at, self.growth.most))

    def moved_bytes(self, at: tuple[ChunkKey, int]) -> int:
        """That a plain call which moves what it saves will have back in its backward."""
        chunk, place = at
        profile = None if self.trace is None else self._known(self._ran[ChunkId(*chunk)][1][place]).profile
        return 0 if profile is None else profile.plain_bytes

    def begin_trace(self, trace: Trace) -> None:
        """The next step is measured."""
        self.trace = trace
        self._first_bytes.clear()
        self.looks = {}

    def end_looks(self) -> None:
        self.trace = self.looks = None

    def costs(self, kinds: Collection[Kind], bytes_per_s: float) -> dict[Hashable, KindCost]:
        """Costs of these kinds, from the step that was measured and that of the probes. bytes_per_s: of the
        link, which what may not be recomputed would take. Later plans are made from the seconds of the plain
        calls. The device must have passed all of them."""
        found: dict[Hashable, KindCost] = {}
        for kind in kinds:
            looks = (self.looks or {}).get(kind, KindLooks())
            profiled_bytes = self._input_bytes[kind]
            # in the step that was measured, which need not be as long as the profiled call
            input_bytes = next((own for own, _ in looks.recomputed + looks.plain), profiled_bytes)
            profile = self._profile_for(kind, input_bytes / profiled_bytes)
            saved = max(0, profile.plain_bytes - profile.given_bytes)
            grown = _grown(looks.recomputed, input_bytes)
            if looks.plain and looks.recomputed:
                saved = max(saved, _grown(looks.plain, input_bytes) - grown)
            seconds = [taken for look in looks.again if (taken := look.seconds()) is not None]
            timed = ((own, look.seconds()) for own, look in looks.plain)
            plain = [taken * input_bytes / own for own, taken in timed if taken is not None]
            # of recomputes the first ones are compared (checkpoint/net.py), which takes longer than they do
            again_s = min(plain or seconds) if seconds else 2 * saved / bytes_per_s
            stays = input_bytes if profile.input_bytes else 0
            found[kind] = KindCost(saved, stays, again_s, input_bytes)
            if plain and kind in self._own:
                self._own[kind] = self._own[kind].timed(min(plain) * profiled_bytes / input_bytes)
                self._scaled.clear()
        return found

    def launches(self) -> float:
        """Host's seconds of the forwards that were looked at, over the device's, each kind where that is
        least: a host that is far ahead waits for the device. As `costs`, before `end_looks`."""
        host_s = device_s = 0.0
        for looks in (self.looks or {}).values():
            forwards = (look for _, look in looks.recomputed + looks.plain)
            taken = [(look.host_s / seconds, seconds) for look in forwards if (seconds := look.seconds())]
            device_s += sum(seconds for _, seconds in taken)
            host_s += sum(min(taken)[0] * seconds for _, seconds in taken)
        return host_s / device_s if device_s else 0.0

    def take_ran(self) -> dict[ChunkKey, list[Ran]]:
        """The calls of the step that ended, by chunk."""
        ran, self._ran = self._ran, {}
        self._rules.clear()
        self._step += 1
        come = self.growth.come
        return {
            chunk: [
                self._known(call)._replace(grown_bytes=come.get((chunk, place), 0))
                for place, call in enumerate(calls)
            ]
            for chunk, (_, calls) in ran.items()
        }

    def _known(self, call: Called) -> Ran:
        """The call with the profile that its kind has by now."""
        if call.kind not in self.profiles:
            return Ran(None, call.level, call.input_bytes)
        profile = self._profile_for(call.kind, call.input_bytes / self._input_bytes[call.kind])
        return Ran(profile, call.level, call.input_bytes)

    def _profile_for(self, kind: Kind, factor: float) -> BlockProfile:
        if factor == 1.0:
            return self.profiles[kind]
        profile = self._scaled.get((kind, factor))
        if profile is None:
            if len(self._scaled) >= _MOST_LENGTHS:
                self._scaled.clear()
            profile = self._scaled[kind, factor] = self.profiles[kind].scaled(factor)
        return profile

    def _unplanned(
        self,
        kind: Kind,
        root: ModelRoot,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        engine: OffloadEngine,
        called: Called | None,
        never: bool,
    ) -> Chosen:
        """A call that no plan is for: the first of a kind is profiled, the others are recomputed where that
        may be, keeping what every level keeps. never: none may be, whatever is seen."""
        profiler = self._profilers.get(kind)
        if kind in self._own:  # and not followed yet
            profile = self._own[kind]
            only, keeps = profile.only, self._always_of(kind, profile)
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
                self._always[kind] = None, profiler.kept_always()
            keeps = self._always.get(kind, (None, frozenset()))[1]
        if only:
            return Chosen(is_plain=True, required=True)
        return Chosen(is_plain=False, contexts=self._contexts_for(keeps) if keeps else None)

    # -- profiles --------------------------------------------------------------------------------------------
    def take_profiles(self, device: Device) -> None:
        """Read what was profiled in the step that ended. Blocks the host until the device is done with it."""
        waiting = [(kind, profiler) for kind, profiler in self._profilers.items() if profiler is not None]
        if waiting:
            device.synchronize(device.record(device.compute))
        for kind, profiler in waiting:
            self._profilers[kind] = None
            if profiler.ready():  # else its forward raised, and the next call is profiled
                profile = self._own[kind] = profiler.profile()
                self.peers |= peers_of(profile.collectives)
                if profile.only:
                    logger.info("auto: one kind of block is never recomputed: %s", profile.only)
                for call, why in profile.why_not.items():
                    logger.debug("auto: %s is not kept: %s", call, why)

    def follow_own(self) -> None:
        """From now on the profiles are those that were seen here."""
        self.profiles |= self._own
        self._input_bytes |= self._own_input_bytes

    def own_profiles(self) -> list[tuple[BlockProfile, int] | None]:
        """Profiles that were seen on this rank, with the bytes of their input, in the order of the first
        calls; None for a kind that has none yet."""
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


def _grown(looks: Sequence[tuple[int, Look]], input_bytes: int) -> int:
    """Active bytes by which forwards grew, for an input of so many."""
    grown = [(look.end_bytes - look.begin_bytes) * input_bytes / max(1, own) for own, look in looks]
    return round(median(grown)) if grown else 0


def _input_bytes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the first tensor that a call is given: the measure of its tokens."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value.numel() * value.element_size()
    return 1
