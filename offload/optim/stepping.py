"""Steps of offloaded buckets: which worker runs them, how a use of their weights waits for them, and what
remains when one fails.

One invariant: at most one worker has a bucket. Whoever else touches the bucket's bytes waits until the worker
is done with it, and then for the event that the worker recorded.

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
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from offload.client import weakly
from offload.device import Event, Lane
from offload.engine import OffloadEngine
from offload.errors import CaptureError, OffloadError
from offload.optim.cpu_step import CpuBucket, CpuPart
from offload.optim.host_part import HostBucket
from offload.optim.streamed_step import StreamedBucket, StreamedPart
from offload.params.worker import Job, Latch, Worker
from offload.telemetry.speaker import speaker
from offload.transfer.copier import Stalls

logger = speaker(__name__)

COPY_LEAD = 3
"""Buckets whose gradients are on their way or there before the CPU asks for them: one is copied in a fifth of
the time that its step takes."""


class _Pending(dict[HostBucket, set[int]]):
    """Pending buckets of one step, and the lanes that have waited for them, by id. Unlike a dict it can be
    held weakly."""


class HostedSteps:
    """Buckets in flight. cpu, streamed: whose buckets. cpu_threads: of the CPU optimizer; see Worker."""

    def __init__(
        self, engine: OffloadEngine, cpu: CpuPart, streamed: StreamedPart, cpu_threads: int | None
    ) -> None:
        self._engine = engine
        self._cpu = cpu
        self._streamed = streamed
        self._stepper = Worker("optimizer-cpu", cores=engine.device.near_cores, threads=cpu_threads)
        self._streamer = Worker("optimizer-stream", threads=1, before=streamed.wait_for_slot)
        self.stepping = threading.RLock()
        """Held by a step and by a look at state, of whatever thread: one waits for the other."""
        self._lock = threading.RLock()  # any thread may touch a weight; workers never take it
        self._pending = _Pending()  # of the last step, issued or about to be
        self._lane: Lane | None = None  # of step(): its memory is what the gradients came from
        # buckets of the step under way that workers have issued, or dropped after a failure, in that order
        self._issued: queue.SimpleQueue[HostBucket] = queue.SimpleQueue()
        self._untaken = 0  # that are in it, or will be
        self.stalls = Stalls(engine.device)  # for steps
        self._failed: OffloadError | None = None
        self.torn = False
        """A step has begun to write, and not ended: if anybody asks, an exception broke it off."""
        self._closed = False
        self.when_waited: Callable[[int], None] = lambda index: None
        """Called with a parameter's index when the current lane has waited for all of its buckets."""
        self.when_touched: Callable[[int], None] = lambda index: None
        """Called with a parameter's index before anybody waits for it; may raise."""
        self.buckets_of: dict[int, list[HostBucket]] = {}
        self.in_order: list[HostBucket] = []

    def index(self) -> None:
        """Parts have got new buckets."""
        self.buckets_of = {}
        buckets: list[HostBucket] = [*self._cpu.buckets, *self._streamed.buckets]
        self.in_order = sorted(buckets, key=lambda bucket: bucket.layout.pieces[0].parameter)
        for rank, bucket in enumerate(self.in_order):
            bucket.rank = rank
            for member in bucket.members:
                self.buckets_of.setdefault(member.index, []).append(bucket)

    # -- issuing ---------------------------------------------------------------------------------------------
    def start_workers(self) -> None:
        """Have the threads, before anything of a step is done: `submit` cannot fail for want of them after
        it. Raises OffloadError."""
        for part, worker in ((self._cpu, self._stepper), (self._streamed, self._streamer)):
            if part.buckets:
                worker.start()

    def submit(self, buckets: Sequence[HostBucket]) -> None:
        """Give buckets, which have their gradients, to the workers. Blocks the host: never. Gradients leave
        COPY_LEAD buckets ahead of the CPU, or `buckets_in_flight`: all at once would delay the streamed
        buckets' state on d2h."""
        self._lane = self._engine.device.compute
        # after it weights whose gradients were set may be written: all work that reads them has been issued
        released, most = self._engine.device.record(self._lane), self._engine.limits.buckets_in_flight
        lead = COPY_LEAD if most is None else min(COPY_LEAD, max(1, most))
        self._pending.update((bucket, set()) for bucket in buckets)
        on_cpu = [bucket for bucket in buckets if isinstance(bucket, CpuBucket)]
        for number, mine in enumerate(on_cpu):
            first = 0 if number == 0 else number + lead - 1
            for later in on_cpu[first : number + lead]:
                self._stepper.submit(functools.partial(later.copy_gradients, released))
            step = functools.partial(mine.step, self._cpu.scratch)
            self._submit(self._stepper, mine, mine.has_gradients, step)
        is_ready = functools.partial(self._engine.device.poll, released)
        for bucket in buckets:
            if isinstance(bucket, StreamedBucket):
                # the way out is sent when the next bucket's slot is free, for which this thread waits before
                # its next fetch anyway: one bucket fewer is queued on d2h in front of others' copies
                ring = self._streamed.ring
                step = functools.partial(bucket.step, ring, released, ring.wait_for_slot)
                self._submit(self._streamer, bucket, is_ready, step)

    def _submit(self, worker: Worker, bucket: HostBucket, is_ready: Callable[[], bool], step: Job) -> None:
        """The bucket is the worker's once the worker has the job that opens the latch, not before. It is
        stepped once, however often it is submitted."""

        def once() -> None:
            if bucket.is_due:
                bucket.is_due = False
                step()

        def end() -> None:
            done.open()
            issued.put(bucket)

        done, issued = Latch(), self._issued
        parameters = bucket.members[0].index, bucket.members[-1].index
        worker.submit_bucket(bucket.rank, parameters, is_ready, once, end)
        bucket.done = done
        self._untaken += 1

    def next_issued(self, *, block: bool) -> HostBucket | None:
        """Bucket of this step that a worker has issued next, or dropped after a failure: each once. None
        where there is none yet, and with `block`, which blocks the host until there is, where none comes."""
        if not self._untaken:
            return None
        try:
            found = self._issued.get(block=block)
        except queue.Empty:
            return None
        self._untaken -= 1
        return found

    # -- waiting ---------------------------------------------------------------------------------------------
    def is_under_way(self, index: int) -> bool:
        """Return True if a step has claimed the parameter, and not issued all of its copies (`Stepper`)."""
        return any(b.is_due or not b.done.is_open for b in self.buckets_of.get(index, ()))

    def ends_of(self, index: int) -> list[Event]:
        """Wait until the step is issued, and return the events behind all it reads and writes (`Stepper`)."""
        mine = self.buckets_of.get(index, ())
        for bucket in mine:
            bucket.done.wait()
        return [event for bucket in mine for event in bucket.ends]

    def is_pending(self, index: int) -> bool:
        """Predicate: the training thread has not finished the step of the parameter's buckets yet."""
        return any(bucket in self._pending for bucket in self.buckets_of.get(index, ()))

    def await_weights(self, indices: Iterable[int] | None = None) -> None:
        """Make the current lane wait for the weights of these parameters, None for all, and for what reads
        their gradients. Blocks the host until they are issued. Raises OffloadError if a worker failed,
        CaptureError in a graph under capture, whose replays would not wait."""
        if not self._pending:
            return
        with self._lock:
            device = self._engine.device
            if device.is_capturing():
                if all(self._pending.values()):
                    return
                raise CaptureError(
                    "weights of the last step are on their way while a graph is captured: inside it they "
                    "cannot be waited for. Call the optimizer's synchronize_parameters() before the capture, "
                    "or capture inside `with optimizer.engine.capturing():`"
                )
            lane = device.compute
            for index in self.buckets_of if indices is None else indices:
                self.when_touched(index)
                for bucket in self.buckets_of.get(index, ()):
                    self._await(bucket, lane)
                self.when_waited(index)

    def _await(self, bucket: HostBucket, lane: Lane) -> None:
        lanes = self._pending.get(bucket)
        if lanes is None or id(lane) in lanes:
            return
        if self._stepper.is_of_parent:
            self.start_workers()  # which raises: nobody would end the wait
        bucket.done.wait()
        self._raise_error()
        device = self._engine.device
        assert bucket.returned is not None
        self.stalls.wait(lane, bucket.returned, "weights back")
        for part in bucket.weights:
            device.note_read(lane, part)
        lanes.add(id(lane))
        if lane is self._lane:
            bucket.drop_gradients()

    def awaiting(self, index: int) -> Callable[[], None]:
        """Function that waits for the parameter as `await_weights`, in the step that begins, and does nothing
        after it: then nobody who waits has touched it. Holds the step weakly: a gradient outlives its module
        by this, and the step has the module."""
        return functools.partial(weakly(self._await_of), weakref.ref(self._pending), index)

    def _await_of(self, step: Callable[[], _Pending | None], index: int) -> None:
        if step() is self._pending:
            self.await_weights((index,))

    def finish(self) -> None:
        """End the last step: every weight has been waited for. Blocks the host until its last bucket is
        issued."""
        self.raise_failure()
        self._finish()

    def _finish(self) -> None:
        self.await_weights()
        with self._lock:
            self._pending = _Pending() if self._pending else self._pending
            self._issued, self._untaken = queue.SimpleQueue(), 0

    def finish_on_host(self) -> None:
        """End the last step, after which the host may read and write state and masters. Blocks the host for
        the copies."""
        self.raise_failure()
        self.end_on_host()

    def end_on_host(self) -> None:
        """`finish_on_host`, within a step."""
        self._finish()
        self._streamed.look()
        self._synchronize()

    def _synchronize(self) -> None:
        """Block the host until every lane has done what was issued; d2h comes after the optimizer's own."""
        device = self._engine.device
        for lane in (device.d2h, device.h2d, device.compute):
            device.synchronize(device.record(lane))

    # -- failures --------------------------------------------------------------------------------------------
    @property
    def failed(self) -> bool:
        return bool(self._failed or self._stepper.error or self._streamer.error)

    def fail(self, what: str, cause: BaseException | None = None) -> NoReturn:
        """Refuse this and every later call with this error, until state is loaded. Blocks the host until the
        workers are idle."""
        self._failed = OffloadError(what)
        self._drop_pending()
        raise self._failed from cause

    def raise_failure(self) -> None:
        """Raise, between steps, what makes weights and state unusable. Blocks the host: never, but the first
        time until the workers are idle; while another thread steps, until it has."""
        with self.stepping:
            self._raise_if_closed()
            if self.torn:
                self.fail(
                    "step() was broken off by an exception while it wrote; weights and state of different "
                    "parameters are a step apart. Load the last state dict of model and optimizer"
                )
            self._raise_error()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise OffloadError("the optimizer was closed, and its state is gone; build another one")

    def _raise_error(self) -> None:
        """Raise a worker's error in the training thread, with what it means for weights and state."""
        if self._failed is not None:
            raise self._failed
        if error := self._stepper.error or self._streamer.error:
            self.fail(
                f"a step failed on a worker ({type(error).__name__}: {error}), one of {len(self._pending)} "
                "buckets in it; weights and state of different parameters may be a step apart. Load the last "
                "state dict, or use atomic_step=True, which keeps the last whole step",
                error,
            )

    def _rest_workers(self) -> None:
        self._stepper.synchronize()
        self._streamer.synchronize()

    def settle(self) -> None:
        """A step was broken off: block the host until nothing of it goes on."""
        self._rest_workers()
        self._synchronize()

    def resume(self, buckets: Sequence[HostBucket]) -> None:
        """An exception, as of Ctrl-C, may have fallen into `submit`: submit what it left out."""
        self._rest_workers()
        if not self.failed:
            self._stepper.clear_error()
            self._streamer.clear_error()
            self.submit([bucket for bucket in buckets if bucket.is_due])

    def _drop_pending(self) -> None:
        """After a failure: once the workers are idle, no use of a weight waits any more. Weights stay as the
        failed step left them."""
        self._rest_workers()
        self._pending = _Pending()
        self.torn = False
        for index in self.buckets_of:
            self.when_waited(index)

    def clear_error(self) -> None:
        """State is about to be loaded: forget what failed. Blocks the host until the workers are idle."""
        self._raise_if_closed()
        if self.torn or self.failed:
            self._drop_pending()
            self._stepper.clear_error()
            self._streamer.clear_error()
            self._failed = None

    def end(self, after: Job) -> None:
        """Run what is queued, end the workers, and call `after` when nothing is in flight any more. Blocks
        the host; on a worker's own thread, where a collector may run, it is left to that thread's queue."""
        if threading.current_thread().name in (self._stepper.name, self._streamer.name):
            self._streamer.submit(functools.partial(self._end, after))
        else:
            self._end(after)

    def _end(self, after: Job) -> None:
        try:
            if not (self.failed or self.torn):
                self.finish()
        except Exception as error:  # a worker's, or of a device that is lost
            logger.warning("the optimizer was closed in a step that failed: %s", error)
        self._pending = _Pending()
        self._stepper.close()
        self._streamer.close()
        try:  # host memory goes back after this
            self._synchronize()
        except Exception as error:  # a device that is lost copies no more
            logger.warning(
                f"closing: the optimizer's last copies cannot be waited for ({error}); look for an earlier "
                "error of the device"
            )
        self._closed = True
        after()
