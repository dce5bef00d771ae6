"""offload.compare on a GPU: peaks are the allocator's, what does not fit says so, and no bit has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offload
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

WIDTH, ROWS, BLOCKS = 1024, 16384, 6


def test_peaks_are_the_devices_and_a_limit_excludes_what_is_above_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        x = torch.randn(ROWS, WIDTH, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = [each.detach().clone() for each in model.parameters()]
    state = [value.clone() for each in optimizer.state.values() for value in each.values()]
    random = torch.cuda.get_rng_state()
    modes = [False, "checkpoint", "hidden_states", {"mode": "groups", "device_limit": "300MB"}]
    everything = offload.compare(model, step, modes=modes, budget_s=30)
    nothing, checkpoint, hidden, groups = everything.rows
    saved = BLOCKS * ROWS * 9 * WIDTH * 4  # in and out of a GELU, and a block's input
    assert nothing.peak_bytes > saved
    for row in (checkpoint, hidden, groups):
        assert row.peak_bytes < nothing.peak_bytes - saved // 3, str(everything)
    assert hidden.pinned_bytes > 0
    limit = (checkpoint.peak_bytes + nothing.peak_bytes) // 2
    table = offload.compare(model, step, within=limit, modes=modes[:2], budget_s=10)
    assert table.rows[0].why_not.startswith("its peak is above")
    assert table.best == {"mode": "checkpoint"}
    assert all(map(torch.equal, before, model.parameters()))
    now: list[Tensor] = [value for each in optimizer.state.values() for value in each.values()]
    assert all(map(torch.equal, state, now))
    assert torch.equal(random, torch.cuda.get_rng_state())
    offload.PipelineOffloadManager.close_instance()


def compared_on(rank: int, world: int, device: str) -> tuple[list[tuple[str, str]], dict[str, Any], bool]:
    """What replicas find: each mode and why it is none, the best, and whether each weight is as it was."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    ).to(device)
    replicas = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        replicas(torch.randn(ROWS // 8, WIDTH, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before = [each.detach().clone() for each in model.parameters()]
    modes = [False, "checkpoint", "hidden_states", {"mode": "hidden_states", "weights": "host"}]
    table = offload.compare(model, step, modes=modes, budget_s=10)
    same = all(map(torch.equal, before, model.parameters()))
    return [(str(row.arguments), row.why_not) for row in table.rows], table.best, same


@pytest.mark.gpus(2)
def test_replicas_over_nccl_agree_on_the_best(tmp_path: Path) -> None:
    found = run_ranks(compared_on, 2, tmp_path, "cuda", backend="cpu:gloo,cuda:nccl")
    assert found[0] == found[1]
    rows, best, same = found[0]
    assert [why_not for _, why_not in rows] == [""] * 4
    assert str(best) in dict(rows)
    assert same
