"""How much of the offloaded part the host steps: measured once, with everything running that will run, before
the first step.

One invariant: the answer is a multiple of 0.05, so that the noise of a measurement rarely changes a layout,
and with it the bits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from offload.device import CopyPair, Device, Event
from offload.engine import OffloadEngine
from offload.errors import HostBudgetError
from offload.memory.arena import Block
from offload.optim.parameters import Managed
from offload.optim.places import OffloadRates, best_cpu_share
from offload.optim.worker import Worker

__all__ = ["measured_cpu_share"]

logger = logging.getLogger(__name__)

GRID = 0.05
UNMEASURED_SHARE = 0.5
"""Where no time passes (the simulated device): both places work, and are checked."""
COPY_BYTES = 64 << 20
# blocks each way that the copies go round: 1 GiB, beyond what a last-level cache keeps between two rounds
SPREAD = 16
COPIES = 160  # each way: 10.7 GB, 190 ms and more, longer than the steps on the CPU beside them
COPIES_ALONE = 48  # each way: 3.2 GB, 65 ms
WORTH = 0.10
"""Of a step: below this the CPU is left alone. The rates say of float32 weights on an H200 host that the best
share saves up to 7%, and they say 0, 0.4 or 0.55 in turn; a real step took 236.8 ms without the CPU and 282.9
with a share of 0.4. Half-precision weights with masters have 12 bytes of state an element and not 8, but the
host's casts take what that gains: 347.0 ms at 0.5 and 357.0 without (docs/log.md)."""
NUMEL = 128 << 20  # of the CPU's trial: 16 bytes each, 2 GiB; 40 ms a step at 3.3 G a second
LEAST_NUMEL = 32 << 20  # a smaller step takes few milliseconds: not worth a measurement or a ring


def measured_cpu_share(
    engine: OffloadEngine, offloaded: Sequence[Managed], *, masters: bool, threads: int | None
) -> float:
    """The share of elements for the CPU that makes the step shortest. Blocks the host for about 1 s, once.

    Takes 2 GiB of the engine's host memory for the time, 2 GiB that is not pinned (2.5 with casts), and 128
    MiB on the device. As much as that, because with blocks that a last-level cache holds the CPU was measured
    at 4.6 G/s beside copies, and stepped a real state at 2.9 (H200 host, November 2026): the share came out
    at 0.6, with memory of this size at 0.4.
    """
    if not engine.device.pins:
        return UNMEASURED_SHARE
    if sum(member.numel for member in offloaded) < LEAST_NUMEL:
        return 1.0
    half = next((member.dtype for member in offloaded if masters and member.dtype.itemsize == 2), None)
    try:
        rates = measure(engine, threads=threads, half=half)
    except HostBudgetError:
        logger.warning(
            "no 2 GiB of host memory for a measurement: the host steps none of the offloaded parameters; "
            "give cpu_share"
        )
        return 0.0
    numel = sum(member.numel for member in offloaded)
    weight_bytes = sum(member.nbytes for member in offloaded) / numel
    has_master = [masters and member.dtype.itemsize == 2 for member in offloaded]
    state_bytes = (  # two moments of the master's type, and the master where it is not the weight itself
        sum(
            (12 if own else 2 * member.dtype.itemsize) * member.numel
            for member, own in zip(offloaded, has_master, strict=True)
        )
        / numel
    )
    share, seconds = best_cpu_share(
        rates,
        cpu_out_bytes=weight_bytes,
        cpu_in_bytes=weight_bytes,
        streamed_out_bytes=state_bytes,
        streamed_in_bytes=state_bytes,
        worth=WORTH,
    )
    share = round(round(share / GRID) * GRID, 2)
    logger.info(
        "the host steps %.0f%% of the offloaded parameters: CPU %.2f G/s beside copies of %.1f GB/s out and "
        "%.1f GB/s in, which are %.1f "
        "and %.1f without it; %.0f ms a step",
        100 * share,
        rates.cpu_elements_per_s / 1e9,
        rates.d2h_bytes_per_s / 1e9,
        rates.h2d_bytes_per_s / 1e9,
        rates.d2h_alone_bytes_per_s / 1e9,
        rates.h2d_alone_bytes_per_s / 1e9,
        1e3 * seconds * numel,
    )
    return share


