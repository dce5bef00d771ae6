"""Hooks that are installed for the open groups of the current chunk, and removed again.

One invariant: exactly what a `with`, or a group that closes its hooks at its commit, has installed is
removed, whatever was switched or raised in between; at the end of the step at the latest.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.compile import untraced
from offload.engine import OffloadEngine
from offload.groups.chunk import ChunkGroups
from offload.groups.scope import GroupScope
from offload.groups.tracker import ChunkTracker
from offload.saved.hooks import InstalledScope, inside_checkpoint


class OpenScopes(ChunkTracker):
    """The hooks' part of the manager."""

    def __init__(self, engine: OffloadEngine) -> None:
        super().__init__(engine)
        # by the name of the group whose commit closes it
        self._until_commit: list[tuple[str, InstalledScope | None]] = []

    # -- whose they are --------------------------------------------------------------------------------------
    def active_handler(self) -> ChunkGroups | None:
        """The chunk that a mark in a forward belongs to, if anything may leave now."""
        may_leave = self.do_offload and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        return self._forward if may_leave else None

    def muted_handler(self) -> ChunkGroups | None:
        """The chunk that a mark belongs to although nothing may leave: its starts and commits are still
        paired. None in a backward."""
        return None if torch._C._current_graph_task_id() != -1 else self._forward

    def needs_chunk(self) -> bool:
        """Return True if something that runs now would leave, were a chunk current."""
        return self.do_offload and self._forward is None and torch._C._current_graph_task_id() == -1

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
            self.mark_report.no_group(handler.id)
            return None
        group.hooked = True
        if recomputed_by := inside_checkpoint():
            # mode "auto" plans, and recomputes a block in some steps only; a checkpoint that keeps what was
            # asked for is what the warning would advise
            is_auto = self.engine.limits.again_room_bytes is not None
            by_torch = recomputed_by == "torch.utils.checkpoint"
            is_asked_for = self.open_regions > 0 if by_torch else is_auto
            self.mark_report.inside_checkpoint(group.name, "" if is_asked_for else recomputed_by)
            return None
        self.engine.transfers.check_capture(f"group {group.name!r}")
        return self.engine.hooks.push(GroupScope(handler, group), stays)

    @untraced
    def close_scope(self, installed: InstalledScope | None) -> None:
        if installed is not None:
            self.engine.hooks.pop(installed)

    def open_until_commit(self, name: str) -> None:
        """`open_scope`, undone by `close_at_commit` of the same name, or by the step's end if an exception
        came in between."""
        self._until_commit.append((name, self.open_scope()))

    def close_at_commit(self, name: str) -> None:
        """Undo the latest `open_until_commit` of this name; nothing to do where there was none."""
        for position in range(len(self._until_commit) - 1, -1, -1):
            if self._until_commit[position][0] == name:
                self.close_scope(self._until_commit.pop(position)[1])
                return
