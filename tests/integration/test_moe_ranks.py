"""Mixtures whose experts several ranks share, over gloo: one launch of four ranks, each test looks at one
thing they report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.moe_ranks import CONFIG, MODES, STAGED, TOKENS, failing_main, rank_main
from tests.once import run_ranks_once
from tests.ranks import run_ranks

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


def test_each_of_four_ranks_streams_its_own_experts(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["weights"] == {"same": [True] * 4, "streamed": 2 * CONFIG.layers, "lent": 0}


def test_ranks_that_come_late_and_copies_that_end_whenever_change_no_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["any order"] == {name: [True, True] for name in ("early", "random", "clock")}


@pytest.mark.req("S2-98")
def test_gradients_of_four_ranks_are_nearly_those_of_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["all"]["far"] == []
        assert rank["all"]["gradients"][0] == rank["all"]["gradients"][1]


def test_a_recompute_that_replays_sends_nothing(ranks: list[dict[str, Any]]) -> None:
    rows_and_weights_there_and_rows_back = 3
    for rank in ranks:
        sent = rank["sent"]
        plain = {"all_to_all_single": rows_and_weights_there_and_rows_back, "all_gather_into_tensor": 0}
        assert sent["plain"] == plain
        assert sent["recomputed"]["all_to_all_single"] > plain["all_to_all_single"]
        assert sent["recomputed"]["all_gather_into_tensor"] == 1
        assert sent["replayed"] == plain


@pytest.mark.parametrize("case", ["uneven", "one expert"])
def test_ranks_without_tokens_or_without_rows_take_part(ranks: list[dict[str, Any]], case: str) -> None:
    for rank, tokens in zip(ranks, TOKENS, strict=True):
        assert rank[case] == {"near": True, "far": [], "rows": tokens * CONFIG.top_k}


def test_experts_beside_data_parallelism(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = dict(rank["ddp"])
        assert found.pop("far") == []
        biases = found.pop("biases")
        assert biases == [biases[0]] * WORLD
        assert len(found) == 2
        assert all(found.values())


@pytest.mark.req("S2-100")
def test_the_shared_expert_computes_while_rows_are_under_way(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        order = rank["order"]
        # rows and their weights set off; the shared expert; both are read; the experts; and back
        assert order == ["all_to_all_single"] * 2 + ["silu"] + ["read"] * 2 + ["silu", "all_to_all_single"]


@pytest.mark.req("S3-61")
def test_nothing_that_is_under_way_is_saved(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["kinds"] == {"Tensor", "Parameter"}


@pytest.mark.req("S3-61")
def test_experts_beside_sharded_parameters(ranks: list[dict[str, Any]]) -> None:
    """Gathered weights have no storage between their uses, and rows that are under way none of their own: the
    hooks leave both alone."""
    for rank in ranks:
        found = dict(rank["fsdp"])
        assert found.pop("far") == []
        saved = {name: found.pop(name) for name in list(found) if name.startswith("saved")}
        assert len(found) == len(saved) == 3
        assert all(found.values())
        for sharded, unsharded in saved.values():
            assert sharded == unsharded > 0


@pytest.mark.parametrize("name", STAGED)
def test_experts_beside_pipeline_stages(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found = rank["stages"][name]
        assert found["same"]
        assert all(found["same"])
        assert found["far"] == []
        assert found["lent"] == 0
        assert found["spilled"] > 0


def test_modes_that_recompute_keep_the_ranks_together(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["apply"] == {"hidden_states": True, "selective": True, "auto": True}


def test_every_rank_ends_with_the_cause_when_one_fails(tmp_path: Path) -> None:
    begun = time.monotonic()
    with pytest.raises(AssertionError) as raised:
        run_ranks(failing_main, 2, tmp_path)
    assert time.monotonic() - begun < 60
    said = str(raised.value)
    assert "ValueError: an expert of rank 1 cannot go on" in said
    assert "rank 0:\nTraceback" in said  # it was not killed: it noticed
