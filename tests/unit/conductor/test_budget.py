"""Promises of memory: kinds, priorities, floors, ceilings, guests. Bytes are small numbers: the arithmetic is
the same."""

from __future__ import annotations

import pytest

from offload.client import Phase
from offload.conductor.budget import BudgetManager, Counts, Pool, Reservation, ReservationKind
from offload.conductor.config import ConductorConfig
from offload.transfer.copier import DenialReason, Denied, Priority

HARD, SOFT, BURST = ReservationKind.HARD, ReservationKind.SOFT, ReservationKind.BURST
FLOOR, CEILING = ReservationKind.FLOOR, ReservationKind.CEILING
MIB = 1 << 20


class Device:
    """Allocated bytes, as a meter tells them."""

    allocated = 0


def manager(soft: int = 100, hard: int = 120, pinned: int | None = None) -> tuple[BudgetManager, Device]:
    device = Device()
    config = ConductorConfig(
        vram_soft_cap_mb=soft / MIB,
        vram_hard_cap_mb=hard / MIB,
        pinned_cap_mb=None if pinned is None else pinned / MIB,
    )
    found = BudgetManager(lambda: device.allocated, config, Counts())
    return found, device


def granted(answer: Reservation | Denied) -> int:
    assert isinstance(answer, Reservation), answer
    return answer.granted


@pytest.mark.req("S1-7", "S1-8")
def test_a_hard_request_gets_all_or_a_denial_never_a_part() -> None:
    budget, device = manager()
    device.allocated = 30
    assert budget.request("a", 71) == Denied(DenialReason.VRAM_SOFT_CAP)  # though 70 are there
    assert granted(budget.request("a", 70)) == 70  # 30 + 70 = 100, exactly the soft cap
    assert budget.request("a", 1) == Denied(DenialReason.VRAM_SOFT_CAP)
    device.allocated = 29
    assert granted(budget.request("a", 1)) == 1
    assert budget.headroom_bytes == 120 - 29


@pytest.mark.req("S1-9")
def test_a_soft_request_gets_what_is_there_and_where_nothing_is_a_denial() -> None:
    budget, _ = manager()
    assert granted(budget.request("a", 70, kind=SOFT)) == 70
    assert granted(budget.request("b", 70, kind=SOFT)) == 30
    assert budget.request("c", 1, kind=SOFT) == Denied(DenialReason.VRAM_SOFT_CAP)
    assert (budget.counts.grants, budget.counts.partials, budget.counts.denials) == (1, 1, 1)


@pytest.mark.req("S1-10")
def test_a_burst_goes_beyond_the_soft_cap_up_to_the_hard_one() -> None:
    budget, _ = manager()
    assert granted(budget.request("a", 100)) == 100
    assert budget.request("a", 1, kind=SOFT) == Denied(DenialReason.VRAM_SOFT_CAP)
    assert granted(budget.request("a", 15, kind=BURST)) == 15
    assert granted(budget.request("a", 15, kind=BURST)) == 5
    assert budget.request("a", 1, kind=BURST) == Denied(DenialReason.VRAM_HARD_CAP)


@pytest.mark.req("S1-11")
def test_a_floor_is_its_owners_whatever_the_others_ask_for() -> None:
    budget, device = manager()
    assert budget.request("a", 121, kind=FLOOR) == Denied(DenialReason.VRAM_HARD_CAP)  # though 120 are there
    assert granted(budget.request("a", 40, kind=FLOOR)) == 40
    assert granted(budget.request("greedy", 100, kind=SOFT)) == 60  # of 100, 40 are a's
    device.allocated = 60
    assert granted(budget.request("a", 40)) == 40  # out of its floor: nothing more is promised
    assert budget.granted_bytes(Pool.VRAM) == 60 + 40
    assert budget.request("a", 1) == Denied(DenialReason.VRAM_SOFT_CAP)
    assert budget.request("b", 1, kind=FLOOR) == Denied(DenialReason.VRAM_HARD_CAP)  # never a part
    assert budget.request("b", 200, kind=FLOOR) == Denied(DenialReason.VRAM_HARD_CAP)


