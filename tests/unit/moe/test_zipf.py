"""Rows that arrive at a rank's experts, whose number is another one in every step."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.engine
from moe import GroupedExperts
from moe.config import Marks
from moe.experts import Rows
from moe.router import sorted_rows
from offload import init_chunk_handler, step_end
from offload.memory.arena import HostArena
from tests.unit.moe.mixtures import grads_of, offloading

EXPERTS, OWN, TOP_K, TOKENS = 32, 8, 4, 256
DIM, HIDDEN, LAYERS = 32, 16, 2
STEPS, WARM = 200, 20
GROWTH = 16 << 10


def arriving(step: int, layer: int) -> Tensor:
    """Of the rows that reach this rank, the expert: the rank has every fourth one, each token chooses four by
    Zipf's law."""
    generator = torch.Generator().manual_seed(1000 * step + layer)
    popularity = -torch.arange(1, EXPERTS + 1).log()
    noise = -torch.empty(TOKENS, EXPERTS).exponential_(generator=generator).log()
    chosen = (popularity + noise).topk(TOP_K, dim=1).indices.flatten()
    return chosen[chosen % (EXPERTS // OWN) == 0] // (EXPERTS // OWN)


class RankOfExperts(nn.Module):
    """What one of four ranks computes of a model's experts."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(GroupedExperts(OWN, DIM, HIDDEN, marks=marks) for _ in range(LAYERS))
        self.rows: list[int] = []

    def forward(self, step: int) -> Tensor:
        total = torch.zeros(())
        for number, layer in enumerate(self.layers):
            experts_S = arriving(step, number)
            self.rows.append(experts_S.numel())
            _, ends = sorted_rows(experts_S, OWN)
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(experts_S.numel(), DIM, generator=generator).requires_grad_()
            total = total + layer(x, Rows(ends)).square().mean()
        return total


def trained(model: RankOfExperts, steps: range, look: Any = None) -> dict[str, Tensor]:
    """The gradients of the last step, of two microbatches each."""
    for step in steps:
        model.zero_grad()
        losses = []
        for microbatch in range(2):
            init_chunk_handler()
            losses.append(model(2 * step + microbatch))
        for loss in reversed(losses):
            loss.backward()
        step_end()
        if look is not None:
            look(step)
    return grads_of(model)


def test_rows_that_change_every_step_pin_nothing_after_warm_up_and_refuse_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # a step lends many times what the arena grows by at once, as in a run whose steps lend gigabytes
    small = functools.partial(HostArena, slab_bytes=1 << 20, registration_bytes=GROWTH)
    monkeypatch.setattr(offload.engine, "HostArena", small)
    pinned: list[int] = []
    lent: list[int] = []
    refused: list[int] = []
    with offloading(max_spilling_bytes=None, min_offloaded_tensor_size=1024) as manager:
        model = RankOfExperts(Marks({"expert_fc1", "moe_act"}))

        def look(_step: int) -> None:
            pinned.append(manager.engine.arena.stats().held_bytes)
            lent.append(manager.stats.host_bytes_lent_peak)
            refused.append(manager.stats.refused)

        grads = trained(model, range(STEPS), look)
    assert len(set(model.rows)) > 50
    assert max(model.rows) > 1.15 * min(model.rows)
    assert set(pinned[WARM:]) == {pinned[-1]}
    assert sum(refused) == 0
    assert min(lent[WARM:]) > 15 * GROWTH
    expected = trained(RankOfExperts(Marks()), range(STEPS - 1, STEPS))
    assert all(torch.equal(grads[name], expected[name]) for name in expected)
    assert not math.isnan(sum(float(grad.sum()) for grad in grads.values()))
