"""Offload beside FSDP2, tensor parallel, checkpoints, autocast and accumulation, on two gloo ranks: the same
bits, and no weight leaves.

The ranks are started once for all cases. The same cases on GPUs are in tests/gpu/test_composition.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.composition import ALONE, CASES, Case, Compared, check, check_tables, compared, run_alone
from tests.once import run_ranks_once
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Compared]]:
    """By rank, by case."""
    return run_ranks_once(tmp_path_factory, "composition", compared, 2, CASES, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_and_activations_leave_but_no_weight(
    seen: list[dict[str, Compared]], name: str
) -> None:
    for rank in seen:
        check(name, CASES[name], rank[name])


def test_tables_hold_the_bytes_of_activations_alone(seen: list[dict[str, Compared]]) -> None:
    alone = run_alone(Case("nothing"), torch.device("cpu"))
    for rank in seen:
        check_tables(rank, alone)


@pytest.mark.parametrize("name", ALONE)
def test_checkpoints_in_and_around_groups_with_accumulated_microbatches(name: str) -> None:
    check(name, ALONE[name], run_alone(ALONE[name], torch.device("cpu")))


# -- the launcher --------------------------------------------------------------------------------------------
def fails_on_rank_1(rank: int, world: int) -> int:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    torch.distributed.barrier()  # the other one never comes
    return rank


def test_a_rank_that_fails_ends_the_others_and_its_traceback_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1:\n(?s:.*)ValueError: rank 1 has had enough"):
        run_ranks(fails_on_rank_1, 2, tmp_path)
