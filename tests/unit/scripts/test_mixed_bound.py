"""The least step of a mixture: the bound of `least_step` where nothing can be recomputed, checkpointing's own
figures where nothing can be moved, an independent program on tiny steps, and the laws of a lower bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

pytest.importorskip("scipy", reason="the bound needs scipy, an extra")
pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from bench.bound import least_step
from bench.mixed_bound import least_mixed_step
from bench.mixed_program import num_flows
from offload.policy.actions import Action, ChunkKey, GroupSize, Rates, one_f_one_b
from offload.policy.keeps import tail_keeps
from offload.policy.menu import Block, Level, action_seconds, convex, groups_at
from offload.policy.simulate import simulate

GB = 10**9
H200 = Rates(d2h_bytes_per_s=55.3 * GB, h2d_bytes_per_s=55.4 * GB, duplex_bytes_per_s=102.5 * GB)
NOTHING = Rates(d2h_bytes_per_s=1e-3, h2d_bytes_per_s=1e-3)
"""A link on which nothing gets anywhere."""


def plain_blocks(
    num_blocks: int, nbytes: int, forward_s: float = 1.0, backward_s: float = 2.0
) -> list[Block]:
    menu = (Level("plain", nbytes, 0.0),)
    return [Block(menu=menu, forward_s=forward_s, backward_s=backward_s)] * num_blocks


def test_with_plain_blocks_alone_it_is_the_bound_of_moving() -> None:
    """W2's stage at 22 GB, of which 9 are weights and working set: published as 1.55 of nothing."""
    actions = one_f_one_b(0, 4, 8)
    own = plain_blocks(8, 22 * GB // 8, 3.194 / 24 / 8, 3.194 / 12 / 8)
    blocks = {(0, m): own for m in range(8)}
    mixed = least_mixed_step(actions, blocks, H200, 13 * GB, slices=4)
    sizes = {chunk: [GroupSize("a", 22 * GB)] for chunk in blocks}
    moved = least_step(actions, sizes, action_seconds(actions, blocks, {}), H200, 13 * GB)
    assert mixed.step_s == pytest.approx(moved.step_s, rel=1e-5)
    assert mixed.moved_bytes == pytest.approx(moved.moved_bytes, rel=1e-4)
    assert mixed.recomputed_bytes == 0


def test_with_a_dead_link_it_is_checkpointing_of_as_many_blocks_as_do_not_fit() -> None:
    """Two blocks of 10 bytes, checkpointed 2 each: under a cap of 16 one gives up 4 of its 8, for half of its
    second."""
    menu = (Level("plain", 10, 0.0), Level("checkpoint", 2, 1.0))
    own = [Block(menu=menu, forward_s=1.0, backward_s=2.0)] * 2
    actions = [Action("F", 0, 0), Action("B", 0, 0)]
    bound = least_mixed_step(actions, {(0, 0): own}, NOTHING, 16)
    assert bound.compute_s == 6.0
    assert bound.step_s == pytest.approx(6.5, rel=1e-4)
    assert bound.recomputed_bytes == 4


def test_a_host_limit_leaves_only_recomputing() -> None:
    menu = (Level("plain", 10, 0.0), Level("checkpoint", 0, 1.0))
    own = [Block(menu=menu, forward_s=100.0, backward_s=100.0)]
    actions = [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)]
    blocks: dict[ChunkKey, list[Block]] = {(0, 0): own, (0, 1): own}
    rates = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=10)
    assert least_mixed_step(actions, blocks, rates, 10).recomputed_bytes == 0
    bound = least_mixed_step(actions, blocks, rates, 10, host_limit_bytes=4)
    assert bound.recomputed_bytes == 6
    with pytest.raises(ValueError, match="no step fits cap_bytes 1 and host_limit_bytes 4"):
        least_mixed_step(actions, {c: plain_blocks(1, 10) for c in blocks}, rates, 1, host_limit_bytes=4)


