"""A region by itself: when it computes again, under what, and what it holds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointError, GraphExecGroup, set_checkpoint_early_stop

from offload.checkpoint.region import Region
from offload.saved.hooks import inside_checkpoint
from tests.unit.checkpoint.recomputed import hooks_left


class Counted:
    """A function of x and w, which are saved inside, with the number of its calls."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function
        self.calls = 0

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        self.calls += 1
        return self.function(x, w)


def mixed(x: Tensor, w: Tensor) -> Tensor:
    return F.dropout(torch.sin(x @ w), 0.5) * x


def leaves() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(6, 6, requires_grad=True), torch.randn(6, 6, requires_grad=True)


def run(again: Callable[..., Tensor], *tensors: Tensor, context_fn: Any = None) -> Tensor:
    region = Region(again, context_fn)
    region.begin(tensors)
    try:
        return again(*tensors)
    finally:
        region.end()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["plain", "autocast"])
def test_gradients_and_random_numbers_are_those_of_one_run(dtype: torch.dtype | None) -> None:
    found: list[list[Tensor]] = []
    for wrapped in (False, True):
        x, w = leaves()
        torch.manual_seed(7)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            y = run(mixed, x, w) if wrapped else mixed(x, w)
        after = torch.rand(3)  # drawn between the run and its recompute
        y.float().square().sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        found.append([y.detach(), x.grad, w.grad, after, torch.rand(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_each_backward_has_one_recompute_and_a_read_outside_of_any_has_its_own() -> None:
    x, w = leaves()
    function = Counted(lambda x, w: torch.sin(x @ w) * x)
    y = run(function, x, w)
    assert function.calls == 1
    y.sum().backward(retain_graph=True)
    assert function.calls == 2
    y.sum().backward(retain_graph=True)
    assert function.calls == 3
    assert y.grad_fn is not None
    seen: Any = y.grad_fn
    assert torch.equal(seen._saved_self, torch.sin(x @ w))
    assert function.calls == 4
    assert torch.equal(seen.next_functions[0][0]._saved_self, x @ w)
    assert function.calls == 5, "of a read outside nothing is kept for the next one"
    gradient = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(x.grad, 2 * gradient)


def test_backwards_of_one_group_share_a_recompute() -> None:
    x, w = leaves()
    function = Counted(lambda x, w: torch.cat([torch.sin(x), torch.cos(w)]))
    y = run(function, x, w)
    with GraphExecGroup():
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        torch.autograd.grad(y.sum(), w, retain_graph=True)
    assert function.calls == 2


def test_a_save_that_is_read_twice_in_one_backward_is_an_error() -> None:
    """A recompute that late could read weights that an optimizer has stepped in between."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            (same,) = ctx.saved_tensors
            return gradients[0] * x.cos() * same

    x, w = leaves()
    function = Counted(lambda x, w: Twice.apply(x @ w))
    y = run(function, x, w)
    y.sum().backward(retain_graph=True)  # of a graph that is retained nothing is held: it is made once more
    assert function.calls == 3
    found = [x.grad, w.grad]
    x.grad = w.grad = None
    y.sum().backward()
    assert function.calls == 4
    assert torch.equal(found[0], x.grad)  # type: ignore[arg-type]
    assert torch.equal(found[1], w.grad)  # type: ignore[arg-type]


def test_backwards_that_take_turns_have_one_recompute_each() -> None:
    x, w = leaves()
    function = Counted(lambda x, w: torch.sin(torch.sin(torch.sin(x)) * w))
    y = run(function, x, w)
    total, inner = y.sum(), list[Tensor]()
    assert y.grad_fn is not None

    def one_inside(gradients: object) -> None:
        handle.remove()
        inner.append(torch.autograd.grad(total, x, retain_graph=True)[0])

    between: Any = y.grad_fn.next_functions[0][0]
    handle = between.next_functions[0][0].register_prehook(one_inside)
    outer = torch.autograd.grad(total, x, retain_graph=True)[0]
    assert function.calls == 3
    assert torch.equal(outer, inner[0])
    assert torch.equal(outer, torch.autograd.grad(torch.sin(torch.sin(torch.sin(x)) * w).sum(), x)[0])


def test_of_what_nobody_can_read_any_more_nothing_is_held() -> None:
    """A branch whose output is dropped: its node is gone, so its save is made again and let go."""
    dead: list[weakref.ref[Tensor]] = []

    def branches(x: Tensor, w: Tensor) -> Tensor:
        read_by_nobody = x * 2
        dead.append(weakref.ref(read_by_nobody))
        read_by_nobody.sin()
        return (w * 2).sin() * w

    y = run(branches, *leaves())
    seen: list[int] = []

    def look(gradients: object) -> None:  # in the backward, between the first read and the last
        seen.append(sum(reference() is not None for reference in dead))

    last: Any = y.grad_fn
    last.next_functions[0][0].register_prehook(look)
    y.sum().backward()
    assert len(dead) == 2
    assert seen == [0]


@pytest.mark.parametrize("read", [True, False])
def test_a_region_dies_with_its_graph_and_without_the_collector(read: bool) -> None:
    function = Counted(mixed)
    alive = weakref.ref(function)
    gc.disable()
    try:
        y = run(function, *leaves())
        del function
        assert alive() is not None
        if read:
            y.sum().backward()
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_it_dies_though_what_it_keeps_has_a_node_of_its_recompute() -> None:
    """As an output that a selective checkpoint keeps has: autograd makes it a part of the recompute."""

    class Keeps(AbstractContextManager["Keeps"]):
        def __init__(self) -> None:
            self.outputs: list[Tensor] = []

        def __exit__(self, *exception: object) -> None:
            return None

    keeps = Keeps()
    alive = weakref.ref(keeps)

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.sin(x @ w)
        there = alive()
        there.outputs.append(y)
        return y * x

    contexts = [(nullcontext(), keeps)]
    del keeps
    gc.disable()
    try:
        y = run(function, *leaves(), context_fn=contexts.pop)
        there = alive()
        assert there is not None
        there.outputs.clear()  # the run's own, which the graph has
        del there
        y.sum().backward()
        del y
        assert alive() is None
    finally:
        gc.enable()


def test_a_run_that_does_not_repeat_itself_is_an_error_that_says_how() -> None:
    calls: list[None] = []

    def fewer(x: Tensor, w: Tensor) -> Tensor:
        calls.append(None)
        return x.sin() if len(calls) > 1 else x.sin().cos()

    def other(x: Tensor, w: Tensor) -> Tensor:
        calls.append(None)
        return (x if len(calls) == 1 else x.double()).sin()

    for function, message in [
        (fewer, "different number of tensors was saved in a forward, 2, and in its recompute, 1"),
        (other, "different metadata.*save 0: .*float32.* in the forward, .*float64.* in the recompute"),
    ]:
        calls.clear()
        y = run(function, *leaves())
        with pytest.raises(CheckpointError, match=message):
            y.sum().backward()
    assert not hooks_left()


def test_a_recompute_that_raises_holds_nothing_and_the_next_one_is_right() -> None:
    fails = [False]

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = torch.sin(x @ w)
        if fails[0]:
            raise ValueError("now")
        return y * x

    x, w = leaves()
    y = run(function, x, w)
    fails[0] = True
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="now"):
        y.sum().backward(retain_graph=True)
    assert not hooks_left()
    assert torch.equal(torch.get_rng_state(), state)
    fails[0] = False
    y.sum().backward()
    assert torch.equal(x.grad, torch.autograd.grad((torch.sin(x @ w) * x).sum(), x)[0])


def test_it_stops_at_the_last_save_unless_told_not_to() -> None:
    ends: list[None] = []

    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        ends.append(None)
        return y

    run(function, *leaves()).sum().backward()
    assert len(ends) == 1
    with set_checkpoint_early_stop(False):
        y = run(function, *leaves())
    y.sum().backward()
    assert len(ends) == 3

    def more(x: Tensor, w: Tensor) -> Tensor:
        ends.append(None)
        return x.sin() if len(ends) == 4 else x.sin().sin()

    with set_checkpoint_early_stop(False):
        y = run(more, *leaves())
    with pytest.raises(CheckpointError, match="saves more tensors than its forward, which saved 1"):
        y.sum().backward()


def test_an_autocast_that_is_off_counts_with_its_dtype() -> None:
    """It is the one of an autocast inside that names none."""

    def inner(x: Tensor, w: Tensor) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu"):
            gate = (x @ w).float()
        return torch.sin(x * gate)

    found: list[Tensor] = []
    for wrapped in (False, True):
        x, w = leaves()
        with torch.autocast("cpu", dtype=torch.float16, enabled=False):
            y = run(inner, x, w) if wrapped else inner(x, w)
        y.sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    assert torch.equal(*found)


def test_it_may_run_under_forward_mode_and_be_traced_with_symbols() -> None:
    x, w = leaves()
    with forward_ad.dual_level():
        y = run(lambda x, w: torch.sin(x @ w), forward_ad.make_dual(x, torch.ones_like(x)), w)
        tangent = forward_ad.unpack_dual(y).tangent
        assert torch.equal(tangent, torch.cos(x @ w) * (torch.ones_like(x) @ w))

    def traced(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(run(lambda x: x.sin().cos(), x).sum(), x)[0]

    graph = make_fx(traced, tracing_mode="symbolic")(torch.randn(4, 3))
    other = torch.randn(5, 2)
    assert torch.equal(graph(other), traced(other))


def test_it_runs_under_the_default_device_and_the_contexts_of_its_run() -> None:
    entered: list[str] = []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    def function(x: Tensor, w: Tensor) -> Tensor:
        assert torch.empty(0).device.type == "meta"
        assert torch.is_grad_enabled()
        return x.sin()

    x, w = leaves()
    with torch.device("meta"):
        y = run(function, x, w, context_fn=lambda: (note("run"), note("again")))
    assert entered == ["run"]
    with torch.no_grad():
        grad = torch.ones(6, 6)
    y.backward(grad)
    assert entered == ["run", "again"]


def test_a_context_that_cannot_be_entered_leaves_no_hooks() -> None:
    @contextmanager
    def refuses() -> Iterator[None]:
        raise ValueError("no")
        yield

    with pytest.raises(ValueError, match="no"):
        Region(mixed, lambda: (refuses(), nullcontext())).begin(leaves())
    assert not hooks_left()


def test_whoever_asks_finds_a_checkpoint_around_the_run() -> None:
    x, w = leaves()
    region = Region(mixed)
    region.begin((x, w))
    assert inside_checkpoint()
    region.end()
    assert not inside_checkpoint()


def test_a_region_whose_random_state_cannot_be_read_at_its_end_leaves_no_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was read before the hooks were taken off, so an error there left them on for good."""
    region, left = Region(mixed), []
    x, w = leaves()
    region.begin((x, w))
    mixed(x, w)

    def unreadable() -> None:
        left.append(hooks_left())
        raise RuntimeError("the device is lost")

    monkeypatch.setattr("offload.checkpoint.region.outside_modes", unreadable)
    with pytest.raises(RuntimeError, match="the device is lost"):
        region.end()
    assert left == [False]
    assert not hooks_left()
