"""The allocation curve and its forecast: numbers that can be followed with a pencil."""

from __future__ import annotations

from offload.watermark.forward import CurveRecorder, Curves


def recorded(sizes: list[int], *, base: int = 100, after: list[int] | None = None) -> CurveRecorder:
    """A forward in which only saves make the level rise. after: readings of its backward."""
    recorder = CurveRecorder([])
    level = base
    for nbytes in sizes:
        level += nbytes
        recorder.saved(nbytes, level)
    for reading in after or []:
        recorder.read(reading)
    return recorder


def learned(*recorders: CurveRecorder) -> Curves:
    curves = Curves()
    for recorder in recorders:
        curves.learn([(0, recorder)])
    return curves


def test_a_curve_has_at_each_save_the_highest_level_still_to_come() -> None:
    curve = recorded([10, 20, 5], after=[140, 120]).curve()
    assert curve.levels == (110, 130, 135)
    assert curve.ahead == (140, 140, 140)
    assert recorded([10, 20, 5], after=[90]).curve().ahead == (135, 135, 135)


def test_what_comes_after_the_last_read_of_a_forward_is_none_of_its_curve() -> None:
    levels: list[int] = []
    first = CurveRecorder(levels)
    first.saved(10, 110)
    first.read(105)
    second = CurveRecorder(levels)  # it begins when the first has been read
    second.saved(10, 900)
    assert first.curve().ahead == (110,)


def test_a_forward_that_waits_for_a_later_one_has_that_ones_peak_ahead() -> None:
    levels: list[int] = []
    first, second = CurveRecorder(levels), CurveRecorder(levels)
    first.saved(10, 110)
    second.saved(10, 120)
    second.read(125)
    first.read(112)
    assert first.curve().ahead == (125,)


def test_the_same_shape_has_the_same_rise_ahead_from_another_level() -> None:
    forecast = learned(recorded([10, 20, 5], after=[140])).forecast(0)
    assert forecast.saved(10, 1110) == 1140
    assert forecast.saved(20, 1130) == 1140
    assert forecast.curve is not None


def test_of_two_shapes_that_begin_alike_the_one_that_fits_is_followed() -> None:
    curves = learned(recorded([10, 20]), recorded([10, 50]))
    forecast = curves.forecast(0)
    assert forecast.saved(10, 110) == 160, "the one seen last"
    assert forecast.saved(20, 130) == 130
    assert forecast.curve.sizes == (10, 20)


def test_a_forward_of_another_size_follows_the_curve_by_its_scale() -> None:
    forecast = learned(recorded([10, 20, 30])).forecast(0)
    assert forecast.saved(20, 220) == 220 + 2 * (160 - 110)
    assert forecast.saved(40, 260) == 260 + 2 * (160 - 130)
    assert forecast.curve is None
    assert not forecast.lost


def test_another_shape_is_lost_and_stays_so() -> None:
    forecast = learned(recorded([10, 20, 30])).forecast(0)
    assert forecast.saved(10, 110) == 160
    assert forecast.saved(90, 200) is None
    assert forecast.lost
    assert forecast.saved(30, 230) is None


def test_a_forward_that_saves_more_than_was_seen_is_lost() -> None:
    forecast = learned(recorded([10])).forecast(0)
    assert forecast.saved(10, 110) == 110
    assert forecast.saved(10, 120) is None
    assert forecast.lost


def test_nothing_is_forecast_before_a_step_was_seen() -> None:
    forecast = Curves().forecast(0)
    assert forecast.saved(10, 110) is None
    assert not forecast.lost, "there was no curve that could have fitted"


def test_one_more_forward_than_before_is_taken_for_the_last() -> None:
    curves = Curves()
    curves.learn([(0, recorded([10])), (1, recorded([30]))])
    assert curves.forecast(7).saved(30, 130) == 130
