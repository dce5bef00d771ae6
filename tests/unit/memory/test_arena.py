"""The host arena: when it grows, what it holds, and how it ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from offload.errors import HostBudgetError, OffloadError, PoolError
from offload.memory.arena import HostArena
from offload.memory.budget import LocalHostBudget, SharedHostBudget
from tests.inside import checksum_of
from tests.unit.memory.fakes import PIECE, FakeDevice, FakeEvent, arena_on, taken


# -- growth --------------------------------------------------------------------------------------------------
def test_growth_is_inline_where_pinning_costs_nothing(device: FakeDevice, arena: HostArena) -> None:
    taken(arena, 10)
    assert device.pinning_threads == [threading.current_thread().name]
    assert arena.held_bytes == device.host_bytes == PIECE


def test_growth_is_the_deficit_in_whole_registrations(arena: HostArena) -> None:
    taken(arena, 3 * PIECE)
    assert arena.held_bytes == 3 * PIECE
    taken(arena, PIECE + 1)
    assert arena.held_bytes == 5 * PIECE
    taken(arena, 2 * PIECE)  # the rest of the last piece serves it
    assert arena.held_bytes == 7 * PIECE


def test_default_registrations_are_of_64_mib_because_larger_ones_stop_kernel_launches(
    device: FakeDevice,
) -> None:
    arena = HostArena(device.protocol, budget=LocalHostBudget(2 << 30))
    arena.reserve(1025 << 20)
    assert [memory.nbytes >> 20 for memory in device.memories] == [1024, 64]
    assert {piece.numel() >> 20 for memory in device.memories for piece in memory.pieces} == {64}


def test_a_block_beyond_the_budget_is_missing_and_counted(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=2 * PIECE)
    block = taken(arena, PIECE)
    assert arena.cannot_grow == ""
    assert arena.take(PIECE + 1) is None
    assert arena.take(PIECE + 2) is None
    assert (
        arena.cannot_grow == "Raise host_limit (host_limit_bytes in OffloadConfig) to that: it is 131.07 kB"
    )
    stats = arena.stats()
    assert stats.missing == 2
    assert stats.held_bytes == PIECE, "a refused growth holds nothing"
    arena.give_back(block, None)
    assert arena.take(2 * PIECE) is not None


@pytest.mark.req("S2-57")
def test_a_block_not_pinned_yet_is_missing_and_there_later() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device)
    with device.closed_gate():
        assert arena.take(3 * PIECE) is None  # returns although nothing can be pinned
        device.wait_at_gate()
        assert arena.take(3 * PIECE) is None
    arena.synchronize_growth()
    assert device.pinning_threads == ["offload-host-growth"]
    assert arena.held_bytes == 3 * PIECE, "two misses are not two deficits"
    assert taken(arena, 3 * PIECE).nbytes == 3 * PIECE
    assert arena.stats().missing == 2


def test_bytes_are_lent_while_more_are_being_pinned() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device)
    arena.reserve(PIECE)
    device.wait_at_gate()
    with device.closed_gate():
        assert arena.take(2 * PIECE) is None
        device.wait_at_gate()
        arena.give_back(taken(arena, PIECE), None)


def test_a_slab_is_lent_before_the_next_is_pinned() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device, slab_bytes=PIECE)
    device.ungated = 1
    with device.closed_gate():
        arena.reserve_later(2 * PIECE)
        device.wait_at_gate()
        device.wait_at_gate()
        assert taken(arena, PIECE).nbytes == arena.held_bytes == PIECE
    arena.synchronize_growth()
    assert arena.held_bytes == 2 * PIECE


def test_the_background_thread_ends_when_the_target_is_held() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device)
    arena.take(PIECE)
    arena.synchronize_growth()
    assert arena._growth._thread is None


def test_a_refused_growth_is_not_asked_for_at_every_miss() -> None:
    class CountingBudget(LocalHostBudget):
        asked = 0

        def reserve(self, nbytes: int) -> bool:
            self.asked += 1
            return super().reserve(nbytes)

    budget = CountingBudget(PIECE)
    arena = arena_on(FakeDevice(pins=True), budget=budget)

    def miss(nbytes: int) -> int:
        before = budget.asked
        assert arena.take(nbytes) is None
        arena.synchronize_growth()
        return budget.asked - before

    assert miss(2 * PIECE) > 0
    assert miss(2 * PIECE) == miss(3 * PIECE) == 0
    arena.reset_peak()
    assert miss(2 * PIECE) > 0, "a new step may ask again"
    budget.limit_bytes = 2 * PIECE
    assert miss(2 * PIECE) > 0, "a new limit may be asked"
    assert arena.take(2 * PIECE) is not None


def test_what_the_system_refuses_leaves_the_budget_as_it_was() -> None:
    device = FakeDevice(pins=True)
    device.refuses = True
    arena = arena_on(device)
    assert arena.take(PIECE) is None
    arena.synchronize_growth()
    assert "The system refuses more: the system refused 65,536 bytes" in arena.cannot_grow
    assert arena.budget.used_bytes == arena.held_bytes == 0
    with pytest.raises(HostBudgetError, match="the system refused"):
        arena.reserve(PIECE)
    device.refuses = False
    arena.reserve(PIECE)
    assert arena.budget.used_bytes == arena.held_bytes == PIECE


@pytest.mark.parametrize("pins", [False, True])
def test_reserve_pins_before_the_first_take(pins: bool) -> None:
    device = FakeDevice(pins=pins)
    arena = arena_on(device)
    arena.reserve(10 * PIECE)
    assert [memory.nbytes for memory in device.memories] == [4 * PIECE, 4 * PIECE, 2 * PIECE]
    arena.reserve(9 * PIECE)
    taken(arena, 10 * PIECE)
    assert arena.held_bytes == 10 * PIECE
    assert arena.stats().missing == 0


def test_reserve_beyond_the_budget_names_both_numbers_and_pins_nothing(device: FakeDevice) -> None:
    arena = arena_on(device, limit_bytes=2 * PIECE)
    with pytest.raises(
        HostBudgetError,
        match=r"needs 196,608 more.* 131,072 bytes are in use; reserve 131,072 or less.*host_limit_bytes",
    ):
        arena.reserve(3 * PIECE)
    assert device.host_bytes == arena.budget.used_bytes == 0


@pytest.mark.parametrize("pins", [False, True])
def test_nothing_is_pinned_while_a_graph_is_captured(pins: bool) -> None:
    device = FakeDevice(pins=pins)
    arena = arena_on(device)
    arena.reserve(PIECE)
    with device.capture():
        block = taken(arena, PIECE)
        assert arena.take(1) is None
        with pytest.raises(OffloadError, match="captured"):
            arena.reserve(2 * PIECE)
        with pytest.raises(OffloadError, match="captured"):
            arena.contiguous(1)
    arena.synchronize_growth()
    assert device.host_bytes == PIECE
    arena.give_back(block, None)


def test_growth_without_a_thread_is_a_refusal_and_nobody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error was raised in the hook that had saved a tensor, and whoever waited for the growth hung."""
    arena = arena_on(FakeDevice(pins=True))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert arena.take(PIECE) is None
        arena.synchronize_growth()
    assert arena.cannot_grow == "The system refuses more: can't start new thread"
    arena.reserve_later(PIECE)
    arena.synchronize_growth()
    assert arena.take(PIECE) is not None


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


