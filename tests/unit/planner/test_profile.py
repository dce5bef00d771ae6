"""The menu of a block, from the numbers of its calls alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from offload.planner.profile import MOST_LEVELS, BlockProfile, SeenCall, TimedCall, settled_seconds

INPUT, GIVEN = 100, 110


def profile_of(calls: list[SeenCall], **changes: Any) -> BlockProfile:
    numbers: dict[str, Any] = {
        "calls": tuple(calls),
        "input_bytes": INPUT,
        "plain_bytes": GIVEN + sum(call.saved_bytes for call in calls),
        "given_bytes": GIVEN,
        "forward_s": sum(call.device_s for call in calls),
        "collectives": frozenset(),
        **changes,
    }
    return BlockProfile.build(**numbers)


def product(number: int, nbytes: int, seconds: float, **changes: Any) -> SeenCall:
    return SeenCall("mm", number, nbytes, seconds, saved_bytes=nbytes, **changes)


def cheap(number: int, nbytes: int, seconds: float, **changes: Any) -> SeenCall:
    return SeenCall("gelu", number, nbytes, seconds, saved_bytes=nbytes, **changes)


BLOCK = [
    cheap(0, 1000, 1.0),
    product(0, 1000, 40.0),
    product(1, 500, 30.0),
    cheap(1, 500, 2.0),
    product(2, 1000, 50.0, again=False),
]


def test_calls_leave_the_keep_set_in_the_order_of_their_seconds_for_each_byte() -> None:
    """Seconds a byte: 0.001, 0.004, 0.04 and 0.06; the last product is after the last save. With all others
    kept the recompute costs no seconds of the device; the plain block still costs the host least."""
    profile = profile_of(BLOCK)
    saved = [level.saved_bytes for level in profile.menu]
    seconds = [level.recompute_s for level in profile.menu]
    assert [level.name for level in profile.menu] == [
        "plain",
        "keep 4 calls",
        "keep 3 calls",
        "keep 2 calls",
        "keep 1 calls",
        "checkpoint",
    ]
    # plain: what is given, and 1000 of the product that no recompute makes
    assert saved == [110 + 4000, 100 + 3000, 100 + 2000, 100 + 1500, 100 + 500, 100]
    assert seconds == [0.0, 0.0, 1.0, 3.0, 43.0, 73.0]
    assert profile.keeps == (
        None,
        {("gelu", 0), ("mm", 0), ("mm", 1), ("gelu", 1)},
        {("mm", 0), ("mm", 1), ("gelu", 1)},
        {("mm", 0), ("mm", 1)},
        {("mm", 1)},
        frozenset(),
    )


def test_a_recompute_makes_again_what_autograd_saves_and_no_kept_call_has() -> None:
    menu = profile_of(BLOCK).menu
    assert [level.made_again_bytes for level in menu] == [0, 1000, 2000, 2500, 3500, 4000]


def test_seconds_that_no_call_shows_are_computed_again() -> None:
    total = sum(call.device_s for call in BLOCK)
    unseen = profile_of(BLOCK, forward_s=total + 7.0)
    # 7 seconds for the 1010 bytes of the first step would be dearer than the next
    assert [level.recompute_s for level in unseen.menu] == [0.0, 8.0, 10.0, 50.0, 80.0]


def test_what_must_be_kept_is_kept_at_every_level_but_the_plain_one() -> None:
    router = SeenCall("topk", 0, 8, 0.01, must=True)
    profile = profile_of([router, *BLOCK])
    assert profile.keeps[0] is None
    assert all(("topk", 0) in keep for keep in profile.keeps[1:] if keep is not None)
    assert profile.menu[-1].saved_bytes == INPUT + 8


def test_what_may_not_be_kept_is_named_and_computed_again() -> None:
    calls = [BLOCK[0], BLOCK[1]._replace(why_not="its output is written by add_"), *BLOCK[2:]]
    profile = profile_of(calls)
    assert profile.why_not == {"call 0 of mm": "its output is written by add_"}
    assert not any(("mm", 0) in keep for keep in profile.keeps if keep)
    assert all(level.recompute_s >= 40.0 for level in profile.menu[1:])


def test_calls_whose_numbers_depend_on_the_data_are_kept_together_and_some_numbers_beyond() -> None:
    experts = [product(number, 100, 4.0, together="mm") for number in (3, 4, 5)]
    profile = profile_of([product(0, 100, 5.0), *experts])
    assert {("mm", 0)} in profile.keeps
    assert {("mm", 0), *(("mm", number) for number in range(3, 12))} in profile.keeps
    assert len(profile.keeps) == 4
    experts[1] = experts[1]._replace(why_not="its output is written by add_")
    assert len(profile_of([product(0, 100, 5.0), *experts]).keeps) == 3


@pytest.mark.parametrize(
    ("changes", "levels"),
    [
        ({"only": "it communicates in place"}, ["plain"]),
        ({"whole": "it is compiled"}, ["plain", "checkpoint"]),
        ({"plain_bytes": INPUT}, ["plain"]),
    ],
)
def test_a_block_may_have_few_levels(changes: dict[str, Any], levels: list[str]) -> None:
    profile = profile_of(BLOCK, **changes)
    assert [level.name for level in profile.menu] == levels
    assert len(profile.keeps) == len(levels)


def test_of_many_levels_those_stay_that_a_mixture_of_others_is_furthest_from() -> None:
    calls = [product(number, 100, 1.0 + number**2) for number in range(40)]
    profile = profile_of(calls)
    menu = profile.menu
    assert len(menu) == len(profile.keeps) == MOST_LEVELS
    assert (menu[0].name, menu[-1].name) == ("plain", "checkpoint")
    assert [100 * len(keep or ()) for keep in profile.keeps[1:]] == [
        level.saved_bytes - INPUT for level in menu[1:]
    ]
    rates = [
        (less.recompute_s - more.recompute_s) / (more.saved_bytes - less.saved_bytes)
        for more, less in pairwise(menu)
    ]
    assert rates == sorted(rates)


def test_other_numbers_of_tokens_scale_bytes_and_seconds_and_attention_by_the_square() -> None:
    calls = [product(0, 100, 4.0), SeenCall("attention", 0, 50, 2.0, squared=True)]
    profile = profile_of(calls, forward_s=7.0)
    double = profile.scaled(2.0)
    assert [call.device_s for call in double.calls] == [8.0, 8.0]
    assert [call.nbytes for call in double.calls] == [200, 100]
    assert (double.input_bytes, double.plain_bytes, double.given_bytes) == (200, 420, 220)
    assert double.forward_s == pytest.approx(8.0 + 8.0 + 2.0)
    more_sequences = profile.scaled(2.0, sequence=1.0)
    assert [call.device_s for call in more_sequences.calls] == [8.0, 4.0]
    assert profile.scaled(1.0) == profile


def test_a_place_in_the_menu_keeps_the_same_calls_at_every_length() -> None:
    """Of a long sequence attention is dearer for its bytes than a product, of a short one cheaper."""
    calls = [product(0, 100, 4.0), SeenCall("attention", 0, 50, 1.5, squared=True), product(1, 20, 1.0)]
    profile = profile_of(calls, forward_s=6.5)
    for factor in (0.25, 0.5, 2.0, 4.0):
        other = profile.scaled(factor)
        assert other.keeps == profile.keeps
        for level, keep in zip(other.menu[1:], other.keeps[1:], strict=True):
            assert keep is not None
            kept = [call for call in other.calls if (call.operator, call.number) in keep]
            assert level.saved_bytes == other.input_bytes + sum(call.nbytes for call in kept)
            again_s = other.forward_s - sum(call.device_s for call in kept)
            assert level.recompute_s == pytest.approx(again_s)


def test_seconds_of_short_calls_follow_from_the_rates_of_long_ones() -> None:
    """Long ones compute 100 flops a second, and another touches 5,000 bytes. A short call takes what its
    work says, within what its pair of events allows; what makes little says little of a rate."""
    calls = [
        TimedCall(10.0, 0.1, 1000, 400, 400),
        TimedCall(8.0, 0.1, 0, 400, 400),
        TimedCall(1.0, 0.9, 50, 10, 10),  # 0.5 by its flops
        TimedCall(1.0, 0.9, 0, 1, 1),  # 0.001 by its bytes; the launch explains 0.9
        TimedCall(1.0, 2.0, 0, 1000, 400),
        TimedCall(3.0, 3.0, 0, 1000, 400),  # as the one before, but for its launch
        TimedCall(1.0, 1.0, 0, 5000, 1250),  # 5 by its bytes; the pair took 1
        TimedCall(1.0, 1.0, 0, 9000, 0),
        TimedCall(1.0, 1.0, 0, 9000, 1000),  # a gather
        TimedCall(1e-6, 1.0, 0, 9000, 9000),  # an empty tensor
    ]
    expected = [10.0, 8.0, 0.5, 0.1, 0.2, 0.2, 1.0, 1.0, 1.0, 1e-6]
    assert settled_seconds(calls) == pytest.approx(expected)
    assert settled_seconds(calls[2:]) == pytest.approx([0.1, *expected[3:]])
    assert settled_seconds(calls[-1:]) == [0.0]


def test_seconds_of_a_forward_without_a_profiler_replace_the_profiles_own_at_the_same_levels() -> None:
    before = profile_of(BLOCK)
    after = before.timed(before.forward_s / 2)
    assert after.forward_s == before.forward_s / 2
    assert after.keeps == before.keeps
    assert [level.recompute_s for level in after.menu] == pytest.approx(
        [level.recompute_s / 2 for level in before.menu]
    )
