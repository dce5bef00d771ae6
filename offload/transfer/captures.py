"""Graphs that copy: which host blocks a captured program writes and reads each time it is replayed, and what
must hold around a capture.

One invariant: a host block that a graph copies to or from is lent to nobody else until its region is
released.

    region      a `with offload.capturing()` block, and afterwards the owner of the host blocks of every graph
                that was captured in it
    boundary    a capture's begin or its end. No event is waited for across one: CUDA refuses it, and nothing
                needs it, see below

# [Order: capture]
# hazard  WAR, RAW, allocator reuse: a captured copy or wait would have to come after work that was issued
#         before the capture.
# edge    just before a capture begins the host synchronizes both copy lanes and every event kept with free
#         host bytes, and what was in flight is settled: all that came before has passed, and an event of
#         before is not waited for.
# alive   settled sources are free; restored buffers stay with their records.
# proof   tests/property/test_captures.py, test_work_of_before_a_capture_has_passed_when_it_begins
#
# [Order: join]
# hazard  RAW, WAR: what is replayed after a graph touches bytes that the graph's copies still read or write;
#         CUDA refuses such a graph.
# edge    before a capture ends its compute lane waits for the last point of each copy lane that is part of
#         it.
# alive   the graph's region holds host blocks, its memory pool device buffers.
# proof   tests/property/test_edges.py, edge "join"
#
# [Order: graphs]
# hazard  RAW: a backward's graph reads a host block that its forward's graph writes. WAR: the forward's next
#         replay writes it again.
# edge    each capture ends with its copy lanes joined (order "join"), and each copy comes after a point of
#         its own graph's compute lane: so graphs replayed in one lane, or ordered by their caller, have their
#         copies ordered too.
# alive   the region holds the blocks; the private pool of the graphs holds device buffers at their addresses.
# proof   tests/property/test_captures.py, test_graphs_replayed_on_lanes_that_nothing_orders_have_a_hazard
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from offload.device import Graph
from offload.errors import CaptureError
from offload.sizes import bytes_text
from offload.telemetry.speaker import speaker
from offload.transfer.block import BlockState, CapturedGraph, DeviceBlock, living
from offload.transfer.in_flight import InFlight

logger = speaker(__name__)


class CaptureSide(InFlight):
    """The transfer engine's part in a capture: what it settles before one begins, and how the copy lanes are
    joined before it ends."""

    def check_capture(self, what: str) -> None:
        """Raise CaptureError if a graph is captured and no region watches it. what: asks, for the error."""
        if self.capture is None and self.device.is_capturing():
            self.refuse_unwatched(what)

    @staticmethod
    def refuse_unwatched(what: str) -> None:
        raise CaptureError(
            f"{what} in a graph under capture, outside of a region: its replays would copy to and from "
            "host blocks that are lent to others by then; put the capture, and its warm-up, inside "
            "`with offload.capturing():`"
        )

    def _check_saved_in_capture(self, block: DeviceBlock) -> None:
        assert self.capture is not None
        if block.capture is None:
            raise CaptureError(
                f"{block.label} ({block.nbytes:,} bytes) was saved before {self.capture.name} was captured, "
                "and has left the device; capture the forward that saves it as well, in the same region, or "
                "keep its group with disable_offload()"
            )

    def begin_capture(self, capture: CapturedGraph) -> None:
        """Settle everything in flight: nothing issued so far can be waited for in the capture. Blocks the
        host until the copies so far have passed and the arena has stopped growing. Order: [Order:
        capture]."""
        self.reclaim_freed()
        self._settle_all()
        for block in living(self._ahead):
            if block.capture is not None and block.state is BlockState.RESTORED:
                self.drop(block)  # fetched eagerly: no replay would write that buffer
        for lane in (self.device.d2h, self.device.h2d):
            self.device.synchronize(self.device.record(lane))
        if self.disk is not None:
            self.disk.drain()
        self.arena.begin_capture()
        self.capture = capture

    def join(self) -> None:
        """Settle what was captured so far, and order the capturing lane after its copy lanes. Order: [Order:
        join]."""
        assert self.capture is not None
        compute = self.device.compute
        for lane in self.capture.forked:
            self.device.wait(compute, self.device.record(lane), "join")
        self._joined = compute
        try:
            self._settle_all(restores_as="read")
        finally:
            self._joined = None

    def finish_capture(self) -> None:
        """`join`, and drop what was fetched and not read: each graph fetches for itself, so that graphs may
        be replayed in any order that their data allows."""
        assert self.capture is not None
        self.join()
        for block in living(self._captured):
            if block.state is BlockState.RESTORED:
                self.drop(block)

    def end_capture(self, complete: bool) -> CapturedGraph | None:
        """The capture is over. complete: it became a graph; else what it moved is undone: its saves are
        released, its restores dropped."""
        capture, self.capture = self.capture, None
        self.arena.end_capture()
        if capture is None:
            return None
        captured, self._captured = self._captured, []
        if complete:
            return capture
        self._settle_all()  # what is left was captured, and CUDA refused its join: no lane waits for it
        for block in living(captured):
            if block.transfer is not None and block.transfer.capture is capture:
                if block.state is BlockState.RESTORING:  # the join itself raised
                    block.move_to(BlockState.RESTORED)
                if block.state is BlockState.RESTORED:
                    self.drop(block)
            if block.capture is capture and block.state is not BlockState.RELEASED:
                self.release(block)
        for host in capture.host_blocks:
            self.arena.give_back(host, None)
        return capture


class Boundary(Protocol):
    """Who is told of a capture, under the engine's lock."""

    def capture_begins(self) -> None: ...

    def capture_ends(self) -> None: ...


