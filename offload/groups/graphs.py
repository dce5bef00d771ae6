"""Events at the ends of captured regions (S2-88, S2-89, S2-91).

A graph ends with its copies, and what its stream is given next waits for the whole graph. So a graph that
copies is replayed on a stream of its own, and records an external event where its compute ends: the main
stream waits for the event and runs beside the copies.

    with torch.cuda.graph(forward):
        y = layer(x)
        forward_record(event)                   # event = torch.cuda.Event(external=True)
    ...
    with torch.cuda.stream(side): forward.replay()
    torch.cuda.current_stream().wait_event(event)

The backward's graph is replayed on the same stream: it reads what the forward's copies write. Which waits a
capture leaves out, and why, is transfer/captures.py's.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from offload.engine import OffloadEngine


def is_graph_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph. False without CUDA; never raises."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def check_event(function: str, event: Any) -> None:
    """ValueError unless `event` can be recorded."""
    if not callable(getattr(event, "record", None)):
        raise ValueError(
            f"{function} got a {type(event).__name__}, must be an event with record(), such as "
            "torch.cuda.Event()"
        )


def record_event(engine: OffloadEngine, event: Any, lane: Literal["d2h", "h2d"]) -> None:
    """Record `event` on the current stream, and order what comes next there after the copies on `lane` so
    far. Blocks the host: never."""
    engine.transfers.check_capture("an event record")
    event.record()
    with engine.lock:
        if engine.transfers.capture is not None:
            # the lanes that are part of it; to wait for another would end the capture
            engine.transfers.join()
        else:
            device = engine.device
            copies, order = (device.d2h, "settle") if lane == "d2h" else (device.h2d, "read")
            device.wait(device.compute, device.record(copies), order)
