"""The engine's own life: what it derives from its config, what a step's end settles and reports, and what
closing returns."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.config import OffloadConfig
from offload.device.sim import SimDevice
from offload.engine import OffloadEngine
from offload.errors import HostBudgetError, PoolError
from offload.memory.budget import LocalHostBudget
from offload.telemetry.records import ClientStats
from tests.inside import holds_lock
from tests.unit.saved.rig import EXECUTORS, KIB, Rig, assert_equal_bits, chain, leaf

GIB = 1 << 30


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# -- derived limits ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("config", "device", "spilling", "restoring"),
    [
        ({}, None, GIB, GIB),
        # what leaves has the room that the limit leaves
        ({"device_limit_bytes": 4 * GIB}, 4 * GIB, None, GIB),
        ({"device_limit_bytes": 0}, 0, None, 0),
        ({"max_spilling_bytes": 5, "max_restoring_bytes": 7}, None, 5, 7),
        ({"max_spilling_bytes": 0}, None, 0, GIB),
        ({"device_limit_bytes": 100, "max_spilling_bytes": 5, "max_restoring_bytes": 7}, 100, 5, 7),
    ],
)
def test_limits_that_are_not_set_are_derived(
    config: dict[str, int], device: int | None, spilling: int | None, restoring: int
) -> None:
    limits = OffloadEngine(OffloadConfig(**config), device="sim").limits  # type: ignore[arg-type]
    assert (limits.device_limit_bytes, limits.max_spilling_bytes, limits.max_restoring_bytes) == (
        device,
        spilling,
        restoring,
    )


def test_an_engine_without_a_config_has_the_default_one() -> None:
    assert OffloadEngine(device="sim").config == OffloadConfig()


# -- a step's end --------------------------------------------------------------------------------------------
def test_the_figures_of_a_step_are_exact() -> None:
    rig = Rig(max_restoring_bytes=0)
    y = []
    with rig.group():
        y.append(chain(leaf(), 3).sum())
    with rig.group(leaves=False):
        y.append(chain(leaf(), 2).sum())
    rig.leave()
    for output in y:
        output.backward()
    del output
    y.clear()
    stats = rig.end()
    assert (stats.step, stats.saved, stats.kept, stats.spilled, stats.restored) == (0, 5, 2, 3, 3)
    assert (stats.spill_bytes, stats.restore_bytes) == (3 * KIB, 3 * KIB)
    assert (stats.refused, stats.refused_bytes) == (0, 0)
    assert stats.host_bytes_lent_peak == 3 * KIB
    assert stats.device_bytes_peak == 5 * KIB
    assert rig.engine.last_stats is stats


def test_steps_are_counted_and_each_has_figures_of_its_own(rig: Rig) -> None:
    for step, length in enumerate((3, 1, 2)):
        with rig.group():
            y = chain(leaf(), length).sum()
        y.backward()
        del y
        stats = rig.end()
        assert (stats.step, stats.saved) == (step, length)
        assert stats.host_bytes_lent_peak == stats.device_bytes_peak == length * KIB


@pytest.mark.parametrize("executor", EXECUTORS)
def test_when_the_whole_backward_runs_all_that_left_has_come_back(executor: Any) -> None:
    rig = Rig(executor, seed=2)
    with rig.group():
        outputs = [chain(leaf(), 4).sum() for _ in range(3)]
    rig.leave()
    torch.autograd.backward(outputs)
    outputs.clear()
    stats = rig.end()
    assert stats.saved == stats.kept + stats.spilled
    assert stats.restored == stats.spilled == 12
    assert stats.restore_bytes == stats.spill_bytes == 12 * KIB


def test_the_stall_of_a_step_is_reported_one_step_later() -> None:
    """Reading it at once would block the host."""
    stalls = []
    for rate in (50.0, 25.0):
        rig = Rig(device=SimDevice(executor="clock", d2h_gb_s=rate, h2d_gb_s=rate), max_restoring_bytes=0)
        with rig.group():
            y = chain(leaf(), 1).sum()
        rig.leave()
        y.backward()
        del y
        first = rig.end()
        assert (first.stall_count, first.stall_ms) == (2, 0)  # for the spill's source, and for the restore
        second = rig.end()
        assert second.stall_count == 0
        stalls.append(second.stall_ms)
    assert 0 < 2 * stalls[0] == stalls[1]


def test_an_empty_step_reports_zeros() -> None:
    stats = Rig().end()
    assert {name: value for name, value in stats.to_json().items() if value and name != "clients"} == {}
    assert stats.clients == {"groups": ClientStats()}


# -- leftovers -----------------------------------------------------------------------------------------------
def test_leftovers_are_dropped_with_one_warning(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with rig.group():
        _y = chain(leaf(), 3).sum()
    with rig.group(leaves=False):
        _z = chain(leaf(), 1).sum()
    stats = rig.end()
    assert warnings_of(caplog) == [
        "step 0 ended with 4 saved tensors (4.10 kB) whose backward has not run; they are dropped, and "
        "reading one raises "
        "StaleHandleError. Run the backward first, or forward without gradients in evaluation. They were "
        "saved in s0m0/group"
    ]
    assert (stats.spilled, stats.restored, stats.kept) == (3, 0, 1)
    rig.end()
    assert len(warnings_of(caplog)) == 1


def test_a_step_that_ran_its_backward_warns_of_nothing(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    with rig.group():
        y = chain(leaf(), 3).sum()
    y.backward()
    rig.end()  # y lives, and its graph holds nothing any more
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("when", ["pending", "spilling", "spilled", "restoring", "retained"])
def test_a_leftover_leaves_nothing_behind_wherever_its_bytes_are(when: str) -> None:
    rig = Rig(piece_bytes=100 * KIB if when == "pending" else 1)
    with rig.group(commit=when != "pending"):
        y = chain(leaf(), 3).sum()
    if when not in ("pending", "spilling"):
        rig.leave()
    if when == "restoring":
        rig.chunks[0].complete()
        rig.pump()
        assert rig.transfers.in_flight() == (0, 3)
    if when == "retained":
        y.backward(retain_graph=True)
    active = rig.device.active_bytes()
    rig.end()
    assert rig.device.active_bytes() <= active
    del y
    rig.end()


def test_ten_steps_with_a_leftover_each_hold_no_more_than_one(rig: Rig) -> None:
    outputs = []
    held = set()
    for _ in range(10):
        with rig.group():
            outputs.append(chain(leaf(), 4).sum())
        stats = rig.end()
        held.add((stats.host_bytes_held, stats.host_bytes_lent_peak))
    assert len(held) == 1
    assert held.pop()[1] == 4 * KIB


def test_figures_of_a_dead_graph_do_not_reach_into_the_next_step(rig: Rig) -> None:
    with rig.group():
        y = chain(leaf(), 3).sum()
    rig.leave()
    rig.end()
    del y  # its records die after the step that they belong to
    with rig.group():
        z = chain(leaf(), 1).sum()
    z.backward()
    del z
    stats = rig.end()
    assert (stats.saved, stats.device_bytes_peak, stats.host_bytes_lent_peak) == (1, KIB, KIB)


# -- set up and end ------------------------------------------------------------------------------------------
def test_reserving_pins_before_the_first_step() -> None:
    engine = OffloadEngine(OffloadConfig(host_reserve_bytes=100 * KIB), device="sim")
    held = engine.arena.held_bytes
    assert held >= 100 * KIB
    engine.reserve_host(50 * KIB)
    assert engine.arena.held_bytes == held


def test_as_much_may_be_reserved_as_the_limit_allows_whose_last_page_is_not_whole() -> None:
    """The error said: reserve 10,000,000 or less."""
    engine = OffloadEngine(
        OffloadConfig(host_reserve_bytes=10_000_000, host_limit_bytes=10_000_000), device="sim"
    )
    assert engine.arena.held_bytes == 2441 * 4096


def test_other_limits_are_taken_while_other_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OffloadEngine(device="sim")
    held: list[bool] = []
    monkeypatch.setattr(engine, "refuse_in_capture", lambda _: held.append(holds_lock(engine)))
    engine.reconfigure(OffloadConfig(host_limit_bytes=10 * KIB))
    assert held == [True]


def test_reserving_more_than_the_budget_is_an_error_and_pins_nothing() -> None:
    engine = OffloadEngine(OffloadConfig(host_limit_bytes=10 * KIB), device="sim")
    with pytest.raises(HostBudgetError):
        engine.reserve_host(11 * KIB)
    assert engine.arena.held_bytes == 0
    with pytest.raises(HostBudgetError):
        OffloadEngine(
            OffloadConfig(host_reserve_bytes=11 * KIB), device="sim", budget=LocalHostBudget(10 * KIB)
        )


def test_closing_drops_what_is_left_and_returns_every_pinned_byte(caplog: pytest.LogCaptureFixture) -> None:
    budget = LocalHostBudget(GIB)
    rig = Rig(budget=budget)
    with rig.group():
        _y = chain(leaf(), 3).sum()
    assert budget.used_bytes > 0
    rig.engine.close()
    assert (budget.used_bytes, rig.engine.arena.held_bytes) == (0, 0)
    assert len(warnings_of(caplog)) == 1


def test_closing_while_a_forgotten_chunk_is_alive_is_an_error_and_unpins_nothing(rig: Rig) -> None:
    with rig.group():
        y = chain(leaf(), 1).sum()
    rig.leave()
    held = rig.engine.arena.held_bytes
    rig.chunks.clear()
    with pytest.raises(PoolError, match="1 blocks of 1,024 bytes lent"):
        rig.engine.close()
    assert rig.engine.arena.held_bytes == held
    y.backward()
    del y
    rig.engine.close()


def test_an_engine_may_be_used_again_after_it_was_closed(rig: Rig) -> None:
    x = leaf()
    for _ in range(2):
        with rig.group():
            y = chain(x, 3).sum()
        rig.leave()
        (found,) = torch.autograd.grad(y, [x])
        assert_equal_bits(list(torch.autograd.grad(chain(x, 3).sum(), [x])), [found])
        del y
        rig.engine.close()


def test_two_engines_do_not_see_each_other() -> None:
    one, other = Rig(), Rig()
    with one.group():
        y = chain(leaf(), 2).sum()
        with other.group():
            z = chain(leaf(), 3).sum()
    assert (one.saved, other.saved) == (2, 3)
    y.backward()
    z.backward()
    del y, z
    one.end()
    other.end()


def test_a_module_s_parameters_and_buffers_are_registered_together() -> None:
    engine = OffloadEngine(device=SimDevice())
    module = nn.BatchNorm1d(8)
    engine.register_parameters(module)
    assert len(engine.externals.kinds) == 5  # weight, bias, and three buffers
    del module
    engine.end_step()
    assert len(engine.externals.kinds) == 0


def test_a_step_may_end_while_another_thread_drops_graphs() -> None:
    rig = Rig("random", seed=9)
    graphs: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()

    def drop() -> None:
        while graphs.get() is not None:
            pass

    dropper = threading.Thread(target=drop)
    dropper.start()
    for _ in range(30):
        with rig.group():
            for _ in range(3):
                graphs.put(chain(leaf(), 2).sum())
        rig.engine.end_step()
    graphs.put(None)
    dropper.join()
