"""A loop computes the same bits with its blocks' weights on the host, and fewer of them are on the device."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from itertools import groupby
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.checkpoint import checkpoint

import offload
from offload.client import Phase
from offload.device.sim import ExecutorName
from offload.errors import CaptureError, OffloadError
from offload.weights import hooks
from tests.inside import streaming_of
from tests.threads import run_all
from tests.unit.weights.streamed import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Model, Pair, squares, streamed


@pytest.mark.req("W-3", "W-7", "W-10")
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_loop_has_the_bits_of_plain_torch(
    executor: ExecutorName, frozen: bool, reentrant: bool | None
) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return squares(model, x.requires_grad_())

    with streamed(Model(reentrant=reentrant), frozen=frozen, executor=executor) as pair:
        phases: list[Phase] = []
        pair.stream._engine.on_phase = phases.append
        pair.train(loss=loss)
        # a recompute, whose gradients are on, is none of the forward's
        turns = groupby(phase for phase in phases if phase in (Phase.FORWARD, Phase.BACKWARD))
        assert [phase for phase, _ in turns] == [Phase.FORWARD, Phase.BACKWARD] * 4


@pytest.mark.req("S0-48")
@pytest.mark.parametrize("mode", ["groups", "hidden_states", "selective", "auto", True, "legacy", "disk"])
@pytest.mark.parametrize("frozen", [False, True])
def test_it_goes_with_every_mode_of_activations(mode: Any, frozen: bool) -> None:
    with streamed(frozen=frozen, mode=mode, min_numel=33) as pair:  # no biases
        pair.train(steps=6)
        assert pair.figures.misses == 0
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES


@pytest.mark.req("S3-25")
def test_nine_tenths_of_the_blocks_are_away_in_the_forward_and_in_the_backward() -> None:
    number = 20
    seen: dict[str, int] = {}

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen["forward"] = max(seen.get("forward", 0), pair.present_bytes)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            seen["backward"] = max(seen.get("backward", 0), pair.present_bytes)
            return gradients[0]

    with streamed(Model(number)) as pair:
        pair.train(2)
        for model in (pair.model, pair.plain):
            for layer in model.layers:
                layer.register_forward_hook(lambda module, args, output: Spy.apply(output))
        pair.train(2)
        assert seen == {"forward": 2 * BLOCK_BYTES, "backward": 2 * BLOCK_BYTES}
        assert 0.1 * number * BLOCK_BYTES >= 2 * BLOCK_BYTES


@pytest.mark.parametrize("together", [False, True])
def test_it_goes_with_a_watermark_around_it(together: bool) -> None:
    marks = {"mode": "watermark", "high": "4096B", "min_numel": 33}
    with streamed(**(marks if together else {})) as pair:
        around = None if together else offload.apply(pair.model, **marks)
        pair.train(5)
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES
        if around is not None:
            assert around.report().total.moved_bytes > 0
            around.remove()
            pair.train(2)


@pytest.mark.req("W-5", "W-9")
def test_in_a_settled_step_clean_blocks_are_dropped_and_each_turn_keeps_what_it_used_last() -> None:
    count = 8
    with streamed(Model(count), frozen=True) as pair:
        pair.train(1)
        figures = pair.figures
        # nobody had foretold a block; the last two of the forward were there for the backward
        assert (figures.misses, figures.hits) == (2 * count - 2, 2)
        pair.train(1)
        first_ms = pair.figures.stall_ms  # of the step before
        pair.train(2)
        figures = pair.figures
        assert first_ms > figures.stall_ms > 0
        assert (figures.misses, figures.hits) == (0, 2 * count)
        report = pair.handle.report()
        assert report.verdict.startswith("offload: weights: 8.19 kB on the device, ")
        assert report.as_dict()["weights"]["hits"] == 2 * count
        # the two that a pass used last are there for the next one
        assert figures.in_bytes == 2 * (count - 2) * BLOCK_BYTES
        assert figures.out_bytes == 0


@pytest.mark.req("W-9")
@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_trained_weights_go_back_once_after_their_step(options: dict[str, Any]) -> None:
    with streamed() as pair:
        pair.train(5, optimizers=pair.optimizers(**options))
        assert pair.figures.out_bytes == BLOCKS * BLOCK_BYTES
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES


def test_an_optimizer_with_lists_of_weights_runs_block_by_block() -> None:
    with streamed() as pair:
        pair.train(4, optimizers=pair.optimizers(foreach=True))
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES


@pytest.mark.req("W-8")
def test_microbatches_clipping_and_zeroed_gradients() -> None:
    with streamed() as pair:
        optimizers = pair.optimizers()
        for _ in range(3):
            for _ in range(3):
                x = torch.randn(ROWS, WIDTH)
                for model in (pair.model, pair.plain):
                    squares(model, x).backward()
            pair.check_gradients()
            for model, optimizer in zip((pair.model, pair.plain), optimizers, strict=True):
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
        pair.check_weights()
        # in each backward, too, blocks have left for others
        assert pair.stream.residency.present_bytes_peak == 2 * BLOCK_BYTES


def test_another_order_is_loaded_when_it_comes_and_learned_again() -> None:
    with streamed() as pair:
        optimizers = pair.optimizers()
        for skip in ((), (1, 2), (5,), (0,), (), (3,)):
            pair.train(3, lambda model, x, skip=skip: model(x, skip).square().sum(), optimizers)
            assert pair.figures.misses == 0, skip


def test_evaluation_in_between() -> None:
    with streamed() as pair:
        optimizers = pair.optimizers()
        for context in (torch.no_grad(), torch.inference_mode()):
            pair.train(2, optimizers=optimizers)
            x = torch.randn(ROWS, WIDTH)
            with context:
                for _ in range(3):
                    assert torch.equal(pair.model.eval()(x), pair.plain.eval()(x))
            pair.model.train()


def test_a_submodule_used_twice_and_weights_used_outside_of_their_block() -> None:
    def loss(model: Any, x: Tensor) -> Tensor:
        first, second = model.layers[0], model.layers[1]
        y = first(second(first(x))) + F.linear(model.layers[2].up(x), model.layers[3].up.weight.t())
        return y.square().sum() + (second.down.weight @ second.up.weight).sum()

    with streamed() as pair:
        pair.train(loss=loss)
        pair.train(loss=lambda model, x: (model(x) + model(2 * x)).square().sum())


def test_frozen_blocks_are_trained_in_mid_run_and_frozen_again() -> None:
    with streamed(frozen=True) as pair:
        for trains in (False, True, False):
            for model in (pair.model, pair.plain):
                model.layers[2].requires_grad_(trains)
            pair.train(3)


def test_autocast_casts_the_weights_of_now_and_says_what_it_keeps(caplog: pytest.LogCaptureFixture) -> None:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return squares(model, x)

    with streamed() as pair:
        pair.train(loss=loss)
    assert caplog.text.count("each cast of a weight is saved") == 1


def test_a_second_backward_and_a_gradient_of_a_gradient() -> None:
    with streamed() as pair:
        for _ in range(3):
            x = torch.randn(ROWS, WIDTH)
            for model in (pair.model, pair.plain):
                loss = squares(model, x)
                loss.backward(retain_graph=True)
                loss.backward()
                given = x.clone().requires_grad_()
                (found,) = torch.autograd.grad(squares(model, given), given, create_graph=True)
                found.square().sum().backward()
            pair.check_gradients()


def test_weights_stepped_between_a_forward_and_its_backward_are_torchs_own_error() -> None:
    with streamed() as pair:
        x = torch.randn(ROWS, WIDTH)
        for model, optimizer in zip((pair.model, pair.plain), pair.optimizers(), strict=True):
            loss = squares(model, x)
            loss.backward(retain_graph=True)
            optimizer.step()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()


@pytest.mark.parametrize("interrupt", [KeyError, KeyboardInterrupt])
def test_an_exception_in_the_forward_or_the_backward_and_going_on(interrupt: type[BaseException]) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise interrupt("in the backward")

    def fail(*args: Any) -> None:
        raise interrupt("in the forward")

    with streamed() as pair:
        optimizers = pair.optimizers()
        pair.train(2, optimizers=optimizers)
        inner = pair.model.layers[3].down.register_forward_hook(fail)
        for _ in range(2):
            with pytest.raises(interrupt):
                squares(pair.model, torch.randn(ROWS, WIDTH))
        inner.remove()
        outer = pair.model.layers[2].register_forward_hook(lambda module, args, output: Fails.apply(output))
        with pytest.raises(interrupt):
            squares(pair.model, torch.randn(ROWS, WIDTH)).backward()
        outer.remove()
        optimizers[0].zero_grad()
        pair.train(3, optimizers=optimizers)
        assert not any(block.entered for block in pair.stream.blocks)


def test_a_function_that_keeps_its_weight_outside_of_what_autograd_saves() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            ctx.x, ctx.weight = x, weight
            return x @ weight.t()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
            return gradients[0] @ ctx.weight, gradients[0].t() @ ctx.x

    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + Product.apply(x, self.weight)

    with streamed(nn.Sequential(*(Custom() for _ in range(BLOCKS)))) as pair:
        pair.train()


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_a_view_of_a_weight_is_an_argument_of_a_block_that_is_recomputed(mode: str) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return x + (self.up(x).tanh() @ other).tanh()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Tied() for _ in range(BLOCKS))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, self.layers[2].up.weight.t())
            return x

    with streamed(Net(), mode=mode) as pair:
        pair.train()


@pytest.mark.parametrize(
    "options", [{}, {"mode": "hidden_states"}, {"mode": "selective"}, {"mode": "groups"}]
)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_an_operator_that_saves_the_parameter_itself(
    options: dict[str, Any], frozen: bool, checkpointed: bool
) -> None:
    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=not frozen)
            self.second = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=not frozen)

        def forward(self, x: Tensor) -> Tensor:
            y = (x.unsqueeze(1) * self.first).sum(-1).tanh()
            return x + (y.unsqueeze(1) * self.second).sum(-1)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(Scales() for _ in range(BLOCKS))

        def forward(self, x: Tensor) -> Tensor:
            x = self.embed(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            return x

    with streamed(Net(), **options) as pair:
        pair.train()
        assert pair.stream.residency.present_bytes_peak == 2 * 2 * WIDTH * WIDTH * 4


def test_a_weight_that_its_forward_writes_goes_back() -> None:
    class Decays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.mul_(0.9)
            return x + x @ self.weight.clone()

    with streamed(nn.Sequential(*(Decays() for _ in range(BLOCKS)))) as pair:
        for _ in range(4):
            x = torch.randn(ROWS, WIDTH)
            assert torch.equal(pair.model(x), pair.plain(x))
        pair.check_weights()


def test_an_alias_that_nobody_watches_keeps_its_block_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    held: list[Tensor] = []

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            held.append(self.weight.data)
            return x + x @ self.weight

    with streamed(nn.Sequential(*(Holds() for _ in range(BLOCKS)))) as pair:
        pair.train(2)
        mine = [alias for alias in held if alias.untyped_storage().nbytes()]
        assert len(mine) == len(held)  # none of them was freed under its holder
        held.clear()
        pair.train(1)
    assert caplog.text.count("more weights are on the device than weights= allows") == 1


def test_while_a_windows_blocks_cannot_leave_one_more_is_on_the_device() -> None:
    with streamed(frozen=True) as pair:
        residency = streaming_of(pair.handle).residency
        block = residency.blocks[0]
        held: list[Tensor] = []
        hooks = [
            layer.up.register_forward_hook(lambda module, args, output: held.append(module.weight.data))
            for layer in pair.model.layers[:2]
        ]
        pair.model.layers[1](pair.model.layers[0](torch.randn(ROWS, WIDTH)))
        for hook in hooks:
            hook.remove()
        for _ in range(2):
            for layer in pair.model.layers[2:]:
                layer(torch.randn(ROWS, WIDTH))
                assert residency.present_bytes <= residency.window_bytes + block.nbytes
        held.clear()


def test_functional_calls_and_transforms() -> None:
    with streamed(frozen=True) as pair:
        x = torch.randn(ROWS, WIDTH)
        results = []
        for model in (pair.model, pair.plain):
            named = dict(model.named_parameters())
            doubled = {name: 2 * parameter for name, parameter in named.items()}

            def of(parameters: dict[str, Tensor], model: nn.Module = model) -> Tensor:
                return torch.func.functional_call(model, parameters, (x,)).sum()

            found = torch.func.grad(of)(named)
            results.append(
                [
                    torch.func.functional_call(model, doubled, (x,)),
                    torch.func.vmap(model)(x),
                    torch.func.grad(lambda given, model=model: model(given).sum())(x),
                    *(found[name] for name in named),
                ]
            )
        assert all(torch.equal(mine, its) for mine, its in zip(*results, strict=True))


def test_two_models_and_one_that_is_dropped() -> None:
    with streamed() as pair:
        hooks = len(_global_optimizer_post_hooks)
        other = Model()
        second = Pair(other, copy.deepcopy(other), offload.apply(other, weights="host"))
        for _ in range(2):
            pair.train(2)
            second.train(2)
        engine = second.stream._engine
        weight, gone = other.layers[0].up.weight, weakref.ref(other)  # type: ignore[union-attr]
        del other, second
        gc.collect()
        assert gone() is None
        assert len(_global_optimizer_post_hooks) == hooks
        assert len(engine.hooks.streamed) == 2 * BLOCKS
        with pytest.raises(OffloadError, match="its bytes are gone"):
            weight.sum()  # type: ignore[operator]
        pair.train(2)
        assert engine.arena.lent_bytes == 2 * BLOCKS * BLOCK_BYTES  # masters, and gradients


@pytest.mark.parametrize("weights", ["8.2kB", "20.5kB"])  # what all streamed takes, and five blocks
def test_so_many_bytes_are_on_the_device_and_no_more(weights: str) -> None:
    with streamed(weights=weights) as pair:
        pair.train(6)
        figures = pair.figures
        limit = float(weights.removesuffix("kB")) * 1e3
        assert pair.present_bytes <= pair.stream.residency.present_bytes_peak <= limit
        assert figures.misses == 0


def test_weights_that_all_fit_come_once() -> None:
    with streamed(weights="24.6kB") as pair:
        pair.train(4)
        assert (pair.figures.kept_blocks, pair.figures.in_bytes) == (BLOCKS, 0)


def test_a_graph_is_not_captured_over_streamed_blocks() -> None:
    with streamed() as pair:
        device: Any = pair.stream._device
        with pytest.raises(CaptureError, match="come to other addresses each time"), device.capture():
            pair.model(torch.randn(ROWS, WIDTH))
        pair.train(2)


def test_the_same_memory_after_5_steps_and_50() -> None:
    seen = []
    with streamed() as pair:
        optimizers = pair.optimizers()
        arena = pair.stream._engine.arena
        for step in range(50):
            pair.train(1, optimizers=optimizers)
            with torch.no_grad():
                squares(pair.model, torch.randn(ROWS, WIDTH))
            if step in (4, 49):
                seen.append((pair.present_bytes, arena.lent_bytes, arena.held_bytes))
    assert seen[0] == seen[1]


def test_a_backward_after_remove_finds_its_weights() -> None:
    with streamed() as pair:
        x = torch.randn(ROWS, WIDTH)
        losses = [squares(model, x) for model in (pair.model, pair.plain)]
        stream = streaming_of(pair.handle)
        pair.handle.remove()
        for loss in losses:
            loss.backward()
        pair.check_gradients()
        assert stream.removed
        pair.handle.remove()


def test_threads_that_train_evaluate_and_read_one_model_beside_each_other() -> None:
    with streamed(frozen=True) as pair:
        x = torch.randn(ROWS, WIDTH)
        expected = pair.plain(x).detach()
        state = {name: value.clone() for name, value in pair.plain.state_dict().items()}
        wrong: list[object] = []

        def evaluate() -> None:
            with torch.no_grad():
                assert torch.equal(pair.model(x), expected)

        def differentiate() -> None:
            found = []
            for model in (pair.model, pair.plain):
                given = x.clone().requires_grad_()
                found += torch.autograd.grad(squares(model, given), given)
            assert torch.equal(*found)

        def read() -> None:
            assert all(torch.equal(value, state[name]) for name, value in pair.model.state_dict().items())
            assert torch.equal(copy.deepcopy(pair.model.layers[2].up.weight), state["layers.2.up.weight"])
            assert pair.model.layers[4].up.weight.sum() == state["layers.4.up.weight"].sum()

        def often(what: Any) -> None:
            try:
                for _ in range(15):
                    what()
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=often, args=(what,)) for what in (evaluate, differentiate, read)]
        run_all(threads)
        assert wrong == []


@pytest.mark.parametrize("name", ["run", "_engine_run_backward"])
def test_a_thread_whose_backward_another_one_runs_is_not_waited_for(name: str) -> None:
    """As the one that calls backward() stands while autograd's thread of a GPU recomputes a block."""
    known, begun, lock = hooks.Readers(), threading.Lock(), threading.Lock()

    def run() -> None:
        known.note()
        begun.release()
        lock.acquire()

    beside = os.path.dirname(offload.__file__) + "_of_mine/train.py"  # no file of the package
    run.__code__ = run.__code__.replace(co_name=name, co_filename=beside)
    thread = threading.Thread(target=run)
    with lock:
        begun.acquire()
        thread.start()
        assert begun.acquire(timeout=60)
        assert (thread.ident in known.places()) == (name == "run")
    thread.join()


