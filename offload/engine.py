"""OffloadEngine: builds device, arena, copier, transfers and store, and owns the step and the boundary of a
capture.

One invariant: it names none of the features that attach to it. A client opens scopes on `hooks`, pumps
`prefetch`, copies through `copier`; the engine ends the step for all of them, and each ends only its own
transfers.

    engine = OffloadEngine(OffloadConfig(device_limit_bytes=4 << 30))   # cuda, or simulated without a GPU
    engine.reserve_host(32 << 30)                                       # pin before step 1
    engine.attach(client)
    ...                                                                 # forwards, backwards
    stats = engine.end_step()
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from offload.config import OffloadConfig
from offload.device import Device, select_device
from offload.errors import CaptureError, PoolError
from offload.memory.arena import HostArena
from offload.memory.budget import HostBudget, LocalHostBudget, default_host_limit_bytes
from offload.policy.actions import Rates
from offload.saved.chunk import SavedChunk
from offload.saved.externals import ExternalKind, ExternalStorages
from offload.saved.handles import Handle
from offload.saved.hooks import SavedTensorHooks
from offload.saved.store import TensorStore
from offload.telemetry.records import ClientStats, StepStats
from offload.transfer.admission import Admission, CapsAdmission, Limits
from offload.transfer.captures import CapturedRegion
from offload.transfer.copier import Copier
from offload.transfer.engine import TransferEngine
from offload.transfer.in_flight import TransferCounts
from offload.transfer.link import LINK_TEST_BYTES, measure_rates
from offload.transfer.prefetch import Prefetcher

__all__ = ["DEFAULT_IN_FLIGHT_BYTES", "Client", "OffloadEngine", "checked_config"]

logger = logging.getLogger(__name__)

# bytes: 20 ms of a 55 GB/s link, so one burst of a transformer layer leaves without compute waiting
DEFAULT_IN_FLIGHT_BYTES = 1 << 30


class Client:
    """A feature that attaches to the engine; what it has nothing to do for, it inherits. All but `step_ended`
    are called under the engine's lock."""

    name: str
    """To print; the client of its copies' owners."""

    def begin_step(self) -> None:
        """The first forward of a step begins."""

    def end_step(self) -> ClientStats:
        """End its own transfers, and no other client's. Returns its figures but for its copies, which the
        engine counts. Blocks the host: never."""
        return ClientStats()

    def step_ended(self, stats: StepStats) -> None:
        """Every client has ended the step. Called without the lock: it may communicate."""

    def capture_begins(self) -> None:
        """A capture begins after this: events may still be waited for."""

    def capture_ends(self) -> None:
        """A capture ends after this: what it copies must be issued by now."""


class _Clients:
    """Clients in the order in which they were attached. Held weakly: one that is dropped is gone."""

    def __init__(self) -> None:
        self._attached: list[weakref.ref[Client]] = []

    def add(self, client: Client) -> None:
        if client not in self.living():
            self._attached.append(weakref.ref(client))

    def remove(self, client: Client) -> None:
        self._attached = [other for other in self._attached if other() not in (None, client)]

    def living(self) -> list[Client]:
        return [client for reference in self._attached if (client := reference()) is not None]

    def capture_begins(self) -> None:
        for client in self.living():
            client.capture_begins()

    def capture_ends(self) -> None:
        for client in self.living():
            client.capture_ends()


