"""The least step time that any engine that only moves bytes could reach under a cap on device bytes: what
every measured step is compared with.

On a pipeline's first rank several forwards come before the first backward, so a cap costs time whatever the
engine does. How much is the program of `mixed_program`, of blocks that have no level but the plain one. One
invariant: it is a lower bound. A plan or a measurement under it is an error of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.mixed_bound import least_mixed_step
from bench.mixed_program import MixedBound
from offload.policy.actions import Action, ChunkSizes, Rates, require_times
from offload.policy.menu import Block, Level

__all__ = ["least_step", "single_pass_limit_s"]


def single_pass_limit_s(
    forward_s: float, backward_s: float, moved_bytes: float, d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> float:
    """The bound of one forward and one backward in closed form: each takes its compute or its copies,
    whichever is longer."""
    return max(forward_s, moved_bytes / d2h_bytes_per_s) + max(backward_s, moved_bytes / h2d_bytes_per_s)


def least_step(
    actions: Sequence[Action],
    sizes: ChunkSizes,
    compute_s: Sequence[float],
    rates: Rates,
    cap_bytes: int,
    *,
    slices: int = 4,
) -> MixedBound:
    """Least step of one rank.

    sizes: what each chunk's forward saves, of which a split backward's W reads `w_bytes` again. compute_s:
        seconds of each action. cap_bytes: what saved activations may take on the device: its memory less
        weights, gradients and working set.
    slices: parts of each action; more parts are nearer to the truth, from below. A pipeline stage's figures
        are the same with 1 and 8.

    Raises ValueError for an order or a cap that cannot be, ImportError without scipy (extra `plan`).
    """
    require_times(actions, compute_s)

    def block(chunk: tuple[int, int]) -> Block:
        """One of equal parts of the chunk. Its seconds are in `rest_s`."""
        part = sum(group.nbytes for group in sizes[chunk]) / max(1, slices)
        # whole bytes, and no more than there are: else it would be no lower bound
        reads = math.floor(sum(group.w_bytes for group in sizes[chunk]) / max(1, slices))
        menu = (Level("plain", part, 0.0),)
        return Block(menu=menu, forward_s=0.0, backward_s=0.0, w_reads=reads / part if part else 0.0)

    blocks = {action.chunk: [block(action.chunk)] * slices for action in actions}
    rest_s = dict(zip(actions, compute_s, strict=True))
    return least_mixed_step(actions, blocks, rates, cap_bytes, rest_s=rest_s, slices=slices)
