"""Weights of experts that stream by the expert: bits, bytes, and every use that needs the whole weight."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import moe
from offload.device.sim import ExecutorName
from offload.errors import OffloadError
from tests.inside import by_expert, impose, window_of
from tests.unit.weights.streamed import Pair, streamed

WIDTH, HIDDEN, EXPERTS, LAYERS, ROWS = 32, 16, 16, 3, 24
EXPERT_BYTES = 3 * HIDDEN * WIDTH * 4
LAYER_BYTES = EXPERTS * EXPERT_BYTES
LIMIT = 2 * (LAYER_BYTES + EXPERTS * WIDTH * 4)  # with the routers


class Model(nn.Module):
    """Mixtures of this project, with frozen experts and what trains around them."""

    def __init__(self, checkpoints: bool | None = None, experts: int = EXPERTS, **placement: Any) -> None:
        super().__init__()
        config = moe.MixtureConfig(dim=WIDTH, expert_hidden=HIDDEN, experts=experts, top_k=2)
        self.layers = nn.ModuleList(
            moe.Mixture(config, placement=moe.Placement(**placement)) for _ in range(LAYERS)
        )
        for layer in self.layers:
            layer.experts.requires_grad_(False)
        self.embed, self.checkpoints = nn.Linear(WIDTH, WIDTH), checkpoints
        self.skips: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in (layer for number, layer in enumerate(self.layers) if number not in self.skips):
            made = (
                layer(x) if self.checkpoints is None else checkpoint(layer, x, use_reentrant=self.checkpoints)
            )
            x = x + made
        return x


@contextmanager
def mixtures(model: nn.Module | None = None, **options: Any) -> Iterator[Pair]:
    torch.manual_seed(0)
    with streamed(Model() if model is None else model, blocks="layers.*", **options) as pair:
        yield pair


def train(pair: Pair, steps: int = 4, rows: int = ROWS, of: Callable[..., Tensor] | None = None) -> None:
    for _ in range(steps):
        x = torch.randn(rows, WIDTH)
        for model in (pair.model, pair.plain):
            (model(x) if of is None else of(model, x)).square().sum().backward()
        pair.check_gradients()
        for optimizer in pair.optimizers():
            optimizer.step()
            optimizer.zero_grad()
    pair.check_weights()


@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("checkpoints", [None, False, True])
def test_gradients_have_the_bits_of_resident_experts(
    executor: ExecutorName, checkpoints: bool | None
) -> None:
    """Under each executor, and in each kind of checkpoint, also with experts that are recomputed."""
    nth = get_args(ExecutorName).index(executor) + (None, False, True).index(checkpoints)
    placement: dict[str, Any] = {"experts_mode": "checkpoint"} if nth % 2 else {}
    with mixtures(Model(checkpoints, **placement), executor=executor) as pair:
        train(pair)
        assert pair.figures.expert_weights == 2 * LAYERS


def test_what_nobody_routes_to_does_not_cross_the_link() -> None:
    with mixtures() as pair:
        for model in (pair.model, pair.plain):
            for layer in model.layers:
                with torch.no_grad():
                    layer.router.gate.weight[3:].zero_()
                    layer.router.gate.weight[:3].mul_(100)
        train(pair, 2)
        before = moved(pair)
        train(pair, 4)
        assert moved(pair) - before <= 4 * 2 * LAYERS * 5 * EXPERT_BYTES


def moved(pair: Pair) -> int:
    return pair.stream.residency.in_bytes


def test_experts_with_the_most_tokens_stay() -> None:
    with mixtures(weights=f"{LIMIT}B") as pair:
        for model in (pair.model, pair.plain):
            for layer in model.layers:
                layer.router.requires_grad_(False)
                with torch.no_grad():  # mostly two of these four
                    layer.router.gate.weight[4:].zero_()
                    layer.router.gate.weight[:4].mul_(100)
        train(pair, 6)
        for each in by_expert(pair.handle):
            kept = {*each.kept}
            used = {expert for expert, mean in enumerate(each.tokens) if mean > 1}
            assert used <= kept or kept <= used
            assert used
        figures = pair.figures
        assert figures.expert_misses * 10 <= figures.expert_hits


@pytest.mark.parametrize("experts", [2, 5, 24, 9 * EXPERTS])
def test_the_room_is_kept_and_used(experts: int) -> None:
    """Of so many experts: whatever is used, the device has what the window says, and no byte more."""
    with mixtures(weights=f"{LIMIT}B") as pair:
        train(pair, 2)
        window, stream = window_of(pair.handle), pair.stream
        device, wait, seen = stream._engine.device, stream._engine.device.wait, [0]

        def others() -> int:
            return device.active_bytes() - window.held_bytes - stream.residency.present_bytes

        def count(lane: Any, event: Any, order: str) -> None:
            seen.append(window.held_bytes)
            wait(lane, event, order)

        before = others()
        stream.limit_bytes = 1 << 30
        window.share(experts * EXPERT_BYTES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device, "wait", count)
            train(pair, 3, rows=64)
        assert max(seen) <= window.room_bytes <= experts * EXPERT_BYTES
        assert window.held_bytes >= min(experts, 2 * EXPERTS) * EXPERT_BYTES // 2
        assert others() == before
        if experts == 9 * EXPERTS:
            window.misses = 0
            train(pair, 1, rows=64)
            assert window.misses == 0


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_one_expert_has_all_rows(rows: int) -> None:
    with mixtures() as pair:
        for model in (pair.model, pair.plain):
            for layer in model.layers:
                with torch.no_grad():
                    layer.router.gate.weight.zero_()  # ties go to the lower number
        train(pair, rows=rows)
        assert all(each.kept for each in by_expert(pair.handle)), "what one slot had stays, too"


def test_a_forward_without_tokens() -> None:
    with mixtures() as pair:
        train(pair)
        train(pair, 1, rows=0)
        train(pair, 1)


def test_evaluation_and_inference_between_steps() -> None:
    with mixtures() as pair:
        for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
            train(pair, 2)
            x = torch.randn(5, WIDTH)
            with mode():
                assert torch.equal(pair.model.eval()(x), pair.plain.eval()(x))
            pair.model.train(), pair.plain.train()


@pytest.mark.parametrize("limit", [LIMIT, 2 * LIMIT])
def test_a_weight_that_an_evaluation_uses_first_takes_room_between_a_forward_and_its_backward(
    limit: int,
) -> None:
    model = Model()
    model.skips = (1, 2)
    with mixtures(model, weights=f"{limit}B") as pair:
        train(pair)
        x = torch.randn(ROWS, WIDTH)
        made = [each(x) for each in (pair.model, pair.plain)]
        for each in (pair.model, pair.plain):
            each.skips = ()
            with torch.no_grad():
                each(x)
        assert len(by_expert(pair.handle)) == 2 * LAYERS
        for y in made:
            y.square().sum().backward()
        pair.check_gradients()


def test_evaluation_alone_streams_by_the_expert() -> None:
    with mixtures() as pair, torch.no_grad():
        for _ in range(4):
            x = torch.randn(5, WIDTH)
            assert torch.equal(pair.model(x), pair.plain(x))
        assert by_expert(pair.handle)


class Loop(nn.Module):
    """An expert at a time, as transformers' eager experts; `use` is what is made of the weight."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.w, self.use = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH), False), use

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in (x.detach().sum(1).abs() * 3).long().remainder(EXPERTS).unique():
            w = self.use(self.w, expert)
            y = y + functional.linear(torch.relu(functional.linear(x, w)), w.t())
        return y * 1e-2


