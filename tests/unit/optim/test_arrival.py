"""Who reads a weight while it is on its way back: modules, layers that read past modules, copies and pickles
of the model."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from offload.device.sim import ExecutorName
from offload.optim import HybridDeviceOptimizer
from offload.optim.touch import AwaitedWeight, _make_plain, watch
from tests.unit.optim.rig import assert_same_bits, backward, engine, hybrid, net, train

WIDTH = 32
STEPS = 4


class Fused(nn.Module):
    """Two layers in one call that reads their weights, as fused kernels do; `first` is tied to nothing and
    never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.first.weight, self.first.bias).tanh()
        if not self.training:
            return self.last(self.second(self.first(x)))
        return self.last(F.linear(x, self.second.weight, self.second.bias).tanh())


class OwnWeight(nn.Module):
    """A weight of its own beside a module below."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


def trained(
    make: Callable[[], nn.Module], optimizer_of: Callable[[nn.Module], Optimizer], *, evaluate: bool
) -> list[Tensor]:
    """Every loss, and every output of the evaluations between the steps."""
    torch.manual_seed(0)
    model = make()
    optimizer = optimizer_of(model)
    found = []
    for step in range(STEPS):
        x = torch.randn(4, 6, WIDTH, generator=torch.Generator().manual_seed(step))
        if evaluate:
            model.eval()
            with torch.no_grad():
                found.append(model(x))
            model.train()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().reshape(1))
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.close()
    return found


@pytest.mark.parametrize("evaluate", [False, True])
@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("make", [attention, Fused])
def test_weights_that_a_layer_reads_past_their_modules_are_new(
    make: Callable[[], nn.Module], executor: ExecutorName, share: float, evaluate: bool
) -> None:
    """torch's own attention reads `out_proj` without calling it: it computed with the weights of the step
    before, and nothing said so."""

    def ours(model: nn.Module) -> Optimizer:
        return hybrid(model, model=model, cpu_share=share, engine=engine(executor), fused=True)

    def torchs(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=1e-2, fused=True)

    assert_same_bits(trained(make, ours, evaluate=evaluate), trained(make, torchs, evaluate=evaluate))


def test_what_is_read_past_its_module_waits_and_the_rest_still_overlaps() -> None:
    model = Fused()
    optimizer = hybrid(model, model=model, cpu_share=1.0, engine=engine(), bucket_bytes=1024)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    awaited = [isinstance(parameter, AwaitedWeight) for parameter in model.parameters()]
    assert awaited == [True] * 6
    first = next(model.parameters())
    assert first.norm() > 0
    assert [isinstance(parameter, AwaitedWeight) for parameter in model.parameters()] == [False, *awaited[1:]]
    optimizer.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_weight_that_a_step_leaves_as_it_is_is_not_on_its_way_because_of_the_step_before(
    share: float, model: nn.Module
) -> None:
    optimizer = hybrid(model, model=model, cpu_share=share, bucket_bytes=1024)
    backward(model, 0)
    optimizer.step()
    assert all(isinstance(parameter, AwaitedWeight) for parameter in model.parameters())
    optimizer.zero_grad()
    first, *_, last = model.parameters()
    first.grad = torch.ones(first.shape)
    optimizer.step()
    assert isinstance(first, AwaitedWeight)
    assert type(last) is nn.Parameter
    optimizer.close()


def test_a_compiled_forward_waits_for_all_weights_and_from_then_on_step_does(
    caplog: pytest.LogCaptureFixture, model: nn.Module
) -> None:
    """What a module's hook does while it is traced, without a compiler: whether that traces a frame anew
    depends on what ran before."""
    optimizer = hybrid(model, model=model, cpu_share=1.0)

    def kinds() -> set[type]:
        return {type(parameter) for parameter in model.parameters()}

    backward(model, 0)
    optimizer.step()
    assert kinds() == {AwaitedWeight}
    optimizer._runner._watch.before_forward(None)
    assert kinds() == {nn.Parameter}
    assert [record.getMessage() for record in caplog.records] == [
        "a compiled forward reads the optimizer's weights: when it runs again cannot be told from other "
        'work, so from now on step() waits for all weights, as overlap="step" does'
    ]
    for number in range(2):  # said once
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()
        assert kinds() == {nn.Parameter}
    assert len(caplog.records) == 1
    optimizer.close()


@pytest.mark.parametrize("make", [net, attention])
def test_nothing_is_said_where_every_weight_is_asked_for(
    make: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = make()
    optimizer = hybrid(model, model=model, cpu_share=1.0, engine=engine())
    width = next(model.parameters()).shape[-1]
    for _ in range(3):
        model(torch.ones(2, 3, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not caplog.records
    optimizer.close()


# -- copies and pickles --------------------------------------------------------------------------------------


def saved(model: nn.Module) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("kind", ["copy", "saved"])
@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_a_copy_of_the_model_has_the_new_weights_and_waits_for_nobody(
    executor: ExecutorName, kind: str
) -> None:
    """A moving average, or the best model so far, was copied with some weights of the step before. torch.save
    could not save the model."""
    torch.manual_seed(0)
    model = nn.Sequential(OwnWeight(), nn.Tanh(), OwnWeight())
    optimizer = hybrid(model, model=model, cpu_share=1.0, engine=engine(executor), fused=True)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    other = copy.deepcopy(model) if kind == "copy" else saved(model)
    found = [parameter.detach().clone() for parameter in other.parameters()]
    optimizer.synchronize_parameters()
    assert_same_bits(found, [parameter.detach() for parameter in model.parameters()])
    assert all(
        copied.data_ptr() != mine.data_ptr()
        for copied, mine in zip(other.parameters(), model.parameters(), strict=True)
    )
    optimizer.close()
    other(torch.ones(2, WIDTH)).sum().backward()


@pytest.mark.parametrize("how", [pickle.dumps, copy.deepcopy, copy.copy])
def test_the_optimizer_itself_is_not_copied(model: nn.Module, how: Callable[[Any], Any]) -> None:
    """The copy had param groups and nothing else: its first step was an AttributeError."""
    optimizer = hybrid(model, model=model, engine=engine(), cpu_share=1.0)
    train(model, optimizer, 1)
    with pytest.raises(
        TypeError, match=r"HybridDeviceOptimizer cannot be pickled or copied: .*; save its state_dict\(\)"
    ):
        how(optimizer)
    optimizer.close()


def test_a_closed_optimizer_leaves_the_model_without_a_hook_of_its_own(model: nn.Module) -> None:
    def hooks() -> int:
        return sum(len(module._forward_pre_hooks) for module in model.modules())

    optimizer = hybrid(model, model=model, fused=True)
    assert hooks() > 0
    train(model, optimizer, 1)
    optimizer.close()
    assert hooks() == 0


def test_a_tensor_that_another_thread_has_made_plain_keeps_its_class() -> None:
    """Two threads that touched one tensor both made it plain: a Parameter became a Tensor, and a Tensor an
    error of the interpreter."""

    class Nobody:
        def await_weights(self, indices: Any) -> None: ...

    for tensor in (nn.Parameter(torch.ones(2)), torch.ones(2)):
        kind, owner = type(tensor), Nobody()
        watch(tensor, owner)
        assert type(tensor) is not kind
        for _ in range(2):
            _make_plain(tensor)
            assert type(tensor) is kind
