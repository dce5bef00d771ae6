"""Captured forwards and backwards with the hybrid optimizer on a real GPU: a replay reads the weights of the
last step, however late.

pytest -m gpu -n 0 tests/gpu/test_optimizer_graphs.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload import CaptureError, HybridDeviceOptimizer, OffloadEngine
from tests.gpu.widened import WidenedDevice
from tests.gpu.workbench import DEVICE, assert_same_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("clean_allocator", "deterministic")]

WIDTH, DEPTH, STEPS = 1000, 3, 4
SLOW_MS = 3.0


def net() -> nn.Sequential:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=DEVICE) for _ in range(DEPTH)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, device=DEVICE, generator=generator) * 0.03)
    return model


def numbers(seed: int) -> Tensor:
    return torch.randn(64, WIDTH, device=DEVICE, generator=torch.Generator(device=DEVICE).manual_seed(seed))


@contextmanager
def built(
    model: nn.Module, share: float, **options: Any
) -> Iterator[tuple[HybridDeviceOptimizer, WidenedDevice]]:
    """Weights take long to come back, but for those of the step's own warm-up."""
    device = WidenedDevice()
    engine = OffloadEngine(device=device)
    optimizer = HybridDeviceOptimizer(
        model.parameters(),
        1.0,
        engine=engine,
        cpu_share=share,
        bucket_bytes=1 << 20,
        lr=1e-2,
        **{"model": model, "overlap": "forward", **options},
    )
    with ExitStack() as stack:
        stack.callback(engine.close)
        stack.callback(optimizer.close)
        yield optimizer, device


class Graphed:
    """A training step in two graphs, forward and backward in one, whose gradients are where the capture put
    them."""

    def __init__(self, model: nn.Module, region: AbstractContextManager[Any]) -> None:
        self.model = model
        self.x = numbers(0)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with region:
            with torch.cuda.stream(stream):  # warm-up, as torch asks for it
                self._run()
                model.zero_grad(set_to_none=True)
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._run()
        self.gradients = [parameter.grad for parameter in model.parameters()]

    def _run(self) -> None:
        self.model(self.x).square().mean().backward()

    def step(self, number: int, optimizer: Optimizer) -> None:
        self.x.copy_(numbers(number))
        self.graph.replay()
        for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def expected(share: float) -> list[Tensor]:
    """The same buckets without graphs and without overlap."""
    model = net()
    with built(model, share, overlap="step", overlap_cpu_optimizer_d2h_h2d=False) as (optimizer, _):
        for number in range(STEPS):
            model(numbers(number)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("inside", ["region", "no region"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_graph_trains_to_the_bits_of_eager_although_weights_come_back_late(
    share: float, inside: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with built(model, share) as (optimizer, device):
        graphed = Graphed(model, optimizer.engine.capturing() if inside == "region" else nullcontext())
        device.slow_ms = {"h2d": SLOW_MS, "d2h": SLOW_MS}
        for number in range(STEPS):
            graphed.step(number, optimizer)
        assert ("captured outside of a region" in caplog.text) == (inside == "no region")
        optimizer.synchronize_parameters()
        assert_same_bits([parameter.detach() for parameter in model.parameters()], expected(share))


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_capture_while_weights_come_back_is_right_in_a_region_and_an_error_outside(share: float) -> None:
    model = net()
    with built(model, share) as (optimizer, device):
        model(numbers(0)).square().mean().backward()
        device.slow_ms = {"h2d": SLOW_MS, "d2h": SLOW_MS}
        optimizer.step()
        optimizer.zero_grad()
        with optimizer.engine.capturing():
            graph, x = torch.cuda.CUDAGraph(), numbers(1)
            with torch.cuda.graph(graph):
                y = model(x)
        graph.replay()
        found = y.detach().clone()
        optimizer.synchronize_parameters()
        assert_same_bits([model(x).detach()], [found])

        model(numbers(1)).square().mean().backward()
        optimizer.step()
        for worker in (optimizer._steps._stepper, optimizer._steps._streamer):
            worker.synchronize()
        with (
            pytest.raises(CaptureError, match=r"synchronize_parameters\(\) before the capture"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(x)
        optimizer.synchronize_parameters()
