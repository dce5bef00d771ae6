"""The least step of a mixture: the bound of `least_step` where nothing can be recomputed, checkpointing's own
figures where nothing can be moved, an independent program on tiny steps, and the laws of a lower bound."""

from __future__ import annotations

import pytest

pytest.importorskip("scipy", reason="the bound is an extra: pip install pipeline-offload[bench]")

from offload.policy.actions import Action, ChunkKey, GroupSize, Rates, one_f_one_b, work_of
from offload.policy.bound import least_step
from offload.policy.menu import Block, Host, Level
from offload.policy.mixed_bound import action_seconds, least_mixed_step

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
    moved = least_step(work_of(actions, sizes, action_seconds(actions, blocks, {})), H200, 13 * GB)
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
    assert bound.recomputed_s == pytest.approx(0.5, rel=1e-3)
    assert bound.recomputed_bytes == 4
    assert sum(bound.given_bytes[0, 0]) == pytest.approx(4, rel=1e-2)
    assert bound.kept_bytes[0, 0] == pytest.approx(16, rel=1e-2)
    # a byte more on the device is an eighth of a recompute less
    assert bound.seconds_per_byte == pytest.approx(1 / 8, rel=1e-2)


def test_the_host_bounds_a_step_whose_selective_levels_take_it_long() -> None:
    """A block takes the host 2 s plain, 10 more at the selective level and 4 more at the last one; the
    device 3 s. What gives up the same bytes at the cheaper host cost is chosen."""
    menu = (Level("plain", 10, 0.0), Level("selective", 5, 0.1, 10.0), Level("checkpoint", 0, 1.0, 4.0))
    own = [Block(menu=menu, forward_s=1.0, backward_s=2.0, host_s=2.0)] * 2
    actions = [Action("F", 0, 0), Action("B", 0, 0)]
    free = least_mixed_step(actions, {(0, 0): own}, NOTHING, 10)
    assert free.step_s == pytest.approx(6.2, rel=1e-4)
    late = least_mixed_step(actions, {(0, 0): own}, NOTHING, 10, host=Host(0.0, 1.0))
    # one block's worth of checkpoints: 2 x 2 + 1 + 4 host seconds
    assert late.step_s == pytest.approx(9.0, rel=1e-3)
    assert late.host_s == pytest.approx(9.0, rel=1e-3)


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
