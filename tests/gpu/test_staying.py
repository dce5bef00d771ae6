"""On a GPU, tensors that a plan keeps step after step: what is taken for known has the bits of a run without
offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.saved.staying import StayingSaves
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
def test_what_a_plan_keeps_has_the_same_bits_when_it_is_known(
    plan: str, streams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = 0
    close = StayingSaves.close

    def counting(self: StayingSaves) -> None:
        nonlocal known
        if self._saves is not None:
            known += sum(save is not None for save in self._saves[: len(self._handles)])
        close(self)

    monkeypatch.setattr(StayingSaves, "close", counting)
    program = Program(dtype=torch.bfloat16, steps=6, streams=streams)
    with_offload = program.run(build_manager(**PLANS[plan]))
    assert_same_bits(program.run().gradients, with_offload.gradients)
    assert known > 0
    assert with_offload.refused == 0
    if plan == "keeps all":
        counts = [(stats.saved, stats.device_bytes_peak) for stats in with_offload.stats]
        assert counts[2:] == [counts[1]] * 4, "known in the last four steps, judged in the one before"
    if plan == "keeps to a limit" and not streams:
        assert max(stats.device_bytes_peak for stats in with_offload.stats) <= 6 << 20
