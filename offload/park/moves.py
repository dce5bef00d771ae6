"""How storages' bytes cross the link: to their places on the host, and back into the same storages.

One invariant: nothing is freed before the host has waited for its copy, and nothing is handed out before the
lane that asked for it has waited for its way in.

# [Order: park out]
# hazard  RAW: `d2h` copies a storage that a lane is still writing.
# edge    d2h waits for an event recorded on the compute lane.
#         What `h2d` still reads of the host's bytes for the last wake comes before: compute has waited.
# alive   the storage, which is freed once the host has waited for the copy.
# proof   tests/property/test_park_edges.py, edge "park out"
#
# [Order: park room]
# hazard  allocator reuse: `h2d` writes bytes that work issued to `compute` before still uses.
# edge    h2d waits for an event recorded on the compute lane after the allocation.
# alive   the tensors' storage.
# proof   tests/property/test_park_edges.py, edge "park room"
#
# [Order: park here]
# hazard  RAW: compute reads a storage before `h2d` has written it.
# edge    compute waits for the event after the copies.
# alive   the tensors' storage, and the section.
# proof   tests/property/test_park_edges.py, edge "park here"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from offload.device import Device
from offload.engine import OffloadEngine
from offload.ids import Owner
from offload.park.census import Entry, KindMemory
from offload.park.report import Kind, ParkReport
from offload.transfer.block import bytes_of
from offload.weights.watched import watch

_PIECE_BYTES = 256 << 20
"""Of one copy to the device, for which memory is allocated first."""


def _flat(entry: Entry) -> torch.Tensor:
    return bytes_of(entry.storage, 0, entry.nbytes)


def send(
    engine: OffloadEngine,
    memories: Mapping[Kind, KindMemory],
    chosen: Mapping[Kind, Sequence[Entry]],
    report: ParkReport,
    beside: Callable[[], None] | None,
) -> None:
    """Copy all that is chosen to the host, where it has its places. beside: called while the copies run; it
    may raise, and then nothing has left. Blocks the host until all is there. Order: [Order: park out]."""
    device = engine.device
    points = [device.record(device.d2h, timed=True)]
    try:
        for kind, entries in chosen.items():
            for slots in memories[kind].slots:
                pairs = [(slot, _flat(entries[at])) for at, slot in slots]
                for (at, slot), (_, flat) in zip(slots, pairs, strict=True):
                    entries[at].master, entries[at].memory = slot, memories[kind]
                    device.note_write(device.compute, flat)
                device.wait(device.d2h, device.record(device.compute), "park out")
                engine.copier.of(Owner("park", kind)).send(pairs)
            points.append(device.record(device.d2h, timed=True))
        if beside is not None:
            beside()
    finally:
        device.synchronize(device.record(device.d2h))
    for kind, start, end in zip(chosen, points, points[1:], strict=False):
        report.kinds[kind].seconds = device.elapsed_ms(start, end) / 1e3


def free(device: Device, entry: Entry) -> None:
    """Watch every tensor over the storage, whose bytes are on the host, then free them; nothing the second
    time."""
    tensors = [*entry.holders.values(), *entry.wrappers.values()]
    # a save of autograd that no hook has seen would read freed bytes: now torch refuses it
    torch.autograd.graph.increment_version([each for each in tensors if not each.is_inference()])
    for tensor in tensors:
        watch(tensor, entry)
        entry.watch_alias(tensor)
    if tensors:
        device.free(entry.storage)
    entry.holders, entry.wrappers = {}, {}


def fetch(engine: OffloadEngine, away: Sequence[Entry]) -> None:
    """Bring the bytes back, by pieces, so that copies begin before all is allocated. Raises
    torch.OutOfMemoryError. Order: [Order: park room], [Order: park here]."""
    device, piece, nbytes, arrived = engine.device, list[Entry](), 0, None
    for entry in away:
        device.refill(entry.storage, entry.nbytes)
        piece.append(entry)
        nbytes += entry.nbytes
        if entry is away[-1] or nbytes >= _PIECE_BYTES:
            device.wait(device.h2d, device.record(device.compute), "park room")
            copies = engine.copier.of(Owner("park", piece[0].home))
            arrived = copies.fetch([(_flat(each), each.master) for each in piece])
            piece, nbytes = [], 0
    if arrived is not None:
        device.wait(device.compute, arrived, "park here")
        for memory in {entry.memory for entry in away}:
            memory.arrived[:] = [arrived]
