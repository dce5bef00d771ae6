"""Mixtures whose experts several GPUs share over NCCL: gradients with offload, bit for bit those without.

The cases are those of tests/integration/test_moe_ranks.py: two or four ranks share the experts, with and
without stages, and each rank streams its own experts' weights.

pytest -m gpu -n 0 tests/gpu/test_moe_ranks.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.integration.moe_ranks import (
    CONFIG,
    MODES,
    STAGED,
    beside_stages,
    experts_on_the_host,
    new_groups,
    shared_by_all,
)
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu

WORLDS = [pytest.param(world, marks=pytest.mark.gpus(world)) for world in (2, 4)]


def shared_on(rank: int, world: int, device: str) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    found = {
        "all": shared_by_all(rank, dist.group.WORLD, device),
        "weights": experts_on_the_host(rank, device),
    }
    if world == 4:
        pair, across = new_groups(rank, [[0, 1], [2, 3]]), new_groups(rank, [[0, 2], [1, 3]])
        for group in (pair, across):  # its communicator: made by all of its ranks at once
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        found["stages"] = beside_stages(rank, pair, across, device)
    return found


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of one launch of so many ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(shared_on, request.param, folder, "cuda", backend="cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
def test_gradients_of_ranks_that_share_experts_are_bitwise_those_without_offload(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["all"][name]["same"] == [True, True]
        assert (rank["all"][name]["spilled"] > 0) == (name != "checkpoint")


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
def test_gradients_of_ranks_that_share_experts_are_nearly_those_of_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["all"]["far"] == []
        assert rank["all"]["gradients"][0] == rank["all"]["gradients"][1]


@pytest.mark.parametrize("ranks", WORLDS, indirect=True)
def test_each_rank_streams_its_own_experts(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["weights"]["same"] == [True] * 4
        assert rank["weights"]["streamed"] == 2 * CONFIG.layers


@pytest.mark.parametrize("name", STAGED)
@pytest.mark.parametrize("ranks", WORLDS[1:], indirect=True)
def test_two_stages_that_two_ranks_share_have_their_bits(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank["stages"][name]
        assert found["same"]
        assert all(found["same"])
        assert found["far"] == []
        assert found["spilled"] > 0
