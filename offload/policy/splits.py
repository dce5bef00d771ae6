"""Mode "auto": how one total of device memory is shared by weights, gradients, an optimizer's state and
activations.

Before step 1 all but activations is known by arithmetic, and kinds leave the device until half of the total
is free for activations: state first, of which only the optimizer's step has a use, then gradients, then
weights.
Once a step was measured, the total is shared anew: of each kind a byte on the device spares so much time.

    activations   the recompute of blocks that run plain instead (rule.py)
    weights       waits of compute for blocks that arrive, by the weights' own plan (policy/streamed.py)
    gradients     their way in for the optimizer's step
    state         its way in and out there

The link is duplex: a step of the optimizer takes what the fuller direction does. One invariant: numbers only,
and whether a share is followed is decided by real steps (kinds.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_SHARES = 8
"""Of state and of weights, how many parts are placed by themselves."""

_FOR_ACTIVATIONS = 0.5
"""Of the total, before a step was measured."""


class Loads(NamedTuple):
    """Bytes of what may wait on the host, 0 for a kind of which nothing may.

    | weights, least_weights | of blocks that stream, and their least window on the device |
    | trained_weights | of weights, those that the optimizer's step reads and writes |
    | gradients, least_gradients | and their window |
    | state, ring | of the optimizer, and what passes it through the device where some of it waits |
    | resident | on the device in any case |
    """

    weights: int = 0
    least_weights: int = 0
    trained_weights: int = 0
    gradients: int = 0
    least_gradients: int = 0
    state: int = 0
    ring: int = 0
    resident: int = 0


class Split(NamedTuple):
    """Bytes on the device. weights: bytes of streamed ones. gradients: whether they stay. state: bytes."""

    weights: int
    gradients: bool
    state: int


def all_of(loads: Loads) -> Split:
    return Split(loads.weights, True, loads.state)


def least_of(loads: Loads) -> Split:
    return Split(loads.least_weights, not loads.gradients, 0)


def device_bytes(loads: Loads, split: Split) -> int:
    """On the device, of all kinds but activations."""
    gradients = loads.gradients if split.gradients else loads.least_gradients
    # all of it is as torch has it where the optimizer steps no weights that stream
    ring = loads.ring if split.state < loads.state or loads.weights else 0
    return loads.resident + split.weights + gradients + split.state + ring


def first_split(loads: Loads, total_bytes: int) -> Split:
    """Before a step was measured."""
    aim, everything, least = total_bytes * _FOR_ACTIVATIONS, all_of(loads), least_of(loads)
    for split in (everything, everything._replace(state=0), least._replace(weights=loads.weights)):
        if device_bytes(loads, split) <= aim:
            return split
    over = device_bytes(loads, least) - loads.least_weights
    return least._replace(weights=min(loads.weights, max(loads.least_weights, int(aim) - over)))


def step_s(loads: Loads, split: Split, bytes_per_s: tuple[float, float]) -> float:
    """Seconds that copies take of the optimizer's step. bytes_per_s: of the link, in and out."""
    away = 1.0 - split.weights / loads.weights if loads.weights else 0.0
    both = loads.state - split.state + away * loads.trained_weights
    inward = both + (0 if split.gradients else loads.gradients)
    return max(inward / bytes_per_s[0], both / bytes_per_s[1])


def _splits(loads: Loads) -> Iterator[Split]:
    def parts(least: int, most: int) -> Sequence[int]:
        return sorted({least + (most - least) * part // _SHARES for part in range(_SHARES + 1)})

    for weights in parts(loads.least_weights, loads.weights):
        for gradients in (False, True) if loads.gradients else (True,):
            for state in parts(0, loads.state):
                yield Split(weights, gradients, state)


def shared(
    loads: Loads,
    now: Split,
    bytes_per_s: tuple[float, float],
    weights_at: Callable[[Sequence[int], float], Sequence[tuple[float, int]]],
    recompute_s: Callable[[int], float | None],
    compute_s: float,
) -> list[tuple[float, Split]]:
    """The splits that fit, each with what it adds to a step of plain blocks by calculation, the shortest
    first; of equal ones the one with fewest bytes.

    now: the one under which a step was measured, whose blocks computed for compute_s, recomputes included.
    weights_at: for each of these limits, where blocks compute so many times as long, the seconds that compute
    waits for weights, and their bytes on the device, which may be fewer. recompute_s: seconds of recomputes
    where kinds take so many bytes more than now; None where no rule fits then.
    """
    splits, now_bytes = [*_splits(loads)], device_bytes(loads, now)
    limits = sorted({split.weights for split in splits})
    recomputes: dict[int, float | None] = {}

    def recompute_of(split: Split) -> float | None:
        more = device_bytes(loads, split) - now_bytes
        if more not in recomputes:
            recomputes[more] = recompute_s(more)
        return recomputes[more]

    # a block that is recomputed hides more of a copy: waits are found for the least and the most of that
    known = [seconds for split in (now, *splits) if (seconds := recompute_of(split)) is not None]
    if not known:
        return []
    shortest, longest, now_s = min(known), max(known), recompute_of(now) or 0.0
    ends = [
        weights_at(limits, max(0.0, 1.0 + (again_s - now_s) / compute_s) if compute_s else 1.0)
        for again_s in (shortest, longest)
    ]
    at = {limit: (fast, slow) for limit, fast, slow in zip(limits, *ends, strict=True)}
    found: list[tuple[float, int, Split]] = []
    for split in splits:
        (fast_s, fast_bytes), (slow_s, slow_bytes) = at[split.weights]
        split = split._replace(weights=max(fast_bytes, slow_bytes))
        if (again_s := recompute_of(split)) is not None:
            part = (again_s - shortest) / (longest - shortest) if longest > shortest else 0.0
            waits_s = fast_s + min(1.0, max(0.0, part)) * (slow_s - fast_s)
            nbytes = device_bytes(loads, split)
            found.append((again_s + waits_s + step_s(loads, split, bytes_per_s), nbytes, split))
    return [(seconds, split) for seconds, _, split in sorted(found)]
