"""`offload.apply` on models that two GPUs share over NCCL: replicated by DDP, sharded by FSDP2, in parts.

The cases are those of tests/integration/test_apply_ranks.py, in more modes.

pytest -m gpu -n 0 tests/gpu/test_apply_ranks.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.integration.apply_ranks import MODES, SPREADS, spread_over
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2)]

ALL_MODES = (*MODES, "legacy", "selective", "auto")


def spread_on(rank: int, world: int, device: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    mesh = init_device_mesh(device, (world,))
    return {spread: spread_over(spread, rank, mesh, ALL_MODES) for spread in SPREADS}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(spread_on, 2, folder, "cuda", backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", ALL_MODES)
@pytest.mark.parametrize("spread", SPREADS)
def test_a_model_that_is_spread_has_its_bits_on_every_gpu(
    seen: list[dict[str, Any]], spread: str, mode: Any, when: str
) -> None:
    """Applied before it is spread, and after."""
    for rank in seen:
        case = rank[spread][f"{mode} {when}"]
        assert case["bitwise"]
        assert case["alive"] == 0
        # the other two may recompute or keep all
        assert case["spill_bytes"] > 0 or mode in ("selective", "auto")
