"""Warnings, once each, about operators that a selective checkpoint was asked to keep and that were never
called.

One invariant: it only observes; nothing asks it whether something may be kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)

_NAMED = 12  # operators that a message lists at most


@dataclass(slots=True)
class _Asked:
    """One set of operators, or one policy."""

    names: tuple[str, ...]
    matched: set[str] = field(default_factory=set)
    called: dict[str, None] = field(default_factory=dict)
    """Operators in the order of their first calls, as long as nothing matched."""
    regions: int = 0


class KeepReport:
    """One entry for each set of operators or policy, however many checkpoints of an engine use it."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, _Asked] = {}
        self._said = Once()

    def region(
        self, asked: Hashable, names: Iterable[str], matched: Iterable[str], called: Iterable[str]
    ) -> None:
        """One checkpointed forward has ended. names: what was to be kept; matched: of what was; called: what
        the forward called."""
        entry = self._asked.setdefault(asked, _Asked(tuple(names)))
        entry.regions += 1
        entry.matched.update(matched)
        if not entry.matched:
            entry.called.update(dict.fromkeys(called))

    def no_chunk(self) -> None:
        if self._said.first("no chunk"):
            logger.warning(
                "a checkpoint with selective_contexts() runs while no chunk is current: what it keeps stays "
                "on the device; call init_chunk_handler() at the start of every forward"
            )

    def step_ended(self) -> None:
        """Say what a whole step of checkpoints did not call."""
        for asked, entry in self._asked.items():
            if not self._said.first(asked):
                continue
            missing = [name for name in entry.names if name not in entry.matched]
            if not entry.matched:
                logger.warning(
                    "selective_contexts() kept nothing: %s checkpointed forwards called none of %s, so they "
                    "are recomputed whole. They called %s (what torch.compile has fused calls none). Ask "
                    "for some of those, by selective_contexts() in a checkpoint of your own; of "
                    "mode='selective' the operators are fixed, and mode='auto' keeps what pays",
                    f"{entry.regions:,}",
                    _listed(entry.names),
                    _listed(entry.called),
                )
            elif missing:
                logger.info(
                    "selective_contexts() keeps %s; not called: %s",
                    _listed(sorted(entry.matched)),
                    _listed(missing),
                )


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (", ".join(listed[:_NAMED]) or "nothing") + more
