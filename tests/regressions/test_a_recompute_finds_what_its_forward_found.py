"""Recomputes gave other bits where something around or inside a block was not as in its forward: a buffer
that a call was the first to write, a mode or a setting around the forward, the module itself.

Each test is a stranger's loop beside itself without offload.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import offload
from tests.regressions.beside import RECOMPUTING, WIDTH, assert_beside, run, squared, wide

ROWS = 12


def stacked(block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*[block() for _ in range(4)])


# -- buffers -------------------------------------------------------------------------------------------------
class Norm(nn.Module):
    """Batch norm with statistics that are buffers of this module."""

    mean: Tensor
    var: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.mean, self.var, training=True)


class Made(nn.Module):
    """A buffer that a later call makes."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.full((), 2.0))
        else:
            self.scale = self.scale + 1
        return x * self.scale


class Skipping(nn.Module):
    """Stochastic depth: half of the calls skip a part of the block."""

    def __init__(self, part: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.part = part()

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return x + torch.tanh(y if random.random() < 0.5 else self.part(y))


class Apart(nn.Module):
    """A buffer that is a view, four bytes past where an allocation begins, in a product with a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("all", torch.randn(31 * WIDTH + 1))
        self.register_buffer("part", self.all[1:].view(31, WIDTH))  # type: ignore[index]
        self.weight = nn.Parameter(torch.randn(31))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(self.part.t() @ torch.tanh(self.weight))  # type: ignore[operator]


@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize(
    "part", [lambda: nn.BatchNorm1d(WIDTH), Norm, Made, Apart], ids=["module", "own", "made", "apart"]
)
def test_a_call_may_be_the_first_to_write_a_buffer(part: Callable[[], nn.Module], mode: Any) -> None:
    """The first call of a block skipped its batch norm, so its statistics were taken for buffers that no
    forward writes. Their kernel moves no version: they were updated twice in every later step."""
    assert_beside(stacked(lambda: Skipping(part)), squared, mode, steps=8)


# -- what is around the forward ------------------------------------------------------------------------------
class HalvedFunction(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(args[0] * 0.5) if func is torch.tanh else func(*args, **(kwargs or {}))


class HalvedOperator(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(args[0] * 0.5) if func is torch.ops.aten.tanh.default else func(*args, **(kwargs or {}))


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def both_modes() -> Iterator[None]:
    with HalvedOperator(), HalvedFunction(), HalvedOperator():
        yield


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(1, ROWS, 3, 2, 8).permute(2, 0, 3, 1, 4)
        scale = (torch.linspace(0, 1, WIDTH) / 3).float()
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(ROWS, WIDTH)
        return x + torch.tanh(y * scale) + torch.tanh(self.conv(x.view(ROWS, 4, 4))).view(ROWS, WIDTH)


AROUND: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "function mode": HalvedFunction,
    "dispatch mode": HalvedOperator,
    "both modes": both_modes,
    "default dtype": default_dtype,
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "deterministic": deterministic,
    "flops": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize("around", AROUND)
def test_modes_and_settings_around_a_forward_are_around_its_recompute(around: str, mode: Any) -> None:
    """They were on around the forward and not around backward(): all gradients were others, and sdpa_kernel
    was an error that blamed the function."""

    def step(model: nn.Module, number: int) -> Tensor:
        x = wide()
        with AROUND[around]():
            loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    assert_beside(stacked(Attention), step, mode)


@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize("around", ["function mode", "dispatch mode", "default dtype", "attention"])
def test_those_around_the_backward_alone_are_not(around: str, mode: Any) -> None:
    def step(model: nn.Module, number: int) -> tuple[Tensor, torch.dtype]:
        loss = model(wide()).square().mean()
        with AROUND[around]():
            loss.backward()
            after = torch.get_default_dtype()
        return loss.detach(), after

    assert_beside(stacked(Attention), step, mode)


def test_an_error_in_a_recompute_leaves_modes_and_settings_as_it_found_them() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() != -1:
                raise KeyError("in the recompute")
            return torch.tanh(self.linear(x))

    def step(model: nn.Module, number: int) -> None:
        with default_dtype(), HalvedFunction():
            loss = model(wide().float()).square().mean()
        with pytest.raises(KeyError, match="in the recompute"):
            loss.backward()
        assert torch.get_default_dtype() is torch.float32
        assert torch._C._len_torch_function_stack() == 0

    run(stacked(Failing), step, "hidden_states", steps=1)


# -- the module ----------------------------------------------------------------------------------------------
class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * self.scale)


@pytest.mark.parametrize("mode", RECOMPUTING)
def test_a_call_of_a_shallow_copy_is_recomputed_by_the_copy(mode: Any) -> None:
    """copy.copy(block) shares weights and hooks, and has attributes of its own. The original was recomputed,
    with its own: all gradients were others."""

    def step(model: nn.Module, number: int) -> Tensor:
        x = wide()
        for block in model.children():
            twin = copy.copy(block)
            twin.scale = 0.3 + number  # type: ignore[assignment]
            x = twin(block(x))
        x.square().mean().backward()
        return x.detach()

    assert_beside(stacked(Scaled), step, mode)


class Growing(nn.Module):
    """Makes a part of itself in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "part"):
            self.part = nn.Linear(WIDTH, WIDTH)
        return x + torch.tanh(self.part(self.linear(x)))