@pytest.mark.req("S1-12")
def test_a_ceiling_grants_nothing_and_bounds_what_its_owner_gets_until_it_is_released() -> None:
    budget, _ = manager()
    ceiling = budget.request("a", 10, kind=CEILING)
    assert granted(ceiling) == 0
    assert budget.granted_bytes(Pool.VRAM) == 0
    assert granted(budget.request("a", 50, kind=SOFT)) == 10
    for kind in (HARD, SOFT, BURST, FLOOR):
        expected = DenialReason.CEILING_REACHED
        assert budget.request("a", 11, kind=kind, priority=Priority.CRITICAL) == Denied(expected)
    assert granted(budget.request("b", 50)) == 50  # nobody else's
    assert isinstance(ceiling, Reservation)
    assert budget.release(ceiling)
    assert granted(budget.request("a", 30)) == 30


@pytest.mark.req("S1-13")
def test_what_is_promised_for_a_phase_is_released_at_its_end_and_nothing_else() -> None:
    budget, _ = manager()
    forward = budget.request("a", 30, phase=Phase.FORWARD)
    budget.request("b", 20, phase=Phase.BACKWARD)
    budget.request("c", 10)
    budget.phase_ended(Phase.FORWARD)
    assert [one.owner for one in budget.held()] == ["b", "c"]
    assert budget.granted_bytes(Pool.VRAM) == 30
    assert isinstance(forward, Reservation)
    assert not budget.release(forward)


@pytest.mark.req("S1-14")
@pytest.mark.parametrize("kind", [HARD, SOFT, BURST, FLOOR])
@pytest.mark.parametrize("allocated", range(0, 130, 3))
def test_a_higher_priority_is_granted_whatever_a_lower_one_is(kind: ReservationKind, allocated: int) -> None:
    rooms = []
    for priority in sorted(Priority):
        budget, device = manager()
        device.allocated = allocated
        answers = [budget.request("a", 1, kind=kind, priority=priority) for _ in range(130)]
        rooms.append(sum(isinstance(answer, Reservation) for answer in answers))
    assert rooms == sorted(rooms)


@pytest.mark.req("S1-14")
def test_scarcity_denies_background_first_then_speculative_then_required() -> None:
    budget, device = manager()
    denied: dict[Priority, int] = {}  # from so many allocated bytes on
    for device.allocated in range(125):
        for priority in sorted(Priority):
            answer = budget.request("a", 1, priority=priority)
            if isinstance(answer, Denied):
                denied.setdefault(priority, device.allocated)
            else:
                budget.release(answer)
    assert denied == {
        Priority.BACKGROUND: 80,
        Priority.SPECULATIVE: 90,
        Priority.REQUIRED: 100,
        Priority.CRITICAL: 120,
    }


@pytest.mark.req("S1-16")
def test_a_release_is_idempotent_and_an_unknown_one_is_passed_over() -> None:
    budget, _ = manager()
    held = budget.request("a", 50)
    assert isinstance(held, Reservation)
    assert budget.release(held)
    assert not budget.release(held)
    assert not budget.release(12345)
    assert budget.granted_bytes(Pool.VRAM) == 0


@pytest.mark.req("S1-24")
def test_pinned_memory_has_a_cap_and_a_denial_of_its_own() -> None:
    budget, device = manager(pinned=64)
    device.allocated = 1000  # another pool
    assert granted(budget.request("a", 60, pool=Pool.PINNED)) == 60
    assert budget.request("b", 5, pool=Pool.PINNED) == Denied(DenialReason.PINNED_EXHAUSTED)
    assert granted(budget.request("b", 5, pool=Pool.PINNED, kind=SOFT)) == 4
    assert budget.request("b", 1) == Denied(DenialReason.VRAM_SOFT_CAP)
    no_cap, _ = manager()
    assert granted(no_cap.request("a", 1 << 50, pool=Pool.PINNED)) == 1 << 50


def test_what_is_reported_replaces_what_was_and_no_cap_refuses_a_fact() -> None:
    budget, _ = manager(pinned=64)
    for nbytes in (100, 40, 40, 0):
        budget.report_pinned("a", nbytes)
        assert budget.granted_bytes(Pool.PINNED) == nbytes
    assert budget.counts == Counts()


