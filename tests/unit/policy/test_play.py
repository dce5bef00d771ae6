"""Items and ops of several kinds in one step: what has its home on the host, what is made, and one link for
both. Times and bytes are derived by hand."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest

from offload.policy.actions import Rates
from offload.policy.play import Item, Need, Op, Player

TEN = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=10)
BLOCK = Item(10, leaves=False, home=True)


def use(block: int, arriving: int = 10) -> Op:
    """A second of a block of weights."""
    return Op(1.0, (Need(block, arriving, 10),), reads_first=True, frees=(block,))


def played(items: Sequence[Item], ops: Sequence[Op], limit: int) -> Player:
    player = Player(items, ops, TEN, limit, inf)
    assert player.play()
    return player


def test_what_has_its_home_on_the_host_goes_without_a_copy_and_what_is_needed_last_first() -> None:
    # a comes 0-1 and b 1-2. At 2 a's room is c's, 2-3, as b's next use is before a's. c's is a's at 5
    player = played([BLOCK] * 3, [use(block) for block in (0, 1, 2, 2, 1, 0)], 20)
    assert player.ends_s == pytest.approx([2, 3, 4, 5, 6, 7])
    assert (player.moved_bytes, player.peaks_bytes) == ([0, 40], [20] * 6)


@pytest.mark.parametrize(
    ("limit", "ends_s", "peaks"), [(15, [1.5, 2.5], [15, 15]), (14, [1.5, 3.0], [10, 10])]
)
def test_what_grows_as_it_is_used_has_room_before_more_comes(
    limit: int, ends_s: list[float], peaks: list[int]
) -> None:
    """Two blocks of 5 bytes on the link and 10 in use: the second one comes beside the first if it can grow
    there."""
    player = played([BLOCK] * 2, [use(block, arriving=5) for block in (0, 1)], limit)
    assert (player.ends_s, player.peaks_bytes) == (pytest.approx(ends_s), peaks)


def test_a_block_of_weights_and_saved_tensors_share_the_link_and_the_room() -> None:
    saved, after = Item(10, leaves=True), 2
    ops = [
        use(2),
        Op(1.0, makes=(0,)),
        Op(1.0, makes=(1,)),
        Op(1.0, (Need(1, 10, after=after),)),
        Op(1.0, (Need(2, 10, 10), Need(0, 10, after=after)), frees=(2,)),
    ]
    # the block comes 0-1. a is made 2-3 and leaves 3-4, b 3-4 and 4-5
    roomy = played([saved, saved, BLOCK], ops, 30)
    assert (roomy.ends_s, roomy.moved_bytes) == (pytest.approx([2, 3, 4, 5, 6]), [20, 10])
    # at 3 b waits until a is out, at 4, and leaves 5-6. Its room is a's at 6, who comes 6-7
    tight = played([saved, saved, BLOCK], ops, 20)
    assert (tight.ends_s, tight.moved_bytes) == (pytest.approx([2, 3, 5, 6, 8]), [20, 20])
    assert max(tight.peaks_bytes) == 20


def test_a_step_that_is_seen_to_take_too_long_ends() -> None:
    player = Player([BLOCK] * 2, [use(0), use(1)], TEN, 20, inf)
    assert not player.play(most_s=2.5)
    assert player.ends_s == pytest.approx([2])
