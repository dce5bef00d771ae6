"""The gradients of one model on the host: an accumulator comes to the device before torch adds to it, and
goes back after.

    the model's forward                    what its backward uses first is fetched
    before a parameter's AccumulateGrad    its gradient is on the device, or comes; what comes next is fetched
    after it                               it is final in this backward
    in a later hook of any parameter       it goes, with others as one piece: a copy to the host beside
                                           compute, its memory behind that. Not in the same hook: those that
                                           come after ours may still use it
    the backward's end                     so go the last; all of them where DistributedDataParallel reduces
                                           them then
    a use from outside                     through the class of what is watched, as of a streamed weight.
                                           Norms that the last step asked for are taken as gradients leave

What compute executes for a copy (an event, a wait, the two points that time it) leaves a gap between kernels.
So gradients come and go in pieces of about a sixth of the window, with one set of these each.

One invariant: torch itself makes every addition, on the device and in its own order, so that the bits are its
own. Bytes cross by `Residency`, whose ordering notes hold for gradients, too.

# [Order: gradients home]
# hazard  WAR: `d2h` writes a gradient's host bytes while `h2d` still reads those of the one before, which was
#         fetched and then thrown away; another lane may have made the new one.
# edge    the block keeps the event of its last way in; d2h waits for it before the first way out.
# alive   the gradient's master.
# proof   tests/property/test_gradient_edges.py, edge "gradients home"
#
# [Order: gradients sent]
# hazard  WAR: a lane writes a gradient that `d2h` still copies to the host: torch adds to it again in the
#         same backward, or the loop scales it.
# edge    the block keeps the event of its last way out; each use waits for it.
# alive   the gradient's storage.
# proof   tests/property/test_gradient_edges.py, edge "gradients sent"
"""

from __future__ import annotations

import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from offload.client import Client, weakly
from offload.device import Event, Lane
from offload.engine import OffloadEngine
from offload.errors import CaptureError
from offload.params.sections import check_budget
from offload.params.watched import has_own_storage
from offload.telemetry.records import ClientStats
from offload.telemetry.speaker import Once, speaker
from offload.versions import queue_callback
from offload.weights.figures import GradientFigures
from offload.weights.gradient import Gradient, is_whole, may_leave
from offload.weights.hooks import CopiedSave, open_saves
from offload.weights.order import Order, Pass, Use
from offload.weights.parameters import close_behind
from offload.weights.residency import Residency
from offload.weights.watched import StreamedGradient, make_plain, orphan, watch
from offload.weights.weight import BlockWeights, Weight, in_backward, nobody

logger = speaker(__name__)

_PIECES = 6
"""Of a window: while compute uses one, two come and two go, each before the link is free for it."""

_TO_FIRST_NUMBER = re.compile(r"(?:.*?\.)??\d+(?=\.)")


