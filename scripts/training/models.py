"""What is trained: a GPT of dense layers, or one of mixtures of experts, by the same calls.

One invariant: a model says by itself what its stages are, what they are given and return, and about what they
save; nothing else of the job knows which of the two it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import moe
from parallel import transformer
from parallel.transformer import TransformerConfig

__all__ = ["MIXTURE", "MIXTURE_OPTIONS", "PRESETS", "Dense", "Mixture", "Model"]

MIXTURE = "moe"
"""The preset of a mixture."""
PRESETS: Mapping[str, TransformerConfig | moe.MixtureConfig] = {
    **transformer.PRESETS,
    MIXTURE: moe.MixtureConfig(
        dim=128,
        layers=4,
        heads=4,
        kv_heads=2,
        expert_hidden=128,
        experts=8,
        top_k=2,
        sequence=256,
        balance="loss",
    ),
}
MIXTURE_OPTIONS = ("experts", "top_k", "experts_mode", "expert_parallel")
"""Options of the command line that only a mixture has."""
_OF_EXPERTS = frozenset({"expert_fc1", "moe_act"})


@dataclass(frozen=True, slots=True)
class Dense:
    """parallel.transformer's."""

    config: TransformerConfig

    @classmethod
    def of(cls, preset: str, sizes: Mapping[str, Any], seed: int, marks: str) -> Dense:
        """marks: all, none, or names of some."""
        names = transformer.group_names(marks)
        return cls(transformer.PRESETS[preset].with_(**sizes, seed=seed, offload_modules=names))

    @property
    def sequence(self) -> int:
        return self.config.sequence

    @property
    def offload_modules(self) -> frozenset[str]:
        return self.config.offload_modules

    def check_stages(self, num_stages: int) -> None:
        transformer.layers_of_stage(self.config, 0, num_stages)

    def deterministic(self) -> Dense:
        return Dense(self.config.with_(math_attention=True))

    def build(self, stage: int, num_stages: int, *, experts: Any, **where: Any) -> nn.Module:
        """experts: process group of the ranks that share them; None for none. where: device and dtype."""
        assert experts is None
        return transformer.build_stage_module(self.config, stage, num_stages, **where)

    def examples(self, stage: int, num_stages: int, **step: Any) -> tuple[Tensor, Tensor]:
        """Return a stage's input and output, as meta tensors. step: batch and dtype."""
        return transformer.stage_examples(self.config, stage, num_stages, sequence=self.sequence, **step)

    def saved_bytes_of_layer(self, *, batch: int, dtype: torch.dtype) -> int:
        """About the bytes that a layer's marks save for a microbatch: to reserve host memory by."""
        return transformer.saved_bytes_of_layer(self.config, batch=batch, sequence=self.sequence, dtype=dtype)


@dataclass(frozen=True, slots=True)
class Mixture:
    """moe's."""

    config: moe.MixtureConfig
    placement: moe.Placement

    @classmethod
    def of(cls, sizes: Mapping[str, Any], seed: int, marks: str, given: Mapping[str, Any]) -> Mixture:
        """sizes: as a dense model has them; ffn is the width inside an expert. marks: all, none, or names of
        some. given: values of MIXTURE_OPTIONS, None where left out."""
        named = {"expert_hidden" if name == "ffn" else name: size for name, size in sizes.items()}
        named |= {name: given[name] for name in ("experts", "top_k") if given[name] is not None}
        config = PRESETS[MIXTURE].with_(**named, seed=seed)
        assert isinstance(config, moe.MixtureConfig)
        mode = given["experts_mode"]
        every = frozenset(moe.GROUP_NAMES) - (_OF_EXPERTS if mode else frozenset())
        chosen = frozenset(name.strip() for name in marks.split(",") if name.strip())
        names = {"all": every, "none": frozenset[str]()}.get(marks.strip(), chosen)
        placement = moe.Placement(offload_modules=names, experts_mode=mode)
        ranks = given["expert_parallel"] or 1
        if config.experts % ranks:
            raise ValueError(
                f"{config.experts} experts cannot be shared equally by --expert-parallel {ranks} ranks; take "
                "a divisor, or another --experts"
            )
        return cls(config, replace(placement, input_kept=placement.input_on(ranks)))

    @property
    def sequence(self) -> int:
        return self.config.sequence

    @property
    def offload_modules(self) -> frozenset[str]:
        return self.placement.marks().chosen

    def check_stages(self, num_stages: int) -> None:
        moe.layers_of_stage(self.config, 0, num_stages)

    def deterministic(self) -> Mixture:
        return replace(self, config=self.config.with_(math_attention=True))

    def build(self, stage: int, num_stages: int, *, experts: Any, **where: Any) -> nn.Module:
        """experts: process group of the ranks that share them; None for none. where: device and dtype."""
        names = ("offload_modules", "experts_mode", "input_kept")
        placed = {name: getattr(self.placement, name) for name in names}
        return moe.build_stage_module(self.config, stage, num_stages, group=experts, **where, **placed)

    def examples(self, stage: int, num_stages: int, **step: Any) -> tuple[Tensor, Tensor]:
        """Return a stage's input and output, as meta tensors. step: batch and dtype."""
        return moe.stage_examples(self.config, stage, num_stages, sequence=self.sequence, **step)

    def saved_bytes_of_layer(self, *, batch: int, dtype: torch.dtype) -> int:
        tokens = batch * self.sequence
        by_group = moe.saved_bytes_of_layer(self.config, self.placement, tokens=tokens, dtype=dtype)
        return sum(by_group[name] for name in self.offload_modules)


Model = Dense | Mixture
"""Either kind of model, by the same calls."""
