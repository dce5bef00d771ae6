"""Where a tensor's bytes lie in its storage, and views rebuilt over other bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.transfer.block import (
    ALIGNMENT,
    Layouts,
    ViewLayout,
    WeakStorage,
    bytes_of,
    overlaps_itself,
    span_of,
    view_of,
)


def layout_of(tensor: Tensor) -> ViewLayout:
    return ViewLayout(tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


BASE = torch.arange(64 * 64, dtype=torch.float32).view(64, 64)
"""16,384 bytes; a row has 256."""

VIEWS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, int]]] = {
    "whole": (lambda base: base, (0, 16384)),
    "rows": (lambda base: base[2:5], (512, 1280)),
    # last element is 63 * 64 + 15: ends at byte 16,192, which is 16 * 1,012
    "columns": (lambda base: base[:, :16], (0, 16192)),
    "every other row": (lambda base: base[::2], (0, 16128)),
    "every fourth column": (lambda base: base[:, ::4], (0, 16384)),  # ends at 16,372, widened to 16
    "transposed": (lambda base: base.t(), (0, 16384)),
    "one element": (lambda base: base[1, 1], (256, 272)),  # bytes 260..264, widened to 16 both ways
    "expanded": (lambda base: base[0, :1].expand(1000), (0, 16)),
    "diagonal": (lambda base: base.diagonal(), (0, 16384)),
    "windows": (lambda base: base.view(-1).unfold(0, 8, 2), (0, 16384)),
    "other dtype": (lambda base: base.view(torch.int16)[3], (768, 1024)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_span_reaches_from_the_first_element_to_the_last_on_sixteen_bytes(name: str) -> None:
    make, expected = VIEWS[name]
    assert span_of(make(BASE), BASE.untyped_storage().nbytes()) == expected


def test_a_span_ends_with_its_storage_where_that_is_not_a_multiple_of_sixteen() -> None:
    base = torch.zeros(9, dtype=torch.float32)
    assert span_of(base, 36) == (0, 36)
    assert span_of(base[8:], 36) == (32, 36)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_over_a_copy_of_its_span_has_the_same_size_strides_and_elements(name: str) -> None:
    view = VIEWS[name][0](BASE)
    start, stop = span_of(view, BASE.untyped_storage().nbytes())
    copy = bytes_of(BASE.untyped_storage(), start, stop - start).clone()
    rebuilt = view_of(copy.untyped_storage(), layout_of(view), start)
    assert (rebuilt.size(), rebuilt.stride(), rebuilt.dtype) == (view.size(), view.stride(), view.dtype)
    assert torch.equal(rebuilt, view)


def test_sixteen_bytes_hold_the_largest_element() -> None:
    assert torch.complex128.itemsize == ALIGNMENT


@pytest.mark.parametrize(
    ("make", "overlaps"),
    [
        (lambda: BASE, False),
        (lambda: BASE.t(), False),
        (lambda: BASE[:, ::4], False),
        (lambda: BASE[::3, ::5].t(), False),
        (lambda: BASE[:1].expand(8, 64), True),
        (lambda: BASE[:1].expand(1, 64), False),
        (lambda: BASE.view(-1).unfold(0, 8, 2), True),
        (lambda: BASE.view(-1).unfold(0, 8, 8), False),
        (lambda: BASE[0, 0], False),
    ],
)
def test_a_view_overlaps_itself_where_two_elements_are_the_same_bytes(
    make: Callable[[], Tensor], overlaps: bool
) -> None:
    assert overlaps_itself(layout_of(make())) is overlaps


def test_a_weak_reference_to_a_storage_does_not_hold_it_and_keeps_its_key_from_being_used_again() -> None:
    gc.disable()  # plain counting must do
    try:
        storage = torch.empty(1024, dtype=torch.uint8).untyped_storage()
        weak = WeakStorage(storage)
        assert weak.key == storage._cdata
        found = weak.storage()
        assert found is not None
        assert found.data_ptr() == storage.data_ptr()
        del found, storage
        assert weak.storage() is None
        others = [torch.empty(1024, dtype=torch.uint8).untyped_storage() for _ in range(100)]
        assert weak.key not in {other._cdata for other in others}
    finally:
        gc.enable()


def test_equal_layouts_are_one_object_and_others_are_not() -> None:
    layouts = Layouts()
    one = layouts[layout_of(torch.empty(4, 6))]
    assert layouts[layout_of(torch.empty(4, 6))] is one
    others = [
        torch.empty(6, 4),
        torch.empty(6, 4).t(),
        torch.empty(30)[2:26].view(4, 6),
        torch.empty(4, 6, dtype=torch.int32),
    ]
    assert one not in [layouts[layout_of(tensor)] for tensor in others]
    assert all(layouts[layout_of(tensor)] == layout_of(tensor) for tensor in others)
    assert len(layouts) == 1 + len(others)


def test_layouts_are_remembered_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layouts, "_MOST", 3)
    layouts = Layouts()
    first = layouts[layout_of(torch.empty(0))]
    for length in range(1, 20):
        assert layouts[layout_of(torch.empty(length))] == layout_of(torch.empty(length))
        assert len(layouts) <= 3
    assert layouts[layout_of(torch.empty(0))] == first, "forgotten, and the same all the same"


def test_a_weak_reference_follows_the_storage_that_it_is_told_of() -> None:
    first, second = (torch.empty(8).untyped_storage() for _ in range(2))
    weak = WeakStorage(first)
    weak.refer_to(second)
    assert weak.key == second._cdata
    del second
    assert weak.storage() is None
    assert first.nbytes() == 32
