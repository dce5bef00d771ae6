"""Megatron-core's class around the marks: its context manager and its static methods."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from offload import marks
from offload.compat.manager import PipelineOffloadManager
from offload.groups.manager import GroupsManager
from offload.saved.hooks import InstalledScope

__all__ = ["ActivationOffloadContext", "FineGrainedActivationOffloadingInterface"]

T = TypeVar("T", torch.Tensor, tuple[Any, ...], list[Any])


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

    @staticmethod
    def init_chunk_handler(
        vp_size: int | None = None,
        vp_stage: int | None = None,
        min_offloaded_tensor_size: int | None = None,
        **keywords: Any,
    ) -> None:
        marks.init_chunk_handler(vp_size, vp_stage, min_offloaded_tensor_size, **keywords)

    @staticmethod
    def get_context(flag: bool) -> AbstractContextManager[Any]:
        """The manager's hooks, or a null context."""
        return marks.default_manager() if flag else nullcontext()

    @staticmethod
    def group_commit(
        tensor: T,
        name: str,
        forced_released_tensors: list[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> T:
        return marks.group_commit(tensor, name, forced_released_tensors, delay_offload)

    @staticmethod
    def mark_not_offloadable(tensor: torch.Tensor | None) -> None:
        marks.mark_not_offloadable(tensor)

    @staticmethod
    def forward_record(event: Any) -> None:
        marks.forward_record(event)

    @staticmethod
    def reset() -> None:
        marks.reset()

    @staticmethod
    def reset_instance() -> None:
        PipelineOffloadManager.reset_instance()


ActivationOffloadContext = FineGrainedActivationOffloadingInterface
