"""A recompute got tensors of the same bits as its forward, and other objects: without the attributes that
somebody had put on them, and in no cache that is keyed by the object. In the first calls of a block that was
an error; where the attribute came later, wrong gradients were stepped until the next call that is compared.
torch's own checkpoint gives the objects themselves. Beside it, what a recompute could not be given at all.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import OffloadError
from tests.regressions.beside import RECOMPUTING, WIDTH, assert_beside, differing, run, squared, wide

MODES = ("checkpoint", *RECOMPUTING)


class Tagged(nn.Module):
    """Reads an attribute of its input, that each call finds as it was set for it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scale = getattr(x, "scale", 1.0) * getattr(mask, "scale", 1.0)
        return x + self.b(torch.tanh(self.a(x) * scale + mask))


class Tagging(nn.Module):
    def __init__(self, since: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Tagged() for _ in range(3))
        self.calls, self.since = 0, since

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(WIDTH) * 0.1
        for number, layer in enumerate(self.layers):
            if self.calls >= self.since:
                x.scale = 1.5 + number  # type: ignore[attr-defined]
                mask.scale = 0.5 + number  # type: ignore[attr-defined]
            x = layer(x, mask)
        self.calls += 1
        return x


@pytest.mark.parametrize("since", [0, 4])
@pytest.mark.parametrize("mode", MODES)
def test_attributes_of_what_a_block_is_given_are_those_that_its_forward_found(mode: Any, since: int) -> None:
    """The input leaves, so another object has them; the mask is one object with another value in each
    layer."""
    assert_beside(lambda: Tagging(since), squared, mode, steps=6)


