"""The steps of offloaded buckets: given to workers, waited for by the first user, and what is left when one
fails.

One invariant: a bucket is with at most one worker, and everybody who touches what the worker touches has
waited for `done` and then for the event that the worker recorded.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.device import Event
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.optim.cpu_step import CpuBucket, HostScalars
from offload.optim.parts import CpuPart, StreamedPart
from offload.optim.streamed_step import StreamedBucket
from offload.optim.waiting import Waiting
from offload.optim.worker import Worker

__all__ = ["HostBucket", "HostedSteps"]

logger = logging.getLogger(__name__)

HostBucket = CpuBucket | StreamedBucket

LANDING_LEAD = 3
"""Buckets whose gradients are on their way or there before the CPU asks for them: one lands in a fifth of the
time that its step takes."""


class HostedSteps:
    """Buckets in flight. cpu, streamed: whose buckets. cpu_threads: of the CPU optimizer; see Worker."""

    def __init__(
        self, engine: OffloadEngine, cpu: CpuPart, streamed: StreamedPart, cpu_threads: int | None
    ) -> None:
        self._engine = engine
        self._cpu = cpu
        self._streamed = streamed
        self._stepper = Worker("optimizer-cpu", cores=engine.device.near_cores, threads=cpu_threads)
        self._streamer = Worker("optimizer-stream", threads=1)
        self._to_step = Waiting(self._stepper, _nothing)
        self._to_stream = Waiting(self._streamer, streamed.wait_for_slot)
        self._pending: list[HostBucket] = []  # of the last step: issued or about to be
        # CPU's and streamed: their gradients may be read
        self._lent: tuple[deque[HostBucket], deque[HostBucket]] = deque(), deque()
        # of the last step: the optimizer's lane reads it, and its memory is compute's
        self._factor: Tensor | None = None
        self._arrived: set[tuple[int, int]] = set()  # (bucket, lane) by id
        # by bucket: gradients read in place, and the version they must keep
        self._held: dict[int, list[tuple[Tensor, int, str]]] = {}
        self._failed: OffloadError | None = None
        self.buckets_of: dict[int, list[HostBucket]] = {}
        self.in_order: list[HostBucket] = []
        self._places: dict[int, int] = {}  # in that order, by the bucket's id

    def index(self) -> None:
        """Parts have got new buckets."""
        self.buckets_of = {}
        self.in_order = sorted(
            (*self._cpu.buckets, *self._streamed.buckets),
            key=lambda bucket: bucket.layout.pieces[0].parameter,
        )
        for bucket in self.in_order:
            for member in bucket.members:
                self.buckets_of.setdefault(member.index, []).append(bucket)
        self._places = {id(bucket): place for place, bucket in enumerate(self.in_order)}

    # -- issuing ---------------------------------------------------------------------------------------------
    def release(self, buckets: Iterable[HostBucket]) -> Event:
        """The point on compute after which these buckets' weights may be written: all work that reads them
        has been issued."""
        device = self._engine.device
        for bucket in buckets:
            for part in bucket.weights():
                device.note_read(device.compute, part.view(torch.uint8))
        return device.record(device.compute)

    def start_workers(self) -> None:
        """Have the threads, before anything of a step is done: `submit` cannot fail for want of them after
        it. Raises OffloadError."""
        if self._cpu.buckets:
            self._stepper.start()
        if self._streamed.buckets:
            self._streamer.start()

    def submit(
        self, buckets: Sequence[HostBucket], released: Event, scalars: HostScalars, factor: Tensor | None
    ) -> None:
        """Give buckets, which hold their gradients, to the workers; see waiting.py for their order. Blocks
        the host: never.

        released: recorded on compute after the gradients, and after the last use of the weights. Gradients
        that have not landed yet leave LANDING_LEAD buckets ahead of the CPU: all at once would keep the
        streamed buckets' state waiting behind them on d2h.
        """
        device = self._engine.device
        for bucket in buckets:
            bucket.done.clear()
        self._pending += buckets
        self._factor = factor
        on_cpu = [bucket for bucket in buckets if isinstance(bucket, CpuBucket)]
        self._lent[0].extend(on_cpu)
        self._lent[1].extend(bucket for bucket in buckets if isinstance(bucket, StreamedBucket))
        scratch = self._cpu.scratch
        for place, mine in enumerate(on_cpu):
            leaving = (
                on_cpu[:LANDING_LEAD]
                if place == 0
                else on_cpu[place + LANDING_LEAD - 1 : place + LANDING_LEAD]
            )
            for later in leaving:
                if later.landed is None:
                    self._stepper.submit(functools.partial(later.land, released), _nothing)
            step = functools.partial(mine.step, released, scalars, scratch)
            self._to_step.submit(self._places[id(mine)], mine.has_landed, step, mine.done.set)
        ring = self._streamed.ring
        is_ready = functools.partial(device.poll, released)
        for bucket in buckets:
            if isinstance(bucket, StreamedBucket):
                assert ring is not None
                step = functools.partial(bucket.step, ring, released, factor)
                self._to_stream.submit(self._places[id(bucket)], is_ready, step, bucket.done.set)

    def hold(self, bucket: HostBucket, gradients: Mapping[int, Tensor]) -> None:
        """These gradients are read while compute goes on: nobody may write them until the bucket's weights
        have been waited for."""
        held = [(gradients[member.index], member) for member in bucket.members if member.index in gradients]
        self._held[id(bucket)] = [(gradient, gradient._version, str(member)) for gradient, member in held]

    # [Order: gradients read]
    # hazard  WAR, allocator reuse: `compute` zeroes or frees a gradient that landed, and was not stepped,
    # while `d2h` still copies it.
    # edge    before the optimizer zeroes gradients, and before a bucket takes others, compute waits for an
    #         event recorded on d2h.
    # alive   the bucket, until the copy's event has passed. Gradients that are stepped need no edge of their
    #         own: the return of their weights comes after their landing.
    # proof   tests/property/test_optim_edges.py, edge "gradients read"

    def order_gradients(self) -> None:
        """What landed may be overwritten or freed by compute from here on. Order: [Order: gradients read]."""
        device = self._engine.device
        device.wait(device.compute, device.record(device.d2h), "gradients read")

    # -- everything on the calling thread --------------------------------------------------------------------
    def step_inline(
        self,
        flats: Mapping[int, Tensor],
        scalars: HostScalars,
        factor: Tensor | None,
        *,
        atomic: bool,
        step_resident: Callable[[], None],
    ) -> None:
        """One step without workers. Blocks the host. Weights return only once every CPU bucket and every
        resident parameter is stepped.

        atomic: an error in the CPU's part leaves weights and state as they were. step_resident: steps what is
            not offloaded.
        """
        buckets = [
            bucket for bucket in self._cpu.buckets if any(member.index in flats for member in bucket.members)
        ]
        streamed = [
            bucket
            for bucket in self._streamed.buckets
            if any(member.index in flats for member in bucket.members)
        ]
        for bucket in buckets:
            bucket.hold(
                {member.index: flats[member.index] for member in bucket.members if member.index in flats}
            )
        made = self._engine.device.record(self._engine.device.compute)
        for bucket in buckets:
            bucket.land(made)
        for bucket in buckets:
            bucket.load_gradients(scalars, self._cpu.scratch)
        try:
            _step_all(
                list(dict.fromkeys(bucket.optimizer for bucket in buckets if bucket.optimizer is not None)),
                atomic=atomic,
            )
        finally:
            for bucket in buckets:
                bucket.unload_gradients()
        step_resident()
        for other in streamed:
            other.hold(
                {member.index: flats[member.index] for member in other.members if member.index in flats}
            )
        released = self.release([*buckets, *streamed])
        for bucket in buckets:
            bucket.give_back(released)
        for other in streamed:
            assert self._streamed.ring is not None
            other.step(self._streamed.ring, released, factor)
        self._pending += [*buckets, *streamed]
        self._lent[0].extend(buckets)
        self._lent[1].extend(streamed)
        self.settle()

    # -- waiting ---------------------------------------------------------------------------------------------
    def arrive(self, indices: Sequence[int] | None) -> None:
        """Make the current lane wait for the weights of these parameters, None for all. Blocks the host until
        they are issued.

        Raises OffloadError if a worker failed, or if a gradient was written that a lane might still have been
        reading.
        """
        if not self._pending:
            return
        self.let_go()
        device = self._engine.device
        lane = device.compute
        pending = {id(bucket) for bucket in self._pending}
        waited = (
            self._pending
            if indices is None
            else [bucket for index in indices for bucket in self.buckets_of.get(index, ())]
        )
        for bucket in waited:
            key = (id(bucket), id(lane))
            if id(bucket) not in pending or key in self._arrived:
                continue
            bucket.done.wait()
            self.raise_failure()
            for gradient, version, name in self._held.pop(id(bucket), ()):
                if gradient._version != version:
                    raise OffloadError(
                        f"the gradient of {name} was written after step(), while the step may still read it; "
                        "use the optimizer's "
                        "zero_grad(), "
                        "or set gradients to None"
                    )
            event = bucket.returned if isinstance(bucket, CpuBucket) else bucket.stepped
            assert event is not None
            device.wait(lane, event, "weights back")
            for part in bucket.weights():
                device.note_read(lane, part.view(torch.uint8))
            self._arrived.add(key)

    @property
    def is_met(self) -> bool:
        """Whether every weight on its way has been waited for, by whatever lane: then no worker is at work
        either."""
        return {id(bucket) for bucket in self._pending} <= {bucket for bucket, _ in self._arrived}

    def settle(self) -> None:
        """End the last step: every weight has been waited for. Blocks the host until its last bucket is
        issued."""
        self.arrive(None)
        self.raise_failure()
        self._pending = []
        self._factor = None
        self._arrived.clear()
        self.let_go()

    def settle_host(self) -> None:
        """As `settle`, and the host may read and write state and masters. Blocks the host for the copies."""
        self.settle()
        self._synchronize()
        self.let_go()

    def _synchronize(self) -> None:
        """Block the host until every lane has done what was issued; d2h comes after the optimizer's own."""
        device = self._engine.device
        for lane in (device.d2h, device.h2d, device.compute):
            device.synchronize(device.record(lane))

    def let_go(self) -> None:
        """Drop gradients that no lane reads any more. Blocks the host: never."""
        for lent in self._lent:
            while lent and lent[0].done.is_set() and lent[0].let_go():
                lent.popleft()

    # -- failures --------------------------------------------------------------------------------------------
    @property
    def failed(self) -> bool:
        return bool(self._failed or self.error)

    @property
    def error(self) -> BaseException | None:
        """What a worker met."""
        return self._stepper.error or self._streamer.error

    def fail(self, what: str) -> None:
        """Refuse every later call with this error, until state is loaded."""
        self._failed = OffloadError(what)
        raise self._failed

    def raise_failure(self) -> None:
        """In the training thread, what a worker met, and what it means. Blocks the host: never."""
        if self._failed is not None:
            raise self._failed
        error = self.error
        if error is not None:
            self._failed = OffloadError(
                f"a step failed on a worker ({type(error).__name__}: {error}), one of {len(self._pending)} "
                "buckets in it; weights and "
                "state of "
                "different parameters may be a step apart. Load the last state dict, or use "
                "atomic_step=True, which keeps the last "
                "whole step"
            )
            raise self._failed from error

    def forgive(self) -> None:
        """State is about to be loaded: forget what failed. Blocks the host until the workers are idle."""
        self._stepper.forgive()
        self._streamer.forgive()
        self._failed = None
        self._pending = []
        self._arrived.clear()
        self._held.clear()

    def close(self) -> None:
        """Run what is queued, end the workers, and let what they issued end: host memory goes back after
        this. Blocks the host."""
        self._stepper.close()
        self._streamer.close()
        try:
            self._synchronize()
        except Exception as error:  # a device that is lost copies no more
            logger.warning(
                "closing: the optimizer's last copies cannot be waited for (%s); look for an earlier error "
                "of the device",
                error,
            )


