"""What tests read or change inside offload, in one place: where a file moves, only this one changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from offload.apply import Applied
from offload.device.sim import SimDevice
from offload.disk.tier import DiskTier
from offload.disk.worker import Stored, Worker
from offload.engine import OffloadEngine
from offload.memory.arena import Block
from offload.policy.streamed import least_window
from offload.transfer import engine as transfers
from offload.transfer.copier import CopyWatcher
from offload.transfer.limits import CONFIG, DEFAULT, PLAN, Cap, Contributor
from offload.weights import choose
from offload.weights.experts import ExpertWeight
from offload.weights.gradients import GradientStream
from offload.weights.stream import WeightStream
from offload.weights.window import Window

_imposed: weakref.WeakKeyDictionary[OffloadEngine, Contributor] = weakref.WeakKeyDictionary()


def exactly(nbytes: int | str | None) -> str | None:
    """A size argument of `apply`: so few bytes are meant."""
    return f"{nbytes}B" if isinstance(nbytes, int) else nbytes


def caps_of(engine: OffloadEngine) -> dict[str, Any]:
    """Every cap of the engine, and which are named."""
    names = [name for name in type(engine.limits).__annotations__ if name != "watchers"]
    return {name: getattr(engine.limits, name) for name in names}


def impose(engine: OffloadEngine, **caps: int | None) -> Contributor:
    """Bounds of a test, in place of everybody else's. caps: as in max_spilling_bytes=0; None: no bound."""
    if engine not in _imposed:
        _imposed[engine] = engine.limits.contributor("test")
    for name, nbytes in caps.items():
        cap: Cap = name  # type: ignore[assignment]
        _imposed[engine].bound(cap, nbytes, replaces=(DEFAULT, CONFIG, PLAN, "auto"))
    return _imposed[engine]


def holds_lock(engine: OffloadEngine) -> bool:
    """Whether this thread has what threads of an engine take turns by."""
    return bool(engine.lock._is_owned())  # type: ignore[attr-defined]


def checksum_of(block: Block) -> int:
    """What an audit compares: of a host block's bytes."""
    return transfers._checksum(block)


def has_work(worker: Worker[Any]) -> bool:
    """Whether a thread of the disk has jobs, waiting or under way."""
    return bool(worker._queue) or worker._num_running > 0


def read_ahead(disk: DiskTier) -> list[Stored]:
    """Whose host bytes a reader may take."""
    return [*disk._ahead]


def streaming_of(handle: Applied) -> WeightStream:
    """The stream of a handle with weights=."""
    assert handle._streams.weights is not None
    return handle._streams.weights


def leave_out(device: SimDevice, title: str | None) -> None:
    """From here on the device does nothing for waits of this title."""
    device._without = frozenset(() if title is None else {title})


def by_expert(handle: Applied) -> list[ExpertWeight]:
    """The weights of a handle that stream by the expert."""
    return streaming_of(handle).experts.weights


def window_of(handle: Applied) -> Window:
    """Their memory on the device."""
    return streaming_of(handle).experts.window


def share_with_experts(handle: Applied, nbytes: int) -> None:
    """Their memory from here on, beside what blocks take at the least."""
    stream = streaming_of(handle)
    stream.experts.window.share(nbytes)
    stream.limit_bytes = max(
        stream.limit_bytes, least_window(stream._sizes) + stream.experts.window.room_bytes
    )


def gradients_of(handle: Applied) -> GradientStream:
    """What keeps the gradients of a handle on the host."""
    assert handle._streams.gradients is not None
    return handle._streams.gradients


def watchers_of(engine: OffloadEngine) -> tuple[CopyWatcher, ...]:
    """Who is told of the engine's copies. A step that is measured has one."""
    return engine.copier._watchers


@contextmanager
def streams_from(numel: int) -> Iterator[None]:
    """Inside, parameters of so many elements stream, and experts of any size."""
    with patch.object(choose, "LEAST_NUMEL", numel), patch.object(choose, "LEAST_EXPERT_BYTES", 1):
        yield
