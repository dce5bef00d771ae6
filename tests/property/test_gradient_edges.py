"""Every ordering note that gradients on the host rest on: a loop that needs its edge, and the same loop
without it, which must fail.

Bytes of gradients cross by the same code as those of weights, so four of the notes are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.device.sim import ExecutorName, SimDevice
from offload.transfer.copier import Priority
from tests.inside import gradients_of
from tests.property.edges import Edge, devices, edge_titles, noted_titles
from tests.property.test_weight_edges import managed, net

pytestmark = pytest.mark.usefixtures("small_streams")

SOURCE = Path(__file__).resolve().parents[2] / "offload" / "weights" / "gradients.py"
MICROBATCHES, STEPS = 3, 3


def backward(model: nn.Module, number: int) -> None:
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(number))
    model(x).square().mean().backward()


def train(model: nn.Module) -> list[Tensor]:
    """Norms of each step's gradients, and the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(STEPS):
        for number in range(MICROBATCHES):
            backward(model, MICROBATCHES * step + number)
        for parameter in model.parameters():
            grad_of(parameter).mul_(0.5)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [*norms, *(parameter.detach() for parameter in model.parameters())]


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its)


def accumulated(device: SimDevice) -> None:
    model = net()
    with managed(device):
        handle = offload.apply(model, gradients="host")
        found = train(model)
        assert gradients_of(handle).figures.in_bytes
        handle.remove()
    check(found, train(net()))


def on_two_lanes(device: SimDevice) -> None:
    """A backward on each of two lanes in turn, the second after gradients were cleared."""
    model, plain = net(), net()
    with managed(device):
        handle = offload.apply(model, gradients="host")
        lanes = device.compute, device.new_compute_lane("side")
        for number in range(6):
            mine, other = lanes[number % 2], lanes[1 - number % 2]
            with device.use_lane(mine):
                device.wait(mine, device.record(other), "test")
                for each in (model, plain):
                    if number % 3 == 0:
                        each.zero_grad()
                    backward(each, number)
        device.wait(lanes[0], device.record(lanes[1]), "test")
        check([grad_of(p).clone() for p in model.parameters()], [grad_of(p) for p in plain.parameters()])
        handle.remove()


def grad_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def fetched_by_another_lane(device: SimDevice) -> None:
    """A lane that has waited for nothing drops a gradient on its way out, and fetches it back."""
    model = net()
    with managed(device):
        handle = offload.apply(model, gradients="host")
        backward(model, 0)
        residency = gradients_of(handle).residency
        block = next(block for block in residency.blocks if block.present)
        with device.use_lane(device.new_compute_lane("side")):
            residency.drop(block)
            # beside one that left long ago, by one piece
            other = next(each for each in residency.blocks if not each.present and each is not block)
            assert residency.load((other, block), Priority.SPECULATIVE)
        handle.remove()


def cleared_while_it_comes(device: SimDevice) -> None:
    """A gradient comes already for the next backward when it is cleared, and another lane makes a new one."""
    model, plain = net(), net()
    with managed(device):
        handle = offload.apply(model, gradients="host")
        backward(model, 0)
        residency = gradients_of(handle).residency
        block = next(block for block in residency.blocks if not block.present and block.weights)
        assert residency.load((block,), Priority.SPECULATIVE)
        model.zero_grad()
        side = device.new_compute_lane("side")
        with device.use_lane(side):
            for each in (model, plain):
                backward(each, 1)
        device.wait(device.compute, device.record(side), "test")
        check([grad_of(p).clone() for p in model.parameters()], [grad_of(p) for p in plain.parameters()])
        handle.remove()


EDGES = {
    "weights room": Edge(accumulated, "allocator reuse", ("h2d", "compute")),
    "weights here": Edge(accumulated, "RAW", ("compute", "h2d")),
    "weights out": Edge(accumulated, "RAW", ("d2h", "compute")),
    "weights home": Edge(fetched_by_another_lane, "RAW", ("h2d", "d2h")),
    "weights gone": Edge(accumulated, "allocator reuse", ("compute", "d2h")),
    "gradients home": Edge(cleared_while_it_comes, "WAR", ("d2h", "h2d")),
    "gradients sent": Edge(accumulated, "WAR", ("compute", "d2h")),
}
TITLES = tuple(EDGES)


@pytest.mark.req("S3-81")
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("run", [accumulated, on_two_lanes, fetched_by_another_lane, cleared_while_it_comes])
def test_with_all_its_edges_a_loop_has_no_hazard_and_the_bits_of_torchs(
    run: Callable[[SimDevice], None], executor: ExecutorName
) -> None:
    for device in devices(executor):
        run(device)


@pytest.mark.parametrize("title", TITLES)
def test_without_its_edge_the_same_loop_has_a_hazard_that_names_both_sides_and_the_edge(title: str) -> None:
    EDGES[title].check_without(title)


def test_every_edge_in_the_code_has_a_note_and_every_note_has_its_scenario() -> None:
    text = SOURCE.read_text()
    assert (
        noted_titles([text])
        == edge_titles([text])
        == {title for title in EDGES if title.startswith("gradients")}
    )
