"""Gradients that wait on the host are those of plain torch, bit for bit, whatever a loop does with them."""

from __future__ import annotations

import copy
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _has_foreach_support

import offload
from offload.engine import OffloadEngine
from offload.errors import CaptureError, HostBudgetError, OffloadError
from offload.optim import HybridDeviceOptimizer
from offload.optim.touch import AwaitedGradient, AwaitedWeight
from offload.weights.watched import StreamedGradient, StreamedWeight
from tests.inside import gradients_of, streams_from
from tests.threads import run_all
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import ROWS, WIDTH, Model, Pair, squares

LARGE = WIDTH * WIDTH
"""Elements: smaller gradients stay."""


@contextmanager
def waiting(
    model: nn.Module | None = None, *, executor: Any = "late", gradients: Any = "host", **options: Any
) -> Iterator[Pair]:
    """Two alike; the gradients of one wait on the host. At the end all is as it was."""
    torch.manual_seed(0)
    model = Model() if model is None else model
    plain = copy.deepcopy(model)
    with installed(build_manager(executor)) as manager, streams_from(LARGE):
        handle = offload.apply(model, gradients=gradients, **options)
        pair = Pair(model, plain, handle)
        yield pair
        handle.remove()
        pair.check_gradients()
        pair.check_weights()
        assert {type(p.grad) for p in model.parameters()} <= {Tensor, type(None)}
        assert manager.engine.arena.stats().lent_bytes == 0
        assert manager.engine.hooks.streamed == {}


def backward(pair: Pair, loss: Callable[[Any, Tensor], Tensor] = squares, **options: Any) -> None:
    x = torch.randn(ROWS, WIDTH)
    for model in (pair.model, pair.plain):
        loss(model, x).backward(**options)


def both(pair: Pair, change: Callable[[Any], object]) -> None:
    for model in (pair.model, pair.plain):
        change(model)


def away(pair: Pair) -> int:
    """Gradients that are not on the device."""
    return sum(each.known and not each.block.present for each in gradients_of(pair.handle).gradients)


def weight_of(model: Any, layer: int = 3) -> Any:
    return model.layers[layer].up.weight


# -- accumulation --------------------------------------------------------------------------------------------
class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=each) for each in (torch.double, torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(layer.weight.dtype))  # type: ignore[arg-type]
        return x


def test_norms_are_taken_of_each_dtype_as_it_was_asked_for() -> None:
    """That of half precision in float32, which torch refuses to take one of float64 in."""
    with waiting(_TwoDtypes()) as pair:
        engine, other = gradients_of(pair.handle)._engine, OffloadEngine(device="sim")
        optimizers = [
            HybridDeviceOptimizer(list(model.parameters()), 1.0, lr=1e-2, engine=each)
            for model, each in ((pair.model, engine), (pair.plain, other))
        ]
        for _ in range(2):
            x = torch.randn(ROWS, 64)
            for model in (pair.model, pair.plain):
                squares(model, x).backward()
            kinds = {g.parameter.dtype for g in gradients_of(pair.handle).gradients if g.norm is not None}
            assert torch.equal(*(each.clip_grad_norm_(0.1) for each in optimizers))
        assert kinds == {torch.double, torch.bfloat16}
        for optimizer in optimizers:
            optimizer.close()