@pytest.mark.parametrize("waits", [False, True], ids=["a long call", "a thread that waits"])
def test_bytes_are_freed_behind_a_call_of_another_thread_that_began_inside_the_forward(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "PATIENCE_S", 0.01 if waits else 60.0)
    begun, over = threading.Event(), threading.Event()

    class Begins(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if thread.ident is None and self is not model.layers[0]:
                thread.start()
                assert begun.wait(60)
            return super().forward(x)

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Begins(512, 512, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    model, found = Wide(), []

    def read() -> None:
        model.layers[0].weight.sum()  # is seen
        begun.set()
        if waits:
            over.wait(60)
        else:
            found.append(torch.sort(model.layers[1].weight).values)

    thread = threading.Thread(target=read)
    with streamed(model, frozen=True) as pair:
        with torch.no_grad():
            pair.model(torch.ones(1, 512))
        block = pair.stream.blocks[1]
        pair.stream.free(block)
        assert not block.present
        over.set()
        thread.join()
        assert waits or torch.equal(found[0], pair.plain.layers[1].weight.sort().values)
        pair.stream.end_step()
        assert not waits or pair.stream.figures.calls_ms >= 10
        assert not waits or "for calls of other threads that read weights" in str(pair.handle.report())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("mode", [None, "hidden_states"])
def test_torchs_layers_that_read_weights_past_their_modules(frozen: bool, mode: Any) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
    with streamed(nn.TransformerEncoder(layer, 4), frozen=frozen, mode=mode) as pair:
        x = torch.randn(2, ROWS, WIDTH)
        if not frozen:
            pair.train(3, lambda model, _: squares(model, x))
        for model in (pair.model, pair.plain):
            model.eval()
        for inner in pair.plain.layers:  # with a hook torch takes its fast path, in C++, for attention alone
            inner.register_forward_hook(lambda *_: None)
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                assert torch.equal(pair.model(x), pair.plain(x))
                # outside of its block torch sees a watched class, and does not take that path
                first = [model.layers[1].self_attn(x, x, x)[0] for model in (pair.model, pair.plain)]
                torch.testing.assert_close(*first)


def test_hooks_of_the_users_that_read_weights() -> None:
    with streamed() as pair:
        seen: tuple[list[float], list[float]] = ([], [])
        for mine, model in zip(seen, (pair.model, pair.plain), strict=True):

            def note(module: Any, *_: object, mine: list[float] = mine) -> None:
                mine.append((module.up.weight.norm() + module.down.weight.sum()).item())

            for layer in model.layers:
                layer.register_forward_pre_hook(note)
                layer.register_forward_hook(note)
                layer.register_full_backward_pre_hook(note)
                layer.register_full_backward_hook(note)
                weight = layer.up.weight
                weight.register_hook(
                    lambda gradient, weight=weight, mine=mine: mine.append((weight * gradient).sum().item())
                )
        pair.train(2)
        assert seen[0] == seen[1]
        assert len(seen[0]) == 2 * BLOCKS * 5


def test_blocks_that_are_replaced_taken_out_and_added() -> None:
    with streamed() as pair:
        pair.train(2)
        for change in (
            lambda layers, new: layers.__setitem__(2, new),
            lambda layers, new: layers.__delitem__(4),
            lambda layers, new: layers.append(new),
        ):
            new = Model(1).layers[0]
            for model in (pair.model, pair.plain):
                change(model.layers, copy.deepcopy(new))
            gc.collect()
            pair.train(2)
        # masters, and gradients
        assert pair.stream._engine.arena.lent_bytes == 2 * (BLOCKS - 2) * BLOCK_BYTES


@pytest.mark.parametrize("name", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrised_weights(name: str) -> None:
    parametrise = getattr(nn.utils.parametrizations, name)

    class Parametrised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = parametrise(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.linear(x)

    with streamed(nn.Sequential(*(Parametrised() for _ in range(4)))) as pair:
        pair.train(3)
        weights = [model[2].linear.weight for model in (pair.model, pair.plain)]
        assert torch.equal(*weights)


def test_a_block_that_switches_gradients_on_where_they_were_off() -> None:
    class Switches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return (x.unsqueeze(1) * self.weight).sum(-1).tanh()

    with streamed(nn.Sequential(*(Switches() for _ in range(BLOCKS)))) as pair:
        x = torch.randn(ROWS, WIDTH)
        for _ in range(3):
            found = []
            for model in (pair.model, pair.plain):
                given = x.clone().requires_grad_()
                with torch.no_grad():
                    y = model(given)
                found.append(torch.autograd.grad(y.sum(), given)[0])
            assert torch.equal(*found)
        assert pair.stream.residency.present_bytes_peak == 2 * WIDTH * WIDTH * 4