class Loops(nn.Module):
    def __init__(
        self, use: Callable[[Tensor, Any], Tensor] = Tensor.__getitem__, reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.embed, self.reentrant = nn.Linear(WIDTH, WIDTH), reentrant
        self.layers = nn.ModuleList(Loop(use) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            made = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
            x = x + made
        return x


def by_tensor(w: Tensor, expert: Any) -> Tensor:
    return w[torch.stack([expert, expert])][1]


USES: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "tensor": Tensor.__getitem__,
    "int": lambda w, expert: w[int(expert)],
    "negative": lambda w, expert: w[int(expert) - EXPERTS],
    "tensors": by_tensor,
}


@pytest.mark.parametrize(("reentrant", "executor"), [(None, "early"), (False, "late"), (True, "random")])
@pytest.mark.parametrize("use", USES)
def test_experts_that_are_indexed(use: str, reentrant: bool | None, executor: ExecutorName) -> None:
    with mixtures(Loops(USES[use], reentrant), executor=executor) as pair:
        train(pair, rows=4)
        assert len(by_expert(pair.handle)) == LAYERS


WHOLE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "einsum": lambda w, expert: torch.einsum("eoi,e->oi", w, functional.one_hot(expert, EXPERTS).float()),
    "slice": lambda w, expert: w[:, 2:, :][int(expert)],
    "mask": lambda w, expert: w[functional.one_hot(expert, EXPERTS).bool()][0],
    "pair": lambda w, expert: w[int(expert), :],
    "list": lambda w, expert: w[[int(expert), 0]][0],
    "unbind": lambda w, expert: w.unbind()[int(expert)],
    "data": lambda w, expert: w.data[int(expert)],
    "cast": lambda w, expert: w.to(torch.float64)[int(expert)].float(),
    "address": lambda w, expert: w[int(expert)] * (w.data_ptr() != 0),
}


