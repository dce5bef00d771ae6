"""Tensors whose storage is freed by force once their group has left, although Python still holds them.

One invariant: what is freed was copied to the host whole, by this group, and no save of any chunk keeps it on
the device.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from offload.saved.chunk import SavedGroup
from offload.transfer.engine import TransferEngine
from offload.transfer.record import Record, RecordState

__all__ = ["checked_tensors", "release"]

logger = logging.getLogger(__name__)


def checked_tensors(tensors: object) -> list[torch.Tensor]:
    """A list of tensors to release by force; None is an empty one."""
    if tensors is None:
        return []
    if not isinstance(tensors, (list, tuple)) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors
    ):
        found = (
            [type(item).__name__ for item in tensors]
            if isinstance(tensors, (list, tuple))
            else type(tensors).__name__
        )
        raise ValueError(f"forced_released_tensors is {found}, must be a list of tensors, or None")
    return list(tensors)


def release(
    tensors: list[torch.Tensor], saved: SavedGroup, records: Iterable[Record], transfers: TransferEngine
) -> None:
    """Free the storage of `tensors`, where that is safe; a warning says where it is not. Compute waits for
    the copies, the host does not.

    saved: the group that they left with. records: every living one that may share a storage with them.
    """
    own = set(saved.living())
    sharing: dict[int, list[Record]] = {}
    for record in records:
        for key in record.storage_keys():
            sharing.setdefault(key, []).append(record)
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0:
            continue  # a view of one that was released just now
        sharers = sharing.get(storage._cdata, [])
        if any(record in own and saved.keeps(record.slot) for record in sharers):
            continue  # the plan keeps this part of the group
        copied = any(record in own and record.nbytes == storage.nbytes() for record in sharers)
        if not copied or any(record.state is RecordState.RESIDENT for record in sharers):
            why = (
                "another save still keeps it on the device"
                if copied
                else "this group has not copied all of its storage to the host"
            )
            logger.warning(
                "group %s: a tensor of shape %s (%s bytes of storage) was to be released, but %s; it stays. "
                "Save all of it inside the "
                "group, or take it off forced_released_tensors",
                saved.id,
                tuple(tensor.shape),
                f"{storage.nbytes():,}",
                why,
            )
            continue
        for record in sharers:
            if record.transfer is not None:
                transfers.settle_spill(record.transfer)
        storage.resize_(0)
