"""The device limit under torch's orders of two stages a rank, with a plan made from times.

In these the backward that comes next may be of a chunk whose forward has not run: what is read after it is
not next. And between the halves of a split backward what was held back stays.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from offload.groups import timed
from offload.groups.seen import StepClock
from offload.policy.actions import Rates
from offload.policy.mixture import MixedPlan, choose_keeps
from tests.inside import impose
from tests.unit.groups.stack import (
    ROWS,
    WIDTH,
    Action,
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    installed,
    one_f_one_b,
)

MICROBATCHES, STEPS = 4, 5
GROUP = 4 * ROWS * WIDTH
"""Bytes that a layer's first linear saves."""
ORDERS = {  # of two ranks: "F12" is the forward of microbatch 2 on the second of this rank's two stages
    "zbv, first rank": (
        "F00 F01 F02 F10 I10 W10 F11 I11 W11 F03 I00 W00 F12 I12 W12 I01 W01 F13 I13 W13 I02 W02 I03 W03"
    ),
    "zbv, last rank": (
        "F00 F10 F01 F11 I10 W10 F02 I00 W00 F12 I11 W11 F03 I01 W01 F13 I12 W12 I02 I13 I03 W02 W13 W03"
    ),
    "dualpipev, first rank": "F00 F01 F02 F10 I10 W10 F11 F03 B11 F12 B00 B12 F13 B01 B13 I02 W02 I03 W03",
    "interleaved1f1b, first rank": "F00 F01 F10 F11 F02 B10 F03 B11 F12 B00 F13 B01 B12 B13 B02 B03",
}


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("zbv, first rank", 1.2),
        ("zbv, last rank", 2.4),
        ("dualpipev, first rank", 2.4),
        ("interleaved1f1b, first rank", 1.2),
    ],
)
def test_limit_holds_in_every_step_of_a_schedule_with_two_stages_a_rank(
    name: str, chunks: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that is read second was taken for the one that is read next: while the forward ran that is read
    before it, a window of it was held back beside all that the plan keeps, and nothing could make room.
    chunks: the limit, in what a chunk saves."""
    order: list[Action] = [(action[0], int(action[1]), int(action[2])) for action in ORDERS[name].split()]
    expected = baseline(build_stages(2), [order] * STEPS)
    with installed(build_manager()) as manager:
        Driver(build_stages(2), announced=True).step(order)
        limit_bytes = int(chunks * manager.stats.spill_bytes / (2 * MICROBATCHES))
    monkeypatch.setattr(StepClock, "end_step", lambda self: dict.fromkeys(order, 1e-3))
    # a short search finds a plan that fits, too
    monkeypatch.setattr(
        timed, "choose_keeps", lambda *given, **named: choose_keeps(*given, **named | {"max_trials": 12})
    )
    with installed(build_manager(device_limit_bytes=limit_bytes)) as manager:
        manager.engine.rates = Rates(d2h_bytes_per_s=2e7, h2d_bytes_per_s=2e7)
        driver = Driver(build_stages(2), announced=True)
        found = []
        for _ in range(STEPS):
            manager.set_order(order)
            found.append(driver.step(order))
            assert manager.stats.device_bytes_peak <= limit_bytes
            assert manager.stats.refused == 0
        assert manager._planner._is_last, "no plan was made from times"
    assert_same(expected, found)


@pytest.mark.req("S2-98", "S3-76")
@pytest.mark.parametrize(
    ("piece_bytes", "chunks", "seed"), [(1024, 0.6, 1), (1024, 0.6, 3), (1024, 1.0, 1), (4096, 0.6, 19)]
)
def test_limit_holds_whatever_the_times_that_a_plan_is_made_from(
    piece_bytes: int, chunks: float, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer's norm saves is less than a piece, and waited for its commit, while the groups inside it
    saved beside all that the plan keeps: nothing could make room, and the step passed the limit. With larger
    pieces nothing could once a piece was settled of which the next backward's window had held back a part.
    chunks: as above. seed: of the times."""
    names, order, steps = ("block", "fc1", "act", "fc2"), one_f_one_b(4, 2), 4
    expected = baseline(build_stages(1, 3, names), [order] * steps)
    with installed(build_manager()) as manager:
        Driver(build_stages(1, 3, names), announced=True).step(order)
        limit_bytes = int(chunks * manager.stats.spill_bytes / 4)
    pick = random.Random(seed)
    seconds = {action: 10 ** pick.uniform(-6, 0) for action in order}
    monkeypatch.setattr(StepClock, "end_step", lambda self: seconds)
    plans: list[MixedPlan] = []

    def choose(*given: Any, **named: Any) -> MixedPlan:
        plans.append(choose_keeps(*given, **named | {"max_trials": 40}))
        return plans[-1]

    monkeypatch.setattr(timed, "choose_keeps", choose)
    with installed(build_manager(piece_bytes=piece_bytes, device_limit_bytes=limit_bytes)) as manager:
        rate = 10 ** pick.uniform(4, 8)
        manager.engine.rates = Rates(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)
        driver = Driver(build_stages(1, 3, names), announced=True)
        found = []
        for _ in range(steps):
            manager.set_order(order)
            found.append(driver.step(order))
            assert manager.stats.device_bytes_peak <= limit_bytes
            assert manager.stats.refused == 0
    assert [plan.fits for plan in plans] == [True]
    assert_same(expected, found)


def test_what_a_save_drops_of_the_next_window_is_fetched_again_and_not_the_rest_of_the_chunk_twice() -> None:
    """The window of the next backward and what its own plan keeps of the last forward were together more than
    the limit: one fetched tensor was dropped for the last save. Nobody fetched it again, its read dropped
    another to make room, and so on, a copy in vain and a wait for each window of the chunk (W2 at 22 GB on
    the simulated device's clock: 6641 ms a step, 6575 without)."""
    order: list[Action] = [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("B", 0, 1)]
    layers, steps = 12, 3
    expected = baseline(build_stages(1, layers, ("fc1",)), [order] * steps)
    with installed(
        build_manager(device_limit_bytes=8 * GROUP, max_restoring_bytes=5 * GROUP, piece_bytes=1)
    ) as manager:
        driver = Driver(build_stages(1, layers, ("fc1",)), announced=True)
        found = []
        for _ in range(steps):
            manager.set_order(order)
            impose(manager.engine, kept_limit_bytes=None)  # of the planner's own plan
            for handler in manager.tracker.handlers.values():
                handler.stays, handler.stays_from = (
                    frozenset(range(6, layers) if handler.id.microbatch == 1 else ()),
                    {},
                )
            found.append(driver.step(order))
            stats = manager.stats
            assert stats.device_bytes_peak <= 8 * GROUP
        assert (stats.saved, stats.spilled) == (2 * layers, 2 * layers - 6)
        assert stats.restored <= stats.spilled
    assert_same(expected, found)


@pytest.mark.parametrize("announced", [True, False])
def test_what_the_saves_of_a_forward_drop_is_not_fetched_again_before_a_backward(announced: bool) -> None:
    """Each save would drop it again. Where chunks are not announced nothing ends a backward but the next one:
    67 tensors came back then."""
    order = one_f_one_b(6, 2)
    stages = build_stages(1, 8, ("fc1",))
    with installed(
        build_manager(device_limit_bytes=6 * GROUP, max_restoring_bytes=6 * GROUP, piece_bytes=1)
    ) as manager:
        driver = Driver(stages, announced=announced)
        for _ in range(3):
            manager.set_order(order)
            driver.step(order)
            assert manager.stats.spilled == 6 * 8
            assert manager.stats.restored == 46  # nine are dropped, and fetched twice


def test_a_weight_half_of_unknown_reads_does_not_fetch_the_next_chunk_again_for_each_of_them() -> None:
    """Each of its reads drops one tensor of the chunk that is read next. Fetched again, that one was dropped
    by the next read: 112 tensors came back instead of 84."""
    order: list[Action] = [("F", 0, 0), ("F", 1, 0), ("I", 1, 0), ("W", 1, 0), ("B", 0, 0)]
    names = ("norm", "fc1", "act", "fc2")
    expected = baseline(build_stages(2, 5, names), [order])
    with installed(
        build_manager(device_limit_bytes=4 * GROUP, max_restoring_bytes=4 * GROUP, piece_bytes=1)
    ) as manager:
        manager.set_order(order)
        found = Driver(build_stages(2, 5, names), announced=True).step(order)
        assert (manager.stats.spilled, manager.stats.restored) == (60, 84)
    assert_same(expected, [found])