def test_numbers_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="cap_bytes is -1"):
        least_mixed_step([], {}, H200, -1)
    with pytest.raises(ValueError, match="slices is 0"):
        least_mixed_step([], {}, H200, 1, slices=0)
    with pytest.raises(ValueError, match=r"0F0 has no blocks; .* add \(0, 0\)"):
        least_mixed_step([Action("F", 0, 0), Action("B", 0, 0)], {}, H200, 1)
    with pytest.raises(ValueError, match="menu of a block has no level"):
        Block(menu=(), forward_s=1.0, backward_s=1.0)
    with pytest.raises(ValueError, match=r"a block has -1\.0 seconds or bytes"):
        Block(menu=(Level("plain", 1, 0.0),), forward_s=-1.0, backward_s=1.0)


def seconds_of_an_independent_program(
    actions: Sequence[Action], blocks: dict[ChunkKey, list[Block]], rates: Rates, cap: float
) -> float:
    """The same least time from another program: every block moves by itself, and gives up bytes along the
    segments of its convex menu, as the issue asks for it; rows are dense and unscaled."""
    num_blocks = len(next(iter(blocks.values())))
    slices = [
        (action, block)
        for action in actions
        for block in (range(num_blocks) if action.kind == "F" else reversed(range(num_blocks)))
    ]
    lows = [
        blocks[a.chunk][b].forward_s if a.kind == "F" else blocks[a.chunk][b].backward_s for a, b in slices
    ]
    highs: list[float | None] = [None] * len(lows)
    at_most: list[tuple[dict[int, float], float]] = []
    equal: list[tuple[dict[int, float], float]] = []

    def column(most: float | None) -> int:
        lows.append(0.0)
        highs.append(most)
        return len(lows) - 1

    device: list[tuple[dict[int, float], float]] = [
        ({}, -cap) for _ in slices
    ]  # of each slice: columns, bytes less the cap
    links: list[tuple[list[int], list[int]]] = [([], []) for _ in slices]
    for chunk, own in blocks.items():
        for number, block in enumerate(own):
            made = slices.index((Action("F", *chunk), number))
            read = slices.index((Action("B", *chunk), number))
            plain, segments = block.menu[0], []
            for upper, lower in zip(block.menu, block.menu[1:], strict=False):
                width = upper.saved_bytes - lower.saved_bytes
                rate = (lower.recompute_s - upper.recompute_s) / width
                segments.append((column(float(width)), rate))
            low_row = {read: -1.0, **{given: rate for given, rate in segments}}
            at_most.append((low_row, -block.backward_s))
            before = None
            for at in range(made, read + 1):
                out, back = column(None), column(None)
                links[at][0].append(out)
                links[at][1].append(back)
                row = {out: -1.0, back: 1.0}
                if before is not None:
                    row[before] = -1.0
                if at < read:
                    before = column(None)
                    row[before] = 1.0
                    at_most.append(
                        ({before: 1.0, **{given: 1.0 for given, _ in segments}}, plain.saved_bytes)
                    )
                    columns, nbytes = device[at]
                    columns.update({before: -1.0, **{given: -1.0 for given, _ in segments}})
                    device[at] = (columns, nbytes + plain.saved_bytes)
                equal.append((row, 0.0))
    at_most += [(columns, -nbytes) for columns, nbytes in device if columns]
    for at, (outs, ins) in enumerate(links):
        for moved, rate in (
            (outs, rates.d2h_bytes_per_s),
            (ins, rates.h2d_bytes_per_s),
            (outs + ins, rates.together_bytes_per_s),
        ):
            if moved:
                at_most.append(({at: -rate, **dict.fromkeys(moved, 1.0)}, 0.0))

    def dense(rows: list[tuple[dict[int, float], float]]) -> list[list[float]]:
        return [[row.get(place, 0.0) for place in range(len(lows))] for row, _ in rows]

    result = linprog(
        [1.0] * len(slices) + [0.0] * (len(lows) - len(slices)),
        A_ub=dense(at_most),
        b_ub=[limit for _, limit in at_most],
        A_eq=dense(equal),
        b_eq=[limit for _, limit in equal],
        bounds=list(zip(lows, highs, strict=True)),
    )
    assert result.success
    return float(result.fun)