@pytest.mark.parametrize("reentrant", [None, False])
@pytest.mark.parametrize("use", WHOLE)
def test_weights_of_other_uses_come_with_their_block(use: str, reentrant: bool | None) -> None:
    with mixtures(Loops(WHOLE[use], reentrant)) as pair:
        train(pair, rows=4)
        assert not by_expert(pair.handle)


@pytest.mark.parametrize(("reentrant", "executor"), [(None, "early"), (False, "late"), (True, "random")])
@pytest.mark.parametrize("use", [use for use in WHOLE if use != "address"])
def test_another_use_afterwards_loads_the_whole_weight(
    use: str, reentrant: bool | None, executor: ExecutorName
) -> None:
    with mixtures(Loops(reentrant=reentrant), executor=executor) as pair:
        train(pair, 2, rows=4)
        assert by_expert(pair.handle)
        for model in (pair.model, pair.plain):
            model.layers[1].use = WHOLE[use]
        train(pair, 2, rows=4)
        for model in (pair.model, pair.plain):
            model.layers[1].use = Tensor.__getitem__
        train(pair, 2, rows=4)


def test_an_address_afterwards_is_an_error_that_names_the_way_out() -> None:
    with mixtures(Loops()) as pair:
        train(pair, 2, rows=4)
        pair.model.layers[1].use = lambda w, expert: w[int(expert)] * (w.data_ptr() != 0)
        with pytest.raises(OffloadError, match="call remove"):
            pair.model(torch.randn(4, WIDTH))
        pair.model.layers[1].use = Tensor.__getitem__
        train(pair, 2, rows=4)


def written_inside(w: Tensor, expert: Any) -> Tensor:
    with torch.no_grad():
        w[int(expert)].mul_(2)
        return w[int(expert)].mul_(0.25)


def test_a_write_through_an_index_in_a_forward_is_the_weights() -> None:
    with mixtures(Loops()) as pair:
        train(pair, 2, rows=4)
        for model in (pair.model, pair.plain):
            model.layers[1].use = written_inside
        x = torch.randn(4, WIDTH)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(pair.model(x), pair.plain(x))
        pair.check_weights()
        assert not any(each.given for each in pair.stream.experts.weights), "nobody has one"
        for model in (pair.model, pair.plain):
            model.layers[1].use = Tensor.__getitem__
        train(pair, 2, rows=4)


@pytest.mark.parametrize("how", ["in place", "state", "load", "assign", "data", "half", "one"])
def test_a_weight_is_written_between_steps(how: str) -> None:
    with mixtures() as pair:
        train(pair, 3)
        for model in (pair.model, pair.plain):
            w, state = model.layers[1].experts.w1_EGD, model.state_dict()
            with torch.no_grad():
                if how == "in place":
                    w.mul_(1.5)
                elif how == "one":
                    w[3].mul_(1.5)
                elif how == "state":
                    state["layers.1.experts.w1_EGD"].mul_(1.5)
                elif how == "data":
                    w.data = w.data * 1.5
                elif how == "half":
                    model.layers[1].experts.to(torch.bfloat16).to(torch.float32)
                else:
                    made = {key: value.clone() * 1.5 for key, value in state.items()}
                    model.load_state_dict(made, assign=how == "assign")
                    model.layers[1].experts.requires_grad_(False)
        train(pair, 3)
        assert by_expert(pair.handle)


def test_a_write_between_a_forward_and_its_backward_is_torchs_error() -> None:
    for make in (Model, Loops):
        with mixtures(make()) as pair:
            train(pair, 3, rows=4)
            loss = pair.model(torch.randn(4, WIDTH)).sum()
            with torch.no_grad():
                for parameter in pair.model.layers[2].parameters():
                    if parameter.dim() == 3:
                        parameter.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            with torch.no_grad():
                for parameter in pair.plain.layers[2].parameters():
                    if parameter.dim() == 3:
                        parameter.mul_(2)
            pair.model.zero_grad()


def test_other_bytes_inside_a_forward_are_an_error() -> None:
    def given(w: Tensor, expert: Any) -> Tensor:
        w.data = torch.zeros_like(w)
        return w[int(expert)]

    with mixtures(Loops()) as pair:
        train(pair, 2, rows=4)
        pair.model.layers[0].use = given
        with pytest.raises(OffloadError, match="inside a forward"):
            pair.model(torch.randn(4, WIDTH))
        pair.model.layers[0].use = Tensor.__getitem__
        train(pair, 2, rows=4)


