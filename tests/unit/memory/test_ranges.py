"""Free ranges: which one is chosen, and what joining keeps."""

from __future__ import annotations

from offload.memory.marks import Mark
from offload.memory.ranges import FreeRanges, Range


def free_ranges(*ranges: tuple[int, int, int]) -> FreeRanges:
    free = FreeRanges()
    for piece, start, end in ranges:
        free.put(piece, start, end)
    return free


def places(ranges: list[Range]) -> list[tuple[int, int, int]]:
    return [(each.piece, each.start, each.end) for each in ranges]


def test_the_smallest_range_that_fits_is_cut() -> None:
    free = free_ranges((0, 0, 100), (1, 0, 30), (2, 0, 20))
    assert places(free.gather(25)) == [(1, 0, 25)]
    assert free.total_bytes == 125


def test_without_a_fit_the_largest_ranges_are_gathered_first() -> None:
    free = free_ranges((0, 0, 50), (1, 0, 30), (2, 0, 20), (3, 0, 10))
    # 50, then of the 15 left the smallest range that fits
    assert places(free.gather(65)) == [(0, 0, 50), (2, 0, 15)]
    assert places(free.gather(free.total_bytes)) == [(1, 0, 30), (3, 0, 10), (2, 15, 20)]
    assert free.total_bytes == len(free) == 0


def test_neighbours_join_and_pieces_do_not() -> None:
    free = free_ranges((0, 0, 10), (0, 20, 30), (1, 0, 10))
    free.put(0, 10, 20)
    assert sorted(places(list(free))) == [(0, 0, 30), (1, 0, 10)]


def test_joining_keeps_the_events_of_both_sides_and_forgets_passed_ones() -> None:
    left, middle, right, passed = Mark(object()), Mark(object()), Mark(object()), Mark(object())
    passed.event = None
    free = FreeRanges()
    free.put(0, 0, 10, (left, passed))
    free.put(0, 20, 30, (right, left))
    free.put(0, 10, 20, (middle,))
    (joined,) = free
    assert joined.marks == (left, middle, right)


def test_among_equals_one_that_nobody_reads_is_chosen() -> None:
    busy, passed = Mark(object()), Mark(object())
    passed.event = None
    free = FreeRanges()
    free.put(0, 0, 10, (busy,))
    free.put(1, 0, 10, (passed,))
    chosen = free.best_fit(10)
    assert chosen is not None
    assert chosen.piece == 1


def test_both_parts_of_a_split_range_keep_its_events() -> None:
    busy = Mark(object())
    free = FreeRanges()
    free.put(0, 0, 10, (busy,))
    (part,) = free.gather(4)
    (rest,) = free
    assert part.marks == rest.marks == (busy,)
