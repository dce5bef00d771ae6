"""Which parameter's state lies where: on the GPU, on the host and stepped there, or on the host and stepped
on the GPU.

Numbers only. One invariant: the answer depends on the order and the sizes of the parameters and on two
fractions, on nothing that changes from run to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

__all__ = ["Place", "choose_offloaded", "choose_places"]


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
