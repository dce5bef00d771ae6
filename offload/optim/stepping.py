"""Steps of offloaded buckets: which worker runs them, how a use of their weights waits for them, and what
remains when one fails.

One invariant: a bucket is with at most one worker. Whatever else touches the bucket's bytes has waited first
for `done`, and then for the event that the worker recorded.

# [Order: weights back]
# hazard  RAW, WAR, allocator reuse: `compute` reads a weight before `h2d`, or the optimizer's lane, has
#         written it; or writes or frees a gradient that one of them still reads.
# edge    the bucket keeps the event of its return or step, which comes after the last use of its gradients;
#         the lane of whoever touches a weight or its gradient waits for it, each lane once a step.
# alive   the parameter is the model's; the bucket holds the gradients until that wait.
# proof   tests/property/test_optim_edges.py, edge "weights back"
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.device import Event, Lane
from offload.engine import OffloadEngine
from offload.errors import CaptureError, OffloadError
from offload.optim.cpu_step import CpuBucket
from offload.optim.parts import CpuPart, StreamedPart
from offload.optim.streamed_step import StreamedBucket
from offload.params.worker import Job, ReadyQueue, Worker

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
        self._to_step = ReadyQueue(self._stepper, _nothing)
        self._to_stream = ReadyQueue(self._streamer, streamed.wait_for_slot)
        self._lock = threading.RLock()  # any thread may touch a weight; workers never take it
        self._pending: dict[int, HostBucket] = {}  # of the last step, by id: issued or about to be
        self._arrived: set[tuple[int, int]] = set()  # (bucket, lane) by id
        self._lane: Lane | None = None  # of step(): its memory is what the gradients came from
        self._failed: OffloadError | None = None
        self.when_waited: Callable[[int], None] = _nothing_of
        """Called with a parameter's index when the current lane has waited for all of its buckets."""
        self.when_touched: Callable[[int], None] = _nothing_of
        """Called with a parameter's index before anybody waits for it; may raise."""
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
        """The point on compute after which the weights of these buckets, which hold their gradients, may be
        written: all work that reads them has been issued."""
        device = self._engine.device
        for bucket in buckets:
            for part in bucket.weights:
                device.note_read(device.compute, part.view(torch.uint8))
        return device.record(device.compute)

    def start_workers(self) -> None:
        """Have the threads, before anything of a step is done: `submit` cannot fail for want of them after
        it. Raises OffloadError."""
        if self._cpu.buckets:
            self._stepper.start()
        if self._streamed.buckets:
            self._streamer.start()

    def submit(self, buckets: Sequence[HostBucket]) -> None:
        """Give buckets, which hold their gradients, to the workers; see ReadyQueue for their order. Blocks
        the
        host: never.

        Gradients leave LANDING_LEAD buckets ahead of the CPU: all at once would keep the streamed buckets'
        state waiting behind them on d2h.
        """
        device = self._engine.device
        released = self.release(buckets)
        self._lane = device.compute
        for bucket in buckets:
            bucket.done.clear()
            self._pending[id(bucket)] = bucket
        on_cpu = [bucket for bucket in buckets if isinstance(bucket, CpuBucket)]
        for place, mine in enumerate(on_cpu):
            first = 0 if place == 0 else place + LANDING_LEAD - 1
            for later in on_cpu[first : place + LANDING_LEAD]:
                self._stepper.submit(functools.partial(later.land, released), _nothing)
            step = functools.partial(mine.step, self._cpu.scratch)
            self._to_step.submit(self._places[id(mine)], mine.has_landed, step, mine.done.set)
        ring = self._streamed.ring
        is_ready = functools.partial(device.poll, released)
        for bucket in buckets:
            if isinstance(bucket, StreamedBucket):
                assert ring is not None
                step = functools.partial(bucket.step, ring, released)
                self._to_stream.submit(self._places[id(bucket)], is_ready, step, bucket.done.set)

    # -- everything on the calling thread --------------------------------------------------------------------
    def step_inline(
        self, flats: Mapping[int, Tensor], *, atomic: bool, step_resident: Callable[[], None]
    ) -> None:
        """One step without workers. Blocks the host. Weights return only once every CPU bucket and every
        resident parameter is stepped.

        atomic: an error in the CPU's part leaves weights and state as they were. step_resident: steps what is
            not offloaded.
        """
        buckets = [bucket for bucket in self._cpu.buckets if _has(bucket, flats)]
        streamed = [other for other in self._streamed.buckets if _has(other, flats)]
        for bucket in buckets:
            bucket.hold(flats)
        made = self.release(buckets)
        for bucket in buckets:
            bucket.land(made)
        for bucket in buckets:
            bucket.load_gradients(self._cpu.scratch)
        try:
            optimizers = dict.fromkeys(bucket.optimizer for bucket in buckets if bucket.optimizer is not None)
            _step_all(list(optimizers), atomic=atomic)
        finally:
            for bucket in buckets:
                bucket.unload_gradients()
        step_resident()
        for other in streamed:
            other.hold(flats)
        released = self.release(streamed)
        self._lane = self._engine.device.compute
        for bucket in buckets:
            bucket.give_back()
        self._pending = {id(bucket): bucket for bucket in buckets}
        try:
            for other in streamed:
                assert self._streamed.ring is not None
                self._pending[id(other)] = other
                other.step(self._streamed.ring, released)
        finally:  # one that breaks off reads its gradients until then, too
            self.settle()

    # -- waiting ---------------------------------------------------------------------------------------------
    @property
    def under_way(self) -> bool:
        """Whether there are buckets that the training thread has not settled yet."""
        return bool(self._pending)

    def is_pending(self, index: int) -> bool:
        """Whether a bucket of the parameter is."""
        return any(id(bucket) in self._pending for bucket in self.buckets_of.get(index, ()))

    def arrive(self, indices: Sequence[int] | None) -> None:
        """Make the current lane wait for the weights of these parameters, None for all, and for what reads
        their gradients. Blocks the host until they are issued. The cost does not depend on what else is
        pending.

        Raises OffloadError if a worker failed, CaptureError in a graph under capture, whose replays would not
        wait.
        """
        if not self._pending:
            return
        with self._lock:
            device = self._engine.device
            if device.is_capturing():
                if self._pending.keys() <= {bucket for bucket, _ in self._arrived}:
                    return
                raise CaptureError(
                    "weights of the last step are on their way while a graph is captured: inside it they "
                    "cannot "
                    "be waited for. Call the optimizer's synchronize_parameters() before the capture, or "
                    "capture "
                    "inside `with optimizer.engine.capturing():`"
                )
            lane = device.compute
            for index in self.buckets_of if indices is None else indices:
                self.when_touched(index)
                for bucket in self.buckets_of.get(index, ()):
                    self._await(bucket, lane)
                self.when_waited(index)

    def _await(self, bucket: HostBucket, lane: Lane) -> None:
        key = (id(bucket), id(lane))
        if id(bucket) not in self._pending or key in self._arrived:
            return
        bucket.done.wait()
        self.raise_failure()
        device = self._engine.device
        assert bucket.returned is not None
        device.wait(lane, bucket.returned, "weights back")
        for part in bucket.weights:
            device.note_read(lane, part.view(torch.uint8))
        self._arrived.add(key)
        if lane is self._lane:
            bucket.drop_gradients()

    def settle(self) -> None:
        """End the last step: every weight has been waited for. Blocks the host until its last bucket is
        issued."""
        self.raise_failure()
        self.arrive(None)
        with self._lock:
            self._pending = {}
            self._arrived.clear()

    def settle_host(self) -> None:
        """As `settle`, and the host may read and write state and masters. Blocks the host for the copies."""
        self.settle()
        self._synchronize()

    def _synchronize(self) -> None:
        """Block the host until every lane has done what was issued; d2h comes after the optimizer's own."""
        device = self._engine.device
        for lane in (device.d2h, device.h2d, device.compute):
            device.synchronize(device.record(lane))

    # -- failures --------------------------------------------------------------------------------------------
    @property
    def failed(self) -> bool:
        return bool(self._failed or self.error)

    @property
    def error(self) -> BaseException | None:
        """The error that a worker raised, None without one."""
        return self._stepper.error or self._streamer.error

    def fail(self, what: str) -> None:
        """Refuse every later call with this error, until state is loaded."""
        self._failed = OffloadError(what)
        self._let_go()
        raise self._failed

    def raise_failure(self) -> None:
        """Raise a worker's error in the training thread, with what it means for weights and state. Blocks the
        host: never, but the first time until the workers are idle."""
        if self._failed is not None:
            raise self._failed
        error = self.error
        if error is not None:
            count = len(self._pending)
            self._failed = OffloadError(
                f"a step failed on a worker ({type(error).__name__}: {error}), one of {count} buckets in it; "
                "weights and state of different parameters may be a step apart. Load the last state dict, or "
                "use atomic_step=True, which keeps the last whole step"
            )
            self._let_go()
            raise self._failed from error

    def _let_go(self) -> None:
        """After a failure: once the workers are idle, no use of a weight waits any more. Weights stay as the
        failed step left them."""
        for bucket in self._pending.values():
            bucket.done.wait()
        self._pending = {}
        self._arrived.clear()
        for index in self.buckets_of:
            self.when_waited(index)

    def forgive(self) -> None:
        """State is about to be loaded: forget what failed. Blocks the host until the workers are idle."""
        self._let_go()
        self._stepper.forgive()
        self._streamer.forgive()
        self._failed = None

    def end(self, after: Job) -> None:
        """Bring what is under way to its end, end the workers, and call `after`: nothing waits for anything
        then.
        Blocks the host; on a worker's own thread, where a collector may run, it is left to that thread's
        queue."""
        if threading.current_thread().name in (self._stepper.name, self._streamer.name):
            self._streamer.submit(functools.partial(self._end, after), _nothing)
        else:
            self._end(after)

    def _end(self, after: Job) -> None:
        try:
            if not self.failed:
                self.settle()
        except Exception as error:  # a worker's, or of a device that is lost
            logger.warning("the optimizer was dropped in a step that failed: %s", error)
        self.close()
        after()

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


def _has(bucket: HostBucket, flats: Mapping[int, Tensor]) -> bool:
    return any(member.index in flats for member in bucket.members)


def _nothing() -> None:
    """Does nothing: for a landing, whose bucket stays with the worker, and for the CPU's queue, which waits
    for nothing before it chooses."""


def _nothing_of(index: int) -> None:
    """Does nothing: nobody asked to be told of this parameter."""


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
