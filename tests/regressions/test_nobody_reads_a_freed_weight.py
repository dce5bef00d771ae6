"""Whoever reads a streamed weight gets its bytes, or an error.

Each test is a loop that read freed memory, or bytes that were no longer the weight's, and nothing was said.
Where plain torch goes on, so does the loop, bit for bit; where the bytes cannot be kept, an error names what
was done.
"""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import TorchDispatchMode

import offload
from offload.errors import OffloadError
from tests.unit.weights.streamed import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Model, Pair, squares, streamed


class Scales(nn.Module):
    """autograd saves its Parameters themselves, not views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x.unsqueeze(1) * self.weight).sum(-1).tanh()


def scales() -> nn.Sequential:
    return nn.Sequential(*(Scales() for _ in range(BLOCKS)))


def weight_of(model: Any, layer: int) -> Any:
    return model.layers[layer].up.weight


def use_its_memory() -> Any:
    """Another model's weights take host memory that was given back."""
    other = Model()
    for parameter in other.parameters():
        nn.init.constant_(parameter, 7)
    return offload.apply(other, weights="host"), other


# -- state dicts ---------------------------------------------------------------------------------------------
def by_remove(pair: Pair) -> None:
    pair.handle.remove()


def by_half(pair: Pair) -> None:
    for model in (pair.model, pair.plain):
        model.to(torch.bfloat16)


def by_assign(pair: Pair) -> None:
    other = {name: value.clone() for name, value in Model().state_dict().items()}
    for model in (pair.model, pair.plain):
        model.load_state_dict(other, assign=True)


def by_data(pair: Pair) -> None:
    for model in (pair.model, pair.plain):
        for layer in model.layers:
            layer.up.weight.data = torch.ones(2 * WIDTH, WIDTH)


@pytest.mark.parametrize("end", [by_remove, by_half, by_assign, by_data])
def test_a_state_dict_outlives_what_it_was_taken_of(end: Any) -> None:
    with streamed() as pair:
        state = {name: v for name, v in pair.model.state_dict().items() if ".up.weight" in name}
        before = copy.deepcopy(state)
        end(pair)
        handle, other = use_its_memory()
        assert all(torch.equal(state[name], before[name]) for name in before)
        handle.remove()
        del state, other


def test_a_state_dict_outlives_its_model() -> None:
    with streamed() as pair:
        model = Model()
        offload.apply(model, weights="host")
        state = model.state_dict()
        before = copy.deepcopy(state)
        del model
        gc.collect()
        handle, other = use_its_memory()
        assert all(torch.equal(state[name], before[name]) for name in before)
        handle.remove()
        arena = pair.stream._engine.arena
        held = BLOCKS * BLOCK_BYTES
        # masters and gradients, and what the state dict has
        assert (arena.lent_bytes, arena.stats().lent_bytes) == (3 * held, 3 * held)
        del state, other
        assert arena.stats().lent_bytes == 2 * held


@pytest.mark.parametrize("change", ["t_", "unsqueeze_", "requires_grad_", "share_memory_", "data"])
def test_a_state_dicts_tensor_is_the_readers_own(change: str) -> None:
    with streamed() as pair:
        for model in (pair.model, pair.plain):
            for value in model.state_dict().values():
                if change == "data":
                    value.data = torch.zeros_like(value)
                elif value.dim() == 2:
                    getattr(value, change)(*[0] * (change == "unsqueeze_"))
        pair.train(2)


def test_a_state_dict_in_inference_mode() -> None:
    with streamed() as pair:
        with torch.inference_mode():
            state = pair.model.state_dict()
        with torch.no_grad():
            for model in (pair.model, pair.plain):
                model.state_dict()["layers.3.up.weight"].mul_(2)
        pair.train(2)
        del state


# -- .data, and other memory ---------------------------------------------------------------------------------
def test_the_data_of_one_weight_is_that_of_another_which_is_away() -> None:
    with streamed() as pair:
        pair.train(1)
        for model in (pair.model, pair.plain):
            for layer in range(BLOCKS - 1):
                data = weight_of(model, layer + 1).data
                weight_of(model, layer).data = data if model is pair.model else data.clone()
        pair.train(1)


