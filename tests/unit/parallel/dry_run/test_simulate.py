"""All ranks of a pipeline on one clock, against times that a pencil gives."""

from __future__ import annotations

import pytest

from offload.policy.actions import Action, one_f_one_b
from parallel.dry_run.simulate import Message, play_pipeline
from tests.parsed import parse_action

F_S, B_S = 1.0, 2.0


def timed(orders: list[list[Action]]) -> list[list[float]]:
    each = {"F": F_S, "B": B_S, "I": 1.0, "W": 1.0}
    return [[each[action.kind] for action in order] for order in orders]


def neighbours(ranks: int, seconds: float) -> dict[tuple[int, int], float]:
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return dict.fromkeys(pairs, seconds)


def read(*texts: str) -> list[list[Action]]:
    return [[parse_action(word) for word in text.split()] for text in texts]


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 3), (2, 4), (4, 8)])
def test_one_forward_one_backward_idles_for_a_forward_and_a_backward_of_each_other_rank(
    ranks: int, microbatches: int
) -> None:
    orders = [list(one_f_one_b(rank, ranks, microbatches)) for rank in range(ranks)]
    times = play_pipeline(orders, timed(orders), send_s=neighbours(ranks, 0.0))
    for own in times:
        assert own.step_s == (microbatches + ranks - 1) * (F_S + B_S)
        assert own.bubble_s == (ranks - 1) * (F_S + B_S)


def test_what_is_sent_arrives_later_and_takes_no_compute() -> None:
    orders = read("0F0 0B0", "1F0 1B0")
    first, second = play_pipeline(orders, timed(orders), send_s=neighbours(2, 0.5))
    assert [played.start_s for played in second.played] == [1.5, 2.5]
    assert [played.start_s for played in first.played] == [0.0, 5.0]
    assert (first.busy_s, first.bubble_s, first.waits_s) == (3.0, 4.0, (0.0, 4.0))


def test_stages_of_one_rank_hand_over_without_sending() -> None:
    """A V of two ranks: stages 1 and 2 are both on the second."""
    orders = read("0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0")
    times = play_pipeline(orders, timed(orders), send_s=neighbours(2, 0.25))
    assert times[1].played[1].start_s == times[1].played[0].end_s
    assert times[0].step_s == 4 * F_S + 4 * B_S + 4 * 0.25


def test_a_weight_half_waits_for_nobody_and_fills_the_bubble() -> None:
    orders = read("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W0 1W1")
    first, second = play_pipeline(orders, timed(orders), send_s=neighbours(2, 0.0))
    assert [(str(played.action), played.start_s) for played in second.played] == [
        ("1F0", 1.0), ("1I0", 2.0), ("1F1", 3.0), ("1I1", 4.0), ("1W0", 5.0), ("1W1", 6.0),
    ]  # fmt: skip
    assert [played.start_s for played in first.played] == [0.0, 1.0, 3.0, 5.0]


def test_a_weight_half_without_an_input_half_waits_as_a_whole_backward() -> None:
    orders = read("0F0 0W0", "1F0 1B0")
    first, _ = play_pipeline(orders, timed(orders), send_s=neighbours(2, 0.0))
    assert first.played[1].start_s == F_S + F_S + B_S


def test_orders_that_wait_for_one_another_are_refused_by_name() -> None:
    orders = read("0F0 0B0 0F1 0B1", "1F1 1F0 1B1 1B0")
    with pytest.raises(
        ValueError, match="2 of 2 ranks wait for ever; rank 0 for what its action 1, 0B0, reads"
    ):
        play_pipeline(orders, timed(orders), send_s=neighbours(2, 0.0))


@pytest.mark.parametrize(("behind", "starts_s"), [(True, 4.25), (False, 3.75)])
def test_a_message_that_is_not_ready_holds_up_those_behind_it(behind: bool, starts_s: float) -> None:
    """Rank 1 has stage 1's forward for rank 0 at 2.25. Rank 0 makes another message until 3.75. If that one
    is to go first, it ends at 4, and rank 0's stage 2 starts when the other has followed."""
    orders = read("0F0 0F1 2F0", "1F0 3F0")
    first, second, back, last = (Message("F", *of) for of in ((0, 0), (0, 1), (1, 0), (2, 0)))
    own: list[dict[int, list[Message]]]
    if behind:
        own = [{1: [first], 2: [second, back], 3: [last]}, {0: [first], 1: [second, back, last]}]
    else:
        own = [{1: [first, back], 2: [second], 3: [last]}, {0: [first], 1: [back, second, last]}]
    times = play_pipeline(orders, [[1.0, 2.75, 1.0], [1.0, 1.0]], send_s=neighbours(2, 0.25), messages=own)
    assert [played.start_s for played in times[0].played] == [0.0, 1.0, starts_s]
    assert [played.start_s for played in times[1].played] == [1.25, starts_s + 1.25]


@pytest.mark.parametrize(("one_line", "starts_s"), [(False, 5.0), (True, 10.0)])
def test_a_message_holds_up_those_of_other_ranks_where_a_rank_has_one_line(
    one_line: bool, starts_s: float
) -> None:
    """Rank 2 has the gradient for rank 1 at 5, behind what rank 0 makes until 10."""
    orders = read("0F0 0F1", "1F0 1B0 1F1", "2F0 2B0")
    first, late, on, back = (Message(*of) for of in (("F", 0, 0), ("F", 0, 1), ("F", 1, 0), ("B", 2, 0)))
    own: list[dict[int, list[Message]]] = [
        {1: [first], 2: [late]},
        {0: [first], 1: [on, late, back]},
        {0: [on], 2: [back]},
    ]
    seconds = [[1.0, 9.0], [1.0, 1.0, 1.0], [1.0, 2.0]]
    times = play_pipeline(orders, seconds, send_s=neighbours(3, 0.0), messages=own, one_line=one_line)
    assert times[1].played[1].start_s == starts_s


def test_messages_that_wait_for_one_another_are_told() -> None:
    orders = read("0F0 0B0", "1F0 1B0")
    there, back = Message("F", 0, 0), Message("B", 1, 0)
    crossed = [{1: [there, back]}, {0: [back, there]}]
    with pytest.raises(ValueError, match="2 of 2 ranks wait for ever"):
        play_pipeline(orders, timed(orders), send_s=neighbours(2, 0.0), messages=crossed)