class OffloadEngine:
    """One per process and device.

    config: checked limits. device: None takes CUDA where there is a GPU, else the simulated device. budget:
        host bytes that all ranks of this host may pin together; None counts this process alone. admission:
        asked before every copy; None grants within the caps.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        *,
        device: Device | str | None = None,
        budget: HostBudget | None = None,
        admission: Admission | None = None,
    ) -> None:
        self.config = checked_config(config)
        self.device: Device = select_device(device) if device is None or isinstance(device, str) else device
        self.lock = threading.RLock()
        if budget is None:
            limit = self.config.host_limit_bytes
            budget = LocalHostBudget(limit if limit is not None else default_host_limit_bytes())
        self.arena = HostArena(self.device, budget=budget)
        self.limits = _limits(self.config)
        self.copier = Copier(self.device, admission if admission is not None else CapsAdmission(self.limits))
        self.transfers = TransferEngine(self.arena, self.limits, self.copier, audit=self.config.audit)
        self.externals = ExternalStorages()
        self.store = TensorStore(
            self.device, self.transfers, self.externals, piece_bytes=self.config.piece_bytes
        )
        self.prefetch = Prefetcher(self.transfers, piece_bytes=self.config.piece_bytes)
        self._readers: list[Callable[[Handle], None]] = []
        self._clients = _Clients()
        self._stepping = False  # a step has begun and not ended
        self._saves = TransferCounts()  # of the step that ends
        self.regions: list[CapturedRegion] = []  # not released
        self.hooks = SavedTensorHooks(self.store, self.externals, self.lock, self.device, self._readers)
        self.step = 0
        self.last_stats = StepStats(step=-1)
        self.rates: Rates | None = None  # of the link, once measured
        if self.config.host_reserve_bytes:
            self.reserve_host(self.config.host_reserve_bytes)

    # -- what clients attach to ------------------------------------------------------------------------------
    def attach(self, client: Client) -> None:
        """From now on `client` is told of steps and captures, after those attached before. The engine holds
        it weakly."""
        with self.lock:
            self._clients.add(client)

    def detach(self, client: Client) -> None:
        """`client` is told nothing more. It has ended its transfers."""
        with self.lock:
            self._clients.remove(client)

    @property
    def clients(self) -> list[Client]:
        """Those attached, in that order."""
        return self._clients.living()

    def on_read(self, reader: Callable[[Handle], None]) -> None:
        """Call `reader` after every read of a saved record, under the engine's lock."""
        self._readers.append(reader)

    def at_work(self) -> bool:
        """Whether the calling thread is inside a call of the engine: what it computes now is the engine's,
        and no model's."""
        # what threading.Condition asks of a lock
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    # -- set up ----------------------------------------------------------------------------------------------
    def reserve_host(self, nbytes: int, *, measure: bool = True) -> None:
        """Pin until at least `nbytes` are held, and measure the link once. Blocks the host for about nbytes /
        17 GB/s, and 30 ms.

        measure: False leaves the link to `measure_link`, for ranks that do it together.
        Raises HostBudgetError beyond the budget.
        """
        self.arena.reserve(nbytes)
        if measure and self.rates is None and self.can_measure_link:
            self.measure_link()

    @property
    def can_measure_link(self) -> bool:
        """Whether there is a link, and enough free host memory held to measure it with."""
        return self.device.pins and self.arena.stats().free_bytes >= LINK_TEST_BYTES

    def measure_link(self, line_up: Callable[[], None] | None = None) -> Rates | None:
        """Measure the rates that the plan is made with, now and over again; between steps only. Blocks the
        host for about 30 ms.

        line_up: called three times, before each measurement: a barrier over ranks that measure together.
        """
        self.rates = measure_rates(self.copier, self.arena, line_up)
        self.arena.reset_peak()
        return self.rates

    def register_parameters(self, module: torch.nn.Module) -> None:
        """Parameters and buffers of `module`, their views and their autocast casts never leave."""
        with self.lock:
            self.externals.register_parameters(module.parameters())
            for buffer in module.buffers():
                self.externals.register(buffer, ExternalKind.OPTED_OUT)

    def register_external(self, tensor: torch.Tensor) -> None:
        """`tensor`'s storage is written from outside autograd (a receive buffer): saves of it never share one
        copy."""
        with self.lock:
            self.externals.register(tensor, ExternalKind.BUFFER)

    def mark_not_offloadable(self, tensor: torch.Tensor) -> None:
        """`tensor`'s storage stays on the device for good."""
        with self.lock:
            self.externals.register(tensor, ExternalKind.OPTED_OUT)

    # -- captures --------------------------------------------------------------------------------------------
    @contextmanager
    def capturing(self) -> Iterator[CapturedRegion]:
        """What is captured inside may copy; its host blocks belong to the region from then on. Eager work
        inside is as outside.

        Host memory for every block must be held before: a capture pins nothing, and no two graphs share a
        block. Raises CaptureError if a region is open. Each capture blocks the host until the copies before
        it have passed. An exception that leaves it releases the region.
        """
        region = CapturedRegion(self.device, self.arena, self.transfers, self.lock, self._clients)
        with self.device.watch_captures(region):
            self.regions = [known for known in self.regions if not known.released]
            self.regions.append(region)
            try:
                yield region
            except BaseException:
                region.release()
                raise
        region.warn_of_kept()

    def refuse_in_capture(self, what: str) -> None:
        """Raise CaptureError while a graph is captured. what: cannot be replayed."""
        if self.device.is_capturing():
            raise CaptureError(
                f"{what} inside a graph under capture, whose replays could not repeat it; call it outside of "
                "the capture"
            )

    # -- lifecycle -------------------------------------------------------------------------------------------
    def begin_step(self) -> None:
        """The first forward of a step begins; called again in the step, it does nothing."""
        with self.lock:
            if not self._stepping:
                self._stepping = True
                for client in self.clients:
                    client.begin_step()

    def end_step(self) -> StepStats:
        """End the step: each client ends its own transfers, and says what it did. Blocks the host: never, but
        for a client that communicates once all have ended.

        Copies that a client has under way go on, and nobody waits for another's. Raises CaptureError while a
        graph is captured.
        """
        with self.lock:
            stats = self._end_step()
            clients = self.clients
        for client in clients:
            client.step_ended(stats)
        return stats

    def _end_step(self) -> StepStats:
        self.refuse_in_capture("a step's end")
        self._stepping = False
        self._saves = counts = TransferCounts()
        figures: defaultdict[str, ClientStats] = defaultdict(ClientStats)
        for client in self.clients:
            figures[client.name] += client.end_step()
        for name, copies in self.copier.take_counts().items():
            figures[name] += ClientStats(**asdict(copies))
        self.externals.forget_dead()
        arena, counts = self.arena.stats(), self._saves
        self.last_stats = StepStats(
            step=self.step,
            saved=counts.saved,
            kept=counts.saved - counts.spilled,
            spilled=counts.spilled,
            restored=counts.restored,
            spill_bytes=counts.spill_bytes,
            restore_bytes=counts.restore_bytes,
            stall_ms=sum(client.stall_ms for client in figures.values()),
            stall_count=sum(client.stall_count for client in figures.values()),
            refused=counts.refused,
            refused_bytes=counts.refused_bytes,
            device_bytes_peak=counts.device_bytes_peak,
            host_bytes_lent_peak=arena.lent_peak_bytes,
            host_bytes_wanted_peak=max(arena.lent_peak_bytes, counts.wanted_peak_bytes),
            host_bytes_held=arena.held_bytes,
            replays=counts.replays,
            replayed_bytes=counts.replayed_bytes,
            clients=dict(figures),
        )
        if counts.refused_bytes:
            self.arena.reserve_later(counts.wanted_peak_bytes)
        self.arena.reset_peak()
        self.step += 1
        return self.last_stats

    def end_saves(self, chunks: Iterable[SavedChunk]) -> ClientStats:
        """For a client that saves tensors, in its `end_step`: drop leftovers, settle what is in flight.
        Blocks the host: never.

        A leftover is a saved tensor whose backward has not run; it is dropped with one warning, and reading
        it later raises StaleHandleError. So nothing of one step holds device or pinned bytes in the next, but
        for what captured graphs own.
        """
        self.transfers.reclaim_freed()
        leftovers = leftover_bytes = 0
        for chunk in chunks:
            for block in [*chunk.living()]:
                if block.unread > 0:  # else its graph was only retained
                    leftovers += block.storages
                    leftover_bytes += block.nbytes
                self.transfers.release(block)
        if leftovers:
            logger.warning(
                "step %d ended with %s saved tensors (%s bytes) whose backward has not run; they are "
                "dropped, and reading one raises "
                "StaleHandleError. Run the backward first, or forward without gradients in evaluation",
                self.step,
                f"{leftovers:,}",
                f"{leftover_bytes:,}",
            )
        self._saves, stall_ms = self.transfers.end_step()
        return ClientStats(
            lent_bytes=sum(region.host_bytes for region in self.regions),
            stall_ms=stall_ms,
            stall_count=self._saves.stall_count,
            refused=self._saves.refused,
            refused_bytes=self._saves.refused_bytes,
        )

    def close(self) -> None:
        """End the step, release every captured region, and return every pinned byte to the system. Blocks the
        host until the copies in flight have passed. Raises PoolError while an optimizer or a pool has host
        memory on loan; called again after, it goes on."""
        with self.lock:
            self._end_step()
            for region in self.regions:
                region.release()
            self.regions.clear()
            self.device.synchronize(self.device.record(self.device.d2h))
            self.device.synchronize(self.device.record(self.device.h2d))
            try:
                self.arena.clear()
            except PoolError as error:
                raise PoolError(
                    f"the engine cannot be closed, its {error}: close() the optimizers and clear the pools "
                    "that use it"
                ) from None


def checked_config(config: object) -> OffloadConfig:
    """The config itself, or the default one for None; ValueError for anything else."""
    if config is None:
        return OffloadConfig()
    if not isinstance(config, OffloadConfig):
        raise ValueError(
            f"config is a {type(config).__name__}, must be an OffloadConfig, or None for the default one"
        )
    return config


def _limits(config: OffloadConfig) -> Limits:
    limit = config.device_limit_bytes
    spilling, restoring = config.max_spilling_bytes, config.max_restoring_bytes
    if spilling is None and limit is None:
        spilling = DEFAULT_IN_FLIGHT_BYTES
    if restoring is None:
        restoring = DEFAULT_IN_FLIGHT_BYTES if limit is None else limit // 4
    return Limits(device_limit_bytes=limit, max_spilling_bytes=spilling, max_restoring_bytes=restoring)