def _nothing() -> None:
    """After a landing its bucket is still with the worker; before the CPU chooses a bucket it waits for
    nothing."""


# -- all or none ---------------------------------------------------------------------------------------------
def _step_all(optimizers: Sequence[Optimizer], *, atomic: bool) -> None:
    kept = [_copy_of(optimizer) for optimizer in optimizers] if atomic else []
    try:
        for optimizer in optimizers:
            optimizer.step()
    except Exception as error:
        if not atomic:
            raise
        with torch.no_grad():
            for optimizer, copy in zip(optimizers, kept, strict=True):
                _put_back(optimizer, copy)
        raise OffloadError(
            f"the step failed in {type(optimizers[0]).__name__} ({type(error).__name__}: {error}); weights "
            "and state are those of the "
            "last whole step"
        ) from error


_Kept = tuple[list[tuple[Tensor, Tensor]], dict[Tensor, dict[Any, tuple[Any, Tensor | None]]]]


def _copy_of(optimizer: Optimizer) -> _Kept:
    """What a step may change: weights that have a gradient, and their state."""
    leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if leaf.grad is not None]
    state = {
        leaf: {
            key: (value, value.clone() if isinstance(value, Tensor) else None)
            for key, value in optimizer.state[leaf].items()
        }
        for leaf in leaves
        if leaf in optimizer.state
    }
    return [(leaf, leaf.clone()) for leaf in leaves], state


def _put_back(optimizer: Optimizer, kept: _Kept) -> None:
    weights, state = kept
    for leaf, before in weights:
        leaf.copy_(before)
        if leaf not in state:
            optimizer.state.pop(leaf, None)
            continue
        optimizer.state[leaf] = {key: value for key, (value, _) in state[leaf].items()}
        for value, copy in state[leaf].values():
            if copy is not None:
                value.copy_(copy)
