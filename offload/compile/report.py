"""A warning, once a region, about what a compiled function keeps of a group where the engine cannot move it.

One invariant: it only observes; nothing asks it whether a tensor may leave.

Saved-tensor hooks see what a compiled function saves by `save_for_backward`, its donated buffers among it.
Two things they do not get at: attributes that an autograd.Function inside sets on its ctx, which torch keeps
in a list on the graph's node; and the memory of CUDA graphs that torch.compile records (saved/filters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node

from offload.ids import ChunkId
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)

_BESIDE_HOOKS = "_tensors_no_vc_check"


class CompileReport:
    """Said by group name and compiled graph, in however many chunks they meet."""

    def __init__(self) -> None:
        self._said = Once()

    def look(
        self,
        group: str,
        chunk: ChunkId,
        output: torch.Tensor,
        since: int,
        may_leave: Callable[[torch.Tensor], bool],
    ) -> None:
        """Look for what compiled functions keep beside the hooks, from a group's output back to the node
        numbered `since`. Host work by the number of the group's nodes."""
        for region, tensors in compiled_regions(output, since):
            kept = {
                tensor.untyped_storage()._cdata: tensor.numel() * tensor.element_size()
                for tensor in tensors
                if may_leave(tensor)
            }
            if not kept or not self._said.first(group, region):
                continue
            logger.warning(
                "group %r of chunk %s: %s keeps %s beside the saved-tensor hooks, which stays on the device: "
                "an autograd.Function in it sets tensors on its ctx; let it call ctx.save_for_backward for "
                "them",
                group,
                chunk,
                region,
                _amount(len(kept), sum(kept.values())),
            )

    def replayed(self, group: str, chunk: ChunkId, tensors: int, nbytes: int) -> None:
        """A group has saved tensors that lie in the memory of CUDA graphs which torch.compile records."""
        if not self._said.first(group, ""):
            return
        logger.warning(
            "group %r of chunk %s: %s of what it saves stays on the device, in the memory of a CUDA graph "
            'that torch.compile recorded (mode="reduce-overhead"): that memory is never given back, so '
            "copying it would free nothing; compile this group in the default mode or in "
            '"max-autotune-no-cudagraphs", or leave it out of marks and of apply()',
            group,
            chunk,
            _amount(tensors, nbytes),
        )


def compiled_regions(output: torch.Tensor, since: int) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Compiled functions between `output` and the nodes older than `since`: the name of each, and what it
    keeps beside the hooks."""
    waiting: list[Node | None] = [output.grad_fn]
    seen: set[Node] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < since:
            continue
        seen.add(node)
        tensors = getattr(node, _BESIDE_HOOKS, None)
        if tensors:
            yield _named(node), tensors
        waiting.extend(before for before, _ in node.next_functions)


def _amount(tensors: int, nbytes: int) -> str:
    return f"{nbytes:,} bytes ({tensors:,} tensor{'' if tensors == 1 else 's'})"


def _named(node: Any) -> str:
    """Name of the graph in torch's logs. torch 2.13 says which compilation it comes from, 2.11 only the
    number of its AOT graph."""
    compile_id = getattr(node._forward_cls.metadata, "compile_id_str", None)
    if compile_id is None:
        return f"compiled graph {node._forward_cls._aot_id}"
    from torch._dynamo.utils import get_compilation_metrics

    for compilation in reversed(get_compilation_metrics()):
        if compilation.compile_id == compile_id and compilation.co_name is not None:
            place = f"{compilation.co_filename}:{compilation.co_firstlineno}"
            return f"compiled graph [{compile_id}], {compilation.co_name} at {place},"
    return f"compiled graph [{compile_id}]"
