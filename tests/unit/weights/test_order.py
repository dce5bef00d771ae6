"""What is used next: by what followed the time before."""

from __future__ import annotations

from itertools import islice

import pytest

from offload.weights.order import Order, Pass, Use


@pytest.fixture
def order() -> Order:
    return Order()


def run(order: Order, blocks: int) -> None:
    for index in range(blocks):
        order.note(Use(index, Pass.FORWARD))
    for index in reversed(range(blocks)):
        order.note(Use(index, Pass.BACKWARD))


def uses(passes: str) -> list[Use]:
    """Of three blocks: F and I forwards, B backwards."""
    orders = {
        "F": (Pass.FORWARD, range(3)),
        "I": (Pass.INFERENCE, range(3)),
        "B": (Pass.BACKWARD, range(2, -1, -1)),
    }
    return [Use(index, orders[each][0]) for each in passes for index in orders[each][1]]


def test_nothing_is_foretold_before_it_was_seen(order: Order) -> None:
    assert [*order.coming()] == []
    order.note(Use(0, Pass.FORWARD))
    assert [*order.coming()] == []


def test_a_step_is_foretold_with_its_backward_and_the_next_forward(order: Order) -> None:
    run(order, 3)
    run(order, 3)
    order.note(Use(0, Pass.FORWARD))
    assert [*islice(order.coming(), 6)] == [1, 2, 2, 1, 0, 0]


def test_the_same_use_goes_on(order: Order) -> None:
    assert order.note(Use(0, Pass.BACKWARD))
    assert not order.note(Use(0, Pass.BACKWARD))
    assert order.note(Use(0, Pass.FORWARD))


def test_an_evaluation_in_between_has_an_order_of_its_own(order: Order) -> None:
    for _ in range(2):
        run(order, 3)
        for _ in range(2):
            for index in range(3):
                order.note(Use(index, Pass.INFERENCE))
    order.note(Use(0, Pass.FORWARD))
    assert [*islice(order.coming(), 5)] == [1, 2, 2, 1, 0]


def test_a_guess_is_no_use(order: Order) -> None:
    """The first one is new, also where the guess ends with it."""
    order.expect(uses("F"))
    assert order.note(Use(2, Pass.FORWARD))
    assert [*order.coming()] == []


def test_a_step_is_foretold_by_the_last_one_where_two_uses_do_not_tell() -> None:
    """The first rank of a pipeline: after a forward comes a forward or a backward."""
    order, step = Order(), uses("FFBFBFBB")
    order.expect(uses("FBF"))
    for number in range(3):
        for use in step:
            assert number == 0 or next(order.coming()) == use.block
            order.note(use)
        order.step_ends()
    order.note(Use(2, Pass.FORWARD))  # another step
    order.note(Use(1, Pass.FORWARD))
    order.note(Use(2, Pass.FORWARD))
    assert [*islice(order.coming(), 2)] == [2, 1]


@pytest.mark.parametrize("kinds", [["FFBB", "FB"], ["FFBB", "FB", "IFBI"]])
def test_kinds_of_steps_in_turn_are_foretold(order: Order, kinds: list[str]) -> None:
    """Such as those of a GAN, whose discriminator sees two batches, then the generator's."""
    for number, kind in enumerate(kinds * 3):
        for use in uses(kind):
            assert number < len(kinds) + 2 or next(order.coming()) == use.block
            order.note(use)
        order.step_ends()
        order.step_ends()


def test_another_order_is_learned_at_its_second_time(order: Order) -> None:
    run(order, 4)
    for _ in range(2):
        for index in (0, 3, 1):
            order.note(Use(index, Pass.FORWARD))
    order.note(Use(0, Pass.FORWARD))
    assert [*islice(order.coming(), 2)] == [3, 1]
