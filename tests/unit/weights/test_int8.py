"""INT8 weights: what they are, what crosses the link, and what becomes of who writes one."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.device.rows import expand_rows, quantize_rows
from offload.errors import HostBudgetError, OffloadError
from tests.inside import streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import BLOCKS, ROWS, WIDTH, Model, Pair, dequantized, squares, streamed

INT8_BYTES = 2 * 2 * WIDTH * WIDTH + 4 * (2 * WIDTH + WIDTH)
"""Of one block's two weights: a byte an element, 4 a row."""


def int8(model: nn.Module | None = None, **options: Any) -> Any:
    return streamed(model, frozen=True, quantize="int8", **options)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    values = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(*weight.shape[:-1], 1)
    quantize_rows(weight, values, scales)
    return values, scales


# -- the numbers ---------------------------------------------------------------------------------------------
@pytest.mark.req("Q-1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(7, 33), (3, 5, 8), (1, 1), (4, 1 << 12)])
def test_a_value_is_within_half_a_scale_of_its_weight(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = (
        torch.randn(shape).mul_(torch.logspace(-9, 4, shape[0]).view(-1, *[1] * (len(shape) - 1))).to(dtype)
    )
    values, scales = rounded(weight)
    assert torch.equal(scales, (weight.abs().amax(-1, keepdim=True).float() / 127).clamp(min=1e-8))
    assert torch.equal(values, (weight.float() / scales).round().clamp(-127, 127).to(torch.int8))
    assert values.abs().max() <= 127
    error = (weight.double() - values.double() * scales.double()).abs()
    # the quotient, at most 127, is rounded to float32 before it is rounded to a whole number
    assert (error <= scales.double() * (0.5 + 127 * 2.0**-24)).all()
    for to in (dtype, torch.float32):
        out = torch.empty(shape, dtype=to)
        expand_rows(values, scales, out)
        assert torch.equal(out, (values.float() * scales).to(to))


@pytest.mark.req("Q-1")
def test_rows_of_zeros_stay_zeros() -> None:
    weight = torch.zeros(3, 8)
    weight[1] = 5
    values, scales = rounded(weight)
    out = torch.ones(3, 8)
    expand_rows(values, scales, out)
    assert torch.equal(out, weight)
    assert scales.flatten().tolist() == pytest.approx([1e-8, 5 / 127, 1e-8])


# -- steps ---------------------------------------------------------------------------------------------------
@pytest.mark.req("Q-3")
@pytest.mark.parametrize("executor", ["late", "early", "random"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_steps_have_the_bits_of_the_expanded_weights(executor: Any, reentrant: bool | None) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x.requires_grad_())

    with int8(Model(reentrant=reentrant), executor=executor) as pair:
        pair.train(loss=loss)
        pair.model.eval()
        with torch.no_grad():
            x = torch.randn(ROWS, WIDTH)
            assert torch.equal(pair.model(x), pair.plain(x))
        pair.train(2, loss=loss)


@pytest.mark.req("Q-3")
@pytest.mark.parametrize("weights", ["host", "12kB", "20kB", "1MB"])
def test_int8_crosses_the_link_and_the_window_holds_it(weights: str) -> None:
    with int8(weights=weights) as pair:
        residency, figures = pair.stream.residency, pair.figures
        device: Any = residency.device
        pair.train(3)
        assert device.d2h.copied_bytes == BLOCKS * INT8_BYTES  # of apply
        assert device.h2d.copied_bytes == residency.in_bytes
        assert residency.in_bytes % INT8_BYTES == 0 < residency.in_bytes
        assert residency.present_bytes_peak <= figures.limit_bytes
        assert figures.streamed_bytes == figures.int8_bytes == BLOCKS * INT8_BYTES
        if weights == "host":
            assert figures.limit_bytes == 2 * 2 * WIDTH * WIDTH * 4 + INT8_BYTES
            assert figures.in_bytes == 2 * (BLOCKS - 1) * INT8_BYTES  # the last one stays for its backward
        assert "blocks of 7.30 kB (7.30 kB of it as INT8) wait on the host" in repr(pair.handle)
        masters = [weight.master.numel() for block in pair.stream.blocks for weight in block.weights]
        assert sum(masters) == BLOCKS * INT8_BYTES


def test_trained_weights_stream_as_they_are_beside_int8_ones() -> None:
    model = Model()
    for layer in model.layers:
        layer.up.weight.requires_grad_(False)
    with streamed(model, quantize="int8") as pair:
        pair.train()
        block = pair.stream.blocks[0]
        assert [weight.int8 for weight in block.weights] == [True, False]
        assert block.link_bytes == 4 * 2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH + 4 * 2 * WIDTH


@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
def test_trained_weights_beside_int8_ones_are_stepped_by_the_host(overlap: Any) -> None:
    model = Model()
    for layer in model.layers:
        layer.up.weight.requires_grad_(False)
    with streamed(model, quantize="int8") as pair:
        optimizers = pair.with_state_on_host(overlap)
        pair.train(4, optimizers=optimizers)
        optimizers[0].close()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, WIDTH, WIDTH) / 8, requires_grad=False)
        self.turned = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).T / 8, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.einsum("bi,eio->bo", x * self.scale, self.weight).tanh()
        return x + (x @ self.turned.T) @ self.turned


