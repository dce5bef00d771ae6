"""Mode "auto": where weights, gradients and an optimizer's state are, under the one total of device memory.

    apply      what is known by arithmetic is placed, so that step 1 has room (splits.py)
    later      a step was measured: the split that is best by calculation runs some steps, and is followed if
               these were faster than those of the first one
    a move     after an optimizer's step, between two steps of the loop, never inside one

Each kind has a follower of its own: the weights' limit, the gradients' stream, and the buckets of state that
stay. One invariant: a move changes where bytes are between steps, and no kernel: what steps the weights is
the optimizer's own fused one, or its state stays where it is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from offload.auto.ladder import Ladder, State
from offload.client import weakly
from offload.compile import untraced
from offload.engine import OffloadEngine
from offload.errors import HostBudgetError
from offload.modules.memory import refuse_beyond_device, size_of, sizes_of
from offload.modules.weights import chosen_weights, waiting_gradients
from offload.optim.classes import is_fused_adam
from offload.optim.convert import (
    MoveBack,
    check_optimizer,
    host_and_device_bytes,
    is_ours,
    move_state_to_host,
)
from offload.params.view import local_of
from offload.planner.explained import KindShare
from offload.policy.splits import Loads, Split, all_of, device_bytes, first_split, least_of, shared
from offload.policy.streamed import least_window
from offload.sizes import bytes_text
from offload.telemetry.speaker import speaker
from offload.weights.choose import Choice
from offload.weights.files import Slab
from offload.weights.gradients import GradientStream, window_bytes
from offload.weights.stream import WeightStream

logger = speaker(__name__)

_WITHOUT_OPTIMIZER = 0.9
"""Of the total: weights and gradients that take less stay, where nobody said which optimizer steps them."""

_STEPS = 4
"""Of a split, whose last two are compared: in the first ones memory is new and the rule is corrected."""

_GB = 10**9

_PATIENCE = 12
"""Steps in which the blocks' weights may be measured."""


@dataclass(slots=True)
class Streams:
    """Streams of one handle as they are now: weights, gradients and optimizer state.

    move_back: undoes the optimizer's conversion. unhook_gradients: takes the gradients' hooks off the model.
    """

    weights: WeightStream | None = None
    gradients: GradientStream | None = None
    move_back: MoveBack | None = None
    unhook_gradients: Callable[[], object] = int

    @property
    def are_none(self) -> bool:
        return not (self.weights or self.gradients or self.move_back)


class Placed(NamedTuple):
    """Places of all kinds before step 1.

    | choice, slab | weights that stream, and the file of their INT8 values |
    | limit_bytes | of streamed weights on the device |
    | waiting | names of parameters whose gradients wait on the host |
    | moves_state | the optimizer's state goes to the host |
    | loads, split | bytes of each kind that may move, and where they are |
    """

    choice: Choice | None
    slab: Slab | None
    limit_bytes: int | None
    waiting: Sequence[str]
    moves_state: bool
    loads: Loads
    split: Split


