"""Which groups stay on the device where no times are known: by margin, fraction, bytes a rank, or a cap.

What is read soonest would have to come back before there is time for it. So every rule keeps from the end of
a chunk, which its backward reads first. One invariant: a rule never asserts on the shape of a step; chunks
may have any number of groups and names, none included, and what cannot be kept leaves.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import accumulate

from offload.policy.actions import (
    Action,
    ChunkKey,
    ChunkSizes,
    GroupKey,
    GroupSize,
    Keeps,
    Life,
    lives_of,
    require_sizes,
)

OrderedChunks = Sequence[tuple[ChunkKey, Sequence[GroupSize]]]
"""Chunks in the order that the argument's name says, each with its groups in forward order."""


def margin_keeps(chunks_in_backward_order: OrderedChunks) -> Keeps:
    """For each name the group that is read first in the step, until the margin is used up: the first reads
    wait for no copy.

    The margin is the largest number of distinct names in any chunk, so it is always used up. Names are taken
    in the order in which they are read.
    """
    margin = max((len({group.name for group in groups}) for _, groups in chunks_in_backward_order), default=0)
    kept: dict[str, GroupKey] = {}
    for key, group in _in_reading_order(chunks_in_backward_order):
        if len(kept) == margin:
            break
        kept.setdefault(group.name, key)
    return frozenset(kept.values())


