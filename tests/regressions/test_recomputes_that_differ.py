"""A recompute gave other bits than its forward, and nothing was said.

What others changed between a forward and its recompute was not put back: an attribute set for each call,
dropout's p, hooks, submodules, buffers, an argument that is no tensor, a weight that an optimizer stepped.
Nor were generators of numpy and Python put back that are bound to an attribute in another way than was
foreseen. torch without offload had saved the values. Now attributes and submodules are put back. What a
recompute saves is compared with what its forward saved, and a difference is an error before the optimizer's
step; mode "auto" keeps or moves such blocks from then on. Each test is a program whose gradients were wrong.
"""

from __future__ import annotations

import collections
import random
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as fw
from torch import Tensor, nn
from torch.nn import functional as F

import offload
from offload import PipelineOffloadManager, RecomputeDiffersError
from tests.threads import run_all
from tests.ticks import counted_time
from tests.unit.groups.stack import build_manager, installed

WIDTH, ROWS, BLOCKS = 16, 12, 4
RECOMPUTING = ("hidden_states", "selective")
Change = Callable[[Any, int], object]


@pytest.fixture(autouse=True)
def manager() -> Iterator[PipelineOffloadManager]:
    random.seed(0)
    np.random.seed(0)
    with counted_time(), installed(build_manager()) as built:
        yield built


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("t", torch.ones(1))
        self.depth, self.p = 1.0, 0.1
        self.settings = {"depth": 1.0}
        self.act: nn.Module = nn.Tanh()
        self.cond: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.act((self.a(x) + self.b) * self.depth * self.settings["depth"] + self.t), self.p)
        return x + y + (0 if self.cond is None else (self.cond * x * self.depth).tanh())


