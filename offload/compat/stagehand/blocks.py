"""Which blocks there are, where each one's bytes are, who uses it, and what its outputs are looked at for:
their dtype, and NaN or Inf in them.

Two invariants: after `validate` a registry never changes, and a block moves along `MOVES` only, never off the
device while somebody uses it. The host never waits for a count of NaN.

    UNLOADED      on the host alone        PREFETCHING   on its way to the device
    HOST_STAGED   its master is whole,     GPU_READY     on the device, for whoever waits for its event
                  and about to be read     EVICTING      off the device; what was written is on its way back
                                           GPU_FREEING   off the device without a copy
"""

from __future__ import annotations

import re
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from offload.compat.stagehand.config import StagehandConfig
from offload.errors import DtypeMismatchError, InvalidStateTransitionError, OffloadError, OffloadOOMError
from offload.modules.blocks import find_blocks, flat, without_nested
from offload.modules.weights import chosen_weights
from offload.telemetry.speaker import Once, speaker
from offload.weights.choose import Choice


class BlockState(Enum):
    UNLOADED = "unloaded"
    HOST_STAGED = "host_staged"
    PREFETCHING = "prefetching"
    GPU_READY = "gpu_ready"
    EVICTING = "evicting"
    GPU_FREEING = "gpu_freeing"


MOVES: dict[BlockState, frozenset[BlockState]] = {
    BlockState.UNLOADED: frozenset({BlockState.HOST_STAGED}),
    BlockState.HOST_STAGED: frozenset({BlockState.PREFETCHING}),
    BlockState.PREFETCHING: frozenset({BlockState.GPU_READY}),
    BlockState.GPU_READY: frozenset({BlockState.EVICTING, BlockState.GPU_FREEING}),
    BlockState.EVICTING: frozenset({BlockState.HOST_STAGED, BlockState.UNLOADED}),
    BlockState.GPU_FREEING: frozenset({BlockState.UNLOADED}),
}

_LEAVING = (BlockState.EVICTING, BlockState.GPU_FREEING)


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """
    | name | |
    |---|---|
    | block_id | qualified name of its module |
    | module_ref | weak reference to it |
    | size_bytes | of its weights that stream |
    | dtypes | of them |
    | exec_order | position in the order of use |
    | group | label |
    | param_layout | of each weight: name, shape, dtype, offset in the block's bytes, number of elements |
    """

    block_id: str
    module_ref: weakref.ref[nn.Module]
    size_bytes: int
    dtypes: frozenset[torch.dtype]
    exec_order: int
    group: str
    param_layout: tuple[tuple[str, torch.Size, torch.dtype, int, int], ...]


