"""The meter and the latch between the two marks."""

from __future__ import annotations

import pytest

from offload.watermark.budget import ActivationBudgetManager, ReadingsMeter, meter_of
from tests.unit.watermark.training import engine_of


def played(readings: list[int], high: int, low: int) -> list[bool]:
    """Whether spilling is on after each reading."""
    answers = iter(readings)
    budget = ActivationBudgetManager(ReadingsMeter(lambda: next(answers)), high, low)
    states = []
    for _ in readings:
        budget.read()
        states.append(budget.spilling)
    return states


@pytest.mark.req("S0-11")
def test_the_latch_turns_on_at_the_high_mark_and_off_below_the_low_one() -> None:
    assert played([7, 9, 10, 12, 8, 6, 5, 6, 9, 4, 6, 10], high=10, low=6) == [
        *(False, False),
        *(True, True, True, True),  # 8 and 6 are not below 6
        *(False, False, False, False, False),  # from 5 on
        True,
    ]


@pytest.mark.req("S0-11", "S0-55")
def test_equal_marks_are_the_plain_rule() -> None:
    assert played([9, 10, 9, 10, 11, 9], high=10, low=10) == [False, True, False, True, True, False]


@pytest.mark.req("S0-11")
def test_the_two_questions_compare_as_the_source_does() -> None:
    answers = iter([5, 6, 9, 10])
    budget = ActivationBudgetManager(ReadingsMeter(lambda: next(answers)), 10, 6)
    found = []
    for _ in range(4):
        budget.read()
        found.append((budget.above_high_watermark(), budget.below_low_watermark()))
    assert found == [(False, True), (False, False), (False, False), (True, False)]


@pytest.mark.req("S0-45")
def test_the_peak_of_a_function_is_its_highest_answer_in_the_step() -> None:
    answers = iter([3, 9, 4, 5])
    meter = ReadingsMeter(lambda: next(answers))
    assert [meter.allocated(), meter.allocated(), meter.allocated()] == [3, 9, 4]
    assert meter.peak() == 9
    meter.start_step()
    assert meter.peak() == 0
    meter.allocated()
    assert meter.peak() == 5


def test_what_is_no_meter_is_refused() -> None:
    with pytest.raises(ValueError, match="memory_allocated is a int, must be a function that returns"):
        meter_of(engine_of(), 5, resets=False)  # type: ignore[arg-type]