@pytest.mark.req("S3-81")
@pytest.mark.parametrize("weights", [None, "host"])
@pytest.mark.parametrize("mode", [False, "groups", "hidden_states", "checkpoint", "selective"])
def test_microbatches_add_up_in_every_mode(mode: Any, weights: Any) -> None:
    with waiting(mode=mode, weights=weights) as pair:
        ours, its = pair.optimizers()
        for _ in range(3):
            for _ in range(4):
                backward(pair)
                assert away(pair) >= 9
            both(pair, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            pair.check_gradients()
            for optimizer in (ours, its):
                optimizer.step()
                optimizer.zero_grad()
        pair.check_weights()


def test_a_gradient_is_cleared_read_and_left_out_between_microbatches() -> None:
    with waiting() as pair:
        backward(pair)
        pair.check_gradients()  # which reads all
        backward(pair, lambda model, x: model(x, skip=(1, 4)).square().sum())
        both(pair, lambda model: model.layers[2].zero_grad())
        backward(pair, lambda model, x: model(x, skip=(2,)).square().sum())
        backward(pair)
        pair.check_gradients()
        both(pair, lambda model: model.zero_grad(set_to_none=False))
        pair.check_gradients()
        backward(pair)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_the_norm_is_of_all_gradients(norm_type: float, foreach: bool | None) -> None:
    with waiting() as pair:
        for _ in range(2):
            backward(pair)
        norms = [
            nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
            for model in (pair.model, pair.plain)
        ]
        assert torch.equal(*norms)
        assert gradients_of(pair.handle).residency.present_bytes <= pair.handle.gradients.window_bytes
        pair.check_gradients()
        both(pair, lambda model: nn.utils.clip_grad_value_(model.parameters(), 1e-3, foreach=foreach))


def test_a_norm_that_the_step_before_asked_for_is_taken_as_gradients_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Then no gradient comes back for it, but where it was written since, or there was no room."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    with waiting() as pair:
        residency, came = gradients_of(pair.handle).residency, []
        for step in ("asks", "asks", "writes", "asks again", "does not", "asks", "is full"):
            with monkeypatch.context() as patch:
                if step == "is full":
                    patch.setattr(torch, "_foreach_norm", full)
                for _ in range(2):
                    backward(pair)
            if step == "writes":
                both(pair, lambda model: weight_of(model).grad.mul_(3))
            before = residency.in_bytes
            for _ in range({"does not": 0, "asks again": 2}.get(step, 1)):
                models = pair.model, pair.plain
                assert torch.equal(*(nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in models))
                came.append(residency.in_bytes - before)
            pair.check_gradients()
            both(pair, lambda model: model.zero_grad())
            offload.step_end()
        scaled, each = came[1], weight_of(pair.model).nbytes
        assert came[0] > 1.5 * scaled  # once for the norm, once to be scaled
        assert scaled <= came[2] <= scaled + each
        assert came[3] == scaled < came[4] / 2
        assert all(each > 1.5 * scaled for each in came[5:])


def test_a_norm_that_was_taken_answers_for_what_is_asked_and_once() -> None:
    with waiting() as pair:
        for order, of_parts in ((2.0, False), (2.0, True), (2.0, False), (1.0, False)):
            backward(pair)
            found = []
            for model in (pair.model, pair.plain):
                whole = [parameter.grad for parameter in model.parameters()]
                parts = [gradient[:2] for gradient in whole if gradient is not None]
                norms = torch._foreach_norm(parts, order) if of_parts else []
                for gradients in (whole, whole):
                    norms += torch._foreach_norm(gradients, order)
                    torch._foreach_add_(torch._foreach_norm(gradients, order), 1.0)  # the caller's own
                found.append(norms)
            assert all(map(torch.equal, *found)), order
            offload.step_end()


def test_norms_asked_under_autocast_are_made_there() -> None:
    with waiting() as pair:
        for _ in range(2):
            backward(pair)
            found = []
            for model in (pair.model, pair.plain):
                gradients = [parameter.grad for parameter in model.parameters()]
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    found.append(nn.utils.get_total_norm(gradients))
            assert torch.equal(*found)
            assert gradients_of(pair.handle)._norms == {}
            offload.step_end()


def test_torch_takes_lists_of_what_is_watched_by_default() -> None:
    """Norms of a list and of a loop have other bits on a GPU."""
    device = torch.device("cuda")
    for watched in (StreamedWeight, StreamedGradient, AwaitedWeight, AwaitedGradient):
        tensor = torch.zeros(3).requires_grad_() if issubclass(watched, nn.Parameter) else torch.zeros(3)
        tensor.__class__ = watched
        assert _has_foreach_support([tensor], device)
        tensor.__class__ = Tensor


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "loop": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    "sgd fused": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True),
    "maximize": lambda model: torch.optim.Adam(model.parameters(), maximize=True, foreach=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), foreach=True),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters()),
    "rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "lbfgs": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=2),
}