class Cached(nn.Module):
    """What it computes of a mask is kept by the mask itself, as an object."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.seen: dict[Tensor, float] = {}

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        count = self.seen.get(mask, 0.0)
        return x + torch.tanh(self.a(x) * (count + 1) + mask).square()


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Cached() for _ in range(3))
        self.mask = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask(x)
        for number, layer in enumerate(self.layers):
            layer.seen = {mask: 2.0 + number}
            x = layer(x, mask)
        return x


@pytest.mark.parametrize("mode", MODES)
def test_an_argument_that_stays_is_the_same_object_in_the_recompute(mode: Any) -> None:
    assert_beside(Caching, squared, mode)


def halve_gradient(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


class Scaling(nn.Module):
    """Scales the gradients of its input, and of a weight since its first call, by hooks, which its recompute
    registers again: it finds `handle` as the first call did. That weight is two modules' own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.a.weight
        self.handle: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.handle is None:
            self.handle = self.a.weight.register_hook(lambda gradient: gradient * 0.5)
            self.b.weight.register_post_accumulate_grad_hook(halve_gradient)
        x.register_hook(lambda gradient: gradient * 0.5)
        return self.b(torch.tanh(self.a(x)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()  # the first input is a leaf, and lives; the others leave
        x.register_hook(lambda gradient: gradient + 1)
        y = x
        for layer in self.layers:
            y = layer(y)
        return y + y.sum() * x


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_that_a_forward_registers_on_a_gradient_is_called_once(mode: Any) -> None:
    """It was called twice, and nothing said so: each layer behind it had half of its gradient."""

    def step(model: nn.Module, number: int) -> tuple[Tensor, Tensor | None]:
        x = wide()
        loss = model(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach(), x.grad

    assert_beside(Scaled, step, mode)


@pytest.mark.parametrize("mode", ["checkpoint", "hidden_states"])
def test_a_forward_whose_backward_never_runs_holds_neither_inputs_nor_their_attributes(mode: Any) -> None:
    """What stays is held as the object that it is, with its graph, whose nodes come before the block's."""
    model = Caching()
    offload.apply(model, mode, min_numel=1)
    seen: list[weakref.ref[Any]] = []
    model.layers[1].register_forward_pre_hook(lambda module, args: seen.extend(map(weakref.ref, args)))
    out = model(wide())
    out.payload = out.sum()
    del out
    model.layers[0].seen = model.layers[1].seen = model.layers[2].seen = {}
    gc.collect()
    assert len(seen) == 2
    assert all(reference() is None for reference in seen)


# -- what a recompute cannot be given ------------------------------------------------------------------------
class Down(nn.Module):
    def __init__(self, skips: list[Tensor]) -> None:
        super().__init__()
        self.a, self.skips = nn.Linear(WIDTH, WIDTH), skips

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        self.skips.append(x)
        return x


class Up(Down):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x) * self.skips.pop())


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        skips: list[Tensor] = []
        self.down = nn.ModuleList(Down(skips) for _ in range(3))
        self.up = nn.ModuleList(Up(skips) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.down[0].skips.clear()
        for block in (*self.down, *self.up):
            x = block(x)
        return x


def test_auto_moves_a_block_whose_recompute_has_raised_from_the_next_step_on() -> None:
    """It did so where saves differed, and a block whose recompute raises an error of its own raised it in
    every step."""
    raised: list[int] = []

    def step(model: nn.Module, number: int) -> Any:
        torch.manual_seed(number)
        try:
            return squared(model, number)
        except IndexError:
            raised.append(number)
        torch.manual_seed(number)
        model.zero_grad()
        return squared(model, number)

    assert differing(run(Skipping, step), run(Skipping, step, "auto")) == []
    assert raised == [0]


def strided(model: nn.Module, number: int) -> Tensor:
    x = torch.nested.nested_tensor([torch.randn(rows, WIDTH) for rows in (3, 7, 5)])
    loss = torch.nested.to_padded_tensor(model(x), 0.0).square().mean()
    loss.backward()
    return loss.detach()


def nested_model() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_auto_recomputes_no_block_that_is_given_a_strided_nested_tensor() -> None:
    """Its profiler crashed on one, whose bytes cannot be taken out as those of another tensor."""
    assert_beside(nested_model, strided, "auto")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", ["checkpoint", "hidden_states", "selective"])
def test_a_block_that_is_to_be_recomputed_from_one_is_refused(mode: Any) -> None:
    with pytest.raises(OffloadError, match=r"nested tensor of strided layout.*layout=torch\.jagged"):
        run(nested_model, strided, mode)


# -- caches of keys and values -------------------------------------------------------------------------------
class Config:
    use_cache = True

    def __init__(self, **settings: Any) -> None:
        vars(self).update(settings)


class Sharing(nn.Module):
    def __init__(self, layer: Callable[[], nn.Module], **settings: Any) -> None:
        super().__init__()
        self.config = Config(**settings)
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Beside(nn.Linear):
    def forward(self, x: Tensor, shared_kv_states: Any = None) -> Tensor:
        return super().forward(x)


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("layer", "settings", "is_refused"),
    [
        (linear, {"num_kv_shared_layers": 15}, True),
        (linear, {"recurrent_kv_cache_mode": "per_loop"}, True),
        (linear, {"num_kv_shared_layers": 15, "use_cache": False}, False),
        (linear, {"num_kv_shared_layers": 0}, False),
        (lambda: Beside(WIDTH, WIDTH), {"num_kv_shared_layers": 15}, False),
    ],
)
def test_layers_that_share_keys_and_values_through_the_cache_are_not_recomputed_without_it(
    layer: Callable[[], nn.Module], settings: dict[str, Any], is_refused: bool
) -> None:
    """The cache was switched off, and Gemma 3n and 4 of some transformers then computed another loss."""
    model = Sharing(layer, **settings)
    before = model.config.use_cache
    if is_refused:
        with pytest.raises(OffloadError, match=r"through the cache.*mode='groups'.*use_cache=False"):
            offload.apply(model, "checkpoint")
    else:
        offload.apply(model, "checkpoint").remove()
    assert model.config.use_cache is before
    assert not any(module._forward_hooks for module in model.modules())
