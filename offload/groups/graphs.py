"""Events around captured regions (S2-88, S2-89, S2-91).

A CUDA graph that holds a layer's forward must end after the layer's spills, and one that holds a backward must begin after its
restores: the caller records an event at either point and the other graph waits for it.
"""

from __future__ import annotations

from typing import Any

import torch

from offload.groups.manager import PipelineOffloadManager

__all__ = ["check_event", "is_graph_capturing", "record_backward", "record_forward"]


def is_graph_capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph. False without CUDA; never raises."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def check_event(function: str, event: Any) -> None:
    """ValueError unless `event` can be recorded."""
    if not callable(getattr(event, "record", None)):
        raise ValueError(f"{function} got a {type(event).__name__}, must be an event with record(), such as torch.cuda.Event()")


def record_forward(event: Any) -> None:
    """Order the current stream after what has been sent to d2h, and record `event` there. Blocks the host: never."""
    check_event("forward_record", event)
    engine = PipelineOffloadManager.get_instance().engine
    device = engine.device
    with engine.lock:
        device.wait(device.compute, device.record(device.d2h), "settle")
    event.record()


def record_backward(event: Any) -> None:
    """Record `event` on the current stream, ordered after what has been fetched on h2d. Blocks the host: never."""
    engine = PipelineOffloadManager.get_instance().engine
    device = engine.device
    with engine.lock:
        device.wait(device.compute, device.record(device.h2d), "read")
    event.record()
