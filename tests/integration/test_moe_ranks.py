"""Mixtures whose experts several ranks share, over gloo: one launch of four ranks, each test looks at one
thing they report."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.moe_ranks import MODES, rank_main
from tests.once import run_ranks_once

WORLD = 4


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "moe-ranks", rank_main, WORLD)


@pytest.mark.req("S2-98", "S2-100")
@pytest.mark.parametrize("name", MODES)
def test_gradients_of_four_ranks_are_bitwise_those_without_offload(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for rank in ranks:
        assert rank["all"][name]["same"] == [True, True]
        assert rank["all"][name]["lent"] == 0
        assert (rank["all"][name]["spilled"] > 0) == (name != "checkpoint")


@pytest.mark.req("S2-98")
def test_gradients_of_four_ranks_are_nearly_those_of_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["all"]["far"] == []
        assert rank["all"]["gradients"][0] == rank["all"]["gradients"][1]
