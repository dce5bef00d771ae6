"""Captured forwards and the optimizer's weights: what is on its way when a capture begins, and when a graph
is replayed."""

from __future__ import annotations

import gc
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from offload import CaptureError, HazardError
from offload.device.sim import ExecutorName, SimGraph
from offload.optim import HybridDeviceOptimizer
from tests.unit.optim.rig import assert_same_bits, backward, batch, engine, hybrid, net

SHARES = (0.0, 0.5, 1.0)
STEPS = 4


class Graphed:
    """A net whose captured forward copies each weight, so that a replay says what it has read."""

    def __init__(
        self,
        executor: ExecutorName = "late",
        *,
        seed: int = 0,
        without: set[str] | None = None,
        **options: Any,
    ) -> None:
        self.model = net()
        self.engine = engine(executor, seed=seed, without=without)
        self.device = self.engine.device
        self.optimizer = hybrid(
            self.model,
            model=self.model,
            engine=self.engine,
            fused=True,
            **{"offload_fraction": 1.0, "cpu_share": 0.5, **options},
        )
        self.seen = [torch.empty_like(parameter) for parameter in self.model.parameters()]

    def capture(self) -> SimGraph:
        with self.device.capture() as graph:
            self.model(batch(0))  # the hooks of its modules
            for seen, parameter in zip(self.seen, self.model.parameters(), strict=True):
                weight = parameter.detach()
                self.device.note_read(self.device.compute, weight.view(-1).view(torch.uint8))
                self.device.launch(lambda seen=seen, weight=weight: seen.copy_(weight))
        return graph

    def step(self, number: int) -> None:
        """Nothing but a replay waits for its weights before the next one."""
        self.model(batch(0))
        give_gradients(self.model, number)
        self.optimizer.step()
        self.optimizer.zero_grad()


