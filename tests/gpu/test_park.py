"""park and wake on a GPU: bytes go back to the driver, bits and objects stay, and a live graph is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import offload
from offload.engine import OffloadEngine
from offload.errors import CaptureError, OffloadError

pytestmark = pytest.mark.gpu
WIDTH = 2048
"""A tensor has a segment of its own: smaller ones share theirs with the model that never parks."""


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(device="cuda")
    yield engine
    engine.close()


def in_training() -> tuple[nn.Sequential, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8))).cuda()
    return model, AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model: nn.Module, optimizer: AdamW, at: int) -> None:
    optimizer.zero_grad()
    x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(at)).cuda()
    model(x).square().mean().backward()
    optimizer.step()


def state_of(model: nn.Module, optimizer: AdamW) -> Iterator[Tensor]:
    for each in model.parameters():
        assert each.grad is not None
        yield from (each, each.grad, *optimizer.state[each].values())


@pytest.mark.usefixtures("clean_allocator")  # a cached segment of another test would be shared, too
def test_a_run_that_parks_has_its_bits_and_gives_its_memory_back(engine: OffloadEngine) -> None:
    (model, optimizer), (plain, other) = in_training(), in_training()
    torch.backends.cuda.matmul.allow_tf32 = False
    held: list[tuple[int, int]] = []
    for at in range(4):
        for each in ((model, optimizer), (plain, other)):
            step(*each, at)
        objects = [*map(id, state_of(model, optimizer))]
        reserved = torch.cuda.memory_reserved()
        # a test before this one may have left a graph, which reads none of this
        parked = offload.park(model, optimizer, engine=engine, ignore_graphs=True)
        nbytes = sum(kind.moved_bytes for kind in parked.report.kinds.values())
        assert parked.report.staying == []
        assert nbytes >= 16 * 8 * WIDTH * WIDTH
        assert reserved - torch.cuda.memory_reserved() >= nbytes * 9 // 10
        with pytest.raises(OffloadError, match="wake"):
            model(torch.ones(1, WIDTH, device="cuda"))
        held.append((engine.arena.held_bytes, torch.cuda.memory_allocated()))
        parked.wake("optimizer")
        parked.wake()
        assert [*map(id, state_of(model, optimizer))] == objects
        pairs = zip(state_of(model, optimizer), state_of(plain, other), strict=True)
        assert all(torch.equal(mine, its) for mine, its in pairs)
    assert held[1:] == [held[1]] * 3
    parked.close()


def test_a_graph_that_can_be_replayed_is_refused(engine: OffloadEngine) -> None:
    if engine.device.has_live_graphs():
        pytest.skip("a test before this one, in its process, has left a graph: run this file alone")
    model, optimizer = in_training()
    step(model, optimizer, 0)
    graph, x = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        x += 1
    with pytest.raises(CaptureError, match="a CUDA graph can be replayed"):
        offload.park(model, optimizer, engine=engine)
    step(model, optimizer, 1)
    offload.park(model, optimizer, engine=engine, ignore_graphs=True).close()
    graph.replay()
    del graph
    offload.park(model, optimizer, engine=engine).close()
