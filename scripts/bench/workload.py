"""The block stack and the step orders that every row runs: the same weights, the same bytes, the same
actions.

Five workloads, after the ones that activation offload is usually judged by:

    W1  one forward and one backward, 12 layers, sequence 16384, gradients freed before each step
    W2  rank 0 of 4 under 1F1B on one device, 8 microbatches, 8 layers, sequence 16384, gradients stay
    W3  one forward and one backward, 8 layers, sequence 65536, gradients stay
    W5  small operators: rank 0 of 4 under 1F1B, 16 microbatches, 16 layers of hidden 2048, ffn 5632, 16 query
        and 4 key/value heads of 128, sequence 2048, gradients stay. A forward saves 2.35 GB, a step 37.6 GB
    WV  W2 with lengths that vary: each step has 6 to 8 microbatches, each of half the sequence to all of it,
        drawn by the step's number, so that every row has the same steps

(W4 is the optimizer's, in optim_work.py.)

One invariant: the marks in a block cover every tensor that autograd saves in it, and without marks the block
is plain torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from offload.policy.actions import Action, one_f_one_b

GROUPS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_act", "mlp_fc2")
ATTENTION_GROUPS = ("core_attn", "attn_proj")
BLOCK_INPUT = "block_input"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackShape:
    layers: int
    sequence: int
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    shape: StackShape
    actions: tuple[Action, ...]
    keep_gradients: bool
    """Gradients stay allocated and are zeroed; otherwise they are freed before each step."""
    samples: int
    warmup: int
    host_samples: int = 0
    """Steps after the timed ones whose Python calls are timed with the device drained before each action.
    With any, the host's time of a row is the least of these and of the timed steps."""
    fewest_microbatches: int | None = None
    """Of a workload whose lengths vary; `actions` has the most."""

    def drawn(self, number: int) -> Drawn:
        """The step of this number."""
        if self.fewest_microbatches is None:
            return Drawn(self.actions, None)
        draws = random.Random(number)
        microbatches = draws.randint(self.fewest_microbatches, len(self.actions) // 2)
        sequence = self.shape.sequence
        by = max(1, sequence // 64)
        lengths = tuple(draws.randrange(sequence // 2, sequence + 1, by) for _ in range(microbatches))
        return Drawn(one_f_one_b(0, 4, microbatches), lengths)


class Drawn(NamedTuple):
    """One step. lengths: tokens of each microbatch; None where each has the whole sequence."""

    actions: tuple[Action, ...]
    lengths: tuple[int, ...] | None


_ONE_PASS = one_f_one_b(0, 1, 1)
_WORKLOADS = {
    "W1": Workload(
        name="W1",
        shape=StackShape(layers=12, sequence=16384),
        actions=_ONE_PASS,
        keep_gradients=False,
        samples=10,
        warmup=8,
    ),
    "W2": Workload(
        name="W2",
        shape=StackShape(layers=8, sequence=16384),
        actions=one_f_one_b(0, 4, 8),
        keep_gradients=True,
        samples=5,
        warmup=7,
    ),
    "W3": Workload(
        name="W3",
        shape=StackShape(layers=8, sequence=65536),
        actions=_ONE_PASS,
        keep_gradients=True,
        samples=5,
        warmup=1,
    ),
    "W5": Workload(
        name="W5",
        shape=StackShape(layers=16, sequence=2048, hidden=2048, ffn=5632, heads=16, kv_heads=4),
        actions=one_f_one_b(0, 4, 16),
        keep_gradients=True,
        samples=10,
        warmup=7,
        host_samples=5,
    ),
    "WV": Workload(
        name="WV",
        shape=StackShape(layers=8, sequence=16384),
        actions=one_f_one_b(0, 4, 8),
        keep_gradients=True,
        samples=20,
        warmup=2,
        fewest_microbatches=6,
    ),
}


def workload(name: str, *, layers: int | None = None, sequence: int | None = None) -> Workload:
    if name not in _WORKLOADS:
        raise ValueError(f"workload is {name!r}, must be one of {', '.join(_WORKLOADS)}")
    found = _WORKLOADS[name]
    shape = replace(
        found.shape, layers=layers or found.shape.layers, sequence=sequence or found.shape.sequence
    )
    return replace(found, shape=shape)


def tiny(name: str, *, layers: int | None = None, sequence: int | None = None) -> Workload:
    """The same actions on a stack that a CPU runs in milliseconds."""
    shape = StackShape(
        layers=layers or 2, sequence=sequence or 32, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16
    )
    found = workload(name)
    return replace(found, shape=shape, samples=2, warmup=1, host_samples=min(1, found.host_samples))


def live_peak_chunks(actions: Sequence[Sequence[Any]]) -> int:
    """The most forwards whose backward has not ended, over the step of (kind, stage, microbatch)."""
    live = peak = 0
    for kind, *_ in actions:
        live += {"F": 1, "B": -1, "W": -1}.get(kind, 0)
        peak = max(peak, live)
    return peak


class Marks(Protocol):
    """How a block tells an offload engine where a group starts and ends."""

    def start(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...

    def hooks(self) -> AbstractContextManager[Any]: ...

    def commit(self, tensor: torch.Tensor, name: str) -> torch.Tensor: ...


class Block(nn.Module):
    """RMSNorm, grouped-query attention, RMSNorm, gated MLP, two residuals; no bias, no dropout."""

    def __init__(self, shape: StackShape, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.shape = shape
        self.attn_norm = nn.RMSNorm(shape.hidden, eps=1e-5, **where)
        self.q = nn.Linear(shape.hidden, shape.heads * shape.head_dim, bias=False, **where)
        self.k = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False, **where)
        self.v = nn.Linear(shape.hidden, shape.kv_heads * shape.head_dim, bias=False, **where)
        self.output = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False, **where)
        self.mlp_norm = nn.RMSNorm(shape.hidden, eps=1e-5, **where)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False, **where)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False, **where)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False, **where)
        self.marks: Marks | None = None
        self.marked: frozenset[str] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Names are reused and deleted: a local that outlives its last use would hold bytes that the engine
        # has already moved.
        x = self._start("attn_norm", x)
        part = self._group("attn_norm", self.attn_norm, x)
        q, k, v = self._group("qkv_linear", self._qkv, self._start("qkv_linear", part))
        q = self._start("core_attn", q)
        part = self._group("core_attn", self._attention, q, k, v)
        del q, k, v
        x = self._group("attn_proj", self._project, self._start("attn_proj", part), x)
        x = self._start("mlp_norm", x)
        part = self._group("mlp_norm", self.mlp_norm, x)
        part = self._group("mlp_act", self._gated, self._start("mlp_act", part))
        return self._group("mlp_fc2", self._down, self._start("mlp_fc2", part), x)

    def _start(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.marks is None or name not in self.marked else self.marks.start(tensor, name)

    def _group(self, name: str, compute: Callable[..., Any], *inputs: torch.Tensor) -> Any:
        marks = self.marks
        if marks is None or name not in self.marked:
            return compute(*inputs)
        with marks.hooks():
            made = compute(*inputs)
        if isinstance(made, tuple):
            return (marks.commit(made[0], name), *made[1:])
        return marks.commit(made, name)

    def _qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q(x), self.k(x), self.v(x)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = q.shape
        q, k, v = (t.view(batch, sequence, -1, self.shape.head_dim).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(batch, sequence, -1)

    def _project(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.output(attended)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.gate(x)) * self.up(x)

    def _down(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self.down(x)


class Stack(nn.Module):
    """The layers of one stage, with seeded weights: two processes build the same bits."""

    def __init__(
        self, shape: StackShape, device: torch.device, dtype: torch.dtype, *, seed: int = 1234
    ) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(Block(shape, device, dtype) for _ in range(shape.layers))
        generator = torch.Generator(device=device).manual_seed(seed)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, 0.02, generator=generator)

    def mark(self, marks: Marks | None, names: Sequence[str] = GROUPS) -> None:
        for block in self.blocks:
            assert isinstance(block, Block)
            block.marks, block.marked = marks, frozenset(names)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Inputs:
    """The stage's inputs and the gradients of its outputs, as an embedding and the next stage would give
    them.

    Each microbatch gets other values in a new storage that only the graph holds; a mix-up of two microbatches
    changes gradients.
    """

    def __init__(self, shape: StackShape, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device=device).manual_seed(99)
        size = (1, shape.sequence, shape.hidden)
        self.source = torch.randn(size, device=device, dtype=dtype, generator=generator).requires_grad_()
        self.output_grad = torch.randn(size, device=device, dtype=dtype, generator=generator).mul_(1e-3)

    def of(self, microbatch: int, length: int | None = None) -> torch.Tensor:
        # an operation on a leaf, not a leaf: the graph's node of a leaf would hold its bytes on the device
        # whatever leaves
        return torch.roll(self.source[:, :length], shifts=3 * microbatch + 1, dims=1)


@dataclass(slots=True)
class GroupBytes:
    """What one group of one layer saves: distinct storages that belong to no parameter."""

    nbytes: int = 0
    movable_bytes: int = 0
    storages: int = 0
    saves: int = 0


class _Recorder:
    """Marks that count what autograd saves in each group."""

    def __init__(self, parameters: set[int], min_elements: int) -> None:
        self.groups: dict[str, GroupBytes] = {name: GroupBytes() for name in GROUPS}
        self._parameters = parameters
        self._min_elements = min_elements
        self._seen: dict[int, torch.UntypedStorage] = {}
        self._current = ""

    def start(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        self._current = name
        return tensor

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept)

    def commit(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        return tensor

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._parameters or storage.nbytes() == 0:
            return tensor.detach()
        group = self.groups[self._current]
        group.saves += 1
        if storage.data_ptr() not in self._seen:
            self._seen[storage.data_ptr()] = storage  # held: a freed storage's address could be another's
            group.storages += 1
            group.nbytes += storage.nbytes()
            if tensor.numel() >= self._min_elements:
                group.movable_bytes += storage.nbytes()
        return tensor.detach()  # the tensor itself would hold the graph that holds it


def probe_saved_bytes(stack: Stack, x: torch.Tensor, min_elements: int) -> dict[str, GroupBytes]:
    """What one layer saves, group by group, from one real forward of the first block."""
    recorder = _Recorder({p.untyped_storage().data_ptr() for p in stack.parameters()}, min_elements)
    block = stack.blocks[0]
    assert isinstance(block, Block)
    before = (block.marks, block.marked)
    block.marks, block.marked = recorder, frozenset(GROUPS)
    try:
        block(x)
    finally:
        block.marks, block.marked = before
    return recorder.groups
