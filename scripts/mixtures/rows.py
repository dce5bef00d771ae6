"""The rows: which activations leave, by what, and what is recomputed instead.

    nothing, nothing_permuted      everything stays; permuted: the experts' input is kept once for each expert
                                   that a token goes to, not once
    groups, groups_permuted        marks of the experts and of attention, under a limit (`kept`)
    auto, auto_permuted            offload.apply(model, mode="auto") within a total
    auto_checkpoint                the same within what torch_checkpoint takes
    experts_*                      the three modes of the experts
    both_attention                 the experts' mode "both", and all else that is marked leaves
    experts_leave                  the experts' input and first product leave, without a limit;
                                   experts_leave_permuted with the permuted input, and wide copies in flight
    torch_checkpoint               torch.utils.checkpoint of every layer
    torch_save_on_cpu              torch.autograd.graph.save_on_cpu(pin_memory=True) around the experts

One invariant: a row differs from `nothing` in its `RowSpec` alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

import moe

__all__ = ["ROWS", "ROWS_OF", "RowSpec", "wrap_by_torch"]

EXPERTS = ("expert_fc1", "moe_act")
ATTENTION = ("core_attn", "attn_proj")
EVERYTHING = ("attn_norm", "qkv_linear", *ATTENTION, "mlp_norm")
"""Marks of a layer that are not of its experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSpec:
    """Difference of a row from nothing."""

    placement: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of moe.MixtureGPT: offload_modules, experts_mode, input_kept."""
    kept: bool = False
    """The engine's device limit is what lets the model keep the share of its saved bytes that is asked
    for."""
    limits: Mapping[str, int] = field(default_factory=dict)
    """Of the engine's config."""
    total: Literal["share", "torch_checkpoint"] | None = None
    """Mode auto, within what `nothing` takes less what is not to be kept, or within what that row takes."""
    by_torch: Literal["checkpoint", "save_on_cpu"] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether the engine takes part."""
        return bool(self.total or self.moves)

    @property
    def moves(self) -> bool:
        """Whether marks are set."""
        placement = self.placement
        return bool(placement.get("offload_modules")) or placement.get("experts_mode") in (
            "save_on_cpu",
            "both",
        )


_PERMUTED = {"input_kept": "permuted"}
_GROUPS = {"offload_modules": (*ATTENTION, *EXPERTS)}
_LEAVE = {"offload_modules": EXPERTS}
_IN_FLIGHT = {"max_spilling_bytes": 2 << 30, "max_restoring_bytes": 2 << 30}
_WIDE = {"max_spilling_bytes": 8 << 30, "max_restoring_bytes": 6 << 30}
"""Of permuted inputs a forward saves more than the link carries meanwhile, and four come before the first
backward: what is under way is memory. As wide as that no step waits, and none saves memory (docs/log.md)."""

ROWS: Mapping[str, RowSpec] = {
    "nothing": RowSpec(),
    "nothing_permuted": RowSpec(placement=_PERMUTED),
    "groups": RowSpec(placement=_GROUPS, kept=True),
    "groups_permuted": RowSpec(placement=_GROUPS | _PERMUTED, kept=True),
    "auto": RowSpec(total="share"),
    "auto_permuted": RowSpec(placement=_PERMUTED, total="share"),
    "torch_checkpoint": RowSpec(by_torch="checkpoint"),
    "auto_checkpoint": RowSpec(total="torch_checkpoint"),
    "torch_save_on_cpu": RowSpec(by_torch="save_on_cpu"),
    "experts_save_on_cpu": RowSpec(placement={"experts_mode": "save_on_cpu"}),
    "experts_checkpoint": RowSpec(placement={"experts_mode": "checkpoint"}),
    "experts_both": RowSpec(placement={"experts_mode": "both"}),
    "both_attention": RowSpec(placement={"experts_mode": "both", "offload_modules": EVERYTHING}),
    "experts_leave": RowSpec(placement=_LEAVE, limits=_IN_FLIGHT),
    "experts_leave_permuted": RowSpec(placement=_LEAVE | _PERMUTED, limits=_WIDE),
}
ROWS_OF: Mapping[str, tuple[str, ...]] = {
    "layer": tuple(name for name in ROWS if not name.startswith("experts_leave")),
    "window": ("nothing", "experts_leave", "experts_leave_permuted"),
    "zipf": ("nothing", "groups"),
    "lengths": ("nothing", "groups"),
}
"""The rows of each work that run unless others are asked for."""


def wrap_by_torch(model: moe.MixtureGPT, how: str, *, pinned: bool) -> None:
    """Put torch's own context around each layer's forward, or around that of its experts."""
    for block in model.blocks.values():
        if how == "checkpoint":
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        else:
            experts = block.mixture.experts
            experts.forward = functools.partial(_saved_on_cpu, experts.forward, pinned)


def _saved_on_cpu(forward: Callable[..., Any], pinned: bool, *arguments: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=pinned):
        return forward(*arguments)
