"""Mode "auto" under training loops that look away, fail, branch and change their mind: the same bits, a plan
all the same, and no memory held."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager, init_chunk_handler
from offload.sizes import bytes_text
from tests.unit.modules.test_auto import SLOW_LINK
from tests.unit.modules.training import ROWS, WIDTH, Block, Model, build, equal, seeded, train

TOTAL = 20_000


@pytest.fixture(autouse=True)
def slow_link(manager: PipelineOffloadManager) -> None:
    manager.engine.rates = SLOW_LINK


@pytest.fixture
def handles() -> Iterator[Callable[[nn.Module], offload.Applied]]:
    """Applies mode "auto", and takes it off at the end."""
    applied: list[offload.Applied] = []

    def apply(model: nn.Module) -> offload.Applied:
        applied.append(offload.apply(model, "auto", min_numel=1, device_total=f"{TOTAL}B"))
        return applied[-1]

    yield apply
    for handle in applied:
        handle.remove()


class Normed(Block):
    """With a batch norm, whose statistics and result depend on whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


def normed() -> Model:
    model = build()
    model.layers = nn.ModuleList(Normed() for _ in range(3))
    return model


def train_in_turns(model: nn.Module) -> list[Tensor]:
    """Each forward in the other mode than its backward."""
    seen = []
    for step in range(4):
        for trains in (True, False):
            with seeded(step):
                model.train(trains)
                loss = model(torch.randn(ROWS, WIDTH)).square().mean()
                model.train(not trains)
                loss.backward()
        seen += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
    return [*seen, *(buffer.clone() for buffer in model.buffers())]


@pytest.mark.parametrize("mode", ["hidden_states", "selective", "auto"])
def test_a_recompute_is_in_training_or_in_evaluation_as_its_forward_was(mode: Any) -> None:
    plain = train_in_turns(normed())
    model = normed()
    with offload.activations(model, mode, min_numel=1):
        assert equal(train_in_turns(model), plain)
    assert all(module.training for module in model.modules())  # as the loop left it


@pytest.mark.parametrize("kind", [KeyError, KeyboardInterrupt])
def test_a_profiled_forward_that_raises_is_profiled_again_and_a_plan_is_made(
    kind: type[BaseException], handles: Callable[[nn.Module], offload.Applied]
) -> None:
    def fail(*arguments: object) -> None:
        raise kind

    plain, model = train(build(), steps=5), build()
    handle = handles(model)
    fails = model.layers[0].fc1.register_forward_pre_hook(fail)
    with pytest.raises(kind):
        model(torch.randn(ROWS, WIDTH))
    fails.remove()
    assert equal(train(model, steps=5), plain)
    assert handle.explain().plan is not None


def test_nothing_of_a_profiled_forward_lives_on_so_a_loop_without_an_optimizer_has_steps(
    handles: Callable[[nn.Module], offload.Applied], manager: PipelineOffloadManager
) -> None:
    model = build()
    handle = handles(model)
    for _ in range(20):
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        assert next(manager.living_blocks(), None) is None
    assert handle.explain().plan is not None


def test_microbatches_before_the_first_optimizer_step_are_no_steps_that_a_plan_is_made_from(
    handles: Callable[[nn.Module], offload.Applied],
) -> None:
    model = build()
    handle = handles(model)
    train(model, steps=1, microbatches=4)
    assert "no plan yet: 0 of at least 2 steps" in str(handle.explain())
    train(model, steps=4, microbatches=4)
    plan = handle.explain().plan
    assert plan is not None
    assert len(plan.problem.blocks) == 4


def skipped(model: Model) -> None:
    layers = model.layers

    def forward(x: Tensor) -> Tensor:
        for layer in list(layers)[1:]:
            x = layer(x)
        return model.head(x)

    model.forward = forward  # type: ignore[method-assign]


def turned_round(model: Model) -> None:
    layers = model.layers

    def forward(x: Tensor) -> Tensor:
        for layer in reversed(list(layers)):
            x = layer(x)
        return model.head(x)

    model.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (skipped, ["layers.1", "layers.2"]),
        (turned_round, ["layers.2", "layers.1", "layers.0"]),
    ],
)
def test_what_is_explained_of_a_block_is_of_the_block_that_ran_there(
    change: Callable[[Model], None],
    names: list[str],
    handles: Callable[[nn.Module], offload.Applied],
) -> None:
    model = build()
    handle = handles(model)
    train(model, steps=1)
    change(model)
    train(model, steps=6)
    assert [share.name for share in handle.explain().shares] == names


def test_a_block_that_is_called_twice_is_explained_once(
    handles: Callable[[nn.Module], offload.Applied],
) -> None:
    model = build("called twice")
    handle = handles(model)
    train(model, steps=5, microbatches=1)
    shares = handle.explain().shares
    assert [share.name for share in shares] == ["layers.0", "layers.1", "layers.2"]
    assert all(sum(share.levels.values()) == 2 for share in shares)


def test_chunks_that_are_marked_by_hand_have_no_plan_which_is_said_once(
    handles: Callable[[nn.Module], offload.Applied], caplog: pytest.LogCaptureFixture
) -> None:
    model = build()
    handle = handles(model)
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            init_chunk_handler(1, 0, 1)
            model(torch.randn(ROWS, WIDTH)).sum().backward()
            offload.step_end()
    said = [text for text in caplog.messages if "has no plan after 10 steps" in text]
    assert len(said) == 1
    assert "leave init_chunk_handler() out" in said[0]
    assert "no plan yet" in str(handle.explain())


def test_figures_of_a_total_are_none_below_zero(handles: Callable[[nn.Module], offload.Applied]) -> None:
    """Here nothing but saved tensors is counted; a limit that steps stay below is raised, up to the total."""
    model = build()
    handle = handles(model)
    train(model, steps=12)
    explained = handle.explain()
    assert explained.rest_bytes is not None
    assert explained.limit_bytes is not None
    assert explained.rest_bytes >= 0
    assert explained.limit_bytes <= TOTAL
    assert explained.plan is not None
    # a limit that was lowered since is not said to be what the plan was made for
    later = replace(explained, limit_bytes=explained.plan.predicted_peak_bytes - 1)
    assert f"The plan was made for {bytes_text(explained.plan.problem.limit_bytes)}, and" in str(later)


def test_a_hundred_steps_leave_no_object_and_no_tensor_in_a_cycle(
    handles: Callable[[nn.Module], offload.Applied],
) -> None:
    model = build()
    handles(model)
    train(model, steps=20)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            train(model, steps=50)
            tensors = sum(isinstance(thing, Tensor) for thing in gc.get_objects())
            gc.collect()
            counts.append((len(gc.get_objects()), tensors))
            assert tensors == sum(isinstance(thing, Tensor) for thing in gc.get_objects())
    finally:
        gc.enable()
    (objects, tensors), (later, tensors_later) = counts
    assert tensors_later == tensors
    assert later - objects < 50  # fewer than one a step
