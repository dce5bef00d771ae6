"""An engine on a simulated device, with chunks and groups opened by hand: what the tests of transfers and of
saved tensors share.

Saved tensors really travel: a group is a pair of hooks around real autograd. `leave` makes compute wait for
the spills in flight, as the caps do in a long step; without it a short program finds every source still alive
and copies nothing back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from offload.client import Client
from offload.config import OffloadConfig
from offload.device.sim import ExecutorName, SimDevice
from offload.engine import OffloadEngine
from offload.ids import ChunkId, GroupId
from offload.memory.budget import HostBudget
from offload.saved.handles import Handle, SavedChunk, SavedGroup
from offload.saved.hooks import InstalledScope
from offload.telemetry.records import ClientStats, StepStats
from offload.transfer.block import BlockState, DeviceBlock
from offload.transfer.copier import Admission

EXECUTORS: tuple[ExecutorName, ...] = ("late", "early", "random", "clock")
KIB = 1024
ELEMENTS = KIB // 4
"""Of a float32 tensor of one KiB."""


def leaf(kib: int = 1) -> Tensor:
    return torch.randn(kib * ELEMENTS, requires_grad=True)


def chain(x: Tensor, length: int) -> Tensor:
    """Saves `length` tensors of the size of x, none of which anything else holds."""
    x = x * 2
    for _ in range(length):
        x = x.sin()
    return x


class GroupScope:
    """What autograd saves inside belongs to `group`."""

    def __init__(
        self,
        engine: OffloadEngine,
        chunk: SavedChunk,
        group: SavedGroup,
        min_elements: int,
        sizes: list[tuple[int, ...]],
    ) -> None:
        self.engine = engine
        self.chunk = chunk
        self.group = group
        self.sizes = sizes
        self.min_elements = min_elements

    def take(self, tensor: Tensor) -> Handle | None:
        self.sizes.append(tuple(tensor.size()))
        return self.engine.store.save(tensor, self.chunk, self.group)


class Rig(Client):
    """A client that saves tensors. piece_bytes=1 by default: every storage is a piece of its own, and leaves
    as soon as it is saved whole."""

    name = "groups"
    made: ClassVar[list[Rig]] = []
    """Those of a test that were not ended yet: they are behind it; see tests/fixtures.py."""

    def __init__(
        self,
        executor: ExecutorName = "late",
        *,
        seed: int = 0,
        device: SimDevice | None = None,
        admission: Admission | None = None,
        budget: HostBudget | None = None,
        **config: int | None,
    ) -> None:
        self.device = SimDevice(executor=executor, seed=seed) if device is None else device
        settings: dict[str, int | None] = {"piece_bytes": 1, **config}
        checked = OffloadConfig(**settings)  # type: ignore[arg-type]
        self.engine = OffloadEngine(checked, device=self.device, admission=admission, budget=budget)
        self.transfers = self.engine.transfers
        self.chunks: list[SavedChunk] = []
        self.groups: list[SavedGroup] = []
        self.sizes: list[tuple[int, ...]] = []  # of every tensor that was taken, one a save
        self.reads: list[str] = []  # labels of the records, one a read
        self.engine.attach(self)
        self.made.append(self)
        self.engine.on_read(lambda handle: self.reads.append(str(handle.record.block.label)))

    # -- saving ----------------------------------------------------------------------------------------------
    def chunk(self) -> SavedChunk:
        """The next microbatch's chunk; it is current from now on."""
        self.chunks.append(SavedChunk(ChunkId(0, len(self.chunks))))
        return self.chunks[-1]

    @contextmanager
    def group(
        self,
        name: str = "group",
        *,
        chunk: SavedChunk | None = None,
        min_elements: int = 0,
        leaves: bool = True,
        stays_from: int | None = None,
        commit: bool = True,
        stays: Callable[[torch.Tensor], bool] | None = None,
    ) -> Iterator[SavedGroup]:
        """The hooks of a new group of `chunk`, or of the current one; committed at the end. stays_from: the
        slot from which on it stays.

        stays: which saved tensors do, slot or not.
        """
        if chunk is None:
            chunk = self.chunks[-1] if self.chunks else self.chunk()
        group = SavedGroup(GroupId(chunk.id, len(self.groups), name), leaves=leaves, stays_from=stays_from)
        self.groups.append(group)
        installed: InstalledScope = self.engine.hooks.push(
            GroupScope(self.engine, chunk, group, min_elements, self.sizes), stays
        )
        try:
            yield group
        finally:
            self.engine.hooks.pop(installed)
        if commit:
            self.engine.store.commit(group)

    def leave(self) -> None:
        """Compute waits for every spill in flight: no transfer holds a source any more."""
        for group in self.groups:
            for transfer in group.transfers:
                self.transfers.settle_spill(transfer)

    def pump(self) -> None:
        """Fetch what the coming reads of the chunks want."""
        self.engine.prefetch.pump([chunk.coming for chunk in self.chunks])

    # -- looking ---------------------------------------------------------------------------------------------
    def blocks(self) -> list[DeviceBlock]:
        """Those that can be read, in the order in which they were made."""
        return [block for chunk in self.chunks for block in chunk.living()]

    def states(self) -> list[BlockState]:
        return [block.state for block in self.blocks()]

    @property
    def saved(self) -> int:
        """Records made in this step."""
        return self.transfers.counts.saved

    @property
    def spilled_bytes(self) -> int:
        """Bytes that went out so far."""
        return self.device.copied_bytes(self.device.d2h)

    @property
    def restored_bytes(self) -> int:
        """Bytes that came back so far."""
        return self.device.copied_bytes(self.device.h2d)

    # -- ending ----------------------------------------------------------------------------------------------
    def end_step(self) -> ClientStats:
        """As Client."""
        figures = self.engine.end_saves(self.chunks)
        self.chunks.clear()
        self.groups.clear()
        return figures

    def end(self) -> StepStats:
        """End the step, and check that nothing of it is left anywhere."""
        Rig.made = [each for each in Rig.made if each is not self]
        stats = self.engine.end_step()
        self.assert_empty()
        assert stats.saved == stats.kept + stats.spilled
        return stats

    def assert_empty(self) -> None:
        transfers = self.transfers
        assert (transfers.resident_bytes, transfers.spilling_bytes, transfers.restoring_bytes) == (0, 0, 0)
        assert transfers.in_flight() == (0, 0)
        arena = self.engine.arena.stats()
        assert (arena.lent, arena.lent_bytes) == (0, 0)


def gradients(
    program: Callable[..., Tensor], inputs: Sequence[Tensor], rig: Rig | None = None
) -> list[Tensor]:
    """Of the sum of `program(*inputs)`; with a rig, what it saves leaves in one group and is gone before the
    backward."""
    if rig is None:
        result = program(*inputs)
    else:
        with rig.group():
            result = program(*inputs)
        rig.leave()
    return list(torch.autograd.grad(result.sum(), [value for value in inputs if value.requires_grad]))


def assert_equal_bits(expected: Sequence[Tensor], found: Sequence[Tensor]) -> None:
    """Same size, strides, dtype and bits."""
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert (one.size(), one.stride(), one.dtype) == (other.size(), other.stride(), other.dtype), (
            f"tensor {number}"
        )
        assert torch.equal(bits(one), bits(other)), f"tensor {number} differs"


def bits(tensor: Tensor) -> Tensor:
    """The elements as bytes: NaN and -0.0 count as what they are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
