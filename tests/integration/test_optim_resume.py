"""State dicts of the hybrid optimizer across two ranks: whichever way they are saved, a run goes on with the
same bits, in any split, and torch's AdamW takes over from it and it from torch's.
"""

from __future__ import annotations

import pytest

from tests.once import run_ranks_once
from tests.optim_resume import resumed

PAIRS = (
    ("torch's", "half"),
    ("half", "torch's"),
    ("half", "half"),
    ("half", "streamed"),
    ("streamed", "cpu"),
    ("cpu", "on the device"),
    ("on the device", "streamed"),
    ("apart", "streamed"),
)
WAYS = ("whole", "whole on rank 0", "shards", "flat", "files", "own")
RUNS = {
    f"{source} to {target}, {WAYS[place % len(WAYS)]}": (source, target, WAYS[place % len(WAYS)])
    for at, (source, target) in enumerate(PAIRS)
    for place in (at, at + 3)
}
"""Two ways for each pair, and each way for two pairs and more."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """By rank, by run."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    return run_ranks_once(tmp_path_factory, "optim-resume", resumed, 2, folder, RUNS, "cpu")


@pytest.mark.req("S3-40")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_over_shards_goes_on_with_the_same_bits(seen: list[dict[str, list[str]]], name: str) -> None:
    for rank in seen:
        assert rank[name] == []
