"""What the parts of one `apply` will take of the device and of the host, and whether the totals that were
given have it.

One invariant: nothing is counted that a step might do without, so what is refused here cannot run; and it is
refused before anything has moved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from offload.engine import OffloadEngine
from offload.errors import HostBudgetError
from offload.memory.budget import default_host_limit_bytes
from offload.optim.convert import host_and_device_bytes
from offload.params.view import local_of
from offload.policy.streamed import Size, least_window
from offload.sizes import bytes_text, enough_text
from offload.weights.choose import Choice
from offload.weights.gradients import window_bytes


class Part(NamedTuple):
    """One kind. instead: what takes less of the device, and of the host; "" where nothing does."""

    kind: str
    device_bytes: int
    host_bytes: int = 0
    instead: tuple[str, str] = ("", "")


def parts_of(
    model: nn.Module,
    where: torch.device,
    choice: Choice | None,
    weights_bytes: int | None,
    waiting: Collection[str],
    optimizer: torch.optim.Optimizer | None,
    device_limit_bytes: int | None,
) -> list[Part]:
    """choice: of weights that stream. weights_bytes: their limit. waiting: parameters whose gradients wait on
    the host."""
    here = {
        name: size_of(each)
        for name, each in model.named_parameters()
        if choice is not None or local_of(each).device == where
    }
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    named = {} if choice is None else choice.blocks
    streamed = {weight.name: weight for weights in named.values() for weight in weights}
    resident = sum(nbytes for name, nbytes in here.items() if name not in streamed)
    resident += sum(size_of(each) for each in model.buffers() if choice is not None or each.device == where)
    stay = sum(nbytes for name, nbytes in here.items() if name in trained and name not in waiting)
    wait = {name: size_of(model.get_parameter(name)) for name in waiting}
    found = [Part("resident weights and buffers", resident)]
    if choice is not None and streamed:
        sizes = sizes_of(choice)
        window = max(least_window(sizes), weights_bytes or 0)
        ways = "lower weights=", 'name fewer blocks, or quantize="int8"'
        found.append(Part("streamed weights", window, sum(size.arriving for size in sizes), ways))
    trained_wait = sum(size_of(model.get_parameter(name)) for name in waiting if name in trained)
    kept = 'gradients="host"' if stay else "", 'gradients="device"' if trained_wait else ""
    window = window_bytes(wait) if trained_wait else 0
    found.append(Part("gradients", stay + min(window, trained_wait), trained_wait, kept))
    if optimizer is not None:
        moved, lent = ([*map(model.get_parameter, names)] for names in (streamed, waiting))
        state, ring = host_and_device_bytes(optimizer, moved, lent)
        found.append(Part("optimizer state", ring, state, ("", "leave optimizer= out")))
    if device_limit_bytes is not None:
        found.append(Part("saved tensors", device_limit_bytes, 0, ("lower device_limit=", "")))
    return found


def sizes_of(choice: Choice) -> list[Size]:
    """Of the blocks of weights that stream."""
    found = choice.blocks.values()
    return [Size(sum(w.nbytes for w in each), sum(w.link_bytes for w in each)) for each in found]


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of the tensor, of a DTensor those of the own rank; 0 before a lazy one has a shape."""
    if is_lazy(tensor):  # which the first forward makes
        return 0
    found = local_of(tensor)
    return found.numel() * found.element_size()


def refuse_parts_beyond_device(parts: Sequence[Part], total_bytes: int, what: str) -> None:
    """As `refuse_beyond_device`."""
    ways = [part.instead[0] for part in parts if part.device_bytes and part.instead[0]]
    refuse_beyond_device([(part.kind, part.device_bytes) for part in parts], total_bytes, what, ways)


def refuse_beyond_device(
    sizes: Sequence[tuple[str, int]], total_bytes: int, what: str, ways: Sequence[str]
) -> None:
    """Raises ValueError where the device's total cannot have all of these. sizes: bytes, by kind. what: the
    total's name. ways: to need less."""
    needed = sum(nbytes for _, nbytes in sizes)
    if needed > total_bytes:
        raise ValueError(
            f"{what} is {bytes_text(total_bytes)}, and the parts need {bytes_text(needed)} of the device: "
            f"{_listed(sizes)}; "
            f"{' or '.join([f'give {enough_text(needed)} or more', *ways])}"
        )


def refuse_beyond_host(
    parts: Sequence[Part], engine: OffloadEngine | None, host_limit_bytes: int | None
) -> None:
    """Raises HostBudgetError where the host cannot have the parts. engine: the one that there is.
    host_limit_bytes: of its config from now on."""
    arena = None if engine is None else engine.arena
    lent = 0 if arena is None else arena.lent_bytes
    if host_limit_bytes is not None:
        limit, others = host_limit_bytes, 0
    elif arena is None:
        limit, others = default_host_limit_bytes(), 0
    else:
        limit, others = arena.budget.limit_bytes, arena.budget.used_bytes - arena.held_bytes
    needed = sum(part.host_bytes for part in parts)
    if needed and needed > limit - lent - others:
        on_loan = [("on loan already", lent + others)] * (lent + others > 0)
        ways = [part.instead[1] for part in parts if part.host_bytes and part.instead[1]]
        raise HostBudgetError(
            f"host_limit is {bytes_text(limit)}, and the parts need {bytes_text(needed + lent + others)} of "
            f"the host: {_listed([*((part.kind, part.host_bytes) for part in parts), *on_loan])}; raise "
            f"host_limit{''.join(f', {way}' for way in ways[:-1])}, or {ways[-1]}"
        )


def _listed(sizes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{kind} {bytes_text(nbytes)}" for kind, nbytes in sizes if nbytes)
