"""park and wake on two ranks: DistributedDataParallel, FSDP2, checkpoints, one budget, and a rank that is
killed while both are parked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.park_ranks import main
from tests.ranks import run_ranks


def test_ranks_park_and_wake_with_their_bits_and_outlive_one_that_is_killed(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    with pytest.raises(AssertionError) as caught:  # of the last barrier, or the killed one's exit code
        run_ranks(main, 2, tmp_path / "ranks", str(tmp_path))
    assert (tmp_path / "outlived").exists(), str(caught.value)
