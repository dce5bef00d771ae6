"""Weights and gradients that leave by torchtitan's hooks: every bit is that of the same loop without, and
memory really falls."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadError, PipelineOffloadManager
from offload.compat.gradients import GradientOffloadHook
from offload.compat.tensors import TensorOffloader
from offload.compat.weights import (
    WeightOffloadHook,
    offload_activation,
    offload_commit,
    offload_module_weights,
    offload_weights,
    reset_offloader,
)
from offload.device.sim import ExecutorName
from tests.unit.groups.stack import build_manager, installed

WIDTH, ROWS, LAYERS = 16, 4, 5
LAYER_BYTES = 4 * (2 * 2 * WIDTH * WIDTH + 3 * WIDTH)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    """reentrant: of checkpoints around its layers; None for none. marked: their activations leave."""

    def __init__(self, layers: int, reentrant: bool | None = None, marked: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.reentrant, self.marked = reentrant, marked

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = offload_activation(x, "layer") if self.marked else x
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            x = offload_commit(x, "layer") if self.marked else x
        return x


@dataclass
class Pair:
    """ours: its weights and gradients leave. plain: the same without."""

    ours: Model
    plain: Model
    offloader: TensorOffloader
    weights: WeightOffloadHook
    gradients: GradientOffloadHook | None

    @property
    def present_bytes(self) -> int:
        """Of the weights, on the device."""
        with torch._C.DisableTorchFunctionSubclass():
            return sum(parameter.untyped_storage().nbytes() for parameter in self.ours.parameters())

    def backward(self, generator: torch.Generator) -> None:
        x = torch.randn(ROWS, WIDTH, generator=generator)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [model(each) for model, each in zip((self.ours, self.plain), inputs, strict=True)]
        for output in outputs:
            output.square().mean().backward()
        assert torch.equal(*outputs)
        assert torch.equal(inputs[0].grad, inputs[1].grad)  # type: ignore[arg-type]

    def check_gradients(self) -> None:
        for mine, its in zip(self.ours.parameters(), self.plain.parameters(), strict=True):
            assert torch.equal(mine.grad, its.grad)  # type: ignore[arg-type]

    def train(self, steps: int = 3, microbatches: int = 1, reload: bool = True) -> None:
        generator = torch.Generator().manual_seed(1)
        pair = [torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9) for m in (self.ours, self.plain)]
        for _ in range(steps):
            for _ in range(microbatches):
                if self.ours.marked:
                    offload.init_chunk_handler()
                self.backward(generator)
                if self.gradients is not None:
                    assert all(parameter.grad is None for parameter in self.ours.parameters())
                    assert self.gradients.has_offloaded_grads()
                    assert len(self.gradients.offloaded_params) == 4 * len(self.ours.layers)
            if reload and self.gradients is not None:
                self.gradients.reload_all()
                assert not self.gradients.has_offloaded_grads()
            if reload or self.gradients is None:
                self.check_gradients()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
            if self.ours.marked:
                offload.step_end()
        state = self.ours.state_dict()
        for name, its in self.plain.state_dict().items():
            assert torch.equal(state[name], its), name


@contextmanager
def paired(
    layers: int = LAYERS,
    executor: ExecutorName = "late",
    *,
    gradients: bool = False,
    prefetch_next: bool = True,
    **model: Any,
) -> Iterator[Pair]:
    """All is as it was afterwards, and the arena has its memory back."""
    torch.manual_seed(0)
    ours = Model(layers, **model)
    plain = copy.deepcopy(ours)
    plain.marked = False
    with installed(build_manager(executor)) as manager:
        offloader = TensorOffloader()
        weights = WeightOffloadHook(offloader, prefetch_next)
        for layer in ours.layers:
            weights.register(layer)
        hook = GradientOffloadHook(offloader) if gradients else None
        if hook is not None:
            hook.register(ours.parameters())
        yield Pair(ours, plain, offloader, weights, hook)
        weights.remove_hooks()
        if hook is not None:
            hook.remove_hooks()
        assert all(type(parameter) is nn.Parameter for parameter in ours.parameters())
        for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, its)
        offloader.clear()
        assert manager.engine.arena.stats().lent_bytes == 0


@pytest.mark.req("S3-19", "S3-20", "S3-23")
@pytest.mark.parametrize("prefetch_next", [True, False])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("layers", [1, LAYERS])
@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_outputs_gradients_and_steps_are_those_without(
    executor: ExecutorName, layers: int, reentrant: bool | None, prefetch_next: bool
) -> None:
    with paired(layers, executor, reentrant=reentrant, prefetch_next=prefetch_next) as pair:
        pair.train()


@pytest.mark.req("S3-20", "S3-22", "S3-25")
def test_a_layer_is_on_the_device_for_its_own_forward_and_backward_only() -> None:
    with paired(8, prefetch_next=False) as pair:
        assert pair.present_bytes == 8 * LAYER_BYTES
        pair.weights.initial_offload()
        assert pair.present_bytes == 0
        inside: list[int] = []
        for layer in pair.ours.layers:
            layer.up.register_forward_hook(lambda *_: inside.append(pair.present_bytes))
        output = pair.ours(torch.randn(ROWS, WIDTH))
        assert inside == [LAYER_BYTES] * 8
        assert pair.present_bytes == 0  # and autograd holds none of it
        for parameter in pair.ours.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: inside.append(pair.present_bytes))
        inside.clear()
        output.sum().backward()
        assert len(inside) == 32
        assert max(inside) <= 2 * LAYER_BYTES
        pair.weights.initial_offload()
        assert pair.present_bytes == 0


@pytest.mark.req("S3-19", "S3-21")
@pytest.mark.parametrize("grad", [True, False])
def test_the_next_registered_layer_comes_during_the_forward_of_one_from_the_first_step_on(grad: bool) -> None:
    with paired() as pair, torch.set_grad_enabled(grad):
        names: list[list[int]] = []

        def here(*_: object) -> None:
            with torch._C.DisableTorchFunctionSubclass():
                layers = enumerate(pair.ours.layers)
                names.append([i for i, each in layers if each.up.weight.untyped_storage().nbytes()])

        for layer in pair.ours.layers:
            layer.up.register_forward_hook(here)
        pair.ours(torch.randn(ROWS, WIDTH))
        assert [now[:2] for now in names[:-1]] == [[i, i + 1] for i in range(LAYERS - 1)]


@pytest.mark.req("S3-19")
def test_another_order_than_that_of_registration_gives_the_same_bits() -> None:
    with paired() as pair:
        for model in (pair.ours, pair.plain):
            model.layers = nn.ModuleList([model.layers[i] for i in (3, 0, 4, 1, 2)])
        pair.train(steps=4)


@pytest.mark.req("S3-22")
def test_layers_registered_later_leave_too_and_a_second_registration_is_an_error() -> None:
    with paired() as pair:
        pair.train(steps=1)
        late = nn.Linear(WIDTH, WIDTH)
        before = copy.deepcopy(late)
        pair.weights.register(late)
        with pytest.raises(ValueError, match="register got a Linear again"):
            pair.weights.register(late)
        with pytest.raises(ValueError, match=r"register got a list, must be a torch\.nn\.Module"):
            pair.weights.register([late])  # type: ignore[arg-type]
        x = torch.randn(2, WIDTH)
        assert torch.equal(late(x), before(x))
        with torch._C.DisableTorchFunctionSubclass():
            assert late.weight.untyped_storage().nbytes() == 0
        pair.train(steps=2)


@pytest.mark.req("S3-26", "S3-27")
@pytest.mark.parametrize("reload", [True, False])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_gradients_on_the_host_add_up_as_torchs(
    executor: ExecutorName, microbatches: int, reload: bool
) -> None:
    """reload: by reload_all(); else the optimizer's step brings them."""
    with paired(executor=executor, gradients=True) as pair:
        pair.train(microbatches=microbatches, reload=reload)