@st.composite
def tiny_blocks(draw: st.DrawFn) -> Block:
    levels = [Level("plain", draw(st.integers(6, 20)), 0.0)]
    for name in ("selective", "checkpoint"):
        saved = draw(st.integers(0, levels[-1].saved_bytes))
        levels.append(Level(name, saved, levels[-1].recompute_s + draw(st.floats(0.05, 2.0))))
    return Block(
        menu=convex(levels), forward_s=draw(st.floats(0.1, 2.0)), backward_s=draw(st.floats(0.1, 2.0))
    )


TINY_ORDERS = ["F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B1 B0"]


def order_of(text: str) -> list[Action]:
    return [Action("F" if word[0] == "F" else "B", 0, int(word[1:])) for word in text.split()]


@settings(max_examples=40)
@given(
    own=st.lists(tiny_blocks(), min_size=4, max_size=4),
    order=st.sampled_from(TINY_ORDERS),
    cap=st.integers(0, 50),
    d2h=st.floats(2, 30),
    h2d=st.floats(2, 30),
    duplex=st.floats(2, 60),
)
def test_the_bound_is_that_of_an_independent_program(
    own: list[Block], order: str, cap: int, d2h: float, h2d: float, duplex: float
) -> None:
    blocks = {(0, 0): own[:2], (0, 1): own[2:]}
    rates = Rates(d2h_bytes_per_s=d2h, h2d_bytes_per_s=h2d, duplex_bytes_per_s=duplex)
    actions = order_of(order)
    bound = least_mixed_step(actions, blocks, rates, cap)
    assert bound.step_s == pytest.approx(
        seconds_of_an_independent_program(actions, blocks, rates, cap), rel=1e-5
    )
    coarse = least_mixed_step(actions, blocks, rates, cap, slices=1)
    assert coarse.step_s <= bound.step_s * (1 + 1e-6)


@settings(max_examples=10)
@given(
    own=st.lists(tiny_blocks(), min_size=2, max_size=2),
    caps=st.lists(st.integers(0, 60), min_size=2, max_size=3),
    rate=st.floats(2, 30),
)
def test_more_room_a_faster_link_and_cheaper_recomputes_never_cost_time(
    own: list[Block], caps: list[int], rate: float
) -> None:
    actions = one_f_one_b(0, 3, 4)
    blocks = {(0, m): own for m in range(4)}
    cheaper = {
        chunk: [
            Block(
                menu=tuple(level._replace(recompute_s=level.recompute_s / 2) for level in block.menu),
                forward_s=block.forward_s,
                backward_s=block.backward_s,
            )
            for block in own
        ]
        for chunk in blocks
    }
    slow = Rates(d2h_bytes_per_s=rate, h2d_bytes_per_s=rate)
    fast = Rates(d2h_bytes_per_s=2 * rate, h2d_bytes_per_s=2 * rate)
    earlier_s = float("inf")
    for cap in sorted(caps):
        step_s = least_mixed_step(actions, blocks, slow, cap).step_s
        assert step_s <= earlier_s * (1 + 1e-6)
        assert least_mixed_step(actions, blocks, fast, cap).step_s <= step_s * (1 + 1e-6)
        assert least_mixed_step(actions, cheaper, slow, cap).step_s <= step_s * (1 + 1e-6)
        assert least_mixed_step(actions, blocks, slow, cap, host_limit_bytes=1000).step_s == pytest.approx(
            step_s, rel=1e-6
        )
        earlier_s = step_s


def test_a_split_backward_recomputes_in_its_input_half() -> None:
    menu = (Level("plain", 10, 0.0), Level("checkpoint", 0, 1.0))
    own = [Block(menu=menu, forward_s=1.0, backward_s=2.0, weight_part=0.25)]
    actions = [Action("F", 0, 0), Action("I", 0, 0), Action("W", 0, 0)]
    assert action_seconds(actions, {(0, 0): own}, {actions[1]: 0.5}) == [1.0, 2.0, 0.5]
    bound = least_mixed_step(actions, {(0, 0): own}, NOTHING, 0)
    assert bound.step_s == pytest.approx(4.0, rel=1e-4)


