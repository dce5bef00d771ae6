"""The limit that keeps a step within a total of device memory: lowered at once, raised late."""

from __future__ import annotations

from offload.auto.memory import TotalMemory


def measured(total_bytes: int = 1000) -> TotalMemory:
    """After a step that recomputes every block, and one under a plan."""
    total = TotalMemory(total_bytes)
    total.measured(400, 100, 300)  # 300 are no saved tensors
    total.followed(900, 600, 600)
    return total


def test_the_first_plan_is_made_for_less_and_its_first_step_tells_what_the_total_leaves() -> None:
    total = TotalMemory(1000)
    total.measured(400, 100, 300)
    assert total.limit_bytes == 940 - 300
    assert total.followed(930, 600, 600), "30 more are no saved tensors than in the step before"
    assert total.limit_bytes == 985 - 330
    # one that takes less than its limit was held back by something else
    idle = TotalMemory(1000)
    idle.measured(400, 100, 300)
    assert idle.followed(500, 200, 600)
    assert idle.limit_bytes == 985 - 300
    # but what it shows of the rest counts
    idle = TotalMemory(1000)
    idle.measured(400, 100, 300)
    assert idle.followed(910, 550, 600)
    assert idle.limit_bytes == 985 - 360
    # a step that recomputes every block comes again: the next plan is a first one
    idle.measured(400, 100, 300)
    assert idle.limit_bytes == 940 - 300


def test_the_limit_is_what_the_total_leaves_but_a_little_and_falls_by_what_a_step_takes_more() -> None:
    assert measured().limit_bytes == 985 - 300
    total = measured()
    assert not total.followed(990, 690, 690)
    assert total.followed(991, 690, 690)
    assert total.limit_bytes == 690 - 6
    total = measured()
    assert total.followed(1040, 690, 690)
    assert total.limit_bytes == 690 - 55


def test_a_limit_that_held_nothing_back_falls_below_what_steps_took_once_two_have_passed_the_total() -> None:
    """The first may have been the only one of its kind."""
    total = measured()
    assert total.followed(1040, 600, 690)
    assert total.limit_bytes == 690 - 55
    assert total.followed(1040, 600, 635)
    assert total.limit_bytes == 600 - 55
    alone = measured()
    assert alone.followed(1040, 600, 690)
    assert not alone.followed(900, 600, 635)
    assert alone.followed(1040, 600, 635)
    assert alone.limit_bytes == 635 - 55


def test_several_steps_well_below_the_total_raise_it_if_it_held_them_back() -> None:
    total = TotalMemory(1000)
    total.measured(400, 100, 300)
    total.followed(960, 600, 600)  # its peak came in another block: 360 are no saved tensors there
    assert total.limit_bytes == 625
    assert [total.followed(950, 625, 625) for _ in range(5)] == [False] * 4 + [True]
    assert total.limit_bytes == 625 + 35
    # a step that takes less than its limit was held back by something else
    idle = measured()
    assert not any(idle.followed(500, 200, 690) for _ in range(10))
    assert idle.is_settled


def test_a_limit_that_was_lowered_does_not_rise_before_another_plan() -> None:
    """Peaks of steps that are alike differ by a hundredth: it would go down and up for ever, and what stays
    is searched for again each time."""
    total = measured()
    assert total.followed(1000, 690, 690)
    lowered = total.limit_bytes
    assert lowered == 675
    assert not any(total.followed(960, lowered, lowered) for _ in range(7))
    total.restart()
    assert [total.followed(976, lowered, lowered) for _ in range(5)] == [False] * 4 + [True]
    assert total.limit_bytes == 675 + 9


def test_a_limit_does_not_rise_beyond_what_a_step_of_recomputes_left() -> None:
    """Where gradients are made anew in each backward the rest grows towards its end, where such a step has
    its peak. A plan has its own before that, until one keeps more for the end: W1 within 22 GB took at most
    18.5, and 24.4 in one step after the limit had risen to 14.4 (one H200)."""
    total = measured()
    assert [total.followed(800, 685, 685) for _ in range(5)] == [False] * 5
    assert total.limit_bytes == 685
    # nor after the first step under a plan
    low = TotalMemory(1000)
    low.measured(400, 100, 300)
    assert low.followed(700, 600, 600)
    assert low.limit_bytes == 685


def test_a_total_far_below_the_least_that_a_step_takes_leaves_no_limit() -> None:
    total = TotalMemory(390)
    total.measured(400, 100, 300)
    assert total.limit_bytes is None  # 86, where a step of recomputes takes 100
    total = TotalMemory(400)
    total.measured(400, 100, 300)
    # of 60 that are left before a step under a plan
    assert total.limit_bytes == 90
    assert total.followed(385, 85, 90)
    assert total.limit_bytes == 94


def test_it_is_settled_after_steps_that_fit_and_not_after_a_change() -> None:
    total = measured()
    assert not any(total.followed(988, 690, 690) for _ in range(8))
    assert total.is_settled
    assert total.followed(1001, 690, 690)
    assert not total.is_settled


def test_where_lengths_vary_a_limit_rises_late_by_half_and_never_once_a_step_has_passed_the_total() -> None:
    total = TotalMemory(1000)
    total.measured(300, 200, 100)
    total.measured(250, 200, 50, vary=True)
    assert total.rest_bytes == 100
    assert total.limit_bytes == 840
    assert total.followed(820, 800, 800, vary=True), (
        "a short step, so what is no saved tensor stays as it was"
    )
    assert total.limit_bytes == 885
    changes = [total.followed(peak, 885, 885, vary=True) for peak in [800, 905] * 8]
    assert changes == [False] * 15 + [True]
    assert total.limit_bytes == 885 + (985 - 905) // 2
    assert total.followed(1010, 925, 925, vary=True)  # a longer step than any before
    lowered = total.limit_bytes
    assert lowered == 925 - 25
    assert not any(total.followed(890, 900, 900, vary=True) for _ in range(40))
    assert total.limit_bytes == lowered


def test_a_step_far_over_the_total_tells_what_a_step_of_recomputes_takes_now() -> None:
    total = measured(1000)
    assert total.followed(1900, 690, 690)
    assert total.limit_bytes is None
    # 910 too many, so 1,210 are no saved tensors; a step of recomputes has 100 beside them
    assert total.least_peak_bytes == 1210 + 100