def test_two_arenas_share_a_hosts_budget(tmp_path: Path) -> None:
    first, second = (
        arena_on(FakeDevice(), budget=SharedHostBudget(tmp_path / "ledger", 4 * PIECE)) for _ in range(2)
    )
    first.reserve(3 * PIECE)
    assert second.take(2 * PIECE) is None
    assert second.take(PIECE) is not None
    first.clear()
    assert second.take(3 * PIECE) is not None


@pytest.mark.req("S0-60")
@pytest.mark.parametrize("part", [0, 1])
def test_an_audit_sees_a_byte_that_changed_in_any_part_of_a_block(part: int) -> None:
    block = taken(arena_on(FakeDevice(), limit_bytes=2 * PIECE), 2 * PIECE)
    assert len(block.extents) == 2
    before = checksum_of(block)
    assert before == zlib.crc32(b"".join(extent.numpy().tobytes() for extent in block.extents))
    block.extents[part].numpy()[3] ^= 1
    assert checksum_of(block) != before


# -- counters and the end ------------------------------------------------------------------------------------
def test_held_bytes_stay_within_a_twentieth_of_the_most_lent(arena: HostArena) -> None:
    # sizes of a varying sequence length: the peer's pool, keyed by shape, grows with each new one
    most = 0
    for step in range(8):
        blocks = [taken(arena, 3 * PIECE + step * 7919 + index * 523) for index in range(12)]
        most = max(most, arena.stats().lent_bytes)
        for block in blocks:
            arena.give_back(block, None)
    assert arena.held_bytes <= 1.05 * most


