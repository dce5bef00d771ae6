"""The link of two GPUs, measured while both copy and sum over NCCL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from offload import OffloadConfig, configure
from parallel import host
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu


def measured(rank: int, world: int) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    manager = configure(OffloadConfig(), device=f"cuda:{rank}", print_summary=False)
    group = dist.group.WORLD
    assert group is not None
    assert host._collectives(manager, group) is not None  # type: ignore[arg-type]
    host.reserve_host_together(manager, 128 << 20, group)  # type: ignore[arg-type]
    rates = manager.engine.rates
    assert rates is not None
    return {"d2h": rates.d2h_bytes_per_s, "h2d": rates.h2d_bytes_per_s, "both": rates.duplex_bytes_per_s}


@pytest.mark.gpus(2)
def test_two_ranks_measure_the_link_beside_their_collectives(tmp_path: Path) -> None:
    for rates in run_ranks(measured, 2, tmp_path, backend="cpu:gloo,cuda:nccl"):
        assert all(rate > 1e9 for rate in rates.values()), rates