def place(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    where: torch.device,
    total_bytes: int,
    optimizer: Optimizer | None,
    by_hand: tuple[Choice | None, Slab | None, int | None, Sequence[str]],
    *,
    gradients: str | None,
    quantize: str | None,
    least: int | None,
    measures: bool,
) -> Placed | None:
    """Choose what leaves the device before step 1; None where all may stay, or nothing can move.

    blocks: by name. by_hand: weights that stream because the user said so, with their slab and limit, and
    gradients that wait. gradients, quantize, least: as `apply` has them. measures: the device has memory of
    its own. Raises ValueError where nothing fits; nothing has changed.
    """
    choice, slab, limit_bytes, waiting = by_hand
    is_by_hand = choice is not None
    moves = optimizer is not None and _is_streamable(optimizer)
    able: Sequence[str] = waiting
    if gradients is None and not waiting:
        try:
            able = waiting_gradients(model, "host", None, least)
        except ValueError:  # none is worth a copy, or somebody else has them
            able = ()
    is_away = any(local_of(each).device != where for each in model.parameters())
    if not is_by_hand:
        choice, slab = _chosen(model, blocks, where, None, least)
        if is_away and choice is None:  # nothing of ours brings it to the device
            return None
    loads = _loads(model, choice, able, optimizer, moves=moves)
    fits = not measures or device_bytes(loads, all_of(loads)) <= _WITHOUT_OPTIMIZER * total_bytes
    if fits and optimizer is None and not is_away and not is_by_hand:
        return None
    split = first_split(loads, total_bytes)
    if quantize == "auto" and choice is not None and split.weights < loads.weights and not is_by_hand:
        int8, slab = _chosen(model, blocks, where, "int8", least)
        if int8 is not None:
            choice, loads = int8, _loads(model, int8, able, optimizer, moves=moves)
            split = first_split(loads, total_bytes)
    if device_bytes(loads, least_of(loads)) > total_bytes:
        could_move = optimizer is not None and not moves and is_fused_adam(type(optimizer))
        _refuse(loads, total_bytes, quantize, could_move=could_move)
    if optimizer is not None and not (moves or is_ours(optimizer)) and split != all_of(loads):
        logger.warning(
            f"the state of {type(optimizer).__name__} stays on the device, beside "
            f"device_total={bytes_text(total_bytes)}: mode='auto' moves state with the optimizer's own "
            "kernel alone, that of torch's Adam or AdamW with fused=True"
        )
    if is_by_hand:
        fixed = limit_bytes or loads.least_weights
        loads = loads._replace(weights=0, least_weights=0, trained_weights=0, resident=loads.resident + fixed)
        split = split._replace(weights=0)
    elif split.weights == loads.weights and not is_away:  # they stay, for good
        resident = loads.resident + loads.weights
        choice, slab = None, None
        loads = loads._replace(weights=0, least_weights=0, trained_weights=0, resident=resident)
        split = split._replace(weights=0)
    if split.gradients or waiting:  # for good, too
        fixed = loads.least_gradients if waiting else loads.gradients
        loads = loads._replace(gradients=0, least_gradients=0, resident=loads.resident + fixed)
        split, able = split._replace(gradients=True), waiting
    if (split == all_of(loads) and choice is None) or not (loads.weights or loads.gradients or loads.state):
        return None  # what is placed by hand stays so
    if choice is not None and not is_by_hand:  # no plan takes a part of a block
        part = gcd(*chain(*sizes_of(choice))) or 1
        split = split._replace(weights=split.weights - split.weights % part)
    limit = limit_bytes if is_by_hand else split.weights
    return Placed(choice, slab, limit, able, split.state < loads.state, loads, split)


def _chosen(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    where: torch.device,
    quantized: str | None,
    least: int | None,
) -> tuple[Choice | None, Slab | None]:
    try:
        return chosen_weights(model, blocks, where, quantized, least=least)
    except ValueError:  # none is worth a copy, or somebody else has them, as FSDP
        return None, None


def _is_streamable(optimizer: Optimizer) -> bool:
    """Predicate: its state may be streamed with the optimizer's own kernel: torch's Adam or AdamW, fused."""
    groups = optimizer.param_groups
    try:
        check_optimizer(optimizer)
    except ValueError:
        return False
    return is_fused_adam(type(optimizer)) and all(
        group.get("fused") and not (group.get("capturable") or group.get("differentiable"))
        for group in groups
    )


def _loads(
    model: nn.Module,
    choice: Choice | None,
    able: Sequence[str],
    optimizer: Optimizer | None,
    *,
    moves: bool,
) -> Loads:
    streamed = [weight for weights in choice.blocks.values() for weight in weights] if choice else []
    sizes = [] if choice is None else sizes_of(choice)
    names = {weight.name for weight in streamed}
    others = [own for name, own in model.named_parameters() if name not in names]
    trained = {name: size_of(own) for name, own in model.named_parameters() if own.requires_grad}
    waits = {name: trained[name] for name in able if name in trained}
    state, ring = (0, 0)
    if optimizer is not None:
        moved, lent = ([*map(model.get_parameter, each)] for each in (names, able))
        state, ring = host_and_device_bytes(optimizer, moved, lent)
    moves = moves and state > ring  # else nothing is spared
    resident = sum(map(size_of, others)) + sum(map(size_of, model.buffers()))
    resident += sum(trained.values()) - sum(waits.values())
    expanding = max((size.arriving for size in sizes if size.arriving < size.used), default=0)
    return Loads(
        weights=sum(size.used for size in sizes) + expanding,
        least_weights=least_window(sizes) if sizes else 0,
        trained_weights=sum(trained.get(name, 0) for name in names),
        gradients=sum(waits.values()),
        least_gradients=min(window_bytes(waits), sum(waits.values())) if waits else 0,
        state=state if moves else 0,
        ring=ring if moves else 0,
        resident=resident if moves else resident + state,
    )


