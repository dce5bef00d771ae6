"""Any tensor to the host and back by hand, under the names of an engine for torchtitan.

    offloader = TensorOffloader()
    handle = offloader.offload(tensor, release_storage=True)    # on its way; compute goes on
    offloader.reload_into(handle, tensor)                       # or tensor = offloader.reload(handle)

One invariant: who reads or writes a tensor whose copy is in flight comes after the copy, `sync_reload()` or
not. The first touch from Python waits for the handle's own event; a tensor that somebody else holds, so that
it may be touched unseen, makes compute wait at once. Not seen are what `p.grad = tensor` and
`p.data = tensor` hand to C++, and a second lane: `sync_reload()` comes before those.

Copies are ordered as the engine's own: [Order: spill], [Order: settle], [Order: allocate], [Order: restore]
and [Order: read] in offload/transfer.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload import marks
from offload.compat.handler import check_plain_bytes, placed
from offload.compat.tensor_pool import TensorPool
from offload.compile import untraced
from offload.device import Event, Lane
from offload.engine import OffloadEngine
from offload.errors import OffloadError, PoolError, StaleHandleError
from offload.groups.release import ReleasedTensor, is_held, mark_released, unmark_released
from offload.ids import Owner
from offload.optim.touch import await_all, watch
from offload.params.watched import Watched
from offload.transfer.block import ViewLayout, is_dense, overlaps_itself, place_of, span_of, view_of
from offload.transfer.limits import DEFAULT_IN_FLIGHT_BYTES


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy in flight between `tensor` and `buffer`. order: the note's title. lane: computed when it was
    issued. held: what keeps the copy, and both sides with it, until it has passed or was waited for. Any
    thread takes it out."""

    engine: OffloadEngine
    event: Event
    order: str
    tensor: Tensor
    buffer: Tensor
    lane: Lane
    held: dict[_Copy, None]

    def await_weights(self, indices: Sequence[int] = ()) -> None:
        """The current lane comes after it, and the one that gets a reload's memory back. Before a capture in
        a region all copies have passed."""
        transfers, device = self.engine.transfers, self.engine.device
        transfers.check_capture("a use of a tensor whose copy was issued before the capture")
        if transfers.capture is None:
            device.wait(self.lane, self.event, self.order)
            if device.compute is not self.lane:
                device.wait(device.compute, self.event, self.order)
        if self.order == "read":
            self.held.pop(self, None)


class _Loan:
    """A host buffer. It goes back to its pool, behind `event`, with the last reference to this."""

    def __init__(self, offloader: TensorOffloader, like: Tensor) -> None:
        self.offloader, self.pool = offloader, offloader.pool or offloader.new_pool()
        self.buffer = self.pool.allocate(like.shape, like.dtype)
        self.flat = self.buffer.view(-1).view(torch.uint8)
        self.event: Event | None = None

    def __del__(self) -> None:
        if hasattr(self, "event"):
            self.offloader.returned.append((self.pool, self.buffer, self.event))


class OffloadHandle:
    """The host's copy of one tensor, of its shape, stride, dtype and device. nbytes: of the copy. event:
    after it. A handle that is dropped gives its host memory back."""

    def __init__(self, tensor: Tensor, dense: bool, loan: _Loan, event: Event) -> None:
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.device, self.dense, self.event = tensor.device, dense, event
        self.place = place_of(tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.itemsize)
        self.nbytes = loan.flat.numel()
        self.loan: _Loan | None = loan

    @property
    def cpu_tensor(self) -> Tensor:
        """The host's copy. Whole after `sync_offload()`. Raises StaleHandleError."""
        buffer = self.check("cpu_tensor").buffer
        return buffer.view(-1).as_strided(self.shape, self.stride) if self.dense else buffer

    def check(self, what: str) -> _Loan:
        """Its host memory, for `what`. Raises StaleHandleError."""
        if self.loan is None:
            raise StaleHandleError(
                f"{what} of {self!r}: its host copy is gone; a handle is reloaded once, before reset_pool() "
                "and clear(): offload the tensor again"
            )
        return self.loan

    def __repr__(self) -> str:
        there = "on the host" if self.loan is not None else "reloaded or cleared"
        return f"<OffloadHandle of shape {tuple(self.shape)} and {self.dtype}, {there}>"


