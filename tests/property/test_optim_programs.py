"""Random training programs: whatever a user does between two steps, in whatever split and under whatever
executor, the bits are torch's."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from offload import OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.optim import HybridDeviceOptimizer
from tests.unit.optim.rig import assert_same_bits, backward, net, weights

ACTIONS = (
    "step",
    "clipped step",
    "microbatch",
    "announced last microbatch",
    "zero",
    "zero in place",
    "lose a gradient",
    "scale gradients",
    "lr",
    "evaluate",
    "save and load state",
    "write weights",
    "look at state",
    "synchronize",
)


def play(actions: list[str], model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    ours = isinstance(optimizer, HybridDeviceOptimizer)
    for number, action in enumerate(actions):
        if action in ("step", "clipped step"):
            if action != "step":
                max_norm = (1e-3, 1e9)[number % 2]
                norm = (
                    optimizer.clip_grad_norm_(max_norm)
                    if ours
                    else nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                )
                assert norm.isfinite()
            optimizer.step()
            optimizer.zero_grad()
        elif action in ("microbatch", "announced last microbatch"):
            if ours:
                optimizer.last_microbatch = action != "microbatch"
            backward(model, number)
        elif action.startswith("zero"):
            optimizer.zero_grad(set_to_none=action == "zero")
        elif action == "lose a gradient":
            list(model.parameters())[number % 6].grad = None
        elif action == "scale gradients":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        elif action == "lr":
            optimizer.param_groups[0]["lr"] = 0.001 * (1 + number % 7)
        elif action == "evaluate":
            with torch.no_grad():
                model(torch.ones(1, 33))
        elif action == "save and load state":
            optimizer.load_state_dict(optimizer.state_dict())
        elif action == "write weights":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        elif action == "look at state" and ours:
            assert all(value.isfinite().all() for of in optimizer.state.values() for value in of.values())
        elif action == "synchronize" and ours:
            optimizer.synchronize_parameters()
    return weights(model, optimizer)


@pytest.mark.req("S3-32")
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(
        st.sampled_from((*ACTIONS, *("step", "microbatch", "announced last microbatch") * 3)),
        min_size=3,
        max_size=25,
    ),
    executor=st.sampled_from(get_args(ExecutorName)),
    seed=st.integers(0, 1000),
    share=st.sampled_from((0.0, 0.5, 1.0)),
    fraction=st.sampled_from((0.0, 0.5, 1.0)),
    attached=st.booleans(),
    overlap=st.booleans(),
    bucket=st.sampled_from((1024, 4096, 1 << 20)),
)
# nothing is stepped, so nothing waited for the copy of the first factor before the second took its place
@example(
    actions=["step", "clipped step", "clipped step"],
    executor="late",
    seed=0,
    share=0.5,
    fraction=0.5,
    attached=False,
    overlap=False,
    bucket=1024,
)
def test_a_random_program_has_no_hazard_and_torchs_bits(
    actions: list[str],
    executor: ExecutorName,
    seed: int,
    share: float,
    fraction: float,
    attached: bool,
    overlap: bool,
    bucket: int,
) -> None:
    reference, model = net(), net()
    expected = play(actions, reference, AdamW(reference.parameters(), lr=1e-2, fused=True))
    options: dict[str, Any] = {
        "cpu_share": share,
        "overlap_cpu_optimizer_d2h_h2d": overlap,
        "bucket_bytes": bucket,
        "fused": True,
    }
    engine = OffloadEngine(device=SimDevice(executor=executor, seed=seed))
    optimizer = HybridDeviceOptimizer(
        model.parameters(),
        fraction,
        lr=1e-2,
        engine=engine,
        model=model,
        overlap="forward" if attached and overlap else "step",
        **options,
    )
    assert_same_bits(play(actions, model, optimizer), expected)
    optimizer.close()
    assert engine.arena.stats().lent_bytes == 0
