"""What stays by margin, fraction, bytes a rank and cap, on steps of every shape."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

from offload.policy.actions import Action, ChunkKey, GroupKey, GroupSize, Keeps, one_f_one_b
from offload.policy.keeps import (
    fraction_keeps,
    kept_peak_bytes,
    limit_keeps,
    margin_keeps,
    short_lives_bytes,
    summary_bytes,
    tail_keeps,
)

Chunks = list[tuple[ChunkKey, list[GroupSize]]]


def chunk(microbatch: int, names: str, nbytes: int = 10) -> tuple[ChunkKey, list[GroupSize]]:
    return (0, microbatch), [GroupSize(name, nbytes) for name in names]


def key(microbatch: int, index: int) -> GroupKey:
    return GroupKey((0, microbatch), index)


@st.composite
def some_chunks(draw: st.DrawFn) -> Chunks:
    groups = st.lists(st.builds(GroupSize, st.sampled_from("abcd"), st.integers(0, 20)), max_size=6)
    return [
        ((draw(st.integers(0, 2)), microbatch), found)
        for microbatch, found in enumerate(draw(st.lists(groups, max_size=5)))
    ]


@pytest.mark.req("S2-39")
def test_the_margin_is_the_largest_number_of_names_in_any_chunk() -> None:
    # no chunk has more than one name
    assert margin_keeps([chunk(0, "aaaa"), chunk(1, "bb"), chunk(2, "c")]) == {key(0, 3)}
    assert margin_keeps([chunk(0, "abab"), chunk(1, "ab")]) == {key(0, 2), key(0, 3)}


@pytest.mark.req("S2-40")
def test_each_name_keeps_its_last_group_of_the_first_chunk_to_run_backward_that_has_it() -> None:
    # margin 2; b is read first in chunk 1, a not before chunk 2
    assert margin_keeps([chunk(1, "bb"), chunk(2, "abab")]) == {key(1, 1), key(2, 2)}


@pytest.mark.req("S2-40")
def test_names_beyond_the_margin_leave() -> None:
    # two names a chunk, four in all: the two that are read soonest stay
    assert margin_keeps([chunk(1, "ab"), chunk(0, "cd")]) == {key(1, 0), key(1, 1)}


@pytest.mark.req("S2-39", "S2-40")
@given(some_chunks())
def test_the_margin_is_used_up_on_every_shape_of_step(chunks: Chunks) -> None:
    """Megatron-core's engine asserted here: 768 of 1917 configurations ended in "Chunk mismatch", among them
    every step of several microbatches whose chunks have one layer and two or more names."""
    groups_of = dict(chunks)
    keeps = margin_keeps(chunks)
    assert len(keeps) == max((len({group.name for group in groups}) for _, groups in chunks), default=0)
    names = [groups_of[kept.chunk][kept.position].name for kept in keeps]
    assert len(set(names)) == len(names)
    for kept in keeps:
        groups = groups_of[kept.chunk]
        assert groups[kept.position].name not in {group.name for group in groups[kept.position + 1 :]}


@pytest.mark.req("S2-40")
def test_one_layer_with_two_names_and_two_microbatches_has_a_plan() -> None:
    assert margin_keeps([chunk(1, "ab"), chunk(0, "ab")]) == {key(1, 0), key(1, 1)}
    assert fraction_keeps([chunk(1, "ab"), chunk(0, "ab")], 0.0) == {
        key(m, i) for m in (0, 1) for i in (0, 1)
    }


@pytest.mark.req("S2-104")
@pytest.mark.parametrize(
    ("fraction", "first_kept"), [(0.0, 0), (0.24, 1), (0.25, 1), (0.5, 2), (0.75, 3), (0.9, 4), (1.0, 4)]
)
def test_the_first_fraction_of_a_chunks_groups_leaves_and_the_rest_stays(
    fraction: float, first_kept: int
) -> None:
    expected = {key(m, index) for m in (0, 1) for index in range(first_kept, 4)}
    assert fraction_keeps([chunk(1, "abab"), chunk(0, "abab")], fraction) == expected


@pytest.mark.req("S2-104")
def test_groups_that_stay_anyway_and_empty_ones_are_not_eligible() -> None:
    chunks: Chunks = [
        ((0, 0), [GroupSize("a", 10), GroupSize("a", 0), GroupSize("a", 10), GroupSize("b", 10)])
    ]
    # one of two eligible groups leaves
    assert fraction_keeps(chunks, 0.5, held=frozenset({key(0, 3)})) == {key(0, 2), key(0, 3)}


@pytest.mark.req("S2-104")
def test_later_ranks_keep_their_bytes_from_what_is_read_soonest() -> None:
    chunks = [chunk(1, "aa"), chunk(0, "aa")]
    assert fraction_keeps(chunks, 1.0, pp_rank=0, delta_bytes=15) == set()
    assert fraction_keeps(chunks, 1.0, pp_rank=1, delta_bytes=10) == {key(1, 1)}
    # the second goes over
    assert fraction_keeps(chunks, 1.0, pp_rank=1, delta_bytes=15) == {key(1, 1), key(1, 0)}
    assert fraction_keeps(chunks, 1.0, pp_rank=3, delta_bytes=10) == {key(1, 1), key(1, 0), key(0, 1)}
    assert fraction_keeps(chunks, 1.0, pp_rank=9, delta_bytes=10) == {
        key(m, i) for m in (0, 1) for i in (0, 1)
    }


@pytest.mark.req("S2-104")
@given(some_chunks(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_fraction_keeps_a_subset(chunks: Chunks, one: float, other: float) -> None:
    held = margin_keeps(chunks)
    smaller, larger = sorted((one, other))
    assert held <= fraction_keeps(chunks, larger, held=held) <= fraction_keeps(chunks, smaller, held=held)


@pytest.mark.req("S2-104")
@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_a_fraction_outside_its_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=r"activation_offload_fraction is .*; give a number in 0\.\.1"):
        fraction_keeps([], fraction)


@pytest.mark.req("S2-104")
def test_a_negative_rank_or_delta_is_refused() -> None:
    with pytest.raises(ValueError, match="pp_rank is -1 and delta_offload_bytes_across_pp_ranks 5"):
        fraction_keeps([], 1.0, pp_rank=-1, delta_bytes=5)


@pytest.mark.req("S2-41")
def test_the_summary_counts_the_forwards_up_to_the_first_chunk_that_runs_backward() -> None:
    forwards = [chunk(0, "ab"), chunk(1, "ab"), chunk(2, "ab")]
    assert summary_bytes(forwards, (0, 1), frozenset({key(1, 1)})) == {"a": 20, "b": 10}
    assert summary_bytes(forwards[:1], (0, 0), frozenset({key(0, 0), key(0, 1)})) == {"a": 0, "b": 0}


def test_kept_bytes_peak_where_most_chunks_are_alive() -> None:
    actions = one_f_one_b(0, 3, 4)  # F0 F1 F2 B0 F3 B1 B2 B3: three alive at most
    sizes = dict(chunk(m, "ab") for m in range(4))
    assert kept_peak_bytes(actions, sizes, frozenset({key(m, 1) for m in range(4)})) == 30
    assert kept_peak_bytes(actions, sizes, frozenset({key(0, 1), key(3, 1)})) == 10  # never alive together
    assert kept_peak_bytes([], {}, frozenset()) == 0


def test_the_limit_keeps_as_much_of_each_end_as_fits_beside_the_rooms() -> None:
    actions = one_f_one_b(0, 3, 4)
    sizes = dict(chunk(m, "abcd") for m in range(4))
    # 120 - 30 - 20 = 70 for three chunks at once: two groups each and a third for one; chunk 3 overlaps
    # chunks 1 and 2 only
    keeps = limit_keeps(actions, sizes, 120, 30, 20)
    counts = [sum(kept.chunk == (0, m) for kept in keeps) for m in range(4)]
    assert counts == [3, 2, 2, 3]
    assert kept_peak_bytes(actions, sizes, keeps) == 70


def test_rooms_larger_than_the_limit_keep_nothing() -> None:
    assert (
        limit_keeps(one_f_one_b(0, 2, 2), dict(chunk(m, "ab") for m in range(2)), 20, 15, 15) == frozenset()
    )


def test_a_negative_room_is_refused() -> None:
    with pytest.raises(ValueError, match="spilling room -1, restoring room 0; none can be below 0"):
        limit_keeps([], {}, 10, -1, 0)


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 20), max_size=6), min_size=1, max_size=6),
    st.integers(1, 4),
    st.integers(0, 200),
    st.integers(0, 30),
)
def test_kept_bytes_never_pass_the_limit_less_the_rooms_and_no_end_can_grow(
    nbytes: list[list[int]], num_stages: int, limit: int, room: int
) -> None:
    actions = one_f_one_b(0, num_stages, len(nbytes))
    sizes = {(0, m): [GroupSize("g", n) for n in found] for m, found in enumerate(nbytes)}
    keeps = limit_keeps(actions, sizes, limit, room, 0)
    budget = max(0, limit - room)
    assert kept_peak_bytes(actions, sizes, keeps) <= budget
    for microbatch, groups in enumerate(nbytes):
        indices = sorted(kept.position for kept in keeps if kept.chunk == (0, microbatch))
        first = len(groups) - len(indices)
        assert indices == list(range(first, len(groups)))  # the end of the chunk, whole
        if first > 0 and limit >= room:
            grown: Keeps = keeps | {key(microbatch, first - 1)}
            assert kept_peak_bytes(actions, sizes, grown) > budget


def test_a_tail_stops_before_the_group_that_does_not_fit() -> None:
    sizes: dict[ChunkKey, list[GroupSize]] = {
        (0, 0): [GroupSize("a", 1), GroupSize("b", 10), GroupSize("c", 5)]
    }
    assert tail_keeps(sizes, {(0, 0): 14}) == {key(0, 2)}  # a would fit, but it is read after b
    assert tail_keeps(sizes, {(0, 0): 15}) == {key(0, 1), key(0, 2)}
    assert tail_keeps(sizes, {}) == frozenset()


def test_a_schedule_with_split_backwards_keeps_until_the_weight_half() -> None:
    actions = [Action("F", 0, 0), Action("I", 0, 0), Action("F", 0, 1), Action("W", 0, 0), Action("B", 0, 1)]
    sizes = dict(chunk(m, "a") for m in range(2))
    assert kept_peak_bytes(actions, sizes, frozenset({key(0, 0), key(1, 0)})) == 20


def test_the_chunks_that_live_shortest_keep_their_ends_first() -> None:
    # chunk 1 is read at once and keeps all of its 30; what is left of the budget is chunk 2's, which is read
    # before chunk 0
    actions = [
        Action(kind, 0, m)
        for kind, m in (("F", 0), ("F", 2), ("F", 1), ("I", 1), ("W", 1), ("B", 2), ("B", 0))
    ]
    sizes = {(0, m): [GroupSize(name, 10) for name in "abc"] for m in range(3)}
    assert short_lives_bytes(actions, sizes, 49) == {(0, 1): 30, (0, 2): 10, (0, 0): 0}
    assert short_lives_bytes(actions, sizes, 50) == {(0, 1): 30, (0, 2): 20, (0, 0): 0}
    assert short_lives_bytes(actions, sizes, 9) == dict.fromkeys(sizes, 0)
