"""Which parameter goes where: by numbers, and the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.optim.places import (
    OffloadRates,
    Place,
    best_cpu_share,
    choose_offloaded,
    choose_places,
    step_seconds,
)


@pytest.mark.req("S3-28")
@pytest.mark.parametrize(
    ("fraction", "expected"),
    [
        (0.0, [False, False, False, False]),
        (0.1, [True, False, False, False]),  # the first reaches 100 of 80
        (0.25, [True, True, False, False]),  # 100 of 200 are not enough
        (0.5, [True, True, False, False]),  # 400 of 400 are
        (0.51, [True, True, True, False]),
        (1.0, [True, True, True, True]),
    ],
)
def test_parameters_leave_in_order_until_the_fraction_is_reached(
    fraction: float, expected: list[bool]
) -> None:
    assert choose_offloaded([100, 300, 100, 300], fraction) == expected


def test_parameters_placed_earlier_count() -> None:
    assert choose_offloaded([100, 100], 0.5, offloaded=0, total=200) == [True, True]
    assert choose_offloaded([100, 100], 0.5, offloaded=200, total=200) == [False, False]


@pytest.mark.req("S3-31")
def test_with_fraction_1_parameters_without_elements_leave_too() -> None:
    assert choose_offloaded([0, 10, 0], 1.0) == [True, True, True]
    assert choose_offloaded([0, 10, 0], 0.0) == [False, False, False]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.floats(0, 1))
def test_the_cpus_share_is_met_to_within_the_largest_parameter_after_each_of_them(
    sizes: list[int], share: float
) -> None:
    on_cpu = before = 0
    for size, place in zip(sizes, choose_places(sizes, share), strict=True):
        before += size
        on_cpu += size if place is Place.CPU else 0
        assert abs(on_cpu - share * before) <= max(sizes)


def test_a_share_of_all_or_nothing_is_met_exactly() -> None:
    assert set(choose_places([3, 5, 8], 1.0)) == {Place.CPU}
    assert set(choose_places([3, 5, 8], 0.0)) == {Place.STREAMED}


FLOAT32 = {"cpu_out_bytes": 4.0, "cpu_in_bytes": 4.0, "streamed_out_bytes": 8.0, "streamed_in_bytes": 8.0}
"""Gradients out and weights in for the CPU's part, moments both ways for the rest."""
HALF_WITH_MASTERS = {
    "cpu_out_bytes": 2.0,
    "cpu_in_bytes": 2.0,
    "streamed_out_bytes": 12.0,
    "streamed_in_bytes": 12.0,
}


def rates(
    cpu: float = 3.3e9,
    *,
    beside: tuple[float, float] = (40e9, 40e9),
    alone: tuple[float, float] = (50e9, 50e9),
) -> OffloadRates:
    """By default what was measured on an H200 (docs/design.md)."""
    return OffloadRates(
        cpu_elements_per_s=cpu,
        d2h_bytes_per_s=beside[0],
        h2d_bytes_per_s=beside[1],
        d2h_alone_bytes_per_s=alone[0],
        h2d_alone_bytes_per_s=alone[1],
    )


def test_lanes_are_slow_only_as_long_as_the_cpu_works() -> None:
    """Half of 100 elements: the CPU takes 10 s; of the 600 bytes 200 go meanwhile and 400 at twice the
    rate."""
    found = step_seconds(rates(cpu=5.0, beside=(20.0, 20.0), alone=(40.0, 40.0)), 0.5, **FLOAT32)
    assert 100 * found == pytest.approx(10 + 400 / 40)
    assert 100 * step_seconds(
        rates(cpu=1.0, beside=(20.0, 20.0), alone=(40.0, 40.0)), 0.5, **FLOAT32
    ) == pytest.approx(50)


def test_cpu_that_works_slows_copies_so_much_that_it_is_hardly_worth_it() -> None:
    """What made a measured share of 0.4 slower than 0: float32 state is 8 bytes, and gradients and weights of
    the CPU's part are 4."""
    share, seconds = best_cpu_share(rates(), **FLOAT32)
    assert 0.3 < share < 0.6
    assert 0.94 < seconds / step_seconds(rates(), 0.0, **FLOAT32) < 1
    assert best_cpu_share(rates(cpu=2.19e9, beside=(49e9, 37.1e9)), **FLOAT32)[0] == 0
    assert best_cpu_share(rates(), worth=0.06, **FLOAT32) == (0.0, step_seconds(rates(), 0.0, **FLOAT32))


def test_cpu_is_worth_its_cores_where_masters_travel_too() -> None:
    share, seconds = best_cpu_share(rates(), worth=0.05, **HALF_WITH_MASTERS)
    assert 0.4 < share < 0.7
    assert seconds < 0.8 * step_seconds(rates(), 0.0, **HALF_WITH_MASTERS)


@given(
    st.floats(1e8, 1e11),
    st.tuples(st.floats(1e9, 1e11), st.floats(1e9, 1e11)),
    st.tuples(st.floats(1, 3), st.floats(1, 3)),
    st.tuples(*[st.floats(1, 20)] * 4),
)
def test_no_other_share_is_faster(
    cpu: float,
    beside: tuple[float, float],
    faster: tuple[float, float],
    nbytes: tuple[float, float, float, float],
) -> None:
    known = rates(cpu, beside=beside, alone=(beside[0] * faster[0], beside[1] * faster[1]))
    sizes = dict(zip(FLOAT32, nbytes, strict=True))
    share, best = best_cpu_share(known, **sizes)
    assert 0 <= share <= 1
    assert step_seconds(known, share, **sizes) == best
    assert all(best <= step_seconds(known, other / 50, **sizes) * (1 + 1e-9) for other in range(51))
