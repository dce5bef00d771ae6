#!/usr/bin/env python3
"""What a disk carries through the engine: python scripts/bench_disk.py --directory DIR

Rates in GB of 1e9 bytes a second, taken in turns in one run: what O_DIRECT writes and reads in that directory
with nothing else at work; what the engine's threads did while one ran; and what a step of saves, then of
reads, took by the clock: to the last byte in the file, and to the last tensor.
Each ratio is to the O_DIRECT rate of the same turn. The saves wait for host memory, as in a step as slow as
the disk: nothing is refused. Uses a GPU if there is one. Else the simulated device, whose copies run on the
host: by the clock it measures the host's memory too.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import statistics
import time
from collections.abc import Iterable
from typing import NamedTuple

import torch

from offload import OffloadConfig, OffloadEngine
from offload.client import Client
from offload.device.sim import SimDevice
from offload.disk.file import SpillFile
from offload.disk.tier import DiskTier
from offload.ids import ChunkId, GroupId
from offload.saved.chunk import SavedChunk, SavedGroup
from offload.saved.handles import Handle
from offload.telemetry.records import ClientStats, StepStats

MIB = 1 << 20
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

    def step(self, count: int) -> tuple[float, float]:
        """Seconds of the saves and of the reads."""
        engine, disk = self.engine, self.disk
        self._chunk = chunk = SavedChunk(ChunkId(0, 0))
        group = SavedGroup(GroupId(chunk.id, 0, "bench"), leaves=True)
        handles: list[Handle] = []
        began = time.perf_counter()
        for _ in range(count):
            self._wait_for_room()
            handles.append(engine.store.save(self.source.clone(), chunk, group))
        engine.store.commit(group)
        disk.drain()
        write_s = time.perf_counter() - began
        for transfer in group.transfers:
            engine.transfers.settle_spill(transfer)
        chunk.complete()
        wrong = torch.zeros((), dtype=torch.int64, device=self.source.device)
        began = time.perf_counter()
        while handles:
            engine.prefetch.pump([chunk.coming])
            found = engine.store.read(handles.pop())
            wrong += (found[:: 4096 // 8] != self.source[:: 4096 // 8]).sum()
        assert not wrong.item(), "bytes came back as others"
        return write_s, time.perf_counter() - began

    def _wait_for_room(self) -> None:
        """Block until host memory has room for another two pieces."""
        arena, limit = self.engine.arena, self.engine.config.host_limit_bytes
        assert limit is not None
        while arena.lent_bytes + 2 * max(self.engine.config.piece_bytes, self.source.numel()) > limit:
            time.sleep(0.0002)
            with self.engine.lock:
                self.disk.collect()


def engine_for(arguments: argparse.Namespace) -> OffloadEngine:
    tensor_bytes, limit = arguments.tensor_mib * MIB, arguments.host_mib * MIB
    config = OffloadConfig(
        disk_directory=arguments.directory,
        host_limit_bytes=limit,
        host_reserve_bytes=limit,
        max_spilling_bytes=4 * max(tensor_bytes, 32 * MIB),
        max_restoring_bytes=2 * max(tensor_bytes, 32 * MIB),
        disk_ahead_bytes=limit // 2,
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


def turns(arguments: argparse.Namespace) -> tuple[list[tuple[Rates, Rates, Rates]], StepStats, str]:
    """Of each turn the plain rates, the threads' and those by the clock; the last step's figures; where."""
    plain = PlainCalls(arguments.directory, arguments.mib * MIB)
    engine = engine_for(arguments)
    saver = Saver(engine, arguments.tensor_mib * MIB)
    where = f"{saver.disk.file.file_system}, {'O_DIRECT' if saver.disk.file.direct else 'page cache'}"
    found = []
    for turn in range(arguments.steps + 1):  # the first grows the file
        before = plain.measure()
        write_s, read_s = saver.step(arguments.mib // arguments.tensor_mib)
        stats = engine.end_step()
        after = plain.measure()
        assert stats.refused == 0, "host memory was full"
        if turn:
            around = Rates((before.write + after.write) / 2, (before.read + after.read) / 2)
            threads = Rates(stats.disk_write_bytes_per_s, stats.disk_read_bytes_per_s)
            clock = Rates(stats.disk_write_bytes / write_s, stats.disk_read_bytes / read_s)
            found.append((around, threads, clock))
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
    parser.add_argument("--mib", type=int, default=2048, help="MiB that a step saves")
    parser.add_argument("--tensor-mib", type=int, default=32, help="MiB of one tensor")
    parser.add_argument("--host-mib", type=int, default=512, help="host_limit_bytes in MiB")
    parser.add_argument("--steps", type=int, default=3, help="measured steps; the median counts")
    arguments = parser.parse_args()
    found, stats, where = turns(arguments)
    plain, threads, clock = (median(each) for each in zip(*found, strict=True))
    print(f"{arguments.directory} ({where})")
    print(f"{arguments.mib:,} MiB a step in tensors of {arguments.tensor_mib}, median of {len(found)} turns")
    print(f"{'GB/s':34}{'write':>7} {'read':>7}")
    print(f"{'O_DIRECT alone':34}{plain}")
    print(f"{'engine, while a thread moves':34}{threads}")
    print(f"{'engine, by the clock':34}{clock}")
    for name, at in (("threads over O_DIRECT", 1), ("clock over O_DIRECT", 2)):
        print(f"{name:34}{median(turn[at].over(turn[0]) for turn in found)}")
    print(f"host blocked by reads in the last step: {stats.disk_blocked_ms:.1f} ms")


if __name__ == "__main__":
    main()
