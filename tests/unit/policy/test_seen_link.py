"""Rates from copies that were timed. Times are derived by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload.policy.actions import Rates
from offload.policy.link_model import D2H, H2D, Link
from offload.policy.seen_link import Copied, seen_rates

THOUGHT = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=20, duplex_bytes_per_s=20)  # 10 each beside each other


def one_after_the_other(nbytes: int, seconds: float, begin_s: float, count: int = 4) -> list[Copied]:
    return [Copied(nbytes, begin_s + at * seconds, begin_s + (at + 1) * seconds) for at in range(count)]


def played(rates: Rates) -> list[list[Copied]]:
    """Ten copies out, one each 2 s, and ten back from 7 s on, one each 1.5 s, on a link of these rates."""
    issues = sorted(
        [(2.0 * at, D2H, 5 + at) for at in range(10)] + [(7 + 1.5 * at, H2D, 12) for at in range(10)]
    )
    link = Link(rates)
    for now_s, lane, nbytes in issues:
        link.issue(lane, (now_s, lane), nbytes, now_s)
    found: list[list[Copied]] = [[], []]
    for now_s, lane, nbytes in issues:
        before_s = found[lane][-1].end_s if found[lane] else 0.0
        found[lane].append(Copied(nbytes, max(now_s, before_s), link.finish(lane, (now_s, lane))))
    return found


@pytest.mark.parametrize("factor", [1.0, 0.5, 1.3])
def test_a_link_that_carries_another_part_of_what_was_thought_is_seen_whatever_ran_beside(
    factor: float,
) -> None:
    truth = Rates(d2h_bytes_per_s=10 * factor, h2d_bytes_per_s=20 * factor, duplex_bytes_per_s=20 * factor)
    found = seen_rates(THOUGHT, *played(truth), least_bytes=1)
    assert found is not None
    assert found.d2h_bytes_per_s == pytest.approx(truth.d2h_bytes_per_s)
    assert found.h2d_bytes_per_s == pytest.approx(truth.h2d_bytes_per_s)
    assert found.duplex_bytes_per_s == pytest.approx(truth.duplex_bytes_per_s)


def test_each_direction_has_its_own_factor() -> None:
    # 10 bytes in 2 s where 1 s was thought; 30 in 1 s where 20 were
    found = seen_rates(THOUGHT, one_after_the_other(10, 2.0, 0.0), one_after_the_other(30, 1.0, 8.0), 1)
    assert found == replace(THOUGHT, d2h_bytes_per_s=5, h2d_bytes_per_s=30, duplex_bytes_per_s=20)


def test_small_copies_and_few_tell_nothing() -> None:
    out, back = one_after_the_other(10, 1.0, 0.0), one_after_the_other(20, 1.0, 4.0)
    assert seen_rates(THOUGHT, out[1:], back, 1) is None
    assert seen_rates(THOUGHT, out, [], 1) is None
    slow = [*out, Copied(1, 8.0, 9.0)]  # waited for its issue
    assert seen_rates(THOUGHT, slow, back, 2) == THOUGHT
