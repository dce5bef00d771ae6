"""Mode "auto" where a model is spread over ranks: those that communicate inside a block follow one plan,
others their own, and each gradient has the bits of a run without.

Two gloo ranks run all cases, once; each test looks at one thing that they report.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.integration.auto_ranks import (
    COMMUNICATING,
    INSIDE,
    PLANS,
    SCHEDULES,
    SPREAD,
    TENSOR_PARALLEL,
    TOTALS,
    rank_main,
)
from tests.once import run_ranks_once


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "auto-ranks", rank_main, 2)


@pytest.mark.parametrize("spread", SPREAD)
def test_a_model_that_is_spread_keeps_its_bits_whatever_its_ranks_choose(
    two_ranks: list[dict[str, Any]], spread: str
) -> None:
    """Each plan recomputes on one rank what it keeps on the other, and the next plan the other way round:
    under DDP and FSDP2, whose hooks communicate and not the blocks, both are followed."""
    for rank in two_ranks:
        assert rank[spread]["bitwise"]
        assert rank[spread]["followed"] is not None


@pytest.mark.parametrize("spread", COMMUNICATING)
def test_ranks_that_communicate_in_a_block_follow_the_plan_of_the_one_with_least_room(
    two_ranks: list[dict[str, Any]], spread: str
) -> None:
    first, second = (rank[spread] for rank in two_ranks)
    assert first["chosen"] == []
    assert len(second["chosen"]) == PLANS
    assert first["followed"] == second["followed"] == second["chosen"][-1]


@pytest.mark.parametrize("spread", [TENSOR_PARALLEL, INSIDE])
def test_a_block_whose_collective_is_functional_has_levels_on_every_rank(
    two_ranks: list[dict[str, Any]], spread: str
) -> None:
    """Such a collective writes its output until it is waited for. By chance one rank's profile took that for
    a write by an unknown kernel, and its block was not recomputed."""
    planned = [level for levels in two_ranks[1][spread]["chosen"] for own in levels.values() for level in own]
    assert {0, 1} <= set(planned)


@pytest.mark.parametrize("spread", [name for name in SPREAD if name not in COMMUNICATING])
def test_ranks_whose_blocks_do_not_communicate_plan_alone(
    two_ranks: list[dict[str, Any]], spread: str
) -> None:
    for rank in two_ranks:
        assert len(rank[spread]["chosen"]) == PLANS
        assert rank[spread]["followed"] == rank[spread]["chosen"][-1]


def test_ranks_that_communicate_in_a_block_and_do_not_agree_go_wrong(two_ranks: list[dict[str, Any]]) -> None:
    """Why they agree: a collective of one rank's recompute waits for none of the other, or meets another."""
    assert all(rank["alone"] != "right" for rank in two_ranks)


def test_ranks_that_communicate_run_as_many_blocks_plain_as_fit_the_fullest_of_them(
    two_ranks: list[dict[str, Any]],
) -> None:
    first, second = (dict(rank["by rule"]) for rank in two_ranks)
    refused = first.pop("refused"), second.pop("refused")
    assert first == second
    assert "a step takes more on another rank with every block recomputed" in refused[0], (
        "both raise, or one waits"
    )
    assert re.search(r"a step takes [\d.]+ kB with every block recomputed", refused[1])
    assert 0 < first["rule"] < first["all fits"], (first, second)
    assert first["bitwise"]


@pytest.mark.parametrize("stage", ["torch", "ours"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_of_a_rank_share_one_plan_and_keep_their_bits(
    two_ranks: list[dict[str, Any]], name: str, stage: str
) -> None:
    """Each rank has a plan of its own, for all of its stages: two would set one device's limit in turns."""
    for at, rank in enumerate(two_ranks):
        case = rank[f"{name} {stage}"]
        assert case["bitwise"]
        assert case["plans"] >= PLANS
        assert len(case["stages planned"]) == case["stages"]
        assert case["limit"] == round(TOTALS[at] * 0.985)
        assert case["alive"] == 0
