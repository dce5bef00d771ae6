"""Writes that no operator shows, found by the bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.planner.operators import UnseenWrites


def negated(tensor: Tensor) -> None:
    """Changes one bit of each of an even number of elements, as a kernel would: no version moves."""
    tensor.detach().view(torch.uint8).numpy()[..., tensor.element_size() - 1 :: tensor.element_size()] ^= 128


def one(tensor: Tensor) -> None:
    tensor.detach().view(torch.uint8).numpy()[0, 0] ^= 1


@pytest.mark.parametrize("change", [negated, one])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.int64]
)
def test_a_write_is_found_in_every_type(dtype: torch.dtype, change: Callable[[Tensor], None]) -> None:
    first, second = torch.arange(1, 25).reshape(4, 6), torch.arange(2, 26).reshape(4, 6)
    if dtype.is_complex:
        first = first * (1 + 1j)
    written, same, empty = first.to(dtype), second.to(dtype), torch.empty(0, dtype=dtype)
    seen = UnseenWrites[str]()
    for name, output in (("written", written), ("same", same), ("empty", empty)):
        seen.add(name, output)
    version = written._version
    change(written)
    assert written._version == version
    seen.end()
    assert seen.written() == {"written"}


def test_what_is_no_number_is_compared_by_its_bits() -> None:
    seen = UnseenWrites[str]()
    seen.add("nan", torch.full((3,), torch.nan))
    seen.end()
    assert seen.written() == set()
