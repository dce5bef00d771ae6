"""A training job in numbers: which rank runs which layers, and what it holds before a forward runs.

One invariant: ranks that differ in their place in data or tensor parallelism alone are one position, counted
once; a position is a rank of the pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.policy.actions import Action

from .costs import Piece, piece_of
from .models import ModelShape
from .rates import Gpu
from .reference import Cut, Embedding, Head, Layer, adapt
from .simulate import Messages
from .trace import trace, trace_halves

WEIGHT_BYTES = 2
"""bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is asked. Bytes are of one GPU unless said."""

    model: ModelShape
    gpu: Gpu
    cut: Cut
    orders: tuple[tuple[Action, ...], ...]
    """What each rank of the pipeline computes in one step."""
    messages: Messages | None = None
    """When each rank comes to which message; None for a schedule that sends when an action has ended."""
    one_line: bool = False
    """All messages of a rank wait for one another, not only those with the same rank."""
    dp: int = 1
    zero: int = 1
    """1: optimizer state is cut over the replicas; 0: each holds all."""
    gradient_bytes: int = 2
    """Bytes of one element: 2, as torch makes them for bfloat16 weights; 4 where they are added up in
    float32."""
    optimizer_bytes: int = 12
    """Bytes of one parameter: a float32 master and AdamW's two moments."""
    lora: int = 0
    """Rank of the adapters of each linear layer of a block; all else is frozen then. 0: all is trained."""
    gpus_per_host: int = 8
    other_bytes: int = 0
    """What else lies on the device: a library's workspaces, buffers of collectives, inputs."""
    device_total_bytes: int | None = None
    """None: all that the GPU has."""
    host_bytes: int | None = None
    """What all ranks of a host may pin; None: no limit."""

    def __post_init__(self) -> None:
        self.cut.check(self.model)
        if self.lora and (self.ranks > 1 or self.model.experts):
            raise ValueError(f"--lora {self.lora} is of one GPU and of a model without experts")
        if self.zero not in (0, 1):
            raise ValueError(f"--zero is {self.zero}; 0 and 1 are described")
        if self.gradient_bytes not in (2, 4):
            raise ValueError(f"gradients of {self.gradient_bytes} bytes; give 2 or 4")
        if min(self.dp, self.gpus_per_host) < 1:
            raise ValueError(f"--dp {self.dp}, --gpus-per-host {self.gpus_per_host}; both must be at least 1")
        if self.cut.ep > self.dp * self.cut.tp or (self.dp * self.cut.tp) % self.cut.ep:
            raise ValueError(
                f"--ep {self.cut.ep} does not divide the {self.dp * self.cut.tp} ranks of a stage (--dp x "
                "--tp)"
            )
        if self.num_stages > self.model.layers:
            raise ValueError(
                f"{self.model.name}: {self.model.layers} layers cannot be cut into {self.num_stages} stages; "
                "take fewer ranks or virtual stages"
            )

    @property
    def pp(self) -> int:
        return len(self.orders)

    @property
    def ranks(self) -> int:
        return self.pp * self.cut.tp * self.dp

    @property
    def num_stages(self) -> int:
        return 1 + max(action.stage for order in self.orders for action in order)

    @property
    def limit_bytes(self) -> int:
        """The device's total."""
        return self.gpu.memory_bytes if self.device_total_bytes is None else self.device_total_bytes

    @property
    def ranks_of_host(self) -> int:
        return min(self.gpus_per_host, self.ranks)

    def positions_of_host(self, rank: int) -> dict[int, int]:
        """How many ranks of which position lie on the host of position `rank`. Tensor parallel ranks are
        neighbours, then replicas, then stages."""
        of_stage = self.cut.tp * self.dp
        if of_stage >= self.gpus_per_host:
            return {rank: self.gpus_per_host}
        stages = self.gpus_per_host // of_stage
        first = rank // stages * stages
        return dict.fromkeys(range(first, min(first + stages, self.pp)), of_stage)

    def send_s(self, sender: int, receiver: int) -> float:
        """Hidden states of one microbatch from rank to rank of the pipeline."""
        near = receiver in self.positions_of_host(sender)
        nbytes = WEIGHT_BYTES * self.cut.tokens // self.cut.tp * self.model.hidden
        return nbytes / (self.gpu.send_rate if near else self.gpu.network_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One virtual stage: its modules in forward order."""

    index: int
    pieces: tuple[Piece, ...]
    layers: int
    is_last: bool

    @property
    def output_bytes(self) -> int:
        """Hidden states that torch's stage keeps, beside what autograd saves, until their backward."""
        return 0 if self.is_last else self.pieces[-1].output_bytes

    @property
    def parameters(self) -> int:
        return sum(piece.parameters for piece in self.pieces)

    @property
    def expert_parameters(self) -> int:
        return sum(piece.expert_parameters for piece in self.pieces)

    @property
    def trained(self) -> int:
        return sum(piece.trained for piece in self.pieces)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one rank from the first forward to the last, whatever the schedule."""

    weights: int
    gradients: int
    optimizer: int
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.other


def layers_of(job: Job, stage: int) -> range:
    """Layers of a stage: as many as of any other; where that cannot be, the stages after the first take one
    more, because it has the embedding and the last one the head."""
    stages = job.num_stages
    each, more = divmod(job.model.layers, stages)
    counts = [each] * stages
    for place in range(more):
        counts[(1 + place) % stages] += 1
    first = sum(counts[:stage])
    return range(first, first + counts[stage])


def stages_of_job(job: Job) -> tuple[Stage, ...]:
    """Trace each distinct module once, and put the stages together."""
    model, cut = job.model, job.cut
    found: dict[str, Piece] = {}
    splits = any(action.kind == "I" for order in job.orders for action in order)

    def rows() -> Tensor:
        return torch.empty(cut.tokens // cut.tp, model.hidden, dtype=torch.bfloat16, device="meta")

    def tokens() -> Tensor:
        return torch.empty(cut.tokens, dtype=torch.long, device="meta")

    def traced(name: str, module: nn.Module, make_input: Callable[[], Tensor], *, is_layer: bool) -> Piece:
        if job.lora:
            adapt(module, job.lora if is_layer else 0)
        experts = getattr(module, "experts", None)
        routed = 0 if experts is None else sum(w.numel() for w in (experts.gate, experts.up, experts.down))
        return piece_of(
            name,
            trace(module, make_input),
            trace(module, make_input, recompute=True) if is_layer else None,
            job.gpu,
            gpus_per_host=job.gpus_per_host,
            expert_parameters=routed,
            trained=sum(own.numel() for own in module.parameters() if own.requires_grad),
            halves=trace_halves(module, make_input) if splits and name != "embedding" else None,
        )

    stages = []
    for index in range(job.num_stages):
        layers = layers_of(job, index)
        for kind in {model.layer_kind(layer) for layer in layers} - found.keys():
            found[kind] = traced(kind, Layer(model, cut, kind), rows, is_layer=True)
        pieces = [found[model.layer_kind(layer)] for layer in layers]
        if index == 0:
            pieces.insert(0, traced("embedding", Embedding(model, cut), tokens, is_layer=False))
        if index == job.num_stages - 1:
            pieces.append(traced("head", Head(model, cut), rows, is_layer=False))
        stages.append(
            Stage(
                index=index,
                pieces=tuple(pieces),
                layers=len(layers),
                is_last=index == job.num_stages - 1,
            )
        )
    return tuple(stages)


def held_by(job: Job, stages: Sequence[Stage]) -> Held:
    """Bytes that a rank with these stages holds. Optimizer state of experts is cut over fewer replicas."""
    parameters, trained = sum(own.parameters for own in stages), sum(own.trained for own in stages)
    experts = sum(stage.expert_parameters for stage in stages) if job.cut.ep > 1 else 0
    if job.model.tied and {stage.index for stage in stages} >= {0, job.num_stages - 1}:
        # one weight on one rank; the head's table is counted with the embedding's
        table = -(-job.model.vocabulary // job.cut.tp) * job.model.hidden
        parameters, trained = parameters - table, trained - (0 if job.lora else table)
    replicas = job.dp if job.zero else 1
    expert_replicas = job.dp * job.cut.tp // job.cut.ep if job.zero else 1
    return Held(
        weights=WEIGHT_BYTES * parameters,
        gradients=job.gradient_bytes * trained,
        optimizer=-(-job.optimizer_bytes * (trained - experts) // replicas)
        - (-job.optimizer_bytes * experts // expert_replicas),
        other=job.other_bytes,
    )
