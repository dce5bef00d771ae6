"""Limits: the least bound of a cap holds, and its contributor is named and takes its bounds along."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from offload import OffloadConfig
from offload.compat.stagehand.activations import ActivationRuntime
from offload.engine import OffloadEngine
from offload.groups.manager import GroupsManager
from offload.transfer.limits import CONFIG, DEFAULT, DEFAULT_IN_FLIGHT_BYTES, PLAN, Contributor, Limits
from tests.inside import caps_of
from tests.threads import run_all

KIB = 1024


def of(**config: int) -> Limits:
    return Limits(OffloadConfig(**config))  # type: ignore[arg-type]


def test_the_least_bound_holds_and_its_contributor_is_named() -> None:
    limits = of(device_limit_bytes=8 * KIB)
    assert (limits.device_limit_bytes, limits.held_by("device_limit_bytes")) == (8 * KIB, "config")
    weights = limits.contributor("weights")
    weights.bound("device_limit_bytes", 9 * KIB)
    assert (limits.device_limit_bytes, limits.held_by("device_limit_bytes")) == (8 * KIB, "config")
    weights.bound("device_limit_bytes", 5 * KIB)
    assert (limits.device_limit_bytes, limits.held_by("device_limit_bytes")) == (5 * KIB, "weights")
    assert (limits.max_restoring_bytes, limits.held_by("max_restoring_bytes")) == (5 * KIB // 4, "default")
    weights.bound("device_limit_bytes", None)
    assert (limits.device_limit_bytes, limits.held_by("device_limit_bytes")) == (8 * KIB, "config")


def test_two_contributors_of_one_name_are_two() -> None:
    limits = of()
    first, second = limits.contributor("weights"), limits.contributor("weights")
    first.bound("device_limit_bytes", 2 * KIB)
    second.bound("device_limit_bytes", 3 * KIB)
    first.end()
    assert limits.device_limit_bytes == 3 * KIB
    second.end()
    second.end()
    assert (limits.device_limit_bytes, limits.held_by("device_limit_bytes")) == (None, "")


@pytest.mark.parametrize("name", ["conductor", "weights"])
def test_of_a_cap_of_each_model_another_models_own_bound_does_not_hold_and_others_do(name: str) -> None:
    """Also the bound of somebody who calls himself what the models' contributors are called."""
    limits = of()
    first, second = limits.contributor("weights"), limits.contributor("weights")
    first.bound("weights_window_bytes", 2 * KIB, is_own=True)
    second.bound("weights_window_bytes", 3 * KIB, is_own=True)
    first.bound("gradients_window_bytes", 1, is_own=True)
    assert (first.least("weights_window_bytes"), second.least("weights_window_bytes")) == (2 * KIB, 3 * KIB)
    assert limits.weights_window_bytes == 2 * KIB
    limits.contributor(name).bound("weights_window_bytes", KIB)
    assert first.least("weights_window_bytes") == second.least("weights_window_bytes") == KIB
    assert limits.held_by("weights_window_bytes") == name


def test_a_bound_that_stands_in_for_another_names_it() -> None:
    """The mark of a watermark bounds what is in flight, so the derived cap is lifted; a config's is not."""
    for config, cap in ({}, None), ({"max_spilling_bytes": KIB}, KIB):
        limits = of(**config)
        share = limits.contributor("watermark")
        share.bound("max_spilling_bytes", None, replaces=(DEFAULT,))
        assert limits.max_spilling_bytes == cap
        share.end()
        assert limits.max_spilling_bytes == config.get("max_spilling_bytes", DEFAULT_IN_FLIGHT_BYTES)


def test_a_config_that_names_a_window_stands_in_for_a_plan() -> None:
    limits = of(device_limit_bytes=8 * KIB, max_restoring_bytes=KIB)
    plan = limits.contributor(PLAN, is_plan=True)
    plan.bound("max_restoring_bytes", 3 * KIB, replaces=(DEFAULT,))
    plan.bound("half_room_bytes", 512)
    plan.bound("kept_limit_bytes", 7 * KIB, replaces=(DEFAULT,))
    assert (limits.max_restoring_bytes, limits.held_by("max_restoring_bytes")) == (KIB, CONFIG)
    assert (limits.half_room_bytes, limits.kept_limit_bytes) == (None, 7 * KIB)
    assert limits.named == {"device_limit_bytes", "max_restoring_bytes"}


def test_inputs_in_flight_are_two_unless_groups_or_bytes_are_named() -> None:
    limits, plan = of(), of(device_limit_bytes=KIB)
    plan.contributor(PLAN, is_plan=True).bound("max_spilling_bytes", 512, replaces=(DEFAULT,))
    assert limits.inputs_in_flight == plan.inputs_in_flight == 2
    assert of(max_spilling_bytes=KIB).inputs_in_flight is None
    for number in (5, 1):
        limits.contributor("groups").bound("groups_in_flight", number)
        assert limits.inputs_in_flight == number
    limits.contributor("other").bound("inputs_in_flight", 0)
    assert (limits.inputs_in_flight, limits.held_by("inputs_in_flight")) == (0, "other")


