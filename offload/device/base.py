"""The device seam: lanes, events and copies, as the engine sees them.

Two devices exist because two are needed: CUDA, and a simulated one that checks every ordering on a machine
without a GPU. One invariant: nothing outside this folder names a stream, a `torch.cuda` call or a pinned
page.

Blocking is in the name: `wait(lane, event)` orders lanes and never blocks the host, `synchronize(event)` may,
`poll(event)` never does.

    lane      a queue of device work that runs in order: `compute`, `d2h`, `h2d`
    event     a point recorded in a lane; *passed* when the device got there

Torch tells nobody when a capture begins and ends, and when a graph is replayed, so this file listens where it
happens. `torch.cuda.graph` and `torch.cuda.make_graphed_callables` make their graphs inside, so the two
methods of torch.cuda.CUDAGraph that begin and end a capture are replaced while somebody watches, and put back
after. A graph's `replay` is replaced on the one graph, for as long as it lives. A capture that was begun is
ended, whatever a watcher raises, and what torch raises is raised; listening keeps no graph alive, for a graph
owns device memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, runtime_checkable

import torch

CopyPair = tuple[torch.Tensor, torch.Tensor]
"""(destination, source): 1-D uint8 tensors of equal length, one on the host and one on the device."""


@runtime_checkable
class Lane(Protocol):
    """One queue of device work; work in a lane runs in the order in which it was issued."""

    @property
    def name(self) -> str: ...


class Event(Protocol):
    """A point recorded in a lane. Opaque: only its device can wait for it."""


class Graph(Protocol):
    """Device work captured once and run again by each `replay`. Its copies go to and from the same addresses
    every time."""

    def replay(self) -> Any: ...


class CaptureWatcher(Protocol):
    """Who is told of captures."""

    def capture_begins(self, graph: Graph) -> None:
        """The capture begins after this: everything is still allowed, and must be prepared here."""

    def capture_ends(self, graph: Graph) -> None:
        """The capture ends after this, on the lane that it began on: its lanes must be joined here. Not
        called if it never began."""

    def capture_over(self, graph: Graph, complete: bool) -> None:
        """Nothing is captured any more. complete: the graph can be replayed. Must not raise."""


class HostMemory(Protocol):
    """One host allocation, pinned in pieces, or plain memory on the simulated device. It lives until its last
    piece is released."""

    @property
    def pieces(self) -> tuple[torch.Tensor, ...]:
        """The bytes as 1-D uint8 CPU tensors, one a registration: a copy must not cross from one piece into
        the next.

        A piece that was released alone stays in its place as a tensor of no bytes: indices do not change."""

    def release_piece(self, index: int) -> None:
        """Unpin one piece and return its pages to the system; the others stay as they are. No copy of it may
        be in flight; may block the host. Idempotent. Raises OffloadError if it cannot be unpinned, and keeps
        it then."""

    def release(self) -> None:
        """Unpin and return what is left to the system, after which there are no pieces. No copy may be in
        flight; may block the host. Idempotent."""


class Device(Protocol):
    """Accelerator, by the calls that the engine makes."""

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device:
        """Where the tensors of this device live as torch sees them ("cpu" on the simulated device)."""

    @property
    def compute(self) -> Lane:
        """The lane that the calling thread computes on right now. Asked at use, never cached by a caller."""

    @property
    def d2h(self) -> Lane: ...

    @property
    def h2d(self) -> Lane: ...

    @property
    def host(self) -> Lane:
        """The host as a lane, for `note_read` and `note_write` of host memory that host code itself touches.
        Takes no waits, no copies."""

    def new_compute_lane(self, name: str) -> Lane:
        """A further lane to compute on, unordered with `compute` until events say otherwise."""

    def new_copy_lane(self, name: str) -> Lane:
        """A further lane to copy on: its copies share the link with those of `d2h` and `h2d`, and do not
        queue behind what these wait for."""

    def use_lane(self, lane: Lane) -> AbstractContextManager[None]:
        """The calling thread computes on `lane` inside. lane: `compute`, or one of `new_compute_lane`."""

    @property
    def near_cores(self) -> frozenset[int]:
        """The processor cores this process may use that are on the device's side of the machine; all it may
        use where that is not known."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Predicate: the tensor's bytes are in this device's memory (and not already on the host side)."""

    # -- order -----------------------------------------------------------------------------------------------
    def record(self, lane: Lane, *, timed: bool = False) -> Event:
        """Record a point in `lane`. timed: the event can be given to `elapsed_ms`. Never blocks the host."""

    def wait(self, lane: Lane, event: Event, order: str) -> None:
        """Work issued to `lane` from now on runs after `event`. Never blocks the host.

        order: the title of the ordering note that this edge belongs to, such as "restore"; the simulated
            device names it in errors, and the tests remove an edge by it.
        """

    def poll(self, event: Event) -> bool:
        """Return True if the event has passed. Never blocks the host."""

    def synchronize(self, event: Event) -> None:
        """Block the host until the event has passed."""

    def elapsed_ms(self, start: Event, end: Event) -> float:
        """Device time between two timed events that have passed, in milliseconds."""

    # -- bytes -----------------------------------------------------------------------------------------------
    def empty(self, nbytes: int) -> torch.Tensor:
        """A new 1-D uint8 tensor in device memory, allocated on the compute lane."""

    def free(self, storage: torch.UntypedStorage) -> None:
        """Return the storage's bytes to the allocator. Its tensors stay, and none may be read until `refill`.
        The lane that the bytes were allocated on gets them next: it comes after every use of them."""

    def refill(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Allocate bytes, undefined ones, for a storage that was freed, on the compute lane. Its tensors and
        their views have them. Raises torch.OutOfMemoryError. Blocks the host: never, but for a new segment of
        the allocator."""

    def copy(self, lane: Lane, pairs: Sequence[CopyPair]) -> None:
        """Issue the copies to `lane`, in order, under one stream switch. The caller keeps both sides alive
        until an event recorded after this call has passed. Blocks the host only if a host side is not
        pinned."""

    def host_memory(self, nbytes: int, registration_bytes: int) -> HostMemory:
        """Allocate `nbytes` of host memory, pinned in registrations of at most `registration_bytes` each.

        Blocks the host for about nbytes / 17 GB/s (huge pages touched by 8 threads, then registered), and
        every kernel launch for the time of one registration. Raises HostBudgetError if the system refuses;
        nothing stays pinned then.
        """

    @property
    def pins(self) -> bool:
        """Predicate: `host_memory` really pins, and so costs time: true on CUDA, false on the simulated
        device."""

    # -- declarations: what the simulated device checks; no-ops on CUDA --------------------------------------
    def note_write(self, lane: Lane, tensor: torch.Tensor) -> None:
        """`lane` has just written the tensor's bytes (a tensor that compute made and autograd now saves)."""

    def note_read(self, lane: Lane, tensor: torch.Tensor) -> None:
        """Work issued to `lane` from now on reads the tensor's bytes (unpack hands them to compute)."""

    def note_free(self, lane: Lane, tensor: torch.Tensor) -> None:
        """The engine releases the tensor: its bytes may be reused by work that is issued to `lane` from now
        on."""

    # -- graphs ----------------------------------------------------------------------------------------------
    # While a graph is captured, lanes that wait for one of its events become part of it, and must be joined
    # again before it ends. It may wait for its own events only, and nobody else may ever wait for, poll or
    # synchronize one of them. Nothing may be polled, synchronized, timed or pinned meanwhile, on any thread.
    def is_capturing(self) -> bool:
        """Return True if the calling thread's compute lane is being captured into a graph."""

    def watch_captures(self, watcher: CaptureWatcher) -> AbstractContextManager[None]:
        """Inside, `watcher` is told of every capture on this device. Raises CaptureError if there is a
        watcher already."""

    def watch_replays(self, graph: Graph, before: Callable[[], None], after: Callable[[], None]) -> None:
        """From now on each `graph.replay()` calls `before` first, which may raise, and `after` last. Does not
        keep the graph alive."""

    def has_live_graphs(self) -> bool:
        """Return True if a graph of this process can still be replayed, whoever captured it: a look at every
        object that Python's collector knows."""

    # -- state -----------------------------------------------------------------------------------------------
    def active_bytes(self) -> int:
        """Bytes in live blocks of the device allocator now; what this engine lent out and knows of on the
        simulated device."""

    def allocator_bytes(self) -> tuple[int, int] | None:
        """Bytes that the device allocator has reserved now, and the most that were ever in live blocks at
        once (since torch's peaks were reset last). None on the simulated device, which reserves none."""

    def reset_allocator_peak(self) -> None:
        """From here on `allocator_bytes` tells the most of what comes, and so do torch's own peaks."""

    def free_bytes(self) -> int | None:
        """Bytes that can still be allocated, those that the allocator has cached included. None on the
        simulated device, which has no limit."""

    def release_cached(self, worth: int, *, of_peak: bool = True) -> int:
        """Return to the driver what the device allocator has cached and nothing uses, if it holds a
        `worth`-th more than was ever in live blocks at once (since torch's peaks were reset last), or than is
        now, without `of_peak`. Returns the bytes; 0 on the simulated device, which caches none.

        Blocks the host until the device is idle, if it is worth it. Ask `is_capturing` first: CUDA's raises
        CaptureError in a capture.
        """


@contextmanager
def replaced_captures(
    watcher: CaptureWatcher, under_way: list[Any], concerns: Callable[[], bool]
) -> Iterator[None]:
    """Inside, the watcher is told of what torch.cuda.CUDAGraph captures.

    under_way: the graphs whose capture has begun and is not over. concerns: whether a capture that is about
        to begin is to be told of.
    """
    kind: Any = torch.cuda.CUDAGraph
    torch_begin, torch_end = kind.capture_begin, kind.capture_end

    def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> None:
        if not concerns():
            torch_begin(graph, *arguments, **keywords)
            return
        watcher.capture_begins(graph)
        under_way.append(graph)
        try:
            torch_begin(graph, *arguments, **keywords)
        except BaseException:
            over(graph, False)
            raise

    def capture_end(graph: Any) -> None:
        if graph not in under_way:
            torch_end(graph)
            return
        complete = False
        try:
            try:
                watcher.capture_ends(graph)
            finally:
                torch_end(graph)
            complete = True
        finally:
            over(graph, complete)

    def over(graph: Any, complete: bool) -> None:
        under_way.remove(graph)
        watcher.capture_over(graph, complete)

    kind.capture_begin, kind.capture_end = capture_begin, capture_end
    try:
        yield
    finally:
        kind.capture_begin, kind.capture_end = torch_begin, torch_end


def replace_replay(graph: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
    """Call `before` and `after` around each replay of this graph, and around what others who listen do. The
    graph would keep itself alive through its own method, hence the weak reference: its private memory is to
    go when its owner lets go of it."""
    kind, reference = type(graph), weakref.ref(graph)
    # of another region that was open at the capture
    inner: Callable[[], None] | None = vars(graph).get("replay")

    def replay() -> None:
        alive = reference()
        assert alive is not None, "a replay of a graph that is gone"
        before()
        if inner is not None:
            inner()
        else:
            kind.replay(alive)
        after()

    graph.replay = replay