@pytest.mark.parametrize("mode", RECOMPUTING)
def test_a_recompute_computes_with_the_parts_that_its_forward_made(mode: Any) -> None:
    def step(model: nn.Module, number: int) -> list[Tensor]:
        loss = model(wide()).square().mean()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]  # type: ignore[union-attr]

    assert_beside(stacked(Growing), step, mode)


class ReadTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x = ctx.saved_tensors[0]
        w = ctx.saved_tensors[1]
        return gradients[0] @ w.t(), x.t() @ gradients[0]


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + ReadTwice.apply(torch.tanh(x), self.weight)  # type: ignore[no-any-return]


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(torch.eye(ROWS).to_sparse() @ self.linear(x))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.tanh(self.frozen(x))))


class Scoring(nn.Module):
    """Looks at its own scores in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            best = int((self.linear(x) * 2).argmax())
        return x + torch.tanh(self.linear(x)) * (1 + 0.1 * best)


def of_inference(model: nn.Module, number: int) -> Tensor:
    with torch.inference_mode():
        x = wide()
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def toggled(model: nn.Module, number: int) -> Tensor:
    loss = model(wide()).square().mean()
    for block in model.children():
        block.linear.weight.requires_grad_(False)  # type: ignore[union-attr,operator]
    loss.backward()
    for block in model.children():
        block.linear.weight.requires_grad_(True)  # type: ignore[union-attr,operator]
    return loss.detach()


CRASHES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "saved tensors read twice": (Reading, squared),
    "a sparse argument": (Sparse, squared),
    "an inference tensor": (Frozen, of_inference),
    "inference mode inside": (Scoring, squared),
    "requires_grad before the backward": (Scaled, toggled),
}


@pytest.mark.parametrize("mode", RECOMPUTING)
@pytest.mark.parametrize("what", CRASHES)
def test_what_trains_with_torch_trains_where_blocks_are_recomputed(what: str, mode: Any) -> None:
    """Each raised, with a message that blamed the model or was torch's about something else."""
    block, step = CRASHES[what]
    assert_beside(stacked(block), step, mode)


class Conditioned(nn.Module):
    """given: a condition that is set for a call, and taken away after it; `condition` likewise."""

    condition: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.given: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * (
            self.given.get("mask") if self.condition is None else self.condition
        )


@pytest.mark.parametrize("mode", RECOMPUTING)
def test_a_condition_that_is_cleared_after_the_forward_is_there_in_the_recompute(mode: Any) -> None:
    def step(model: nn.Module, number: int) -> Tensor:
        for block in model.children():
            block.condition = torch.full((WIDTH,), 1.0 + number)  # type: ignore[assignment]
        loss = model(wide()).square().mean()
        for block in model.children():
            block.condition = None  # type: ignore[assignment]
        loss.backward()
        return loss.detach()

    assert_beside(stacked(Conditioned), step, mode)


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_what_a_recompute_raises_says_that_it_was_one_and_names_the_way_out(mode: Any) -> None:
    """A condition that is cleared after the forward, in a dict: the TypeError spoke of the model alone."""
    model = nn.Sequential(*[Conditioned() for _ in range(3)])
    with offload.activations(model, mode, min_numel=1):
        for block in model.children():
            block.given["mask"] = torch.ones(WIDTH)  # type: ignore[index,operator]
        loss = model(wide()).sum()
        for block in model.children():
            block.given.clear()  # type: ignore[operator,union-attr]
        with pytest.raises(TypeError) as raised:
            loss.backward()
    notes = " ".join(raised.value.__notes__)
    assert "while 2 was recomputed for its backward" in notes, "the block by its name"
    assert "no_recompute=" in notes


def test_gradients_of_parts_of_a_retained_graph_hold_no_recomputes() -> None:
    """Each `torch.autograd.grad` recomputed a block, and what its part did not read stayed with the graph:
    more at each, counted nowhere."""
    rows, width = 37, 24
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(3)]
    )

    def held() -> int:
        gc.collect()
        return sum(type(found) is Tensor and found.shape == (rows, width) for found in gc.get_objects())

    with offload.activations(model, "hidden_states", min_numel=1):
        loss = model(torch.randn(rows, width)).square().mean()
        weight = model[2][2].weight  # type: ignore[index]
        counts = []
        for _ in range(4):
            torch.autograd.grad(loss, [weight], retain_graph=True)  # type: ignore[list-item]
            counts.append(held())
        assert counts == [counts[0]] * 4
        loss.backward()
