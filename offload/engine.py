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

`default_engine` is the engine of this process for a device, for everybody who is given none: there is one at
a time, so one budget and one pair of copy lanes, and limits hold for all.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch

from offload.client import Client, Clients, Phase
from offload.config import OffloadConfig, checked_config
from offload.device import Device, device_name, select_device
from offload.disk.tier import DiskTier
from offload.disk.worker import DiskSettings
from offload.errors import CaptureError, OffloadError, PoolError
from offload.memory.arena import HostArena
from offload.memory.budget import HostBudget, LocalHostBudget, default_host_limit_bytes, shared_by_torchrun
from offload.memory.growth import PAGE_BYTES
from offload.memory.loans import HostShortage
from offload.policy.actions import Rates
from offload.saved.filters import ExternalKind, ExternalStorages
from offload.saved.handles import Handle, SavedChunk
from offload.saved.hooks import SavedTensorHooks
from offload.saved.store import TensorStore
from offload.sizes import bytes_text
from offload.telemetry.records import ClientStats, StepStats, TransferCounts
from offload.telemetry.speaker import speaker
from offload.transfer.captures import CapturedRegion
from offload.transfer.coming import Prefetcher
from offload.transfer.copier import LINK_TEST_BYTES, Admission, CapsAdmission, Copier, measure_rates
from offload.transfer.engine import TransferEngine
from offload.transfer.limits import Limits

__all__ = ["Client", "OffloadEngine"]

