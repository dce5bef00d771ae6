"""One tensor to the host and back, copied by hand: outside of every group, plan and hook.

One invariant: a call returns with compute ordered behind its copy, so that the caller need not know when the
copy runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from offload.compat.tensor_pool import GPUTensorPool
from offload.device import Event, Lane
from offload.engine import OffloadEngine
from offload.errors import StaleHandleError
from offload.ids import ChunkId, Owner
from offload.saved.filters import is_plain

__all__ = ["ManualCopies", "OffloadState"]


class OffloadState(NamedTuple):
    """A tensor copied to the host by hand with `offload`, and what `reload` needs."""

    device: torch.device
    cpu_tensor: torch.Tensor
    use_cpu_pool: bool
    stride: tuple[int, ...]
    event: Event
    step: int


class ManualCopies:
    """The copies by hand of one chunk, its host buffers and its lanes."""

    def __init__(
        self,
        engine: OffloadEngine,
        chunk_id: ChunkId,
        cpu_tensor_pool: GPUTensorPool | None,
        d2h_stream: Lane | None,
        h2d_stream: Lane | None,
        *,
        ends_with_step: bool,
    ) -> None:
        """ends_with_step: the pool takes its buffers back when the step ends."""
        self.id = chunk_id
        self.engine = engine
        self.cpu_tensor_pool = (
            cpu_tensor_pool
            if cpu_tensor_pool is not None
            else GPUTensorPool("cpu", pin_memory=True, arena=engine.arena)
        )
        self.cpu_tensor_pool.ask(engine.device)
        self.d2h_stream: Lane = d2h_stream if d2h_stream is not None else engine.device.d2h
        self.h2d_stream: Lane = h2d_stream if h2d_stream is not None else engine.device.h2d
        self._ends_with_step = ends_with_step
        self._copies = engine.copier.of(Owner("by hand", str(chunk_id)))

    def offload(
        self, src_tensor: torch.Tensor, pin_memory: bool = True, use_cpu_pool: bool = True
    ) -> OffloadState:
        """Copy one tensor to the host on the d2h lane. Blocks the host only where the host side is not
        pinned.

        The source must live until the copy is done; compute waits for it here, so that the caller need not
        know when. Raises ValueError for a tensor of another device.
        """
        device = self.engine.device
        if not isinstance(src_tensor, torch.Tensor):
            raise ValueError(f"offload of a {type(src_tensor).__name__}, must be a tensor on {device.name}")
        self.engine.refuse_in_capture("offload of a tensor by hand")
        if (
            src_tensor.is_quantized
            or src_tensor.is_nested
            or src_tensor.layout is not torch.strided
            or not is_plain(src_tensor)
        ):
            raise ValueError(
                f"offload of a {type(src_tensor).__name__} of {src_tensor.dtype} and {src_tensor.layout}, "
                "whose bytes alone do not make it again; offload its parts, such as int_repr() and q_scale()"
            )
        if not device.owns(src_tensor):
            raise ValueError(
                f"offload of a tensor on {src_tensor.device}, but this handler's device is {device.name}; "
                "move it there first"
            )
        with torch.no_grad():
            flat = src_tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
        if use_cpu_pool:
            host = self.cpu_tensor_pool.allocate(src_tensor.shape, src_tensor.dtype)
        else:
            host = torch.empty(
                src_tensor.shape, dtype=src_tensor.dtype, pin_memory=pin_memory and device.pins
            )
        compute = device.compute
        source = flat.view(torch.uint8)
        device.note_write(compute, source)
        device.wait(self.d2h_stream, device.record(compute), "spill")
        event = self._copies.send([(host.view(-1).view(torch.uint8), source)], self.d2h_stream)
        device.wait(compute, event, "settle")
        return OffloadState(
            src_tensor.device, host, use_cpu_pool, src_tensor.stride(), event, self.engine.step
        )

    def reload(self, state: OffloadState, non_blocking: bool | None = None) -> torch.Tensor:
        """A new device tensor with the bytes and strides that `offload` saw; the host buffer goes back to the
        pool.

        non_blocking: None means: iff the host side is pinned; False makes the host wait for the copy.
        """
        self.engine.refuse_in_capture("reload of a tensor by hand")
        device = self.engine.device
        host = state.cpu_tensor
        # step_end has taken the pool's buffers back
        if state.use_cpu_pool and self._ends_with_step and state.step != self.engine.step:
            raise StaleHandleError(
                f"{self.id}: a tensor of shape {tuple(host.shape)} was offloaded by hand in step "
                f"{state.step}, and its host buffer went "
                f"back to the pool before step {self.engine.step}; reload it in its own step, or offload it "
                "with use_cpu_pool=False"
            )
        home = device.empty(host.numel() * host.element_size())
        compute = device.compute
        device.wait(self.h2d_stream, device.record(compute), "allocate")
        device.wait(self.h2d_stream, state.event, "restore")
        event = self._copies.fetch([(home, host.view(-1).view(torch.uint8))], self.h2d_stream)
        device.wait(compute, event, "read")
        device.note_read(compute, home)
        if non_blocking is False:
            device.synchronize(event)
        if state.use_cpu_pool:
            self.cpu_tensor_pool.free(host, after=event)
        return _with_stride(home.view(host.dtype).view(host.shape), state.stride)


def _with_stride(packed: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    if packed.stride() == stride:
        return packed
    with torch.no_grad():
        # an expanded dimension holds one element
        one = packed[tuple(slice(0, 1) if step == 0 else slice(None) for step in stride)]
        spread = torch.empty_strided(one.shape, stride, dtype=packed.dtype, device=packed.device).copy_(one)
        return spread.as_strided(packed.shape, stride)
