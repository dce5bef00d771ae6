"""The simulated step, with times and bytes derived by hand, and its laws: never under the bound, never over
the limit."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.policy.actions import Action, ChunkKey, GroupKey, GroupSize, Keeps, Rates
from offload.policy.keeps import kept_peak_bytes, limit_keeps
from offload.policy.simulate import Simulation, simulate
from tests.parsed import parse_action

TEN = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=10)
THREE_GROUPS = {(0, 0): [GroupSize(name, 10) for name in "abc"]}


def order(text: str) -> list[Action]:
    return [parse_action(word) for word in text.split()]


def played(
    actions: str | list[Action],
    sizes: Any,
    seconds: list[float],
    limit: int,
    *,
    keeps: Keeps = frozenset(),
    window: int = 0,
    half_room: int = 0,
    rates: Rates = TEN,
) -> Simulation:
    """The simulated step; actions: as a list, or as their words. window: room of what comes back ahead."""
    return simulate(
        order(actions) if isinstance(actions, str) else actions,
        sizes,
        seconds,
        rates,
        limit_bytes=limit,
        keeps=keeps,
        restoring_room_bytes=window,
        half_room_bytes=half_room,
    )


def one_pass(limit: int, window: int, kept: set[int] | None = None, text: str = "0F0 0B0") -> Simulation:
    """One chunk of three groups of 10 bytes, a second of compute a group, a second a copy."""
    actions = order(text)
    return played(
        actions,
        THREE_GROUPS,
        [3.0] * len(actions),
        limit,
        keeps=frozenset(GroupKey((0, 0), index) for index in kept or ()),
        window=window,
    )


def test_a_step_that_keeps_everything_takes_its_compute() -> None:
    result = one_pass(30, 30, {0, 1, 2})
    assert (result.step_s, result.peak_bytes, result.moved_bytes, result.stall_s) == (6.0, 30, 0, 0.0)


def test_a_group_still_on_its_way_out_is_read_where_it_is() -> None:
    # all three leave, nothing needs their room: nothing comes back
    result = one_pass(30, 0)
    assert (result.step_s, result.moved_bytes, result.restored_bytes, result.peak_bytes) == (6.0, 30, 0, 30)


def test_without_room_compute_waits_for_the_oldest_spill_and_without_window_for_each_restore() -> None:
    # a 0-1, out 1-2; b waits for 2, 2-3, out 3-4; c waits for 4, 4-5, out 5-6. Backward: c is still here,
    # 5-6; b waits 6-7 for its restore, 7-8; a waits 8-9, 9-10
    result = one_pass(10, 0)
    assert result.spill_stall_s == pytest.approx(2.0)
    assert result.restore_stall_s == pytest.approx(2.0)
    assert result.step_s == pytest.approx(10.0)
    assert (result.peak_bytes, result.moved_bytes, result.restored_bytes) == (10, 30, 20)


def test_a_window_of_one_group_more_hides_the_restore() -> None:
    # c stays. a out 1-2, b out 2-3; c takes a's room at 2 without a wait; c is read 3-4, b where it is 4-5, a
    # comes back
    on_demand = one_pass(20, 0, {2})
    # a: issued at 5, read at 6
    assert [on_demand.step_s, on_demand.restore_stall_s] == pytest.approx([7.0, 1.0])
    ahead = one_pass(20, 20, {2})
    # a: issued at 4, when c's room is free
    assert [ahead.step_s, ahead.restore_stall_s] == pytest.approx([6.0, 0.0])


def test_a_whole_window_on_the_device_fetches_nothing_early() -> None:
    """The first chunk's kept end is the window. Counting restored bytes only, the engine fetched chunk 0 back
    while the forwards after it still needed the room, and W2 at 50 GB cost 1.14 of the step without offload
    where it now costs 1.10."""
    sizes = {(0, m): [GroupSize(name, 10) for name in "ab"] for m in range(2)}
    actions = order("0F0 0F1 0B0 0B1")
    kept = frozenset({GroupKey((0, 0), 1)})

    def play(window: int) -> Simulation:
        return played(actions, sizes, [2.0] * 4, 30, keeps=kept, window=window)

    # F0 0-2 keeps b, a is out at 2. F1: its a 2-3, out 3-4; its b takes the third room 3-4
    assert play(10).spill_stall_s == 0.0
    # with a window of both groups a is needed at once: it stays, and F1's b waits for F1's a to be out
    assert play(20).spill_stall_s == pytest.approx(1.0)


def test_a_chunk_is_fetched_back_only_once_its_forward_is_complete() -> None:
    # if c's backward were prefetched inside the forward, a (away since 2) would be copied back in vain
    result = one_pass(20, 30)
    assert result.restored_bytes == 10  # a, once


def test_between_the_halves_of_a_split_backward_what_came_back_is_dropped_and_fetched_again() -> None:
    sizes = {(0, 0): [GroupSize(name, 10) for name in "ab"]}
    actions = order("0F0 0I0 0W0")
    result = played(actions, sizes, [2.0] * 3, 10)
    # F: a 0-1, b waits for 2, 2-3. I: b where it is 3-4, a waits for b out at 4 and its restore at 5, 5-6,
    # dropped. W in forward order: a restored 6-7, 7-8, b restored 8-9, 9-10
    assert result.step_s == pytest.approx(10.0)
    assert (result.moved_bytes, result.restored_bytes, result.peak_bytes) == (20, 30, 10)
    assert [result.spill_stall_s, result.restore_stall_s] == pytest.approx([1.0, 3.0])


def test_a_weight_half_without_an_input_half_is_the_whole_reverse_read() -> None:
    assert one_pass(10, 10, text="0F0 0W0") == one_pass(10, 10, text="0F0 0B0")


def test_a_group_larger_than_the_limit_shows_in_the_peak() -> None:
    result = one_pass(5, 0)
    assert result.peak_bytes == 10


def test_compute_is_spread_over_groups_by_their_bytes() -> None:
    sizes = {(0, 0): [GroupSize("big", 30), GroupSize("small", 10)], (0, 1): [GroupSize("next", 10)]}
    result = played("0F0 0F1 0B1 0B0", sizes, [4.0] * 4, 40)
    # big is made in 3 of the 4 s and is out at 6; the next forward needs its room at 4. Made in half of them
    # it would be out at 5
    assert result.spill_stall_s == pytest.approx(2.0)


@pytest.mark.parametrize(("region", "step_s"), [(0, 6.0), (1, 7.0)])
def test_a_recompute_waits_for_all_that_its_region_kept_before_it_computes(
    region: int, step_s: float
) -> None:
    sizes = {(0, 0): [GroupSize("a", 10, region), GroupSize("b", 10, region)], (0, 1): [GroupSize("x", 10)]}
    kept = frozenset({GroupKey((0, 1), 0)})
    result = played("0F0 0F1 0B1 0B0", sizes, [2.0, 1.0, 1.0, 2.0], 20, keeps=kept, window=20)
    # a 0-1, out 1-2; b 1-2; x takes a's room, 2-3, and is read 3-4. At 4 b is still here and a is fetched,
    # 4-5: beside the compute of b, or, if the recompute reads both before it computes, with nothing beside it
    assert result.step_s == pytest.approx(step_s)
    assert result.restore_stall_s == pytest.approx(step_s - 6.0)


def test_what_a_recompute_has_read_is_no_longer_counted_while_it_computes() -> None:
    kept = frozenset({GroupKey((0, 0), 1)})

    def play(region: int) -> Simulation:
        sizes = {(0, 0): [GroupSize("a", 10), GroupSize("b", 10, region)]}
        return played("0F0 0B0", sizes, [2.0, 2.0], 10, keeps=kept, window=20)

    # a 0-1, out 1-2; b takes its room, 2-3, and is read at 3. From then on the graph holds b, and a is
    # fetched while b computes, 3-4
    assert [play(1).step_s, play(1).restore_stall_s] == pytest.approx([5.0, 0.0])
    # a group that its own backward reads is counted until that has ended
    assert [play(0).step_s, play(0).restore_stall_s] == pytest.approx([6.0, 1.0])


def test_actions_without_bytes_take_their_time_and_no_lane() -> None:
    sizes: dict[ChunkKey, list[GroupSize]] = {
        (0, 0): [GroupSize("none", 0), GroupSize("none", 0)],
        (0, 1): [],
    }
    result = played("0F0 0F1 0B1 0B0", sizes, [4.0] * 4, 0)
    assert (result.step_s, result.moved_bytes, result.restored_bytes) == (pytest.approx(16.0), 0, 0)


def test_times_and_actions_must_pair() -> None:
    with pytest.raises(ValueError, match="1 actions and 0 compute times"):
        simulate(
            [Action("F", 0, 0)],
            {(0, 0): []},
            [],
            TEN,
            limit_bytes=0,
            keeps=frozenset(),
            restoring_room_bytes=0,
        )


SPLIT = {(1, 0): [GroupSize(name, 10, half_bytes=half) for name, half in (("a", 10), ("b", 0), ("c", 4))]}


@pytest.mark.parametrize(
    ("half_room", "passed", "restored"),
    [
        # all three leave under a limit of one. I: c is still here, b and a come back. W: all of a, 4 of c
        (0, 0, 20 + 14),
        (9, 0, 20 + 14),
        (10, 0, 20 + 4),  # a stays from the I to the W
        (14, 0, 20 + 4),  # c never came back in the I: it made room for b
        # so much of a the I does not read
        (0, 6, 14 + 14),
        (0, 10, 10 + 14),
        (10, 6, 20 + 4),
        (10, 10, 20 + 4),
    ],
)
def test_a_weight_half_fetches_what_it_reads_and_was_not_left_there(
    half_room: int, passed: int, restored: int
) -> None:
    a, *others = SPLIT[1, 0]
    result = played(
        "1F0 1I0 1W0",
        {(1, 0): [a._replace(passed_bytes=passed), *others]},
        [3.0, 3.0, 1.4],
        10,
        half_room=half_room,
    )
    assert (result.moved_bytes, result.restored_bytes, result.peak_bytes) == (30, restored, 10)


def test_the_window_reaches_past_what_the_input_half_leaves_for_its_weight_half() -> None:
    # c makes b and a leave. a comes back while the I computes z. From then on all of the W is there, so b is
    # fetched while the I computes a, and not at its end, a second later
    sizes = {
        (1, 0): [GroupSize("a", 10), GroupSize("z", 10, half_bytes=0)],
        (2, 0): [GroupSize("b", 10)],
        (3, 0): [GroupSize("c", 30)],
    }

    def play(half_room: int) -> Simulation:
        return played(
            "2F0 1F0 3F0 3B0 1I0 1W0 2B0",
            sizes,
            [1.0, 2.0, 3.0, 3.0, 2.0, 0.1, 1.0],
            40,
            keeps=frozenset({GroupKey((3, 0), 0)}),
            window=40,
            half_room=half_room,
        )

    assert (play(10).restored_bytes, play(10).restore_stall_s) == (20, pytest.approx(0.0))
    # a again at the end of the I, then b
    assert (play(0).restored_bytes, play(0).restore_stall_s) == (30, pytest.approx(1.9))


def test_what_never_left_is_whole_until_the_weight_half_has_ended() -> None:
    # 10 and 10 of chunk 0 stay, of which its W reads none; the forward in between makes 10
    sizes = {(0, 0): [GroupSize("a", 10, half_bytes=0)] * 2, (0, 1): [GroupSize("b", 10)]}
    keeps = frozenset(GroupKey((0, 0), at) for at in range(2)) | {GroupKey((0, 1), 0)}
    actions = order("0F0 0I0 0F1 0W0 0B1")
    result = played(actions, sizes, [1.0] * 5, 30, keeps=keeps)
    assert (result.peak_bytes, result.step_s) == (30, pytest.approx(5.0))
    assert kept_peak_bytes(actions, sizes, keeps) == 30


@pytest.mark.parametrize(
    ("left", "again_s", "peaks"), [(0, 2.0, (2, 14, 4, 16, 16, 14)), (5, 1.0, (2, 14, 9, 21, 14, 7))]
)
def test_what_an_input_half_computes_again_may_be_left_for_its_weight_half(
    left: int, again_s: float, peaks: tuple[int, ...]
) -> None:
    """Two chunks of an input of 2 bytes, of which a second and 12 bytes are computed again, in the I and in
    the W; or in the I, which leaves 5 bytes of them for the W."""
    group = GroupSize("x", 2, 1, again_s=1.0, again_bytes=12, half_bytes=0 if left else 2, left_bytes=left)
    sizes = {(0, m): [group] for m in range(2)}
    keeps = frozenset(GroupKey((0, m), 0) for m in range(2))
    actions = order("0F0 0I0 0F1 0I1 0W0 0W1")
    result = played(actions, sizes, [1.0] * 6, 99, keeps=keeps)
    assert (result.recompute_s, result.step_s) == (2 * again_s, 6.0 + 2 * again_s)
    # each input stays until its W: the graph holds it
    assert result.peaks_bytes == peaks


def test_what_an_input_half_reads_last_on_its_way_out_makes_room() -> None:
    sizes = {(0, 0): [GroupSize("a", 10, half_bytes=0)], (0, 1): [GroupSize("b", 10)]}
    actions = order("0F0 0I0 0F1 0W0 0B1")
    result = played(actions, sizes, [1.0] * 5, 10, window=99)
    assert (result.peak_bytes, result.step_s) == (10, pytest.approx(5.0))


def test_between_two_recomputes_of_an_input_half_nothing_is_fetched_into_their_room() -> None:
    """x is read next, and has room once both claims are over: fetched between them it would make room for the
    second one, and come twice."""
    group = GroupSize("g", 2, again_bytes=12, half_bytes=0, left_bytes=1)
    sizes = {(0, 0): [group._replace(region=at) for at in (1, 2)], (1, 0): [GroupSize("x", 10)]}
    result = played(
        "1F0 0F0 0I0 0W0 1B0",
        sizes,
        [1.0] * 5,
        20,
        keeps=frozenset(GroupKey((0, 0), at) for at in range(2)),
        window=12,
    )
    assert (result.restored_bytes, result.peak_bytes) == (10, 17)


@st.composite
def some_step(
    draw: st.DrawFn, kinds: str = "B"
) -> tuple[list[Action], dict[ChunkKey, list[GroupSize]], list[float], Rates]:
    """Any order of forwards and backwards, last in first out or not, with chunks of any number of groups."""
    nbytes = draw(st.lists(st.lists(st.integers(0, 20), max_size=4), min_size=1, max_size=4))
    sizes = {
        (0, m): [GroupSize("g", n, half_bytes=draw(st.none() | st.integers(0, n))) for n in found]
        for m, found in enumerate(nbytes)
    }
    waiting = [[Action("F", 0, m), Action("B", 0, m)] for m in range(len(nbytes))]
    for m, todo in enumerate(waiting):
        if draw(st.sampled_from(kinds)) == "W":
            todo[1:] = [Action("I", 0, m), Action("W", 0, m)]
    actions = []
    while waiting:
        todo = draw(st.sampled_from(waiting))
        actions.append(todo.pop(0))
        waiting = [left for left in waiting if left]
    seconds = draw(st.lists(st.floats(0.0, 3.0), min_size=len(actions), max_size=len(actions)))
    rate = st.floats(1.0, 40.0)
    rates = Rates(
        d2h_bytes_per_s=draw(rate), h2d_bytes_per_s=draw(rate), duplex_bytes_per_s=draw(st.none() | rate)
    )
    return actions, sizes, seconds, rates


Step = tuple[list[Action], dict[ChunkKey, list[GroupSize]], list[float], Rates]


def some_keeps(draw: st.DataObject, sizes: dict[ChunkKey, list[GroupSize]]) -> Keeps:
    groups = [GroupKey(chunk, index) for chunk, found in sizes.items() for index in range(len(found))]
    return frozenset(draw.draw(st.sets(st.sampled_from(groups)))) if groups else frozenset()


@settings(max_examples=80)
@given(some_step("BW"), st.integers(0, 100), st.integers(0, 60), st.integers(0, 60), st.data())
def test_no_simulated_step_is_under_the_bound(
    step: Step, limit: int, window: int, half_room: int, data: st.DataObject
) -> None:
    pytest.importorskip("scipy", reason="the bound needs scipy, an extra")
    from bench.bound import least_step

    actions, sizes, seconds, rates = step
    result = played(
        actions,
        sizes,
        seconds,
        limit,
        keeps=some_keeps(data, sizes),
        window=window,
        half_room=half_room,
        rates=rates,
    )
    bound = least_step(actions, sizes, seconds, rates, max(limit, result.peak_bytes), slices=2)
    assert result.step_s >= bound.step_s * (1 - 1e-5) - 1e-6
    assert result.step_s == pytest.approx(result.compute_s + result.stall_s)


@settings(max_examples=100)
@given(some_step(), st.integers(0, 40), st.integers(0, 60), st.data())
def test_saved_bytes_stay_within_a_limit_that_holds_kept_groups_the_window_and_one_group(
    step: Step, window: int, slack: int, data: st.DataObject
) -> None:
    actions, sizes, seconds, rates = step
    keeps = some_keeps(data, sizes)
    biggest = max((group.nbytes for groups in sizes.values() for group in groups), default=0)
    limit = kept_peak_bytes(actions, sizes, keeps) + window + biggest + slack
    result = played(actions, sizes, seconds, limit, keeps=keeps, window=window, rates=rates)
    assert result.peak_bytes <= limit
    assert result.restored_bytes <= result.moved_bytes  # nothing is fetched twice without a split backward


@settings(max_examples=60)
@given(some_step("BW"), st.integers(0, 150))
def test_keeping_all_that_fits_moves_nothing_more_than_the_rest(step: Step, limit: int) -> None:
    actions, sizes, seconds, rates = step
    keeps = limit_keeps(actions, sizes, limit, 0, 0)
    result = played(actions, sizes, seconds, limit, keeps=keeps, rates=rates)
    leaving = sum(
        g.nbytes for c, groups in sizes.items() for i, g in enumerate(groups) if GroupKey(c, i) not in keeps
    )
    assert result.moved_bytes == leaving
    if leaving == 0:
        assert result.step_s == pytest.approx(sum(seconds))


def test_compute_goes_by_the_groups_weights() -> None:
    """One group is weightless: its spill starts at once, and is out when the other's compute ends."""
    sizes = {(0, 0): [GroupSize("a", 10), GroupSize("b", 10, weight=1.0)]}
    result = played("0F0 0B0", sizes, [3.0, 3.0], 10, keeps=frozenset({GroupKey((0, 0), 1)}))
    # a 0-0, out 0-1; b waits for it, 1-4. Backward: b 4-7; a waits 7-8 for its restore
    assert (result.spill_stall_s, result.restore_stall_s) == (pytest.approx(1.0), pytest.approx(1.0))
    assert result.step_s == pytest.approx(8.0)


