"""Every ordering note of streamed weights: a program that needs its edge, and the same program without it,
which must fail.

One invariant, as in test_edges.py: titles in the notes, in the code and here are one set.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import marks
from offload.device.rows import quantize_rows
from offload.device.sim import ExecutorName, SimDevice
from offload.engine import OffloadEngine
from offload.groups.manager import GroupsManager
from offload.optim import HybridDeviceOptimizer
from offload.transfer.copier import Priority
from offload.weights.stream import WeightStream
from tests.inside import streaming_of
from tests.property.edges import Edge, devices, edge_titles, noted_titles

pytestmark = pytest.mark.usefixtures("small_streams")

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("gradients.py", "experts.py", "window.py")
"""Whose notes test_gradient_edges.py and test_expert_edges.py have."""
SOURCES = sorted(path for path in (ROOT / "offload" / "weights").rglob("*.py") if path.name not in OTHERS)
WIDTH, STEPS = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(5)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean()


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def managed(device: SimDevice) -> Iterator[None]:
    """The process's manager has this device. It is not closed: a hazard leaves it with memory on loan."""
    marks.put_manager(GroupsManager(OffloadEngine(device=device)))
    try:
        yield
    finally:
        marks.put_manager(None)


def trained(device: SimDevice) -> None:
    model = net()
    with managed(device):
        handle = offload.apply(model, weights="host", gradients="device")
        train(model)
        handle.remove()
    train(plain := net())
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)


def on_two_lanes(device: SimDevice) -> None:
    """A frozen model computes on a lane that its weights were not allocated on; then they go."""
    model = net().requires_grad_(False)
    expected = loss_of(copy.deepcopy(model), 0)
    with managed(device):
        handle = offload.apply(model, weights="host")
        stream = streaming_of(handle)
        lane = device.new_compute_lane("side")
        for _ in range(3):
            loss_of(model, 0)
            with device.use_lane(lane):
                device.wait(lane, device.record(device.compute), "test")
                assert torch.equal(loss_of(model, 0), expected)
        assert stream.residency.present_bytes <= 2 * stream.blocks[0].nbytes
        handle.remove()


def fetched_by_another_lane(device: SimDevice) -> None:
    """A lane that has waited for nothing takes the place of a block that another lane has written, and
    fetches it back."""
    model = net()
    with managed(device):
        handle = offload.apply(model, weights="host", gradients="device")
        train(model)
        with torch.no_grad():
            model[2].up.weight.mul_(2)
        residency = streaming_of(handle).residency
        with device.use_lane(device.new_compute_lane("side")):
            residency.drop(residency.blocks[2])
            assert residency.load((residency.blocks[2],), Priority.SPECULATIVE)
        handle.remove()


def frozen_net() -> nn.Sequential:
    model = net()
    for block in model:
        block.up.weight.requires_grad_(False)
        block.down.weight.requires_grad_(False)
    return model


def expanded(model: nn.Sequential) -> nn.Sequential:
    """A copy with the elements that INT8 weights are expanded to."""
    model = copy.deepcopy(model)
    for block in model:
        for weight in (block.up.weight, block.down.weight):
            values, scales = torch.empty_like(weight, dtype=torch.int8), torch.empty(len(weight), 1)
            quantize_rows(weight.data, values, scales)
            weight.data = values.float() * scales
    return model


def int8_trained(device: SimDevice) -> None:
    model = frozen_net()
    plain = expanded(model)
    with managed(device):
        handle = offload.apply(model, weights="host", quantize="int8")
        train(model)
        handle.remove()
    train(plain)
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, its)


def int8_on_two_lanes(device: SimDevice) -> None:
    """Blocks that one lane has fetched, and expanded, are used by another."""
    model = frozen_net()
    expected = loss_of(expanded(model), 0)
    with managed(device):
        handle = offload.apply(model, weights="host", quantize="int8")
        residency = streaming_of(handle).residency
        side = device.new_compute_lane("side")
        for _ in range(3):
            assert torch.equal(loss_of(model, 0), expected)
            for block in residency.blocks:
                if block.staged:
                    residency.expand(block)
            with device.use_lane(side):
                assert torch.equal(loss_of(model, 0), expected)
                device.wait(device.new_compute_lane("else"), device.record(side), "test")
            device.wait(device.compute, device.record(side), "test")  # for what is not streamed
        handle.remove()


Prepare = Callable[[WeightStream], None]