def test_experts_are_rounded_by_row_and_any_order_in_memory_is_kept() -> None:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Experts() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    model = Mixture()
    with streamed(model, quantize="int8") as pair:
        pair.train()
        assert all(weight.int8 for block in pair.stream.blocks for weight in block.weights)
        assert pair.model.layers[0].turned.stride() == (1, 2 * WIDTH)


def test_convolutions_and_rows_shorter_than_their_scale_stream_as_they_are() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Linear(WIDTH, WIDTH)
            self.narrow = nn.Parameter(torch.randn(32 * WIDTH, 1))
            self.mixed = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.wide(x) + self.mixed(x.T[None])[0].T
            return x * self.narrow[:WIDTH, 0]

    class Layers(nn.Sequential):
        @property
        def layers(self) -> nn.Sequential:
            return self

    model = Layers(*(Narrow() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
    model[:3].requires_grad_(False)
    with streamed(model, quantize="int8") as pair:
        names = {weight.name.partition(".")[2]: weight.int8 for weight in pair.stream.blocks[0].weights}
        assert names == {"wide.weight": True, "narrow": False, "mixed.weight": False}
        pair.train()


@pytest.mark.parametrize("mode", ["groups", "hidden_states", "selective", "checkpoint", True])
def test_every_mode_of_activations(mode: Any) -> None:
    with int8(mode=mode, min_numel=16 if mode in ("groups", "selective", True) else None) as pair:
        pair.train()


def test_an_error_in_a_forward_and_then_going_on() -> None:
    with int8() as pair:
        pair.train(2)
        handle = pair.model.layers[2].up.register_forward_pre_hook(
            lambda *_: (_ for _ in ()).throw(KeyError())
        )
        with pytest.raises(KeyError):
            squares(pair.model, torch.randn(ROWS, WIDTH))
        handle.remove()
        pair.train(2)


# -- who reads -----------------------------------------------------------------------------------------------
def test_a_state_dict_is_expanded_when_it_is_read() -> None:
    with int8() as pair:
        name = "layers.1.up.weight"
        state = pair.model.state_dict()
        assert type(state[name]) is not Tensor  # no memory is written yet
        assert state[name].shape == (2 * WIDTH, WIDTH)
        file = io.BytesIO()
        torch.save({name: state[name]}, file)
        file.seek(0)
        assert torch.equal(torch.load(file)[name], pair.plain.state_dict()[name])
        assert type(state[name]) is Tensor
        copied = copy.deepcopy(pair.model)
        assert all(map(torch.equal, copied.parameters(), pair.plain.parameters()))
        assert repr(pair.model.layers[0].up.weight) == repr(pair.plain.layers[0].up.weight)
        assert torch.equal(
            pair.model.layers[0].up.weight.detach().sum(), pair.plain.layers[0].up.weight.sum()
        )


def test_a_state_dict_outlives_the_weights() -> None:
    with int8() as pair:
        state = pair.model.state_dict()
        pair.handle.dequantize("layers.0")
    for name, value in pair.plain.state_dict().items():
        assert torch.equal(state[name], value), name


def test_a_write_to_a_state_dict_is_no_silent_loss() -> None:
    with int8() as pair:
        x = torch.randn(ROWS, WIDTH)
        state = pair.model.state_dict()
        read, name = state["layers.1.up.weight"].clone(), "layers.2.up.weight"
        with pytest.raises(OffloadError, match=r"layers\.2\.up\.weight is held as INT8"):
            state[name].mul_(2)
        state["layers.1.up.weight"].mul_(2)  # had been read, so torch alone is called
        with pytest.raises(OffloadError, match=r"layers\.1\.up\.weight is held as INT8"):
            squares(pair.model, x)
        assert torch.equal(squares(pair.model, x), squares(pair.plain, x))
        assert torch.equal(pair.model.state_dict()["layers.1.up.weight"], read)


def test_a_lost_write_hides_no_other_in_its_block() -> None:
    """Of one block that is on the device, one weight's state is written in time, the next one's too late."""
    with int8(weights="1MB") as pair:
        pair.handle.dequantize("layers.1")
        state, x = pair.model.state_dict(), torch.randn(ROWS, WIDTH)
        squares(pair.model, x)
        assert pair.stream.blocks[1].present
        with torch.no_grad():
            pair.model.layers[1].down.weight.mul_(2)
            pair.plain.layers[1].down.weight.mul_(2)
            pair.plain.layers[1].up.weight.mul_(3)
            state["layers.1.up.weight"].mul_(3)
            state["layers.1.down.weight"].mul_(0)
        del state
        with pytest.raises(OffloadError, match="old one"):
            squares(pair.model, x)
        assert torch.equal(squares(pair.model, x), squares(pair.plain, x))


# -- who writes ----------------------------------------------------------------------------------------------
def add(pair: Pair) -> None:
    with torch.no_grad():
        pair.model.layers[1].up.weight.add_(1)


def add_to_data(pair: Pair) -> None:
    pair.model.layers[1].up.weight.data += 1


def set_data(pair: Pair) -> None:
    weight = pair.model.layers[1].up.weight
    weight.data = weight.data + 1


def write_out(pair: Pair) -> None:
    weight = pair.model.layers[1].up.weight
    with torch.no_grad():
        torch.zeros(weight.shape, out=weight)


def write_list(pair: Pair) -> None:
    with torch.no_grad():
        torch._foreach_mul_([layer.up.weight for layer in list(pair.model.layers)[1:]], 2)


def load(pair: Pair) -> None:
    state = {"layers.1.up.weight": torch.ones(2 * WIDTH, WIDTH)}
    try:
        pair.model.load_state_dict(state, strict=False)
    except RuntimeError as error:  # torch's, with ours in its text
        raise OffloadError(str(error)) from error


def assign(pair: Pair) -> None:
    state = {"layers.1.up.weight": torch.ones(2 * WIDTH, WIDTH)}
    pair.model.load_state_dict(state, strict=False, assign=True)


def train_it(pair: Pair) -> None:
    pair.model.layers[1].up.weight.requires_grad_()


def train_it_by_attribute(pair: Pair) -> None:
    pair.model.layers[1].up.weight.requires_grad = True


def train_all(pair: Pair) -> None:
    pair.model.layers[1:].requires_grad_(True)


def write_in_forward(pair: Pair) -> None:
    def write(module: nn.Module, args: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(2)

    handle = pair.model.layers[1].up.register_forward_pre_hook(write)
    try:
        squares(pair.model, torch.randn(ROWS, WIDTH))
    finally:
        handle.remove()


WRITES = [
    add,
    add_to_data,
    set_data,
    write_out,
    write_list,
    load,
    assign,
    train_it,
    train_it_by_attribute,
    train_all,
    write_in_forward,
]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_refused_and_changes_nothing(write: Any) -> None:
    with int8() as pair:
        pair.train(2)
        with pytest.raises(OffloadError, match=r"layers\.1\.up\.weight is held as INT8") as caught:
            write(pair)
        assert "dequantize('layers.1')" in str(caught.value)
        pair.check_weights()
        pair.model.layers.requires_grad_(False)  # the norms, which are not INT8
        pair.train(2)


@pytest.mark.parametrize("write", [write for write in WRITES if write not in (write_list, train_all)])
def test_after_dequantize_the_write_is_torchs(write: Any) -> None:
    with int8() as pair:
        pair.train(2)
        pair.handle.dequantize("layers.1")
        pair.check_weights()
        write(pair)
        plain = Pair(pair.plain, pair.plain, pair.handle)
        torch.manual_seed(1)
        write(plain)
        pair.train(2)
        assert pair.stream.blocks[1].link_bytes == pair.stream.blocks[1].nbytes
        assert pair.figures.int8_bytes == (BLOCKS - 1) * INT8_BYTES


def test_reading_into_another_tensor_is_no_write() -> None:
    with int8() as pair, torch.no_grad():
        out = torch.empty(2 * WIDTH, WIDTH)
        torch.mul(pair.model.layers[0].up.weight, 2, out=out)
        assert torch.equal(out, pair.plain.layers[0].up.weight * 2)
        torch.add(out, pair.model.layers[0].up.weight, out=out)
        assert torch.equal(out, pair.plain.layers[0].up.weight * 2 + pair.plain.layers[0].up.weight)


@pytest.mark.req("Q-4")
def test_conversions_keep_the_int8_and_change_what_it_is_expanded_to() -> None:
    with int8() as pair:
        pair.train(2)
        before = [weight.master.clone() for weight in pair.stream.blocks[2].weights]
        original = {name: value.clone() for name, value in pair.plain.state_dict().items()}
        for convert in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float):
            convert(pair.model)
            now = [weight.master for weight in pair.stream.blocks[2].weights]
            assert all(map(torch.equal, before, now))
            values, scales = pair.stream.blocks[2].weights[0].int8_views(now[0])
            weight = pair.model.layers[2].up.weight
            assert torch.equal(weight.detach(), (values.float() * scales).to(weight.dtype))
        weights = {name for name in original if ".up.weight" in name or ".down.weight" in name}
        assert all(torch.equal(pair.model.state_dict()[name], original[name]) for name in weights)
        pair.plain.half().bfloat16().double().float()
        for name in weights:
            pair.plain.get_parameter(name).data = original[name]
        pair.train(2)


# -- what cannot be ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named_and_nothing_has_changed(bad: float) -> None:
    model = Model().requires_grad_(False)
    model.layers[4].down.weight[3, 5] = bad
    plain = copy.deepcopy(model)
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    with installed(build_manager("late")) as manager, streams_from(WIDTH * WIDTH):
        with pytest.raises(ValueError, match=r"layers\.4\.down\.weight has values that are inf or nan"):
            offload.apply(model, weights="host", quantize="int8")
        assert manager.engine.arena.stats().lent_bytes == 0
        assert [parameter.data_ptr() for parameter in model.parameters()] == pointers
        for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.nan_to_num(), its.nan_to_num())
            assert type(mine) is nn.Parameter


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"quantize": "int8"}, "is of streamed weights"),
        ({"weights": "host", "quantize": "int4"}, "must be"),
        ({"weights": "host", "quantize": 8}, "must be"),
    ],
)
def test_arguments_that_cannot_be(options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        offload.apply(Model(), **options)


def test_dequantize_names_what_there_is() -> None:
    with int8() as pair:
        with pytest.raises(ValueError, match=r"names no block with INT8 weights; they are layers\.0"):
            pair.handle.dequantize("layers.9")
        pair.handle.dequantize()
        with pytest.raises(ValueError, match="they are none"):
            pair.handle.dequantize()
        pair.train(2)


def test_dequantize_without_host_memory_leaves_int8() -> None:
    model = Model().requires_grad_(False)
    with installed(build_manager("late", host_limit_bytes=16_384)), streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, weights="host", quantize="int8")
        with pytest.raises(HostBudgetError, match="plain weights need"):
            handle.dequantize()
        x = torch.randn(ROWS, WIDTH)
        expected = model(x)
        for layer in (plain := copy.deepcopy(model)).layers:
            assert torch.equal(layer.up.weight, dequantized(layer.up.weight))
        assert torch.equal(expected, plain(x))
        handle.remove()


def test_the_warning_halves_its_tokens(caplog: pytest.LogCaptureFixture) -> None:
    from offload.policy.streamed import Size
    from offload.weights.order import MeasuredStep, Pass, Use

    step = MeasuredStep(tuple((Use(at, Pass.FORWARD), 0.001) for at in range(4)), 1e9)
    whole, half = [Size(8_000_000, 8_000_000)] * 4, [Size(8_000_000, 4_000_000)] * 4
    assert step.longest_pass(whole) == 2 * step.longest_pass(half) == 8.0
    with caplog.at_level(logging.WARNING), int8() as pair:
        pair.train(4)
    assert not caplog.records
