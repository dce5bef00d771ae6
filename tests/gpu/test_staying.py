"""On a GPU, tensors that a plan keeps step after step have the bits of a run without offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.workbench import Program, assert_same_bits, build_manager

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

PLANS: dict[str, dict[str, Any]] = {
    "keeps all": {"activation_offload_fraction": 0.0},
    "keeps half": {
        "activation_offload_fraction": 0.5,
        "max_spilling_bytes": 256 << 10,
        "max_restoring_bytes": 256 << 10,
    },
    "keeps to a limit": {"device_limit_bytes": 6 << 20, "piece_bytes": 64 << 10},
}


@pytest.mark.parametrize("streams", [0, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_what_a_plan_keeps_has_the_same_bits_and_is_counted_alike_in_each_step(
    plan: str, streams: int
) -> None:
    program = Program(dtype=torch.bfloat16, steps=6, streams=streams)
    with_offload = program.run(build_manager(**PLANS[plan]))
    assert_same_bits(program.run().gradients, with_offload.gradients)
    assert with_offload.refused == 0
    if plan == "keeps all":
        counts = [(stats.saved, stats.device_bytes_peak) for stats in with_offload.stats]
        assert counts[2:] == [counts[1]] * 4
    if plan == "keeps to a limit" and not streams:
        assert max(stats.device_bytes_peak for stats in with_offload.stats) <= 6 << 20
