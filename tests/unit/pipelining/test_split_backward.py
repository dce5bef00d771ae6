"""Zero-bubble schedules of torch's under a device limit, on one rank: bitwise gradients while plans with
measured times are tried and followed, whatever they leave between the halves of a split backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from offload import group_commit, group_start, offload_hooks
from offload.errors import OffloadError
from offload.groups import timed
from offload.groups.seen import StepClock
from offload.pipelining import OffloadPipelineStage
from offload.policy.actions import Action, Rates
from offload.policy.mixture import choose_keeps
from parallel.schedules import SCHEDULES, build_schedule
from tests.unit.groups.stack import build_manager, installed

pytestmark = pytest.mark.usefixtures("one_rank")

ROWS, WIDTH, MICROBATCHES, LAYERS = 8, 16, 4, 2
SAVE = ROWS * WIDTH * 4
STEPS = 5


class Block(nn.Module):
    """Two groups: a normalised linear, of whose saves a weight half reads a part, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner, self.outer = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = group_start(x, "inner")
        with offload_hooks():
            y = torch.tanh(self.inner(self.norm(x)))
        y = group_start(group_commit(y, "inner"), "outer")
        with offload_hooks():
            x = x + self.outer(y * y.sin())
        return group_commit(x, "outer")


def pipeline(name: str) -> tuple[Any, list[OffloadPipelineStage]]:
    torch.manual_seed(0)
    count = SCHEDULES[name].default_virtual_stages
    example = torch.empty(ROWS, WIDTH, device="meta", requires_grad=True)
    stages = [
        OffloadPipelineStage(
            nn.Sequential(*(Block() for _ in range(LAYERS))),
            index,
            count,
            torch.device("cpu"),
            input_args=example.detach() if index == 0 else example,
            output_args=example,
        )
        for index in range(count)
    ]
    schedule = build_schedule(
        SCHEDULES[name],
        stages,
        microbatches=MICROBATCHES,
        loss_fn=lambda output, target: (output - target).square().sum(),
    )
    stages[0].follow(schedule)
    return schedule, stages


def gradients(schedule: Any, stages: list[OffloadPipelineStage]) -> list[Tensor]:
    torch.manual_seed(1)
    rows = MICROBATCHES * ROWS
    schedule.step(torch.randn(rows, WIDTH), target=torch.zeros(rows, WIDTH), return_outputs=False)
    found = [parameter.grad for stage in stages for parameter in stage.submod.parameters()]
    for stage in stages:
        stage.submod.zero_grad(set_to_none=True)
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.req("S2-98", "S2-102")
@pytest.mark.parametrize(
    ("name", "saves"), [("zbv", 10), ("zbv", 16), ("interleavedzerobubble", 12), ("dualpipev", 12)]
)
def test_gradients_are_bitwise_those_without_offload_under_every_plan(
    name: str, saves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with installed(None):
        expected = gradients(*pipeline(name))
    followed: list[int | None] = []
    times = {Action(kind, s, m): 1e-4 for kind in "FBIW" for s in range(2) for m in range(MICROBATCHES)}
    monkeypatch.setattr(StepClock, "end_step", lambda self: times)
    monkeypatch.setattr(timed, "choose_keeps", partial(choose_keeps, max_trials=12))
    with installed(build_manager(device_limit_bytes=saves * SAVE)) as manager:
        manager.engine.rates = Rates(d2h_bytes_per_s=2e7, h2d_bytes_per_s=2e7)
        schedule, stages = pipeline(name)
        for _ in range(STEPS):
            found = gradients(schedule, stages)
            assert len(found) == len(expected)
            assert all(map(torch.equal, expected, found))
            followed.append(manager.engine.limits.half_room_bytes)
            stats = manager.step_end()
            assert stats.device_bytes_peak <= saves * SAVE
            assert stats.spilled > 0
    assert followed[0] is None
    assert followed[-1] is not None, "no plan was made from times"


@pytest.mark.skipif(hasattr(PipelineStage, "register_forward_context"), reason="torch 2.15 loses none")
def test_a_function_that_torch_lost_between_the_halves_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 and 2.12 do, which give no more than the name of an attribute."""

    def lost(*_given: Any, **_named: Any) -> None:
        raise RuntimeError("Attribute '_input_metadata' is invalid for this instance of _C._FunctionBase")

    monkeypatch.setattr(PipelineStage, "backward_weight_one_chunk", lost)
    with installed(None), pytest.raises(OffloadError, match=r"stage \d of 2: torch .* update to torch 2\.13"):
        gradients(*pipeline("zbv"))