@pytest.mark.req("S1-18")
def test_a_guest_may_allocate_below_high_less_used_less_reserved_less_a_margin() -> None:
    budget, device = manager(soft=1000 * MIB, hard=1200 * MIB)
    device.allocated = 300 * MIB
    budget.request("a", 150 * MIB)
    budget.reserve_guest_bytes(50 * MIB)
    assert budget.can_guest_allocate(200 * MIB)  # 1200 - 300 - 150 - 50 - 500
    assert not budget.can_guest_allocate(200 * MIB + 1)
    assert budget.can_guest_allocate(700 * MIB, safety_margin_mb=0)
    budget.release_reserved_bytes(20 * MIB)
    assert budget.can_guest_allocate(220 * MIB)
    budget.release_reserved_bytes(1 << 60)
    assert budget.guest_bytes == 0
    assert budget.can_guest_allocate(250 * MIB)


def test_negative_bytes_are_an_error() -> None:
    with pytest.raises(ValueError, match="a asks for -1 bytes, must be 0 or more"):
        manager()[0].request("a", -1)


# -- scenarios of other systems, in own words ----------------------------------------------------------------


@pytest.mark.parametrize("tasks", [1, 2, 5, 16])
def test_each_of_n_tasks_gets_half_its_share_before_anybody_has_to_spill(tasks: int) -> None:
    """Spark's memory manager: whatever the first comers took, each of N tasks has 1/2N, and all together
    never more than there is."""
    budget, _ = manager(soft=32_000, hard=32_000)
    least = 32_000 // (2 * tasks)
    for task in range(tasks):
        assert granted(budget.request(f"task {task}", least, kind=FLOOR)) == least
    budget.request("task 0", 1 << 40, kind=SOFT)  # the first takes all that it can get
    for task in range(1, tasks):
        assert granted(budget.request(f"task {task}", least)) == least
    assert budget.granted_bytes(Pool.VRAM) <= 32_000


def test_storage_that_borrowed_gives_back_what_is_asked_for_down_to_its_floor() -> None:
    """Spark: storage borrows what execution leaves. Its owner evicts when execution is denied, and keeps its
    floor."""
    budget, _ = manager(soft=1000, hard=1000)
    budget.request("storage", 400, kind=FLOOR)
    borrowed = budget.request("storage", 900, kind=SOFT)
    assert granted(borrowed) == 900
    assert isinstance(budget.request("execution", 500), Denied)
    assert isinstance(borrowed, Reservation)
    budget.release(borrowed)
    assert granted(budget.request("execution", 600)) == 600
    assert granted(budget.request("storage", 900, kind=SOFT)) == 400  # the floor, which execution has not got


def test_a_reserve_that_fails_is_tried_again_after_a_spill_and_takes_no_bytes_meanwhile() -> None:
    """rapidsmpf's reserve-or-wait: a denial leaves nothing behind; who spills releases, and then it fits."""
    budget, device = manager()
    device.allocated = 95
    for _ in range(3):
        assert isinstance(budget.request("shuffle", 20), Denied)
    assert budget.granted_bytes(Pool.VRAM) == 0
    device.allocated -= 15  # spilled
    assert granted(budget.request("shuffle", 20)) == 20


def test_a_spill_manager_asks_how_much_is_missing_and_frees_no_more_than_that() -> None:
    """rapidsmpf's spill manager: the headroom tells the missing bytes; spillers are asked by priority until
    they are there."""
    budget, device = manager(soft=100, hard=100)
    device.allocated = 100
    spillable = {"low": 25, "high": 40}
    missing = 30 - budget.headroom_bytes
    for name in ("low", "high"):
        freed = min(missing, spillable[name])
        missing -= freed
        device.allocated -= freed
    assert device.allocated == 70
    assert granted(budget.request("a", 30)) == 30


def test_placement_by_budget_keeps_what_fits_and_never_a_part_of_a_block() -> None:
    """SGLang's placement: layers stay on the device while the budget has room for the whole of one, the rest
    stays on the host; a larger budget never keeps fewer."""
    kept_before = -1
    for cap in range(10, 400, 10):
        budget, _ = manager(soft=cap, hard=cap)
        answers = [budget.request(f"layer {index}", 48) for index in range(8)]
        kept = sum(isinstance(answer, Reservation) for answer in answers)
        assert kept == min(8, cap // 48) >= kept_before
        kept_before = kept