@pytest.mark.req("S3-26", "S3-27")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_under_checkpoints_add_up_as_torchs(reentrant: bool) -> None:
    with paired(gradients=True, reentrant=reentrant) as pair:
        pair.train(microbatches=4)


@pytest.mark.req("S3-26")
def test_gradients_that_stay_have_a_copy_on_the_host() -> None:
    with paired() as pair:
        hook = GradientOffloadHook(pair.offloader, release_gpu_grad=False)
        hook.register(pair.ours.parameters())
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            pair.backward(generator)
            pair.check_gradients()
        assert len(hook.offloaded_params) == 4 * LAYERS
        hook.reload_all()
        pair.check_gradients()
        hook.clear()
        hook.remove_hooks()


@pytest.mark.req("S3-26")
def test_clear_drops_what_is_held_and_what_cannot_be_held_is_an_error() -> None:
    with paired(gradients=True) as pair:
        hook, generator = pair.gradients, torch.Generator().manual_seed(0)
        pair.backward(generator)
        hook.clear()
        pair.plain.zero_grad()
        assert not hook.has_offloaded_grads()
        pair.backward(generator)
        pair.ours.layers[0].up.bias.grad = torch.zeros(2 * WIDTH)
        with pytest.raises(OffloadError, match="was set while the sum of earlier"):
            hook.reload_all()
        pair.ours.layers[0].up.bias.grad = None
        hook.reload_all()
        pair.check_gradients()
        with pytest.raises(OffloadError, match="has a graph of its own"):
            pair.ours(torch.randn(ROWS, WIDTH)).square().mean().backward(create_graph=True)
        for parameter in pair.ours.parameters():
            parameter.grad = None
        hook.clear()
        sparse = nn.Embedding(5, 3, sparse=True)
        hook.register(sparse.parameters())
        with pytest.raises(OffloadError, match="is sparse"):
            sparse(torch.tensor([1])).sum().backward()


