"""Random training programs with steps that start in the backward: whatever undoes them, weights, state and
counts have torch's bits."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.optim import AdamW

from offload import OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.optim import HybridDeviceOptimizer
from tests.property.test_optim_programs import ACTIONS, play
from tests.unit.optim.rig import assert_same_bits, net, room_for_all

OFTEN = ("step", "clipped step", "microbatch", "announced last microbatch", "announced last microbatch")


@pytest.mark.req("S3-32")
@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(st.sampled_from((*ACTIONS, *OFTEN * 2)), min_size=4, max_size=20),
    executor=st.sampled_from(get_args(ExecutorName)),
    seed=st.integers(0, 1000),
    share=st.sampled_from((0.0, 0.5)),
    fraction=st.sampled_from((0.5, 1.0)),
    bucket=st.sampled_from((1024, 4096)),
    quiet=st.integers(0, 2),
)
def test_a_random_program_whose_steps_may_be_undone_has_no_hazard_and_torchs_bits(
    actions: list[str],
    executor: ExecutorName,
    seed: int,
    share: float,
    fraction: float,
    bucket: int,
    quiet: int,
) -> None:
    reference, model = net(), net()
    plain = AdamW(reference.parameters(), lr=1e-2, fused=True)
    expected = play(actions, reference, plain)
    engine = OffloadEngine(device=SimDevice(executor=executor, seed=seed))
    optimizer = HybridDeviceOptimizer(
        model.parameters(),
        fraction,
        lr=1e-2,
        cpu_share=share,
        bucket_bytes=bucket,
        fused=True,
        engine=engine,
        model=model,
        step_in_backward="undoable",
    )
    room_for_all(optimizer).quiet_steps = quiet
    assert_same_bits(play(actions, model, optimizer), expected)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        for key, value in plain.state.get(theirs, {}).items():
            assert_same_bits([optimizer.state[mine][key].reshape(-1)], [value.reshape(-1)])
    optimizer.close()
    assert engine.arena.stats().lent_bytes == 0
