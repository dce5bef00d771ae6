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


def test_of_what_has_its_home_on_the_host_that_which_is_needed_last_makes_room() -> None:
    late = Need(2, 10, 10, after=1)
    ops = [use(0), use(1), Op(1.0, (late,), reads_first=True, frees=(2,)), use(1), use(0)]
    # at 3 a and b are there: c takes the room of a, 3-4, which comes again beside b's use, 5-6
    assert played([BLOCK] * 3, ops, 20).ends_s == pytest.approx([2, 3, 5, 6, 7])


def test_nothing_is_dropped_for_what_has_no_room_anyway() -> None:
    # after a, c would need b's room as well; after b it has it, and a is still there
    sizes = (5, 10, 20)
    items = [Item(nbytes, leaves=False, home=True) for nbytes in sizes]
    ops = [
        Op(1.0, (Need(block, sizes[block], sizes[block]),), reads_first=True, frees=(block,))
        for block in (0, 1, 2, 0)
    ]
    assert played(items, ops, 25).moved_bytes == [0, 35]


def test_what_is_made_takes_the_room_of_the_block_that_is_used_last() -> None:
    # both blocks are there at 3. What is made at 4 takes b's room, which comes again after a's use, 6-7
    ops = [Op(1.0), Op(3.0), Op(1.0, makes=(2,)), use(0), use(1)]
    player = played([BLOCK, BLOCK, Item(10, leaves=False)], ops, 20)
    assert (player.ends_s, player.moved_bytes) == (pytest.approx([1, 4, 5, 6, 8]), [0, 30])


def test_what_was_fetched_last_makes_room_first() -> None:
    leaving, staying = Item(10, leaves=True), Item(20, leaves=False)
    ops = [
        Op(1.0, makes=(0,)),
        Op(1.0, makes=(1,)),
        Op(1.0, makes=(2,)),
        Op(1.0, (Need(2, 20, after=2),)),
        Op(3.0),
        Op(1.0, makes=(3,)),
        Op(1.0, (Need(0, 10, after=3),)),
        Op(1.0, (Need(1, 10, after=3),)),
    ]
    # a is out at 2 and b at 3, where c has their room, 3-4. Both come back 5-7. At 8 d takes b's room, so b
    # comes again after a's read, 10-11
    player = played([leaving, leaving, staying, Item(10, leaves=False)], ops, 20)
    assert (player.ends_s, player.moved_bytes) == (pytest.approx([1, 2, 4, 5, 8, 9, 10, 12]), [20, 30])


def test_of_what_is_wanted_on_its_way_out_the_first_that_was_makes_room_first() -> None:
    leaving, staying = Item(10, leaves=True), Item(10, leaves=False)
    ops = [
        Op(1.0, makes=(0,)),
        Op(1.0, makes=(1,)),
        Op(1.0, makes=(2,)),
        Op(1.0, (Need(1, 10, after=1),)),
        Op(1.0, (Need(0, 10, after=1),)),
    ]
    # b came into the window first. So c waits until b is out, at 3; then b has a's room, 4-5, and a comes 6-7
    player = played([leaving, leaving, staying], ops, 20)
    assert (player.ends_s, player.moved_bytes) == (pytest.approx([1, 2, 4, 6, 8]), [20, 20])


def test_what_a_recompute_has_read_is_its_own_until_its_claim_ends() -> None:
    ops = [
        Op(1.0, makes=(0,)),
        Op(1.0, makes=(1,)),
        Op(1.0, (Need(1, 10, after=1),), claims=5, reads_first=True),
        Op(0.0, claims=0),
        Op(1.0, (Need(0, 15, after=1),)),
    ]
    # a is out at 2.5, where b has its room. With b read, 15 are claimed until 4.5; then a comes, until 6
    player = played([Item(15, leaves=True), Item(10, leaves=False)], ops, 20)
    assert player.ends_s == pytest.approx([1, 3.5, 4.5, 4.5, 7])


def test_a_step_that_is_seen_to_take_too_long_ends() -> None:
    player = Player([BLOCK] * 2, [use(0), use(1)], TEN, 20, inf)
    assert not player.play(most_s=2.5)
    assert player.ends_s == pytest.approx([2])
