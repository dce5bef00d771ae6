"""The hybrid optimizer on two GPUs over NCCL: replicas and FSDP2's shards, with copies that are slow where it
hurts, and state dicts.

The cases are run as in tests/integration/test_optim_ranks.py. What the host steps is compared with the same
split without overlap, since its kernel is another than the GPU's.

pytest -m gpu -n 0 tests/gpu/test_optim_ranks.py
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.optim_ranks import Case, Seen, trained
from tests.optim_resume import resumed
from tests.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.gpus(2)]

STREAMED: dict[str, Any] = {"cpu_share": 0.0}
BOTH: dict[str, Any] = {"cpu_share": 0.5}
UNOVERLAPPED: dict[str, Any] = {**BOTH, "overlap_cpu_optimizer_d2h_h2d": False}
CASES = {
    "replicas, streamed, as torch's": Case(
        over="replicas", options=STREAMED, microbatches=2, bucket_view=True, slow=True
    ),
    "replicas, both": Case(
        over="replicas", options=BOTH, expected=UNOVERLAPPED, microbatches=2, kept=True, slow=True
    ),
    "shards, streamed, as torch's": Case(
        over="shards", options=STREAMED, microbatches=2, clip="own", slow=True
    ),
    "shards, half, clipped": Case(
        over="shards",
        options={**BOTH, "offload_fraction": 0.5},
        expected={**UNOVERLAPPED, "offload_fraction": 0.5},
        clip="argument",
        slow=True,
    ),
    "shards, both, fetched ahead": Case(
        over="shards", options=BOTH, expected=UNOVERLAPPED, microbatches=2, prefetch=True, slow=True
    ),
    "shards, both, in bfloat16": Case(
        over="shards", options=BOTH, expected=UNOVERLAPPED, mixed=True, reshard=False, slow=True
    ),
    "shards, a layer called alone": Case(
        over="shards", options=BOTH, expected=UNOVERLAPPED, called_alone=True, slow=True
    ),
    "shards, an event for FSDP2": Case(
        over="shards", options=BOTH, expected=UNOVERLAPPED, post_optim=True, slow=True
    ),
    "shards, stepped in the backward": Case(
        over="shards",
        options={**BOTH, "overlap": "backward"},
        expected=UNOVERLAPPED,
        microbatches=2,
        slow=True,
    ),
    "shards, bad on one rank, scaled": Case(
        over="shards", options=BOTH, expected=UNOVERLAPPED, scaler=True, bad=True, slow=True
    ),
}
RUNS = {
    f"{split}, {way}": (split, split, way)
    for split in ("half", "streamed")
    for way in ("whole", "shards", "own")
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Seen]]:
    """By rank, by case."""
    return run_ranks(trained, 2, tmp_path_factory.mktemp("ranks"), CASES, "cuda", backend="nccl")


@pytest.mark.parametrize("name", CASES)
def test_the_weights_have_the_expected_bits_on_every_rank(seen: list[dict[str, Seen]], name: str) -> None:
    for rank in seen:
        assert rank[name].differing == []
        assert rank[name].norms[0] == rank[name].norms[1]
        assert rank[name].scales[0] == rank[name].scales[1]
    assert seen[0][name].bits == seen[1][name].bits


@pytest.fixture(scope="module")
def gone_on(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """By rank, by run."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(resumed, 2, folder, str(folder), RUNS, "cuda", backend="nccl")


@pytest.mark.parametrize("name", RUNS)
def test_a_run_over_shards_goes_on_with_the_same_bits(gone_on: list[dict[str, list[str]]], name: str) -> None:
    for rank in gone_on:
        assert rank[name] == []
