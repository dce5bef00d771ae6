"""Gradients on the host under DistributedDataParallel, and reduced by hand; and what compares modes there.
Two gloo ranks run all cases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.integration.gradient_ranks import BUILDS, rank_main
from tests.once import run_ranks_once


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "gradient-ranks", rank_main, 2)


@pytest.mark.parametrize("name", [*BUILDS, "by hand"])
def test_the_whole_sum_of_the_microbatches_is_reduced(two_ranks: list[dict[str, Any]], name: str) -> None:
    for rank in two_ranks:
        case = rank[name]
        assert case["bitwise"]
        if name == "bucket views":  # once they are reduced, their memory is the buckets'
            assert case["out_bytes"] == 2 * case["host_bytes"]
        elif name == "unused":  # by the last backward, whose forward skips a block
            assert case["out_bytes"] > 2 * case["host_bytes"]
        else:
            assert case["out_bytes"] >= 3 * case["host_bytes"]


def test_a_collective_that_would_outlive_a_weights_bytes_is_refused(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["refused"].startswith("a collective of torch.distributed on layers.0.up.weight")


def test_ranks_that_compare_take_as_many_steps_and_find_the_same(two_ranks: list[dict[str, Any]]) -> None:
    """A rank once stopped by its own clock, or where `apply` refused, while the other waited in a step."""
    for plain, refused, recomputed in (rank["compared"] for rank in two_ranks):
        assert "absent" in refused.why_not
        assert [plain.why_not, recomputed.why_not] == ["", ""]
    one, other = ([replace(row, arguments={}) for row in rank["compared"]] for rank in two_ranks)
    assert one == other
