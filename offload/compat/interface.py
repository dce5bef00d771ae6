"""Megatron-core's class around the marks: its context manager and its static methods."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload import marks
from offload.compat.manager import PipelineOffloadManager
from offload.groups.manager import GroupsManager
from offload.saved.hooks import InstalledScope


class FineGrainedActivationOffloadingInterface:
    """`with Interface(offload, tensor, name) as tensor:` opens a group and installs the hooks, iff
    `offload`."""

    def __init__(self, offload: bool, tensor: torch.Tensor, name: str) -> None:
        marks.check_mark(type(self).__name__, tensor, name)
        self.offload = offload
        self.tensor = tensor
        self.name = name
        self._manager: GroupsManager | None = None
        self._installed: InstalledScope | None = None

    def __enter__(self) -> torch.Tensor:
        if self.offload:
            self.tensor = marks.group_start(self.tensor, self.name)
            self._manager = marks.existing_manager()
            self._installed = None if self._manager is None else self._manager.open_scope()
        return self.tensor

    def __exit__(self, *exception: object) -> None:
        if self._manager is not None:
            self._manager.close_scope(self._installed)
        self._manager = self._installed = None

    init_chunk_handler = staticmethod(marks.init_chunk_handler)
    group_commit = staticmethod(marks.group_commit)
    mark_not_offloadable = staticmethod(marks.mark_not_offloadable)
    forward_record = staticmethod(marks.forward_record)
    reset = staticmethod(marks.reset)

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[Any]:
        """The manager's hooks, or a null context."""
        return PipelineOffloadManager.get_instance() if flag else nullcontext()

    @staticmethod
    def reset_instance() -> None:
        PipelineOffloadManager.reset_instance()


ActivationOffloadContext = FineGrainedActivationOffloadingInterface