def stepped(
    device: SimDevice, *, before: Prepare | None = None, after: Prepare | None = None, weights: str = "host"
) -> None:
    """An optimizer with its state on the host steps weights where they wait. before, after: of each step."""
    models = [net(), net()]
    with managed(device):
        handle = offload.apply(models[0], weights=weights)
        ours = HybridDeviceOptimizer(
            models[0].parameters(),
            1.0,
            lr=0.1,
            overlap="forward",
            model=models[0],
            engine=marks.default_manager().engine,
            bucket_bytes=4096,  # with one bucket the host waits for its slot
        )
        optimizers = [ours, torch.optim.AdamW(models[1].parameters(), lr=0.1, fused=True)]
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                loss_of(model, step).backward()
                if before and model is models[0]:
                    before(streaming_of(handle))
                optimizer.step()
                if after and model is models[0]:
                    after(streaming_of(handle))
                optimizer.zero_grad()
        handle.remove()
        ours.close()
    for mine, its in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, its)


def stepped_and_gone(device: SimDevice) -> None:
    """Weights that stay are stepped where they are, and go before anybody has waited for that."""

    def drop(stream: WeightStream) -> None:
        for block in stream.blocks:
            if block.present:
                stream.residency.drop(block)

    stepped(device, after=drop, weights="20.5kB")


def stepped_and_read(device: SimDevice) -> None:
    """All stay, and a lane that the step does not wait for reads them before it."""
    side = device.new_compute_lane("side")

    def read(stream: WeightStream) -> None:
        with device.use_lane(side):
            for block in stream.blocks:
                stream.residency.use(block, ())

    try:
        stepped(device, before=read, weights="20.5kB")
    finally:  # a hazard leaves the model to the collector
        device.wait(device.compute, device.record(side), "test")


EDGES = {
    "weights room": Edge(trained, "allocator reuse", ("h2d", "compute")),
    "weights here": Edge(trained, "RAW", ("compute", "h2d")),
    "weights int8": Edge(int8_trained, "RAW", ("compute", "h2d")),
    "weights out": Edge(trained, "RAW", ("d2h", "compute")),
    "weights home": Edge(fetched_by_another_lane, "RAW", ("h2d", "d2h")),
    "weights gone": Edge(trained, "allocator reuse", ("compute", "d2h")),
    "weights stepped": Edge(stepped_and_read, "RAW", ("h2d", "d2h")),
    "weights again": Edge(stepped_and_read, "WAR", ("h2d", "side")),
}
TITLES = tuple(EDGES)
INT8 = {
    "weights room": Edge(int8_trained, "allocator reuse", ("h2d", "compute")),
    "weights here": Edge(int8_on_two_lanes, "RAW", ("side", "compute"), "random"),
}
"""What the same edges do for INT8: its bytes on the device are not reused before the expansion has read them,
and what one lane has expanded is whole before another reads it."""

STEPPED = {"weights gone": Edge(stepped_and_gone, "allocator reuse", ("compute", "d2h"))}
"""And for a step: what it has stepped where it is does not go before that has gone to the master."""

CASES = [*EDGES.items(), *INT8.items(), *STEPPED.items()]


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize(
    "run", [trained, on_two_lanes, fetched_by_another_lane, int8_trained, int8_on_two_lanes]
)
def test_with_all_its_edges_a_loop_has_no_hazard_and_the_bits_of_torchs(
    run: Callable[[SimDevice], None], executor: ExecutorName
) -> None:
    for device in devices(executor):
        run(device)
        used = {title for title in TITLES if device.waits[title]}
        other = "weights here" if run is int8_trained else "weights int8"  # expands on the lane that uses
        of_steps = {"weights stepped", "weights again"}
        assert used == {*TITLES} - of_steps - ({other} if run is not int8_on_two_lanes else set())


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("run", [stepped, stepped_and_gone, stepped_and_read])
def test_with_all_its_edges_a_step_of_them_has_no_hazard_and_the_bits_of_torchs(
    run: Callable[[SimDevice], None], executor: ExecutorName
) -> None:
    for device in devices(executor):
        run(device)
        assert device.waits["weights stepped"] > 0 or run is not stepped
        assert device.waits["weights again"] > 0 or run is not stepped_and_read


@pytest.mark.parametrize(("title", "edge"), CASES)
def test_without_its_edge_the_same_loop_has_a_hazard_that_names_both_sides_and_the_edge(
    title: str, edge: Edge
) -> None:
    edge.check_without(title)


def test_every_edge_in_the_code_has_a_note_and_every_note_has_its_scenario() -> None:
    texts = [path.read_text() for path in SOURCES]
    noted = noted_titles(texts)
    assert noted == edge_titles(texts)
    # those of experts have scenarios of their own (test_expert_edges.py)
    assert {title for title in noted if not title.startswith("experts ")} == set(EDGES)