class BlockRegistry:
    """Blocks in the order of their use. Built from a model, then validated, then for reading only."""

    def __init__(self) -> None:
        self._entries: dict[str, BlockEntry] = {}
        self._validated = False
        self.choice = Choice()

    def build_from_model(
        self,
        model: nn.Module,
        block_pattern: str | Sequence[nn.Module] | None,
        where: torch.device,
        group: str = "transformer",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take the blocks of a model that have weights which stream to `where`. block_pattern: a regular
        expression that is found in their names, the modules themselves, or None, which finds runs of
        neighbours. dtype: that all their weights have; None: any.

        Raises ValueError where nothing matches or streams, DtypeMismatchError for a weight of another dtype,
        OffloadError after `validate`. Nothing has moved.
        """
        if self._validated:
            raise OffloadError(f"this registry of {len(self)} blocks was validated; build another one")
        modules = _modules_of(model, block_pattern)
        self.choice, _ = chosen_weights(model, modules, where)
        for number, (name, weights) in enumerate(self.choice.blocks.items()):
            for weight in weights:
                if dtype not in (None, weight.parameter.dtype):
                    raise DtypeMismatchError(
                        f"{weight.name} is {weight.parameter.dtype}, and the runtime was given {dtype}: "
                        "convert the model first, or leave dtype out"
                    )
            ends = [*accumulate((weight.link_bytes for weight in weights), initial=0)]
            placed = [(w.name, w.parameter, start) for w, start in zip(weights, ends, strict=False)]
            layout = tuple((name, p.shape, p.dtype, start, p.numel()) for name, p, start in placed)
            dtypes = frozenset(weight.parameter.dtype for weight in weights)
            module = weakref.ref(modules[name])
            self._entries[name] = BlockEntry(name, module, ends[-1], dtypes, number, group, layout)

    def validate(self, pool_capacity_bytes: int) -> None:
        """From here on it never changes. Raises OffloadOOMError for a block that the pool cannot hold."""
        for entry in self:
            if entry.size_bytes > pool_capacity_bytes:
                raise OffloadOOMError(
                    f"block {entry.block_id} has {entry.size_bytes:,} bytes, and the pinned pool "
                    f"{pool_capacity_bytes:,}: raise pinned_pool_mb, or name smaller blocks"
                )
        self._validated = True

    def in_order(self, block_ids: Sequence[str]) -> BlockRegistry:
        """Another one, validated, of the same blocks in the order that was seen; unseen ones last."""
        other = BlockRegistry()
        other.choice, other._validated = self.choice, True
        for number, name in enumerate(dict.fromkeys((*block_ids, *self._entries))):
            other._entries[name] = replace(self._entries[name], exec_order=number)
        return other

    def blocks_in_order(self) -> list[BlockEntry]:
        return [*self._entries.values()]

    def __getitem__(self, block_id: str) -> BlockEntry:
        """Raises ValueError for a block that is not there."""
        if block_id not in self._entries:
            known = ", ".join([*self._entries][:8])
            raise ValueError(f"{block_id!r} is none of the {len(self)} blocks: {known}")
        return self._entries[block_id]

    def __iter__(self) -> Iterator[BlockEntry]:
        return iter(self.blocks_in_order())

    def __len__(self) -> int:
        return len(self._entries)


def _modules_of(model: nn.Module, given: str | Sequence[nn.Module] | None) -> dict[str, nn.Module]:
    if given is None:
        groups = find_blocks(model)
    else:
        wanted = set() if isinstance(given, str) else {id(module) for module in given}
        groups = {"blocks": {}}
        for name, module in model.named_modules():
            if name and (re.search(given, name) if isinstance(given, str) else id(module) in wanted):
                groups["blocks"][name] = module
        if not groups["blocks"] or len(groups["blocks"]) < len(wanted):
            raise ValueError(
                f"block_pattern names {len(groups['blocks'])} of {len(wanted) or 'the'} modules inside "
                f"{type(model).__name__}, such as {', '.join(list(dict(model.named_modules()))[1:6])}; give "
                "a regular expression that is found in names, or modules of this model"
            )
    return flat(without_nested(groups))


@dataclass(slots=True)
class ResidencyEntry:
    """last_used_step: -1 before the first use."""

    state: BlockState = BlockState.UNLOADED
    refcount: int = 0
    last_used_step: int = -1


class ResidencyMap:
    """The state of each block, how many use it, and which are protected. Every method that changes a state or
    a count raises InvalidStateTransitionError for what may not be, and has changed nothing then."""

    def __init__(self, registry: BlockRegistry) -> None:
        self.entries = {entry.block_id: ResidencyEntry() for entry in registry}
        self._protected: defaultdict[str, list[int]] = defaultdict(list)

    def transition(self, block_id: str, state: BlockState) -> None:
        """Along `MOVES`, and off the device only where nobody uses it."""
        entry = self.entries[block_id]
        self._require(state in MOVES[entry.state], block_id, f"become {state.value}")
        self._require(entry.refcount == 0 or state not in _LEAVING, block_id, "leave before after_block")
        entry.state = state

    def increment_refcount(self, block_id: str) -> None:
        """Count one more user of a block on the device."""
        self._require(self.entries[block_id].state is BlockState.GPU_READY, block_id, "be used")
        self.entries[block_id].refcount += 1

    def decrement_refcount(self, block_id: str) -> None:
        """Count one user less, not below 0."""
        self._require(self.entries[block_id].refcount > 0, block_id, "be released without before_block")
        self.entries[block_id].refcount -= 1

    def _require(self, able: bool, block_id: str, what: str) -> None:
        entry = self.entries[block_id]
        if not able:
            raise InvalidStateTransitionError(
                f"block {block_id} is {entry.state.value}, used {entry.refcount} times, and cannot {what}; "
                f"it can become {' or '.join(sorted(move.value for move in MOVES[entry.state]))}"
            )

    def protect_blocks(self, block_ids: Iterable[str], rank: int = 2) -> None:
        """Keep them on the device, once more. rank: the higher ones leave last where there is no choice."""
        for block_id in block_ids:
            self._protected[block_id].append(rank)

    def unprotect_blocks(self, block_ids: Iterable[str], rank: int = 2) -> None:
        """Undo one `protect_blocks`."""
        for block_id in block_ids:
            if rank in self._protected[block_id]:
                self._protected[block_id].remove(rank)

    def protection(self, block_id: str) -> int:
        """0 for none."""
        return max(self._protected[block_id], default=0)

    def eviction_candidates(self, current_step: int, cooldown_steps: int) -> list[str]:
        """Blocks that may leave, of which the last use is at least so many steps ago."""
        able = [name for name in self.entries if self._may_leave(name) and not self.protection(name)]
        latest = current_step - cooldown_steps
        return [name for name in able if self.entries[name].last_used_step <= latest]

    def protected_eviction_candidates(self) -> list[str]:
        """The last resort: protected blocks that nobody uses, least protected and longest unused first."""
        able = [name for name in self.entries if self._may_leave(name) and self.protection(name)]
        return sorted(able, key=lambda name: (self.protection(name), self.entries[name].last_used_step))

    def _may_leave(self, block_id: str) -> bool:
        entry = self.entries[block_id]
        return entry.refcount == 0 and entry.state in (BlockState.GPU_READY, BlockState.PREFETCHING)


logger = speaker(__name__)


class NumericGuard:
    """Looks at the outputs of a registry's blocks. where: the device that they are on."""

    def __init__(self, config: StagehandConfig, registry: BlockRegistry, where: torch.device) -> None:
        self._config = config
        self._rows = {entry.block_id: row for row, entry in enumerate(registry)}
        with torch.inference_mode(False):
            self._counts = torch.zeros(len(self._rows), 2, dtype=torch.int64, device=where)
        self._said = Once()

    def check(self, entry: BlockEntry, output: Any) -> int:
        """Look at an output of a block; how many tensors of it are wider than its weights. Raises
        DtypeMismatchError as the config says. Inside a transform of torch.func nothing is looked at."""
        config, promotions = self._config, 0
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return 0
        for found in tree_leaves(output):
            if not (isinstance(found, Tensor) and found.is_floating_point()):
                continue
            wider = all(found.dtype.itemsize > dtype.itemsize for dtype in entry.dtypes)
            other = entry.dtypes == {torch.bfloat16} and found.dtype != torch.bfloat16
            if (wider and config.fail_on_dtype_promotion) or (other and config.strict_bf16):
                raise DtypeMismatchError(
                    f"block {entry.block_id} has weights in {', '.join(map(str, entry.dtypes))} and an "
                    f"output in {found.dtype}: cast it in the block, or give fail_on_dtype_promotion=False "
                    "and strict_bf16=False"
                )
            promotions += wider
            if config.nan_inf_check and found.device == self._counts.device:
                with torch.no_grad():
                    counts = torch.stack((found.isnan().sum(), found.isinf().sum()))
                    self._counts[self._rows[entry.block_id]] += counts
        return promotions

    def take(self) -> Tensor:
        """Counts since the last call, a row a block, NaN and Inf: on the host once the current lane has got
        here."""
        with torch.inference_mode(False):
            found = self._counts.to("cpu", non_blocking=True, copy=True)
            self._counts.zero_()
        return found

    def total(self, counts: Tensor) -> tuple[int, int]:
        """NaN and Inf of all blocks, which are on the host by now; the first block that has any is said
        once."""
        for name, (nan, inf) in zip(self._rows, counts.tolist(), strict=True):
            if (nan or inf) and self._said.first("not finite"):
                logger.warning(
                    "an output of block %s had %d NaN and %d infinite elements in a step: the first block, "
                    "in their order, that had any. Look at its input, its weights and the learning rate; "
                    "nan_inf_check=False counts none",
                    *(name, nan, inf),
                )
        nan, inf = counts.sum(0).tolist()
        return nan, inf
