"""The ways to run one step of a workload: what a row is, nothing offloaded, and what torch ships (ours.py and
peers.py have the rest).

A row is a subclass of `Row` that changes how a forward, a backward or a step is wrapped; the stack and the
actions are the same for all. One invariant: a row that cannot run here raises `NotInstalledError` or
`SkippedError` before its first step, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bench.run import SkippedError
from bench.workload import GroupBytes, Inputs, Stack, Workload, live_peak_chunks
from offload.policy.actions import Action

GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """What the command line says about rows."""

    total_limit_bytes: int | None = None
    """All active device bytes: weights, gradients, inputs, working set and saved tensors."""
    saved_limit_bytes: int | None = None
    """Saved tensors on the device in any state."""
    working_set_bytes: int = 2_000_000_000
    """What a backward needs besides saved tensors; taken off a total limit."""
    host_limit_bytes: int = 110_000_000_000
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of OffloadConfig; what is not here is the engine's own default."""

    @property
    def min_elements(self) -> int:
        """Smallest saved tensor that may leave."""
        return int(self.engine.get("min_offloaded_tensor_size", 1 << 20))


@dataclass(slots=True, kw_only=True)
class RowContext:
    """What a row finds when it starts: the model is on the device, no step has run."""

    workload: Workload
    stack: Stack
    inputs: Inputs
    device: torch.device
    options: RowOptions
    layer_bytes: dict[str, GroupBytes]
    resident_bytes: int
    """Active device bytes before the first step: weights, gradients where they stay, inputs."""
    step: int = 0
    """The number of the step that runs next, where lengths are drawn by it."""

    @property
    def actions(self) -> tuple[Action, ...]:
        """Of that step."""
        return self.workload.drawn(self.step).actions


@dataclass(frozen=True, slots=True)
class Pinned:
    held: int
    lent_peak: int


class Row:
    """One way to run the step. This base runs it with nothing offloaded."""

    settling_steps = 0
    """Steps between the first and the timed ones that it needs at least."""
    is_settled = True
    """Whether no further steps are needed before the timed ones, where their number is not known."""
    moves_all_groups = False
    """Whether every saved byte leaves, so that the copy limit of W1 applies to the row."""

    def __init__(self, context: RowContext) -> None:
        self.context = context
        self.reserve_ms = 0.0
        self.notes: dict[str, Any] = {}

    def begin_step(self) -> None:
        """Before the first action of a step."""

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        return self.context.stack(x)

    def backward(self, microbatch: int, y: torch.Tensor, grad: torch.Tensor) -> None:
        y.backward(grad)

    def end_step(self) -> None:
        """After the last action of a step."""

    def pinned(self) -> Pinned:
        """Pinned bytes held, and the most that were in use at once."""
        if self.context.device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
            return Pinned(0, 0)
        stats = torch.cuda.host_memory_stats()
        return Pinned(int(stats.get("allocated_bytes.current", 0)), int(stats.get("active_bytes.peak", 0)))

    def stats(self) -> dict[str, Any]:
        """What the engine says of the last step; empty where there is none."""
        return {}

    def close(self) -> None:
        """Give back what the row holds."""

    def _skip_if_pinned_exceeds(self, needed: float, why: str) -> None:
        limit = self.context.options.host_limit_bytes
        if needed > limit:
            raise SkippedError(
                f"would pin about {needed / GB:.0f} GB ({why}), --host-limit-gb is {limit / GB:.0f}"
            )

    def _live_saved_bytes(self) -> int:
        layer = sum(group.nbytes for group in self.context.layer_bytes.values())
        return layer * self.context.workload.shape.layers * live_peak_chunks(self.context.workload.actions)


class Nothing(Row):
    """The baseline: every saved tensor stays on the device."""


def stack_call(
    stack: Stack, x: torch.Tensor, call: Callable[[Any, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The stack's forward with each block called by `call`."""
    for block in stack.blocks:
        x = call(block, x)
    return x


def checkpointed(block: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


class CheckpointRow(Row):
    """torch.utils.checkpoint of each block, non-reentrant."""

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        return stack_call(self.context.stack, x, checkpointed)


def kept_operators() -> frozenset[Any]:
    """Matrix products and every form of fused attention that this torch has."""
    aten = torch.ops.aten
    names = [
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        *(name for name in dir(aten) if name.startswith("_scaled_dot_product_")),
    ]
    # dir() lists only operators that were touched before, hence the explicit names
    names += [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_fused_attention_overrideable",
    ]
    packets = (getattr(aten, name, None) for name in dict.fromkeys(names) if "backward" not in name)
    return frozenset(
        packet.default for packet in packets if packet is not None and hasattr(packet, "default")
    )


class SelectiveCheckpoint(Row):
    """torch's selective checkpoint of each block: matrix products and attention are kept, the rest is
    recomputed."""

    def __init__(self, context: RowContext) -> None:
        super().__init__(context)
        kept = kept_operators()

        def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE

        self._context_fn = partial(create_selective_checkpoint_contexts, policy)

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        return stack_call(
            self.context.stack,
            x,
            lambda block, h: checkpoint(block, h, use_reentrant=False, context_fn=self._context_fn),
        )


class SaveOnCpu(Row):
    """torch.autograd.graph.save_on_cpu with pinned memory around the forward."""

    moves_all_groups = True

    def __init__(self, context: RowContext) -> None:
        super().__init__(context)
        # measured on W1: 48.6 GB pinned for 33.0 GB of distinct storages (each save copied, sizes rounded up
        # to powers of two)
        self._skip_if_pinned_exceeds(
            1.47 * self._live_saved_bytes(), "every save is copied apart, rounded up to a power of two"
        )

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=self.context.device.type == "cuda"):
            return self.context.stack(x)


class SaveInputsOnCpu(Row):
    """torch's checkpoint of each block inside save_on_cpu with pinned memory: what `offload: True` of
    transformers' gradient checkpointing puts around a layer."""

    def forward(self, microbatch: int, x: torch.Tensor) -> torch.Tensor:
        return stack_call(self.context.stack, x, self._block)

    def _block(self, block: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=self.context.device.type == "cuda"):
            return checkpointed(block, x)


@contextmanager
def opened(row: Row) -> Iterator[Row]:
    """The row, closed at the end whatever happened."""
    try:
        yield row
    except BaseException:
        with suppress(Exception):  # what went wrong first is what the reader needs
            row.close()
        raise
    row.close()
