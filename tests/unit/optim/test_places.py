"""Which parameter goes where: by numbers, and the same every time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.optim.places import OffloadRates, Place, best_cpu_share, choose_offloaded, choose_places


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
def test_parameters_leave_in_order_until_the_fraction_is_reached(fraction: float, expected: list[bool]) -> None:
    assert choose_offloaded([100, 300, 100, 300], fraction) == expected


def test_parameters_placed_earlier_count() -> None:
    assert choose_offloaded([100, 100], 0.5, offloaded=0, total=200) == [True, True]
    assert choose_offloaded([100, 100], 0.5, offloaded=200, total=200) == [False, False]


@pytest.mark.req("S3-31")
def test_with_fraction_1_parameters_without_elements_leave_too() -> None:
    assert choose_offloaded([0, 10, 0], 1.0) == [True, True, True]
    assert choose_offloaded([0, 10, 0], 0.0) == [False, False, False]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.floats(0, 1))
def test_the_cpus_share_is_met_to_within_the_largest_parameter_after_each_of_them(sizes: list[int], share: float) -> None:
    on_cpu = before = 0
    for size, place in zip(sizes, choose_places(sizes, share), strict=True):
        before += size
        on_cpu += size if place is Place.CPU else 0
        assert abs(on_cpu - share * before) <= max(sizes)


def test_a_share_of_all_or_nothing_is_met_exactly() -> None:
    assert set(choose_places([3, 5, 8], 1.0)) == {Place.CPU}
    assert set(choose_places([3, 5, 8], 0.0)) == {Place.STREAMED}


def test_the_best_share_makes_cpu_and_link_end_together() -> None:
    """float32 weights on an H200: 4 bytes out and in for the CPU's part, 8 of moments for the rest, 45 GB/s each way, CPU 3.3 G/s."""
    rates = OffloadRates(cpu_elements_per_s=3.3e9, d2h_bytes_per_s=45e9, h2d_bytes_per_s=45e9)
    share, seconds = best_cpu_share(rates, cpu_out_bytes=4, cpu_in_bytes=4, streamed_out_bytes=8, streamed_in_bytes=8)
    assert share / 3.3e9 == pytest.approx((4 * share + 8 * (1 - share)) / 45e9)
    assert seconds == pytest.approx(share / 3.3e9)


@given(st.floats(1e8, 1e11), st.floats(1e9, 1e11), st.floats(1e9, 1e11), st.tuples(*[st.floats(1, 20)] * 4))
def test_no_other_share_is_faster(cpu: float, d2h: float, h2d: float, nbytes: tuple[float, ...]) -> None:
    def seconds(share: float) -> float:
        out, back, out_streamed, back_streamed = nbytes
        lanes = ((share * out + (1 - share) * out_streamed) / d2h, (share * back + (1 - share) * back_streamed) / h2d)
        return max(share / cpu, *lanes)

    rates = OffloadRates(cpu_elements_per_s=cpu, d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d)
    share, best = best_cpu_share(
        rates, cpu_out_bytes=nbytes[0], cpu_in_bytes=nbytes[1], streamed_out_bytes=nbytes[2], streamed_in_bytes=nbytes[3]
    )
    assert 0 <= share <= 1
    assert seconds(share) == pytest.approx(best)
    assert all(best <= seconds(other / 50) * (1 + 1e-9) for other in range(51))