def fraction_keeps(
    chunks_in_backward_order: OrderedChunks,
    fraction: float,
    *,
    held: Keeps = frozenset(),
    pp_rank: int = 0,
    delta_bytes: int = 0,
) -> Keeps:
    """Groups that stay, `held` included.

    held: groups that stay anyway (the margin); they and groups of 0 bytes are not eligible.
    fraction: of the eligible groups of each chunk the first so many leave, rounded to the nearest group; 0
        keeps all, 1 none.
    pp_rank, delta_bytes: a pipeline's later ranks hold fewer chunks and can keep more. Groups that would
        leave are kept, the one read soonest first, until at least `pp_rank * delta_bytes` bytes are: the last
        one may go over.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"activation_offload_fraction is {fraction}; give a number in 0..1")
    if pp_rank < 0 or delta_bytes < 0:
        raise ValueError(
            f"pp_rank is {pp_rank} and delta_offload_bytes_across_pp_ranks {delta_bytes:,}; neither can be "
            "below 0"
        )
    keeps = set(held)
    for chunk, groups in chunks_in_backward_order:
        eligible = [
            GroupKey(chunk, index)
            for index, group in enumerate(groups)
            if group.nbytes > 0 and (chunk, index) not in held
        ]
        keeps.update(eligible[math.floor(fraction * len(eligible) + 0.5) :])
    left_bytes = pp_rank * delta_bytes
    for key, group in _in_reading_order(chunks_in_backward_order):
        if left_bytes <= 0:
            break
        if key not in keeps and group.nbytes > 0:
            keeps.add(key)
            left_bytes -= group.nbytes
    return frozenset(keeps)


def limit_keeps(
    actions: Sequence[Action],
    sizes: ChunkSizes,
    device_limit_bytes: int,
    spilling_room_bytes: int,
    restoring_room_bytes: int,
) -> Keeps:
    """The most that may stay so that kept bytes, with what input halves leave beside them, never pass the
    limit less the two rooms, wherever the step is.

    Chunks grow together from their ends, a group a round, in the order of their last reads; one whose next
    group does not fit all its life is complete. Rooms and halves that are larger than the limit keep nothing.
    """
    budget_bytes = device_limit_bytes - spilling_room_bytes - restoring_room_bytes
    if min(device_limit_bytes, spilling_room_bytes, restoring_room_bytes) < 0:
        raise ValueError(
            f"device_limit_bytes {device_limit_bytes:,}, spilling room {spilling_room_bytes:,}, restoring "
            f"room {restoring_room_bytes:,}; none can be below 0"
        )
    lives = lives_of(actions)
    require_sizes(actions, sizes)
    level_bytes = _left_bytes(lives, sizes, len(actions))
    keeps: set[GroupKey] = set()
    growing = deque(GroupKey(chunk, len(sizes[chunk]) - 1) for chunk in lives)
    while growing:
        chunk, position = key = growing.popleft()
        if position < 0:
            continue
        # no forward runs inside the last read: there bytes only go
        life = slice(lives[chunk].forward, lives[chunk].last_read)
        nbytes = sizes[chunk][position].nbytes
        if max(level_bytes[life]) + nbytes <= budget_bytes:
            level_bytes[life] = [level + nbytes for level in level_bytes[life]]
            keeps.add(key)
            growing.append(GroupKey(chunk, position - 1))
    return frozenset(keeps)


def tail_keeps(sizes: ChunkSizes, kept_bytes: Mapping[ChunkKey, float]) -> Keeps:
    """Last groups of each chunk that together take at most `kept_bytes[chunk]` (0 where it is not named)."""
    keeps: list[GroupKey] = []
    for chunk, groups in sizes.items():
        ends = accumulate(group.nbytes for group in reversed(groups))
        first = len(groups) - sum(nbytes <= kept_bytes.get(chunk, 0) for nbytes in ends)
        keeps += [GroupKey(chunk, index) for index in range(first, len(groups))]
    return frozenset(keeps)


def short_lives_bytes(
    actions: Sequence[Action], sizes: ChunkSizes, budget_bytes: float
) -> dict[ChunkKey, int]:
    """Bytes that may stay of the end of each chunk, the chunk with the fewest actions from its F to its last
    read first, so that kept bytes never pass the budget: what is read soon would come back before long.

    Under a V-shaped schedule the last stage's chunks are read at once, and the first stage's wait a round.
    """
    lives = lives_of(actions)
    require_sizes(actions, sizes)
    level_bytes = [0] * len(actions)
    kept_bytes: dict[ChunkKey, int] = {}
    for chunk in sorted(lives, key=lambda chunk: lives[chunk].last_read - lives[chunk].forward):
        life = slice(lives[chunk].forward, lives[chunk].last_read)
        room_bytes = budget_bytes - max(level_bytes[life])
        ends = accumulate(group.nbytes for group in reversed(sizes[chunk]))
        kept_bytes[chunk] = max((end for end in ends if end <= room_bytes), default=0)
        level_bytes[life] = [level + kept_bytes[chunk] for level in level_bytes[life]]
    return kept_bytes


def all_of(sizes: ChunkSizes) -> Keeps:
    """Every group of every chunk: with `kept_peak_bytes`, what is live at once when nothing leaves."""
    return frozenset(
        GroupKey(chunk, index) for chunk, groups in sizes.items() for index in range(len(groups))
    )


def kept_peak_bytes(actions: Sequence[Action], sizes: ChunkSizes, keeps: Keeps) -> int:
    """The most kept bytes at any point of the order; a chunk's are there from its F to the end of its last
    read."""
    kept_bytes: Counter[ChunkKey] = Counter()
    for key in keeps:
        kept_bytes[key.chunk] += sizes[key.chunk][key.position].nbytes
    level_bytes = [0] * len(actions)
    for chunk, life in lives_of(actions).items():
        for at in range(life.forward, life.last_read):
            level_bytes[at] += kept_bytes[chunk]
    return max(level_bytes, default=0)


def left_peak_bytes(actions: Sequence[Action], sizes: ChunkSizes) -> int:
    """The most that the Is of split backwards leave for their Ws at once, of what they computed again."""
    return max(_left_bytes(lives_of(actions), sizes, len(actions)), default=0)


def _left_bytes(lives: Mapping[ChunkKey, Life], sizes: ChunkSizes, num_actions: int) -> list[int]:
    """The same by action."""
    level_bytes = [0] * num_actions
    for chunk, life in lives.items():
        if life.half_read is not None:
            nbytes = sum(group.left_bytes for group in sizes[chunk])
            for at in range(life.half_read, life.last_read):
                level_bytes[at] += nbytes
    return level_bytes


def summary_bytes(
    chunks_in_forward_order: OrderedChunks, first_backward: ChunkKey, keeps: Keeps
) -> dict[str, int]:
    """Bytes that `offload_summary_bytes` counts for each name: the leaving bytes of the forwards up to and
    including the first chunk that runs backward, about what a steady schedule has on the host at once."""
    counted = [chunk for chunk, _ in chunks_in_forward_order]
    last = counted.index(first_backward) + 1 if first_backward in counted else len(counted)
    return leaving_bytes(chunks_in_forward_order[:last], keeps)


def leaving_bytes(chunks: OrderedChunks, keeps: Keeps) -> dict[str, int]:
    """The bytes that leave in these chunks, by the groups' names. A name whose groups all stay counts 0."""
    totals: Counter[str] = Counter()
    for chunk, groups in chunks:
        for index, group in enumerate(groups):
            totals[group.name] += 0 if GroupKey(chunk, index) in keeps else group.nbytes
    return dict(totals)


def _in_reading_order(chunks_in_backward_order: OrderedChunks) -> list[tuple[GroupKey, GroupSize]]:
    return [
        (GroupKey(chunk, index), groups[index])
        for chunk, groups in chunks_in_backward_order
        for index in range(len(groups) - 1, -1, -1)
    ]
