"""Cutting groups where their tensors end, and keeping a part of one."""

from __future__ import annotations

import pytest
import torch

from offload import OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from offload.groups.group import OffloadTensorGroup
from offload.groups.plan import PlanSettings, SeenStep, StepPlanner
from offload.groups.units import Unit, cut_into_units, stays_of
from offload.policy.actions import GroupSize, Rates
from offload.policy.lookahead import ActionKey
from tests.unit.groups.stack import Driver, assert_same, baseline, build_manager, build_stages, installed, one_f_one_b
from tests.unit.groups.test_plan import chunks_of

KIB = 1024


def group_of(name: str, *nbytes: int) -> OffloadTensorGroup:
    group = OffloadTensorGroup(name)
    group.slot_bytes = tuple(enumerate(nbytes))
    group.total_offload_bytes = sum(nbytes)
    return group


def test_group_is_cut_after_tensors_that_reach_the_least_bytes() -> None:
    units = cut_into_units([group_of("a", 3, 3, 9, 1), group_of("b"), group_of("c", 4)], 5)
    assert units == [
        Unit(0, 0, GroupSize("a", 6)),
        Unit(0, 2, GroupSize("a", 9)),
        Unit(0, 3, GroupSize("a", 1)),
        Unit(1, 0, GroupSize("b", 0)),
        Unit(2, 0, GroupSize("c", 4)),
    ]


def test_units_of_a_chunk_stay_few_however_many_tensors_it_has() -> None:
    units = cut_into_units([group_of("a", *[1] * 10_000)], 1)
    assert len(units) <= 65
    assert sum(unit.size.nbytes for unit in units) == 10_000


def test_group_counted_by_hand_is_one_unit() -> None:
    group = OffloadTensorGroup("a")
    group.update_offload_info(torch.empty(6))
    assert cut_into_units([group], 1) == [Unit(0, 0, GroupSize("a", 24))]


def test_a_kept_end_is_whole_groups_and_the_last_tensors_of_one_more() -> None:
    units = cut_into_units([group_of("a", 4, 4, 4), group_of("b", 4)], 4)
    stays = stays_of(units, {1, 2, 3})
    assert stays.whole == {1}
    assert stays.from_slot == {0: 1}
    assert stays.part_bytes == {0: 8}
    assert stays_of(units, {0, 1, 2, 3}).whole == {0, 1}
    assert stays_of(units, set()) == (frozenset(), {}, {})


def test_timed_plan_keeps_part_of_a_group_that_is_too_large_to_stay_whole() -> None:
    """One chunk of one group of four tensors, and room for three: without units nothing of it could stay."""
    engine = OffloadEngine(OffloadConfig(device_limit_bytes=7 * KIB, piece_bytes=KIB), device=SimDevice())
    engine.rates = Rates(d2h_bytes_per_s=1e6, h2d_bytes_per_s=1e6)
    planner = StepPlanner(engine, PlanSettings.of(engine.config))
    (chunk,) = chunks_of(engine, "a", nbytes=8 * KIB)
    chunk.groups[0].slot_bytes = tuple((slot, 2 * KIB) for slot in range(4))
    actions: list[ActionKey] = [("F", 0, 0), ("B", 0, 0)]
    step = SeenStep(
        chunks=[chunk], forward_order=[chunk], backward_order=[chunk], actions=actions, seconds=dict.fromkeys(actions, 1e-3)
    )
    for _ in range(3):
        planner.after_step(step)
    assert chunk.stays == frozenset()
    first_kept = chunk.stays_from[0]
    assert 1 <= first_kept <= 3
    assert planner.summary == {"a": first_kept * 2 * KIB}, "the table counts what leaves"


@pytest.mark.parametrize("stays_from", [0, 1, 2, 3])
def test_what_a_plan_keeps_of_a_group_never_moves_and_the_rest_does(stays_from: int) -> None:
    order = one_f_one_b(2, 1)
    expected = baseline(build_stages(names=("a",)), [order] * 3)
    with installed(build_manager(device_limit_bytes=1 << 30, max_spilling_bytes=KIB)) as manager:
        assert manager is not None
        driver = Driver(build_stages(names=("a",)), announced=True)
        found = [driver.step(order)]
        whole = manager.stats
        for handler in manager._handlers.values():
            sizes = [dict(group.slot_bytes) for group in handler.groups]
            handler.stays, handler.stays_from = frozenset(), dict.fromkeys(range(len(handler.groups)), stays_from)
        found.append(driver.step(order))
        leaving = sum(nbytes for group in sizes for slot, nbytes in group.items() if slot < stays_from) * len(manager._handlers)
        assert manager.stats.spill_bytes == leaving
        assert manager.stats.saved == whole.saved
        found.append(driver.step(order))
    assert_same(expected, found)
