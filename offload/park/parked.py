"""`park` and `wake`: the whole training state leaves the device between phases, at the link's rate.

    parked = offload.park(model, optimizer)     # weights, gradients, optimizer state: on the host
    generate()
    parked.wake("weights")
    sync_weights()
    parked.wake()                               # the rest

Parameters, gradients and state stay the objects that they are: the bytes of their storages go and come, and
whoever touches one meanwhile is answered from the host or gets an error.

One invariant: each kind is parked or awake, whatever exception comes between. A kind is parked once all of
its bytes are on the host, and awake once all of its copies to the device are issued, for the lane that woke
it.

A model has one handle, whatever is parked of it and when.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from offload.client import Client, weakly
from offload.engine import OffloadEngine, default_engine
from offload.errors import CaptureError, OffloadError
from offload.optim.step import open_runners
from offload.optim.touch import await_all
from offload.params.sections import check_budget, free_bytes
from offload.park.census import KINDS, Census, Entry, KindMemory, check_kinds, tensors_in
from offload.park.guard import Gate
from offload.park.moves import fetch, free, send
from offload.park.report import Kind, KindReport, ParkReport
from offload.sizes import bytes_text
from offload.telemetry.records import ClientStats
from offload.telemetry.speaker import Once, speaker
from offload.weights.watched import make_plain
from offload.weights.weight import Weight, in_backward

logger = speaker(__name__)

_ALL_CACHED = 1 << 40
"""A release of cached device memory is worth it, however little of it there is."""

_H200_BYTES_PER_S = 55e9
"""What a plan counts with where the link was not measured."""


class Parked(Client):
    """Result of `park` on a model, its gradients and its optimizers, over all cycles.

    report: of the last park. Its host memory stays pinned for the next cycle, until `close()`, or until the
    model and this object are gone.
    """

    name = "park"

    def __init__(self, engine: OffloadEngine, model: nn.Module) -> None:
        self.engine, self._device, self._pid = engine, engine.device, os.getpid()
        self._model, self._name = weakref.ref(model), type(model).__name__
        self._optimizers: list[weakref.ref[Any]] = []
        self._rings: list[weakref.ref[Any]] = []  # that optimizers of ours make again
        self._parked: set[Kind] = set()
        self._memory = {kind: KindMemory(engine.arena) for kind in KINDS}
        self._entries: list[Entry] = []
        self._hooks: list[Any] = []
        self._gate = Gate(weakly(self.refuse))
        self._said = Once()
        self.report = ParkReport()

    def __repr__(self) -> str:
        awake = ", ".join(kind for kind in KINDS if kind not in self._parked) or "nothing"
        return f"Parked({self._name}: parked {', '.join(self.parked) or 'nothing'}; awake {awake})"

    def __str__(self) -> str:
        return f"{self!r}\n{self.report}"

    @property
    def parked(self) -> tuple[Kind, ...]:
        """The kinds that are parked."""
        return tuple(kind for kind in KINDS if kind in self._parked)

    def end_step(self) -> ClientStats:
        """Return the host bytes that are on loan to the client (`Client.end_step`)."""
        return ClientStats(lent_bytes=sum(memory.nbytes for memory in self._memory.values()))

    @contextmanager
    def hold(self, weights: Collection[Weight]) -> Iterator[None]:
        """Raise OffloadError for a read: nothing is brought for it (`Holder.hold`)."""
        for weight in weights:
            raise OffloadError(f"a read of {weight.name}, {weight.away}")
        yield

    def host_copy(self, weight: Weight) -> torch.Tensor:
        """Return the host's copy of the weight (`Holder.host_copy`)."""
        return weight.on_host()

    def refuse(self, what: str, *kinds: str) -> None:
        """Raises OffloadError for `what`, where one of these kinds is parked."""
        if away := [kind for kind in self.parked if kind in kinds]:
            raise OffloadError(
                f"{what} while {' and '.join(away)} of {self._name} are parked: call "
                f"wake({', '.join(map(repr, away))}) on what offload.park() returned first"
            )

    def _refuse_now(self, what: str) -> None:
        if self._pid != os.getpid():
            raise OffloadError(f"{what} in a fork of process {self._pid}, which has the device")
        if in_backward():
            raise OffloadError(f"{what} inside a backward, which uses what it moves: call it between steps")
        self.engine.refuse_in_capture(what)

    # -- park ------------------------------------------------------------------------------------------------
    def park(
        self, optimizers: Sequence[Any], extra: Sequence[Any], kinds: Collection[Kind], **options: bool
    ) -> None:
        """See `offload.park`. Blocks the host until all has left."""
        with self.engine.lock, torch.inference_mode(False), torch.no_grad():
            self._refuse_now("park()")
            self.engine.attach(self)
            coming = [kind for kind in KINDS if kind in kinds and kind not in self._parked]
            report = ParkReport(free_bytes(self.engine.arena), is_plan=options["dry_run"])
            report.notes += [f"{kind} are parked already" for kind in self.parked if kind in kinds]
            if optimizers:
                self._optimizers = [weakref.ref(each) for each in optimizers]
            census = self._count(extra, is_plan=report.is_plan)
            chosen = self._choose(census, coming, report)
            ignores = options["ignore_graphs"]
            if not report.is_plan:
                made = self._make_room(chosen, report, pageable=options["pageable"])
                try:
                    send(self.engine, self._memory, chosen, report, self._no_graph if not ignores else None)
                except BaseException:
                    for kind in made:
                        self._memory[kind].close()
                    raise
                entries = [*self._entries, *chain.from_iterable(chosen.values())]
                with self._as_it_is():
                    _to_the_end(lambda: self._leave(entries, coming))
                self._free_beside(census, coming, report)
            self.report = report
            self._say(report)

    @contextmanager
    def _as_it_is(self) -> Iterator[None]:
        """At the end hooks are on what is parked then; an error says what that is."""
        try:
            yield
        except BaseException as error:
            error.add_note(f"offload: {self!r}")
            raise
        finally:
            while self._hooks:
                self._hooks.pop().remove()
            if self._parked:
                self._hooks.extend(self._gate.close(self._model(), _living(self._optimizers)))

    def _count(self, extra: Sequence[Any], *, is_plan: bool) -> Census:
        """Count what there is, once steps under way have ended. Blocks the host for these."""
        census, model = Census(self._device), self._model()
        assert model is not None  # whoever parks it has it
        known = {id(each) for each in model.parameters()}
        runners = [each for each in open_runners() if not known.isdisjoint(map(id, each.parameters()))]
        if any(runner.backward.stepped for runner in runners):  # whose rest() would be the end of it
            raise OffloadError(
                f"park() of {self._name} between a backward that steps and step(): call it after"
            )
        await_all([*model.parameters()])
        for runner in runners:
            runner.rest()
        for module in model.modules() if not is_plan else ():
            if hasattr(module, "_get_fsdp_state"):
                module.reshard()  # type: ignore[operator]
        names = census.add_model(model)
        for at, optimizer in enumerate(_living(self._optimizers)):
            census.add_optimizer(optimizer, names, f"optimizer {at}, " if at else "")
        for at, each in enumerate(extra):
            if not (found := [*tensors_in(f"extra[{at}]", each)]):
                raise ValueError(f"extra[{at}] is a {type(each).__name__}, without tensors: name them")
            census.add("extra", found)
        census.add(None, (("", view) for runner in runners for view in runner.views()))
        return census

    def _choose(self, census: Census, coming: Sequence[Kind], report: ParkReport) -> dict[Kind, list[Entry]]:
        """The storages that may leave, by the kind whose memory they get."""
        chosen: dict[Kind, list[Entry]] = {kind: [] for kind in coming}
        report.kinds = {kind: KindReport() for kind in coming}
        rates, where = self.engine.rates, self._device.name
        rate = _H200_BYTES_PER_S if rates is None else rates.d2h_bytes_per_s
        for entry in census.entries.values():
            of = [kind for kind in coming if kind in entry.kinds]
            if not of:
                continue
            entry.home, of_kind = of[0], report.kinds[of[0]]
            if awake := entry.kinds - {*coming} - self._parked:
                why = f"{' and '.join(sorted(awake))} have it too, and stay awake"
            elif entry.is_shared or not entry.storage.resizable():
                if "weights" in of and census.is_saved(entry):
                    raise OffloadError(
                        f"park() of {self._name} between a forward and its backward: a graph has saved "
                        f"{entry.name}. Run the backward first, or drop the graph"
                    )
                why = "something else holds its memory, such as a view that park() does not know"
            else:
                entry.belongs_to(self)
                chosen[entry.home].append(entry)
                of_kind.moved_bytes += entry.nbytes
                continue
            of_kind.staying[entry.name] = entry.nbytes, why
        for of_kind in report.kinds.values():
            of_kind.seconds = of_kind.moved_bytes / rate
            report.host_bytes += of_kind.moved_bytes
        for name, nbytes, kind in (each for each in census.others if each[2] in coming):
            report.kinds[kind].staying[name] = nbytes, f"it is sparse, or on another device than {where}"
        if report.is_plan and rates is None:
            report.notes.append(f"seconds are of {rate / 1e9:.0f} GB/s: the link was not measured")
        return chosen

    def _make_room(
        self, chosen: dict[Kind, list[Entry]], report: ParkReport, *, pageable: bool
    ) -> list[Kind]:
        """Host memory for all of it, and the kinds that had none. Blocks the host for the pinning. Raises
        HostBudgetError before anything has moved."""
        began, arena = time.perf_counter(), self.engine.arena
        sizes = {kind: tuple(entry.nbytes for entry in entries) for kind, entries in chosen.items()}
        old = {kind: self._memory[kind] for kind in sizes}
        unfit = {kind for kind in sizes if old[kind].pageable_bytes and not pageable}
        lacking = [kind for kind in sizes if old[kind].sizes != sizes[kind] or kind in unfit]
        for kind in lacking:
            old[kind].close()
        held_bytes, needed = arena.held_bytes, sum(sum(sizes[kind]) for kind in lacking)
        if not pageable:
            what = f"{', '.join(lacking)} of {self._name}, to be parked,"
            check_budget(arena, needed, what, "name fewer kinds, or give pageable=True")
        for kind in lacking:
            old[kind].make(sizes[kind], pageable=pageable)
        report.pageable_bytes = sum(memory.pageable_bytes for memory in old.values())
        report.host_bytes = sum(memory.nbytes for memory in old.values())
        report.pinned_bytes, report.pin_s = arena.held_bytes - held_bytes, time.perf_counter() - began
        return lacking

    def _no_graph(self) -> None:
        if self._device.has_live_graphs():
            raise CaptureError(
                f"park() of {self._name} while a CUDA graph can be replayed, and nobody can ask it what it "
                "reads: addresses change over a cycle. Drop it first, or give ignore_graphs=True where no "
                "graph reads what is parked"
            )

    def _leave(self, entries: list[Entry], coming: Collection[Kind]) -> None:
        """Watch every tensor whose bytes are on the host, then free the bytes."""
        self._entries = entries
        self._parked.update(coming)
        for entry in entries:
            free(self._device, entry)

    def _free_beside(self, census: Census, coming: Sequence[Kind], report: ParkReport) -> None:
        """Release from the device what needs no copy: streamed weights and gradients, rings of optimizers;
        and return to the driver what the allocator has cached."""
        optimizers = _living(self._optimizers) if "optimizer" in coming else []
        rings = [each for each in optimizers if hasattr(each, "drop_ring")]
        self._rings = [*map(weakref.ref, rings)] if "optimizer" in coming else self._rings
        beside: list[tuple[Kind, Callable[[], None]]] = [("optimizer", each.drop_ring) for each in rings]
        beside += [(kind, each.leave_device) for each, kind in census.streams.items() if kind in coming]
        for kind, leave in beside:
            before = self._device.active_bytes()
            leave()
            report.kinds[kind].clean_bytes += before - self._device.active_bytes()
        torch.clear_autocast_cache()
        began, report.device_bytes = time.perf_counter(), self._device.active_bytes()
        report.given_back_bytes = self._device.release_cached(_ALL_CACHED, of_peak=False)
        report.release_s = time.perf_counter() - began

    def _say(self, report: ParkReport) -> None:
        for note in report.notes:
            logger.info("park() of %s: %s", self._name, note)
        staying, name = [] if report.is_plan else report.staying, self._name
        if staying and self._said.first("staying", *(each for each, *_ in staying)):
            nbytes = bytes_text(sum(size for _, size, _ in staying))
            logger.warning(
                f"park() of {name} leaves {len(staying)} tensors, {nbytes}, on the device (the largest: "
                f"{staying[0][0]}: {staying[0][2]}); the report has all"
            )
        if report.pageable_bytes and self._said.first("pageable"):
            logger.warning(
                f"park() of {name}: {bytes_text(report.pageable_bytes)} go to ordinary memory, because the "
                "host's budget has no more; their copies run at a fraction of the link's rate and block the "
                "host. Raise host_limit for pinned memory"
            )

    # -- wake ------------------------------------------------------------------------------------------------
    def wake(self, *kinds: Kind) -> None:
        """Bring these kinds back to the device, or all. A kind that is awake stays as it is, which is said.
        What the current lane does next finds them; the host is not blocked but for allocations. Raises
        torch.OutOfMemoryError where one does not fit, which is parked then."""
        check_kinds(kinds)
        with self.engine.lock, torch.inference_mode(False), torch.no_grad(), self._as_it_is():
            self._refuse_now("wake()")
            for kind in kinds or self.parked:
                if kind in self._parked:
                    self._bring(kind)
                else:
                    logger.info("wake() of %s: %s are awake already", self._name, kind)

    def _bring(self, kind: Kind) -> None:
        coming = [entry for entry in self._entries if kind in entry.kinds]
        away = [entry for entry in coming if entry.aliases() and not entry.storage.nbytes()]
        rings = _living(self._rings) if kind == "optimizer" else []
        try:
            for optimizer in rings:
                optimizer.make_ring()
            fetch(self.engine, away)
        except BaseException:
            self._device.synchronize(self._device.record(self._device.h2d))
            for entry in away:
                self._device.free(entry.storage)
            for optimizer in rings:
                optimizer.drop_ring()
            raise
        _to_the_end(lambda: self._hand_over(kind, coming))

    def _hand_over(self, kind: Kind, coming: Sequence[Entry]) -> None:
        """The tensors are torch's own again. Host memory that somebody reads is theirs."""
        for tensor in (tensor for entry in coming for tensor in entry.aliases()):
            make_plain(tensor, for_good=True)
        self._parked.discard(kind)
        for entry in coming:
            if (reader := entry.reader) is not None:
                weakref.finalize(reader, id, entry.memory).atexit = False  # which lives as long
                self._memory[entry.home] = KindMemory(self.engine.arena)
        gone = {*map(id, coming)}
        self._entries = [entry for entry in self._entries if id(entry) not in gone]

    def close(self) -> None:
        """Wake everything, and give the host memory back."""
        self.wake()
        with self.engine.lock:
            self._memory = {kind: KindMemory(self.engine.arena) for kind in KINDS}
            self.engine.detach(self)