logger = speaker(__name__)


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
        self.arena = HostArena(self.device, budget=_budget_of(self.config, budget))
        self.limits = Limits(self.config)
        self.copier = Copier(self.device, admission if admission is not None else CapsAdmission(self.limits))
        self.transfers = TransferEngine(self.arena, self.limits, self.copier, audit=self.config.audit)
        self.transfers.disk = self._disk_of(self.config)
        self.externals = ExternalStorages()
        self.store = TensorStore(
            self.device, self.transfers, self.externals, piece_bytes=self.config.piece_bytes
        )
        self.prefetch = Prefetcher(self.transfers, piece_bytes=self.config.piece_bytes)
        self._readers: list[Callable[[Handle], None]] = []
        self._clients = Clients()
        self.closed = False  # and nobody has attached since
        self._stepping = False  # a step has begun and not ended
        self._saves: TransferCounts | None = None  # of the step that ends, once a client has ended it
        self.regions: list[CapturedRegion] = []  # not released
        self.hooks = SavedTensorHooks(self.store, self.externals, self.lock, self.device, self._readers)
        self.step = 0
        self.last_stats = StepStats(step=-1)
        self._shortage = HostShortage()
        self.rates: Rates | None = None  # of the link, once measured
        self.on_phase: Callable[[Phase], None] | None = None  # an arbiter; without one nobody is called
        if self.config.host_reserve_bytes:
            self.reserve_host(self.config.host_reserve_bytes)

    # -- what clients attach to ------------------------------------------------------------------------------
    def attach(self, client: Client) -> None:
        """From now on `client` is told of steps and captures, after those attached before. The engine holds
        it weakly."""
        with self.lock:
            if self.closed and self.transfers.disk is None:
                self.transfers.disk = self._disk_of(self.config)
            self.closed = False
            self._clients.setdefault(client)

    def detach(self, client: Client) -> None:
        """`client` is told nothing more. It has ended its transfers."""
        with self.lock:
            self._clients.pop(client, None)

    @property
    def clients(self) -> list[Client]:
        """Attached clients, in the order in which they were attached."""
        return list(self._clients)

    def on_read(self, reader: Callable[[Handle], None]) -> None:
        """Call `reader` after every read of a saved record, under the engine's lock."""
        self._readers.append(reader)

    def off_read(self, reader: Callable[[Handle], None]) -> None:
        """Undo `on_read`, once or again."""
        self._readers[:] = [other for other in self._readers if other != reader]

    def at_work(self) -> bool:
        """Return True if the calling thread is inside a call of the engine: operators that it runs now are
        the engine's, not a model's."""
        # what threading.Condition asks of a lock
        return bool(self.lock._is_owned())  # type: ignore[attr-defined]

    # -- set up ----------------------------------------------------------------------------------------------
    def reserve_host(self, nbytes: int, *, measure: bool = True) -> None:
        """Pin until at least `nbytes` are held, or all whole pages of a limit that is as large, and measure
        the link once. Blocks the host for about nbytes / 17 GB/s, and 30 ms.

        measure: False leaves the link to `measure_link`, for ranks that do it together.
        Raises HostBudgetError beyond the budget.
        """
        limit = self.arena.budget.limit_bytes
        self.arena.reserve(nbytes if nbytes > limit else min(nbytes, limit - limit % PAGE_BYTES))
        if measure and self.rates is None and self.can_measure_link:
            self.measure_link()

    def reconfigure(self, config: OffloadConfig, budget: HostBudget | None = None) -> None:
        """Take other limits, which hold for every client from here on; for between steps. Host memory on loan
        stays on loan, and steps are counted from 0 again.

        Blocks the host while host_reserve_bytes are pinned. Raises HostBudgetError, and changes nothing, if
        they or what is on loan do not fit; CaptureError in a capture.
        """
        with self.lock:
            self.refuse_in_capture("a change of the engine's limits")
            disk, disk_before = self._changed_disk(config), self.transfers.disk
            before, held_bytes = self.arena.budget, self.arena.held_bytes
            try:
                self.arena.change_budget(_budget_of(config, budget, held_bytes))
                try:
                    self.reserve_host(config.host_reserve_bytes)
                except BaseException:
                    self.arena.trim(held_bytes)
                    self.arena.change_budget(before)
                    raise
            except BaseException:
                if disk is not None and disk is not disk_before:
                    disk.close()
                raise
            self.transfers.disk = disk
            if disk_before is not None and disk_before is not disk:
                disk_before.close()
            self.config = config
            self.limits.follow(config)
            self.transfers.audit = config.audit
            self.store.piece_bytes = self.prefetch.piece_bytes = config.piece_bytes
            self.step, self.last_stats = 0, StepStats(step=-1)

    def _disk_of(self, config: OffloadConfig) -> DiskTier | None:
        """The disk that `config` asks for. Raises ValueError where it cannot be had."""
        settings = _disk_settings(config)
        if settings is None:
            return None
        self.arena.align(PAGE_BYTES)
        return DiskTier(self.device, self.arena, settings)

    def _changed_disk(self, config: OffloadConfig) -> DiskTier | None:
        """The disk for a new config: the one there is if nothing of it changes."""
        disk, asked = self.transfers.disk, _disk_settings(config)
        if asked == (None if disk is None else disk.settings):
            return disk
        self.transfers.reclaim_freed()
        if disk is not None and disk.in_use:
            raise OffloadError(
                f"saved tensors of this step lie in the file of {disk.file.directory!r}, and the new "
                "config has another; call step_end() before configure()"
            )
        return self._disk_of(config)

    @property
    def can_measure_link(self) -> bool:
        """Predicate: there is a link, and enough free host memory held to measure it with."""
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
        """Region inside which captured work may copy; its host blocks belong to the region from then on.
        Eager work inside is as outside.

        Host memory for every block must be held before: a capture pins nothing, and no two graphs share a
        block. Raises CaptureError if a region is open. Each capture blocks the host until the copies before
        it have passed. An exception that leaves it releases the region.
        """
        region = CapturedRegion(self.transfers, self.lock, self._clients)
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

        Copies that a client has in flight go on: no client waits for another's. Raises CaptureError while a
        graph is captured.
        """
        with self.lock:
            stats = self._end_step()
            clients = self.clients
        with ExitStack() as told:  # all of them, also where one raises
            for client in reversed(clients):
                told.callback(client.step_ended, stats)
        return stats

    def _end_step(self) -> StepStats:
        self.refuse_in_capture("a step's end")
        self._stepping = False
        self._saves = None
        figures: defaultdict[str, ClientStats] = defaultdict(ClientStats)
        for client in self.clients:
            figures[client.name] += client.end_step()
        for name, copies in self.copier.take_counts().items():
            figures[name] += copies
        self.externals.forget_dead()
        arena, counts = self.arena.stats(), self._saves or TransferCounts()
        total = sum(figures.values(), ClientStats())
        counts.host_bytes_wanted_peak = max(counts.host_bytes_wanted_peak, arena.lent_peak_bytes)
        self.last_stats = StepStats(
            **asdict(counts),
            **({} if self.transfers.disk is None else self.transfers.disk.end_step()),
            step=self.step,
            kept=counts.saved - counts.spilled,
            kept_bytes=counts.saved_bytes - counts.spill_bytes,
            stall_ms=total.stall_ms,
            stall_count=total.stall_count,
            host_bytes_lent_peak=arena.lent_peak_bytes,
            host_bytes_held=arena.held_bytes,
            clients=dict(figures),
        )
        if counts.refused_bytes:
            self.arena.reserve_later(counts.host_bytes_wanted_peak)
        self._shortage.step_ended(self.last_stats, self.arena.cannot_grow)
        self.arena.budget.settle()
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
        self.store.waiting.clear()  # of groups that an exception left open
        leftovers = leftover_bytes = 0
        names: set[str] = set()
        for chunk in chunks:
            for block in [*chunk.living()]:
                if block.unread > 0:  # else its graph was only retained
                    leftovers += block.storages
                    leftover_bytes += block.nbytes
                    names.add(f"{block.group.chunk}/{block.group.name}")
                self.transfers.release(block)
        if leftovers:
            logger.warning(
                "step %d ended with %s saved tensors (%s) whose backward has not run; they are "
                "dropped, and reading one raises StaleHandleError. Run the backward first, or forward "
                "without gradients in evaluation. They were saved in %s",
                self.step,
                f"{leftovers:,}",
                bytes_text(leftover_bytes),
                ", ".join(sorted(names)[:4]) + (", ..." if len(names) > 4 else ""),
            )
        counts = self.transfers.end_step()
        figures = ClientStats(refused=counts.refused, refused_bytes=counts.refused_bytes)
        if self._saves is None:  # whoever ends first has all that is one engine's: copies, stalls, regions
            self._saves = TransferCounts()
            figures.lent_bytes = sum(region.host_bytes for region in self.regions)
            self.transfers.stalls, figures.stall_count, figures.stall_ms = self.transfers.stalls.end_step()
        self._saves += counts
        return figures

    def close_unused(self) -> None:
        """`close`, unless a client is attached that does more than listen: for one that leaves an engine
        which others may use."""
        with self.lock:
            if all(client.listens_only for client in self.clients):
                self.close()

    def close(self) -> None:
        """End the step, release every captured region, and return every pinned byte to the system. Blocks the
        host until the copies in flight have passed. Raises PoolError while an optimizer or a pool has host
        memory on loan; called again after, it goes on."""
        with self.lock:
            self._end_step()
            self.closed = True
            for region in self.regions:
                region.release()
            self.regions.clear()
            self.device.synchronize(self.device.record(self.device.d2h))
            self.device.synchronize(self.device.record(self.device.h2d))
            if self.transfers.disk is not None:
                self.transfers.disk.close()
                self.transfers.disk = None
            try:
                self.arena.clear()
            except PoolError as error:
                raise PoolError(
                    f"the engine cannot be closed, its {error}: close() the optimizers and what park() "
                    "returned, clear the pools and drop the state dicts of streamed weights that use it"
                ) from None


def _budget_of(config: OffloadConfig, given: HostBudget | None, held_bytes: int = 0) -> HostBudget:
    if given is not None:
        return given
    if config.host_limit_bytes is not None:
        return LocalHostBudget(config.host_limit_bytes)
    limit = default_host_limit_bytes(held_bytes)
    return shared_by_torchrun(limit) or LocalHostBudget(limit)


def _disk_settings(config: OffloadConfig) -> DiskSettings | None:
    if config.disk_directory is None:
        return None
    return DiskSettings(config.disk_directory, config.disk_limit_bytes, config.disk_ahead_bytes)


_defaults: dict[str, OffloadEngine] = {}
_defaults_lock = threading.Lock()


def default_engine(
    device: str | None = None, config: OffloadConfig | None = None, budget: HostBudget | None = None
) -> OffloadEngine:
    """The engine of this process for a device. It is built when it is first asked for, and anew after it was
    closed.

    device: "cuda", "cuda:N" or "sim"; None takes CUDA where there is a GPU. config, budget: as of
        OffloadEngine. A living engine takes them over (`reconfigure`); without a config it stays as it is.
    Raises ValueError for an unknown device, HostBudgetError beyond the budget; nothing has changed then.
    Blocks the host while host_reserve_bytes are pinned.
    """
    name = device_name(device)
    with _defaults_lock:
        engine = _defaults.get(name)
        if engine is None or engine.closed:
            before, engine = engine, OffloadEngine(config, device=name, budget=budget)
            _defaults[name] = engine
            replace_engine(before, engine)
        elif config is not None:
            engine.reconfigure(config, budget)
        return engine


def replace_engine(before: OffloadEngine | None, engine: OffloadEngine) -> None:
    """The process has `engine` now. Clients of the one before, if that is closed, are told."""
    if before is not None and before is not engine and before.closed:
        for client in before.clients:
            client.engine_replaced(engine)
