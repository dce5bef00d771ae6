#!/usr/bin/env python3
"""What a disk carries through the engine: python scripts/bench_disk.py --directory DIR

Rates in GB of 1e9 bytes a second, by the clock. Each row moves the same bytes once a turn, out and back:

    O_DIRECT, ...           plain calls of 32 MiB with nothing else at work, one or two in flight, between the
                            file and all of the host memory that a step uses
    O_DIRECT, one buffer    calls of 8 MiB, all into and out of the same 8 MiB. They may stay in the
                            processor's cache, so a program that keeps what it reads need not be as fast
    host and file           the engine's disk: from host memory, where saves wait, to the last byte in the
                            file; and from the file into host memory, all of it read ahead
    device and file         saves on the device to the last byte in the file; and reads to the last tensor

A share is of a plain row of the same turn. Uses a GPU if there is one. Else the simulated device, whose
copies run on the host's cores: then "device and file" measures those.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from offload import OffloadConfig, OffloadEngine
from offload.client import Client
from offload.device.sim import SimDevice
from offload.disk.file import SpillFile
from offload.disk.tier import DiskTier
from offload.disk.worker import Job
from offload.ids import ChunkId, GroupId
from offload.memory.arena import HostArena
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from offload.telemetry.records import ClientStats, StepStats

MIB = 1 << 20
WARM_UP = 2
"""Turns that are not counted: they grow the file and touch host memory for the first time."""


class Rates(NamedTuple):
    """Bytes a second, or one rate over another."""

    write: float
    read: float

    def __str__(self) -> str:
        scale = 1e9 if self.write > 1e6 else 1.0
        return f"{self.write / scale:7.3f} {self.read / scale:7.3f}"

    def over(self, other: Rates) -> Rates:
        return Rates(self.write / other.write, self.read / other.read)


class PlainRow(NamedTuple):
    """How plain calls are made."""

    name: str
    in_flight: int = 1
    one_buffer: bool = False


ONE, TWO = "O_DIRECT, one call in flight", "O_DIRECT, two calls in flight"
PLAIN = (
    PlainRow(ONE),
    PlainRow(TWO, in_flight=2),
    PlainRow("O_DIRECT, one buffer", one_buffer=True),
)
HOST, DEVICE = "host and file", "device and file"

CALL_BYTES = 32 * MIB
BUFFER_BYTES = 8 * MIB


class PlainCalls:
    """Calls over a file of their own, and over host memory that the engine lends meanwhile."""

    def __init__(self, directory: str, arena: HostArena, nbytes: int) -> None:
        self._file = SpillFile(directory)
        self._file.grow(nbytes)
        self._arena = arena
        self._nbytes = nbytes
        self._buffer = torch.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=torch.uint8).random_()

    def measure(self, row: PlainRow) -> Rates:
        step = BUFFER_BYTES if row.one_buffer else CALL_BYTES
        starts = range(0, self._nbytes - step + 1, step)
        lent = [self._arena.take(step) for _ in starts] if not row.one_buffer else []
        hosts = [host.extents for host in lent if host is not None] or [[self._buffer]] * len(starts)
        calls = [*zip(hosts, starts, strict=True)]
        rates = []
        with ThreadPoolExecutor(row.in_flight) as threads:
            for move in (self._file.write, self._file.read):
                began = time.perf_counter()
                for done in [threads.submit(move, [host], start) for host, start in calls]:
                    done.result()
                rates.append(len(starts) * step / (time.perf_counter() - began))
        for host in lent:
            assert host is not None
            self._arena.give_back(host, None)
        return Rates(*rates)

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
            for _ in range(disk.writer.num_threads):
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


def turns(arguments: argparse.Namespace) -> tuple[list[dict[str, Rates]], StepStats, str]:
    """Of each turn the rates by the row's name; the last step's figures; where."""
    engine = engine_for(arguments)
    saver = Saver(engine, arguments.tensor_mib * MIB)
    count = arguments.mib // arguments.tensor_mib
    nbytes = count * arguments.tensor_mib * MIB
    plain = PlainCalls(arguments.directory, engine.arena, nbytes)
    found = []
    stats = StepStats(step=-1)

    def through_the_engine(*, alone: bool) -> Rates:
        nonlocal stats
        write_s, read_s = saver.step(count, alone=alone)
        stats = engine.end_step()
        assert stats.refused == 0, "host memory was full"
        assert stats.disk_write_bytes == stats.disk_read_bytes == nbytes
        return Rates(nbytes / write_s, nbytes / read_s)

    rows: dict[str, Callable[[], Rates]] = {row.name: partial(plain.measure, row) for row in PLAIN}
    rows |= {HOST: partial(through_the_engine, alone=True), DEVICE: partial(through_the_engine, alone=False)}
    names = [*rows]
    for turn in range(WARM_UP + arguments.steps):
        rates = {name: rows[name]() for name in names}
        names.reverse()  # a disk that grows warm or busy within a turn favours no row
        if turn >= WARM_UP:
            found.append(rates)
    where = (
        f"{saver.disk.file.file_system}, {'O_DIRECT' if saver.disk.file.direct else 'page cache'}; "
        f"{huge_page_bytes() // MIB:,} of {engine.arena.held_bytes // MIB:,} MiB in huge pages"
    )
    plain.close()
    engine.detach(saver)
    engine.close()
    return found, stats, where


def huge_page_bytes() -> int:
    """What of this process's memory the system keeps in huge pages: with small ones a disk gets smaller
    requests. 0 where the system does not say."""
    with contextlib.suppress(OSError), open("/proc/self/smaps_rollup") as lines:
        return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))
    return 0


def median(rates: Iterable[Rates]) -> Rates:
    return Rates(*(statistics.median(side) for side in zip(*rates, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", required=True, help="on the file system to measure")
    parser.add_argument("--mib", type=int, default=1024, help="MiB that a step saves, all in host memory")
    parser.add_argument("--tensor-mib", type=int, default=32, help="MiB of one tensor")
    parser.add_argument("--steps", type=int, default=5, help="measured steps; the median counts")
    arguments = parser.parse_args()
    found, stats, where = turns(arguments)
    print(f"{arguments.directory} ({where})")
    print(f"{arguments.mib:,} MiB a step in tensors of {arguments.tensor_mib}, median of {len(found)} turns")
    print(f"{'GB/s':42}{'write':>7} {'read':>7}")
    for name in (*(row.name for row in PLAIN), HOST, DEVICE):
        print(f"{name:42}{median(rates[name] for rates in found)}")
    print(f"{'share':42}{'write':>7} {'read':>7}")
    for name in (HOST, DEVICE):
        for plain in (ONE, TWO, PLAIN[-1].name):
            share = median(rates[name].over(rates[plain]) for rates in found)
            name_of_share = f"{name} / {plain.removeprefix('O_DIRECT, ')}"
            print(f"{name_of_share:42}{share}")
    print(f"host blocked by reads in the last step: {stats.disk_blocked_ms:.1f} ms")


if __name__ == "__main__":
    main()
