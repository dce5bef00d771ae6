"""torch's Optimizer contract was followed in part.

Parameter groups and state are the user's to change between two steps, and a class may have rules of its own
for what it loads (`__setstate__`). What was read once, when the optimizer was built, was right until somebody
used that freedom; then it was ignored, or crashed in a worker. Each test is a loop that was wrong, run beside
torch's own optimizer.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload import FSDPGPUOptimizerWrapper
from offload.optim import HybridDeviceOptimizer
from tests.optim_pair import assert_same, backward, copies, hybrid, net, settled, torchs

Change = Callable[[nn.Sequential, Optimizer], None]


def loop_with(change: Change, *, at: int = 3, before_step: bool = False) -> Callable[..., list[Tensor]]:
    """Six steps; the change is made once, before the backward of step `at`, or between it and the step."""

    def loop(make: Any) -> list[Tensor]:
        model = net()
        optimizer = make(model)
        for number in range(6):
            if number == at and not before_step:
                change(model, optimizer)
            backward(model, number)
            if number == at and before_step:
                change(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        settled(optimizer)  # weights' readers are another story
        return copies(model)

    return loop


# -- 8: the wrapper of FSDP2's host shards -------------------------------------------------------------------
def wrapped(change: Callable[[Any], None], wrap: bool) -> list[Tensor]:
    model = net()
    inner = AdamW(model.parameters(), lr=1e-1, fused=True)
    optimizer: Any = FSDPGPUOptimizerWrapper(inner, "cpu") if wrap else inner
    for number in range(6):
        if number == 3:
            change(optimizer)
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    return copies(model)


def loads_another_rate(optimizer: Any) -> None:
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 1e-4
    optimizer.load_state_dict(saved)


def loads_and_sets_the_rate(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in optimizer.param_groups:
        group["lr"] = 1e-4


@pytest.mark.parametrize(
    "change", [loads_another_rate, loads_and_sets_the_rate], ids=lambda change: change.__name__
)
def test_8_the_wrapper_uses_the_learning_rate_that_was_loaded_or_set_after_a_load(
    change: Callable[[Any], None],
) -> None:
    """It kept groups that torch's load had replaced: the old rate for ever."""
    assert all(map(torch.equal, wrapped(change, wrap=True), wrapped(change, wrap=False)))


@pytest.mark.parametrize("through", ["wrapper", "optimizer"])
def test_8_the_wrapper_steps_a_group_that_was_added_later(through: str) -> None:
    def stepped(wrap: bool) -> list[Tensor]:
        late = nn.Parameter(torch.ones(3))

        def add(optimizer: Any) -> None:
            of = optimizer.optimizer if wrap and through == "optimizer" else optimizer
            of.add_param_group({"params": [late]})
            late.grad = torch.ones(3)

        return [*wrapped(add, wrap), late.detach().clone()]

    assert all(map(torch.equal, stepped(wrap=True), stepped(wrap=False)))


# -- 9: groups and state -------------------------------------------------------------------------------------
def takes_half_out(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]


def replaces_the_head(model: nn.Sequential, optimizer: Optimizer) -> None:
    torch.manual_seed(5)
    model[2] = nn.Linear(32, 24)
    optimizer.param_groups[0]["params"] = list(model.parameters())


