"""One recompute a half of a split backward, or one for both.

torch's W runs a backward for each group of parameters, so a checkpoint computes a block again once for
each: seven times for a block of two norms and five linears with one recompute in its I. Each of them leaves
on the device what it does not read, until the whole W has ended. Here a half unpacks all saves of a call with
its first read. The other reads of that half find them; and what the W will read the I may leave for it.

    split = SplitCall(reads)
    with split.hooks():       # inside the region's own
        ...                   # the forward

One invariant: what a read gives is what the region gave, from one recompute or from another. A whole
backward passes through.

A graph task gets each save once from one recompute. So nothing that a task may still read is let go before it
has ended: in a W that is when another task reads another call.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Collection
from typing import Any, Protocol

import torch

from offload.checkpoint.kept import storages_of
from offload.saved.handles import is_read

_graph_task = torch._C._current_graph_task_id


class Reads(Protocol):
    """What the groups know of the backward of one call. Callers hold no lock."""

    @property
    def half(self) -> str:
        """ "I" or "W" while that half of the chunk's backward runs, else empty."""

    def begin(self, call: SplitCall, num_saves: int) -> Collection[int]:
        """A half reads the call for the first time. Returns the numbers of the saves that an I is to
        leave."""

    def leave(self, nbytes: int) -> None:
        """An I leaves so many bytes for its W."""

    def weight_half_read(
        self, saves: Collection[int], num_saves: int, nbytes: int, passed_bytes: int
    ) -> None:
        """A W is done with the call. nbytes: of what it read, without parameters. passed_bytes: of these,
        what the I did not read."""


class _Save:
    """What autograd keeps of one save. held: what the checkpoint gave for it."""

    __slots__ = ("__weakref__", "held", "number")

    def __init__(self, number: int, held: Any) -> None:
        self.number = number
        self.held = held


class SplitCall:
    """One call of `module`, inside a `Region`."""

    def __init__(self, reads: Reads, module: torch.nn.Module) -> None:
        self._reads = reads
        self._module = weakref.ref(module)
        self._saves: list[weakref.ref[_Save]] = []
        self._unpack: Any = None
        self._half = ""
        self._task = -1  # that read last
        self._made: dict[int, torch.Tensor] = {}  # computed again, by number
        self._sizes: dict[int, dict[int, int]] = {}  # of those, bytes by storage; none of parameters
        self._wanted: Collection[int] = ()  # what the I that runs leaves
        self._read: set[int] = set()  # in the half that runs
        self._passed: set[int] = set()  # of these, what the I asks for and does not read
        self._passed_bytes = 0

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """To enter inside the checkpoint's pair, which has to be the innermost one, and to leave before
        it."""
        pack, self._unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)
        saves = self._saves

        @functools.wraps(pack)  # still the checkpoint's, to whoever looks at the innermost pair
        def packed(tensor: torch.Tensor) -> _Save:
            save = _Save(len(saves), pack(tensor))
            saves.append(weakref.ref(save))
            return save

        return torch.autograd.graph.saved_tensors_hooks(packed, self._read_save)

    def let_go(self, *, ended: bool) -> bool:
        """Another call is read, or the half has `ended`: keep only what an I leaves. False if the task under
        way may still read something."""
        if not ended and self._task == _graph_task():
            return False
        if self._half == "W":
            self._made.clear()
            nbytes = self._nbytes(self._read)
            self._reads.weight_half_read(
                frozenset(self._read), len(self._saves), nbytes, min(nbytes, self._passed_bytes)
            )
        else:
            self._passed_bytes = self._nbytes(self._read) - self._nbytes(self._read - self._passed)
            self._made = {number: self._made[number] for number in self._wanted if number in self._made}
        self._half, self._wanted, self._task = "", (), -1
        return True

    def _read_save(self, save: _Save) -> Any:
        half = self._reads.half
        if not half:
            return self._unpack(save.held)
        if half == "W" and not is_read(save, SplitCall):
            # a weight, most likely: an I that left an alias of it would keep a streamed block on the device
            self._made.pop(save.number, None)
            shape, dtype, _ = save.held.looks
            return torch.empty(shape, dtype=dtype, device="meta")
        if half != self._half:
            self._wanted = self._reads.begin(self, len(self._saves))
            self._half = half
            self._read, self._passed = set(), set()
        self._task = _graph_task()
        if save.number not in self._made:
            self._compute_again()
        self._read.add(save.number)
        if half == "I" and not is_read(save, SplitCall):
            self._passed.add(save.number)
        # each is read once in a half, and goes as it does in torch's
        return self._made[save.number] if save.number in self._wanted else self._made.pop(save.number)

    def _compute_again(self) -> None:
        """Unpack whatever a graph still holds: the checkpoint computes it with the first. What is there
        already is the same."""
        module = self._module()
        parameters = [] if module is None else list(module.parameters())
        known = {storage._cdata for storage in storages_of(parameters)}
        for number, reference in enumerate(self._saves):
            save = reference()
            if save is not None and number not in self._made:
                made = self._made[number] = self._unpack(save.held)
                self._sizes[number] = {
                    storage._cdata: storage.nbytes()
                    for storage in storages_of(made)
                    if storage._cdata not in known
                }
        if self._wanted:
            self._reads.leave(self._nbytes(self._wanted))

    def _nbytes(self, numbers: Collection[int]) -> int:
        """Bytes of the storages that these saves are of, without parameters."""
        found: dict[int, int] = {}
        for number in numbers:
            found |= self._sizes.get(number, {})
        return sum(found.values())