def give_gradients(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def expected_weights(steps: int) -> list[list[Tensor]]:
    """After each step of torch's own."""
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    found = []
    for number in range(steps):
        give_gradients(model, number)
        optimizer.step()
        found.append([parameter.detach().clone() for parameter in model.parameters()])
    return found


@pytest.mark.req("S2-101")
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_a_replay_in_a_region_waits_for_the_weights_that_its_forward_reads(
    executor: ExecutorName, share: float
) -> None:
    """No hook runs in a replay: it read weights that were still on their way, and nothing said so."""
    graphed = Graphed(executor, cpu_share=share)
    graphed.step(0)  # under way when the capture begins
    with graphed.engine.capturing():
        graph = graphed.capture()
    for number, after in enumerate(expected_weights(STEPS)):
        if number:
            graphed.step(number)
            assert graphed.optimizer._steps.is_pending(0), "step() has returned before its end"
        graph.replay()
        assert_same_bits(graphed.seen, after)
    graphed.optimizer.close()


def test_a_replay_without_that_edge_has_a_hazard() -> None:
    graphed = Graphed(cpu_share=1.0, without={"weights back"})
    with graphed.engine.capturing():
        graph = graphed.capture()
    graphed.step(0)
    with pytest.raises(HazardError, match="weights back"):
        graph.replay()


def test_replays_outlive_the_region_and_the_optimizer() -> None:
    graphed = Graphed()
    with graphed.engine.capturing() as region:
        graph = graphed.capture()
    region.release()
    graphed.step(0)
    graph.replay()
    assert_same_bits(graphed.seen, expected_weights(1)[0])
    graphed.optimizer.close()
    graph.replay()
    assert not graphed.engine.clients
    del graphed.optimizer
    gc.collect()
    graph.replay()


def test_an_optimizer_that_is_dropped_is_not_asked_at_a_capture() -> None:
    graphed = Graphed()
    engine = graphed.engine
    del graphed
    gc.collect()
    assert not engine.clients


@pytest.mark.parametrize("share", SHARES)
def test_a_capture_outside_of_a_region_needs_the_weights_to_be_there(share: float) -> None:
    graphed = Graphed(cpu_share=share)
    graphed.step(0)
    for worker in (graphed.optimizer._steps._stepper, graphed.optimizer._steps._streamer):
        worker.synchronize()  # what a worker issues during a capture would end it, as on a GPU
    with pytest.raises(
        CaptureError,
        match=(
            r"on their way.* Call the optimizer's synchronize_parameters\(\) before the "
            r"capture, or capture"
        ),
    ):
        graphed.capture()
    graphed.optimizer.synchronize_parameters()
    graph = graphed.capture()
    graph.replay()
    assert_same_bits(graphed.seen, expected_weights(1)[0])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_after_a_capture_outside_of_a_region_a_step_waits_for_its_weights(
    executor: ExecutorName, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have been before the first step, with nothing on its way; nobody tells of its replays."""
    graphed = Graphed(executor, cpu_share=share)
    graph = graphed.capture()
    for number, after in enumerate(expected_weights(STEPS)):
        graphed.step(number)
        graph.replay()
        assert_same_bits(graphed.seen, after)
    graphed.optimizer.synchronize_parameters()
    graphed.capture()
    assert [
        record.message for record in caplog.records if "captured outside of a region" in record.message
    ] == [
        "a forward is captured outside of a region of the optimizer's engine: when it runs again cannot be "
        'told from other work, so from now on step() waits for all weights, as overlap="step" does'
    ]


def test_what_a_replay_could_not_repeat_is_refused_in_a_capture() -> None:
    graphed = Graphed()
    optimizer = graphed.optimizer
    for call, name in (
        (optimizer.step, r"step\(\)"),
        (lambda: optimizer.clip_grad_norm_(1.0), r"clip_grad_norm_\(\)"),
        (lambda: optimizer.zero_grad(set_to_none=False), r"zero_grad\(set_to_none=False\)"),
    ):
        give_gradients(graphed.model, 0)
        with graphed.engine.capturing(), graphed.device.capture():  # noqa: SIM117
            with pytest.raises(CaptureError, match=rf"the optimizer's {name} inside a graph under capture"):
                call()
    graphed.step(0)
    assert_same_bits(
        [parameter.detach() for parameter in settled(optimizer, graphed.model)], expected_weights(1)[0]
    )


def test_an_optimizer_that_keeps_all_on_the_device_may_be_captured() -> None:
    graphed = Graphed(offload_fraction=0.0)
    give_gradients(graphed.model, 0)
    with graphed.device.capture():
        graphed.optimizer.step()
        graphed.optimizer.zero_grad(set_to_none=False)
    assert_same_bits([parameter.detach() for parameter in graphed.model.parameters()], expected_weights(1)[0])


def settled(optimizer: HybridDeviceOptimizer, model: nn.Module) -> list[nn.Parameter]:
    optimizer.synchronize_parameters()
    return list(model.parameters())


@pytest.mark.parametrize("early", [False, True])
def test_gradients_of_a_captured_backward_leave_at_the_step(early: bool) -> None:
    """No hook runs in a replay either: what had left in the capture would have been the gradients of the
    capture."""
    graphed, reference = Graphed(overlap="backward" if early else "forward"), net()
    expected = AdamW(reference.parameters(), lr=1e-2, fused=True)
    graphed.optimizer.last_microbatch = True
    with graphed.engine.capturing(), graphed.device.capture():
        backward(graphed.model, 0)
    for parameter in graphed.model.parameters():
        parameter.grad.data.mul_(0)  # as a replay writes them: no version moves
    graphed.optimizer.step()
    for parameter in reference.parameters():
        parameter.grad = torch.zeros_like(parameter)
    expected.step()
    graphed.optimizer.synchronize_parameters()
    assert_same_bits(
        [p.detach() for p in graphed.model.parameters()], [p.detach() for p in reference.parameters()]
    )
