"""Grouped products: torch's and the loop's bits, experts without rows, and what torch does not take."""

from __future__ import annotations

import logging
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from moe import products
from moe.products import grouped_outer, grouped_product

COUNTS = {
    "some empty": (5, 0, 9, 2),
    "one has all": (0, 0, 16, 0),
    "first has all": (16, 0, 0, 0),
    "equal": (4, 4, 4, 4),
    "none": (0, 0, 0, 0),
}


def operands(
    counts: tuple[int, ...], dtype: torch.dtype, width: int = 16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = sum(counts)
    x = torch.randn(rows, width, generator=generator).to(dtype)
    y = torch.randn(rows, 24, generator=generator).to(dtype)
    w = torch.randn(len(counts), 24, width, generator=generator).to(dtype)
    return x, y, w, torch.tensor(counts).cumsum(0).int()


def both(counts: tuple[int, ...], dtype: torch.dtype, width: int = 16) -> tuple[Tensor, Tensor]:
    x, y, w, ends = operands(counts, dtype, width)
    return grouped_product(x, w.transpose(1, 2), ends), grouped_outer(x, y, ends)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_torchs_products_have_the_bits_of_the_loop(counts: tuple[int, ...], dtype: torch.dtype) -> None:
    if not products._takes("cpu", dtype, True):
        pytest.skip("this torch has no grouped_mm on the CPU")
    grouped = both(counts, dtype)
    with patch.object(products, "_takes", lambda *_: False):
        looped = both(counts, dtype)
    for found, expected in zip(grouped, looped, strict=True):
        assert found.dtype is dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 16), (torch.bfloat16, 12)])
def test_what_torch_does_not_take_is_looped(counts: tuple[int, ...], dtype: torch.dtype, width: int) -> None:
    x, y, w, ends = operands(counts, dtype, width)
    product, outer = both(counts, dtype, width)
    start = 0
    for expert, end in enumerate(ends.tolist()):
        assert torch.equal(product[start:end], x[start:end] @ w[expert].t())
        assert torch.equal(outer[expert], x[start:end].t() @ y[start:end])
        start = end
    assert product.shape == (sum(counts), 24)


def test_a_loop_on_a_device_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    products._takes.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not products._takes("cuda", torch.float64, True)
    assert [record.getMessage() for record in caplog.records] == [
        "the experts' products run one by one, and the host waits for their row counts: torch's grouped_mm "
        "does not take torch.float64 on cuda; use bfloat16 and widths that are multiples of 8"
    ]
    products._takes.cache_clear()
