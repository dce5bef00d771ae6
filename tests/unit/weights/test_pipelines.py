"""Stages of a pipeline whose weights stream: any schedule of torch's, its split backwards included."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import offload
from offload.marks import existing_manager
from offload.pipelining import OffloadPipelineStage
from tests.inside import impose, streaming_of, streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import BLOCK_BYTES, ROWS, WIDTH, Block

MICROBATCHES = 4


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def one_rank(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with installed(build_manager()), streams_from(WIDTH * WIDTH):
        yield
    torch.distributed.destroy_process_group()


def run(parts: list[nn.Module], stage: Any, schedule: Any) -> None:
    example = torch.randn(ROWS, WIDTH, requires_grad=True)
    stages = [
        stage(part, index, 2, torch.device("cpu"), input_args=(example,), output_args=(example,))
        for index, part in enumerate(parts)
    ]
    trained = [p for part in parts for p in part.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    steps = schedule(stages, MICROBATCHES, loss_fn=lambda y, target: (y - target).square().mean())
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        x, target = (torch.randn(MICROBATCHES * ROWS, WIDTH, generator=generator) for _ in range(2))
        steps.step(x, target=target)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="stages of one rank send to it, which an older gloo does not"
)
@pytest.mark.parametrize(
    ("mode", "room"), [(None, 0), ("groups", 0), ("hidden_states", 0), ("hidden_states", 1 << 20)]
)
@pytest.mark.parametrize(
    "schedule", [ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble]
)
def test_a_schedule_has_the_weights_that_torchs_stages_get(schedule: Any, mode: Any, room: int) -> None:
    """room: bytes for what an I that recomputes leaves for its W. Aliases of the weights were left, too, and
    so all of the stage's stayed on the device."""
    torch.manual_seed(0)
    manager = existing_manager()
    impose(manager.engine, again_room_bytes=room)
    parts: list[nn.Module] = [Part(), Part()]
    if room:  # behind a block that no W reads none leaves anything
        nn.ModuleList(parts).requires_grad_(True)
    plain = copy.deepcopy(parts)
    handles = [offload.apply(part, mode, weights="host") for part in parts]
    run(parts, OffloadPipelineStage, schedule)
    run(plain, PipelineStage, schedule)
    first, last = (streaming_of(handle).residency for handle in handles)
    assert first.present_bytes_peak == last.present_bytes_peak == 2 * BLOCK_BYTES
    assert last.in_bytes <= first.in_bytes  # whose backward is always whole
    for handle in handles:
        handle.remove()
    for mine, its in zip(parts, plain, strict=True):
        assert all(map(torch.equal, mine.parameters(), its.parameters()))