def _living(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [each for reference in references if (each := reference()) is not None]


def _to_the_end(call: Callable[[], None]) -> None:
    """An exception, such as an interrupt, comes after all that the call does, which may be done twice."""
    try:
        call()
    except BaseException:
        call()
        raise


_known: weakref.WeakKeyDictionary[nn.Module, Parked] = weakref.WeakKeyDictionary()


def park(
    model: nn.Module,
    optimizer: Any = None,
    *,
    kinds: Sequence[Kind] = KINDS,
    extra: Sequence[Any] = (),
    dry_run: bool = False,
    pageable: bool = False,
    ignore_graphs: bool = False,
    engine: OffloadEngine | None = None,
) -> Parked:
    """Move a model's training state to pinned host memory, and free its device memory, until `wake`.

    optimizer: one, or several in a list: whose state leaves too. None: those of the last call.
    kinds: of "weights" (and buffers), "gradients", "optimizer" and "extra"; the others stay where they are.
    extra: what else leaves: tensors, modules such as an average of the weights, nested lists and dicts.
    dry_run: nothing moves, and `print()` of what is returned tells what would.
    pageable: what the host's budget has no room for goes to ordinary memory.
    ignore_graphs: you vouch that no CUDA graph that may be replayed reads what is parked.
    engine: whose lanes and host memory are used; None takes the process's own of the model's device.

    A storage that something else holds stays on the device, and a warning names it. A kind that is parked
    already stays as it is. Blocks the host for the copies, and in the first cycle for pinning. Raises
    HostBudgetError before anything has moved, CaptureError while a CUDA graph lives, OffloadError inside a
    backward, ValueError for what it cannot take.
    """
    check_kinds(kinds)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is a {type(model).__name__}, must be a module: park each one by itself")
    given = [] if optimizer is None else [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    inner = [each if hasattr(each, "drop_ring") else getattr(each, "optimizer", each) for each in given]
    optimizers = [each for each in inner if hasattr(each, "param_groups")]  # a look at state may end a step
    if len(optimizers) < len(given):
        names = ", ".join(type(each).__name__ for each in given)
        raise ValueError(f"optimizer is {names}, of which one has no state: give its tensors as extra=")
    handle = _known.get(model)
    if handle is None or engine not in (None, handle.engine):
        if handle is not None:
            handle.close()
        handle = _known[model] = Parked(engine or _engine_of(model), model)
    handle.park(optimizers, extra, kinds, dry_run=dry_run, pageable=pageable, ignore_graphs=ignore_graphs)
    return handle


@contextmanager
def parked(model: nn.Module, optimizer: Any = None, **arguments: Any) -> Iterator[Parked]:
    """`park` with these arguments inside; what it has parked is awake at the end, whatever was raised."""
    handle = park(model, optimizer, **arguments)
    coming = () if handle.report.is_plan else tuple(handle.report.kinds)
    try:
        yield handle
    finally:
        if coming:
            handle.wake(*coming)


def _engine_of(model: nn.Module) -> OffloadEngine:
    """Raises ValueError for a model on the CPU of a machine that has a GPU."""
    devices = {str(tensor.device) for tensor in chain(model.parameters(), model.buffers())}
    name = next((device for device in sorted(devices) if device.startswith("cuda")), "sim")
    if name == "sim" and torch.cuda.is_available():
        raise ValueError(f"{type(model).__name__} has nothing on a GPU that could be parked")
    return default_engine(name)