@pytest.mark.parametrize("changed", ["config", "bound", "none", "end"])
def test_windows_of_a_plan_end_with_the_limit_that_it_was_made_for(changed: str) -> None:
    limits = of(device_limit_bytes=8 * KIB)
    share = limits.contributor("auto")
    share.bound("device_limit_bytes", 6 * KIB, replaces=(CONFIG,))
    share.bound("again_room_bytes", KIB)
    plan = limits.contributor(PLAN, is_plan=True)
    for cap in ("max_restoring_bytes", "kept_limit_bytes", "half_room_bytes"):
        plan.bound(cap, 5 * KIB, replaces=(DEFAULT,))  # type: ignore[arg-type]
    assert limits.max_restoring_bytes == limits.kept_limit_bytes == limits.half_room_bytes == 5 * KIB
    if changed == "config":
        limits.follow(OffloadConfig(device_limit_bytes=4 * KIB))
    elif changed == "bound":
        share.bound("device_limit_bytes", 4 * KIB, replaces=(CONFIG,))
    elif changed == "none":
        share.bound("device_limit_bytes", None)
    else:
        share.end()
    device = {"config": 6 * KIB, "bound": 4 * KIB}.get(changed, 8 * KIB)
    assert limits.device_limit_bytes == device
    assert (limits.max_restoring_bytes, limits.kept_limit_bytes) == (device // 4, device - device // 4)
    assert limits.half_room_bytes is None
    assert limits.again_room_bytes == (None if changed == "end" else KIB)


def test_a_finaliser_that_ends_its_bounds_while_others_are_counted_is_not_lost() -> None:
    """The collector may run it between any two lines: here, while another bound is written."""
    limits = of()
    gone = limits.contributor("gone")
    gone.bound("device_limit_bytes", KIB)

    class Bytes(int):
        def __lt__(self, other: object) -> bool:
            gone.end()
            return int(self) < int(other)  # type: ignore[call-overload, no-any-return]

    limits.contributor("weights").bound("device_limit_bytes", Bytes(2 * KIB))
    assert limits.device_limit_bytes == 2 * KIB


def test_a_closed_manager_takes_the_windows_of_its_plan_along() -> None:
    engine = OffloadEngine(OffloadConfig(device_limit_bytes=8 * KIB), device="sim")
    before = caps_of(engine)
    manager = GroupsManager(engine, print_summary=False)
    manager._planner._look_ahead(512, 256)
    assert caps_of(engine) != before
    manager.close()
    assert caps_of(engine) == before


def test_a_manager_that_is_dropped_without_a_close_takes_its_windows_along() -> None:
    """The next one's would be compared with windows of a plan that nobody follows."""
    engine = OffloadEngine(OffloadConfig(device_limit_bytes=8 * KIB), device="sim")
    before = caps_of(engine)
    manager = GroupsManager(engine, print_summary=False)
    manager._planner._look_ahead(512, 256)
    manager.scopes.leaving._ahead.bound("inputs_ahead_bytes", 100)
    assert (engine.limits.max_restoring_bytes, engine.limits.inputs_ahead_bytes) == (512, 100)
    engine.off_read(manager.tracker.on_read)
    gone = weakref.ref(manager)
    del manager
    gc.collect()
    assert gone() is None
    assert caps_of(engine) == before


def test_many_threads_that_contribute_and_end_leave_what_the_last_ones_left() -> None:
    limits = of(device_limit_bytes=1 << 40)
    kept = [limits.contributor(f"kept {number}") for number in range(4)]

    def work(number: int) -> None:
        for turn in range(300):
            share = limits.contributor("short")
            share.bound("device_limit_bytes", 1 + turn)
            kept[number].bound("device_limit_bytes", 1000 * (number + 1) + turn)
            share.end()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    run_all(threads)
    assert (limits.device_limit_bytes, limits.held_by("device_limit_bytes")) == (1299, "kept 0")


def test_of_two_runtimes_each_is_told_of_saves_until_it_is_gone() -> None:
    engine = OffloadEngine(device="sim")
    before = caps_of(engine)
    first, second = (ActivationRuntime(engine=engine, telemetry_enabled=False) for _ in range(2))
    assert [reference() for reference in engine.limits.watchers] == [first, second]
    assert engine.limits.max_spilling_bytes is None
    first.close()
    assert [reference() for reference in engine.limits.watchers] == [second]
    assert engine.limits.max_spilling_bytes is None, "the second one's mark still bounds what is in flight"
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None
    assert engine.limits.watchers == ()
    assert caps_of(engine) == before


def test_configure_under_a_plan_of_mode_auto_is_not_undone_by_its_end() -> None:
    """The limit from before the plan came back with its end, whatever `configure` had said meanwhile."""
    engine = OffloadEngine(OffloadConfig(device_limit_bytes=8 * KIB), device="sim")
    auto: Contributor = engine.limits.contributor("auto")
    auto.bound("device_limit_bytes", 16 * KIB, replaces=(CONFIG,))
    engine.reconfigure(OffloadConfig(device_limit_bytes=4 * KIB))
    assert engine.limits.device_limit_bytes == 16 * KIB
    auto.end()
    assert engine.limits.device_limit_bytes == engine.config.device_limit_bytes == 4 * KIB


def test_all_watchers_are_asked_and_a_claim_takes_the_place_of_the_last() -> None:
    class Watching:
        def __init__(self, room: int) -> None:
            self.free, self.saves, self.relieved = room, 0, 0

        def on_save(self, block: object, nbytes: int) -> None:
            self.saves += nbytes

        def room(self) -> int:
            return self.free

        def relieve(self) -> None:
            self.relieved += 1

    limits, watching = of(), [Watching(3), Watching(5)]
    assert limits.has_room(1 << 60)
    shares = [limits.contributor("watching", watcher=each) for each in watching]
    limits.saved(None, 7)  # type: ignore[arg-type]
    limits.relieve()
    assert [(each.saves, each.relieved) for each in watching] == [(7, 1)] * 2
    assert [limits.has_room(nbytes) for nbytes in (3, 4)] == [True, False]
    shares[0].end()
    assert limits.has_room(5)
    limits.claim(10)
    limits.claim_more(5)
    limits.claim_more(-40)
    assert limits.claimed_bytes == 0
    limits.claim(4)
    limits.claim(2)
    assert limits.claimed_bytes == 2
