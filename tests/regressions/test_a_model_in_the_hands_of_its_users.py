"""What users of diffusion models do with one whose weights leave in groups, told of `apply(weights=)`: leaves
or blocks, streams, passes that skip or repeat, modules without parameters, moves, groups inside groups, and
state dicts in between. Each is compared bit by bit with the model as it was."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.marks import default_manager
from tests.inside import streaming_of, streams_from
from tests.unit.groups.stack import build_manager, installed

WIDTH, LAYERS = 32, 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, -1)
        return self.to_out(nn.functional.scaled_dot_product_attention(q, k, v))


class Layer(nn.Module):
    """A block with blocks inside, and with modules that have no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act, self.drop = nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.0)
        self.attention = Attention()
        self.parts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attention(self.norm(x))
        for part in self.parts:
            y = y + self.drop(self.act(part(y)))
        return y


class Denoiser(nn.Module):
    """Down, through the middle, up with what was kept on the way; and a convolution as groups have them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.down, self.up = (nn.ModuleList(Layer() for _ in range(LAYERS)) for _ in range(2))
        self.middle = nn.Sequential(nn.Identity(), nn.ReLU())
        self.register_buffer("scale", torch.tensor(0.5))
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, steps: int = 1) -> Tensor:
        for _ in range(steps):
            x = self.enter(x.mT).mT
            kept = []
            for layer in self.down:
                kept.append(x := layer(x))
            x = self.middle(x)
            for layer in self.up:
                x = layer(x + kept.pop())
            x = x * self.scale * self.gain
        return x


PLACES: dict[str, Any] = {
    "blocks": None,
    "leaves": ["*.to_qkv", "*.to_out", "*.parts.*", "enter"],
    "groups in a block": ["down.*.attention", "down.*.parts.*", "up.*"],
    "named groups": {"first": "down.*", "second": "up.*"},
}


@pytest.fixture(autouse=True)
def small_weights_stream() -> Iterator[None]:
    with installed(build_manager()), streams_from(WIDTH * WIDTH):
        yield


@pytest.fixture
def plain() -> Denoiser:
    torch.manual_seed(0)
    return Denoiser()


def noise(seed: int = 0) -> Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def alike(model: nn.Module, plain: nn.Module, **options: Any) -> None:
    """Outputs and gradients, with and without gradients."""
    with torch.no_grad():
        assert torch.equal(model(noise(), **options), plain(noise(), **options))
    for each in (model, plain):
        each.zero_grad()
        each(noise(1), **options).square().mean().backward()
    for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (its.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, its.grad), name


@pytest.mark.parametrize("blocks", PLACES)
@pytest.mark.parametrize("steps", [1, 3])
def test_leaves_and_blocks_pass_once_or_several_times(plain: Denoiser, blocks: str, steps: int) -> None:
    model = copy.deepcopy(plain)
    handle = offload.apply(model, weights="host", blocks=PLACES[blocks])
    for _ in range(3):
        alike(model, plain, steps=steps)
    stream = streaming_of(handle)
    largest = sorted(block.nbytes for block in stream.blocks)[-2:]
    assert stream.residency.present_bytes_peak <= sum(largest)
    handle.remove()
    alike(model, plain)


@pytest.mark.parametrize("mode", [None, "hidden_states", "groups", True])
def test_a_stream_of_the_callers(plain: Denoiser, mode: Any) -> None:
    """The pass is issued to a lane of its own, as a pipeline of denoising does."""
    model = copy.deepcopy(plain)
    with offload.apply(model, mode, weights="host"):
        device = default_manager().engine.device
        lane = device.new_compute_lane("another")
        for _ in range(2):
            alike(model, plain)
            with device.use_lane(lane):
                device.wait(lane, device.record(device.h2d), "test")
                alike(model, plain)
            device.wait(device.compute, device.record(lane), "test")


def test_a_module_without_parameters_is_no_block(plain: Denoiser) -> None:
    with pytest.raises(ValueError, match=r"no weight of Denoiser .* are middle\.0, middle\.1; name others"):
        offload.apply(plain, weights="host", blocks="middle.*")
    with pytest.raises(ValueError, match=r"no weight of Sequential .* are 0, 1, 2, 3, \.\.\.; name others"):
        offload.apply(nn.Sequential(*(nn.Linear(2, 2) for _ in range(5))), weights="host")
    model = copy.deepcopy(plain)
    with offload.apply(model, weights="host", blocks=["middle.*", "down.*.parts.*", "down.*.drop"]) as handle:
        assert handle.weights.streamed_bytes == LAYERS * 2 * WEIGHT_BYTES
        alike(model, plain)


def test_a_model_of_identities_has_nothing_to_stream() -> None:
    with pytest.raises(ValueError, match=r"no weight of Sequential that streams"):
        offload.apply(nn.Sequential(nn.Identity(), nn.Identity()), weights="host")


def test_a_group_inside_another_is_one_with_it(plain: Denoiser) -> None:
    model = copy.deepcopy(plain)
    with offload.apply(model, weights="host", blocks=["down.*", "down.*.attention", "up.*"]) as handle:
        assert handle.weights.blocks == 2 * LAYERS
        alike(model, plain)
        for inner in ("groups", None):
            with pytest.raises(ValueError, match=r"call remove\(\) on that handle first"):
                offload.apply(model.down, inner, weights="host", blocks="*")


def test_weights_of_one_model_beside_those_of_another(plain: Denoiser) -> None:
    """A pipeline has several models, which run one after the other, and one of them goes."""
    torch.manual_seed(1)
    second = Denoiser()
    models = [copy.deepcopy(plain), copy.deepcopy(second)]
    handles = [offload.apply(each, weights="host") for each in models]
    for _ in range(2):
        alike(models[0], plain)
        alike(models[1], second)
    lent = default_manager().engine.arena.lent_bytes
    del models[0], handles[0]
    gc.collect()
    alike(models[0], second)
    assert default_manager().engine.arena.lent_bytes == lent // 2
    handles[0].remove()


@pytest.mark.parametrize("move", ["dtype", "device", "both"])
def test_a_move_after_apply(plain: Denoiser, move: str) -> None:
    """To where it computes: nothing moves. To another dtype: weights on the host are converted as the others
    are. To another device: an error, before a weight has gone."""
    model = copy.deepcopy(plain)
    handle = offload.apply(model, weights="host")
    alike(model, plain)
    if move == "device":
        model.to("cpu")
        handle.remove()
        handle = offload.apply(model, weights="host")
    else:
        arguments: Any = (torch.float64,) if move == "dtype" else ("cpu", torch.float64)
        for each in (model, plain):
            each.to(*arguments)
        assert {value.dtype for value in model.state_dict().values()} == {torch.float64}
        x = noise().double()
        assert torch.equal(model(x), plain(x))
        for each in (model, plain):
            each.float()
    alike(model, plain)
    handle.remove()
    alike(model, plain)


def test_a_move_to_a_device_that_has_no_bytes_is_an_error_and_changes_nothing(plain: Denoiser) -> None:
    model = copy.deepcopy(plain)
    with offload.apply(model, weights="host"):
        weight = model.down[1].attention.to_out.weight  # type: ignore[union-attr]
        with pytest.raises(offload.OffloadError, match=r"is set to \(32, 32\) on meta, and the weight has"):
            weight.data = torch.empty(WIDTH, WIDTH, device="meta")
        with pytest.raises(offload.OffloadError, match=r"is set to \(3, 3\) on cpu, and the weight has"):
            weight.data = torch.empty(3, 3)
        alike(model, plain)


def test_a_state_dict_in_between_is_whole_and_goes_back(plain: Denoiser) -> None:
    model = copy.deepcopy(plain)
    with offload.apply(model, weights="host"):
        for each in (model, plain):
            each(noise()).mean().backward()
            for parameter in each.parameters():
                parameter.data.add_(parameter.grad, alpha=-0.01)
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        assert saved.keys() == plain.state_dict().keys()
        assert all(torch.equal(saved[name], value) for name, value in plain.state_dict().items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
        assert not model(noise()).any()
        assert model.load_state_dict(saved) == torch.nn.modules.module._IncompatibleKeys([], [])
        alike(model, plain)
        torch.manual_seed(5)
        fresh = Denoiser()
        fresh.load_state_dict(model.state_dict())
        alike(fresh, plain)
        del saved


def test_apply_and_remove_in_turn_leave_no_hook_and_no_byte(plain: Denoiser) -> None:
    model = copy.deepcopy(plain)
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    for blocks in PLACES.values():
        handle = offload.apply(model, weights="host", blocks=blocks)
        model(noise())
        handle.remove()
        handle.remove()
        now = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
        assert now == hooks
        assert default_manager().engine.arena.lent_bytes == 0
    alike(model, plain)


def interrupts(module: nn.Module, args: Any) -> None:
    raise KeyboardInterrupt


def test_a_pass_that_fails_in_the_middle_is_followed_by_one_that_does_not(plain: Denoiser) -> None:
    model = copy.deepcopy(plain)
    with offload.apply(model, weights="host"):
        alike(model, plain)
        for _ in range(2):
            stop = model.up[1].register_forward_pre_hook(interrupts)  # type: ignore[operator]
            with pytest.raises(KeyboardInterrupt):
                model(noise())
            stop.remove()
            alike(model, plain)
