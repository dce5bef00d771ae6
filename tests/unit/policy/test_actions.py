"""The words of a plan: printed forms, the 1F1B order, and orders that no chunk can have."""

from __future__ import annotations

import pytest

from offload.policy.actions import Action, Rates, lives_of, one_f_one_b, require_sizes
from tests.parsed import parse_action


def order(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


def test_an_action_prints_stage_kind_microbatch_and_parses_back() -> None:
    assert str(Action("F", 3, 1)) == "3F1"
    for action in (Action("F", 12, 7), Action("B", 0, 0), Action("I", 1, 20), Action("W", 2, 3)):
        assert parse_action(str(action)) == action


@pytest.mark.parametrize(
    ("stage", "stages", "microbatches", "expected"),
    [
        (0, 4, 8, "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7"),
        (3, 4, 3, "3F0 3B0 3F1 3B1 3F2 3B2"),
        (0, 8, 2, "0F0 0F1 0B0 0B1"),
        (0, 8, 0, ""),
    ],
)
def test_a_rank_runs_a_forward_for_each_stage_behind_it_and_then_alternates(
    stage: int, stages: int, microbatches: int, expected: str
) -> None:
    assert " ".join(map(str, one_f_one_b(stage, stages, microbatches))) == expected


def test_a_rank_outside_the_pipeline_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"rank 4 is not one of 4 stages; give a rank in 0\.\.3"):
        one_f_one_b(4, 4, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0B0", "action 0, 0B0, reads a chunk before its forward"),
        ("0F0 0F0 0B0", "action 1, 0F0, runs a forward that action 0 has run"),
        ("0F0 0B0 0B0", "action 2, 0B0, reads a chunk that was read before"),
        ("0F0 0I0 0B0", "action 2, 0B0, reads a chunk that was read before"),
        ("0F0 0I0 0I0 0W0", "action 2, 0I0, reads a chunk that was read before"),
        ("0F0 0F1 0B1", r"1 of 2 forwards are never read \(0F0\)"),
        ("0F0 0I0", r"1 of 1 forwards are never read \(0F0\)"),
    ],
)
def test_an_order_that_no_chunk_can_have_names_the_action(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lives_of(order(text))


def test_an_action_without_sizes_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"action 0, 0F0, has no group sizes; sizes has 0 chunks, add \(0, 0\)"
    ):
        require_sizes(order("0F0 0B0"), {})


def test_a_slower_direction_leaves_its_share_to_the_other() -> None:
    undisturbed = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=7)
    assert (undisturbed.together_bytes_per_s, undisturbed.shared) == (17, (10, 7))
    assert Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=10, duplex_bytes_per_s=12).shared == (6, 6)
    assert Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=2, duplex_bytes_per_s=11).shared == (9, 2)
    assert Rates(d2h_bytes_per_s=2, h2d_bytes_per_s=10, duplex_bytes_per_s=11).shared == (2, 9)
    # no slower than the faster alone
    assert Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=4, duplex_bytes_per_s=6).together_bytes_per_s == 10


def test_a_rate_of_zero_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="h2d_bytes_per_s is 0, a rate must be above 0"):
        Rates(d2h_bytes_per_s=1, h2d_bytes_per_s=0)