def test_a_recompute_takes_its_seconds_where_its_region_is_read_and_room_until_its_end() -> None:
    """A checkpointed block of two groups, before it a plain one: what is made again stands beside both the
    groups that it was made from."""
    block = [GroupSize("x", 2, region=1, again_s=0.5, again_bytes=9) for _ in range(2)]
    sizes = {(0, 0): [GroupSize("plain", 10), *block]}
    keep_all = frozenset(GroupKey((0, 0), place) for place in range(3))
    result = played("0F0 0B0", sizes, [3.0, 3.0], 20, keeps=keep_all)
    assert result.recompute_s == pytest.approx(1.0)
    assert (result.compute_s, result.step_s) == (pytest.approx(6.0), pytest.approx(7.0))
    assert result.peak_bytes == 10 + 2 * 2 + 2 * 9  # kept, so no room can be made within the limit of 20


def test_two_recomputes_never_stand_beside_each_other() -> None:
    sizes = {(0, 0): [GroupSize("x", 2, region=at, again_s=0.5, again_bytes=9) for at in (1, 2)]}
    keep_all = frozenset(GroupKey((0, 0), place) for place in range(2))
    result = played("0F0 0B0", sizes, [2.0, 2.0], 20, keeps=keep_all)
    assert result.peak_bytes == 2 * 2 + 9


