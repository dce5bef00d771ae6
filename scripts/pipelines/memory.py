"""How much device memory a rank needs, from figures of one block: what fits, before anything is tried.

One invariant: the sum is of named parts, each measured on one block or counted; what is left for the
allocator is one factor, said aloud.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GB = 1e9
WEIGHT_BYTES, GRADIENT_BYTES = 2, 2
ALLOCATOR_SHARE = 0.97
"""Of what is free, what a model that only just fits may need: torch's allocator reserved 1.007 to 1.02 of
what was active (README)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFacts:
    """One block at the run's sequence length: counted, and measured by one forward and one backward of it."""

    usable_bytes: int
    """Free on the fullest device, once NCCL and torch's context have taken theirs. 0: unknown, as on a
    CPU."""
    parameters: int
    saved_bytes: int
    """Distinct storages that one forward saves."""
    working_bytes: int
    """What one backward needs besides."""
    output_bytes: int
    """The hidden states between two blocks."""
    forward_ms: float
    backward_ms: float
    groups: Mapping[str, Mapping[str, int]]
    """Bytes of each group: nbytes, movable_bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Bytes of one rank with nothing offloaded."""

    layers: int
    live: float
    """Microbatches whose activations exist at once."""
    resident_bytes: int
    saved_bytes: int
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.resident_bytes + self.saved_bytes + self.working_bytes


def need_of(facts: BlockFacts, *, layers: int, live: float, optimizer_bytes: int) -> Need:
    """Weights, gradients and optimizer state; what is saved; a backward's tensors, and hidden states sent and
    received."""
    return Need(
        layers=layers,
        live=live,
        resident_bytes=layers * facts.parameters * (WEIGHT_BYTES + GRADIENT_BYTES + optimizer_bytes),
        saved_bytes=round(live * layers * facts.saved_bytes),
        working_bytes=facts.working_bytes + round(2 * (live + 1)) * facts.output_bytes,
    )


def most_layers(facts: BlockFacts, *, live: float, optimizer_bytes: int, multiple: int) -> int:
    """The largest number of layers of one rank, a multiple of `multiple`, that only just fits without
    offload; at least `multiple`."""
    layers = multiple
    while (
        need_of(facts, layers=layers + multiple, live=live, optimizer_bytes=optimizer_bytes).total_bytes
        <= ALLOCATOR_SHARE * facts.usable_bytes
    ):
        layers += multiple
    return layers


def need_lines(
    facts: BlockFacts, need: Need, *, sequence: int, optimizer_bytes: int, ranks: int, microbatches: int
) -> list[str]:
    """The calculation, as the report prints it."""
    a_parameter = WEIGHT_BYTES + GRADIENT_BYTES + optimizer_bytes
    of_usable = (
        f" of {facts.usable_bytes / GB:.1f} usable ({need.total_bytes / facts.usable_bytes:.1%})"
        if facts.usable_bytes
        else ""
    )
    compute_s = need.layers * (facts.forward_ms + facts.backward_ms) * (microbatches + ranks - 1) / 1e3
    return [
        f"a block at sequence {sequence}: {facts.parameters / 1e6:.1f} M parameters x ({WEIGHT_BYTES} weight "
        f"+ {GRADIENT_BYTES} gradient + "
        f"{optimizer_bytes} optimizer) = {facts.parameters * a_parameter / GB:.3f} GB; saves "
        f"{facts.saved_bytes / GB:.3f} GB a microbatch; "
        f"forward {facts.forward_ms:.1f} ms, backward {facts.backward_ms:.1f} ms",
        f"{need.layers} layers a rank; 1f1b's first rank keeps {need.live:g} microbatches: resident "
        f"{need.resident_bytes / GB:.1f} + saved "
        f"{need.saved_bytes / GB:.1f} + working set, sent and received {need.working_bytes / GB:.1f} = "
        f"{need.total_bytes / GB:.1f} GB"
        f"{of_usable}; {microbatches} microbatches: 1f1b needs {compute_s:.2f} s a step at least "
        f"({microbatches} + {ranks - 1} slots)",
    ]