@pytest.mark.req("S3-81")
@pytest.mark.parametrize("executor", ["late", "random"])
def test_activations_weights_and_gradients_leave_together(executor: ExecutorName) -> None:
    with paired(executor=executor, gradients=True, marked=True) as pair:
        pair.train(microbatches=3)
        stats = offload.marks.default_manager().engine.last_stats
        assert stats.spilled > 0


@pytest.mark.req("S3-81")
def test_they_leave_together_under_apply() -> None:
    with paired(gradients=True) as pair:
        handle = offload.apply(pair.ours, mode="groups", min_numel=1)
        pair.train(microbatches=2)
        handle.remove()


@pytest.mark.req("S3-24")
def test_the_short_names_do_the_same() -> None:
    torch.manual_seed(0)
    ours = Model(3)
    plain = copy.deepcopy(ours)
    with installed(build_manager("late")) as manager:
        assert isinstance(manager, PipelineOffloadManager)
        assert offload_weights(ours.layers[0]) is ours.layers[0]
        for layer in ours.layers[1:]:
            offload_weights(layer, name="rest")
        pair = Pair(ours, plain, TensorOffloader(), WeightOffloadHook(TensorOffloader()), None)
        pair.train()
        assert pair.present_bytes <= 2 * LAYER_BYTES
        reset_offloader()
        assert pair.present_bytes == 3 * LAYER_BYTES
        hook = offload_module_weights(ours.layers)
        assert pair.present_bytes == 0
        pair.train()
        hook.remove_hooks()
        assert pair.present_bytes == 3 * LAYER_BYTES


@pytest.mark.req("S3-20")
def test_a_registered_weight_that_cannot_leave_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with paired(1) as pair:
        tied = nn.Linear(WIDTH, WIDTH, bias=False)
        twin = nn.Sequential(tied, tied)
        pair.weights.register(twin)
        other = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        other[0].weight = tied.weight
        pair.weights.register(other)
        pair.weights.initial_offload()
        assert "1 registered weights stay on the device: 1 tied" in caplog.text
        x = torch.randn(2, WIDTH)
        assert torch.equal(other[0](x), x @ tied.weight.t() + other[0].bias)


@pytest.mark.req("S3-11")
def test_no_copy_of_a_source_is_in_the_repository() -> None:
    root = Path(__file__).resolve().parents[3]
    top = {path.name for path in root.iterdir()}
    assert {"offload", "tests"} <= top
    for folder in ("offload", "parallel", "moe", "scripts", "tests", "docs", "examples"):
        names = {path.name.lower() for path in (root / folder).rglob("*") if path.is_dir()}
        assert not {name for name in names if "fork" in name or "third_party" in name or "vendor" in name}
    foreign = {"megatron", "megatron_fork", "torchtitan", "stagehand", "third_party", "vendor"}
    assert not foreign & {name.lower() for name in top}