class CapturedRegion:
    """The graphs captured inside one `capturing()`, and the owner of their host blocks until `release`.

    One set of blocks serves all replays, so a layer's forward must not be replayed twice before its backward:
    the second replay raises CaptureError. Figures are sums over the graphs.
    """

    def __init__(
        self, transfers: CaptureSide, lock: AbstractContextManager[object], clients: Boundary
    ) -> None:
        """clients: their part at a begin, while events may still be waited for, and at an end, while work is
        still captured."""
        self.graphs: list[CapturedGraph] = []
        self.released = False
        self._device = transfers.device
        self._arena = transfers.arena
        self._transfers = transfers
        self._lock = lock
        self._clients = clients
        self._counted = 0  # graphs begun, complete or not

    # -- figures ---------------------------------------------------------------------------------------------
    @property
    def spill_bytes(self) -> int:
        """Bytes that one replay of each graph copies to the host."""
        return sum(graph.spill_bytes for graph in self.graphs)

    @property
    def restore_bytes(self) -> int:
        """Bytes that one replay of each graph copies back."""
        return sum(graph.restore_bytes for graph in self.graphs)

    @property
    def kept_bytes(self) -> int:
        """Bytes that should have left at the capture and found no host block: they stay in the graphs'
        memory."""
        return sum(graph.kept_bytes for graph in self.graphs)

    @property
    def host_bytes(self) -> int:
        """Pinned bytes that the region holds."""
        return sum(block.nbytes for graph in self.graphs for block in graph.host_blocks)

    @property
    def replays(self) -> int:
        return sum(graph.replays for graph in self.graphs)

    # -- what the device tells -------------------------------------------------------------------------------
    def capture_begins(self, graph: Graph) -> None:
        """Settle what is in flight, so that nothing captured has to wait for it. Blocks the host until the
        copies so far have passed."""
        with self._lock:
            self._clients.capture_begins()
            self._counted += 1
            self._transfers.begin_capture(CapturedGraph(f"graph {self._counted} of its region"))

    def capture_ends(self, graph: Graph) -> None:
        with self._lock:
            self._clients.capture_ends()
            self._transfers.finish_capture()

    def capture_over(self, graph: Graph, complete: bool) -> None:
        with self._lock:
            captured = self._transfers.end_capture(complete)
            if captured is None or not complete:
                return
            self.graphs.append(captured)
        if captured.copies or captured.before_replay:
            self._device.watch_replays(
                graph, partial(self._before_replay, captured), partial(self._after_replay, captured)
            )

    # -- replays ---------------------------------------------------------------------------------------------
    def _before_replay(self, graph: CapturedGraph) -> None:
        for prepare in graph.before_replay:
            prepare()
        if not graph.copies:
            return
        if self.released:
            raise CaptureError(
                f"{graph.name} is replayed, but its region was released, and other copies use its "
                f"{len(graph.host_blocks)} host blocks; capture it again, or release the region later"
            )
        if graph.unread:
            readers = " and ".join(
                other.name for other in self.graphs if other is not graph and graph in other.sources
            )
            raise CaptureError(
                f"{graph.name} is replayed for the {_ordinal(graph.replays + 1)} time before {readers}, "
                f"which reads back what it sent: its {len(graph.host_blocks)} host blocks of "
                f"{graph.spill_bytes:,} bytes hold one forward. Run that forward's backward first, capture "
                "the layer once for each forward in flight, or call region.forget() if that backward will "
                "not run"
            )

    def _after_replay(self, graph: CapturedGraph) -> None:
        if not graph.copies:
            return
        with self._lock:
            graph.replays += 1
            graph.unread = graph.read_elsewhere
            for source in graph.sources:
                source.unread = False
            graph.last_use = self._device.record(self._device.compute)
            counts = self._transfers.counts
            counts.replays += 1
            counts.replayed_bytes += graph.spill_bytes + graph.restore_bytes

    def forget(self) -> None:
        """The backwards of the forwards replayed so far will not run: an evaluation, or an exception. They
        may be replayed again."""
        for graph in self.graphs:
            graph.unread = False

    # -- the end ---------------------------------------------------------------------------------------------
    def warn_of_kept(self) -> None:
        """Say what should have left and could not, once the captures are done."""
        if self.kept_bytes:
            logger.warning(
                f"{bytes_text(self.kept_bytes)} that should have left stay in the memory of the captured "
                f"graphs, for want of pinned memory; the region holds {bytes_text(self.host_bytes)}. Nothing "
                "is pinned during a capture: set host_reserve_bytes of OffloadConfig to "
                f"{bytes_text(self._arena.lent_bytes + self.kept_bytes)} before it, and capture again"
            )

    def release(self) -> None:
        """Give the host blocks back; a later replay of a graph of the region raises CaptureError. Idempotent.

        Blocks the host until the last replay of each graph has passed. Raises CaptureError while one is
        captured.
        """
        with self._lock:
            if self._transfers.capture is not None:
                raise CaptureError(
                    f"release of a region while {self._transfers.capture.name} is captured; call it after"
                )
            if self.released:
                return
            self.released = True
            for graph in self.graphs:
                if graph.last_use is not None:
                    self._device.synchronize(graph.last_use)
                for host in graph.host_blocks:
                    self._arena.give_back(host, None)
                graph.host_blocks.clear()
                graph.borrowed.clear()


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third"}.get(number, f"{number}th")
