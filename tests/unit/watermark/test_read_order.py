"""Which forwards' saves leave first, and what is left for saves to come: against the definition, and at a
price that does not depend on how many forwards wait."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any

import pytest
import torch

from offload.ids import ForwardId
from offload.watermark.forward import Forward, ReadOrder
from tests.unit.watermark.training import TENSOR, blocks, runtime_of


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_last_leaves_first_and_waits_for_what_comes_and_is_read_later(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    places = [*range(count)] * 2  # the first of each is where a forward begins
    draw.shuffle(places)
    seen = {
        number: (places.index(number), len(places) - 1 - places[::-1].index(number))
        for number in range(count)
    }
    to_come = {number: draw.randint(0, 9) for number in seen}
    order = ReadOrder(seen, to_come.__getitem__)
    begun: dict[int, Forward] = {}
    for number in range(count + 2):  # two more than there were
        begun[number] = forward = Forward(ForwardId(-1, number), [])
        order.enter(forward, number)
        nbytes = draw.randint(0, 9)
        order.saved(forward, nbytes)
        if number in to_come:
            to_come[number] = max(0, to_come[number] - nbytes)
        most = draw.randint(1, 20)
        expected = []
        for other in sorted(begun, key=lambda other: -seen.get(other, (0, -1))[1]):
            read = seen.get(other, (0, -1))[1]
            later = sum(to_come[each] for each, (began, at) in seen.items() if began < read < at)
            expected += [(begun[other], later)] if later < most else []
        assert [*order.leaving(False, most, must=False)] == expected
        assert [each for each, later in order.leaving(False, most, must=True)] == [
            begun[other] for other in sorted(begun, key=lambda other: -seen.get(other, (0, -1))[1])
        ]


def _calls_of_a_step(count: int, in_order: bool) -> int:
    """Python calls of the watermark's files in a step of so many forwards before the first backward, whose
    inputs somebody holds."""
    calls = 0

    def count_calls(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call" and "/offload/watermark/" in frame.f_code.co_filename

    model = blocks(2)
    with runtime_of(high=count * TENSOR, low=count * TENSOR // 2) as runtime:
        for step in range(3):
            held = [torch.randn(128, 64) for _ in range(count)]
            losses = []
            sys.setprofile(count_calls if step == 2 else None)
            for batch in held:
                with runtime.managed_forward():
                    losses.append(model(batch).square().mean())
            for loss in losses if in_order else reversed(losses):
                loss.backward()
            runtime.step_end()
            sys.setprofile(None)
    return calls


@pytest.mark.parametrize("in_order", [False, True])
def test_a_step_of_many_forwards_costs_as_many_calls_as_it_has_saves(in_order: bool) -> None:
    """It cost their square, and its host time their cube: for each piece that left, all forwards were looked
    at for all forwards, and for each reading of the device all that had left."""
    few, many = (_calls_of_a_step(count, in_order) for count in (6, 24))
    assert many < 4.5 * few