def test_clear_frees_everything_and_gives_the_budget_back(device: FakeDevice, arena: HostArena) -> None:
    event = FakeEvent("restore")
    arena.give_back(taken(arena, 5 * PIECE), event)
    arena.clear()
    assert device.synchronized == [event], "no copy may be in flight when the pages go"
    assert all(memory.released for memory in device.memories)
    assert device.host_bytes == arena.held_bytes == arena.budget.used_bytes == arena.stats().free_bytes == 0
    assert taken(arena, PIECE).after == ()


def test_clear_makes_room_for_a_growth_that_was_refused() -> None:
    arena = arena_on(FakeDevice(pins=True), limit_bytes=PIECE)
    for _ in range(2):  # pinned for the first, refused for the second
        assert arena.take(PIECE) is None
        arena.synchronize_growth()
        block = arena.take(PIECE)
        if block is not None:
            held = block
    arena.give_back(held, None)
    arena.clear()
    assert arena.take(PIECE) is None
    arena.synchronize_growth()
    assert arena.take(PIECE) is not None


def test_clear_names_what_is_still_lent_and_frees_nothing(device: FakeDevice, arena: HostArena) -> None:
    block = taken(arena, 1000)
    with pytest.raises(PoolError, match="1 blocks of 1,000 bytes lent"):
        arena.clear()
    assert arena.held_bytes == PIECE
    assert not device.memories[0].released
    arena.give_back(block, None)
    arena.clear()


def test_clear_stops_the_growth_that_is_under_way() -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device, slab_bytes=PIECE)
    with device.closed_gate():
        arena.reserve_later(50 * PIECE)
        device.wait_at_gate()
        clearing = threading.Thread(target=arena.clear)
        clearing.start()
        while not arena._growth._stopping:
            time.sleep(0)
    clearing.join()
    assert len(device.memories) == 1
    assert device.host_bytes == arena.budget.used_bytes == arena.held_bytes == 0


def test_close_never_raises_and_nothing_grows_afterwards(
    device: FakeDevice, arena: HostArena, caplog: pytest.LogCaptureFixture
) -> None:
    block = taken(arena, 1000)
    with caplog.at_level(logging.INFO):
        arena.close()
    assert "1 blocks of 1,000 bytes lent" in caplog.text
    arena.give_back(block, None)
    arena.close()
    assert device.host_bytes == 0
    assert arena.take(1) is None


def test_close_leaves_memory_to_the_system_whose_last_copy_never_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank is gone: the copy waits for compute, and compute for its message. To synchronize would keep this
    process for ever."""
    monkeypatch.setattr("offload.memory.arena.CLOSE_PATIENCE_S", 0.05)
    device = FakeDevice(pins=True)
    arena = arena_on(device)
    arena.reserve(PIECE)
    never = FakeEvent("of a copy behind a message that never comes")
    arena.give_back(taken(arena, 1000), never)
    arena.close()
    assert "the last copies of 65.54 kB of host memory have not ended" in caplog.text
    assert device.synchronized == []
    assert device.host_bytes == PIECE
    never.passed = True
    arena.close()
    assert device.host_bytes == 0


def test_close_waits_for_a_last_copy_that_ends_soon(caplog: pytest.LogCaptureFixture) -> None:
    device = FakeDevice(pins=True)
    arena = arena_on(device)
    arena.reserve(PIECE)
    copy = FakeEvent("of the last step")
    arena.give_back(taken(arena, 1000), copy)
    ends = threading.Timer(0.05, lambda: setattr(copy, "passed", True))
    ends.start()
    arena.close()
    ends.join()
    assert (device.host_bytes, caplog.text) == (0, "")


def test_an_arena_dropped_while_it_holds_pinned_memory_says_so() -> None:
    arena: HostArena | None = arena_on(FakeDevice(pins=True))
    arena.reserve(PIECE)
    with pytest.warns(ResourceWarning, match="65,536 bytes pinned"):
        arena = None  # its last reference


def test_a_process_that_forgets_to_close_ends_quietly() -> None:
    program = (
        "from tests.unit.memory.test_arena import *\n"
        "from offload import CPUSpillBackend, TensorPool\n"
        "arena = arena_on(FakeDevice(pins=True)); arena.reserve(PIECE); arena.reserve_later(9 * PIECE)\n"
        "pool = TensorPool(arena=arena); tensor = pool.allocate((4,)); pool.free(tensor); del tensor\n"
        "backend = CPUSpillBackend((1,), 1); buffer = backend.allocate(10)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"registration_bytes": 1000}, "multiple of 4,096"),
        ({"slab_bytes": PIECE - 1}, "less than registration_bytes"),
    ],
)
def test_sizes_that_cannot_work_are_refused(
    device: FakeDevice, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        arena_on(device, **arguments)
