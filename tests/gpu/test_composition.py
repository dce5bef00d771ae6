"""Offload beside checkpoints and autocast on one GPU, and beside FSDP2 and tensor parallel over NCCL on two:
the same bits, and no weight leaves. The cases are those of tests/integration/test_composition.py.
"""

from __future__ import annotations

import pytest
import torch

from tests.composition import ALONE, CASES, Case, Compared, check, check_tables, compared, run_alone
from tests.gpu.workbench import DEVICE
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Compared]]:
    """By rank, by case."""
    return run_ranks(compared, 2, tmp_path_factory.mktemp("ranks"), CASES, "cuda", backend="nccl")


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_and_activations_leave_but_no_weight(
    seen: list[dict[str, Compared]], name: str
) -> None:
    for rank in seen:
        check(name, CASES[name], rank[name])


@pytest.mark.gpus(2)
def test_tables_hold_the_bytes_of_activations_alone(seen: list[dict[str, Compared]]) -> None:
    alone = run_alone(Case("nothing"), torch.device("cuda", torch.cuda.current_device()))
    for rank in seen:
        check_tables(rank, alone)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("name", ALONE)
def test_checkpoints_in_and_around_groups_with_accumulated_microbatches(name: str) -> None:
    check(name, ALONE[name], run_alone(ALONE[name], torch.device(DEVICE.type, torch.cuda.current_device())))