def test_weights_that_train_come_with_their_block_and_frozen_again_by_the_expert() -> None:
    with mixtures() as pair:
        train(pair, 3)
        for model in (pair.model, pair.plain):
            model.layers[1].experts.requires_grad_(True)
        train(pair, 3)
        assert len(by_expert(pair.handle)) == 2 * LAYERS - 2
        for model in (pair.model, pair.plain):
            model.layers[1].experts.requires_grad_(False)
            model.zero_grad()
        train(pair, 3)
        assert len(by_expert(pair.handle)) == 2 * LAYERS


@pytest.mark.parametrize("ends", ["step", "handle"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_step_or_the_streaming_ends_between_a_forward_and_its_backward(
    reentrant: bool | None, ends: str
) -> None:
    """What the forward saved as a part of its block, the backward reads by the expert, or whole."""
    for make in (Model, Loops):
        with mixtures(make(reentrant=reentrant) if make is Loops else make(reentrant)) as pair:
            x = torch.randn(4, WIDTH)
            if ends == "handle":
                train(pair, 2, rows=4)
            losses = [model(x).square().sum() for model in (pair.model, pair.plain)]
            if ends == "step":
                pair.stream.end_step()
                assert by_expert(pair.handle)
            else:
                pair.handle.remove()
            for loss in losses:
                loss.backward()
            pair.check_gradients()
            if ends == "step":
                train(pair, 2)


def test_a_second_derivative_is_torchs() -> None:
    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH), False)

        def forward(self, x: Tensor) -> Tensor:
            ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32) * (x.shape[0] // EXPERTS)
            h = functional.grouped_mm(x, self.w.mT, offs=ends).square()
            return functional.grouped_mm(h, self.w, offs=ends) * 1e-2

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.embed = nn.ModuleList(Squared() for _ in range(2)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = x + layer(x)
            return x

    def penalty(model: nn.Module, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return grad * 1e-2

    with mixtures(Two()) as pair:
        train(pair, 4, rows=32, of=penalty)
        assert by_expert(pair.handle)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_buffer_of_offsets_is_read_again_once_it_is_written(mode: Callable[[], Any]) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH), False)

        def forward(self, x: Tensor, ends: Tensor) -> Tensor:
            return functional.grouped_mm(x, self.w, offs=ends)

    with mixtures(nn.ModuleDict({"layers": nn.ModuleList([Product()])})) as pair, mode():
        ends, x = torch.zeros(EXPERTS, dtype=torch.int32), torch.randn(EXPERTS, WIDTH)
        for first in (0, 3, 5):
            ends.copy_(torch.arange(EXPERTS) * (torch.arange(EXPERTS) >= first)).add_(1)
            assert torch.equal(*[each.layers[0](x, ends) for each in (pair.model, pair.plain)])
            pair.stream.end_step()
        assert by_expert(pair.handle)


def test_two_forwards_accumulate() -> None:
    with mixtures() as pair:
        train(pair, 4, of=lambda model, x: model(x) + model(x.flip(0)))


def test_copies_and_functional_calls() -> None:
    with mixtures() as pair:
        train(pair, 3)
        x = torch.randn(6, WIDTH)
        copied = copy.deepcopy(pair.model)
        assert torch.equal(copied(x), pair.plain(x))
        other = {name: torch.randn_like(value) * 0.02 for name, value in pair.plain.named_parameters()}
        calls = [torch.func.functional_call(model, other, (x,)) for model in (pair.model, pair.plain)]
        assert torch.equal(*calls)
        train(pair, 2)


def test_transforms_of_torch_func_see_the_whole_weight() -> None:
    with mixtures(Loops(lambda w, expert: w[3])) as pair:
        train(pair, 3, rows=4)
        assert by_expert(pair.handle)
        x = torch.randn(6, WIDTH)
        found = [
            torch.func.grad(lambda y, model=model: straight(model, y).square().sum())(x)
            for model in (pair.model, pair.plain)
        ]
        assert torch.equal(*found)
        train(pair, 2, rows=4)


def straight(model: nn.Module, x: Tensor) -> Tensor:
    """Without the choice of experts, which reads numbers."""
    for layer in model.layers:  # type: ignore[union-attr]
        layer.forward = lambda y, layer=layer: functional.linear(y, layer.w[3]) @ layer.w[2]
        x = x + layer(x)
        del layer.forward
    return x


def test_an_error_in_a_forward_and_then_going_on() -> None:
    with mixtures() as pair:
        train(pair, 3)
        with pytest.raises(ValueError, match="width"):
            pair.model.layers[1](torch.randn(3, WIDTH + 1))
        train(pair, 3)


def test_a_model_that_goes_returns_its_memory() -> None:
    with mixtures() as pair:
        train(pair, 3)
        module = weakref.ref(pair.model.layers[0].experts)
        stream, arena = pair.stream, pair.stream._engine.arena
        lent = arena.stats().lent_bytes
        pair.model.layers[0] = copy.deepcopy(pair.plain.layers[0])
        gc.collect()
        assert module() is None
        stream.end_step()
        gradient = EXPERTS * WIDTH * 4  # the router's, on the host as well
        assert arena.stats().lent_bytes == lent - LIMIT // 2 - gradient
        assert len(by_expert(pair.handle)) == 2 * LAYERS - 2
        train(pair, 2)


def test_a_compiled_block_is_plain_inside() -> None:
    with mixtures() as pair:
        for layer in pair.model.layers:
            layer.compile(backend="eager")
        train(pair, 2)
        assert not by_expert(pair.handle)


def test_small_matrices_and_modules_of_torch_come_with_their_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.t()[None])[0].t()

    with mixtures(nn.ModuleDict({"layers": nn.ModuleList([Block(), Block()])})) as pair:
        assert all(weight.uses is None for block in pair.stream.blocks for weight in block.weights)


