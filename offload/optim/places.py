"""Which parameter's state lies where: on the GPU, on the host and stepped there, or on the host and stepped
on the GPU.

Numbers only. One invariant: the answer depends on the order and the sizes of the parameters and on two
fractions, on nothing that changes from run to run; so a layout that was measured once can be written down and
asked for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

__all__ = ["OffloadRates", "Place", "best_cpu_share", "choose_offloaded", "choose_places", "step_seconds"]


class Place(Enum):
    """Where a parameter's optimizer state is between steps, and who steps it."""

    GPU = "gpu"
    """On the device, stepped there: as usual."""
    CPU = "cpu"
    """On the host, stepped there: gradients go out, weights come back."""
    STREAMED = "streamed"
    """On the host, stepped on the device: state comes in bucket by bucket and goes out again."""
    HOME = "home"
    """The parameter itself is on the host and the device is elsewhere: stepped where it is."""


def choose_offloaded(
    numels: Sequence[int], fraction: float, *, offloaded: int = 0, total: int = 0
) -> list[bool]:
    """Parameters leave in order until `fraction` of all elements is reached, so the last of them may pass it.

    offloaded, total: elements of parameters placed earlier, of which `offloaded` left; they count and are not
    placed again. A parameter without elements leaves unless the fraction is 0.
    Source: the order and the rule of Megatron-core's hybrid optimizer.
    """
    threshold = fraction * (total + sum(numels))
    answers = []
    for numel in numels:
        leaves = fraction > 0 if numel == 0 else offloaded < threshold
        offloaded += numel if leaves else 0
        answers.append(leaves)
    return answers


def choose_places(nbytes: Sequence[int], cpu_share: float) -> list[Place]:
    """CPU or STREAMED for each offloaded parameter, in order, so that after each of them the CPU's share of
    the bytes is as near as can be.

    Both places work through the model from its first layer on, so parts of it that are next to each other
    must be spread over both.
    """
    places, on_cpu, before = [], 0, 0
    for size in nbytes:
        before += size
        goes = abs(on_cpu + size - cpu_share * before) <= abs(on_cpu - cpu_share * before)
        on_cpu += size if goes else 0
        places.append(Place.CPU if goes else Place.STREAMED)
    return places


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRates:
    """What one machine does: each lane while the other direction is busy too, with the CPU optimizer at work
    beside them and without."""

    cpu_elements_per_s: float
    """Of the CPU optimizer, beside copies both ways."""
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    """While the CPU optimizer works: it and the copies share the host's memory."""
    d2h_alone_bytes_per_s: float
    h2d_alone_bytes_per_s: float
    """While it does not."""


def step_seconds(
    rates: OffloadRates,
    share: float,
    *,
    cpu_out_bytes: float,
    cpu_in_bytes: float,
    streamed_out_bytes: float,
    streamed_in_bytes: float,
) -> float:
    """Seconds an element of a step in which the CPU steps `share` of the elements: the slowest of CPU and the
    two lanes.

    The bytes are those of one element and of one step. A lane is slowed down for as long as the CPU works,
    and no longer.
    """
    cpu_seconds = share / rates.cpu_elements_per_s
    slowest = cpu_seconds
    for on_cpu, streamed, beside, alone in (
        (cpu_out_bytes, streamed_out_bytes, rates.d2h_bytes_per_s, rates.d2h_alone_bytes_per_s),
        (cpu_in_bytes, streamed_in_bytes, rates.h2d_bytes_per_s, rates.h2d_alone_bytes_per_s),
    ):
        left = share * on_cpu + (1 - share) * streamed - cpu_seconds * beside
        slowest = max(slowest, cpu_seconds + left / alone)
    return slowest


def best_cpu_share(
    rates: OffloadRates,
    *,
    cpu_out_bytes: float,
    cpu_in_bytes: float,
    streamed_out_bytes: float,
    streamed_in_bytes: float,
    worth: float = 0.0,
) -> tuple[float, float]:
    """(share of the elements that the CPU steps, in hundredths; seconds an element) of the shortest step; see
    `step_seconds`.

    worth: what the CPU has to save of the step without it, or its share is 0. It takes cores from data
        loaders, and was slower in a real step than beside the copies of a measurement (docs/log.md).
    """

    def seconds(share: float) -> float:
        return step_seconds(
            rates,
            share,
            cpu_out_bytes=cpu_out_bytes,
            cpu_in_bytes=cpu_in_bytes,
            streamed_out_bytes=streamed_out_bytes,
            streamed_in_bytes=streamed_in_bytes,
        )

    best = min((hundredths / 100 for hundredths in range(101)), key=seconds)
    if seconds(best) > (1 - worth) * seconds(0.0):
        best = 0.0
    return best, seconds(best)
