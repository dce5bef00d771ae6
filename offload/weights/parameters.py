"""Where a model's streamed parameters live: taken to the host, followed when the loop replaces, converts or
writes them, and given back.

One invariant: a parameter has all its bytes in at least one place, and a write is never lost between the two:
the master is written back to, or the device's bytes are dropped because the master is newer.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import Tensor, nn

from offload.device import Lane
from offload.device.rows import quantize_rows
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.ids import Owner
from offload.params.sections import check_budget
from offload.params.watched import has_own_storage
from offload.telemetry.speaker import progress
from offload.transfer.block import is_dense
from offload.transfer.copier import Priority
from offload.weights.hooks import pack
from offload.weights.residency import Residency
from offload.weights.watched import make_plain, orphan, watch
from offload.weights.weight import BlockWeights, Weight, give_memory, nobody, written

_WORTH_A_RELEASE = 20
"""A release of cached device memory has to be of a twentieth of what is reserved."""

_plainly = torch._C.DisableTorchFunctionSubclass


class Parameters:
    """The streamed parameters of some blocks. resized: called when blocks have other bytes than before."""

    def __init__(self, residency: Residency, resized: Callable[[], None]) -> None:
        self._engine, self._device, self._blocks = residency.engine, residency.device, residency.blocks
        self._residency, self._resized = residency, resized
        # not streamed: a tensor, and its data before; None of one that was on meta
        self._moved_here: list[tuple[Tensor, Tensor | None]] = []
        self._model: Callable[[], nn.Module | None] = nobody

    # -- to the host, and back -------------------------------------------------------------------------------
    def take(self, model: nn.Module) -> None:
        """Every weight goes to the host, and everything else to the device. What is on meta waits for `fill`.
        Blocks the host for the pinning. Raises HostBudgetError, and ValueError for INT8 of what is not
        finite; nothing has changed then."""
        weights = [w for block in self._blocks for w in block.weights if w.source or not w.without_values]
        taken: list[Weight] = []
        self._model = weakref.ref(model)
        try:
            for weight in weights:  # what loses bits is read whole before anything goes
                if weight.source is not None:
                    weight.make_master(self._engine.arena)
                    weight.source(weight)
                elif weight.int8:
                    self.write_int8(weight, weight.parameter.data)
            with progress("weights to the host", len(weights), "weight") as show:
                for weight in weights:
                    self._take_in(weight)
                    taken.append(weight)
                    show(1)
        except BaseException:
            self._residency.synchronize()
            for each in weights[len(taken) :]:
                each.close()
            for each in taken:
                self._rest_at(each.origin, each)
            raise
        where, streamed = self._device.torch_device, {id(weight.parameter) for weight in taken}
        for tensor in [*model.parameters(), *model.buffers()]:
            if id(tensor) not in streamed and tensor.device != where and not tensor.is_meta:
                self._moved_here.append((tensor, tensor.data))
                tensor.data = tensor.data.to(where)
        # a save of autograd from before, which no hook has seen, would read freed bytes: now torch refuses it
        torch.autograd.graph.increment_version([weight.parameter for weight in taken])
        for weight in taken:
            weight.version = weight.parameter._version
            self._follow_module(weight)
        if any(weight.origin == where for weight in taken) and not self._device.is_capturing():
            # another process sees what is reserved: the weights' bytes go back to the driver, once
            self._residency.synchronize()
            self._device.release_cached(_WORTH_A_RELEASE, of_peak=False)

    def _follow_module(self, weight: Weight) -> None:
        weakref.finalize(weight.module(), _module_is_gone, self._engine, weight).atexit = False

    def fill(self, tensor: Tensor, value: Tensor) -> None:
        """A tensor of the model that is on meta has these values from here on: a streamed weight in its
        master, any other one on the device. value: on the CPU, of its shape and dtype. Blocks the host.
        Raises HostBudgetError."""
        with self._engine.lock:
            weights = (weight for block in self._blocks for weight in block.weights)
            weight = next((weight for weight in weights if weight.parameter is tensor), None)
            if weight is None:
                give_memory(tensor, torch.empty_like(tensor, device=self._device.torch_device).copy_(value))
                self._moved_here.append((tensor, None))
                return
            if weight.int8 and tensor.requires_grad:
                raise written(weight)
            try:
                if weight.int8:
                    self.write_int8(weight, value)
                else:
                    weight.elements(weight.make_master(self._engine.arena)).copy_(value)
            except BaseException:
                weight.close()
                raise
            self._follow_module(weight)
            self._take_again(weight)

    def write_int8(self, weight: Weight, value: Tensor) -> None:
        """Quantise a value on the device, and send it to the weight's master. Raises HostBudgetError, and
        ValueError where it is not finite; the master is as before then. Blocks the host."""
        weight.make_master(self._engine.arena)
        device = self._device
        with torch.inference_mode(False), torch.no_grad(), _plainly():
            value = value.to(device.torch_device)
            device.note_read(device.compute, value)
            flat = device.empty(weight.link_bytes)
            values, scales = weight.int8_views(flat)
            quantize_rows(value, values, scales)
            device.note_write(device.compute, flat)
            if not bool(scales.isfinite().all()):
                raise ValueError(
                    f"quantize='int8': {weight.name} has values that are inf or nan; mend them, or leave "
                    "quantize= out"
                )
            self._send(weight, flat)

    def _send(self, weight: Weight, flat: Tensor) -> None:
        """To its master, these bytes that the current lane has written, and may have back. Order: [Order:
        weights out], [Order: weights gone]."""
        device = self._device
        device.wait(device.d2h, device.record(device.compute), "weights out")
        pairs = [(weight.master, flat)]
        weight.block.left = self._engine.copier.of(Owner("weights", weight.name)).send(pairs)
        device.wait(device.compute, weight.block.left, "weights gone")

    def _take_in(self, weight: Weight) -> None:
        """The bytes of the parameter as it is now go to its master, if that is not filled by itself; its
        storage is its own from here on, and freed."""
        parameter, device = weight.parameter, self._device
        filled = weight.int8 or weight.source is not None or parameter.is_meta
        with torch.inference_mode(False), torch.no_grad(), _plainly():
            master = weight.make_master(self._engine.arena)
            here = parameter.device == device.torch_device
            if not here and not filled:
                weight.elements(master).copy_(parameter.data)
            if not (here and has_own_storage(parameter)):
                own = torch.empty_like(parameter, device=device.torch_device)
                give_memory(parameter, own.copy_(parameter.data) if here else own)
                del own
            weight.rest()
            weight.source = None
            weight.writes += 1
            if here and not filled:
                device.note_write(device.compute, parameter)
                self._send(weight, weight.on_device)
            device.free(weight.storage)
        self._engine.hooks.streamed[weight.storage._cdata] = partial(pack, weight=weight)
        watch(parameter, weight)

    def _rest_at(self, where: torch.device, weight: Weight) -> None:
        """The parameter is torch's own again. Its master is whole, and goes."""
        self._engine.hooks.streamed.pop(weight.storage._cdata, None)
        for tensor in (weight.parameter, *weight.aliases()):
            make_plain(tensor, for_good=True)
        with torch.no_grad():
            if where != self._device.torch_device:
                weight.parameter.data = weight.on_host().clone(memory_format=torch.preserve_format)
            elif not weight.storage.nbytes():
                self._device.refill(weight.storage, weight.nbytes)
                weight.parameter.data.copy_(weight.on_host())
        weight.close()
        weight.use = nobody  # a save that is still to be read finds its bytes
        del weight.storage, weight.on_device  # or the next apply() would find somebody who shares its memory

    def give_back(self, where: torch.device | None) -> None:
        """Every weight goes where `apply` found it, or to `where`. Raises ValueError where they do not fit,
        or torch.OutOfMemoryError; all is as before then. Blocks the host."""
        here = self._device.torch_device
        self._check_room(where)
        for block in self._blocks:
            block.weights[:] = [weight for weight in block.weights if not weight.without_values]
            for weight in block.weights:
                weight.await_step()
            self.take_host_writes(block)
        self._residency.flush(self._blocks)
        stay = {block for block in self._blocks if any((where or w.origin) == here for w in block.weights)}
        for block in self._blocks:
            if block.present:
                self._residency.refresh(block, block.weights)
            elif block in stay:
                self._residency.load((block,), Priority.REQUIRED)
            if block.staged and block in stay:
                self._residency.expand(block)
        self._residency.synchronize()
        for block in self._blocks:
            if block.present and block not in stay:
                self._residency.drop(block)
            for weight in block.weights:
                self._rest_at(where or weight.origin, weight)
            block.weights.clear()
        for tensor, before in [] if where == here else self._moved_here:
            tensor.data = tensor.data.cpu() if before is None else before.copy_(tensor.data)

    def _check_room(self, where: torch.device | None) -> None:
        """Raises ValueError where what comes to the device has no room there, and for `where` without
        values."""
        here, free, model = self._device.torch_device, self._device.free_bytes(), self._model()
        staged = [weight for block in self._blocks for weight, _ in block.staged]
        away = [weight for block in self._blocks if not block.present for weight in block.weights]
        weights = [weight for weight in staged + away if not weight.without_values]
        needed = sum(weight.nbytes for weight in weights if (where or weight.origin) == here)
        if where is not None and model is not None:  # what did not stream moves as well
            others = [*model.parameters(), *model.buffers()]
            if any(other.is_meta for other in others):
                raise ValueError(f"remove(device={str(where)!r}) on meta: offload.load_weights() first")
            needed += sum(other.nbytes for other in others if other.device != where == here)
        if free is not None and needed > free:
            raise ValueError(
                f"remove() brings {needed:,} bytes of weights to {here}, and {free:,} are free there; free "
                'memory first, or leave them on the host with remove(device="cpu")'
            )

    def dequantize(self, pattern: str) -> None:
        """The INT8 weights of the blocks of such names wait as the elements that they are expanded to, from
        here on. Raises ValueError where there are none, OffloadError in a forward of one, and HostBudgetError
        where one does not fit; those before it are plain then. Blocks the host."""
        with self._engine.lock:
            found = [block for block in self._blocks if any(weight.int8 for weight in block.weights)]
            blocks = [block for block in found if fnmatch.fnmatchcase(block.name, pattern)]
            if not blocks:
                some = ", ".join(block.name for block in found[:8]) or "none"
                raise ValueError(f"dequantize({pattern!r}) names no block with INT8 weights; they are {some}")
            more = sum(block.nbytes - block.link_bytes for block in blocks)
            check_budget(self._engine.arena, more, f"{pattern}'s plain weights", "name fewer blocks")
            for block in blocks:
                self._expand_master(block)

    def _expand_master(self, block: BlockWeights) -> None:
        block.refuse_inside("dequantize()")
        if block.staged:
            self._residency.drop(block)
        self._residency.synchronize()  # the masters go
        try:
            for weight in (weight for weight in block.weights if weight.int8):
                elements = None if weight.without_values else weight.on_host()
                weight.int8 = False
                try:
                    if elements is not None:
                        weight.elements(weight.make_master(self._engine.arena)).copy_(elements)
                except BaseException:
                    weight.int8 = True
                    raise
        finally:
            block.count()
            self._resized()

    # -- the host's copy -------------------------------------------------------------------------------------
    def host_copy(self, weight: Weight) -> Tensor:
        """A view of the newest bytes on the CPU. Blocks the host for a copy that is still to come."""
        weight.await_step()
        self.take_host_writes(weight.block)
        if weight.experts is not None:
            weight.experts.flush()
        self._residency.flush((weight.block,))
        return weight.on_host()

    def take_host_writes(self, block: BlockWeights) -> None:
        """Somebody may have written to what `host_copy` gave: the device's bytes are old then. Raises
        OffloadError for a write that is lost, when all others are taken."""
        written, lost = list[Weight](), None
        for weight in block.weights:
            try:
                if weight.take_host_writes():
                    written.append(weight)
            except OffloadError as error:
                lost = error
        for weight in written:
            weight.dirty = False
            weight.writes += 1
            torch.autograd.graph.increment_version(weight.parameter)
            weight.version = weight.parameter._version
            if weight.experts is not None:
                weight.experts.forget()
        if written and block.present:
            self._residency.drop(block)
        if lost is not None:
            raise lost

    # -- other parameters, or other bytes --------------------------------------------------------------------
    def set_data(self, weight: Weight, value: Tensor) -> None:
        """`weight.data = value`: a tensor that nobody else has. Raises OffloadError."""
        with _plainly():
            parameter = weight.parameter
            if value.shape != parameter.shape or value.device != self._device.torch_device:
                raise OffloadError(
                    f"{weight.name}.data is set to {tuple(value.shape)} on {value.device}, and the weight "
                    f"has {tuple(parameter.shape)}, streamed to {self._device.torch_device} (model.to() does "
                    "so): call remove() on apply's handle first, and apply() again afterwards"
                )
            self._leave_to_aliases(weight)
            self._forget(weight, f"{weight.name}.data is set")
            parameter.data = value
        self._take_again(weight)

    def adopt(self, weight: Weight) -> None:
        """load_state_dict(assign=True) may have put another parameter in the weight's place, which streams
        from here on. Raises OffloadError for one of another shape."""
        found = weight.replaced_by()
        if found is None:
            return
        if weight.int8 and not weight.without_values:
            module = weight.module()
            assert module is not None  # that has it
            module._parameters[weight.attribute] = weight.parameter  # type: ignore[assignment]
            raise written(weight)
        if found.shape != weight.parameter.shape:
            raise OffloadError(
                f"{weight.name} was replaced by a parameter of {tuple(found.shape)}, and "
                f"{tuple(weight.parameter.shape)} streams; call remove() before, and apply() afterwards"
            )
        if weight.without_values:
            if found.is_meta:
                weight.parameter = found
                return
            self._follow_module(weight)
        else:
            self._forget(weight, f"{weight.name} was replaced")
            orphan(weight.parameter)
        if not is_dense(found):  # has gaps, or is expanded
            found.data = found.data.clone(memory_format=torch.preserve_format)
        weight.parameter = found
        if weight.int8:
            self.write_int8(weight, found.data)
        self._take_again(weight)

    def let_go(self, weight: Weight) -> None:
        """A forward of its block has set the weight's .data, and autograd may have saved the parameter with
        these bytes: it is resident from here on."""
        block, parameter, here = weight.block, weight.parameter, self._device.torch_device
        self._forget(weight, f"{weight.name}.data is set")
        block.weights.remove(weight)
        weight.holder = nobody
        make_plain(parameter, for_good=True)
        weight.close()
        if weight.origin != here:
            self._moved_here.append((parameter, torch.empty_like(parameter.data, device=weight.origin)))
        block.count()
        self._resized()

    def _leave_to_aliases(self, weight: Weight) -> None:
        """Who has an alias of the weight keeps its bytes, as plain tensors that share them."""
        if not (aliases := weight.aliases()):
            return
        weight.use(weight)
        kept = weight.on_device.clone().untyped_storage()
        for alias in aliases:
            layout = alias.storage_offset(), alias.shape, alias.stride()
            make_plain(alias, for_good=True)
            alias.data = torch.empty(0, dtype=alias.dtype, device=alias.device).set_(kept, *layout)

    def _forget(self, weight: Weight, what: str) -> None:
        """The weight's storage is to be another one. Raises OffloadError inside a forward of its block. what:
        happens, for the message."""
        if weight.experts is not None:
            weight.experts.end()
        block = weight.block
        block.refuse_inside(what)
        weight.await_step()
        weight.generation += 1
        if block.present:
            self._residency.drop(block)
        self._residency.synchronize()  # the master may go
        self._engine.hooks.streamed.pop(weight.storage._cdata, None)
        for alias in weight.aliases():
            orphan(alias)
        weight.dirty = False

    def _take_again(self, weight: Weight) -> None:
        self._take_in(weight)
        weight.block.count()
        self._resized()
        self._residency.synchronize()