def test_the_figures_are_told() -> None:
    with mixtures() as pair:
        train(pair, 4)
        text, figures = str(pair.handle.explain()), pair.figures
        assert f"{2 * LAYERS} weights stream by the expert" in text
        assert figures.expert_hits + figures.expert_misses > 0
        assert figures.streamed_bytes == sum(
            parameter.numel() * 4 for parameter in pair.plain.parameters() if parameter.dim() == 3
        ) + sum(layer.router.gate.weight.numel() * 4 for layer in pair.plain.layers)


@pytest.mark.parametrize("cap", ["weights_ahead_bytes", "weights_in_flight_bytes", "kind_ahead_bytes"])
def test_limits_of_what_is_fetched_ahead_are_kept(cap: str) -> None:
    with mixtures(weights=f"{LIMIT}B") as pair:
        train(pair, 3)
        window, engine = window_of(pair.handle), pair.stream._engine
        limit, ahead = 2 * HIDDEN * WIDTH * 4, []

        def count(layer: nn.Module, args: Any, result: Any) -> None:
            ahead.append(sum(slot.nbytes for slot in window._slots if slot.unread))

        for layer in pair.model.layers:
            layer.register_forward_hook(count)
        train(pair, 1, rows=64)
        assert max(ahead) > limit
        impose(engine, **{cap: limit})
        ahead.clear()
        train(pair, 2, rows=64)
        if cap != "weights_in_flight_bytes":
            assert 0 < max(ahead) <= limit
        impose(engine, **{cap: 0})
        ahead.clear()
        train(pair, 2, rows=64)
        assert max(ahead) <= limit * (cap == "kind_ahead_bytes"), "one slot at least of a kind"
        impose(engine, **{cap: None})


class Layers(nn.Module):
    """Whole decoder layers: attention, then experts."""

    def __init__(self) -> None:
        super().__init__()
        config = moe.MixtureConfig(dim=WIDTH, expert_hidden=HIDDEN, experts=EXPERTS, top_k=2, heads=2)
        self.layers = nn.ModuleList(moe.DecoderLayer(config) for _ in range(LAYERS)).requires_grad_(False)
        self.embed, self.seen = nn.Linear(WIDTH, WIDTH), dict[int, int]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)[None]
        angles = torch.ones(x.shape[1], WIDTH // 4)
        for layer in self.layers:
            x = layer(x, (angles.cos(), angles.sin()))
        return x[0]


@pytest.mark.req("S3-59")
def test_experts_that_are_used_often_arrive_beside_the_attention_before_them() -> None:
    with mixtures(Layers()) as pair:
        train(pair, 5)
        window = window_of(pair.handle)
        found = []
        for layer in pair.model.layers:
            weights = by_expert(pair.handle)
            each = next(each for each in weights if each.weight.module() is layer.mixture.experts)

            def count(module: nn.Module, args: Any, each: Any = each) -> None:
                coming = window._here(each) - {*each.kept}
                found.append((len(coming), sum(mean >= 0.5 for mean in each.tokens) - len(each.kept)))

            layer.attn.register_forward_pre_hook(count)
        train(pair, 1)
        for coming, likely in found:
            assert coming >= min(likely, 4)
            assert likely > 0
