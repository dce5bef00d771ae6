"""One saved tensor, or several that share a storage at one version: which bytes they have, and whether they
were changed since.

One invariant: a record lives as long as a handle of it. When the last one dies, its block is freed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.ids import SlotId
from offload.transfer.block import DeviceBlock
from offload.transfer.layout import ViewLayout

__all__ = ["Record"]


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Record:
    """What the handles of one saved storage share.

    block: its bytes. probe: a tensor without bytes that counts the versions of what was saved first; None
    where the block stays, each of whose handles has an alias of its own. version: at the saves, which are all
    of one. layout: of every save so far, None once two differ. gathered: the block holds this sparse view,
    packed.
    """

    block: DeviceBlock
    probe: torch.Tensor | None
    version: int
    layout: ViewLayout | None = None
    gathered: ViewLayout | None = None

    @property
    def label(self) -> SlotId:
        return self.block.label

    def __del__(self) -> None:
        block = self.block
        if not block.is_freed:  # `DeviceBlock.free`, without a call: every record dies once
            block.is_freed = True
            block.device_bytes = None
            block.freed_blocks.append(block)

    def __repr__(self) -> str:
        return f"Record({self.block!r})"
