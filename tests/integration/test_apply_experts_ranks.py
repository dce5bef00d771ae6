"""`offload.apply`, and torchtitan's keys, on a mixture of transformers that is replicated or sharded, by
FSDP2 with its parameters on the host, too. Its router says something else in each recompute.

Two gloo ranks run all cases, once.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.once import run_ranks_once

pytest.importorskip("transformers")

from tests.integration.experts_ranks import NO_TITAN, SPREADS, TITAN, rank_main


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "apply-experts-ranks", rank_main, 2)


@pytest.mark.req("S3-54", "S3-61")
@pytest.mark.parametrize("mode", [*NO_TITAN, *TITAN])
@pytest.mark.parametrize("spread", SPREADS)
def test_a_mixture_that_is_spread_keeps_its_bits(
    two_ranks: list[dict[str, Any]], spread: str, mode: Any
) -> None:
    for rank in two_ranks:
        case = rank[f"{spread}, {mode}"]
        assert case["bitwise"]
        assert (case["recomputed"] > 0) == (mode in ("hidden_states", "selective", "auto", "both"))
        assert (case["spill_bytes"] > 0) == (mode != "checkpoint")
        assert case["alive"] == 0
