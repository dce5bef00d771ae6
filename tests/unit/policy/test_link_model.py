"""The link on a clock: queues in order, and shared while both directions are busy. Times are derived by
hand."""

from __future__ import annotations

import pytest

from offload.policy.actions import Rates
from offload.policy.play import D2H, H2D, Link

TEN_EACH_TEN_TOGETHER = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=10, duplex_bytes_per_s=10)


def test_copies_of_one_direction_run_in_order_at_its_rate() -> None:
    link = Link(TEN_EACH_TEN_TOGETHER)
    link.issue(D2H, "a", 20, 1.0)
    link.issue(D2H, "b", 10, 1.5)
    assert link.finish(D2H, "b") == pytest.approx(4.0)  # 1 + 2 + 1
    assert link.finish(D2H, "a") == pytest.approx(3.0)


def test_a_copy_starts_when_it_is_issued_not_when_the_lane_fell_idle() -> None:
    link = Link(TEN_EACH_TEN_TOGETHER)
    link.issue(D2H, "a", 10, 0.0)
    link.issue(D2H, "b", 10, 5.0)
    assert link.finish(D2H, "b") == pytest.approx(6.0)


def test_two_directions_slow_each_other_only_while_both_are_busy() -> None:
    link = Link(TEN_EACH_TEN_TOGETHER)
    link.issue(D2H, "out", 100, 0.0)
    # 50 of out are left; at 5 each in ends at 10, when 25 of out are left for 2.5 s alone
    link.issue(H2D, "in", 25, 5.0)
    assert link.finish(H2D, "in") == pytest.approx(10.0)
    assert link.finish(D2H, "out") == pytest.approx(12.5)


def test_a_copy_that_was_never_issued_is_named() -> None:
    with pytest.raises(KeyError, match="no copy of x was issued in lane 1"):
        Link(TEN_EACH_TEN_TOGETHER).finish(H2D, "x")


def test_a_second_copy_of_a_key_ends_anew() -> None:
    link = Link(TEN_EACH_TEN_TOGETHER)
    link.issue(H2D, "a", 10, 0.0)
    assert link.finish(H2D, "a") == pytest.approx(1.0)
    link.issue(H2D, "a", 10, 4.0)
    assert link.finish(H2D, "a") == pytest.approx(5.0)