def test_who_has_an_alias_keeps_its_bytes_when_the_weight_is_given_others() -> None:
    """Given others twice: the second time what was an alias was given the weight's bytes once more. And as it
    still counted as one, the block left while a forward's own alias was held."""
    kept, held = [], list[Tensor]()
    with streamed() as pair:
        pair.train(1)
        for model in (pair.model, pair.plain):
            average = weight_of(model, 3).detach().clone().mul_(0.5)
            alias, row = weight_of(model, 3).data, weight_of(model, 3).detach()[3]
            weight_of(model, 3).data, average.data = average.data, weight_of(model, 3).data
            alias.add_(1)
            assert torch.equal(average[3], row)
            with torch.no_grad():
                weight_of(model, 2).copy_(average)
            weight_of(model, 3).data = torch.full_like(average, 0.1)
            kept.append((alias, row, average))
        assert all(torch.equal(mine, its) for mine, its in zip(*kept, strict=True))
        up = pair.model.layers[3].up
        hook = up.register_forward_hook(lambda module, args, output: held.append(module.weight.data))
        pair.train(1)
        hook.remove()
        pair.model(torch.randn(ROWS, WIDTH))  # others need its room
        assert held.pop().untyped_storage().nbytes()
        pair.train(2)


def test_a_forward_that_sets_the_data_of_its_weight(caplog: pytest.LogCaptureFixture) -> None:
    class Normed(Scales):
        does = False

        def forward(self, x: Tensor) -> Tensor:
            if self.does:
                self.weight.data = F.normalize(self.weight.data)
            return super().forward(x)

    model = nn.Sequential(*(Normed() for _ in range(BLOCKS)))
    model[1].does = model[4].does = True  # type: ignore[assignment]
    with streamed(model) as pair:
        pair.train(3)
        assert sum(len(block.weights) for block in pair.stream.blocks) == BLOCKS - 2
        assert pair.present_bytes <= 2 * WIDTH * WIDTH * 4
    assert caplog.text.count("1.weight: a forward of its block sets its .data") == 1


@pytest.mark.parametrize("change", [by_half, by_assign, by_data])
def test_a_weight_that_is_given_other_memory_between_a_forward_and_its_backward(change: Any) -> None:
    with streamed() as pair:
        loss = squares(pair.model, torch.randn(ROWS, WIDTH))
        change(pair)
        with pytest.raises(OffloadError, match=r"layers.5.down.weight|layers.5.up.weight was replaced, conv"):
            loss.backward()
        pair.model.zero_grad()


def test_values_with_gaps_are_assigned() -> None:
    with streamed() as pair:
        state = copy.deepcopy(pair.plain.state_dict())
        state["layers.1.up.weight"] = torch.randn(WIDTH, 2 * WIDTH).t()
        state["layers.2.up.weight"] = torch.randn(1, WIDTH).expand(2 * WIDTH, WIDTH)
        state["layers.3.up.weight"] = torch.randn(2 * WIDTH, 3 * WIDTH)[:, ::3]
        for model in (pair.model, pair.plain):
            model.load_state_dict(state, assign=True)
        x = torch.randn(ROWS, WIDTH)
        for model in (pair.model, pair.plain):
            squares(model, x).backward()
        pair.check_gradients()


# -- graphs --------------------------------------------------------------------------------------------------
def test_a_forward_before_apply_and_its_backward_after() -> None:
    model = scales()
    loss = squares(model, torch.randn(ROWS, WIDTH))
    with streamed(model), pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_transform_whose_backward_comes_after_its_blocks_have_left() -> None:
    with streamed(scales()) as pair:
        x, found = torch.randn(ROWS, WIDTH, requires_grad=True), []
        for model in (pair.model, pair.plain):
            output, vjp = torch.func.vjp(model, x)
            with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
                loss = squares(model, x)
            model(x)
            found.append((vjp(torch.ones_like(output))[0], torch.autograd.grad(loss, x)[0]))
        assert all(map(torch.equal, *found))


def test_a_backward_to_some_weights_brings_no_others_to_the_device_and_hides_none() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.x, ctx.weight = x, weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            return gradients[0] @ ctx.weight, gradients[0].t() @ ctx.x

    class Custom(Scales):
        def forward(self, x: Tensor) -> Tensor:
            return x + Product.apply(x, self.weight)

    with streamed(nn.Sequential(*(Custom() for _ in range(BLOCKS)))) as pair:
        x, found = torch.randn(ROWS, WIDTH), []
        for model in (pair.model, pair.plain):
            squares(model, x).backward(inputs=[model[0].weight])
            weights = [each.weight for each in model]
            some = {"allow_unused": True, "materialize_grads": True}
            found.append(
                (
                    *torch.autograd.grad(squares(model, x), weights),
                    *torch.autograd.grad(squares(model[:2], x), weights, **some),
                )
            )
            twice = torch.autograd.grad(squares(model[:2], x), weights, create_graph=True, **some)
            assert all(each.requires_grad for each in twice)
            weights[0].requires_grad_(False)
            with pytest.raises(RuntimeError, match="does not require grad"):
                torch.autograd.grad(squares(model, x), weights[:1])
            weights[0].requires_grad_()
        assert all(map(torch.equal, *found))
        pair.check_gradients()
        assert pair.stream.residency.present_bytes_peak == 2 * WIDTH * WIDTH * 4


