"""Modes that only move changed bits all the same, where a tensor lay at an address that kernels look at,
where two tensors shared bytes and counted versions alone, and where the user had saved-tensor hooks.

Each test is a stranger's loop beside itself without offload.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.regressions.beside import MODES, MOVING, WIDTH, assert_beside, wide

ROWS, LONG, FEW = 12, 100, 31


def squared(model: nn.Module, number: int) -> Tensor:
    loss = model(wide()).square().mean()
    loss.backward()
    return loss.detach()


def blocks(block: Callable[[], nn.Module], number: int = 4) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        inner = nn.Sequential(*[block() for _ in range(number)])
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, 3))

    return build


# -- addresses -----------------------------------------------------------------------------------------------
class Columns(nn.Module):
    """A product with `columns` of a matrix, which autograd saves as the view that they are."""

    def __init__(self, columns: slice = slice(1, 1 + FEW)) -> None:
        super().__init__()
        self.long = nn.Linear(WIDTH, LONG)
        self.weight = nn.Parameter(torch.randn(ROWS, 1))
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        view = self.long(x)[:, self.columns]
        return x + torch.tanh(view.t() @ self.weight).sum() * 0.1


@pytest.mark.parametrize("mode", MODES)
def test_a_packed_view_comes_back_at_the_place_that_it_had(mode: Any) -> None:
    """The columns were packed for their copy and spread again from the begin of a storage. They had lain four
    bytes past a multiple of 16, for which the product of a matrix and a vector takes another kernel: 13 to 16
    of 64 gradients were others, in the default mode too."""
    assert_beside(blocks(Columns), squared, mode)


@pytest.mark.parametrize("columns", [slice(3, 97), slice(4, 35), slice(17, 99, 2)], ids=str)
def test_whatever_the_columns_are(columns: slice) -> None:
    """The first leave unpacked, the second lie on 16 bytes, the third are sparse."""
    assert_beside(blocks(lambda: Columns(columns)), squared, "groups")


class OfNumpy(nn.Module):
    """A product with an array from elsewhere, four bytes past where torch would have put it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEW, 1))

    def forward(self, x: Tensor) -> Tensor:
        array = np.arange(ROWS * FEW + 1, dtype=np.float32)
        given = torch.from_numpy(np.sin(array)[1:]).view(ROWS, FEW)
        return x + torch.tanh(given @ self.weight) * 0.1


@pytest.mark.parametrize("mode", ["groups", True, "hidden_states"])
def test_memory_that_torch_did_not_allocate_comes_back_at_its_place(mode: Any) -> None:
    assert_beside(blocks(OfNumpy), squared, mode)


# -- versions ------------------------------------------------------------------------------------------------
def halved(x: Tensor) -> tuple[Tensor, ...]:
    return x.unsafe_split(1, 1)


def chunked(x: Tensor) -> tuple[Tensor, ...]:
    return x.unsafe_chunk(2, 1)


def of_data(x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone()
    return x[:, :1], x.data[:, 1:]


def set_alike(x: Tensor) -> tuple[Tensor, ...]:
    x = x.clone()
    other = torch.empty(0).set_(x.untyped_storage(), 1, (x.size(0), 1), (2, 1))
    return x[:, :1].mul_(2), other


class Halves(nn.Module):
    """Two halves that share a storage, each written after the other one may have left; rows of 8 bytes, so
    that the aligned span of one covers the other."""

    def __init__(self, part: Callable[[Tensor], tuple[Tensor, ...]], foreach: bool) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.part, self.foreach = part, foreach

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.part(self.into(x).view(-1, 2))
        one = one.sigmoid_()
        squares = one * one
        if self.foreach:
            with torch.no_grad():
                torch._foreach_mul_([other], 0.5)
        other = other.tanh_()
        return x + self.out(torch.cat([squares, other * other], 1).view(ROWS, WIDTH))


BROTHERS = [("disk", halved), (True, of_data), ("groups", set_alike)]


@pytest.mark.parametrize("foreach", [False, True], ids=["", "foreach"])
@pytest.mark.parametrize(("mode", "part"), [*((mode, chunked) for mode in MOVING), *BROTHERS])
def test_parts_that_count_versions_alone_share_no_copy(mode: Any, part: Any, foreach: bool) -> None:
    """The first half had been copied to the host with the bytes of the second around it. Then the second was
    written, and saved: its version had the same number, so it joined that copy. 76 of 80 gradients were
    others, by up to 0.04."""
    assert_beside(blocks(lambda: Halves(part, foreach)), squared, mode)
