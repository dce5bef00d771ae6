"""Every ordering edge on a real GPU, with its race made wide: right bytes with the edge, wrong bytes without
it.

One lane of each scenario sleeps for a long time before it does its part, and whoever does not wait for it
comes first. The scenarios are those of tests/property/test_edges.py, where the simulated device proves the
order; here the device itself does. New buffers and host memory are poisoned, and a buffer that has to take
over the bytes of another is asked for by address.

In a twin the race is won by the wrong side wherever the two lanes really run side by side. Streams share a
few hardware queues, and two that happen to share one run one after the other; so a twin has a few attempts,
each with new streams, and one wrong result is enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import OffloadConfig, OffloadEngine
from offload.client import Client
from offload.ids import ChunkId, GroupId
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from offload.telemetry.records import ClientStats
from offload.transfer.copier import Priority
from tests.gpu.widened import POISON, WidenedDevice, sleep
from tests.gpu.workbench import DEVICE, Program, Result, assert_same_bits, build_manager

pytestmark = pytest.mark.gpu

NUMBERS = 1 << 20  # of one saved tensor, float32
NBYTES = 4 * NUMBERS
WIDE_MS = 60.0  # against the fraction of a millisecond in which the host issues what comes after
ATTEMPTS = 5

Outcome = tuple[Tensor, float]
"""What a lane saw, and the number that all its elements have to be."""


class Desk(Client):
    """One engine and the saves of one chunk. The host memory is that of one tensor, so the next spill reuses
    its bytes."""

    name = "groups"

    def __init__(self, device: WidenedDevice) -> None:
        self.device = device
        config = OffloadConfig(min_offloaded_tensor_size=0, piece_bytes=1, host_limit_bytes=NBYTES)
        self.engine = OffloadEngine(config, device=device)
        self.engine.attach(self)
        self.engine.arena.reserve(NBYTES)
        self.transfers = self.engine.transfers
        self.side = torch.cuda.Stream()
        self.slow_compute_ms = 0.0
        self.begin()

    def begin(self) -> None:
        """A new chunk, and nothing in host memory that a restore could mistake for its bytes."""
        self.chunk = SavedChunk(ChunkId(0, 0))
        self.group = SavedGroup(GroupId(ChunkId(0, 0), 0, "core_attn"), leaves=True)
        block = self.engine.arena.take(NBYTES)
        assert block is not None
        for extent in block.extents:
            extent.fill_(POISON)
        self.engine.arena.give_back(block, None)

    def end(self) -> None:
        torch.cuda.synchronize()
        self.engine.end_step()

    def end_step(self) -> ClientStats:
        return self.engine.end_saves([self.chunk])

    def close(self) -> None:
        self.engine.close()

    def pause(self) -> None:
        """Compute has other work first."""
        if self.slow_compute_ms:
            sleep(self.slow_compute_ms)

    def save(self, tensor: Tensor) -> Handle:
        """Its spill is issued when this returns; the caller must hold the tensor no longer."""
        return self.engine.store.save(tensor, self.chunk, self.group)

    def settle(self, handle: Handle) -> None:
        """As a cap does: compute waits for the spill, and the source goes back to its allocator."""
        assert handle.record.block.transfer is not None
        self.transfers.settle_spill(handle.record.block.transfer)

    def prefetch(self, handle: Handle) -> None:
        assert self.transfers.restore([handle.record.block], Priority.SPECULATIVE) is not None

    def read(self, handle: Handle) -> Tensor:
        """What the current stream sees when it gets there."""
        return self.engine.store.read(handle).clone()

    def overwrite(self, address: int, value: float) -> Tensor:
        """Compute takes the bytes at `address`, which it has freed, and writes them."""
        return self.device.empty_at(address, NBYTES).view(torch.float32).fill_(value)


def numbers(value: float) -> Tensor:
    return torch.full((NUMBERS,), value, device=DEVICE)


def spill(desk: Desk) -> Outcome:
    """Compute is late in writing what autograd saves. Without the edge d2h copies what was there before."""
    tensor = numbers(0.0)
    torch.cuda.synchronize()
    desk.pause()
    handle = desk.save(tensor.fill_(1.0))
    del tensor
    desk.settle(handle)
    return desk.read(handle), 1.0


def settle(desk: Desk) -> Outcome:
    """d2h is late in copying. Without the edge compute overwrites the source before that."""
    tensor = numbers(1.0)
    address = tensor.data_ptr()
    handle = desk.save(tensor)
    del tensor
    desk.settle(handle)
    other = desk.overwrite(address, 7.0)
    seen = desk.read(handle)
    del other  # it had the bytes until here
    return seen, 1.0


def allocate(desk: Desk) -> Outcome:
    """Compute is late in its last reading of bytes that it has freed. Without the edge h2d overwrites them
    before that."""
    handle = desk.save(numbers(1.0))
    desk.settle(handle)
    used, seen = numbers(3.0), numbers(0.0)
    torch.cuda.synchronize()
    desk.pause()
    seen.copy_(used)
    desk.device.aim = used.data_ptr()
    del used
    desk.prefetch(handle)
    return seen, 3.0


def restore(desk: Desk) -> Outcome:
    """d2h is late in writing the host block, and the reader is on another stream than the one that settled
    the spill. Without the edge h2d reads what was in the block before."""
    handle = desk.save(numbers(1.0))
    desk.settle(handle)
    with torch.cuda.stream(desk.side):
        return desk.read(handle), 1.0


def read(desk: Desk) -> Outcome:
    """h2d is late in filling the buffer. Without the edge compute reads what was in it before."""
    handle = desk.save(numbers(1.0))
    desk.settle(handle)
    return desk.read(handle), 1.0


def reuse(desk: Desk) -> Outcome:
    """h2d is late in reading the host block, for a reader on another stream. Without the edge the next spill
    overwrites the block."""
    first = desk.save(numbers(1.0))
    desk.settle(first)
    torch.cuda.synchronize()
    with torch.cuda.stream(desk.side):
        seen = desk.read(first)
    del first  # its block is free from here on
    desk.settle(desk.save(numbers(2.0)))
    assert desk.transfers.counts.refused == 0
    return seen, 1.0


def abandon(desk: Desk) -> Outcome:
    """h2d is late in filling a buffer that nobody will read. Without the edge its bytes are somebody else's
    by then."""
    handle = desk.save(numbers(1.0))
    desk.settle(handle)
    desk.prefetch(handle)
    assert handle.record.block.device_bytes is not None
    address = handle.record.block.device_bytes.data_ptr()
    del handle  # its branch never runs backward
    desk.transfers.reclaim_freed()
    return desk.overwrite(address, 7.0), 7.0


@dataclass(frozen=True)
class Edge:
    """A scenario, and the lane that is slow in it."""

    run: Callable[[Desk], Outcome]
    slow: str


EDGES = {
    "spill": Edge(spill, "compute"),
    "settle": Edge(settle, "d2h"),
    "allocate": Edge(allocate, "compute"),
    "restore": Edge(restore, "d2h"),
    "read": Edge(read, "h2d"),
    "reuse": Edge(reuse, "h2d"),
    "abandon": Edge(abandon, "h2d"),
}


def is_right(edge: Edge, without: Collection[str] = ()) -> bool:
    """Whether the scenario gives the right bytes while its lane sleeps.

    It runs once without the sleep first: then kernels are loaded and the allocator has its blocks, and
    nothing blocks the host in the race. Skips the test where the allocator does not hand freed bytes out
    again: bytes that nobody takes over show nothing.
    """
    desk = Desk(WidenedDevice(without=without))
    try:
        edge.run(desk)
        desk.end()
        desk.begin()
        desk.device.slow_ms = {edge.slow: WIDE_MS}
        desk.slow_compute_ms = WIDE_MS if edge.slow == "compute" else 0.0
        seen, expected = edge.run(desk)
        desk.end()
        return bool((seen == expected).all())
    except LookupError as not_reused:
        pytest.skip(str(not_reused))
    finally:
        desk.close()


@pytest.mark.req("S3-69")
@pytest.mark.parametrize("title", EDGES)
def test_bytes_are_right_however_late_a_lane_is(title: str) -> None:
    assert is_right(EDGES[title])


@pytest.mark.req("S3-69")
@pytest.mark.parametrize("title", EDGES)
def test_without_its_edge_the_same_race_gives_wrong_bytes(title: str) -> None:
    assert not all(is_right(EDGES[title], without={title}) for _ in range(ATTEMPTS))


def test_a_reader_on_another_stream_reads_a_copy_of_its_own() -> None:
    """The buffer belongs to the default stream, which may take it back while the other stream still reads."""
    desk = Desk(WidenedDevice())
    try:
        for slow_ms in (0.0, WIDE_MS):  # once to load kernels and fill the allocator
            desk.device.slow_ms = {"h2d": slow_ms}
            handle = desk.save(numbers(1.0))
            desk.settle(handle)
            desk.prefetch(handle)
            assert handle.record.block.device_bytes is not None
            address = handle.record.block.device_bytes.data_ptr()
            with torch.cuda.stream(desk.side):
                tensor = desk.engine.store.read(handle)
                assert tensor.data_ptr() != address
                seen = tensor.clone()
                del tensor
            other = desk.overwrite(address, 7.0)
            desk.end()
            assert bool((seen == 1.0).all())
            assert bool((other == 7.0).all())
            del handle, other
            desk.begin()
    finally:
        desk.close()


# -- a whole model -------------------------------------------------------------------------------------------

SLOW: dict[str, dict[str, float]] = {
    "compute": {"compute": 4.0},
    "d2h": {"d2h": 0.3},
    "h2d": {"h2d": 0.3},
    "both copies": {"d2h": 0.2, "h2d": 0.3},
    "all": {"compute": 2.0, "d2h": 0.3, "h2d": 0.2},
}
CAPS: dict[str, dict[str, Any]] = {
    "tiny": {"max_spilling_bytes": 512 << 10, "max_restoring_bytes": 512 << 10},
    "device limit": {"device_limit_bytes": 3 << 20},
}


def pause_of(slow: str) -> Callable[[], None]:
    compute_ms = SLOW[slow].get("compute", 0.0)
    return (lambda: sleep(compute_ms)) if compute_ms else (lambda: None)


@functools.cache
def without_offload() -> Result:
    return Program(dtype=torch.bfloat16).run()


@pytest.mark.req("S3-69")
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("streams", [0, 2], ids=["one stream", "two streams"])
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("slow", SLOW)
def test_gradients_have_the_same_bits_whichever_lane_is_slow(slow: str, caps: str, streams: int) -> None:
    """With a slow compute lane everything is issued long before it runs; with a slow copy lane everything
    waits for its copies."""
    manager = build_manager(WidenedDevice(slow_ms=SLOW[slow]), **CAPS[caps])
    with_offload = Program(dtype=torch.bfloat16, pause=pause_of(slow), streams=streams).run(manager)
    assert_same_bits(without_offload().gradients, with_offload.gradients)
    assert with_offload.restored > 0
