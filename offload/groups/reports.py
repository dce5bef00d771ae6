"""Warnings about marks that have no effect, a limit that was passed, and copies that save no memory.

One invariant: each is given once, with its cause and the way out, and changes nothing; nothing asks a report
whether a tensor may leave.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from offload.groups.group import Group
from offload.ids import ChunkId
from offload.telemetry.records import StepStats
from offload.transfer.admission import Limits

__all__ = ["FORWARDS_WITHOUT_END", "MarkReport", "StepReport"]

logger = logging.getLogger(__name__)

FORWARDS_WITHOUT_END = 1024
"""Forwards of one virtual stage after which a step is taken for one that is never ended."""


class _Report:
    def __init__(self) -> None:
        self._said: set[str] = set()

    def _first(self, what: str) -> bool:
        """Whether `what` is said for the first time."""
        if what in self._said:
            return False
        self._said.add(what)
        return True


class MarkReport(_Report):
    """By cause; of a cause that has a group's name, once for each name."""

    def __init__(self) -> None:
        super().__init__()
        self._recomputed: set[str] = set()

    def not_announced(self, name: str) -> None:
        """Group `name` was started in a forward that no chunk was begun for."""
        if self._first("no chunk"):
            logger.warning(
                "group %r is started while no chunk is current: nothing of this forward leaves. Call "
                "init_chunk_handler() at the start of every forward; a pipeline stage needs its announcer",
                name,
            )

    def no_group(self, chunk: ChunkId) -> None:
        """Hooks were asked for while no group of `chunk` was open."""
        if self._first("no group"):
            logger.warning(
                "offload_hooks() without an open group in chunk %s: nothing saved in it will leave; call "
                "group_start first",
                chunk,
            )

    def inside_checkpoint(self, name: str, chunk: ChunkId) -> None:
        """Hooks were asked for in a checkpoint that keeps nothing."""
        if self._first("inside a checkpoint"):
            logger.warning(
                "group %r of chunk %s is inside a non-reentrant checkpoint, which recomputes what it saves: "
                "nothing of it will leave; put the group around the checkpoint, or give the checkpoint "
                "context_fn=selective_contexts(...)",
                name,
                chunk,
            )

    def recomputed(self, name: str) -> None:
        """Group `name` was started while a backward recomputes."""
        self._recomputed.add(name)

    def forwards(self, stage: int, number: int) -> None:
        """So many forwards of a virtual stage have begun since the last step's end."""
        if number >= FORWARDS_WITHOUT_END and self._first("no end"):
            logger.warning(
                "%s forwards of virtual stage %s have begun since the last step_end(): they are not counted, "
                "and no plan is made. Call step_end() once a step, when its gradients are final",
                f"{number:,}",
                stage,
            )

    def end_step(self, groups: Iterable[Group], min_elements: int) -> None:
        """Say which names moved nothing, and why. groups: what was committed in the step that ends."""
        found = list(groups)
        moved = {
            group.name for group in found if group.encloses or (group.saved is not None and group.saved.slots)
        }
        for name in dict.fromkeys(group.name for group in found if group.name not in moved):
            if not self._first(f"nothing {name}"):
                continue
            if any(group.hooked for group in found if group.name == name):
                logger.warning(
                    "group %r moved nothing: what autograd saves in it is smaller than "
                    "min_offloaded_tensor_size, %s elements here, or a parameter, or marked to stay. Lower "
                    "the threshold, or take its marks out",
                    name,
                    f"{min_elements:,}",
                )
            else:
                logger.warning(
                    "group %r moved nothing: no hooks were open between its start and its commit. Run its "
                    "layers in `with offload_hooks():`, or start it with hooks=True",
                    name,
                )
        for name in self._recomputed.difference(group.name for group in found):
            if self._first(f"checkpoint {name}"):
                logger.warning(
                    "group %r is inside a reentrant checkpoint, which saves nothing in its forward: nothing "
                    "of the group leaves. Put its marks around the checkpoint, or use "
                    "checkpoint(..., use_reentrant=False, context_fn=selective_contexts(...))",
                    name,
                )
        self._recomputed.clear()


class StepReport(_Report):
    """Of one planner."""

    def look(self, stats: StepStats, limits: Limits, live_peak_bytes: int) -> None:
        """stats: of a step that followed its plan. live_peak_bytes: what its saved tensors would take of the
        device at once if none left."""
        limit, peak = limits.device_limit_bytes, stats.device_bytes_peak
        if limit is not None and peak > limit and self._first("passed"):
            logger.warning(
                "saved tensors took up to %s bytes of the device at once in step %d, and "
                "device_limit_bytes is %s: %s",
                f"{peak:,}",
                stats.step,
                f"{limit:,}",
                f"{stats.refused_bytes:,} bytes found no host memory; call "
                f"reserve_host({stats.host_bytes_wanted_peak:,}) before the first step"
                if stats.refused_bytes
                else "what is being saved or read must fit beside what is on its way; raise the limit, or "
                "mark smaller groups",
            )
        saves_nothing = limit is None and stats.spill_bytes and peak >= live_peak_bytes
        if saves_nothing and self._first("nothing saved"):
            logger.warning(
                "step %d copied %s bytes out and %s back, and its saved tensors took as much of the device "
                "at once, %s bytes, as if none had left: copies in flight have room for all of them. Set "
                "device_limit_bytes to what they may take",
                stats.step,
                f"{stats.spill_bytes:,}",
                f"{stats.restore_bytes:,}",
                f"{peak:,}",
            )
