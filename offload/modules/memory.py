"""How much memory a model's step takes: what the parts of one `apply` will take of the device and of the
host, whether the totals that were given have it, and in which phase of a step the device's memory is highest,
with what is saved there outside of the blocks: what a mode that changes only the blocks cannot lower.

Two invariants: nothing is counted that a step might do without, so what is refused here cannot run; and it is
refused before anything has moved. `PeakWatch` looks, in the first steps after `apply`, and changes nothing.
torch's peak only rises, so the phase in which it rose last is the one. A run that was higher before `apply`
hides it; then nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

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
    """Bytes of the blocks of weights that stream."""
    found = choice.blocks.values()
    return [Size(sum(w.nbytes for w in each), sum(w.link_bytes for w in each)) for each in found]


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of the tensor, of a DTensor those of the own rank; 0 before a lazy one has a shape."""
    if is_lazy(tensor):  # which the first forward makes
        return 0
    found = local_of(tensor)
    return found.numel() * found.element_size()


def refuse_parts_beyond_device(parts: Sequence[Part], total_bytes: int, what: str) -> None:
    """Raise what `refuse_beyond_device` raises, for these parts."""
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


BLOCKS: Final = "the forward, up to the last block"
HEAD: Final = "the head and the loss, after the last block"
BACKWARD: Final = "the backward of the blocks"
OPTIMIZER: Final = "the optimizer's step"

_STEPS = 2  # in the first the optimizer makes its state


def device_peak_bytes(device: torch.device | None = None) -> int | None:
    """Active bytes at most since torch began to count, of the current GPU where `device` is none. None where
    there is no GPU. Blocks the host: never."""
    if not torch.cuda.is_available():
        return None
    where = device if device is not None and device.type == "cuda" else None
    return int(torch.cuda.memory_stats(where).get("active_bytes.all.peak", 0))


class PeakWatch:
    """Scope that takes nothing: it sees what is saved outside of the blocks."""

    min_elements = 1

    def __init__(self, has_blocks: bool) -> None:
        peak_bytes = device_peak_bytes() if has_blocks else None
        self._peak_bytes = peak_bytes or 0
        self._phase: str | None = None  # the one under way
        self._highest: str | None = None
        self._largest: dict[str, tuple[int, str]] = {}  # by phase: bytes, and what
        self._steps_left = 0 if peak_bytes is None else _STEPS
        self._ends_before: int | None = None

    @property
    def is_over(self) -> bool:
        return self._steps_left == 0

    def begins(self, phase: str) -> None:
        """The phase before ends."""
        if self.is_over:
            return
        peak_bytes = device_peak_bytes() or 0
        if peak_bytes > self._peak_bytes:
            self._peak_bytes, self._highest = peak_bytes, self._phase
        self._phase = phase

    def forward_begins(self, ends_by_hand: int) -> bool:
        """Predicate: the watch takes this forward. ends_by_hand: of steps, so far: they tell that the first
        ones are over where no optimizer of torch steps. While it watches, no block is left alone with its
        hooks."""
        if self._ends_before is None:
            self._ends_before = ends_by_hand
        elif ends_by_hand - self._ends_before > _STEPS:
            self._steps_left = 0
        self.begins(BLOCKS)
        return not self.is_over

    def step_ends(self) -> None:
        if not self.is_over:
            self.begins(OPTIMIZER)
            self._steps_left -= 1

    def take(self, tensor: torch.Tensor) -> None:
        """Note the largest of a phase."""
        nbytes = math.prod(tensor.shape) * tensor.element_size()
        if self._phase is not None and nbytes > self._largest.get(self._phase, (0, ""))[0]:
            what = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            self._largest[self._phase] = nbytes, what

    def note_replayed(self, tensor: torch.Tensor) -> None:
        """Nothing: such memory is not the model's."""

    def text(self) -> str:
        """Phase and bytes of the peak, as text; "" where that is not known."""
        if self._highest is None:
            return ""
        found = f"Device memory is highest, {bytes_text(self._peak_bytes)} active, in {self._highest}"
        nbytes, what = self._largest.get(self._highest, (0, ""))
        if nbytes:
            found += f"; the largest tensor saved there outside of the blocks is {what}, {bytes_text(nbytes)}"
        return found
