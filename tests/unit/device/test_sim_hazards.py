"""The happens-before checker: each edge of a spill and restore is needed, and what a missing one looks like
in the error."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from offload.device.base import Device
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import HazardError

EXECUTORS: tuple[ExecutorName, ...] = get_args(ExecutorName)
BLOCK = 64


def saved(device: SimDevice, value: int) -> torch.Tensor:
    """A tensor as compute makes one and autograd saves it."""
    tensor = torch.full((BLOCK,), value, dtype=torch.uint8)
    device.note_write(device.compute, tensor)
    return tensor


def order(device: Device, title: str, *, first: str, then: str) -> None:
    device.wait(getattr(device, then), device.record(getattr(device, first)), title)


def spill_and_restore_twice(device: SimDevice) -> list[torch.Tensor]:
    """Two tensors go through one host block, one after the other; what unpack hands to compute. Every edge
    has a title."""
    block = device.host_memory(BLOCK, BLOCK).pieces[0]
    read: list[torch.Tensor] = []
    sources, buffers = [], []
    for value in (1, 2):
        source = saved(device, value)
        sources.append(source)  # an engine would drop it after the "free" edge
        order(device, "spill", first="compute", then="d2h")
        order(device, "reuse of a block", first="h2d", then="d2h")
        device.copy(device.d2h, [(block, source)])
        spilled = device.record(device.d2h)
        device.wait(device.compute, spilled, "free")
        device.note_free(device.compute, source)
        buffer = device.empty(BLOCK)
        buffers.append(buffer)
        order(device, "allocate", first="compute", then="h2d")
        device.wait(device.h2d, spilled, "restore")
        device.copy(device.h2d, [(buffer, block)])
        device.wait(device.compute, device.record(device.h2d), "unpack")
        device.note_read(device.compute, buffer)
        read.append(buffer.clone())
        device.note_free(device.compute, buffer)
    return read


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("seed", range(5))
def test_a_program_with_all_its_edges_raises_nothing_and_reads_what_it_saved(
    executor: ExecutorName, seed: int
) -> None:
    assert [
        t.unique().tolist() for t in spill_and_restore_twice(SimDevice(executor=executor, seed=seed))
    ] == [[1], [2]]


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("titles", "message"),
    [
        (
            {"spill"},
            r"RAW hazard on .*storage of 64: copy of 64 bytes \(operation . of d2h\).* reads them "
            r"while note_write .* of compute",
        ),
        (
            {"free"},
            r"allocator reuse hazard on .*storage of 64.* compute .* copy of 64 bytes .*d2h\).*"
            r", which reads them",
        ),
        (
            {"allocate"},
            r"allocator reuse hazard on .*: copy .* of h2d\).* writes them while empty .* of compute\), "
            r"which hands them out",
        ),
        (
            {"unpack"},
            r"RAW hazard on .*: note_read .* of compute\) reads them while copy .* of h2d\).*, which writes "
            r"them",
        ),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "",
)
def test_a_missing_edge_is_an_error_that_names_both_sides(
    executor: ExecutorName, titles: set[str], message: str
) -> None:
    with pytest.raises(HazardError, match=message):
        spill_and_restore_twice(SimDevice(executor=executor, without=titles))


def block_passes_from_restore_to_spill(device: SimDevice) -> torch.Tensor:
    """A spill into the block that a restore reads, where nothing but the edge of the block orders the two."""
    block = device.host_memory(BLOCK, BLOCK).pieces[0]
    first, second, buffer = saved(device, 1), saved(device, 2), device.empty(BLOCK)
    order(device, "spill", first="compute", then="d2h")
    order(device, "allocate", first="compute", then="h2d")
    device.copy(device.d2h, [(block, first)])
    order(device, "restore", first="d2h", then="h2d")
    device.copy(device.h2d, [(buffer, block)])
    restored = device.record(device.h2d)
    device.wait(device.d2h, restored, "reuse of a block")
    device.copy(device.d2h, [(block, second)])
    device.synchronize(device.record(device.d2h))
    device.synchronize(restored)
    return buffer


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_block_is_written_after_its_reader_and_read_after_its_own_spill(executor: ExecutorName) -> None:
    assert block_passes_from_restore_to_spill(SimDevice(executor=executor)).unique().tolist() == [1]
    for title, hazard in {
        "reuse of a block": r"WAR hazard on .*piece of 64: copy .* of d2h\).* writes them while .* of h2d\)",
        "restore": r"RAW hazard on .*piece of 64: copy .* of h2d\).* reads them while copy .* of d2h\)",
    }.items():
        with pytest.raises(HazardError, match=hazard):
            block_passes_from_restore_to_spill(SimDevice(executor=executor, without={title}))


def test_two_lanes_may_not_write_the_same_bytes_unordered(device: SimDevice) -> None:
    first, second = device.host_memory(2 * BLOCK, BLOCK).pieces
    buffer = device.empty(BLOCK)
    for lane in ("d2h", "h2d"):
        order(device, "allocate", first="compute", then=lane)
    device.copy(device.h2d, [(buffer, first)])
    with pytest.raises(HazardError, match="WAW hazard"):
        device.copy(device.d2h, [(buffer, second)])


def test_a_source_may_not_be_overwritten_while_it_leaves(device: SimDevice) -> None:
    source, block = saved(device, 1), device.host_memory(BLOCK, BLOCK).pieces[0]
    order(device, "spill", first="compute", then="d2h")
    device.copy(device.d2h, [(block, source)])
    with pytest.raises(
        HazardError, match=r"WAR hazard on .*: note_write .* of compute\) writes them while copy"
    ):
        device.note_write(device.compute, source)
    order(device, "free", first="d2h", then="compute")
    device.note_write(device.compute, source)


def test_a_hazard_says_which_edges_there_are_and_which_were_left_out() -> None:
    device = SimDevice(without={"restore"})
    block = device.host_memory(2 * BLOCK, 2 * BLOCK).pieces[0]
    sources = [saved(device, 1), saved(device, 2)]
    order(device, "spill", first="compute", then="d2h")
    device.copy(device.d2h, [(block[:BLOCK], sources[0])])
    order(device, "older spill", first="d2h", then="h2d")
    device.copy(device.d2h, [(block[BLOCK:], sources[1])])
    order(device, "restore", first="d2h", then="h2d")
    with pytest.raises(HazardError) as caught:
        device.copy(device.h2d, [(device.empty(BLOCK), block[BLOCK:])])
    number = device.d2h.issued
    for part in (
        "bytes [64, 128) of a host piece of 128",
        f"operation {number} of d2h",
        f"h2d comes after operation {number - 1} of d2h (last edge: 'older spill'), not after {number}",
        "edges left out of h2d: 'restore'",
        f"Record an event on d2h after operation {number} and let h2d wait for it first",
    ):
        assert part in str(caught.value)
    assert device.copies(device.h2d) == 0, "nothing was issued"


def test_neighbours_in_one_storage_do_not_conflict_and_an_overlap_of_one_byte_does(device: SimDevice) -> None:
    piece = device.host_memory(4 * BLOCK, 4 * BLOCK).pieces[0]
    source, buffer = saved(device, 1), torch.empty(BLOCK, dtype=torch.uint8)
    order(device, "spill", first="compute", then="d2h")
    device.copy(device.d2h, [(piece[BLOCK : 2 * BLOCK], source)])
    device.copy(device.h2d, [(buffer, piece[:BLOCK])])
    device.copy(device.h2d, [(buffer, piece[2 * BLOCK : 3 * BLOCK])])
    for start in (1, 2 * BLOCK - 1):
        with pytest.raises(HazardError, match="RAW"):
            device.copy(device.h2d, [(buffer, piece[start : start + BLOCK])])


def test_a_strided_view_covers_the_bytes_from_its_first_element_to_its_last(device: SimDevice) -> None:
    matrix = torch.zeros(4, 16, dtype=torch.int32)
    piece = device.host_memory(1024, 1024).pieces[0]
    device.note_write(device.compute, matrix[:, 4:8])  # elements 4 to 3 * 16 + 7
    bytes_ = matrix.view(-1).view(torch.uint8)
    device.copy(device.d2h, [(piece[:16], bytes_[:16])])
    device.copy(device.d2h, [(piece[:32], bytes_[224:])])
    with pytest.raises(HazardError, match=r"bytes \[220, 224\)"):
        device.copy(device.d2h, [(piece[:4], bytes_[220:224])])


@pytest.mark.parametrize("how", ["poll", "synchronize"])
def test_what_the_host_saw_finish_comes_before_all_that_it_issues_later(how: str) -> None:
    device = SimDevice(executor="early" if how == "poll" else "late")
    block, source, buffer = (
        device.host_memory(BLOCK, BLOCK).pieces[0],
        saved(device, 1),
        torch.empty(BLOCK, dtype=torch.uint8),
    )
    order(device, "spill", first="compute", then="d2h")
    device.copy(device.d2h, [(block, source)])
    spilled = device.record(device.d2h)
    with pytest.raises(HazardError):
        device.copy(device.h2d, [(buffer, block)])
    assert getattr(device, how)(spilled) is not False
    device.copy(device.h2d, [(buffer, block)])
    device.note_free(device.compute, source)


def test_a_poll_that_said_no_orders_nothing() -> None:
    device = SimDevice(executor="late")
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], saved(device, 1)
    order(device, "spill", first="compute", then="d2h")
    device.copy(device.d2h, [(block, source)])
    assert not device.poll(device.record(device.d2h))
    with pytest.raises(HazardError, match="allocator reuse"):
        device.note_free(device.compute, source)


def test_order_is_transitive_over_lanes(device: SimDevice) -> None:
    block, source, buffer = device.host_memory(BLOCK, BLOCK).pieces[0], saved(device, 1), device.empty(BLOCK)
    order(device, "spill", first="compute", then="d2h")
    device.copy(device.d2h, [(block, source)])
    order(device, "through compute", first="d2h", then="compute")
    order(device, "through compute", first="compute", then="h2d")
    device.copy(device.h2d, [(buffer, block)])


def test_an_event_orders_only_what_was_issued_before_it(device: SimDevice) -> None:
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], saved(device, 1)
    early = device.record(device.compute)
    late = saved(device, 2)
    device.wait(device.d2h, early, "spill")
    device.copy(device.d2h, [(block, source)])
    with pytest.raises(HazardError, match="RAW"):
        device.copy(device.d2h, [(block, late)])


def test_a_second_compute_lane_needs_an_edge_to_read_what_the_first_made(device: SimDevice) -> None:
    side = device.new_compute_lane("side")
    tensor = saved(device, 1)
    with device.use_lane(side):
        assert device.compute is side
        with pytest.raises(HazardError, match=r"RAW hazard .* of side"):
            device.note_read(device.compute, tensor)
    made = device.record(device.compute)
    device.wait(side, made, "side")
    device.note_read(side, tensor)
    with pytest.raises(HazardError, match="allocator reuse"):  # the reader on the side lane is not done
        device.note_free(device.compute, tensor)
    device.wait(device.compute, device.record(side), "back")
    device.note_free(device.compute, tensor)


def test_the_hosts_own_reads_of_host_memory_are_checked_too(device: SimDevice) -> None:
    block, source = device.host_memory(BLOCK, BLOCK).pieces[0], saved(device, 7)
    order(device, "spill", first="compute", then="d2h")
    device.copy(device.d2h, [(block, source)])
    spilled = device.record(device.d2h)
    with pytest.raises(HazardError, match=r"RAW hazard .* of host.* synchronize or poll it first"):
        device.note_read(device.host, block)
    device.synchronize(spilled)
    device.note_read(device.host, block)
    assert block.unique().tolist() == [7]
    device.copy(device.d2h, [(block, source)])  # issued by the host after its own read


def test_without_the_check_an_unordered_program_runs_on() -> None:
    device = SimDevice(check=False, without={"unpack", "spill", "free", "restore", "allocate"})
    assert len(spill_and_restore_twice(device)) == 2


def test_every_edge_that_was_asked_for_is_counted_by_its_title() -> None:
    device = SimDevice(without={"unpack"}, check=False)
    spill_and_restore_twice(device)
    assert dict(device.waits) == {
        "spill": 2,
        "reuse of a block": 2,
        "free": 2,
        "allocate": 2,
        "restore": 2,
        "unpack": 2,
    }
