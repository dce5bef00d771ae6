"""The weights of one model's blocks on the host, and each block's on the device when it is used.

    forward of a block      loads it if nobody foretold it; its weights are torch's own Parameters inside
                            saves of a weight become (weight, layout); afterwards the class watches again
    backward                a read of such a save, or the block's recompute, loads it
    after each              what comes next is fetched, into the room of what comes last

One invariant: a loop computes what it computes without this, bit for bit. Predictions and plans change only
when bytes move.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from offload.client import Client, Phase, weakly
from offload.compile import untraced
from offload.engine import OffloadEngine
from offload.errors import CaptureError
from offload.params.sections import check_budget
from offload.params.watched import Claim, is_alone
from offload.policy.streamed import Plan, Size, best_plans, first_plan, least_window
from offload.sizes import bytes_text, enough_text
from offload.telemetry.records import ClientStats
from offload.telemetry.speaker import Once, speaker
from offload.weights.choose import Choice
from offload.weights.experts import Experts
from offload.weights.figures import WeightFigures
from offload.weights.hooks import HostState, open_saves, refuse_without_values
from offload.weights.order import Measured, MeasuredStep, Order, Pass, Use
from offload.weights.parameters import Parameters
from offload.weights.residency import Policy, Residency
from offload.weights.watched import make_plain, watch
from offload.weights.weight import BlockWeights, Close, Weight, in_backward, nobody, written

logger = speaker(__name__)

_outside_transforms = temporarily_clear_interpreter_stack
"""What moves is no part of what torch.func transforms."""
_PHASES = {Pass.FORWARD: Phase.FORWARD, Pass.BACKWARD: Phase.BACKWARD}
_PLANNED = 8
"""Uses of each block, such as of four microbatches, by which a longer step is planned: all of a generation's
would take minutes."""

_TOO_SLOW = 1.2
"""Of what is planned with all weights on the device: what takes longer is said."""


class WeightStream(Client):
    """Stream of one model's weights. limit_bytes: of streamed weights on the device at once; None for as few
    as a pass needs. policy: decides instead; without a limit of bytes.

    Raises ValueError where two blocks do not fit into the limit, HostBudgetError where the host has no room;
    nothing has changed then. Blocks the host while memory is pinned and the weights move.
    """

    name = "weights"

    def __init__(
        self,
        engine: OffloadEngine,
        model: nn.Module,
        choice: Choice,
        limit_bytes: int | None,
        policy: Policy | None = None,
    ) -> None:
        self._engine, self._device, self._lock = engine, engine.device, engine.lock
        self.model_name = type(model).__name__
        named = enumerate(choice.blocks.items())
        self.blocks = [BlockWeights(at, name, self._device, weights) for at, (name, weights) in named]
        self._sizes = [Size(block.nbytes, block.link_bytes) for block in self.blocks]
        least = least_window(self._sizes)
        if limit_bytes is not None and limit_bytes < least:
            raise ValueError(
                f"weights={bytes_text(limit_bytes)} for {self.model_name}: one block computes while the next "
                f"arrives, which takes {enough_text(least)} together; give at least that, or "
                'weights="host" for no more than that'
            )
        self.residency = Residency(engine, self.name, self.blocks, policy)
        self.experts = Experts(self.residency, self._begin)
        what = f"the streamed weights of {self.model_name}"
        check_budget(engine.arena, self._host_bytes, what, "name fewer blocks")
        self._asked_bytes = limit_bytes or (0 if policy is None else 1 << 62)
        self.order = Order()
        self.figures = WeightFigures(blocks=len(self.blocks), resident=choice.resident)
        self._resized()
        self._measured = Measured(engine.device, engine.copier)
        self._step: MeasuredStep | None = None  # as it was measured last
        self._said = Once()
        self._handles: list[Any] = []
        self.removed = False
        reference = weakref.ref(self)
        for weight in self._weights:
            weight.holder, weight.use = reference, self._use_saved
        self.parameters = Parameters(self.residency, self._resized)
        self._say_shared()
        self.parameters.take(model)
        self.model = weakref.ref(model)
        if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
            gate = model.register_forward_pre_hook(refuse_without_values, prepend=True)
            self._handles.append(gate)
        for weight in self._weights:
            module, hook = weight.module(), HostState(weight)
            assert module is not None  # the model has it
            self._handles.append(module.register_state_dict_post_hook(hook))
            self._handles.append(module.register_load_state_dict_pre_hook(hook.loading))
            self._handles.append(module.register_load_state_dict_post_hook(hook.loaded))
        handle = register_optimizer_step_post_hook(weakly(self._stepped))
        self._handles.append(handle)
        weakref.finalize(self, handle.remove).atexit = False  # of a model that is dropped
        engine.attach(self)

    # -- forwards of blocks ----------------------------------------------------------------------------------
    def enter(self, block: BlockWeights, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Close:
        """Begin a use of the block (`BlockHolder`). Blocks the host: as `_used` and `Residency.use` do."""
        with self._lock:
            during = Pass.FORWARD if torch.is_grad_enabled() else Pass.INFERENCE
            self._used(block, during, block.weights)
            block.entered += 1
            transformed = torch._C._functorch.peek_interpreter_stack() is not None
            is_plain = block.compiled or transformed or in_backward()  # as a recompute's saves are
            for weight in block.weights:
                if is_plain or weight.uses is None or weight.parameter.requires_grad:
                    make_plain(weight.parameter)
            if self._measured.tokens is None:
                self._measured.look_at((*args, *kwargs.values()))
        self._say_casts(block)
        return self._open_pair((block,))

    def leave(self, block: BlockWeights, close: Close) -> None:
        """End a forward or a recompute of the block (`BlockHolder`)."""
        close()
        with self._lock:
            self._released(block)
            if not self.removed:
                with _outside_transforms():
                    self.residency.fetch_ahead(self.order, (), lambda block: False)

    def free(self, block: BlockWeights) -> None:
        """Take the block off the device now, unless somebody uses it."""
        with self._lock, _outside_transforms():
            if block.may_leave and not self.removed:
                self.residency.drop(block)

    def leave_device(self) -> None:
        """Move everything that nobody uses off the device, until it is used (`Holder`)."""
        with self._lock, _outside_transforms():
            self.residency.leave()
            for each in self.experts.weights:
                if each.whole.may_leave:
                    self.residency.drop(each.whole)
            self.experts.window.leave()

    def _released(self, block: BlockWeights) -> None:
        block.entered -= 1
        if block.entered or self.removed:
            return
        found: list[Weight] = []
        for weight in [*block.weights]:
            with torch._C.DisableTorchFunctionSubclass():
                storage = weight.parameter.untyped_storage()
            if storage._cdata != weight.storage._cdata:
                self.parameters.let_go(weight)
                if self._said.first("let go"):
                    logger.warning(
                        f"{weight.name}: a forward of its block sets its .data, which may be saved for the "
                        "backward then: it is resident from here on. Write it in place under no_grad() to "
                        "have it stream"
                    )
                continue
            if weight.parameter._version != weight.version:
                found.append(weight)
            watch(weight.parameter, weight)
        block.called = self.residency.readers.places()
        for weight in found:
            self.wrote(weight)
        if block.index < 0:
            if block.may_leave:
                self.residency.drop(block)
        elif not torch.is_grad_enabled():  # an evaluation ends no step
            self._learn((block,))

    def _begin(self, block: BlockWeights) -> None:
        """Before its weights are used. Raises CaptureError."""
        if self._device.is_capturing():
            raise CaptureError(
                f"a CUDA graph is captured over {block.name}, whose weights are on the host and come "
                "to other addresses each time; capture what is outside of the streamed blocks, or leave "
                "weights= out"
            )
        with _outside_transforms():
            self.parameters.take_host_writes(block)

    def _used(self, block: BlockWeights, during: Pass, weights: Sequence[Weight]) -> None:
        """The current lane is about to use these weights of the block; in a backward, whatever `during` says.
        Blocks the host for a step of them that is not issued."""
        self._begin(block)
        for weight in weights:
            weight.await_step()
        if block.index < 0:
            self.experts.use_whole(block)
            return
        if in_backward():
            during = Pass.BACKWARD
        if (sees := self._engine.on_phase) is not None and during in _PHASES:
            sees(_PHASES[during])
        use = Use(block.index, during)
        is_new = self.order.note(use)
        with _outside_transforms():
            before = self._measured.before_use() if is_new else None
            found = self.residency.use(block, self.order.coming(), weights)
            if not is_new:
                return
            self.residency.hits += found
            self.residency.misses += not found
            if self.residency.policy is not None:
                self.residency.policy.used(block)
            self._measured.after_use(use, before)
            self.residency.fetch_ahead(self.order, (block.index,), lambda block: False)

    def _use_saved(self, weight: Weight) -> None:
        """Before a save of the weight is read."""
        with self._lock:
            if not self.removed:
                self._used(weight.block, Pass.BACKWARD, (weight,))

    def _open_pair(self, blocks: Collection[BlockWeights]) -> Close:
        """Call `open_saves`; where torch admits no saved-tensor hooks the blocks stay, which is said once."""
        close, admitted = open_saves(self._engine.hooks)
        if admitted:
            return close
        for block in blocks:
            block.pinned = True
        if self._said.first("transformed"):
            logger.warning(
                f"{self.model_name} runs inside a transform of torch.func (grad, vjp, vmap, ...) or "
                "disable_saved_tensors_hooks(), where torch admits no saved-tensor hooks: the weights that "
                "it uses there stay on the device until remove(). torch.autograd.grad() and backward() have "
                "no such limit"
            )
        return close

    # -- reads and writes from outside -----------------------------------------------------------------------
    @contextmanager
    def hold(self, weights: Collection[Weight]) -> Iterator[None]:
        """Hold the weights' blocks on the device inside, for the current lane (`Holder`)."""
        self.residency.readers.note()
        blocks: dict[BlockWeights, list[Weight]] = {}
        for weight in weights:
            blocks.setdefault(weight.block, []).append(weight)
        held: list[BlockWeights] = []
        close: Close = nobody
        try:
            with self._lock:
                for block, used in blocks.items():
                    if not block.entered or any(weight.uses is None for weight in used):
                        self._used(block, Pass.OUTSIDE, used)
                    block.entered += 1
                    held.append(block)
            close = self._open_pair(blocks)
            yield
        finally:
            close()
            with self._lock:
                for block in held:
                    self._released(block)

    def wrote(self, weight: Weight) -> None:
        """Note a write (`Holder`). Raises OffloadError for an INT8 weight, which is as before then."""
        weight.version = weight.parameter._version
        if weight.int8:
            with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                weight.parameter.data.copy_(weight.on_host())
            raise written(weight)
        weight.dirty = True
        self._device.note_write(self._device.compute, weight.on_device)
        if weight.experts is not None:
            weight.experts.forget()

    def set_data(self, weight: Weight, value: Tensor) -> None:
        """Set `.data`. Raises OffloadError for an INT8 weight, but for a conversion to another dtype."""
        if weight.int8 and value.device == self._device.torch_device:
            with self.hold((weight,)), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                same = torch.equal(weight.parameter.to(value.dtype), value)
            if not (same and value.is_floating_point()):
                raise written(weight)
        with self._lock:
            self.parameters.set_data(weight, value)

    def host_copy(self, weight: Weight) -> Tensor:
        """View of the master on the CPU (`Holder`). Blocks the host for a copy that is still to come."""
        self.residency.readers.note()
        with self._lock:
            return self.parameters.host_copy(weight)

    @untraced
    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """State dicts that somebody still has get what was stepped: torch.distributed.checkpoint takes the
        model's, steps an optimizer without state, and loads into both. Blocks the host then."""
        for weight in self._weights:
            if weight.is_old_to_readers:
                self.host_copy(weight)

    def claim(self, weight: Weight) -> Claim:
        """Claim the weight (`BlockHolder`). The master has the newest bytes, or will behind the events."""
        with self._lock:
            block = weight.block
            self.parameters.take_host_writes(block)
            self.residency.write_back(block, only=weight)  # the others may be written meanwhile
            weight.stale |= not self.residency.stays(block, self.order.coming())
            weight.stepped_here = not weight.stale or (weight.stepped_here and weight.is_under_way)
            events = tuple(event for event in (block.left, block.arrived) if event is not None)
            return Claim(None if weight.stale else weight.on_device, weight.writes, events)

    def adopt(self, weight: Weight) -> None:
        """Stream the parameter that load_state_dict(assign=True) has put in its place (`BlockHolder`)."""
        with self._lock:
            self.parameters.adopt(weight)

    @property
    def _weights(self) -> list[Weight]:
        """The weights that stream, by the block and by the expert."""
        by_block = (weight for block in self.blocks for weight in block.weights)
        return [*by_block, *(each.weight for each in self.experts.weights)]

    def int8_weights(self) -> list[Weight]:
        return [weight for weight in self._weights if weight.int8]

    # -- steps -----------------------------------------------------------------------------------------------
    def end_step(self) -> ClientStats:
        """End the step's transfers and return the weights' figures (`Client.end_step`)."""
        (came, left, hits, misses), stall_count, stall_ms = self.residency.end_step()
        figures, experts, readers = self.figures, self.experts, self.residency.readers
        window = experts.window
        if hits + misses:
            figures.steps += 1
            figures.in_bytes, figures.out_bytes, figures.stall_ms = came, left, stall_ms
            figures.hits, figures.misses = hits, misses
            figures.expert_hits, figures.expert_misses = window.hits, window.misses
            figures.counts_ms, figures.calls_ms = experts.waited_s * 1e3, readers.waited_s * 1e3
        window.hits, window.misses, experts.waited_s, readers.waited_s = 0, 0, 0.0, 0.0
        self.order.step_ends()
        if self.residency.follow_limits():
            self.residency.trim()
        self._learn(self.blocks)
        if (step := self._measured.step_ended()) is not None:
            self._plan_with(step)
        self._say_replaced()
        self._say_larger()
        lent, here = self._host_bytes, self.residency.present_bytes + window.held_bytes
        return ClientStats(lent_bytes=lent, device_bytes=here, stall_ms=stall_ms, stall_count=stall_count)

    def _learn(self, blocks: Collection[BlockWeights]) -> None:
        if self.residency.policy is None and self.experts.learn(blocks):
            self.figures.expert_weights = len(self.experts.weights)
            self._resized()

    # -- which blocks stay -----------------------------------------------------------------------------------
    @property
    def _host_bytes(self) -> int:
        return sum(size.arriving for size in self._sizes) + self.experts.window.nbytes

    def _resized(self) -> None:
        """Blocks have other bytes than before: plan as if nothing were measured."""
        self._sizes = [Size(block.nbytes, block.link_bytes) for block in self.blocks]
        self.figures.streamed_bytes = self._host_bytes
        self.figures.int8_bytes = sum(b.link_bytes - b.nbytes + b.expanded_bytes for b in self.blocks)
        whole = [*self._sizes]
        for each in self.experts.weights:
            size, nbytes = whole[each.parent.index], each.weight.nbytes
            whole[each.parent.index] = Size(size.used + nbytes, size.arriving + nbytes)
        self.limit_bytes = max(self._asked_bytes, least_window(whole))
        least = least_window(self._sizes)
        self.experts.window.share(self.limit_bytes - least)
        self.limit_bytes = max(self.limit_bytes, least + self.experts.window.room_bytes)
        self._take_plan(first_plan(self._sizes, self._limit_of_blocks))

    @property
    def _limit_of_blocks(self) -> int:
        """Without what weights have that stream by the expert."""
        return self.limit_bytes - self.experts.window.room_bytes

    def resize(self, limit_bytes: int) -> None:
        """So many bytes of the weights may be on the device from here on, at least a window. Between two
        steps. Blocks the host for steps of weights that leave."""
        with self._lock:
            self._asked_bytes = limit_bytes
            self._resized()
            if self._step is not None:
                self._plan_with(self._step)

    def take_peak(self) -> int:
        """Return bytes of the weights that were on the device at most since the last call."""
        residency = self.residency
        peak, residency.present_bytes_peak = residency.present_bytes_peak, residency.present_bytes
        return peak + self.experts.window.held_bytes

    def measure_anew(self) -> None:
        """One of the next steps is measured: blocks compute for another time than they did."""
        with self._lock:
            self._measured.measure_anew()

    @property
    def measured_s(self) -> float | None:
        """Seconds that blocks computed in the step that was measured last, None before and while one is to
        be measured anew."""
        step = self._step
        if step is None or self._measured.is_awaited:
            return None
        return sum(seconds for _, seconds in step.uses)

    def planned(self, limits: Sequence[int], longer: float = 1.0) -> list[tuple[float, int]] | None:
        """Seconds of a step that compute waits for weights within each of these limits, by calculation, and
        the weights' bytes on the device, which may be fewer, where blocks compute `longer` times as long.
        None before a step was measured."""
        step, least = self._step, least_window(self._sizes)
        if step is None:
            return None
        uses = [(use.block, longer * seconds) for use, seconds in step.uses[: _PLANNED * len(self._sizes)]]
        experts_bytes = self.experts.window.room_bytes
        rooms = [max(least, limit - experts_bytes) for limit in limits]
        compute_s, times = sum(seconds for _, seconds in uses), len(step.uses) / len(uses)
        found = best_plans(uses, self._sizes, rooms, step.bytes_per_s)
        return [
            (max(0.0, took_s - compute_s) * times, plan.device_bytes(self._sizes) + experts_bytes)
            for plan, took_s in found
        ]

    def _plan_with(self, step: MeasuredStep) -> None:
        self._step = step
        sizes, rate = self._sizes, step.bytes_per_s
        self.figures.compute_ms = sum(seconds for _, seconds in step.uses) * 1e3
        if self.residency.policy is not None:
            return
        limits = self._limit_of_blocks, self._limit_of_blocks + 10**9
        uses = [(use.block, seconds) for use, seconds in step.uses[: _PLANNED * len(sizes)]]
        (plan, took_s), (_, with_more_s) = best_plans(uses, sizes, limits, rate)
        compute_s, times = sum(seconds for _, seconds in uses), len(step.uses) / len(uses)
        self.figures.next_gb_ms = (took_s - with_more_s) * times * 1e3
        self._take_plan(plan)
        if self._may_say_link() and 0 < compute_s * _TOO_SLOW < took_s and self._said.first("link"):
            self._say_link(took_s / compute_s, step.longest_pass(sizes))

    def _take_plan(self, plan: Plan) -> None:
        for block in self.blocks:
            block.keep = block.index in plan.keep
        self.residency.bound(plan.window_bytes, least_window(self._sizes))
        self.residency.trim()
        self.figures.kept_blocks, self.figures.limit_bytes = len(plan.keep), self.limit_bytes

    # -- what is said once -----------------------------------------------------------------------------------
    def _say_shared(self) -> None:
        shared = [w.name for w in self._weights if not (w.without_values or is_alone(w.parameter))]
        if shared:
            logger.warning(
                f"{len(shared)} streamed weights of {self.model_name} share their memory with something else "
                f"(the first: {shared[0]}), such as a tensor that .data gave or a state dict: they get "
                "memory of their own, and a write to one is not seen in the other; take such tensors after "
                "apply()"
            )

    def _say_casts(self, block: BlockWeights) -> None:
        kind = self._device.torch_device.type
        if not torch.is_autocast_enabled(kind):
            return
        cast = torch.get_autocast_dtype(kind)
        wide = any(weight.parameter.dtype == torch.float32 != cast for weight in block.weights)
        if wide and self._said.first("autocast"):
            logger.warning(
                f"{block.name} is in float32 and runs under autocast to {cast}: each cast of a weight is "
                "saved for the backward, and stays on the device as without weights=. Convert frozen blocks "
                f"to {cast}, which halves what crosses the link too"
            )

    def _say_replaced(self) -> None:
        """At a step's end, when no functional_call has put others in their place for its own duration."""
        weights = [weight for block in self.blocks if not block.entered for weight in block.weights]
        weights += [each.weight for each in self.experts.weights]
        replaced = [weight.name for weight in weights if weight.replaced_by() is not None]
        if replaced and self._said.first("replaced"):
            logger.warning(
                f"{len(replaced)} streamed weights have another parameter in their place (the first: "
                f"{replaced[0]}), which is resident; call remove() and apply() again to have it stream, or "
                "use load_state_dict(assign=True), which is followed"
            )

    def _say_larger(self) -> None:
        """At a step's end, when a conversion is whole, or some weights stream by the expert beside blocks."""
        if 0 < self._asked_bytes < self.limit_bytes and self._said.first("larger"):
            logger.warning(
                f"{self.model_name}: its weights, as they are converted or come by the expert, take "
                f"{enough_text(self.limit_bytes)} for two blocks, more than weights= allows, "
                f"{bytes_text(self._asked_bytes)}; remove() and apply() again with at least that"
            )

    def _may_say_link(self) -> bool:
        """Not of a simulated link, unless a test wants it."""
        return self._device.pins

    def _say_link(self, slower: float, longer: float) -> None:
        tokens, hides = self._measured.tokens, ""
        if tokens is not None:
            hidden = round(tokens * longer)
            hides = f" It would hide from about {hidden:,} tokens a forward on; this one has {tokens:,}."
        logger.warning(
            f"{self.model_name}: the link makes a step {(slower - 1) * 100:.0f}% longer than with all "
            f"weights on the device: a block's weights take longer to come than the block computes.{hides} "
            "Give weights= more bytes (explain() has what the next GB gains), or more tokens to a forward"
        )

    # -- the end ---------------------------------------------------------------------------------------------
    def remove(self, where: torch.device | None = None) -> None:
        """Return the weights to where `apply` found them, or bring them to `where`: the CPU, or the device of
        the engine. Raises ValueError where they do not fit, or torch.OutOfMemoryError, and goes on
        streaming then. Blocks the host."""
        here = self._device.torch_device
        if where not in (None, here, torch.device("cpu")):
            raise ValueError(
                f"remove(device={str(where)!r}) of a model that trains on {here}: give that, or the CPU"
            )
        with self._lock:
            if not self.removed:
                for each in [*self.experts.weights]:
                    each.end()
                    self._resized()
                self.parameters.give_back(where)
                self.removed = True
                for handle in self._handles:
                    handle.remove()
                self._measured.end()
                self.residency.share.end()
                self._engine.detach(self)
