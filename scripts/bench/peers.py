"""Rows of other projects, where they are installed: TRL's OffloadActivations and Megatron-core's fine-grained
engine.

Both are imported when their row starts and never before; neither is a dependency. One invariant: each is
driven through its public interface as its own trainer drives it, and what had to be put in place around it is
written in the row's notes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from bench.rows import Row, RowContext
from bench.run import SkippedError, imported
from bench.workload import ATTENTION_GROUPS, GROUPS


def _needs_cuda(context: RowContext, what: str) -> None:
    if context.device.type != "cuda":
        raise SkippedError(f"{what} needs CUDA streams")


class TrlRow(Row):
    """TRL's context around the step where one forward is live at a time (as its trainer does), else one
    around each forward."""

    moves_all_groups = True

    def __init__(self, context: RowContext) -> None:
        super().__init__(context)
        module = imported("trl.models.activation_offloading", "trl")
        _needs_cuda(context, "TRL's OffloadActivations")
        # measured on W1: 36.3 GB pinned for 33.0 GB of distinct storages
        self._skip_if_pinned_exceeds(1.1 * self._live_saved_bytes(), "all saved tensors")
        microbatches = sorted({microbatch for _, _, microbatch in context.workload.actions})
        self._contexts = {
            microbatch: module.get_act_offloading_ctx_manager(context.stack, warn_if_no_head=False)
            for microbatch in microbatches
        }
        self._whole_step = len(microbatches) == 1
        self._stack = ExitStack()
        self.notes = {
            "trl": _version("trl"),
            "context": "whole step" if self._whole_step else "one around each forward",
        }

    def begin_step(self) -> None:
        if self._whole_step:
            self._stack.enter_context(self._contexts[0])

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        if self._whole_step:
            return self.context.stack(x)
        with self._contexts[microbatch]:
            return self.context.stack(x)

    def end_step(self) -> None:
        self._stack.close()


class _MegatronMarks:
    """The engine's interface, 0.19 or later (`group_offload`) and before (`group_commit`)."""

    def __init__(self, module: Any) -> None:
        self._start = module.fine_grained_offloading_group_start
        commit = getattr(module, "fine_grained_offloading_group_offload", None)
        self._commit = commit if commit is not None else module.fine_grained_offloading_group_commit
        self._interface = module.FineGrainedActivationOffloadingInterface

    def start(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return self._start(tensor, name)

    def hooks(self) -> AbstractContextManager[Any]:
        return self._interface.get_context(True)

    def commit(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return self._commit(tensor, name)


class MegatronRow(Row):
    """Megatron-core's engine with the same marks."""

    def __init__(self, context: RowContext, groups: tuple[str, ...] = GROUPS) -> None:
        super().__init__(context)
        self.moves_all_groups = groups == GROUPS
        module = imported("megatron.core.pipeline_parallel.fine_grained_activation_offload", "megatron-core")
        _needs_cuda(context, "Megatron-core's engine")
        self._interface = module.FineGrainedActivationOffloadingInterface
        # 0.19: pp_rank comes first, three more follow
        self._positional_rank = hasattr(module, "OffloadTensorPool")
        self.notes = {"megatron-core": _version("megatron-core"), "in_place": self._prepare_surroundings()}
        context.stack.mark(_MegatronMarks(module), groups)

    def _prepare_surroundings(self) -> list[str]:
        """What the engine expects of a Megatron run and does not bring itself."""
        done = []
        if not torch.distributed.is_initialized():  # its summary table gathers over ranks
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )
            done.append("one-rank gloo group")
        extension = imported(
            "megatron.core.extensions.transformer_engine", "megatron-core's transformer_engine extension"
        )
        if getattr(extension, "cpu_offload", None) is None:  # only its flag is written
            extension.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
            done.append("a stand-in for TransformerEngine's cpu_offload flag")
        return done

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        min_elements = self.context.options.min_elements
        if self._positional_rank:
            self._interface.init_chunk_handler(0, 1, None, min_elements, 0, 1.0)
        else:
            self._interface.init_chunk_handler(1, None, min_elements)
        return self.context.stack(x)

    def end_step(self) -> None:
        self._interface.reset()

    def close(self) -> None:
        self.context.stack.mark(None, ())
        self._interface.reset_instance()


def megatron_attention(context: RowContext) -> Row:
    return MegatronRow(context, ATTENTION_GROUPS)


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
