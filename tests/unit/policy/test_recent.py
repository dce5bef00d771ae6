"""How long a peak is remembered."""

from __future__ import annotations

import pytest

from offload.policy.recent import RecentPeak

LEAST = 5


@pytest.mark.parametrize("quiet", range(2 * LEAST))
def test_a_peak_lasts_so_many_values_at_least_and_not_twice_as_many(quiet: int) -> None:
    peak = RecentPeak(LEAST)
    for _ in range(quiet):
        peak.add(3)
    peak.add(10)
    lasted = 0
    while not peak.add(3):
        assert peak.value == 10
        lasted += 1
    assert peak.value == 3
    assert LEAST <= lasted < 2 * LEAST


@pytest.mark.parametrize("period", range(1, LEAST + 1))
def test_a_peak_that_comes_again_in_time_never_falls(period: int) -> None:
    peak = RecentPeak(LEAST)
    fallen = [peak.add(10 if number % period == 0 else 3) for number in range(20 * LEAST)]
    assert not any(fallen)
    assert peak.value == 10


def test_it_falls_to_the_largest_value_since_and_says_so_once() -> None:
    peak = RecentPeak(2)
    assert peak.value == 0
    values = [9, 1, 4, 2, 3, 2]
    assert [peak.add(value) for value in values] == [False, False, False, False, True, False]
    assert peak.value == 4


def test_it_is_as_large_after_ten_thousand_values_as_before() -> None:
    peak = RecentPeak(1000)
    before = {name: type(value) for name, value in vars(peak).items()}
    for number in range(10_000):
        peak.add(number % 7)
    assert {name: type(value) for name, value in vars(peak).items()} == before
    assert all(isinstance(value, int) for value in vars(peak).values())