def clears_state(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def replaces_state(model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def forgets_one(model: nn.Sequential, optimizer: Optimizer) -> None:
    del optimizer.state[model[0].weight]


def writes_state(model: nn.Sequential, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def writes_state_in_place(model: nn.Sequential, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        optimizer.state[parameter]["exp_avg"].zero_()
        optimizer.state[parameter]["step"].fill_(100)


CHANGES = [takes_half_out, replaces_the_head, clears_state, replaces_state, forgets_one, writes_state]


@pytest.mark.parametrize("before_step", [False, True], ids=["before the backward", "before step"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_9_groups_and_state_are_the_users_to_change(change: Change, before_step: bool) -> None:
    assert_same(loop_with(change, before_step=before_step), executors=("late",))


def test_9_state_written_in_place_counts() -> None:
    assert_same(loop_with(writes_state_in_place), executors=("late",))


def test_9_a_parameter_that_never_had_a_gradient_has_no_state() -> None:
    """It had moments of zeros, and a step of 0, in `state` and in checkpoints."""

    def loop(make: Any) -> list[Tensor]:
        model = net()
        optimizer = make(model)
        model[0](torch.ones(1, 24)).sum().backward()
        optimizer.step()
        has_state = [len(optimizer.state.get(each, {})) for each in model.parameters()]
        return [torch.tensor([*has_state, len(optimizer.state), *optimizer.state_dict()["state"]])]

    assert_same(loop, executors=("late",))


def saved_by(cls: type[Optimizer], **options: Any) -> dict[str, Any]:
    model = net()
    optimizer = torchs(model, cls, **options)
    backward(model, 0)
    optimizer.step()
    return optimizer.state_dict()


def loads(saved: dict[str, Any]) -> Change:
    return lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(saved))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_9_a_checkpoint_of_adam_in_adamw_keeps_weight_decay_decoupled(fraction: float) -> None:
    """It became L2: torch's AdamW says so in its __setstate__."""
    saved = saved_by(Adam, weight_decay=0.1)
    assert_same(loop_with(loads(saved)), fraction=fraction, executors=("late",))


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_9_a_checkpoint_with_step_as_a_number_loads(fraction: float) -> None:
    """As torch wrote them before 1.12: torch makes it a tensor. It was accepted, and crashed in a worker."""
    saved = saved_by(AdamW)
    for state in saved["state"].values():
        state["step"] = float(state["step"])
    assert_same(loop_with(loads(saved)), fraction=fraction, executors=("late",))


@pytest.mark.parametrize("amsgrad", [True, False])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_9_a_checkpoint_of_another_amsgrad_loads_as_torch_does(fraction: float, amsgrad: bool) -> None:
    """It was accepted, and crashed in a worker; torch takes amsgrad from the checkpoint's groups."""
    saved = saved_by(AdamW, amsgrad=amsgrad)
    assert_same(
        loop_with(loads(saved)),
        torchs_options={"amsgrad": not amsgrad},
        fraction=fraction,
        executors=("late",),
    )


# -- 10: clipping, layouts, classes --------------------------------------------------------------------------
def clip(model: nn.Module, optimizer: Any, max_norm: float) -> Tensor:
    """By the optimizer's own, where it has one."""
    if isinstance(optimizer, HybridDeviceOptimizer):
        return optimizer.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def throws_a_bad_batch_away(model: nn.Module, optimizer: Optimizer) -> None:
    backward(model, 99)
    clip(model, optimizer, 0.01)
    optimizer.zero_grad()


def clips_then_logs(model: nn.Module, optimizer: Optimizer) -> None:
    clip(model, optimizer, 0.1)
    clip(model, optimizer, float("inf"))


def clips_twice(model: nn.Module, optimizer: Optimizer) -> None:
    clip(model, optimizer, 0.1)
    clip(model, optimizer, 0.03)


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_10_a_clip_factor_does_not_outlive_the_gradients_it_was_made_for(fraction: float) -> None:
    assert_same(loop_with(throws_a_bad_batch_away), SGD, fraction=fraction, shares=(1.0,))


@pytest.mark.parametrize("change", [clips_then_logs, clips_twice], ids=lambda change: change.__name__)
def test_10_a_second_clip_does_not_undo_the_first(change: Change) -> None:
    assert_same(loop_with(change, before_step=True), SGD, shares=(1.0,))


def test_10_a_model_may_become_channels_last_after_the_optimizer_was_built() -> None:
    def loop(make: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        optimizer = make(model)
        model.to(memory_format=torch.channels_last)
        for number in range(4):
            x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        settled(optimizer)
        return copies(model)

    assert_same(loop)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_10_muon_is_exact_or_refused_by_name() -> None:
    """Any class was promised; Muon takes matrices only, and was asked for its defaults with a vector."""
    muon: Any = torch.optim.Muon  # type: ignore[attr-defined]

    def loop(make: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(24, 32, bias=False), nn.Tanh(), nn.Linear(32, 24, bias=False))
        optimizer = make(model)
        for number in range(3):
            backward(model, number)
            optimizer.step()
            optimizer.zero_grad()
        settled(optimizer)
        return copies(model)

    try:
        hybrid(nn.Linear(24, 24, bias=False), muon, cpu_share=1.0).close()
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "Muon" in refusal
        assert "2D" not in refusal  # torch's own complaint of a vector that we made is no reason
        return
    assert_same(loop, muon, shares=(1.0,))
