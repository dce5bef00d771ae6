"""Which saves share one copy, and which must not: one storage and version in one chunk is copied once;
anything else is not the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from offload.transfer.block import BlockState
from tests.unit.saved.rig import ELEMENTS, KIB, Rig, assert_equal_bits, gradients
from tests.unit.saved.test_views import keep


def leaf(*size: int) -> Tensor:
    return torch.randn(*(size or (ELEMENTS,)), requires_grad=True)


@pytest.mark.req("S2-105")
def test_a_tensor_that_three_layers_save_is_copied_once(rig: Rig) -> None:
    x, w1, w2, w3 = (leaf(16, 16) for _ in range(4))

    def program(x: Tensor, *weights: Tensor) -> Tensor:
        hidden = x * 2
        return torch.cat([hidden @ weight for weight in weights])

    assert_equal_bits(gradients(program, [x, w1, w2, w3]), gradients(program, [x, w1, w2, w3], rig))
    # hidden once; each weight too, since these are no parameters
    assert (rig.spilled_bytes, rig.restored_bytes) == (4 * KIB, KIB)
    assert max(rig.reads.count(label) for label in rig.reads) == 3
    stats = rig.end()
    assert (stats.saved, stats.spilled, stats.restored) == (4, 4, 1)  # the weights were still there


@pytest.mark.req("S2-105")
def test_three_views_of_a_fused_projection_are_one_copy_of_their_union(rig: Rig) -> None:
    x = leaf(8, 32)

    def attention(x: Tensor) -> Tensor:
        query, key, value = (x * 2).view(8, 32).split([16, 8, 8], dim=1)
        return F.softmax(query[:, :8] @ key.t(), dim=-1) @ value

    expected = gradients(attention, [x])
    with rig.group() as group:
        result = attention(x)
        # the softmax; views wait for the commit
        assert [transfer.nbytes for transfer in group.transfers] == [8 * 8 * 4]
    rig.leave()
    found = torch.autograd.grad(result.sum(), [x])
    assert_equal_bits(expected, list(found))
    # the views lie in columns 0 to 32, so their union is the whole of the fused tensor
    assert (rig.saved, rig.spilled_bytes) == (2, KIB + 8 * 8 * 4)


def test_views_saved_after_their_base_travel_with_it_also_those_of_another_dtype(rig: Rig) -> None:
    base = torch.randn(16, 16)
    values = [base, base[3:5], base.t(), base.view(torch.int32), base.view(torch.complex64)]
    expected = [value.clone() for value in values]
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, *values)
    del base, values
    rig.leave()
    y.backward()
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    assert (rig.saved, rig.spilled_bytes, rig.restored_bytes) == (1, KIB, KIB)


def test_groups_of_one_chunk_share_a_copy_and_chunks_do_not(rig: Rig) -> None:
    shared = torch.randn(ELEMENTS)
    outputs = []
    for _ in range(2):
        rig.chunk()
        for name in ("qkv", "mlp"):
            with rig.group(name):
                outputs.append(keep([], shared))
    assert (rig.saved, rig.spilled_bytes) == (2, 2 * KIB)
    rig.chunks.clear()  # so that the step's end drops nothing
    assert rig.engine.end_step().saved == 2


def test_a_save_joins_a_copy_that_is_on_its_way_or_on_the_host(rig: Rig) -> None:
    shared = torch.randn(ELEMENTS)
    outputs = []
    for _ in range(3):
        with rig.group():
            outputs.append(keep([], shared))
        rig.leave()
    assert rig.states() == [BlockState.SPILLED]
    assert (rig.saved, rig.spilled_bytes) == (1, KIB)


def test_a_save_does_not_join_a_record_whose_handles_have_died(rig: Rig) -> None:
    shared = torch.randn(ELEMENTS)
    for _ in range(2):
        with rig.group():
            y = keep([], shared)
        del y
    assert (rig.saved, rig.spilled_bytes) == (2, 2 * KIB)


def test_the_forward_s_end_ends_the_sharing(rig: Rig) -> None:
    shared = torch.randn(ELEMENTS)
    with rig.group():
        _first = keep([], shared)
    rig.chunks[0].complete()
    with rig.group():
        _second = keep([], shared)
    assert rig.saved == 2


@pytest.mark.parametrize("of_another_count", [False, True])
def test_a_changed_tensor_is_not_the_same_one(rig: Rig, of_another_count: bool) -> None:
    """`.data` starts to count versions at 0 again."""
    shared = torch.randn(ELEMENTS)
    found: list[Tensor] = []
    with rig.group():
        _first = keep([], shared)
        # its copy has run, with the bytes of before
        rig.device.synchronize(rig.device.record(rig.device.d2h))
        shared.add_(1)
        second = keep(found, shared.data if of_another_count else shared)
    expected = shared.clone()
    del shared
    rig.leave()
    second.backward()
    assert_equal_bits([expected], found)
    assert rig.saved == 2


def test_a_save_does_not_join_the_packed_copy_of_a_sparse_view(rig: Rig) -> None:
    """The packed copy has other bytes at the same offsets; a later save within its length was once handed
    that view instead of its own."""
    base = torch.randn(64, 64)
    expected = [base[:, ::4].clone(), base.view(-1)[:100].clone(), base[:, ::4].clone()]
    found: list[Tensor] = []
    outputs = []
    for view in (base[:, ::4], base.view(-1)[:100], base[:, ::4]):
        with rig.group():
            outputs.append(keep(found, view))
    del base, view
    rig.leave()
    for output in outputs:
        output.backward()
    assert [torch.equal(one, other) for one, other in zip(expected, found, strict=True)] == [True, True, True]


def test_a_new_storage_at_the_address_of_one_that_has_left_is_not_taken_for_it() -> None:
    """Once its bytes have come back, a record no longer pins the address of the storage that was saved, and
    the table still names it."""
    rig = Rig(device_limit_bytes=0)
    chunk = rig.chunk()
    found: list[Tensor] = []
    with rig.group():
        first = keep([], torch.full((ELEMENTS,), 1.0))
    first.backward(retain_graph=True)
    (reference,) = chunk.table.values()
    second = torch.full((ELEMENTS,), 2.0)
    chunk.table[second.untyped_storage()._cdata] = reference  # as if it had the first one's address
    with rig.group():
        y = keep(found, second)
    y.backward()
    assert_equal_bits([second], found)


def test_a_receive_buffer_never_shares_a_copy(rig: Rig) -> None:
    """It is written from outside autograd, so its version says nothing: a buffer received into twice is
    copied twice."""
    buffer = torch.full((ELEMENTS,), 1.0)
    rig.engine.register_external(buffer)
    found: list[Tensor] = []
    outputs = []
    for value in (1.0, 2.0):
        buffer.numpy()[:] = value  # as recv: the version does not move
        with rig.group():
            outputs.append(keep(found, buffer))
        rig.leave()
    assert buffer._version == 0
    for output in outputs:
        output.backward()
    assert_equal_bits([torch.full((ELEMENTS,), value) for value in (1.0, 2.0)], found)
    assert (rig.saved, rig.spilled_bytes, rig.restored_bytes) == (2, 2 * KIB, 2 * KIB)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_receive_buffer_is_not_taken_for_its_saved_bytes_although_it_lives(
    rig: Rig, num_parts: int
) -> None:
    buffer = torch.full((num_parts * ELEMENTS,), 1.0)
    rig.engine.register_external(buffer)
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, buffer[-ELEMENTS:])
    rig.leave()
    buffer.numpy()[:] = 2.0
    y.backward()
    assert_equal_bits([torch.full((ELEMENTS,), 1.0)], found)
    assert rig.restored_bytes == KIB


def test_a_tensor_that_is_still_alive_is_read_without_a_copy(rig: Rig) -> None:
    value = torch.randn(ELEMENTS)
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, value)
    rig.leave()
    assert rig.states() == [BlockState.SPILLED]
    y.backward()
    assert found[0].data_ptr() == value.data_ptr()
    assert rig.restored_bytes == 0
    stats = rig.end()
    assert (stats.spilled, stats.restored) == (1, 0)


def test_a_tensor_whose_storage_was_freed_by_its_owner_is_fetched_back(rig: Rig) -> None:
    value = torch.randn(ELEMENTS)
    expected = value.clone()
    found: list[Tensor] = []
    with rig.group():
        y = keep(found, value)
    rig.leave()
    value.untyped_storage().resize_(0)
    y.backward()
    assert_equal_bits([expected], found)
    assert rig.restored_bytes == KIB


def test_the_bytes_of_a_group_are_counted_by_storage_and_by_save(rig: Rig) -> None:
    shared: Any = torch.randn(ELEMENTS)
    with rig.group() as group:
        _y = keep([], shared, shared, shared[:16])
    assert (group.nbytes, group.logical_bytes, group.slots) == (KIB, 2 * KIB + 64, 1)
