#!/usr/bin/env python3
"""What a disk carries through the engine: python scripts/bench_disk.py --directory DIR

Rates in GB of 1e9 bytes a second, by the clock, taken in turns in one run:

    O_DIRECT alone      calls one after another in that directory, with nothing else at work
    host and file       the engine's disk: from host memory, where saves wait, to the last byte in the file;
                        and from the file into host memory, all of it read ahead
    device and file     saves on the device to the last byte in the file; and reads to the last tensor

Ratios are to the O_DIRECT rate of the same turn. Uses a GPU if there is one. Else the simulated device, whose
copies run on the host's cores: then the last row measures those.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import statistics
import threading
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from offload import OffloadConfig, OffloadEngine
from offload.client import Client
from offload.device.sim import SimDevice
from offload.disk.file import SpillFile
from offload.disk.tier import DiskTier
from offload.disk.worker import Job
from offload.ids import ChunkId, GroupId
from offload.saved.chunk import SavedChunk, SavedGroup
from offload.saved.handles import Handle
from offload.telemetry.records import ClientStats, StepStats

MIB = 1 << 20
ROWS = (
    "O_DIRECT alone",
    "host and file",
    "device and file",
    "host and file over O_DIRECT",
    "device and file over O_DIRECT",
)
WARM_UP = 2
"""Turns that are not counted: they grow the file and touch host memory for the first time."""

CALLS_MIB = (8, 32)
"""Sizes of the plain calls; the better one counts."""


class Rates(NamedTuple):
    """Bytes a second, or one rate over another."""

    write: float
    read: float

    def __str__(self) -> str:
        scale = 1e9 if self.write > 1e6 else 1.0
        return f"{self.write / scale:7.3f} {self.read / scale:7.3f}"

    def over(self, other: Rates) -> Rates:
        return Rates(self.write / other.write, self.read / other.read)


class PlainCalls:
    """Calls of O_DIRECT one after another, over bytes that were written before."""

    def __init__(self, directory: str, nbytes: int) -> None:
        self._nbytes = nbytes
        self._file = SpillFile(directory)
        self._file.grow(nbytes)
        self._buffers = [torch.frombuffer(mmap.mmap(-1, mib * MIB), dtype=torch.uint8) for mib in CALLS_MIB]
        for buffer in self._buffers:
            buffer.random_()
        self.measure()  # the first writes allocate

    def measure(self) -> Rates:
        found = []
        for move in (self._file.write, self._file.read):
            rates = []
            for buffer in self._buffers:
                starts = range(0, self._nbytes - buffer.numel() + 1, buffer.numel())
                began = time.perf_counter()
                for start in starts:
                    move([[buffer]], start)
                rates.append(len(starts) * buffer.numel() / (time.perf_counter() - began))
            found.append(max(rates))
        return Rates(*found)

    def close(self) -> None:
        self._file.close()


class Saver(Client):
    """A client that saves tensors of one size, and reads them back in reverse."""

    name = "groups"

    def __init__(self, engine: OffloadEngine, tensor_bytes: int) -> None:
        self.engine = engine
        self.source = torch.randint(255, (tensor_bytes,), dtype=torch.uint8).to(engine.device.torch_device)
        self._chunk = SavedChunk(ChunkId(0, 0))
        engine.attach(self)

    @property
    def disk(self) -> DiskTier:
        assert self.engine.transfers.disk is not None
        return self.engine.transfers.disk

    def end_step(self) -> ClientStats:
        """As Client."""
        return self.engine.end_saves([self._chunk])

    def step(self, count: int, *, alone: bool) -> tuple[float, float]:
        """Seconds of the writes and of the reads. alone: without the copies to and from the device."""
        engine, disk = self.engine, self.disk
        self._chunk = chunk = SavedChunk(ChunkId(0, 0))
        group = SavedGroup(GroupId(chunk.id, 0, "bench"), leaves=True)
        handles: list[Handle] = []
        gate = threading.Event()
        if alone:
            disk.writer.submit(Job(lambda items: gate.wait() and None, []))
        began = time.perf_counter()
        for _ in range(count):
            handles.append(engine.store.save(self.source.clone(), chunk, group))
        engine.store.commit(group)
        if alone:
            engine.device.synchronize(engine.device.record(engine.device.d2h))
            began = time.perf_counter()
            gate.set()
        disk.drain()
        write_s = time.perf_counter() - began
        for transfer in group.transfers:
            engine.transfers.settle_spill(transfer)
        chunk.complete()
        began = time.perf_counter()
        if alone:
            with engine.lock:
                disk.look_ahead(chunk.coming.unfetched())
            disk.reader.drain()
            read_s = time.perf_counter() - began
        wrong = torch.zeros((), dtype=torch.int64, device=self.source.device)
        while handles:
            engine.prefetch.pump([chunk.coming])
            found = engine.store.read(handles.pop())
            wrong += (found[::512] != self.source[::512]).sum()
        assert not wrong.item(), "bytes came back as others"
        return write_s, read_s if alone else time.perf_counter() - began


def engine_for(arguments: argparse.Namespace) -> OffloadEngine:
    tensor_bytes, limit = arguments.tensor_mib * MIB, (arguments.mib + 256) * MIB
    config = OffloadConfig(
        disk_directory=arguments.directory,
        host_limit_bytes=limit,
        host_reserve_bytes=limit,
        max_spilling_bytes=4 * max(tensor_bytes, 32 * MIB),
        max_restoring_bytes=2 * max(tensor_bytes, 32 * MIB),
        disk_ahead_bytes=limit,
    )
    if torch.cuda.is_available():
        return OffloadEngine(config)
    keep_freed_memory()
    # its copies run where they are issued, not on the thread that writes
    return OffloadEngine(config, device=SimDevice(executor="early", poison=False))


def keep_freed_memory() -> None:
    """As a device's allocator does: else every simulated device tensor is a new mapping of new pages."""
    with contextlib.suppress(OSError, AttributeError):  # no glibc
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 1 << 34)  # M_TRIM_THRESHOLD