class TensorOffloader:
    """Copies of single tensors on the engine's two copy lanes.

    pin_memory: host buffers are of the engine's pinned arena, within its budget; else ordinary memory, of
        which each copy blocks the host. use_pool: buffers are kept for the next tensor of that shape and
        dtype; else they go back at once. engine: None takes that of the process's manager.
    """

    def __init__(
        self, pin_memory: bool = True, use_pool: bool = True, *, engine: OffloadEngine | None = None
    ) -> None:
        self.engine = engine if engine is not None else marks.default_manager().engine
        self._device, self._pin = self.engine.device, pin_memory
        self._copies = self.engine.copier.of(Owner("by hand", type(self).__name__))
        self.pool = self.new_pool() if use_pool else None
        self._handles: weakref.WeakSet[OffloadHandle] = weakref.WeakSet()
        self.returned: deque[tuple[TensorPool, Tensor, Event | None]] = deque()
        self._leaving: dict[_Copy, None] = {}
        self._coming: dict[_Copy, None] = {}

    def new_pool(self) -> TensorPool:
        arena = self.engine.arena if self._pin else None
        return TensorPool("cpu", self._pin, arena=arena, event_device=self._device)

    @property
    def d2h_stream(self) -> Any:
        """The stream of copies to the host; the lane where the device is simulated."""
        return getattr(self._device.d2h, "stream", self._device.d2h)

    @property
    def h2d_stream(self) -> Any:
        """The stream of copies to the device; the lane where the device is simulated."""
        return getattr(self._device.h2d, "stream", self._device.h2d)

    # -- out -------------------------------------------------------------------------------------------------
    @untraced
    def offload(self, tensor: Tensor, release_storage: bool = False) -> OffloadHandle:
        """Copy a tensor of any shape, strides and dtype to the host, behind the current lane's work.

        release_storage: free its device memory now, which compute gets back behind the copy. The tensor stays
            an object without bytes until `reload_into`. Raises OffloadError, and nothing has moved, where
            anything else holds its storage: a view, a saved tensor, a tensor of which it is a part.
        Raises ValueError for a tensor of another device, or of a subclass; HostBudgetError; CaptureError.
        Blocks the host while host memory is pinned, and for the oldest copies where more bytes are in flight
        than max_spilling_bytes.
        """
        with self.engine.lock:
            self._check_plain(tensor)
            storage = tensor.untyped_storage()
            # whoever else has it may write it unseen, or read it when it is freed
            held = tensor._base is not None or is_held([tensor])
            if not release_storage:
                return self.send(tensor, held)
            if held or not storage.resizable() or storage.nbytes() != tensor.nbytes:
                raise OffloadError(
                    f"offload(release_storage=True) of a tensor of shape {tuple(tensor.shape)} and "
                    f"{tensor.nbytes:,} bytes, whose storage of {storage.nbytes():,} is not its own alone: a "
                    "view, a graph that saved it, or what it is a part of would read freed memory. Offload "
                    "that one, or a clone(), or leave release_storage out"
                )
            handle = self.send(tensor, held=True)
            self._device.free(storage)
            mark_released(tensor, "offload(release_storage=True)", "call reload_into(handle, tensor) first")
            return handle

    def send(self, tensor: Tensor, held: bool) -> OffloadHandle:
        """Do what `offload` does, of a tensor that is checked. held: compute waits for the copy at once."""
        device, compute = self._device, self._device.compute
        self.engine.refuse_in_capture("offload of a tensor by hand")
        with self.engine.lock, torch.no_grad():
            self._collect()
            values = tensor.detach().resolve_conj().resolve_neg()
            dense = is_dense(values)
            values = values if dense else values.contiguous()
            loan, flat = _Loan(self, values), _flat(values)
            device.note_write(compute, flat)
            device.wait(device.d2h, device.record(compute), "spill")
            try:
                loan.event = self._copies.send([(loan.flat, flat)])
            except BaseException:
                loan.event = device.record(device.d2h)
                device.wait(compute, loan.event, "settle")
                raise
            handle = OffloadHandle(tensor, dense, loan, loan.event)
            self._handles.add(handle)
            is_source = values.untyped_storage()._cdata == tensor.untyped_storage()._cdata
            self._follow(loan, "settle", tensor if is_source else values, held, is_source)
            return handle

    def _follow(self, loan: _Loan, order: str, tensor: Tensor, held: bool, watched: bool = True) -> None:
        """The tensor is held until the copy has passed, and waited for: at once, or when it is touched."""
        assert loan.event is not None
        copies = self._leaving if order == "settle" else self._coming
        copy = _Copy(self.engine, loan.event, order, tensor, loan.buffer, self._device.compute, copies)
        copies[copy] = None
        if held:
            copy.await_weights()
        elif watched:
            watch(tensor, copy)

    # -- back ------------------------------------------------------------------------------------------------
    @untraced
    def reload(self, handle: OffloadHandle, device: torch.device | str | None = None) -> Tensor:
        """A new device tensor with the bytes and strides that `offload` saw, at the same place (`place_of`),
        on its way; once for each handle. device: None, or the engine's.

        Raises StaleHandleError for a handle that was reloaded or cleared, ValueError for another device,
        CaptureError in a graph that is captured outside of `offload.capturing()`, whose region holds the
        host's copy from then on: each replay brings it again. Blocks the host: never.
        """
        with self.engine.lock:
            self._check_device(device)
            handle.check("reload")
            if handle.dense:
                first = handle.place // handle.dtype.itemsize
                start = first * handle.dtype.itemsize
                home = self._device.empty(start + handle.nbytes)
                layout = ViewLayout(handle.shape, handle.stride, first, handle.dtype)
                tensor = view_of(home.untyped_storage(), layout, 0)
                return self._fetch(handle, home[start:], tensor, held=False)
            home = self._device.empty(handle.nbytes)
            packed = self._fetch(handle, home, home, held=True).view(handle.dtype).view(handle.shape)
            return placed(packed, handle.stride, handle.place)

    @untraced
    def reload_into(self, handle: OffloadHandle, target: Tensor) -> Tensor:
        """`reload` into an existing tensor, whose storage is refilled where it was freed. Returns it.

        Raises ValueError for a target of another shape, dtype or device, or that overlaps itself; all else as
        `reload`. Blocks the host: never.
        """
        with self.engine.lock:
            handle.check("reload_into")
            if not isinstance(target, Tensor) or (target.shape, target.dtype) != (handle.shape, handle.dtype):
                has = f" of {tuple(target.shape)}, {target.dtype}" if isinstance(target, Tensor) else ""
                raise ValueError(f"reload_into a {type(target).__name__}{has}, and it is to be of {handle!r}")
            self._check_device(target.device)
            if overlaps_itself(ViewLayout(target.shape, target.stride(), 0, target.dtype)):
                raise ValueError(f"reload_into a tensor of strides {target.stride()}, which overlaps itself")
            if not isinstance(target, ReleasedTensor):
                self._check_plain(target)
            storage = target.untyped_storage()
            held = target._base is not None or is_held([target])
            if target.numel() and not storage.nbytes():
                self._device.refill(storage, span_of(target, 1 << 62)[1])
            if isinstance(target, ReleasedTensor):
                unmark_released(target)
            if not (handle.dense and target.stride() == handle.stride):
                with torch.no_grad():
                    return target.copy_(self.reload(handle))
            if not target.is_inference():
                torch.autograd.graph.increment_version([target])
            return self._fetch(handle, _flat(target.detach()), target, held)

    def _fetch(self, handle: OffloadHandle, flat: Tensor, tensor: Tensor, held: bool) -> Tensor:
        """The bytes are on their way to `flat`, all of `tensor`, which waits for them. held: at once."""
        device, transfers, loan = self._device, self.engine.transfers, handle.check("reload")
        transfers.check_capture("reload of a tensor by hand")
        if transfers.capture is None:
            self._collect()
        device.wait(device.h2d, device.record(device.compute), "allocate")
        if (capture := transfers.capture) is None:  # else what came before it has passed
            assert loan.event is not None
            device.wait(device.h2d, loan.event, "restore")
        else:
            capture.forked[device.h2d] = None
        event = self._copies.fetch([(flat, loan.flat)])
        handle.loan = None
        if capture is not None:
            capture.borrowed.append(loan)
            capture.restore_bytes += handle.nbytes
            device.wait(device.compute, event, "read")
            return tensor
        loan.event = event
        self._follow(loan, "read", tensor, held)
        return tensor

    def _check_plain(self, tensor: Tensor) -> None:
        if isinstance(tensor, Watched):
            type(tensor).make_ready((tensor,))
        if isinstance(tensor, ReleasedTensor):
            raise OffloadError(f"offload of {tensor!r}: call reload_into(handle, tensor) first")
        check_plain_bytes(tensor, self._device)

    def _check_device(self, device: torch.device | str | None) -> None:
        own = self._device.torch_device
        asked = own if device is None else torch.device(device)
        if asked.type != own.type or asked.index not in (None, own.index):
            raise ValueError(f"reload to {asked}, and this offloader copies to {own}; leave device out")

    # -- waiting, and the end --------------------------------------------------------------------------------
    def sync_offload(self) -> None:
        """Block the host until every copy to the host has passed: `cpu_tensor` of each handle is whole."""
        for copy in list(self._leaving):
            self._device.synchronize(copy.event)
        self._wait_for(self._leaving)

    def sync_reload(self) -> None:
        """The current lane waits for every tensor that was reloaded. Blocks the host: never."""
        self._wait_for(self._coming)

    @staticmethod
    def _wait_for(copies: dict[_Copy, None]) -> None:
        for copy in list(copies):
            copy.await_weights()
            await_all(copy.tensor)
            copies.pop(copy, None)

    def sync_all(self) -> None:
        """`sync_offload` and `sync_reload`."""
        self.sync_offload()
        self.sync_reload()

    def reset_pool(self) -> None:
        """Take every host buffer back for the next tensors: handles that were not reloaded are cleared."""
        with self.engine.lock:
            for handle in list(self._handles):
                handle.loan = None
            self._collect()

    def clear(self) -> None:
        """`reset_pool`, and give the host memory back. Blocks the host until copies to it have passed."""
        self.sync_all()
        self.reset_pool()
        if self.pool is not None:
            self.pool.clear()

    def _collect(self) -> None:
        """Let go of what has passed, and of buffers that nobody holds."""
        limit = self.engine.limits.max_spilling_bytes or DEFAULT_IN_FLIGHT_BYTES
        in_flight = sum(copy.buffer.nbytes for copy in list(self._leaving))
        for copies in (self._leaving, self._coming):
            for copy in list(copies):
                if copies is self._leaving and in_flight > limit:
                    self._device.synchronize(copy.event)
                elif not self._device.poll(copy.event):
                    break
                in_flight -= copy.buffer.nbytes
                copies.pop(copy, None)
                await_all(copy.tensor)  # which ends its reference to the copy, too
        self._take_returned()

    def _take_returned(self) -> None:
        while self.returned:
            pool, buffer, event = self.returned.popleft()
            with suppress(PoolError):  # `clear` came first
                pool.free(buffer, after=event)
            if pool is not self.pool:
                pool.clear()

    def __del__(self) -> None:
        with suppress(Exception):  # of a constructor that raised, or of an interpreter that ends
            self._wait_for(self._leaving)
            self._wait_for(self._coming)
            self._take_returned()


def _flat(tensor: Tensor) -> Tensor:
    """All bytes of a dense tensor: 1-D, uint8."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
