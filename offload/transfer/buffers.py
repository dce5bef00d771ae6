"""The device memory that restored bytes come back to, and what happens where the device has none.

One invariant: a restore that gets no memory has moved nothing; its blocks can be read later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.sizes import bytes_text
from offload.telemetry.speaker import Once, speaker
from offload.transfer.block import DeviceBlock
from offload.transfer.captures import CaptureSide

logger = speaker(__name__)


class Buffers(CaptureSide):
    """The transfer engine's part in finding device memory."""

    _said: Once

    def _buffers(self, blocks: Sequence[DeviceBlock], *, required: bool) -> list[torch.Tensor] | None:
        """Allocate the buffers of a restore. On a device without room a speculative restore gives up, and so
        do those after it in this step: each try makes torch return its cached blocks, which blocks the host.
        For a required restore everything that can be released is released first.

        Raises torch.OutOfMemoryError if the buffers do not fit even then; nothing has moved.
        """
        if self._no_room and not required:
            return None
        empty = self.device.empty
        buffers: list[torch.Tensor] = []
        try:
            for block in blocks:
                # `_buffer`, without a call
                buffer = empty(block.lead + block.nbytes)
                buffers.append(buffer[block.lead :] if block.lead else buffer)
            return buffers
        except torch.OutOfMemoryError:
            buffers.clear()
            self._no_room = True
        if self._said.first("no room"):
            limit = self.limits.device_limit_bytes
            logger.warning(
                "the device has no room for %s that come back for %s, beside %s of saved tensors "
                "that it holds; for the rest of such a step each tensor comes back when it is read. Lower "
                "device_limit (device_limit_bytes in OffloadConfig, %s here), or the high mark of "
                "mode='watermark', to leave more room",
                bytes_text(sum(block.nbytes for block in blocks)),
                blocks[0].group,
                bytes_text(self.device_bytes),
                "None" if limit is None else bytes_text(limit),
            )
        if not required:
            return None
        self.counts.retries += 1
        self._release_all()
        return [self._buffer(block) for block in blocks]

    def _buffer(self, block: DeviceBlock) -> torch.Tensor:
        buffer = self.device.empty(block.lead + block.nbytes)
        return buffer[block.lead :] if block.lead else buffer

    def _release_all(self) -> None:
        """Release whatever can be: sources of spills, what was fetched ahead, and what clients keep that
        could leave."""
        self.limits.relieve()
        while self._spilling:
            self.settle_spill(self._spilling[0])
        self.drop_furthest(self.restoring_bytes)