def turns(arguments: argparse.Namespace) -> tuple[list[tuple[Rates, ...]], StepStats, str]:
    """Of each turn the rates of the three rows, and two ratios; the last step's figures; where."""
    plain = PlainCalls(arguments.directory, arguments.mib * MIB)
    engine = engine_for(arguments)
    saver = Saver(engine, arguments.tensor_mib * MIB)
    where = f"{saver.disk.file.file_system}, {'O_DIRECT' if saver.disk.file.direct else 'page cache'}"
    found = []
    nbytes = arguments.mib // arguments.tensor_mib * arguments.tensor_mib * MIB
    for turn in range(WARM_UP + arguments.steps):
        rates = [plain.measure()]
        for alone in (True, False):
            seconds = saver.step(arguments.mib // arguments.tensor_mib, alone=alone)
            stats = engine.end_step()
            assert stats.refused == 0, "host memory was full"
            assert stats.disk_write_bytes == stats.disk_read_bytes == nbytes
            rates.append(Rates(nbytes / seconds[0], nbytes / seconds[1]))
            rates.append(plain.measure())
        if turn >= WARM_UP:
            before, host, between, device, after = rates
            around = [
                Rates((one.write + other.write) / 2, (one.read + other.read) / 2)
                for one, other in ((before, between), (between, after))
            ]
            found.append((between, host, device, host.over(around[0]), device.over(around[1])))
    engine.detach(saver)
    engine.close()
    plain.close()
    return found, stats, where


def median(rates: Iterable[Rates]) -> Rates:
    return Rates(*(statistics.median(side) for side in zip(*rates, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", required=True, help="on the file system to measure")
    parser.add_argument("--mib", type=int, default=1024, help="MiB that a step saves, all in host memory")
    parser.add_argument("--tensor-mib", type=int, default=32, help="MiB of one tensor")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; the median counts")
    arguments = parser.parse_args()
    found, stats, where = turns(arguments)
    print(f"{arguments.directory} ({where})")
    print(f"{arguments.mib:,} MiB a step in tensors of {arguments.tensor_mib}, median of {len(found)} turns")
    print(f"{'GB/s':34}{'write':>7} {'read':>7}")
    for name, rates in zip(ROWS, zip(*found, strict=True), strict=True):
        print(f"{name:34}{median(rates)}")
    print(f"host blocked by reads in the last step: {stats.disk_blocked_ms:.1f} ms")


if __name__ == "__main__":
    main()
