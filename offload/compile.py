"""Functions that torch.compile must not trace, and a report of what a compiled function keeps where no hook
sees it.

Functions that the compiler calls instead of looking into them, and a package that it passes over, keep it out
of the engine. One invariant: nothing of the engine is ever traced, for a graph would keep its effects of one
step and replay none of them. A mark that a compiled function calls is `untraced`: one graph break a call.
What the compiler meets without a call of the model, the hooks of commits and the reads of saved tensors under
compiled autograd, lies in files that it skips: to wrap those would cost each call a look at whether the
compiler is listening.

A warning, once a region, says what a compiled function keeps of a group where the engine cannot move it; it
only observes, and nothing asks it whether a tensor may leave. Saved-tensor hooks see what a compiled function
saves by `save_for_backward`, its donated buffers among it. Two things they do not get at: attributes that an
autograd.Function inside sets on its ctx, which torch keeps in a list on the graph's node; and the memory of
CUDA graphs that torch.compile records (saved/filters.py).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame as frames
from torch._compile import _disable_dynamo
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
                f"group {group!r} of chunk {chunk}: {region} keeps {_amount(len(kept), sum(kept.values()))} "
                "beside the saved-tensor hooks, which stays on the device: an autograd.Function in it sets "
                "tensors on its ctx; let it call ctx.save_for_backward for them"
            )

    def replayed(self, group: str, chunk: ChunkId, tensors: int, nbytes: int) -> None:
        """A group has saved tensors that lie in the memory of CUDA graphs which torch.compile records."""
        if not self._said.first(group, ""):
            return
        logger.warning(
            f"group {group!r} of chunk {chunk}: {_amount(tensors, nbytes)} of what it saves stays on the "
            'device, in the memory of a CUDA graph that torch.compile recorded (mode="reduce-overhead"): '
            "that memory is never given back, so copying it would free nothing; compile this group in the "
            'default mode or in "max-autotune-no-cudagraphs", or leave it out of marks and of apply()'
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


_TRACED = "offload.checkpoint.selective"
"""The file that the compiler looks into: a context_fn that is traced raises an error of its own."""

F = TypeVar("F", bound=Callable[..., object])

_REASON = (
    "a mark of the offload engine, or a hook of offload.apply, moves tensors, and a graph cannot hold that: "
    "compile without fullgraph=True, which costs one graph break a mark and two a block, or keep marks, "
    "offload_hooks() and the blocks' calls outside of the compiled function. torch.export takes a model "
    "without hooks: call remove() first"
)
# a code object by itself
_PASS_OVER = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)


def untraced(function: F) -> F:
    """`function`, run eagerly wherever a compiled function calls it: one graph break a call, and under
    fullgraph=True torch's error. The compiler is imported by the first call that it could trace, as by
    torch's own checkpoint and optimizers; torch.compiler.disable would import it now."""
    unwatched = _disable_dynamo(function)

    @functools.wraps(function)
    def mark(*arguments: Any, **keywords: Any) -> object:
        if frames.get_eval_frame_callback() is None:  # to switch it off and on again is 13 calls
            return function(*arguments, **keywords)
        return unwatched(*arguments, **keywords)

    wrapper: Any = mark
    # a compiled function calls this after its graph break, with the compiler watching: it shall not take the
    # wrapper for a model's frame
    frames.set_code_exec_strategy(wrapper.__code__, _PASS_OVER)
    wrapper._torchdynamo_disable = True  # so that the error and the list of graph breaks give the reason
    wrapper._torchdynamo_disable_msg = _REASON
    return cast(F, wrapper)


class Unscripted:
    """A module's hook that torch.jit.script cannot compile with the module: it asks for the name first."""

    __slots__ = ()

    @property
    def __name__(self) -> str:
        raise AttributeError(
            "torch.jit.script compiles the hooks of a module with it, and those of offload.apply and of "
            'overlap="forward" are of Python: call remove() on the handle, or close() on the optimizer, first'
        )


@functools.cache
def import_compiler() -> None:
    """Have the compiler pass over this package: an import of 2 s, once a process, which set-up shall pay and
    not step 1."""
    rules = importlib.import_module("torch._dynamo.trace_rules")
    # every part of the package but `_TRACED`; the compiler passes over all files of a part
    package, _, beside = _TRACED.rpartition(".")[0].partition(".")
    root = Path(__file__).parent
    for folder, prefix in ((root, f"{package}."), (root / beside, f"{package}.{beside}.")):
        for part in pkgutil.iter_modules([str(folder)], prefix):
            if part.name not in (_TRACED, f"{package}.{beside}"):
                rules.add(part.name)