def _module_is_gone(engine: OffloadEngine, weight: Weight) -> None:
    """The host memory of its weight goes back behind the copies in flight, and its device memory with the
    parameter. On any thread, so without a lock."""
    block = weight.block
    if weight not in block.weights:
        return  # `give_back` was first
    experts = weight.experts
    given = [] if experts is None else [each.matrix.untyped_storage() for each in experts.given.values()]
    for storage in (weight.storage, *given):
        engine.hooks.streamed.pop(storage._cdata, None)
    if weight.storage.nbytes() == 0:  # away: a graph that saved it has nothing to read, and raises
        weight.generation += 1
    close_behind(engine, weight, () if experts is None else experts.homes())
    block.weights.remove(weight)
    block.staged = [each for each in block.staged if each[0] is not weight]


def close_behind(engine: OffloadEngine, weight: Weight, homes: Collection[Lane] = ()) -> None:
    """Give its host memory back behind its copies in flight. homes: of memory that its experts come to.
    Takes no lock."""
    device, block = engine.device, weight.block
    if block.arrived is not None:
        device.wait(device.d2h, block.arrived, "weights home")
    if homes:
        device.wait(device.d2h, device.record(device.h2d), "weights home")
    after = device.record(device.d2h)
    for home in (*homes, *([block.home] if block.present and block.home is not None else [])):
        device.wait(home, after, "weights gone")
    weight.close(after)
