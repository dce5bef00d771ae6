"""Which blocks stay: by calculation, without a device."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.policy.streamed import Plan, Size, best_plans, first_plan, least_window, played_s

BLOCK = 466_000_000  # bytes, of Qwen2.5-7B in bf16
WHOLE = Size(BLOCK, BLOCK)
INT8 = Size(BLOCK, BLOCK // 2)
LINK = 55e9


def passes(blocks: int, forward_s: float, backward_s: float) -> list[tuple[int, float]]:
    return [(index, forward_s) for index in range(blocks)] + [
        (index, backward_s) for index in reversed(range(blocks))
    ]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.floats(0.01, 5), st.floats(0.01, 5)), min_size=2, max_size=7),
    st.floats(0.5, 50),
    st.sampled_from([1, 2, 3]),
)
def test_more_room_is_never_slower(blocks: list[tuple[int, float, float]], rate: float, smaller: int) -> None:
    """smaller: every so manyth block is INT8; 1 for none."""
    sizes = [
        Size(size, size if at % smaller == 0 else (size + 1) // 2) for at, (size, _, _) in enumerate(blocks)
    ]
    uses = [(index, forward) for index, (_, forward, _) in enumerate(blocks)]
    uses += [(index, blocks[index][2]) for index in reversed(range(len(blocks)))]
    limits = range(least_window(sizes), sum(size.used + size.arriving for size in sizes) + 1)
    found = [best_plans(uses, sizes, [limit], rate)[0] for limit in limits]
    for limit, (plan, seconds) in zip(limits, found, strict=True):
        assert sum(sizes[index].used for index in plan.keep) + plan.window_bytes <= limit
        assert seconds == played_s(uses, sizes, plan, rate)
    times = [seconds for _, seconds in found]
    assert all(more <= less * (1 + 1e-9) for less, more in pairwise(times))
    assert best_plans(uses, sizes, list(limits), rate) == found


@pytest.mark.parametrize("kept", [0, 4, 9, 14])
def test_a_plan_is_as_short_as_the_law_says(kept: int) -> None:
    """Of each pass what is longer: its compute, or the copies of the blocks that do not stay."""
    blocks, forward_s, backward_s = 28, 4.2e-3, 8.4e-3
    uses = passes(blocks, forward_s, backward_s)
    ((_, seconds),) = best_plans(uses, [WHOLE] * blocks, [(2 + kept) * BLOCK], LINK)
    copied = (blocks - kept) * BLOCK / LINK
    assert seconds <= max(blocks * forward_s, copied) + max(blocks * backward_s, copied)


def test_int8_halves_the_copies_of_a_pass_and_the_room_of_what_arrives() -> None:
    blocks, sizes = 28, [INT8] * 28
    assert least_window(sizes) == BLOCK + BLOCK // 2
    uses = passes(blocks, 1e-9, 1e-9)
    ((_, seconds),) = best_plans(uses, sizes, [least_window(sizes)], LINK)
    ((_, whole),) = best_plans(uses, [WHOLE] * blocks, [2 * BLOCK], LINK)
    assert seconds == pytest.approx(whole / 2, rel=0.05)


def test_blocks_that_stay_are_spread_and_not_the_first_ones() -> None:
    blocks = 28
    ((plan, _),) = best_plans(passes(blocks, 4.2e-3, 8.4e-3), [WHOLE] * blocks, [13 * BLOCK], LINK)
    first = Plan(frozenset(range(len(plan.keep))), plan.window_bytes)
    uses, sizes = passes(blocks, 4.2e-3, 8.4e-3), [WHOLE] * blocks
    assert played_s(uses, sizes, plan, LINK) < played_s(uses, sizes, first, LINK)


def test_what_computes_long_enough_needs_no_block_to_stay() -> None:
    uses = passes(10, 1.0, 2.0)
    ((plan, seconds),) = best_plans(uses, [WHOLE] * 10, [8 * BLOCK], LINK)
    assert (plan.keep, seconds) == (frozenset(), pytest.approx(30.0))


def test_before_anything_is_measured_blocks_pass_through_all_of_the_limit() -> None:
    assert first_plan([Size(1, 1)] * 9, 5) == Plan(frozenset(), 5)
    assert first_plan([Size(1, 1)] * 9, 9) == Plan(frozenset(range(9)), 0)
