"""Modes that only move changed bits all the same, where a tensor lay at an address that kernels look at,
where two tensors shared bytes and counted versions alone, and where the user had saved-tensor hooks.

Each test is a stranger's loop beside itself without offload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import offload
from tests.regressions.beside import MODES, MOVING, WIDTH, assert_beside, differing, run, squared, wide

ROWS, LONG, FEW = 12, 100, 31


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


# -- the user's own hooks ------------------------------------------------------------------------------------
class Half:
    """Saved tensors are kept in half the bytes; parameters as they are, by their type. calls: of pack."""

    def __init__(self) -> None:
        self.calls = 0

    def pack(self, tensor: Tensor) -> Tensor:
        self.calls += 1
        held = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
        return tensor if held else tensor.bfloat16()

    def unpack(self, packed: Tensor) -> Tensor:
        return packed.float()


class Table:
    """What autograd keeps is a number."""

    def __init__(self) -> None:
        self.held: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> int:
        self.held[len(self.held)] = tensor.detach() * 0.5
        return len(self.held) - 1

    def unpack(self, number: int) -> Tensor:
        return self.held[number] * 2


class Ring:
    """What autograd keeps are views of one buffer, which the next save writes."""

    def __init__(self) -> None:
        self.buffer = torch.empty(1 << 16)
        self.next = 0

    def pack(self, tensor: Tensor) -> Tensor:
        view = self.buffer[self.next : self.next + tensor.numel()].view(tensor.shape)
        self.next += tensor.numel()
        return view.copy_(tensor.detach() * 0.3)

    def unpack(self, view: Tensor) -> Tensor:
        return view / 0.3


def pair_of(kind: Callable[[], Any]) -> saved_tensors_hooks:
    hooks = kind()
    return hooks if isinstance(hooks, saved_tensors_hooks) else saved_tensors_hooks(hooks.pack, hooks.unpack)


@contextmanager
def table_in_half() -> Iterator[None]:
    with pair_of(Half), pair_of(Table):
        yield


def inside(around: Callable[[], Any]) -> Any:
    """A step whose forward runs inside the user's hooks, and the backward outside of them."""

    def step(model: nn.Module, number: int) -> Tensor:
        with around():
            loss = model(wide()).square().mean()
        loss.backward()
        return loss.detach()

    return step


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


@pytest.mark.parametrize("mode", MODES)
def test_hooks_of_the_user_around_a_forward_are_called_for_every_save(mode: Any) -> None:
    """torch shows a save to the innermost pair alone, which was ours: three packs in place of 36, and other
    gradients than without offload."""
    counted = Half()
    step = inside(lambda: saved_tensors_hooks(counted.pack, counted.unpack))
    plain = run(blocks(Residual), step)
    calls, counted.calls = counted.calls, 0
    assert differing(plain, run(blocks(Residual), step, mode)) == []
    assert counted.calls == calls


@pytest.mark.parametrize("kind", [Table, Ring, save_on_cpu, table_in_half])
@pytest.mark.parametrize("mode", ["groups", "disk", "hidden_states", "selective"])
def test_whatever_the_users_hooks_make_of_a_save(mode: Any, kind: Callable[[], Any]) -> None:
    """What is no tensor, or is one of whose bytes somebody else has some, is the user's to keep. Of two pairs
    the inner one is called, as without offload."""
    around = kind if kind is table_in_half else lambda: pair_of(kind)
    assert_beside(blocks(Residual), inside(around), mode)


def test_what_the_users_pack_returns_is_what_moves() -> None:
    """Two bytes an element in place of four."""

    def moved(step: Any) -> int:
        torch.manual_seed(0)
        model = blocks(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))()
        offload.configure(offload.OffloadConfig(min_offloaded_tensor_size=1))
        handle = offload.apply(model, True, min_numel=1)
        step(model, 0)
        offload.step_end()
        moved = handle.report().total.moved_bytes
        handle.remove()
        offload.reset()
        return moved

    assert 0 < 2 * moved(inside(lambda: pair_of(Half))) == moved(squared)
