"""offload.compare on a GPU: peaks are the allocator's, what does not fit says so, and no bit has changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import offload

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
