"""Hooks that are installed for the open groups of the current chunk, and removed again.

One invariant: exactly what a `with`, or a group that closes its hooks at its commit, has installed is
removed, whatever was switched or raised in between; at the end of the step at the latest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.compile import untraced
from offload.groups.chunk import ChunkGroups
from offload.groups.scope import GroupScope
from offload.groups.tracker import ChunkTracker
from offload.saved.hooks import InstalledScope, inside_checkpoint


class OpenScopes:
    """Hooks of one engine's groups, for the chunk that `tracker` has as the current one."""

    def __init__(self, tracker: ChunkTracker) -> None:
        self._tracker = tracker
        self._engine = tracker.engine
        self.open_regions = 0  # checkpointed forwards that keep a part, running now
        # by the name of the group whose commit closes it
        self.until_commit: list[tuple[str, InstalledScope | None]] = []

    # -- whose they are --------------------------------------------------------------------------------------
    def active_handler(self) -> ChunkGroups | None:
        """The chunk that a mark in a forward belongs to, if anything may leave now."""
        tracker = self._tracker
        may_leave = tracker.do_offload and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        return tracker.forward if may_leave else None

    def muted_handler(self) -> ChunkGroups | None:
        """The chunk that a mark belongs to although nothing may leave: its starts and commits are still
        paired. None in a backward."""
        return None if torch._C._current_graph_task_id() != -1 else self._tracker.forward

    def needs_chunk(self) -> bool:
        """Return True if something that runs now would leave, were a chunk current."""
        tracker = self._tracker
        return tracker.do_offload and tracker.forward is None and torch._C._current_graph_task_id() == -1

    # -- hooks -----------------------------------------------------------------------------------------------
    @untraced
    def open_scope(self, stays: Callable[[torch.Tensor], bool] | None = None) -> InstalledScope | None:
        """Install the hooks for the innermost open group of the current chunk; None if nothing may leave now.

        stays: predicate, asked of each saved tensor, a wrapper and then its members; True keeps it on the
            device.
        """
        handler = self.active_handler()
        if handler is None:
            return None
        group = handler.innermost_open()
        if group is None:
            self._tracker.mark_report.no_group(handler.id)
            return None
        group.hooked = True
        if recomputed_by := inside_checkpoint():
            # mode "auto" plans, and recomputes a block in some steps only; a checkpoint that keeps what was
            # asked for is what the warning would advise
            is_auto = self._engine.limits.again_room_bytes is not None
            by_torch = recomputed_by == "torch.utils.checkpoint"
            is_asked_for = self.open_regions > 0 if by_torch else is_auto
            self._tracker.mark_report.inside_checkpoint(group.name, "" if is_asked_for else recomputed_by)
            return None
        self._engine.transfers.check_capture(f"group {group.name!r}")
        return self._engine.hooks.push(GroupScope(handler, group), stays)

    @untraced
    def close_scope(self, installed: InstalledScope | None) -> None:
        if installed is not None:
            self._engine.hooks.pop(installed)

    def end_step(self) -> None:
        """Undo each `open_until_commit` that no commit undid."""
        while self.until_commit:
            self.close_scope(self.until_commit.pop()[1])

    def open_until_commit(self, name: str) -> None:
        """`open_scope`, undone by `close_at_commit` of the same name, or by the step's end if an exception
        came in between."""
        self.until_commit.append((name, self.open_scope()))

    def close_at_commit(self, name: str) -> None:
        """Undo the latest `open_until_commit` of this name; nothing to do where there was none."""
        for position in range(len(self.until_commit) - 1, -1, -1):
            if self.until_commit[position][0] == name:
                self.close_scope(self.until_commit.pop(position)[1])
                return