def window_bytes(sizes: Mapping[str, int]) -> int:
    """On the device at once, of gradients with these names and bytes. A backward makes those of a block in a
    part of the time that the block takes, and the link has all of it for them: so there is room for those of
    the block before, which go, and of the next, which come, and for the largest one, which is used. A block:
    what has one name up to its first number. At most a quarter of all bytes, and at least the three
    largest."""
    blocks: Counter[str] = Counter()
    for name, nbytes in sizes.items():
        found = _TO_FIRST_NUMBER.match(name)
        blocks[name if found is None else found[0]] += nbytes
    largest = sorted(sizes.values())[-3:]
    window = 2 * max(blocks.values(), default=0) + max(largest, default=0)
    return max(sum(largest), min(window, sum(sizes.values()) // 4))


class GradientStream(Client):
    """Stream of one model's gradients. names: of parameters, trained or not yet.

    Raises HostBudgetError where the host has no room; nothing has changed then. Blocks the host while memory
    is pinned.
    """

    name = "gradients"

    def __init__(self, engine: OffloadEngine, model: nn.Module, names: Iterable[str]) -> None:
        self._engine, self._device, self._lock = engine, engine.device, engine.lock
        self.gradients = [Gradient(model, name, index, engine.device) for index, name in enumerate(names)]
        trained = [each for each in self.gradients if each.owner is not None and each.owner.requires_grad]
        total = sum(gradient.nbytes for gradient in trained)
        check_budget(engine.arena, total, f"the gradients of {type(model).__name__}", "leave gradients= out")
        sizes = {gradient.name: gradient.nbytes for gradient in self.gradients}
        self.blocks = [gradient.block for gradient in self.gradients]
        self.residency = Residency(engine, self.name, self.blocks)
        self.residency.bound(window_bytes(sizes), sum(sorted(sizes.values())[-3:]))
        self.order = Order()
        self.figures = GradientFigures(window_bytes=self.residency.window_bytes)
        self._follow_limit()
        self.reduced_later = self.unused_are_read = False
        """Gradients are final when the backward has ended; then those of unused parameters are read, too."""
        self._note_replicas(*model.modules())
        # not sent yet: what made it, and whether it was brought for that
        self._made: list[tuple[Gradient, Lane, bool]] = []
        # by graph task: what torch is about to add to, and the call at its end, which lives as long as it
        self._open: dict[int, tuple[list[Gradient], Callable[[], object]]] = {}
        self._is_settled = False  # since the last backward
        self._over: set[int] = set()  # blocks that the backward under way, or the last one, has used
        self._going: deque[BlockWeights] = deque()  # sent or read; that of longest ago first
        # what a loop asks of `torch._foreach_norm`, by dtype, and whether it has in this step
        self._norms: dict[torch.dtype, tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]] = {}
        self._has_asked = False
        self._said = Once()
        self._handles: dict[Gradient, tuple[RemovableHandle, RemovableHandle]] = {}
        self.removed = False
        self._hooks = weakly(self._before), weakly(self._after)
        self._end_watch = register_optimizer_step_post_hook(weakly(self._say_set)).remove
        weakref.finalize(self, self._end_watch).atexit = False  # of a model that is dropped
        for gradient in self.gradients:
            gradient.holder = weakref.ref(self)
            weakref.finalize(gradient.module(), _module_is_gone, engine, gradient).atexit = False
        self.hook_trained()
        engine.attach(self)

    def hook_trained(self) -> None:
        """Follow parameters that were frozen, and are trained now, those that have taken another's place, and
        those that were on meta, before somebody else has hooks on them. Blocks the host for pinning."""
        with self._lock, torch._C.DisableTorchFunctionSubclass():  # an optimizer may still write them
            for gradient in self.gradients:
                owner, handles = gradient.owner, self._handles.get(gradient)
                if owner is None or owner.is_meta or not (owner.requires_grad and owner.is_leaf):
                    continue  # one on meta may have no hooks until it has values
                if handles is None or handles[0].hooks_dict_ref() is not owner._backward_hooks:
                    for handle in handles or ():
                        handle.remove()
                    gradient.make_master(self._engine.arena)
                    before, after = (partial(hook, gradient) for hook in self._hooks)
                    hooks = owner.register_hook(before), owner.register_post_accumulate_grad_hook(after)
                    self._handles[gradient] = hooks
                    known: dict[int, Any] = owner._post_accumulate_grad_hooks
                    for key in [key for key in known if key != hooks[1].id]:
                        known[key] = known.pop(key)  # behind ours: an optimizer's frees what it steps
        self.figures.host_bytes = sum(gradient.nbytes for gradient in self._handles)
        self.figures.count = len(self._handles)

    # -- forwards of the model, as HookPair calls ------------------------------------------------------------
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self._lock:
            if not in_backward():  # no recompute
                self._settle()
                self._is_settled = True
                if torch.is_grad_enabled() and not self.removed:
                    self._over.clear()
                    self._fetch_ahead()
            self._note_replicas(module, getattr(DistributedDataParallel, "_active_ddp_module", None))

    def _note_replicas(self, *modules: object) -> None:
        for each in modules:
            if isinstance(each, DistributedDataParallel):
                self.reduced_later = True
                self.unused_are_read |= each.find_unused_parameters or each.static_graph

    def leave(self, state: None, output: Any, failed: bool) -> None:
        with self._lock:
            if self.unused_are_read and torch.is_grad_enabled() and not in_backward():
                for gradient in self.gradients:  # DDP's C++ reads, and writes, what this forward did not use
                    self.let_go(gradient)
            self._trim()

    def _settle(self) -> None:
        """Between two backwards: notice what was cleared, what is trained now, and what an exception has left
        in the last backward."""
        if self.removed:
            return
        self._say_set()
        self._follow_limit()
        self.hook_trained()
        for task in [task for task, (_, at_end) in self._open.items() if at_end() is None]:
            self._backward_ends(task)
        for gradient in self.gradients:
            if gradient.known and not gradient.tensors:
                self._retire(gradient)
        self._trim()

    def _follow_limit(self) -> None:
        self.residency.follow_limits()
        self.figures.window_bytes = self.residency.window_bytes
        self._piece_bytes = self.residency.window_bytes // _PIECES

    def _say_set(self, *stepped: object) -> None:
        """Once: gradients that no accumulation made, seen when an optimizer has stepped, since loops clear
        them then. Those that were let go of stay, as that says."""
        if self._open or ("set",) in self._said:
            return
        made = [each for each in [*self._handles] if not each.known and each.now is not each.let_go()]
        able = [each for each in made if (t := each.now) is not None and may_leave(t, self._device)]
        able = [each for each in able if (t := each.now) is not None and is_whole(t)]
        found = [each.name for each in able if ("held", each.name) not in self._said]
        if found and self._said.first("set"):
            logger.warning(
                f"{len(found)} gradients (the first: {found[0]}) were set as p.grad, not added to by a "
                "backward, as the weight-gradient actions of zero-bubble schedules do, and "
                "DistributedDataParallel where a rank has not used them: they stay on the device until a "
                "backward adds to them. Use a schedule with whole backwards, or leave gradients= out"
            )

    # -- backwards -------------------------------------------------------------------------------------------
    def _before(self, gradient: Gradient, _: Tensor) -> None:
        """Torch is about to add to the gradient, or to make it."""
        with self._lock, torch.no_grad():
            if self.removed:
                return
            task = torch._C._current_graph_task_id()
            if task not in self._open:
                if not self._open:
                    self._over.clear()
                    if not self._is_settled:  # a module inside the model was called
                        self._settle()
                self._is_settled = False
                self._open[task] = [], self._at_end(task, last=False)
            if not self.reduced_later:
                self._send_made(gradient)
            self._over.add(gradient.block.index)
            gradient.norm = None
            found, block = gradient.now, gradient.block
            if gradient.is_owners:
                self._use(gradient, Pass.BACKWARD)
                make_plain(gradient.parameter)
                if block.entered == 1:  # else another thread's backward does the same
                    gradient.version = gradient.parameter._version
            else:
                if isinstance(found, StreamedGradient):  # moved here from another parameter
                    StreamedGradient.stay(found)
                block.entered += 1
                self.order.note(Use(block.index, Pass.BACKWARD))
                self._fetch_ahead((block.index,))
            self._open[task][0].append(gradient)

    def _after(self, gradient: Gradient, _: Tensor) -> None:
        """It has."""
        with self._lock:
            opened = self._open.get(torch._C._current_graph_task_id(), ([], nobody))[0]
            if was_brought := gradient in opened:
                opened.remove(gradient)
            lane, made = self._device.compute, gradient.now
            if made is not None and made.layout is torch.strided and self._device.owns(made):
                self._device.note_write(lane, made)
            self._made.append((gradient, lane, was_brought))

    def _at_end(self, task: int, *, last: bool) -> Callable[[], object]:
        call = partial(weakly(self._backward_ends), task, last)
        queue_callback(call)
        return weakref.ref(call)

    def _backward_ends(self, task: int, last: bool = True) -> None:
        """All gradients of the backward go. last: not before who reduces them has, in such a call of his."""
        with self._lock, torch.no_grad():
            opened, _ = self._open[task]
            if self.reduced_later and not last:
                self._open[task] = opened, self._at_end(task, last=True)
                return
            del self._open[task]  # what is in it is of torch.autograd.grad, or an exception came between
            self._made += [(gradient, self._device.compute, True) for gradient in opened]
            self._send_made(None)

    def _send_made(self, coming: Gradient | None) -> None:
        """Send what is made, by the piece, but for what is used next; all of it where that is None."""
        made = [each for each in self._made if each[0] is not coming]
        if coming is not None and sum(gradient.nbytes for gradient, *_ in made) < self._piece_bytes:
            return
        self._made = [each for each in self._made if each[0] is coming]
        piece: list[Gradient] = []
        for at, (gradient, lane, was_brought) in enumerate(made, 1):
            gradient.block.entered -= was_brought
            # else another backward adds to it
            if not gradient.block.entered and self._may_go(gradient, lane):
                piece.append(gradient)
            if at == len(made) or sum(each.nbytes for each in piece) >= self._piece_bytes:
                self._take_norms(piece)
                self._go(piece)
                piece = []
        self._trim()

    def _take_norms(self, leaving: Iterable[Gradient]) -> None:
        """Take the norms that the last step asked for, of gradients that go and that no other lane uses:
        another way in is saved. In each backward, as nobody says which one is the last. A tensor's norm has
        the same bits in a list of any others of its dtype."""
        lane, kinds = self._device.compute, dict[torch.dtype, list[Gradient]]()
        for each in leaving if self._norms and not self._autocasts else ():
            if each.dirty and [*each.block.readers] == [id(lane)] and each.parameter.dtype in self._norms:
                kinds.setdefault(each.parameter.dtype, []).append(each)
        for dtype, able in kinds.items():
            asked, tensors = self._norms[dtype], [each.parameter for each in able]
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    found = torch._foreach_norm(tensors, *asked[0], **dict(asked[1]))
            except torch.OutOfMemoryError:  # who asks has them taken then
                continue
            for gradient, norm in zip(able, found, strict=True):
                self._device.note_read(lane, gradient.on_device)
                gradient.norm = asked, lane, norm

    @property
    def _autocasts(self) -> bool:
        return torch.is_autocast_enabled(self._device.torch_device.type)

    def take_norm(self, weight: Gradient, tensor: Tensor, asked: Any) -> Tensor | None:
        """Norm of the gradient (`GradientHolder`). Each is given once, as who gets it may write it."""
        with self._lock:
            # a replay would read it of a gradient that was, and autocast widens what some norms are made of
            if self._device.is_capturing() or self._autocasts:
                return None
            self._norms[tensor.dtype], self._has_asked = asked, True
            found, weight.norm = weight.norm, None
            is_whole = tensor is weight.parameter and not weight.is_read_on_host
            is_known = found is not None and found[:2] == (asked, self._device.compute)
            return found[2] if found is not None and is_known and is_whole else None

    def _may_go(self, gradient: Gradient, lane: Lane) -> bool:
        """Return True if the parameter's gradient can go to the host, which follows it from here on. Order:
        [Order: gradients home]."""
        tensor, block = gradient.now, gradient.block
        if gradient.is_owners:
            gradient.dirty |= gradient.parameter._version != gradient.version
            if gradient.is_held_elsewhere:
                self.let_go(gradient)
                return False
            block.readers[id(lane)] = lane
        else:
            self._retire(gradient)  # a hook may have taken it
            if tensor is None or not may_leave(tensor, self._device):
                return False
            if not has_own_storage(tensor):
                # else an optimizer has taken it in the backward, or a hook has a view of it
                if is_whole(tensor):
                    self._said.first("held", gradient.name)
                else:
                    self._say_shared(gradient)
                return False
            gradient.await_return()
            if block.arrived is not None:
                self._device.wait(self._device.d2h, block.arrived, "gradients home")
            if gradient.master.numel() != tensor.untyped_storage().nbytes():  # of another dtype than before
                close_behind(self._engine, gradient)
            gradient.take(tensor, lane)
            gradient.make_master(self._engine.arena)
            block.count()
            self.residency.present_bytes += block.nbytes
            self._engine.hooks.streamed[gradient.storage._cdata] = CopiedSave
            gradient.dirty = True
        now = self._device.compute
        block.readers[id(now)] = now  # which reduced it, perhaps
        return True

    def _go(self, gradients: Iterable[Weight]) -> None:
        """Send those that nobody uses, as one piece, and watch them. Order: [Order: weights out]."""
        free = [each for each in gradients if each.block.weights and not each.block.entered]
        for gradient in free:
            if gradient.dirty:
                self.gradients[gradient.block.index].await_return()
        self.residency.write_back(*(gradient.block for gradient in free))
        for gradient in free:
            self._going.append(gradient.block)
            for tensor in gradient.tensors:
                watch(tensor, gradient)

    # -- on the device, and off ------------------------------------------------------------------------------
    def _use(self, gradient: Weight, during: Pass) -> None:
        """The current lane is about to use it: it stays until `entered` is counted down. Order: [Order:
        weights here], [Order: gradients sent]."""
        if self._device.is_capturing():
            raise CaptureError(
                f"a CUDA graph is captured over the gradient of {gradient.name}, which is on the host; "
                "capture without gradients="
            )
        block = gradient.block
        is_new = self.order.note(Use(block.index, during))
        if during is Pass.OUTSIDE:
            self._over.clear()
        if not block.present:
            self._trim(block.nbytes)
            self.residency.make_room(block, self._going_indices, self.order.coming())
            self.figures.misses += 1
        self.residency.use(block, self.order.coming())
        block.entered += 1
        if block.left is not None and block.left_unseen:
            self.residency.wait_for(self._device.compute, block.left, "gradients sent")
        if is_new:
            self._fetch_ahead((block.index,))

    @property
    def _going_indices(self) -> set[int]:
        return {block.index for block in self._going}

    def _fetch_ahead(self, stay: Collection[int] = ()) -> None:
        """Fetch what comes next, by the piece, as long as there is room that nothing on its way out has; and
        in a backward no further than its end, because it may be the last one of a step."""
        if all(block.present or not block.weights for block in self.blocks):
            return
        self._trim()
        self.residency.fetch_ahead(self.order, {*stay, *self._going_indices}, self._is_end, self._piece_bytes)

    def _is_end(self, block: BlockWeights) -> bool:
        """Return True if nothing is fetched from this block on: its gradient is about to be made, in the room
        that there is, or the backward has used it."""
        return block.index in self._over or not block.weights

    def _trim(self, coming_bytes: int = 0) -> None:
        """Give back the memory of what has gone, all but that of the last, which the loop may use again. Half
        of the window is for what goes, however far the host is ahead of the device: where more does, compute
        waits for what has gone first. Order: [Order: weights gone]."""
        residency, going, window = self.residency, self._going, self.residency.window_bytes
        piece: Event | None = None
        while going:
            block = going[0]
            if block.present and not block.entered and (piece is None or block.left is not piece):
                here, leave = residency.present_bytes, sum(each.nbytes for each in going if each.present)
                is_full = here + coming_bytes > window or (2 * leave > window and len(going) > 1)
                has_gone = block.left is None or self._device.poll(block.left)
                if not (is_full and not self.reduced_later) and (not has_gone or len(going) == 1):
                    return
            piece = block.left
            going.popleft()
            if block.may_leave and block not in going:
                residency.drop(block)

    def leave_device(self) -> None:
        """Move everything that nobody uses off the device, until it is used (`Holder`)."""
        with self._lock:
            self.residency.leave()

    def _retire(self, gradient: Gradient) -> None:
        """The parameter has another gradient, or none."""
        if not gradient.known:
            return
        if gradient.tensors or gradient.is_held_elsewhere:  # somebody has it
            self.let_go(gradient)
            return
        gradient.dirty = False
        if gradient.block.present:
            self.residency.drop(gradient.block)
        self._forget(gradient)

    def _forget(self, gradient: Gradient) -> None:
        self._engine.hooks.streamed.pop(gradient.storage._cdata, None)
        gradient.forget()

    # -- reads and writes from outside -----------------------------------------------------------------------
    @contextmanager
    def hold(self, weights: Collection[Weight]) -> Iterator[None]:
        """Hold the gradients on the device inside, for the current lane (`Holder`)."""
        held: list[Weight] = []
        close, admitted = open_saves(self._engine.hooks)
        try:
            with self._lock:
                for gradient in dict.fromkeys(weights):
                    self._use(gradient, Pass.OUTSIDE)
                    gradient.block.pinned |= not admitted
                    held.append(gradient)
            yield
        finally:
            close()
            with self._lock:
                for gradient in held:
                    gradient.block.entered -= 1
                    self._go((gradient,))
                    self._trim()

    def wrote(self, weight: Weight) -> None:
        """Note that the current lane has written the gradient (`Holder`)."""
        assert isinstance(weight, Gradient)
        weight.dirty, weight.norm = True, None
        self._device.note_write(self._device.compute, weight.on_device)

    def set_data(self, weight: Weight, value: Tensor) -> None:
        """Release the gradient to torch, and set its `.data` to `value` (`Holder`)."""
        assert isinstance(weight, Gradient)
        tensor = weight.parameter
        self.let_go(weight)
        tensor.data = value

    def host_copy(self, weight: Weight) -> Tensor:
        """View of the master on the CPU (`Holder`). Blocks the host for a copy that is still to come."""
        with self._lock:
            self.residency.flush((weight.block,))
            return weight.on_host()

    def let_go(self, weight: Gradient) -> None:
        """Leave the gradient on the device until the next backward has added to it (`GradientHolder`)."""
        with self._lock:
            if weight.known:
                self._use(weight, Pass.OUTSIDE)
                weight.block.entered -= 1
                for tensor in weight.tensors:
                    make_plain(tensor, for_good=True)
                weight.let_go = weakref.ref(weight.parameter)
                self.residency.present_bytes -= weight.block.nbytes
                self._forget(weight)

    def lend(self, weight: Gradient, returned: Callable[[], None]) -> Tensor:
        """Lend the gradient's elements in host memory (`GradientHolder`). Order: [Order: gradients sent]."""
        with self._lock:
            self.residency.write_back(weight.block)
            if weight.block.left is not None:
                self.residency.stalls.wait(self._device.compute, weight.block.left, "gradients sent")
            weight.returned = returned
            return weight.master.view(weight.parameter.dtype)

    def _say_shared(self, gradient: Gradient) -> None:
        if self._said.first("shared"):
            logger.warning(
                f"the gradient of {gradient.name} shares its memory with something else, and stays on the "
                "device, as do others that do so: buckets of DistributedDataParallel (give it "
                "gradient_as_bucket_view=False), or another parameter's gradient"
            )

    # -- steps, and the end ----------------------------------------------------------------------------------
    def end_step(self) -> ClientStats:
        """End the step's transfers and return the gradients' figures (`Client.end_step`)."""
        self._settle()
        self._norms, self._has_asked = self._norms if self._has_asked else {}, False
        (came, left, *_), stall_count, stall_ms = self.residency.end_step()
        figures = self.figures
        if came or left:
            figures.steps += 1
            figures.in_bytes, figures.out_bytes, figures.stall_ms = came, left, stall_ms
        lent, here = figures.host_bytes, self.residency.present_bytes
        return ClientStats(lent_bytes=lent, device_bytes=here, stall_ms=stall_ms, stall_count=stall_count)

    def remove(self) -> None:
        """Every gradient is torch's own again, on the device. Raises torch.OutOfMemoryError where they do not
        fit, and goes on then. Blocks the host."""
        with self._lock:
            if self.removed:
                return
            self._settle()
            for gradient in self.gradients:
                self._retire(gradient)
                gradient.await_return()
            self.removed = True
            self._end_watch()
            for handle in [handle for pair in self._handles.values() for handle in pair]:
                handle.remove()
            self.residency.synchronize()
            for gradient in self.gradients:
                gradient.close()
            self.residency.share.end()
            self._engine.detach(self)


def _module_is_gone(engine: OffloadEngine, gradient: Gradient) -> None:
    """Its gradient's host memory goes back behind the copies in flight. On any thread, so without a lock."""
    for tensor in gradient.tensors if gradient.known else ():
        orphan(tensor)
    if gradient.known:
        engine.hooks.streamed.pop(gradient.storage._cdata, None)
    close_behind(engine, gradient)
    gradient.block.weights.clear()