# -- calls ---------------------------------------------------------------------------------------------------
def test_a_list_of_weights_with_a_tensor_of_numbers() -> None:
    with streamed() as pair:
        for model in (pair.model, pair.plain):
            weights = [parameter.detach() for parameter in model.parameters()]
            ones, twos = ([torch.full_like(weight, value) for weight in weights] for value in (1, 2))
            torch._foreach_addcdiv_(weights, ones, twos, torch.arange(len(weights), dtype=torch.float32))
        pair.check_weights()


def test_a_scripted_module_inside_of_a_block() -> None:
    model: Any = Model()
    for layer in model.layers:
        layer.up = torch.jit.script(layer.up)
    x = torch.randn(ROWS, WIDTH)
    expected = model(x), [layer.up(x) for layer in model.layers]
    with streamed(model) as pair:
        assert torch.equal(pair.model(x), expected[0])
        assert all(map(torch.equal, [layer.up(x) for layer in model.layers], expected[1]))


# -- old state dicts -----------------------------------------------------------------------------------------
def step(pair: Pair, optimizers: Any) -> None:
    x = torch.randn(ROWS, WIDTH)
    for model, optimizer in zip((pair.model, pair.plain), optimizers, strict=True):
        squares(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("assign", [False, True])
def test_a_models_own_old_state_dict_is_loaded(assign: bool) -> None:
    with streamed(weights="24.6kB") as pair:  # all stay, so what was stepped is on the device alone
        optimizers = pair.optimizers(fused=True)
        states = [model.state_dict() for model in (pair.model, pair.plain)]
        for _ in range(3):
            step(pair, optimizers)
        for model, state in zip((pair.model, pair.plain), states, strict=True):
            model.load_state_dict(state, assign=assign)  # in torch they are the weights themselves
        pair.check_weights()
        pair.train(2)
        del states, state


def test_a_write_to_an_old_state_dict_is_an_error_once() -> None:
    with streamed() as pair:
        optimizers = pair.optimizers(fused=True)
        state = pair.model.state_dict()
        with torch.no_grad():
            for model in (pair.model, pair.plain):
                for parameter in model.parameters():
                    parameter.mul_(0.5)
        for weight in (weight for block in pair.stream.blocks for weight in block.weights):
            if weight.dirty:
                state[weight.name][0] = 5
        with pytest.raises(OffloadError, match=r"weight was written after the weight had been written on"):
            pair.model(torch.randn(ROWS, WIDTH))
        for _ in range(BLOCKS):
            try:
                pair.model.state_dict()
            except OffloadError:
                continue
        pair.train(2, optimizers=optimizers)
        del state


def test_a_buffer_in_the_memory_of_a_weight_keeps_it_on_the_device() -> None:
    class Viewed(Scales):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Parameter(torch.rand(WIDTH, WIDTH))
            self.register_buffer("view", self.weight.detach())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.view + self.other[0]

    model = nn.Sequential(*(Viewed() for _ in range(BLOCKS)))
    with streamed(model) as pair:
        with torch.no_grad():
            for each in model:
                each.weight.mul_(2)
                assert torch.equal(each.weight, each.view)
        pair.plain.load_state_dict(model.state_dict())


def test_weights_that_conversion_makes_larger_than_the_limit_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with streamed(weights="8.2kB") as pair:
        for model in (pair.model, pair.plain):
            model.double()
        pair.train(2, lambda model, x: squares(model, x.double()))
        assert caplog.text.count("16.39 kB for two blocks, more than weights= allows, 8.20 kB") == 1


class PassThrough(TorchDispatchMode):
    """As torch's FlopCounterMode: under any such mode the in-place calls of lists move no version counter."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_lists_that_are_written_under_a_dispatch_mode_count() -> None:
    """Gradients that wait on the host kept their values through zero_grad(set_to_none=False) and through
    clipping, and weights theirs through an average."""
    models = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    handle = offload.apply(models[0], "off", weights="host", gradients="host", min_numel=1)
    for model in models:
        parameters = [*model.parameters()]
        for number in range(2):
            model(torch.ones(2, 8) * number).square().sum().backward()
            with PassThrough(), torch.no_grad():
                clip_grad_norm_(parameters, 0.01, foreach=True)
                torch._foreach_mul_(parameters, 0.5)
                torch._foreach_add_(parameters, [parameter.grad for parameter in parameters])
                if not number:
                    model.zero_grad(set_to_none=False)
    handle.remove()
    for mine, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(mine, other)
        assert torch.equal(mine.grad, other.grad)
