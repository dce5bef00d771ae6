"""Whether grouped_mm is there is tried once a process. The trial's own products were kept by the selective
checkpoint that ran the first forward, and its recompute, which tried nothing, was given them as its own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import moe
from moe import products

CONFIG = moe.MixtureConfig(dim=16, expert_hidden=16, experts=4, top_k=2, heads=2)


def keeps_products(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_the_first_forward_of_a_process_may_be_inside_a_selective_checkpoint() -> None:
    torch.manual_seed(0)
    mixture = moe.Mixture(CONFIG)
    x = torch.randn(32, 16)

    def gradients(selective: bool) -> list[Any]:
        mixture.zero_grad()
        if selective:
            y = checkpoint(
                mixture,
                x,
                use_reentrant=False,
                context_fn=lambda: create_selective_checkpoint_contexts(keeps_products),
            )
        else:
            y = mixture(x)
        y.square().sum().backward()
        return [parameter.grad for parameter in mixture.parameters()]

    expected = gradients(selective=False)
    products._takes.cache_clear()
    found = gradients(selective=True)
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)