@pytest.mark.parametrize(
    ("text", "region", "peaks"),
    [
        ("0F0 0B0 0F1 0B1", 0, (20, 25, 33, 33)),
        ("0F0 0B0 0F1 0B1", 1, (20, 33, 33, 33)),
        ("0F0 0I0 0W0", 0, (20, 33, 33)),
    ],
    ids=["plain", "one region", "halves"],
)
def test_what_a_backward_makes_and_keeps_is_there_to_the_end_of_the_step(
    text: str, region: int, peaks: tuple[int, ...]
) -> None:
    """The first chunk's: 5 bytes from the read of its second group on, 8 more from that of its first. Of a
    split backward, by its I, and what never left is whole until the W has ended."""
    grown = [GroupSize("x", 10, region, grown_bytes=nbytes) for nbytes in (8, 5)]
    sizes = {(0, 0): grown, (0, 1): [GroupSize("x", 10) for _ in range(2)]}
    keep_all = frozenset(GroupKey((0, m), at) for m in range(2) for at in range(2))
    actions = order(text)
    sizes = {chunk: own for chunk, own in sizes.items() if any(action.chunk == chunk for action in actions)}
    result = played(actions, sizes, [2.0] * len(actions), 40, keeps=keep_all)
    assert result.peaks_bytes == peaks
    assert result.step_s == pytest.approx(2.0 * len(actions))