class Net(nn.Module):
    """Each block is called twice, as in a universal transformer; `each` is called before every call."""

    def __init__(self, each: Change = lambda block, call: None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.each = each

    def forward(self, x: Tensor) -> Tensor:
        for call, block in enumerate([*self.blocks, *self.blocks]):
            self.each(block, call)
            x = block(x)
        return x


def nothing(block: Any, call: int) -> None: ...


def depth(block: Any, call: int) -> None:
    block.depth = 1.0 + call


def condition(block: Any, call: int) -> None:
    block.cond = torch.full((WIDTH,), 0.5 + call)


def rate(block: Any, call: int) -> None:
    block.p = 0.5 - block.p


def hook(block: Any, call: int) -> None:
    if block.a._forward_hooks:
        block.a._forward_hooks.clear()
    else:
        block.a.register_forward_hook(lambda module, args, output: output * 2)


def submodule(block: Any, call: int) -> None:
    block.act = nn.Sigmoid() if isinstance(block.act, nn.Tanh) else nn.Tanh()


def buffer(block: Any, call: int) -> None:
    with torch.no_grad():
        block.t.mul_(0.5)


def bias(block: Any, call: int) -> None:
    with torch.no_grad():
        block.b.add_(1)


def setting(block: Any, call: int) -> None:
    block.settings["depth"] = 0.5 * block.settings["depth"]


PUT_BACK = {
    "an attribute set for each call": (depth, nothing),
    "a condition set for each call": (condition, nothing),
    "dropout's p": (nothing, rate),
    "a submodule": (nothing, submodule),
    "a buffer": (nothing, buffer),
}
CHANGES = {"a hook": (nothing, hook), "a bias": (nothing, bias), "a dict": (nothing, setting)}
changed = pytest.mark.parametrize(("each", "between"), CHANGES.values(), ids=CHANGES.keys())


def step(net: Net, between: Change, number: int) -> list[Tensor]:
    """The gradients of one step, after which weights are as before."""
    torch.manual_seed(number)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    optimizer.zero_grad()
    loss = net(torch.randn(ROWS, WIDTH)).square().mean()
    for block in net.blocks:
        between(block, 0)
    loss.backward()
    found = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    optimizer.step()
    return found


def steps(count: int, each: Change, between: Change, mode: Any = None, **arguments: Any) -> list[Any]:
    """The gradients of some steps; an error instead of those of a step that raised."""
    torch.manual_seed(0)
    net = Net(each)
    if mode is not None:
        offload.apply(net, mode, min_numel=1, **arguments)
    found: list[Any] = []
    for number in range(count):
        try:
            found.append(step(net, between, number))
        except RecomputeDiffersError as error:
            found.append(error)
    return found


def assert_bits(expected: list[Tensor], found: Any) -> None:
    assert isinstance(found, list)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("mode", RECOMPUTING)
@changed
def test_what_others_change_between_forward_and_backward_is_an_error_before_step(
    mode: str, each: Change, between: Change
) -> None:
    for found in steps(2, each, between, mode):
        assert isinstance(found, RecomputeDiffersError)
        assert "blocks." in str(found)
        assert "no_recompute=" in str(found)


@changed
def test_auto_moves_such_blocks_from_the_next_step_on(each: Change, between: Change) -> None:
    expected = steps(6, each, between)
    found = steps(6, each, between, "auto", device_total="40000B")
    assert isinstance(found[0], RecomputeDiffersError)
    for one, other in zip(expected[1:], found[1:], strict=True):
        assert_bits(one, other)


@pytest.mark.parametrize(("each", "between"), PUT_BACK.values(), ids=PUT_BACK.keys())
@pytest.mark.parametrize("mode", [*RECOMPUTING, "auto"])
def test_what_is_bound_to_a_module_is_put_back_for_the_recompute(
    mode: str, each: Change, between: Change
) -> None:
    arguments = {"device_total": "40000B"} if mode == "auto" else {}
    expected = steps(4, each, between)
    for one, other in zip(expected, steps(4, each, between, mode, **arguments), strict=True):
        assert_bits(one, other)


@changed
@pytest.mark.parametrize("mode", ["hidden_states", "selective", "auto"])
def test_blocks_that_no_recompute_names_train_as_without_offload(
    mode: str, each: Change, between: Change
) -> None:
    arguments = {"device_total": "40000B"} if mode == "auto" else {}
    expected = steps(4, each, between)
    found = steps(4, each, between, mode, no_recompute=["blocks.*"], **arguments)
    for one, other in zip(expected, found, strict=True):
        assert_bits(one, other)


class Adapted(nn.Module):
    """All that its last operators save of the adapter is a weight: which one is all that can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.stacked = nn.Parameter(torch.randn(2, WIDTH))
        self.active = self.row = -1
        self.shared: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.a(x))
        row, active = self.shared.get("row", self.row), self.shared.get("active", self.active)
        return y * self.stacked[row] if row >= 0 else self.adapters[active](y)


def two_live_forwards(mode: Any, choose: Callable[[Any, int], object]) -> list[Tensor]:
    """The gradients; an adapter is chosen for each forward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Adapted() for _ in range(2)])
    if mode is not None:
        offload.apply(model, mode, min_numel=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for value in (0, 1):
        for block in model:
            choose(block, value)
        losses.append(model(torch.randn(ROWS, WIDTH, requires_grad=True)).square().mean())
    torch.stack(losses).sum().backward()
    optimizer.step()
    return [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


@pytest.mark.parametrize("attribute", ["active", "row"])
@pytest.mark.parametrize("mode", RECOMPUTING)
def test_two_live_forwards_have_each_its_adapter_and_another_weight_is_an_error(
    mode: str, attribute: str
) -> None:
    """The saved activations are equal, and the first one's gradient went through the second one's adapter."""
    bound = partial(setattr_of, attribute)
    assert_bits(two_live_forwards(None, bound), two_live_forwards(mode, bound))
    with pytest.raises(RecomputeDiffersError, match=r"float32\[.*16\]"):
        two_live_forwards(mode, lambda block, value: block.shared.update({attribute: value}))


def setattr_of(attribute: str, block: Any, value: int) -> None:
    setattr(block, attribute, value)


class Fields(types.SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self, name, value)


class OwnDict(dict[str, Any]): ...


class Passing(nn.Module):
    """As graph networks pass a batch: data.x = conv(data.x); return data."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Any) -> Any:
        batch["x"] = batch["x"] + torch.tanh(self.a(batch["x"]) * batch["scale"])
        return batch


@pytest.mark.parametrize("kind", [Fields, collections.UserDict, OwnDict])
@pytest.mark.parametrize("mode", RECOMPUTING)
def test_an_argument_that_holds_tensors_in_an_object_is_an_error(mode: str, kind: Any) -> None:
    """It is held by reference: the recompute computed from what was bound in it by then."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Passing() for _ in range(BLOCKS)])
    offload.apply(blocks, mode, min_numel=1)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    before = [parameter.clone() for parameter in blocks.parameters()]
    batch = blocks(kind(x=torch.randn(ROWS, WIDTH, requires_grad=True), scale=0.5))
    batch["x"].square().mean().backward()
    with pytest.raises(RecomputeDiffersError, match="an argument that is no tensor"):
        optimizer.step()
    assert all(map(torch.equal, before, blocks.parameters()))


class OwnRandom(random.Random): ...


Made = tuple[Any, Callable[[Any], Any]]

SHARED: dict[str, Callable[[], Made]] = {
    "Python's": lambda: (None, lambda g: random.random()),
    "numpy's": lambda: (None, lambda g: float(np.random.rand())),
    "both": lambda: (None, lambda g: float(np.random.standard_normal()) * random.gauss(0.0, 1.0)),
}
HIDDEN = np.random.default_rng(0)
OTHERS: dict[str, Callable[[], Made]] = {
    "numpy's Generator": lambda: (np.random.default_rng(0), lambda g: g.random()),
    "numpy's RandomState": lambda: (np.random.RandomState(0), lambda g: g.rand()),
    "a subclass of random.Random": lambda: (OwnRandom(0), lambda g: g.random()),
    "torch's in a list": lambda: (
        [torch.Generator().manual_seed(0)],
        lambda g: torch.rand((), generator=g[0]),
    ),
    "one that nobody can find": lambda: (None, lambda _: HIDDEN.random()),
}


class Drawing(nn.Module):
    def __init__(self, generator: Any, draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.generator, self.draw = generator, draw

    def forward(self, x: Tensor) -> Tensor:
        drawn = self.draw(self.generator)
        return x + torch.tanh(self.a(x)) * drawn * torch.tanh(self.a(x) * drawn)


def drawn_gradients(make: Callable[[], tuple[Any, Any]], mode: Any, **arguments: Any) -> list[Tensor]:
    torch.manual_seed(0)
    random.seed(1)
    np.random.seed(1)
    blocks = nn.Sequential(*[Drawing(*make()) for _ in range(BLOCKS)])
    if mode is not None:
        offload.apply(blocks, mode, min_numel=1, **arguments)
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    found: list[Tensor] = []
    for _ in range(4):
        optimizer.zero_grad()
        blocks(torch.randn(ROWS, WIDTH)).square().mean().backward()
        found += [parameter.grad.clone() for parameter in blocks.parameters() if parameter.grad is not None]
        optimizer.step()
    return [*found, torch.tensor([random.random(), np.random.rand()])]


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED.keys())
@pytest.mark.parametrize("mode", [*RECOMPUTING, "auto"])
def test_a_block_that_draws_from_numpy_or_python_draws_once(
    mode: str, make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The calls that were looked at are recomputed with the states that they had, and later ones are not
    recomputed, which is said once."""
    arguments = {"device_total": "60000B"} if mode == "auto" else {}
    expected = drawn_gradients(make, None)
    assert all(map(torch.equal, expected, drawn_gradients(make, mode, **arguments)))
    assert caplog.text.count("and a recompute would draw again") == (mode != "auto")


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS.keys())
@pytest.mark.parametrize("mode", RECOMPUTING)
def test_a_block_that_draws_from_another_generator_is_an_error(mode: str, make: Any) -> None:
    with pytest.raises(RecomputeDiffersError, match="a generator other than torch's default ones"):
        drawn_gradients(make, mode)


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_a_number_that_is_read_of_a_draw_is_that_of_the_forward(mode: str) -> None:
    """What the host reads may be what it branches on, so it is kept, and the recompute draws nothing."""

    def make() -> Made:
        return [torch.Generator().manual_seed(0)], lambda g: float(torch.rand((), generator=g[0]))

    expected = drawn_gradients(make, None)
    assert all(map(torch.equal, expected, drawn_gradients(make, mode)))


@pytest.mark.parametrize("mode", [None, "hidden_states", "selective"])
def test_backwards_in_threads_leave_the_random_state_as_it_was(mode: Any) -> None:
    """Each recompute set the process's generator back and forth beside the others: masks were other ones, and
    the state stayed rewound."""
    expected: list[Tensor] = []
    for applied in (None, mode):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh()) for _ in range(6)]
        model = nn.Sequential(*layers)
        if applied is not None:
            offload.apply(model, applied, min_numel=1)
        found: list[Tensor] = []
        for number in range(6):
            losses = [model(torch.ones(64, 32) * (number + k)).square().mean() for k in range(3)]
            state = torch.get_rng_state()
            gradients: list[Any] = [None] * 3

            def run(k: int, gradients: Any = gradients, losses: Any = losses, model: Any = model) -> None:
                gradients[k] = torch.autograd.grad(losses[k], list(model.parameters()))

            threads = [threading.Thread(target=run, args=(k,)) for k in range(3)]
            run_all(threads)
            assert torch.equal(state, torch.get_rng_state())
            found += [gradient for each in gradients for gradient in each]
        if applied is None:
            expected = found
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("mode", RECOMPUTING)
def test_weights_stepped_between_forward_and_backward_are_an_error(mode: str) -> None:
    """torch has its version error; the recompute ran with the new weights."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Passing() for _ in range(BLOCKS)])
    offload.apply(net, mode, min_numel=1)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)

    def loss() -> Tensor:
        x: Tensor = net({"x": torch.randn(ROWS, WIDTH), "scale": 1.0})["x"]
        return x.square().mean()

    first, second = loss(), loss()
    first.backward()
    optimizer.step()
    with pytest.raises(RecomputeDiffersError, match=r"parameter float32\[16, 16\] was written in place"):
        second.backward()


@pytest.mark.parametrize("mode", RECOMPUTING)
def test_weights_written_under_allow_mutation_are_an_error(mode: str) -> None:
    """torch clones a saved tensor that is written there; a recompute has no such clone."""
    torch.manual_seed(0)
    net = nn.Sequential(*[Passing() for _ in range(BLOCKS)])
    offload.apply(net, mode, min_numel=1)  # type: ignore[arg-type]
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        x: Tensor = net({"x": torch.randn(ROWS, WIDTH), "scale": 1.0})["x"]
        with torch.no_grad():
            for block in net:
                block.a.weight.mul_(2)  # type: ignore[union-attr, operator]
        with pytest.raises(RecomputeDiffersError, match="was written in place after the forward"):
            x.square().mean().backward()


def test_the_output_of_a_batch_norm_is_never_kept() -> None:
    """Its schema hides that it writes its statistics, which a recompute that skipped it would leave as they
    are."""
    with pytest.raises(ValueError, match=r"native_batch_norm\.default writes to its inputs"):
        offload.selective_contexts({torch.ops.aten.native_batch_norm.default})


@pytest.mark.parametrize("mode", [*RECOMPUTING, "auto"])
def test_forward_over_reverse_has_the_bits_of_plain_training(mode: str) -> None:
    """Under a dispatch mode torch takes another formula for the tangent of a layer norm."""
    results: list[list[Tensor]] = []
    for applied in (None, mode):
        torch.manual_seed(0)
        layers = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(BLOCKS)
        ]
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(*layers), nn.Linear(WIDTH, 3))
        if applied is not None:
            total = {"device_total": "9000B"} if applied == "auto" else {}
            offload.apply(model, applied, min_numel=1, **total)  # type: ignore[arg-type]
        found: list[Tensor] = []
        for _ in range(3):
            x, tangent = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)
            with fw.dual_level():
                dual = fw.make_dual(x, tangent)
                (gradient,) = torch.autograd.grad(model(dual).square().mean(), dual)
                found += [part.detach().clone() for part in fw.unpack_dual(gradient) if part is not None]
        results.append(found)
    assert len(results[0]) == 6
    assert all(map(torch.equal, *results))
