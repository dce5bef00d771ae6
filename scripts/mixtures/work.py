"""The works: a small GPT of a mixture's layer shapes, what a step does, and how its tokens are routed.

    layer    1 sequence of 16,384 tokens, 8 layers: one forward, one backward
    window   4 sequences of 4,096 tokens a microbatch, 8 microbatches under 1F1B, 4 of them live at once
    zipf     as layer with 4 layers, 200 steps; the experts' loads follow Zipf's law, and each step draws anew
             which expert has which
    lengths  as zipf, 100 steps, and each step's sequence is shorter by up to an eighth

The layers are those of Qwen3-30B-A3B (width 2048, 32 query and 4 key and value heads of 128, experts of 768,
top 8), with 32 of its 128 experts: what one of four ranks holds. The vocabulary is of bytes. One invariant:
what a step computes depends on the seed and the step's number alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

import moe
from offload.policy.actions import Action, one_f_one_b

__all__ = ["WORKS", "Work", "ZipfGate", "tiny", "tokens_of", "zipf_gates"]

_QWEN3: dict[str, Any] = {
    "dim": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "expert_hidden": 768,
    "experts": 32,
    "top_k": 8,
}
_TINY: dict[str, Any] = {
    "dim": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "expert_hidden": 64,
    "experts": 8,
    "top_k": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a step does.

    | field | is |
    |---|---|
    | layers | of the model |
    | sequences, sequence | of a microbatch, and tokens of each |
    | actions | forwards and backwards, in order |
    | samples, warmup | timed steps of a row, and steps before them where a row settles at once |
    | shape | further fields of moe.MixtureConfig |
    | zipf | whether routing follows Zipf's law |
    | vary | of the sequence, the largest share by which a step may be shorter |
    """

    name: str
    layers: int
    sequences: int
    sequence: int
    actions: tuple[Action, ...]
    samples: int
    warmup: int = 3
    shape: dict[str, Any]
    zipf: bool = False
    vary: float = 0.0

    @property
    def config(self) -> moe.MixtureConfig:
        return moe.MixtureConfig(layers=self.layers, sequence=self.sequence, **self.shape)

    @property
    def microbatches(self) -> int:
        return len(self.actions) // 2

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.microbatches * self.sequences * self.sequence

    def with_(self, **changes: Any) -> Work:
        """The same with some fields changed."""
        return replace(self, **changes)

    def length(self, step: int) -> int:
        """Tokens of each sequence in this step."""
        shorter = int(self.sequence * self.vary)
        if not shorter:
            return self.sequence
        drawn = torch.Generator().manual_seed(step + 1_000_000)
        return self.sequence - int(torch.randint(shorter + 1, (), generator=drawn))


WORKS = {
    "layer": Work(
        name="layer",
        layers=8,
        sequences=1,
        sequence=16384,
        actions=one_f_one_b(0, 1, 1),
        samples=5,
        shape=_QWEN3,
    ),
    "window": Work(
        name="window",
        layers=8,
        sequences=4,
        sequence=4096,
        actions=one_f_one_b(0, 4, 8),
        samples=3,
        warmup=2,
        shape=_QWEN3,
    ),
    "zipf": Work(
        name="zipf",
        layers=4,
        sequences=1,
        sequence=16384,
        actions=one_f_one_b(0, 1, 1),
        samples=200,
        warmup=0,
        shape=_QWEN3,
        zipf=True,
    ),
}
WORKS["lengths"] = WORKS["zipf"].with_(name="lengths", vary=0.125, samples=100)


def tiny(work: Work) -> Work:
    """The same actions on a model that a CPU runs in milliseconds."""
    return replace(
        work, layers=2, sequence=32, samples=30 if work.zipf else 2, warmup=min(1, work.warmup), shape=_TINY
    )


def tokens_of(work: Work, microbatch: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, targets) of a microbatch, int64, (sequences, sequence) each."""
    drawn = torch.Generator().manual_seed(1 + microbatch)
    size = (work.sequences, work.sequence + 1)
    text = torch.randint(work.config.vocabulary, size, generator=drawn).to(device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class ZipfGate(nn.Module):
    """A router's gate, to whose logits are added the logarithms of 1 / rank, the ranks drawn anew for each
    step, and Gumbel noise of each token: its top_k are then drawn without replacement, in proportion to 1 /
    rank.

    weight is the gate's own, so the router learns as before. The noise depends on `drawn` alone, so that a
    recompute has the same.
    """

    def __init__(self, gate: nn.Linear, layer: int) -> None:
        super().__init__()
        self.weight, self.layer = gate.weight, layer
        self.drawn = 0
        """Of what the next forward's noise is drawn: the step and the microbatch."""

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        experts = self.weight.shape[0]
        generator = torch.Generator(x_TD.device).manual_seed(self.drawn * 1_009 + self.layer)
        ranks_E = torch.randperm(experts, generator=generator, device=x_TD.device) + 1
        uniform_TE = torch.rand(x_TD.shape[0], experts, generator=generator, device=x_TD.device)
        gumbel_TE = -(-uniform_TE.clamp_(1e-20, 1 - 2**-24).log()).log()
        return nn.functional.linear(x_TD, self.weight).float() * 0.1 - ranks_E.log() + gumbel_TE


def zipf_gates(model: moe.MixtureGPT) -> list[ZipfGate]:
    """Put one into each router of the model."""
    gates = []
    for layer, mixture in enumerate(model.mixtures()):
        gate = ZipfGate(cast(nn.Linear, mixture.router.gate), layer)
        mixture.router.gate = cast(Any, gate)
        gates.append(gate)
    return gates