@pytest.mark.parametrize("weights", [None, "host"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_gradients_that_are_away(name: str, weights: Any) -> None:
    with waiting(weights=weights) as pair:
        ours, its = OPTIMIZERS[name](pair.model), OPTIMIZERS[name](pair.plain)
        for set_to_none in (True, False, True):
            x = torch.randn(ROWS, WIDTH)
            for optimizer, model in ((ours, pair.model), (its, pair.plain)):
                for _ in range(2):
                    squares(model, x).backward()

                def closure(optimizer: Any = optimizer, model: Any = model, x: Tensor = x) -> Tensor:
                    optimizer.zero_grad()
                    loss = squares(model, x)
                    loss.backward()
                    return loss

                optimizer.step(closure if name == "lbfgs" else None)
            pair.check_gradients()
            pair.check_weights()
            for optimizer in (ours, its):
                optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_unscales_and_skips(fused: bool, bad: bool) -> None:
    with waiting() as pair:
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in range(2)]
        for scaler, model in zip(scalers, (pair.model, pair.plain), strict=True):
            torch.manual_seed(1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
            for step in range(3):
                x = torch.randn(ROWS, WIDTH)
                for _ in range(2):
                    scaler.scale(squares(model, x * (torch.inf if bad and step == 1 else 1))).backward()
                if step < 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                if step < 2:
                    optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale() == (4.0 if bad else 8.0)


# -- reads and writes ----------------------------------------------------------------------------------------
def saved(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


READS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda g: g.sum(),
    "item": lambda g: g[0, 0].item(),
    "data": lambda g: g.data,
    "detach": lambda g: g.detach(),
    "view": lambda g: g.view(-1)[3:9],
    "clone": lambda g: g.clone(),
    "cpu": lambda g: g.cpu() + 0,
    "array": lambda g: g.numpy(),
    "list": lambda g: g.tolist(),
    "text": repr,
    "deepcopy": copy.deepcopy,
    "saved": saved,
    "norms": lambda g: torch._foreach_norm([g, g.data])[0],
    "parameter": lambda g: nn.Parameter(g.clone()),
    "bool": lambda g: bool((g != 0).any()),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_gives_the_gradient(read: str) -> None:
    with waiting() as pair:
        for _ in range(2):
            backward(pair)
        found, expected = (READS[read](weight_of(model).grad) for model in (pair.model, pair.plain))
        if isinstance(expected, Tensor):
            assert isinstance(found, Tensor)
            assert torch.equal(found, expected)
        else:
            assert np.all(found == expected)
        backward(pair)


def _times(tensor: Tensor, factor: float) -> None:
    tensor.data.mul_(factor)  # which has a version of its own


_OPERATORS = torch.library.Library("offload_tests", "FRAGMENT")
_OPERATORS.define("times_(Tensor(a!) x, float factor) -> ()")
_OPERATORS.impl("times_", _times, "CompositeExplicitAutograd")

WRITES: dict[str, Callable[[Any], object]] = {
    "scaled": lambda p: p.grad.mul_(0.5),
    "a row": lambda p: p.grad[0].zero_(),
    "an item": lambda p: p.grad.__setitem__((0, 0), 3.0),
    "data": lambda p: p.grad.data.add_(1),
    "another's memory": lambda p: setattr(p.grad, "data", torch.ones_like(p)),
    "copied": lambda p: p.grad.copy_(torch.ones_like(p)),
    "replaced": lambda p: setattr(p, "grad", torch.ones_like(p)),
    "cleared": lambda p: setattr(p, "grad", None),
    "deleted": lambda p: delattr(p, "grad"),
    "out": lambda p: torch.add(p.grad, 1, out=p.grad),
    "foreach": lambda p: torch._foreach_mul_([p.grad], 3.0),
    "an operator": lambda p: torch.ops.offload_tests.times_(p.grad, 2.0),
    "an operator, by name": lambda p: torch.ops.offload_tests.times_.default(x=p.grad, factor=2.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_counts(write: str) -> None:
    with waiting() as pair:
        for _ in range(2):
            for _ in range(2):
                backward(pair)
            both(pair, lambda model: WRITES[write](weight_of(model)))
            pair.check_gradients()


def test_a_gradient_that_the_loop_keeps_is_its_own() -> None:
    with waiting() as pair:
        backward(pair)
        kept = [weight_of(model).grad for model in (pair.model, pair.plain)]
        aliases = [weight_of(model, 1).grad.detach()[2:] for model in (pair.model, pair.plain)]
        both(pair, lambda model: model.zero_grad())
        for _ in range(2):
            backward(pair)
        assert torch.equal(*kept)
        assert torch.equal(*aliases)
        for each in (kept, aliases):
            for tensor in each:
                tensor.mul_(2)
            assert torch.equal(*each)
        pair.check_gradients()


def test_a_gradient_that_moves_to_another_parameter_is_added_to_there() -> None:
    with waiting() as pair:
        backward(pair)

        def move(model: Any) -> None:
            weight_of(model, 1).grad, weight_of(model, 2).grad = weight_of(model, 2).grad, None

        both(pair, move)
        for _ in range(2):
            backward(pair)
        pair.check_gradients()


def test_a_gradient_in_a_graph_keeps_its_values() -> None:
    with waiting() as pair:
        found = []
        for model in (pair.model, pair.plain):
            torch.manual_seed(2)
            scale = torch.ones(WIDTH, requires_grad=True)
            x = torch.randn(ROWS, WIDTH)
            squares(model, x).backward()
            loss = (weight_of(model).grad * scale).square().sum()
            model.zero_grad()
            squares(model, x).backward()
            found.append(torch.autograd.grad(loss, scale)[0])
        assert torch.equal(*found)


@pytest.mark.parametrize("transform", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_read_under_any_grad_mode(transform: Any) -> None:
    with waiting() as pair:
        backward(pair)
        with transform():
            assert torch.equal(weight_of(pair.model).grad.norm(), weight_of(pair.plain).grad.norm())
        backward(pair)


# -- backwards -----------------------------------------------------------------------------------------------
class Twice(nn.Module):
    """A weight that is used twice in a forward."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, *self.layers):
            run = nn.Sequential(layer, nn.Tanh())
            x = (
                run(x)
                if self.reentrant is None
                else torch.utils.checkpoint.checkpoint(run, x, use_reentrant=self.reentrant)
            )
        return x


@pytest.mark.parametrize("executor", ["late", "early", "random"])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_a_weight_that_is_used_twice(reentrant: bool | None, executor: str) -> None:
    with waiting(Twice(reentrant), executor=executor) as pair:
        for _ in range(3):
            for _ in range(2):
                backward(pair, lambda model, x: squares(model, x.requires_grad_()))
            pair.check_gradients()
            both(pair, lambda model: model.zero_grad())


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_the_loops_own_find_the_gradient(first: bool) -> None:
    """Registered before ours, or after: they read it, scale it, and take it."""
    seen: dict[int, list[Tensor]] = {}

    def hook(model: Any) -> None:
        def look(parameter: Any) -> None:
            seen.setdefault(id(model), []).append(parameter.grad.norm())
            parameter.grad.mul_(0.5)

        def take(parameter: Any) -> None:
            seen[id(model)].append(parameter.grad)
            parameter.grad = None

        for layer in model.layers:
            layer.up.weight.register_post_accumulate_grad_hook(look)
        model.layers[2].down.weight.register_post_accumulate_grad_hook(take)
        weight_of(model, 0).register_hook(lambda grad: grad * 2)

    model = Model()
    if first:
        hook(model)
    with waiting(model) as pair:
        hook(pair.plain)  # a deep copy has none
        if not first:
            hook(pair.model)
        for _ in range(3):
            backward(pair)
        assert len(seen[id(pair.model)]) == 21
        assert all(map(torch.equal, seen[id(pair.model)], seen[id(pair.plain)]))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("take", [lambda g: g, lambda g: g.detach(), lambda g: g.view(-1)[3:]])
@pytest.mark.parametrize("leaves", [lambda g: None, lambda g: g.detach()])
def test_a_hook_takes_a_gradient_that_was_on_the_host(take: Any, leaves: Any, first: bool) -> None:
    """Or leaves another tensor of the same memory in its place."""
    seen: dict[int, list[Tensor]] = {}

    def hook(model: Any) -> None:
        def takes(parameter: Any) -> None:
            seen.setdefault(id(model), []).append(take(parameter.grad))
            parameter.grad = leaves(parameter.grad)

        for layer in model.layers[::2]:
            layer.up.weight.register_post_accumulate_grad_hook(takes)

    model = Model()
    with waiting(model) as pair:
        for both_hook in (hook,) if first else ():
            both(pair, both_hook)
        for number in range(4):
            backward(pair)
            if number == 1 and not first:
                both(pair, hook)
        assert all(map(torch.equal, seen[id(pair.model)], seen[id(pair.plain)]))
        pair.check_gradients()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("on purpose")


def test_an_exception_in_a_backward() -> None:
    def fails(model: Any, x: Tensor) -> Tensor:
        x = model.embed(x)
        for number, layer in enumerate(model.layers):
            x = layer(x if number != 3 else Fails.apply(x))
        return model.head(x).sum()

    with waiting() as pair:
        backward(pair)
        for _ in range(2):
            x = torch.randn(ROWS, WIDTH)
            for model in (pair.model, pair.plain):
                with pytest.raises(RuntimeError, match="on purpose"):
                    fails(model, x).backward()
            pair.check_gradients()
            backward(pair)
        assert away(pair) >= 9


def test_an_exception_in_a_hook_between_ours() -> None:
    """Torch has added to the gradient, and nobody is told."""
    broken = [True]

    def fails(parameter: Any) -> None:
        if broken[0]:
            raise RuntimeError("on purpose")

    model = Model()
    weight_of(model).register_post_accumulate_grad_hook(fails)
    with waiting(model) as pair:
        weight_of(pair.plain).register_post_accumulate_grad_hook(fails)
        broken[0] = False
        backward(pair)
        broken[0] = True
        x = torch.randn(ROWS, WIDTH)
        for each in (pair.model, pair.plain):
            with pytest.raises(RuntimeError, match="on purpose"):
                squares(each, x).backward()
        broken[0] = False
        pair.check_gradients()
        for _ in range(2):
            backward(pair)
        pair.check_gradients()
        assert away(pair) >= 9


@pytest.mark.filterwarnings("ignore:Using backward")
def test_graphs_of_gradients_and_graphs_that_are_kept() -> None:
    with waiting() as pair:
        backward(pair)
        x = torch.randn(ROWS, WIDTH)
        for model in (pair.model, pair.plain):
            loss = squares(model, x)
            loss.backward(retain_graph=True)
            loss.backward()
            torch.autograd.grad(squares(model, x), [*model.parameters()])
            squares(model, x).backward(create_graph=True)
            weight_of(model).grad.square().sum().backward()
        pair.check_gradients()
        both(pair, lambda model: model.zero_grad())
        for _ in range(2):
            backward(pair)
        pair.check_gradients()
        both(pair, lambda model: [setattr(p, "grad", None) for p in model.parameters()])


def test_an_embeddings_sparse_gradient_stays() -> None:
    class Embeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layers = nn.Embedding(64, WIDTH, sparse=True), Model()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(self.table((x.abs() * 10).long()[:, 0]))

    with waiting(Embeds()) as pair:
        for _ in range(3):
            backward(pair)
            for mine, its in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
                assert mine.grad.layout is its.grad.layout
                assert torch.equal(mine.grad.to_dense(), its.grad.to_dense())
        both(pair, lambda model: setattr(model.table.weight, "grad", None))


def test_gradients_with_one_memory_stay_and_are_said(caplog: pytest.LogCaptureFixture) -> None:
    def joined(model: Any, x: Tensor) -> Tensor:
        weights = torch.cat([layer.up.weight for layer in model.layers])
        return nn.functional.linear(x, weights).square().sum()

    with waiting() as pair:
        for _ in range(2):
            backward(pair, joined)
        pair.check_gradients()
        assert caplog.text.count("shares its memory with something else") == 1
        backward(pair)


def test_parameters_that_are_frozen_trained_replaced_and_converted() -> None:
    with waiting() as pair:
        for trains in (False, True):
            both(pair, lambda model, trains=trains: model.layers[2].requires_grad_(trains))
            backward(pair)
            backward(pair)
        new = nn.Linear(WIDTH, 2 * WIDTH)
        both(pair, lambda model: setattr(model.layers[1], "up", copy.deepcopy(new)))
        both(pair, lambda model: setattr(model.layers[4].up, "weight", copy.deepcopy(new.weight)))
        backward(pair)
        assert away(pair) >= 8
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            both(pair, lambda model, dtype=dtype: model.to(dtype))
            pair.check_gradients()
            for _ in range(2):
                backward(pair, lambda model, x, dtype=dtype: squares(model, x.to(dtype)))
            pair.check_gradients()
            both(pair, lambda model: model.zero_grad())


def test_a_model_that_starts_frozen_in_part() -> None:
    model = Model()
    model.layers[:3].requires_grad_(False)
    with waiting(model) as pair:
        backward(pair)
        before = pair.handle.gradients.host_bytes
        both(pair, lambda model: model.requires_grad_(True))
        for _ in range(2):
            backward(pair)
        assert pair.handle.gradients.host_bytes == before + 6 * 2 * LARGE * 4


def test_two_models_in_two_threads() -> None:
    with waiting() as pair:
        other = Model()
        second = Pair(other, copy.deepcopy(other), offload.apply(other, gradients="host"))

        def run(which: Pair) -> None:
            for _ in range(8):
                x = torch.randn(ROWS, WIDTH)
                for model in (which.model, which.plain):
                    squares(model, x).backward()

        threads = [threading.Thread(target=run, args=(each,)) for each in (pair, second)]
        run_all(threads)
        second.check_gradients()
        second.handle.remove()


def test_one_model_in_two_threads() -> None:
    """Everything is a whole number, so that sums do not depend on the order of the threads."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    with waiting(model) as pair:
        xs = [torch.randint(-2, 3, (ROWS, WIDTH)).float() for _ in range(8)]

        def run(mine: list[Tensor]) -> None:
            for x in mine:
                pair.model(x).sum().backward()

        threads = [threading.Thread(target=run, args=(xs[number::2],)) for number in range(2)]
        run_all(threads)
        for x in xs:
            pair.plain(x).sum().backward()
        pair.check_gradients()


def test_no_other_thread_enters_while_a_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    with waiting() as pair, monkeypatch.context() as patched:
        stream, entered = gradients_of(pair.handle), list[bool]()
        send = stream._send_made

        def enter() -> None:
            entered.append(stream._lock.acquire(blocking=False))
            if entered[-1]:
                stream._lock.release()

        def check(coming: Any) -> None:
            if coming is None:
                other = threading.Thread(target=enter)
                other.start()
                other.join()
            send(coming)

        patched.setattr(stream, "_send_made", check)
        backward(pair)
        assert entered == [False]


def test_a_dropped_model_gives_everything_back() -> None:
    with waiting() as pair:
        other = Model()
        offload.apply(other, gradients="host")
        squares(other, torch.randn(ROWS, WIDTH)).backward()
        gradient, gone = weight_of(other).grad, weakref.ref(other)
        engine = gradients_of(pair.handle)._engine
        del other
        assert gone() is None
        assert engine.arena.stats().lent_bytes == pair.handle.gradients.host_bytes
        with pytest.raises(OffloadError, match="its bytes are gone"):
            gradient.sum()


# -- what is asked -------------------------------------------------------------------------------------------
def test_with_weights_the_gradients_of_what_streams_leave_by_themselves() -> None:
    with waiting(gradients=None, weights="host") as pair:
        assert pair.handle.gradients.count == 12  # not the embedding's
        backward(pair)
    with waiting(gradients="device", weights="host") as pair:
        assert pair.handle.gradients is None
    with waiting(gradients="host", weights="host") as pair:
        assert pair.handle.gradients.count == 13
        assert "gradients of 13 parameters" in f"{pair.handle}"
        backward(pair)


def test_what_cannot_be_is_an_error_and_nothing_has_changed() -> None:
    model = Model()
    with installed(build_manager()) as manager, streams_from(LARGE):
        for wrong in ("cpu", True, 3, ""):
            with pytest.raises(ValueError, match='must be "host", "device", or None'):
                offload.apply(model, gradients=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="0 parameters are trained"):
            offload.apply(copy.deepcopy(model).requires_grad_(False), gradients="host")
        with streams_from(1 << 20), pytest.raises(ValueError, match="1,048,576 are the least"):
            offload.apply(model, gradients="host")
        assert manager is not None
        for overlap in ("backward", "forward"):
            optimizer = HybridDeviceOptimizer(
                model.parameters(), lr=0.1, model=model, engine=manager.engine, overlap=overlap
            )
            if overlap == "backward":  # its hooks come first
                with pytest.raises(ValueError, match=r"is stepped by a HybridDeviceOptimizer that was built"):
                    offload.apply(model, gradients="host")
            else:
                offload.apply(model, gradients="host").remove()
            optimizer.close()
    with installed(build_manager(host_limit_bytes=1 << 14)) as manager, streams_from(LARGE):
        with pytest.raises(HostBudgetError, match=r"need 25\.60 kB of the host: gradients"):
            offload.apply(model, gradients="host")
        assert not any(parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize("called", [True, False])
def test_figures_are_told(called: bool) -> None:
    """Where a module inside the model is called, and not the model, what was cleared came back in vain."""
    loss = squares if called else lambda model, x: squares(model.forward, x)
    with waiting() as pair:
        assert "no step has copied any yet" in str(pair.handle.explain())
        ours, its = pair.optimizers(fused=True)
        for _ in range(2):
            for _ in range(2):
                backward(pair, loss)
            for optimizer in (ours, its):
                optimizer.step()
                optimizer.zero_grad()
        figures = pair.handle.gradients
        total = (12 * 2 * LARGE + LARGE) * 4
        assert figures.host_bytes == total
        assert figures.out_bytes == 2 * total  # each backward
        # to be added to, and to be stepped; less what was there still, and more where it was fetched in vain
        assert abs(figures.in_bytes - 2 * total) <= 2 * figures.window_bytes
        report = pair.handle.report()
        assert report.as_dict()["gradients"]["out_bytes"] == 2 * total
        for text in (str(report), str(pair.handle.explain())):
            assert "gradients of 13 parameters, 25.60 kB, wait on the host" in text


def test_an_address_is_refused_with_the_gradients_name() -> None:
    with waiting() as pair:
        backward(pair)
        with pytest.raises(OffloadError, match=r"of the gradient of layers.3.up.weight.*apply\(gradients="):
            weight_of(pair.model).grad.data_ptr()


@pytest.mark.parametrize("read", [torch.sum, lambda gradient: nn.utils.get_total_norm([gradient])])
def test_a_graph_over_them_is_refused(read: Callable[[Tensor], Tensor]) -> None:
    with waiting() as pair:
        for _ in range(2):  # the second time a norm is known
            backward(pair)
            device = gradients_of(pair.handle)._device
            with pytest.raises(CaptureError, match="capture without gradients="), device.capture():
                read(weight_of(pair.model).grad)
            nn.utils.get_total_norm([weight_of(pair.model).grad])
