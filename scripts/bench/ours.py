"""The rows of this project: which groups leave, what the engine is told, and what it is given before step 1.

The block's marks call the public functions; each forward, backward and step is announced as a pipeline stage
would announce it. One invariant: what the command line leaves open is not passed on, so that the engine's own
defaults are what is measured.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bench.mixed_bound import explained_bound_ms
from bench.rows import GB, Pinned, Row, RowContext, RowOptions, checkpointed, kept_operators, stack_call
from bench.run import SkippedError
from bench.workload import ATTENTION_GROUPS, BLOCK_INPUT, GROUPS, Marks, live_peak_chunks

STAT_FIELDS = [
    "step",
    "saved",
    "kept",
    "spilled",
    "restored",
    "spill_bytes",
    "restore_bytes",
    "stall_ms",
    "stall_count",
    "refused",
    "refused_bytes",
    "device_bytes_peak",
    "host_bytes_lent_peak",
    "host_bytes_held",
]

_SETTLING_STEPS = 7
"""Of lengths that vary, whose warm-up is short for the rows that have nothing to plan."""


def saved_limit_bytes(options: RowOptions, resident_bytes: int) -> int | None:
    """The limit that the engine is given: what a total limit leaves for saved tensors."""
    if options.total_limit_bytes is None:
        return options.saved_limit_bytes
    left = options.total_limit_bytes - resident_bytes - options.working_set_bytes
    if left <= 0:
        raise SkippedError(
            f"a total of {options.total_limit_bytes / GB:.1f} GB leaves nothing for saved tensors: "
            f"{resident_bytes / GB:.1f} GB are "
            f"resident and {options.working_set_bytes / GB:.1f} GB are set aside for the working set; raise "
            "--device-limit-gb"
        )
    return left


def host_reserve_bytes(live_peak_bytes: int, host_limit_bytes: int) -> int:
    """Pinned bytes to reserve before step 1: all that is live at once and may leave, because the first step
    sends everything. What the plan keeps is given back once it has settled."""
    return min(live_peak_bytes, host_limit_bytes)


class OurMarks:
    """This project's three functions, as the block calls them."""

    def __init__(self) -> None:
        import offload

        self._start, self._commit, self._hooks = (
            offload.group_start,
            offload.group_commit,
            offload.offload_hooks,
        )

    def start(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return self._start(tensor, name)

    def hooks(self) -> AbstractContextManager[Any]:
        return self._hooks()

    def commit(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return self._commit(tensor, name)


class Ours(Row):
    """This project's groups: the marked parts of each block leave through the engine."""

    def __init__(self, context: RowContext, groups: tuple[str, ...] = GROUPS) -> None:
        super().__init__(context)
        self.moves_all_groups = groups == GROUPS
        self.groups = groups
        self.limit_bytes = self._saved_limit_bytes()
        self.marks: Marks = OurMarks()
        self.manager = self._configure()
        self._mark_stack()
        if context.workload.fewest_microbatches is not None:
            self.settling_steps = max(self.settling_steps, _SETTLING_STEPS)

    def _saved_limit_bytes(self) -> int | None:
        return saved_limit_bytes(self.context.options, self.context.resident_bytes)

    def _mark_stack(self) -> None:
        self.context.stack.mark(self.marks, self.groups)

    def _movable_layer_bytes(self) -> int:
        return sum(self.context.layer_bytes[name].movable_bytes for name in self.groups)

    def _given(self) -> dict[str, Any]:
        """The fields of the engine's configuration that are not its own defaults."""
        options = self.context.options
        reserve = host_reserve_bytes(self._live_movable_bytes(), options.host_limit_bytes)
        reserve = options.engine.get("host_reserve_bytes", reserve)
        self._skip_if_pinned_exceeds(reserve, "what is live at once")
        return {
            "device_limit_bytes": self.limit_bytes,
            "host_limit_bytes": options.host_limit_bytes,
            **options.engine,
            "host_reserve_bytes": reserve,
        }

    def _live_movable_bytes(self) -> int:
        work = self.context.workload
        return self._movable_layer_bytes() * work.shape.layers * live_peak_chunks(work.actions)

    def _configure(self) -> Any:
        import offload

        config = offload.OffloadConfig(**self._given())
        began = time.perf_counter()
        manager = offload.configure(
            config, device="cuda" if self.context.device.type == "cuda" else "sim", print_summary=False
        )
        self.reserve_ms = (time.perf_counter() - began) * 1e3
        manager.register_parameters(self.context.stack)
        self.notes = {
            "config": asdict(config),
            "live_movable_bytes": self._live_movable_bytes(),
            "groups": list(self.groups),
        }
        return manager

    def begin_step(self) -> None:
        self.manager.set_order(self.context.actions)

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        self.manager.begin_chunk(0, microbatch)
        y = self._stack_forward(x)
        self.manager.end_forward(0, microbatch)
        return y

    def _stack_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.context.stack(x)

    def backward(self, microbatch: int, y: torch.Tensor, grad: torch.Tensor) -> None:
        self.manager.begin_backward(0, microbatch, "B")
        y.backward(grad)
        self.manager.end_backward(0, microbatch, "B")

    def end_step(self) -> None:
        self.manager.step_end()

    def pinned(self) -> Pinned:
        stats = self.stats()
        return Pinned(int(stats.get("host_bytes_held", 0)), int(stats.get("host_bytes_lent_peak", 0)))

    def stats(self) -> dict[str, Any]:
        stats = self.manager.stats
        return {name: getattr(stats, name) for name in STAT_FIELDS if hasattr(stats, name)}

    def close(self) -> None:
        import offload

        self.context.stack.mark(None, ())
        offload.PipelineOffloadManager.close_instance()


def ours_attention(context: RowContext) -> Row:
    return Ours(context, ATTENTION_GROUPS)


class OursKept(Ours):
    """All groups marked and all of them kept by plan: the host's price of looking at what is saved."""

    def __init__(self, context: RowContext) -> None:
        super().__init__(context)
        self.moves_all_groups = False

    def _given(self) -> dict[str, Any]:
        return super()._given() | {"activation_offload_fraction": 0.0, "host_reserve_bytes": 0}


class OursTraced(Ours):
    """ours_all, and after its timed steps others, of which every second one is recorded (child.py)."""


class OursBlockInputs(Ours):
    """Each block checkpointed, and each block's input in a group of its own."""

    def __init__(self, context: RowContext) -> None:
        super().__init__(context, (BLOCK_INPUT,))

    def _mark_stack(self) -> None:
        self.context.stack.mark(None, ())

    def _movable_layer_bytes(self) -> int:
        source = self.context.inputs.source
        return source.numel() * source.element_size()

    def _stack_forward(self, x: torch.Tensor) -> torch.Tensor:
        return stack_call(self.context.stack, x, self._block)

    def _block(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.marks.start(x, BLOCK_INPUT)
        with self.marks.hooks():
            y = checkpointed(block, x)
        return self.marks.commit(y, BLOCK_INPUT)


class OursHiddenStates(OursBlockInputs):
    """What a user writes: offload.apply(model, mode="hidden_states"). Nothing is announced."""

    def __init__(self, context: RowContext) -> None:
        super().__init__(context)
        import offload

        self._handle = offload.apply(context.stack, mode="hidden_states")

    def begin_step(self) -> None:
        """The order of reads is left to the engine."""

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        return self.context.stack(x)

    def backward(self, microbatch: int, y: torch.Tensor, grad: torch.Tensor) -> None:
        y.backward(grad)

    def close(self) -> None:
        self._handle.remove()
        super().close()


class OursSelective(OursBlockInputs):
    """Each block checkpointed, matrix products and attention kept; what is kept and the block's input leave,
    in a group a block.

    chunk_bytes: what a forward saves, by a probe of one block. bound_cap_bytes: the cap that the bound is
    computed with. While a block runs backward, all that its recompute saves is autograd's and not the
    engine's, so the engine gets less of a total limit; the bound does not.
    """

    def __init__(self, context: RowContext) -> None:
        self._kept = kept_operators()
        self._block_bytes = probe_kept_bytes(context, self._kept)
        if context.device.type == "cuda":
            torch.cuda.empty_cache()  # the probe's blocks, as after the probe of every row
        self.chunk_bytes = self._block_bytes * context.workload.shape.layers
        self.bound_cap_bytes = saved_limit_bytes(context.options, context.resident_bytes)
        super().__init__(context)
        import offload

        self._context_fn = offload.selective_contexts(self._kept)

    def _saved_limit_bytes(self) -> int | None:
        options = self.context.options
        recomputed_bytes = sum(group.nbytes for group in self.context.layer_bytes.values())
        options = replace(options, working_set_bytes=options.working_set_bytes + recomputed_bytes)
        return saved_limit_bytes(options, self.context.resident_bytes)

    def _movable_layer_bytes(self) -> int:
        return self._block_bytes

    def _block(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.marks.start(x, BLOCK_INPUT)
        with self.marks.hooks():
            y = checkpoint(block, x, use_reentrant=False, context_fn=self._context_fn)
        return self.marks.commit(y, BLOCK_INPUT)


_BOUND_PARTS = (0.7, 0.85, 1.0, 1.25, 1.6, 2.5)
"""Of its total: where the row notes the bound, for the line of scripts/headline.py."""


class OursAuto(Ours):
    """What a user writes: offload.apply(model, mode="auto", device_total=...), in steps that are announced as
    a pipeline stage does.

    bound_ms: of the mixture, with the rates, the compute and the working set that the mode has measured;
        notes["bounds"] has it for other totals, as pairs of bytes and ms.
    """

    settling_steps = 14
    """It measures, plans, and tries plans, a few steps each."""

    def __init__(self, context: RowContext) -> None:
        super().__init__(context, ())
        import offload

        self.moves_all_groups = False
        total = context.options.total_limit_bytes
        self._handle = offload.apply(
            context.stack, mode="auto", device_total=None if total is None else f"{total}B"
        )

    def _saved_limit_bytes(self) -> int | None:
        return None  # it finds what the total leaves

    def _mark_stack(self) -> None:
        self.context.stack.mark(None, ())

    @property
    def is_settled(self) -> bool:
        """Plans are searched for beside the steps, so their number depends on the machine."""
        return self._handle.explain().is_final

    def _given(self) -> dict[str, Any]:
        options = self.context.options
        return {"host_limit_bytes": options.host_limit_bytes, **options.engine}

    @property
    def bound_ms(self) -> float | None:
        return explained_bound_ms(self._handle.explain())

    def close(self) -> None:
        explained = self._handle.explain()
        self.notes["explained"] = str(explained)
        total = self.context.options.total_limit_bytes
        if total is not None:
            totals = [round(total * part) for part in _BOUND_PARTS]
            bounds = [(nbytes, explained_bound_ms(explained, nbytes)) for nbytes in totals]
            self.notes["bounds"] = [pair for pair in bounds if pair[1] is not None]
        self._handle.remove()
        super().close()


class _KeptBytes(TorchDispatchMode):
    """Counts outputs of `operators` after which autograd still saves something: those that a recompute
    reads."""

    def __init__(self, operators: frozenset[Any], min_elements: int) -> None:
        super().__init__()
        self.nbytes = 0
        self._operators = operators
        self._min_elements = min_elements
        self._latest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self._operators:
            tensors = made if isinstance(made, (tuple, list)) else (made,)
            sizes = [
                t.numel() * t.element_size()
                for t in tensors
                if isinstance(t, torch.Tensor) and t.numel() >= self._min_elements
            ]
            self._latest += sum(sizes)
        return made

    def saved(self, tensor: torch.Tensor) -> torch.Tensor:
        self.nbytes, self._latest = self.nbytes + self._latest, 0
        return tensor


def probe_kept_bytes(context: RowContext, operators: frozenset[Any]) -> int:
    """What one block keeps that may leave, its input included, from one real forward."""
    x = context.inputs.of(0)
    min_elements = context.options.min_elements
    count = _KeptBytes(operators, min_elements)
    with torch.autograd.graph.saved_tensors_hooks(count.saved, lambda kept: kept), count:
        context.stack.blocks[0](x)
    return count.nbytes + (x.numel() * x.element_size() if x.numel() >= min_elements else 0)