@st.composite
def split_step(draw: st.DrawFn) -> tuple[list[Action], dict[ChunkKey, list[Block]], Rates, int]:
    """Three chunks of two blocks whose backwards are split, in any order."""
    own = [draw(tiny_blocks()) for _ in range(2)]
    reads = draw(st.floats(0, 1))
    blocks = {(0, m): [replace(block, w_reads=reads) for block in own] for m in range(3)}
    waiting = [[Action(kind, 0, m) for kind in ("F", "I", "W")] for m in range(3)]
    actions: list[Action] = []
    while waiting:
        actions.append(draw(st.sampled_from(waiting)).pop(0))
        waiting = [left for left in waiting if left]
    rate = st.floats(2, 30)
    rates = Rates(d2h_bytes_per_s=draw(rate), h2d_bytes_per_s=draw(rate))
    return actions, blocks, rates, draw(st.integers(0, 60))


@settings(max_examples=25)
@given(split_step(), st.data())
def test_no_simulated_step_with_split_backwards_is_under_the_bound(
    step: tuple[list[Action], dict[ChunkKey, list[Block]], Rates, int], data: st.DataObject
) -> None:
    actions, blocks, rates, limit = step
    levels = {
        chunk: tuple(data.draw(st.integers(0, len(block.menu) - 1)) for block in own)
        for chunk, own in blocks.items()
    }
    leaving = data.draw(st.integers(0, 2))
    sizes = {chunk: groups_at(own, levels[chunk], 4, leaving) for chunk, own in blocks.items()}
    result = simulate(
        actions,
        sizes,
        action_seconds(actions, blocks, {}),
        rates,
        limit_bytes=limit,
        keeps=tail_keeps(sizes, {chunk: data.draw(st.integers(0, 40)) for chunk in blocks}),
        restoring_room_bytes=data.draw(st.integers(0, 40)),
        half_room_bytes=data.draw(st.integers(0, 20)),
    )
    bound = least_mixed_step(actions, blocks, rates, max(limit, result.peak_bytes))
    assert bound.step_s <= result.step_s * (1 + 1e-5)


def test_what_the_weight_half_does_not_read_is_free_after_the_input_half() -> None:
    """10 bytes, of which the W reads 4: two such chunks between their halves fit 8 bytes and no fewer."""
    own = plain_blocks(1, 10)
    actions = [Action(kind, 0, m) for m, kinds in ((0, "FI"), (1, "FI")) for kind in kinds]
    actions += [Action("W", 0, 0), Action("W", 0, 1)]
    whole = {(0, m): own for m in range(2)}
    part = {(0, m): [replace(own[0], w_reads=0.4)] for m in range(2)}
    rates = Rates(d2h_bytes_per_s=10, h2d_bytes_per_s=10)
    # 20 bytes are alive after the second F and the second I; 14 and 8
    assert least_mixed_step(actions, whole, rates, 20).moved_bytes == 0
    assert least_mixed_step(actions, whole, rates, 14).moved_bytes == 6
    assert least_mixed_step(actions, part, rates, 14).moved_bytes == 0
    assert least_mixed_step(actions, part, rates, 13).moved_bytes == 1


def test_a_long_steps_program_merges_actions_and_stays_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    menu = (Level("plain", 100, 0.0), Level("selective", 60, 0.2), Level("checkpoint", 10, 1.0))
    own = [Block(menu=menu, forward_s=1.0, backward_s=2.0)] * 2
    actions = one_f_one_b(0, 4, 12)
    blocks = {(0, m): own for m in range(12)}
    rates = Rates(d2h_bytes_per_s=20, h2d_bytes_per_s=20)
    whole = least_mixed_step(actions, blocks, rates, 200)
    assert num_flows(actions) == 2 * (5 + 6 + 7) + 6 * 8  # lives of 5 actions at both ends, 8 between
    for most_flows in (60, 30, 10):
        monkeypatch.setattr("bench.mixed_program._MOST_FLOWS", most_flows)
        merged = least_mixed_step(actions, blocks, rates, 200)
        assert merged.compute_s == whole.compute_s
        assert whole.compute_s <= merged.step_s <= whole.step_s * (1 + 1e-6)
