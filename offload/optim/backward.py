"""Which gradients are final, and when: the hooks that tell the optimizer while the backward still runs.

A gradient is final when the parameter's last microbatch has been through, and with several ranks when it has
been reduced too: FSDP2 says so, since it calls the hooks after its reduction, and of others only the user can
know. One invariant: nothing here is trusted at the step; a gradient that landed counts only if it is still
the parameter's gradient, unchanged, when `step()` looks.

Who says which microbatch is the last: the user or the schedule (`last_microbatch`, `no_sync`), else the step
before, whose number of backwards a parameter is expected to have again.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from offload.optim.parameters import Managed, local_of
from offload.optim.ranks import reduced_before_its_hook, several_ranks

logger = logging.getLogger(__name__)

__all__ = ["BackwardWatch", "Stamp"]

Stamp = tuple[weakref.ref[Tensor], int, int]
"""A gradient as it was: the tensor, its version and its local shard's."""


def stamp_of(gradient: Tensor) -> Stamp:
    return weakref.ref(gradient), gradient._version, local_of(gradient)._version


class BackwardWatch:
    """Calls `ready(member)` when a parameter's gradient is taken to be final. Called on the thread that runs
    the backward.

    promised: the user says that with several ranks nothing is reduced after the backward.
    """

    def __init__(self, ready: Callable[[Managed], None], *, promised: bool) -> None:
        self._ready = ready
        self._promised = promised
        self._announced = False
        self.last_microbatch: bool | None = None
        """Whether the backward to come is the last of its step; None: nobody says, the step before does."""
        self._seen: dict[int, int] = {}  # backwards of each parameter in this step
        self._expected: dict[int, int] = {}
        self._handles: list[Any] = []

    def watch(self, members: Sequence[Managed]) -> None:
        """Hooks hold the watch weakly: an optimizer that is dropped leaves none that does anything."""
        reference = weakref.ref(self)
        for member in members:
            if member.parameter.requires_grad and member.parameter.is_leaf:
                self._handles.append(
                    member.parameter.register_post_accumulate_grad_hook(_Hook(reference, member))
                )

    def accumulated(self, member: Managed) -> None:
        seen = self._seen.get(member.index, 0) + 1
        self._seen[member.index] = seen
        last = self.last_microbatch
        if (last or (last is None and self._expected.get(member.index) == seen)) and self._is_reduced(member):
            self._ready(member)

    def _is_reduced(self, member: Managed) -> bool:
        is_dtensor = local_of(member.parameter) is not member.parameter
        if self._promised or not several_ranks() or (is_dtensor and reduced_before_its_hook()):
            return True
        if not self._announced:
            self._announced = True
            logger.info(
                "the gradient of %s, and others that are not FSDP2's, leave at step(): with several ranks "
                "they may be reduced after the "
                "backward; overlap_backward=True if they are not",
                member,
            )
        return False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside are not the last of their step; the one after it is."""
        before, self.last_microbatch = self.last_microbatch, False
        try:
            yield
        finally:
            self.last_microbatch = True if before is None else before

    def end_step(self) -> None:
        """The gradients are used; the counting begins anew."""
        if self._seen:
            self._expected, self._seen = self._seen, {}

    def start_over(self) -> None:
        """The gradients are thrown away unused."""
        self._seen = {}

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class _Hook:
    __slots__ = ("_member", "_watch")

    def __init__(self, watch: weakref.ref[BackwardWatch], member: Managed) -> None:
        self._watch = watch
        self._member = member

    def __call__(self, parameter: Tensor) -> None:
        watch = self._watch()
        if watch is not None:
            watch.accumulated(self._member)
