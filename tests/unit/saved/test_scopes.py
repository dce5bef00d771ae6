"""The one pair of hooks and the stack of scopes: who owns a saved tensor, and that a scope takes out exactly
what it put in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.ids import ChunkId, GroupId
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from tests.unit.saved.rig import ELEMENTS, Rig, assert_equal_bits
from tests.unit.saved.test_views import keep


class Passing:
    """Takes nothing: every tensor goes to the scope outside."""

    min_elements = 0

    def take(self, tensor: Tensor) -> Handle | None:
        return None


def test_the_innermost_scope_owns_what_is_saved(rig: Rig) -> None:
    with rig.group("outer") as outer:
        _first = keep([], torch.randn(ELEMENTS))
        with rig.group("inner") as inner:
            _second = keep([], torch.randn(ELEMENTS))
        _third = keep([], torch.randn(ELEMENTS))
    assert (outer.slots, inner.slots) == (2, 1)


def test_what_a_scope_does_not_take_goes_to_the_one_outside(rig: Rig) -> None:
    with rig.group("outer") as outer:
        installed = rig.engine.hooks.push(Passing())
        _y = keep([], torch.randn(ELEMENTS))
        rig.engine.hooks.pop(installed)
    assert outer.slots == 1


def test_the_size_limit_is_that_of_the_innermost_scope(rig: Rig) -> None:
    with rig.group("outer", min_elements=1), rig.group("inner", min_elements=1000):
        y = keep([], torch.randn(ELEMENTS))
    assert rig.saved == 0
    y.backward()


def test_a_popped_scope_is_gone_and_the_one_outside_is_innermost_again(rig: Rig) -> None:
    hooks = rig.engine.hooks
    outer, inner = Passing(), Passing()
    first = hooks.push(outer)
    second = hooks.push(inner)
    assert hooks.innermost() is inner
    hooks.pop(second)
    assert hooks.innermost() is outer
    hooks.pop(first)
    assert hooks.innermost() is None


def test_scopes_may_be_popped_in_another_order_than_they_were_pushed(rig: Rig) -> None:
    hooks = rig.engine.hooks
    chunk = rig.chunk()
    group = SavedGroup(GroupId(chunk.id, 0, "later"), leaves=True)

    class Later(Passing):
        def take(self, tensor: Tensor) -> Handle:
            return rig.engine.store.save(tensor, chunk, group)

    first = hooks.push(Passing())
    second = hooks.push(Later())
    hooks.pop(first)
    y = keep([], torch.randn(ELEMENTS))
    assert group.slots == 1
    hooks.pop(second)
    keep([], torch.randn(ELEMENTS))
    assert group.slots == 1
    del y
    rig.groups.append(group)


def test_hooks_of_another_owner_inside_see_the_tensor_instead(rig: Rig) -> None:
    """torch shows a saved tensor to the innermost pair only."""
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    with rig.group(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep([], torch.randn(ELEMENTS))
    assert (seen, rig.saved) == ([ELEMENTS], 0)


def test_save_on_cpu_outside_hands_over_to_the_engine_inside(rig: Rig) -> None:
    x = torch.randn(ELEMENTS, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        with rig.group():
            y = (x * 2).sin()
        z = y.sin()
    rig.leave()
    (found,) = torch.autograd.grad(z.sum(), [x])
    (expected,) = torch.autograd.grad((x * 2).sin().sin().sum(), [x])
    assert_equal_bits([expected], [found])
    assert rig.saved == 1


def test_every_reader_is_told_of_every_read_under_the_lock(rig: Rig) -> None:
    told: list[tuple[int, ChunkId]] = []
    for number in (1, 2):
        rig.engine.on_read(lambda handle, n=number: told.append((n, handle.record.block.group.chunk)))  # type: ignore[misc]
    with rig.group():
        y = keep([], torch.randn(ELEMENTS))
    y.backward()
    assert told == [(1, ChunkId(0, 0)), (2, ChunkId(0, 0))]


def test_unpacking_what_was_never_packed_is_a_programmer_s_error() -> None:
    with pytest.raises(AssertionError, match="give it what pack returned"):
        Rig().engine.hooks.unpack(torch.randn(3))


@pytest.mark.parametrize("make", [lambda: SavedChunk(ChunkId(2, 3)), lambda: Rig().chunk()])
def test_a_new_chunk_is_empty_and_not_readable(make: Callable[[], SavedChunk]) -> None:
    chunk = make()
    assert (list(chunk.living()), chunk.readable, chunk.touches) == ([], False, 0)
