"""Every kind of tensor that may leave comes back with the size, strides, dtype and bits that were saved, at
an address that looks the same to kernels; and what crosses the link.

`Keep` saves any tensor, differentiable or not, and hands what it reads back to the test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload.device.sim import ExecutorName
from offload.memory.budget import LocalHostBudget
from offload.transfer.block import WeakStorage
from tests.unit.saved.rig import EXECUTORS, Rig, assert_equal_bits, bits

ALLOCATED_AT = 64
"""Bytes; torch's allocator on a CPU aligns to them."""


class Keep(torch.autograd.Function):
    """Saves tensors beside `x`, and reads them in the backward into `found`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: list[Tensor], *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values = ctx.saved_tensors
        ctx.found.extend(values)
        return gradient, None, *(None for _ in values)


def keep(found: list[Tensor], *values: Tensor) -> Tensor:
    return Keep.apply(torch.ones((), requires_grad=True), found, *values)


def round_trip(make: Callable[[], Tensor], rig: Rig) -> tuple[Tensor, Tensor]:
    """What was saved and what was read; nothing else holds it in between."""
    value = make()
    saved = (
        torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)
        if 0 not in value.stride()
        else None
    )
    expected = value.clone() if saved is None else saved.copy_(value)
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, value)
    size, stride, address = value.size(), value.stride(), value.data_ptr()
    del value
    rig.leave()
    y.backward()
    (read,) = found
    assert (read.size(), read.stride()) == (size, stride)
    if address % read.itemsize == 0:
        assert (read.data_ptr() - address) % ALLOCATED_AT == 0, "kernels are chosen by addresses"
    return expected, read


DTYPES = [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
]


def filled(dtype: torch.dtype, *size: int) -> Tensor:
    """Random bits of that dtype: NaN and infinities among them."""
    count = torch.Size(size).numel() * dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return data.view(dtype).view(size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_by_bit(rig: Rig, dtype: torch.dtype) -> None:
    expected, found = round_trip(lambda: filled(dtype, 7, 9), rig)
    assert found.dtype is dtype
    assert torch.equal(bits(expected), bits(found))
    assert rig.end().restored == 1


SHAPES: dict[str, Callable[[], Tensor]] = {
    "0-dim": lambda: torch.randn(()),
    "one element": lambda: torch.randn(1),
    "size one dimensions": lambda: torch.randn(1, 5, 1),
    "odd bytes": lambda: torch.randint(0, 99, (13,), dtype=torch.int8),
    "transposed": lambda: torch.randn(12, 20).t(),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "permuted": lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
    "offset": lambda: torch.randn(40, 10)[7:20],
    "offset by an odd number of elements": lambda: torch.randn(101)[3:50],
    "columns": lambda: torch.randn(30, 40)[:, 3:33],
    "few columns": lambda: torch.randn(30, 40)[:, 5:9],
    "every fourth column": lambda: torch.randn(64, 64)[:, ::4],
    "every other row and column, transposed": lambda: torch.randn(64, 64)[::2, 1::2].t(),
    "expanded": lambda: torch.randn(20, 1).expand(20, 30),
    "expanded scalar": lambda: torch.randn(()).expand(50, 2),
    "expanded from the middle": lambda: torch.randn(100)[40:41].expand(30),
    "a column, expanded": lambda: torch.randn(64, 64)[:, 5:6].expand(64, 3),
    "windows": lambda: torch.randn(100).unfold(0, 10, 3),
    "diagonal": lambda: torch.randn(50, 50).diagonal(),
    "real part": lambda: torch.randn(30, dtype=torch.complex64).real,
    "imaginary part": lambda: torch.randn(30, dtype=torch.complex64).imag,
    "view of another dtype": lambda: torch.randn(30, 4).view(torch.int32),
    "view of a narrower dtype": lambda: torch.randn(30, 4)[3:9].view(torch.int8),
    "offset by 64 bytes": lambda: torch.randn(100)[16:80],
    "memory of numpy": lambda: torch.from_numpy(np.random.rand(120).astype(np.float32)[1:]),
    "columns of numpy": lambda: torch.from_numpy(np.random.rand(30, 40).astype(np.float32)[:, 3:8]),
    "items across their size": lambda: torch.from_numpy(np.zeros(121, np.float32)[1:]).view(torch.float64),
}


@pytest.mark.req("S2-103")
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_layout_comes_back_with_its_strides(name: str, executor: ExecutorName) -> None:
    rig = Rig(executor, seed=2)
    expected, found = round_trip(SHAPES[name], rig)
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)
    stats = rig.end()
    assert (stats.saved, stats.spilled, stats.restored) == (1, 1, 1)


def test_an_empty_tensor_stays(rig: Rig) -> None:
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, torch.empty(0, 5), torch.empty(3, 0, dtype=torch.int8)[:, :0])
    y.backward()
    assert [tuple(value.shape) for value in found] == [(0, 5), (3, 0)]
    assert rig.end().saved == 0


# -- what crosses the link -----------------------------------------------------------------------------------
LINK: dict[str, tuple[Callable[[], Tensor], int]] = {
    # [name] -> (view, bytes): of float32, spans on 16 bytes
    "the whole of a matrix": (lambda: torch.randn(64, 64), 64 * 64 * 4),
    "three rows of it": (lambda: torch.randn(64, 64)[10:13], 3 * 64 * 4),
    "a column: gathered": (lambda: torch.randn(64, 64)[:, 5], 64 * 4),
    "every fourth column, up to the storage's end: gathered": (
        lambda: torch.randn(64, 64)[:, ::4],
        64 * 16 * 4,
    ),
    "a quarter of the columns: gathered": (lambda: torch.randn(64, 64)[:, :16], 64 * 16 * 4),
    "less than half of the columns: gathered": (lambda: torch.randn(64, 64)[:, :31], 64 * 31 * 4),
    "half of the columns: the flat span": (lambda: torch.randn(64, 64)[:, :32], (63 * 64 + 32) * 4),
    "every other column: the flat storage": (lambda: torch.randn(64, 64)[:, ::2], 64 * 64 * 4),
    "transposed: the flat storage": (lambda: torch.randn(64, 64).t(), 64 * 64 * 4),
    "expanded: its few bytes": (lambda: torch.randn(64, 1).expand(64, 1000), 64 * 4),
    "five elements: the sixteen-byte lines that they lie on": (lambda: torch.randn(64, 64)[3, 3:8], 32),
}


@pytest.mark.req("S2-103")
@pytest.mark.parametrize("name", LINK)
def test_a_view_leaves_flat_if_it_is_at_least_half_of_its_span_and_gathered_otherwise(name: str) -> None:
    make, nbytes = LINK[name]
    rig = Rig()
    with rig.group():
        y = keep([], make())
    assert rig.spilled_bytes == nbytes
    assert rig.engine.arena.stats().lent_bytes == nbytes
    rig.leave()
    y.backward()
    assert rig.restored_bytes == nbytes


@pytest.mark.req("S2-103")
def test_a_sparse_view_that_is_saved_twice_is_gathered_once(rig: Rig) -> None:
    """`v * v` saves v twice; it was sent flat then, with four times its bytes."""
    view = torch.randn(64, 64)[:, ::4]
    expected = view.clone()
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, view, view)
    assert rig.spilled_bytes == 64 * 16 * 4
    del view
    rig.leave()
    y.backward()
    assert all(torch.equal(one, expected) and one.stride() == (64, 4) for one in found)
    assert (rig.saved, rig.restored_bytes) == (1, 64 * 16 * 4)


@pytest.mark.req("S2-103")
def test_two_different_sparse_views_of_one_storage_leave_as_their_union(rig: Rig) -> None:
    base = torch.randn(64, 64)
    views = [base[:, 0:8], base[:, 16:24]]
    expected = [view.clone() for view in views]
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, *views)
    assert rig.spilled_bytes == (63 * 64 + 24) * 4
    del base, views
    rig.leave()
    y.backward()
    assert [torch.equal(one, other) for one, other in zip(expected, found, strict=True)] == [True, True]
    assert rig.end().saved == 1


def test_only_the_range_of_a_small_view_moves_and_its_huge_storage_is_freed(rig: Rig) -> None:
    huge = torch.randn(1 << 20)  # 4 MiB
    storage = WeakStorage(huge.untyped_storage())
    expected = huge[1000:1100].clone()
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, huge[1000:1100])
    del huge
    assert rig.spilled_bytes == 400
    rig.leave()
    assert storage.storage() is None
    y.backward()
    assert_equal_bits([expected], found)
    assert found[0].untyped_storage().nbytes() == 400 + 4000 % 256  # it lies where it lay, modulo 256
    stats = rig.end()
    assert (stats.device_bytes_peak, stats.restore_bytes) == (400, 400)


def test_a_gathered_view_that_finds_no_block_stays_gathered() -> None:
    rig = Rig(host_limit_bytes=0)
    base = torch.randn(64, 64)
    expected = base[:, ::4].clone()
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, base[:, ::4])
    del base
    assert rig.transfers.resident_bytes == 64 * 16 * 4
    y.backward()
    assert torch.equal(found[0], expected)
    assert found[0].stride() == (64, 4)
    stats = rig.end()
    assert (stats.refused, stats.refused_bytes) == (1, 64 * 16 * 4)


def test_a_refused_view_that_grows_is_counted_out_as_it_was_counted_in() -> None:
    """A half is refused at its commit, and a save of the next group makes it the whole. Its death took off
    more than it had put there, and every later step seemed to lack less than it did."""
    rig = Rig(budget=LocalHostBudget(0))
    base = torch.randn(64, 64)
    with rig.group():
        y = keep([], base[:32])
    with rig.group():
        z = keep([], base)
    del y, z
    rig.end()
    with rig.group():
        y = keep([], torch.randn(64, 64))
    del y
    assert rig.end().host_bytes_wanted_peak == 64 * 64 * 4


def test_a_sparse_view_that_another_lane_wrote_leaves_flat(rig: Rig) -> None:
    """Gathering reads it on the current lane, which nothing orders after that one."""
    base = torch.randn(64, 64)
    with rig.group(commit=False) as group, rig.device.use_lane(rig.device.new_compute_lane("second")):
        y = keep([], base[:, 5])
    rig.engine.store.commit(group)
    # from the sixteen-byte line of its first element to that of its last
    assert rig.spilled_bytes == 63 * 256 + 16
    del y
    rig.end()  # while the base lives: nothing orders its end after that lane


@pytest.mark.parametrize("stays_from", [None, 0], ids=["whole", "in part"])
def test_under_a_device_limit_a_sparse_view_that_stays_is_packed(stays_from: int | None) -> None:
    """A plan makes room for what the view itself takes. Flat, it held four times that."""
    rig = Rig(device_limit_bytes=1 << 20)
    base = torch.randn(64, 64)
    expected = base[:, ::4].clone()
    found: list[Tensor] = []
    with rig.group(leaves=stays_from is not None, stays_from=stays_from) as group:
        y = keep(found, base[:, ::4])
    del base
    assert rig.transfers.resident_bytes == group.nbytes == 64 * 16 * 4
    y.backward()
    assert_equal_bits([expected], [found[0].contiguous()])
    assert found[0].stride() == (64, 4)
    del y
    assert rig.end().spilled == 0


def test_a_group_counts_the_same_bytes_whether_its_sparse_views_leave_or_stay() -> None:
    counts = []
    for leaves in (True, False):
        rig = Rig()
        with rig.group(leaves=leaves) as group:
            y = keep([], torch.randn(64, 64)[:, ::4], torch.randn(32)[:20], torch.randn(8))
        counts.append((group.nbytes, group.slot_bytes, group.logical_bytes))
        del y
        rig.end()
    assert (
        counts[0]
        == counts[1]
        == (64 * 16 * 4 + 80 + 32, {0: 64 * 16 * 4, 1: 80, 2: 32}, 64 * 16 * 4 + 80 + 32)
    )


def test_a_partial_view_of_a_group_that_stays_is_neither_gathered_nor_copied(rig: Rig) -> None:
    base = torch.randn(64, 64)
    found: list[Tensor] = []
    with rig.group(leaves=False):
        y = keep(found, base[:, ::4])
    y.backward()
    assert found[0].untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
    assert rig.end().kept == 1
