"""Where chunks begin and steps end under `offload.apply`, in loops that announce nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager, StepStats
from tests.unit.modules.training import ROWS, WIDTH, Model, build, equal, seeded, train, warnings_of


def test_a_step_ends_where_the_optimizer_steps(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    train(model, steps=1)
    before = manager.engine.step
    train(model, steps=3)
    assert manager.engine.step == before + 3


def test_a_forward_in_another_thread_ends_no_step_that_is_being_ended(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guess comes between the end and what is learned of the step: nothing is alive, and no forward of
    a new step has begun."""
    model = build()
    ended, failed = manager.follower.step_ended, list[BaseException]()

    def forward() -> None:
        try:
            model(torch.randn(ROWS, WIDTH))
        except BaseException as error:
            failed.append(error)

    def ended_meanwhile(stats: StepStats) -> None:
        monkeypatch.undo()
        other = threading.Thread(target=forward)
        other.start()
        other.join()
        ended(stats)

    offload.apply(model, min_numel=1)
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    before = manager.engine.step
    monkeypatch.setattr(manager.follower, "step_ended", ended_meanwhile)
    model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert manager.engine.step == before + 1
    assert not failed


class _Loop:
    """Step ends that a loop was seen to have."""

    def __init__(self, manager: PipelineOffloadManager, model: nn.Module) -> None:
        self.manager, self.model = manager, model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        offload.apply(model, min_numel=1)
        self.once()
        self.optimizer.step()
        self.start = manager.engine.step

    def once(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        return loss

    @property
    def ends(self) -> int:
        return self.manager.engine.step - self.start


def test_an_optimizer_of_another_model_ends_nothing(manager: PipelineOffloadManager) -> None:
    loop = _Loop(manager, build())
    other = nn.Linear(2, 2)
    loop.once()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert loop.ends == 0
    loop.optimizer.step()
    assert loop.ends == 1


def test_a_wrapped_optimizer_ends_a_step_once(manager: PipelineOffloadManager) -> None:
    class Wrapper(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    loop = _Loop(manager, build())
    wrapped = Wrapper(loop.optimizer)
    for _ in range(3):
        loop.once()
        wrapped.step()
    assert loop.ends == 3


def test_an_optimizer_that_steps_in_the_backward_ends_nothing_there(manager: PipelineOffloadManager) -> None:
    loop = _Loop(manager, build())
    for parameter in loop.model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    loop.once()
    loop.once()
    assert loop.ends == 0
    loop.optimizer.step()
    assert loop.ends == 1


def test_a_loop_without_an_optimizer_ends_a_step_at_the_next_forward(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    for _ in range(4):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
    assert manager.engine.step == 3


def test_what_is_alive_at_an_end_is_carried_over_two_ends_and_then_named_and_dropped(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    loop = _Loop(manager, build())
    loop.optimizer = torch.optim.SGD([loop.model.head.bias], lr=0.1)  # which no graph has saved
    graphs = [loop.model(torch.randn(ROWS, WIDTH)).sum() for _ in range(2)]
    for _ in range(2):
        loop.optimizer.step()
        loop.once()
    graphs[0].backward()  # two steps later
    assert warnings_of(caplog) == []
    loop.optimizer.step()
    (message,) = warnings_of(caplog)
    assert "whose backward has not run; they are dropped" in message
    assert message.endswith("They were saved in s0m1/layers")
    with pytest.raises(offload.StaleHandleError, match=r"before the third step\(\) of an optimizer"):
        graphs[1].backward()


def test_a_generator_and_a_discriminator_have_the_bits_of_a_run_without(
    manager: PipelineOffloadManager,
) -> None:
    def gan(apply: Callable[[nn.Module], object]) -> list[Tensor]:
        torch.manual_seed(0)
        made, judged = Model(), Model()
        apply(made)
        apply(judged)
        generator = torch.optim.Adam(made.parameters(), lr=0.01)
        judge = torch.optim.Adam(judged.parameters(), lr=0.01)
        adapt = nn.Linear(5, WIDTH)
        for step in range(4):
            with seeded(step):
                fake = adapt(made(torch.randn(ROWS, WIDTH)))
                judge.zero_grad()
                loss = judged(fake.detach()).mean() - judged(torch.randn(ROWS, WIDTH)).mean()
                loss.backward()
                judge.step()
                generator.zero_grad()
                judged(fake).mean().backward()  # reads what the generator saved before the judge's step
                generator.step()
        return [parameter.detach().clone() for model in (made, judged) for parameter in model.parameters()]

    plain = gan(lambda _: None)
    assert equal(gan(lambda model: offload.apply(model, min_numel=1)), plain)
    assert manager.stats.spill_bytes > 0


def test_a_users_own_step_end_and_chunks_are_believed(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ended: list[StepStats | None] = []
    for _ in range(3):
        for _ in range(2):
            offload.init_chunk_handler()
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        ended.append(offload.step_end())
    assert manager.engine.step == 3
    assert len({stats.saved for stats in ended if stats is not None}) == 1


def test_a_loop_that_ends_one_step_by_hand_and_no_other_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for calls in (15, 15, 17):
        for _ in range(calls):
            model(torch.ones(ROWS, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.step()  # of a wrapper: no forward since, so no step of its own
        if calls == 15:
            assert not [said for said in caplog.messages if "step_end()" in said]
            offload.step_end()
    (message,) = [said for said in caplog.messages if "step_end()" in said]
    assert "an optimizer has stepped 16 times since the last step_end(): this process has called" in message


def test_evaluation_and_a_second_forward_pass_through(manager: PipelineOffloadManager) -> None:
    model = build()
    offload.apply(model, min_numel=1)
    train(model)
    step, saved = manager.engine.step, manager.stats.saved
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    with torch.inference_mode():
        model(torch.randn(ROWS, WIDTH))
    train(model, steps=1)
    assert (manager.engine.step, manager.stats.saved) == (step + 1, saved)