def test_room_for_what_a_backward_makes_is_made_by_what_is_on_its_way_out() -> None:
    """Two groups leave, a second each, and 10 bytes come with the read of the second: the first has to be
    gone by then, and the second before the first comes back."""
    sizes = {(0, 0): [GroupSize("a", 10), GroupSize("b", 10, grown_bytes=10)]}
    assert played("0F0 0B0", sizes, [0.2, 0.2], 20).spill_stall_s == pytest.approx(1.8)
    assert played("0F0 0B0", {(0, 0): [GroupSize("x", 10)] * 2}, [0.2, 0.2], 20).spill_stall_s == 0


def test_bytes_on_the_host_count_from_the_queue_to_the_last_read() -> None:
    actions = order("0F0 0F1 0B0 0B1")
    sizes: dict[ChunkKey, list[GroupSize]] = {(0, m): [GroupSize("a", 10)] for m in range(2)}
    one = frozenset({GroupKey((0, 1), 0)})
    for keeps, peak in ((frozenset(), 20), (one, 10), (one | {GroupKey((0, 0), 0)}, 0)):
        result = played(actions, sizes, [1.0] * 4, 20, keeps=keeps)
        assert result.host_peak_bytes == peak


def test_a_claim_lets_spills_end_before_the_region_is_read() -> None:
    """A plain group of 10 bytes leaves, one stays; the checkpointed one after them makes 12 again. A second
    of compute a group."""
    plain = [GroupSize(name, 10, weight=1.0) for name in "ab"]
    sizes = {(0, 0): [*plain, GroupSize("x", 2, region=1, weight=1.0, again_bytes=12)]}
    result = played(
        "0F0 0B0", sizes, [3.0, 3.0], 24, keeps=frozenset({GroupKey((0, 0), 1), GroupKey((0, 0), 2)})
    )
    # forward 0-3, a out 1-2; 22 bytes and 12 more do not fit in 24, so a goes. x 3-4, b 4-5, a back 5-6, 6-7
    assert (result.restore_stall_s, result.step_s) == (pytest.approx(1.0), pytest.approx(7.0))
    assert result.peak_bytes == 24


@settings(max_examples=60)
@given(some_step(), st.integers(0, 200), st.integers(0, 30), st.integers(0, 30), st.data())
def test_what_was_fetched_ahead_makes_room_for_saves_and_claims(
    step: Step, window: int, slack: int, again: int, data: st.DataObject
) -> None:
    """So a window as wide as it likes never takes the device over a limit that holds what stays, one group
    and one recompute."""
    actions, plain, seconds, rates = step
    sizes = {
        chunk: [group._replace(region=at + 1, again_bytes=again) for at, group in enumerate(groups)]
        for chunk, groups in plain.items()
    }
    keeps = some_keeps(data, sizes)
    biggest = max((group.nbytes for groups in sizes.values() for group in groups), default=0)
    limit = kept_peak_bytes(actions, sizes, keeps) + biggest + again + slack
    result = played(actions, sizes, seconds, limit, keeps=keeps, window=window, rates=rates)
    assert result.peak_bytes <= limit