def measure(engine: OffloadEngine, *, threads: int | None, half: torch.dtype | None = None) -> OffloadRates:
    """Copies both ways, alone and beside AdamW on the host. Raises HostBudgetError if its memory may not be
    pinned.

    half: of weights that have float32 masters; the CPU widens their gradients and rounds the masters too.
    """
    device, arena = engine.device, engine.arena
    held_bytes = arena.held_bytes
    blocks: list[Block] = []
    worker = Worker("optimizer-trial", cores=device.near_cores, threads=threads)
    try:
        blocks.extend(arena.contiguous(COPY_BYTES) for _ in range(2 * SPREAD))
        there = [device.empty(COPY_BYTES) for _ in range(2)]
        device.note_write(device.compute, there[0])
        for lane in (device.d2h, device.h2d):
            device.wait(lane, device.record(device.compute), "land")
        out: list[CopyPair] = [(block.extents[0], there[0]) for block in blocks[:SPREAD]]
        back: list[CopyPair] = [(there[1], block.extents[0]) for block in blocks[SPREAD:]]
        trial = _Trial(half)
        worker.submit(trial.steps, _nothing)  # warms the threads up, and the memory
        worker.synchronize()
        trial.seconds.clear()
        _copies(device, out, back, 2)
        alone = _rates_of(device, out, back, COPIES_ALONE, _nothing)
        beside = _rates_of(device, out, back, COPIES, lambda: worker.submit(trial.steps, _nothing))
        worker.synchronize()
        if worker.error is not None:
            raise worker.error
    finally:
        worker.close()
        for block in blocks:
            arena.give_back(block, None)
        arena.trim(held_bytes)
    return OffloadRates(
        cpu_elements_per_s=NUMEL / median(trial.seconds),
        d2h_bytes_per_s=beside[0],
        h2d_bytes_per_s=beside[1],
        d2h_alone_bytes_per_s=max(alone[0], beside[0]),
        h2d_alone_bytes_per_s=max(alone[1], beside[1]),
    )


def _rates_of(
    device: Device, out: Sequence[CopyPair], back: Sequence[CopyPair], count: int, begin: Callable[[], None]
) -> tuple[float, float]:
    """Bytes a second out and in, both at once. begin: starts what is to run beside them. Blocks the host."""
    starts = [device.record(lane, timed=True) for lane in (device.d2h, device.h2d)]
    begin()
    ends = _copies(device, out, back, count)
    for event in ends:
        device.synchronize(event)
    seconds = [device.elapsed_ms(start, end) / 1e3 for start, end in zip(starts, ends, strict=True)]
    moved = count * COPY_BYTES
    return moved / seconds[0], moved / seconds[1]


def _copies(device: Device, out: Sequence[CopyPair], back: Sequence[CopyPair], count: int) -> list[Event]:
    for number in range(count):
        device.copy(device.d2h, [out[number % len(out)]])
        device.copy(device.h2d, [back[number % len(back)]])
    return [device.record(lane, timed=True) for lane in (device.d2h, device.h2d)]


def _nothing() -> None:
    """No work beside the copies, or none after a job."""


class _Trial:
    """Steps of AdamW on memory of its own, and the seconds that each took."""

    def __init__(self, half: torch.dtype | None) -> None:
        self.seconds: list[float] = []
        self._flats = [torch.zeros(NUMEL) for _ in range(4)]
        self._narrow = None if half is None else [torch.zeros(NUMEL, dtype=half) for _ in range(2)]
        self._count = torch.zeros(())

    def steps(self) -> None:
        weights, gradients, first, second = self._flats
        for _ in range(3):
            began = time.perf_counter()
            if self._narrow is not None:
                gradients.copy_(self._narrow[0])
            torch._fused_adamw_(
                [weights],
                [gradients],
                [first],
                [second],
                [],
                [self._count],
                lr=1e-4,
                beta1=0.9,
                beta2=0.95,
                weight_decay=0.1,
                eps=1e-8,
                amsgrad=False,
                maximize=False,
            )
            if self._narrow is not None:
                self._narrow[1].copy_(weights)
            self.seconds.append(time.perf_counter() - began)