def _refuse(loads: Loads, total_bytes: int, quantize: str | None, *, could_move: bool) -> None:
    parts = {
        "resident weights, gradients and state": loads.resident,
        "a window of weights": loads.least_weights,
        "a window of gradients": loads.least_gradients,
        "a ring of optimizer state": loads.ring,
    }
    ways = [] if quantize else ['quantize="auto", which lets frozen weights be INT8']
    ways += ["fused=True for the optimizer, with which its state may wait on the host"] * could_move
    refuse_beyond_device([*parts.items()], total_bytes, "device_total", ways)


class Kinds:
    """Controller of one model's weights, gradients and optimizer state under the total.

    hook: puts a gradients' stream around the model's forwards, and returns what takes it off. now: the split
    that is in place. is_open: another split may yet be tried.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        model: nn.Module,
        optimizer: Optimizer | None,
        streams: Streams,
        placed: Placed,
        hook: Callable[[GradientStream], Callable[[], None]],
    ) -> None:
        self._engine, self._streams, self._hook = engine, streams, hook
        self._model = weakref.ref(model)
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._names = placed.waiting
        self.loads, self.now = placed.loads, placed.split
        self._first = placed.split
        self._due: Split | None = None
        self._has_moved = False  # since the last step ended
        self._failed = 0  # bytes that a move which failed had been counted with
        self._took: dict[Split, list[float]] = {}  # seconds of whole steps
        self._waited = 0
        self._asked = False  # for a step under the rule to be measured
        self._tried: Split | None = None
        self._judged = False  # by its steps
        self.is_open = True
        self._handle = register_optimizer_step_post_hook(weakly(self._stepped))
        weakref.finalize(self, self._handle.remove).atexit = False

    # -- a step ----------------------------------------------------------------------------------------------
    def take_unused(self) -> int:
        """Return the bytes of the weights' share that none of them had since the last call. A later plan of
        theirs may have them."""
        weights = self._streams.weights
        used = self.now.weights if weights is None else weights.take_peak()
        return max(0, self.now.weights - used)

    def step_ended(self, ladder: Ladder, whole_s: float | None, shift: Callable[[int, bool], None]) -> None:
        """Decide by whole steps whether another split is tried, or the first one comes back. whole_s: seconds
        of the step before, from its begin to the begin of the one that has ended. shift: is told how many
        bytes more are beside saved tensors from the next step on, and whether gradients stay or leave that
        did not. Blocks the host: for about 0.1 s, once, to compare splits."""
        has_moved, self._has_moved = self._has_moved, False
        if has_moved and self._streams.weights is not None:
            self._streams.weights.measure_anew()
        if whole_s is not None and self.is_open and not has_moved:
            self._took.setdefault(self.now, []).append(whole_s)
        if self._failed:
            ladder.begin_again(-self._failed, self.first_bytes)
            shift(-self._failed, True)
            self._failed, self.is_open = 0, False
        if ladder.state is State.REFUSED:
            self.is_open = False
            instead = self._first if self.now != self._first else least_of(self.loads)
            # not measured yet: the least split has passed the total, too
            if self.now != instead and ladder.trace is not None:
                self._go(instead, ladder, shift)
        elif self.is_open and not has_moved:
            self._compare(ladder, shift)
        ladder.waits = self.is_open

    def _compare(self, ladder: Ladder, shift: Callable[[int, bool], None]) -> None:
        took = self._took.get(self.now, [])
        self._waited += 1
        if self._tried is None:
            weights = self._streams.weights
            if not self._asked and weights is not None and ladder.costs and weights.measured_s is not None:
                weights.measure_anew()  # under the rule: what was measured recomputed every block
                self._asked = True
            splits = self._shared(ladder)
            if (splits is None or len(took) < _STEPS) and self._waited < _PATIENCE:
                return
            first = self.first_bytes
            fit = (of for _, of in splits or () if ladder.recompute_s(self._more(of) + first) is not None)
            self._tried = next(fit, self.now)
            if self._tried != self.now:
                self._go(self._tried, ladder, shift)
        elif not self._judged:
            if len(took) < _STEPS and self._waited < 2 * _PATIENCE:
                return
            self._judged, before = True, self._took.get(self._first, [])
            if len(took) > 1 and len(before) > 1 and median(took[-2:]) > median(before[-2:]):
                self._go(self._first, ladder, shift)
        else:
            all_stay = self.now.weights == self.loads.weights
            if not (self._is_measured or all_stay) and self._waited < 2 * _PATIENCE:
                return
            self.is_open, unused = False, self._unused(ladder)
            if unused:  # blocks may have it
                self._go(self.now._replace(weights=self.now.weights - unused), ladder, shift)

    def _unused(self, ladder: Ladder) -> int:
        """Bytes of the weights' share that their plan leaves, also once as many more blocks run plain."""
        stream, limit, unused = self._streams.weights, self.now.weights, 0
        again_s, compute_s = ladder.recompute_s(0), None if stream is None else stream.measured_s
        if not compute_s or again_s is None:
            return 0
        for _ in range(2):
            shorter_s = again_s - (ladder.recompute_s(-unused) or 0.0)
            planned = self._planned([limit], max(0.0, 1.0 - shorter_s / compute_s))
            if planned is None:
                return 0
            unused = max(0, limit - planned[0][1])
        return unused

    def _shared(self, ladder: Ladder) -> list[tuple[float, Split]] | None:
        """The splits that fit, the shortest first by calculation; None while what that needs is not
        known."""
        rates = self._engine.rates
        stream = self._streams.weights
        if rates is None or not ladder.costs or not self._is_measured:
            return None
        both = rates.h2d_bytes_per_s, rates.d2h_bytes_per_s
        compute_s = 0.0 if stream is None else stream.measured_s or 0.0
        at = self._planned
        return shared(self.loads, self.now, both, lambda *of: at(*of) or [], ladder.recompute_s, compute_s)

    @property
    def _is_measured(self) -> bool:
        """Predicate: what blocks compute between their waits for weights is known for the split of now."""
        stream = self._streams.weights
        return stream is None or not self.loads.weights or stream.measured_s is not None

    def _planned(self, limits: Sequence[int], longer: float = 1.0) -> Sequence[tuple[float, int]] | None:
        """Seconds and bytes for each limit (`WeightStream.planned`); weights placed by hand stay so."""
        stream = self._streams.weights
        if stream is None or not self.loads.weights:
            return [(0.0, limit) for limit in limits]
        return stream.planned(limits, longer)

    def _more(self, split: Split) -> int:
        """Bytes on the device that the split has more than the one that is in place."""
        return device_bytes(self.loads, split) - device_bytes(self.loads, self.now)

    def _go(self, split: Split, ladder: Ladder, shift: Callable[[int, bool], None]) -> None:
        more, self._due = self._more(split), split
        ladder.begin_again(more, self.first_bytes)
        shift(more, split.gradients is not self.now.gradients)

    @property
    def first_bytes(self) -> int:
        """Bytes by which weights may pass their share in the first step of another one: a block, whose memory
        is not free before compute has come past it. One H200, a 7 B shape with LoRA within 6 GB: 0.52 GB in
        that step, 0.23 in the next, none later."""
        return self.loads.least_weights // 2

    def shrinks(self) -> bool:
        """A step that recomputes every block has passed the total: whether kinds that are on the device leave
        now."""
        if self.now == least_of(self.loads):
            return False
        self._due = least_of(self.loads)
        return True

    # -- a move ----------------------------------------------------------------------------------------------
    @untraced
    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Hook behind every optimizer's step: make the move that is due. Blocks the host for it."""
        due, model = self._due, self._model()
        mine = None if self._optimizer is None else self._optimizer()
        if due is None or model is None or torch._C._current_graph_task_id() != -1:
            return
        if self._engine.device.is_capturing():
            return
        if mine is not None and optimizer is not mine:
            return
        before, self._due, self._has_moved = self.now, None, True
        try:
            self._move(model, mine, due)
        except (torch.OutOfMemoryError, HostBudgetError) as error:
            logger.warning(f"mode='auto': {_text(due)} do not fit, and what was there before stays: {error}")
            self._failed = device_bytes(self.loads, due) - device_bytes(self.loads, before)
            self._move(model, mine, before)

    def _move(self, model: nn.Module, optimizer: Any, split: Split) -> None:
        """Move kinds to the split, first those that leave the device. Blocks the host."""
        streams = self._streams
        for leaves in (True, False):

            def moves(before: int, after: int, leaves: bool = leaves) -> bool:
                return before != after and (after < before) is leaves

            if streams.weights is not None and moves(self.now.weights, split.weights):
                streams.weights.resize(split.weights)
                self.now = self.now._replace(weights=split.weights)
            if moves(self.now.gradients, split.gradients):
                self._gradients_stay(model, split.gradients)
                self.now = self.now._replace(gradients=split.gradients)
            if optimizer is not None and moves(self.now.state, split.state):
                self._keep_state(optimizer, split.state)
                self.now = self.now._replace(state=split.state)

    def _gradients_stay(self, model: nn.Module, stays: bool) -> None:
        streams = self._streams
        if streams.gradients is not None and stays:
            streams.gradients.remove()
            streams.unhook_gradients()
            streams.gradients = None
        elif streams.gradients is None and not stays:
            streams.gradients = GradientStream(self._engine, model, self._names)
            streams.unhook_gradients = self._hook(streams.gradients)
        if streams.weights is not None:
            streams.weights.figures.gradients = (
                None if streams.gradients is None else streams.gradients.figures
            )

    def _keep_state(self, optimizer: Any, nbytes: int) -> None:
        """All of it stays as torch has it, where no weights stream that the optimizer steps."""
        streams = self._streams
        if nbytes >= self.loads.state and streams.weights is None:
            if streams.move_back is not None:
                streams.move_back()()
                streams.move_back = None
            return
        if streams.move_back is None:
            streams.move_back = move_state_to_host(optimizer, self._engine)
        optimizer.keep_on_device(nbytes)

    # -- in words --------------------------------------------------------------------------------------------
    def shares(self, ladder: Ladder | None) -> list[KindShare]:
        """Rows for `explain()`: bytes on the device and on the host, and what another GB would spare."""
        loads, now, rates = self.loads, self.now, self._engine.rates
        found = []

        def by_link(nbytes: float) -> float | None:
            return None if rates is None else nbytes / rates.h2d_bytes_per_s

        if loads.weights:
            away = loads.weights - now.weights
            more = min(_GB, away)
            planned = self._planned([now.weights, now.weights + more])
            stepped = by_link(more * loads.trained_weights / loads.weights)
            spared = None if planned is None or stepped is None else planned[0][0] - planned[1][0] + stepped
            found.append(KindShare("weights", now.weights, away, spared))
        if loads.gradients:
            stays = loads.gradients if now.gradients else loads.least_gradients
            away = loads.gradients - stays
            found.append(KindShare("gradients", stays, away, by_link(min(_GB, away))))
        if loads.state:
            away = loads.state - now.state
            found.append(KindShare("optimizer's state", now.state, away, by_link(min(_GB, away))))
        if ladder is not None and ladder.costs:
            before_s, after_s = ladder.recompute_s(0), ladder.recompute_s(-_GB)
            spared = None if before_s is None or after_s is None else before_s - after_s
            found.append(KindShare("activations", None, None, spared))
        return [*found, KindShare("all else of them", loads.resident, 0, None)]

    def end(self) -> None:
        """The mode is no longer applied: nothing moves any more."""
        self._handle.remove()
        self._due, self.is_open = None, False


def _text(split: Split) -> str:
    gradients = "gradients" if split.gradients else "no gradients"
    return f"{bytes_text(split.weights)} of weights, {gradients} and {bytes_text(split.state)} of state"
