"""Which parameter goes where: by numbers, and the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.optim.placing import Place, choose_offloaded, choose_places


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
