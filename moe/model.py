"""A small GPT of mixtures, in one piece or cut into pipeline stages.

One invariant: the same model on any number of stages and of ranks that share the experts holds the same
parameters: each is drawn from a seed of its layer, and of its expert. Marks change nothing but where saved
activations live.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import rotation_tables
from .config import ExpertsMode, InputKept, MixtureConfig, Placement
from .layer import DecoderLayer, Mixture, replaying_contexts


class MixtureGPT(nn.Module):
    """Some consecutive layers: with the embedding on the first stage, and the final norm and the head on the
    last; all of them, where there is one stage.

    group: ranks that share each layer's experts (`Mixture`). offload_modules, experts_mode, input_kept,
    recompute: as of `Placement`. Parameters are drawn when it is built, but on "meta".
    Call offload.init_chunk_handler() before each forward, or run it by OffloadPipelineStage, which does.
    """

    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(
        self,
        config: MixtureConfig,
        group: dist.ProcessGroup | None = None,
        offload_modules: Collection[str] = (),
        experts_mode: ExpertsMode | None = None,
        input_kept: InputKept | None = None,
        *,
        recompute: bool = False,
        stage: int = 0,
        num_stages: int = 1,
    ) -> None:
        super().__init__()
        placement = Placement(
            offload_modules=offload_modules,
            experts_mode=experts_mode,
            input_kept=input_kept,
            recompute=recompute,
        )
        layers = layers_of_stage(config, stage, num_stages)
        self.config, self.group, self.recompute = config, group, recompute
        self.embedding = nn.Embedding(config.vocabulary, config.dim) if stage == 0 else None
        self.blocks = nn.ModuleDict({str(layer): DecoderLayer(config, group, placement) for layer in layers})
        last = stage == num_stages - 1
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps) if last else None
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False) if last else None
        for name in ("rotary_cos", "rotary_sin"):
            shape = config.sequence, config.channels // 2
            self.register_buffer(name, torch.empty(shape, dtype=torch.float32), persistent=False)
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, S) on the first stage, hidden states (B, S, D) after it; logits (B, S, vocabulary) from
        the last."""
        sizes = "(batch, sequence)" if self.embedding is not None else "(batch, sequence, dim)"
        if x.dim() != sizes.count(",") + 1:
            raise ValueError(f"an input of shape {tuple(x.shape)}; this stage takes {sizes}")
        if x.shape[1] > self.config.sequence:
            raise ValueError(
                f"a sequence of {x.shape[1]} tokens; the model's longest is {self.config.sequence}: raise "
                "`sequence` in its config"
            )
        if self.embedding is not None:
            x = self.embedding(x)
        rotation = (self.rotary_cos[: x.shape[1]].to(x.dtype), self.rotary_sin[: x.shape[1]].to(x.dtype))
        contexts: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        for block in self.blocks.values():
            if self.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, rotation, context_fn=replaying_contexts(), **contexts)
            else:
                x = block(x, rotation)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x

    def mixtures(self) -> Iterator[Mixture]:
        """The mixture of each layer."""
        return (module for module in self.modules() if isinstance(module, Mixture))

    def update_balance(self, group: dist.ProcessGroup | None = None) -> None:
        """`TopKRouter.update_balance` of each layer: once a step, after its backward."""
        for mixture in self.mixtures():
            mixture.router.update_balance(group)

    def scale_loss(self, scale: float | Tensor) -> None:
        """Set `TopKRouter.loss_scale` of each layer: what the trainer multiplies its own loss by."""
        for mixture in self.mixtures():
            mixture.router.loss_scale = scale

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters, each layer from its own seed, whatever stage it is on, and each expert from
        one, whatever rank it is on. Buffers are as in a new model."""
        for buffer, table in zip(
            (self.rotary_cos, self.rotary_sin), rotation_tables(self.config), strict=True
        ):
            buffer.copy_(table)
        for mixture in self.mixtures():
            mixture.router.reset_balance()
        # into the residual, which adds up 2 * layers of them
        narrow = 0.02 / math.sqrt(2 * self.config.layers)
        numbered: list[tuple[int, nn.Module | None]] = [
            (int(layer), block) for layer, block in self.blocks.items()
        ]
        numbered += [(500_000, self.embedding), (500_001, self.head), (500_002, self.norm)]
        for number, module in numbered:
            seed = self.config.seed * 1_000_003 + number * 10_007
            first = module.mixture.first_expert if isinstance(module, DecoderLayer) else 0
            for name, parameter in () if module is None else module.named_parameters():
                seed += 101
                std = narrow if name.endswith(("wo.weight", "w2_EDF")) else 0.02
                _draw(parameter, std, seed, first if name.startswith("mixture.experts") else 0)


def _draw(parameter: Tensor, std: float, seed: int, first: int) -> None:
    """Matrices from a normal distribution, those of a stack one by one, from number `first` on; a norm is
    one."""
    if parameter.dim() == 1:
        parameter.fill_(1.0)
        return
    for number, matrix in enumerate(parameter if parameter.dim() == 3 else parameter[None], first):
        generator = torch.Generator(matrix.device).manual_seed(seed + 7_919_000_017 * number)
        matrix.normal_(0.0, std, generator=generator)


def build_stage_module(
    config: MixtureConfig,
    stage: int = 0,
    num_stages: int = 1,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    **placement: Any,
) -> MixtureGPT:
    """One virtual stage; its parameters are drawn on `device` in float32 and then cast, so that every dtype
    starts from the same values. placement: the fields of `Placement`."""
    with torch.device(device):
        module = MixtureGPT(config, group, stage=stage, num_stages=num_stages, **placement)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def layers_of_stage(config: MixtureConfig, stage: int, num_stages: int) -> range:
    """The layers of one stage: as equal as they can be, the earlier stages taking one more where they
    cannot."""
    if not 0 <= stage < num_stages:
        raise ValueError(f"stage {stage} of {num_stages}: stages are numbered 0 to {num_stages - 1}")
    if config.layers < num_stages:
        raise ValueError(
            f"{config.layers} layers cannot be cut into {num_stages} stages; take more layers, or fewer "
            "ranks or virtual stages"
        )
    each, more = divmod(config.layers, num_stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def stage_examples(
    config: MixtureConfig, stage: int, num_stages: int, *, batch: int, sequence: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """What goes into a stage and what comes out, as meta tensors: the shapes that OffloadPipelineStage
    takes."""

    def hidden(width: int) -> Tensor:
        return torch.empty(batch, sequence, width, dtype=dtype, device="meta", requires_grad=True)

    tokens = torch.empty(batch, sequence, dtype=torch.int64, device="meta")
    last = stage == num_stages - 1
    return tokens if stage == 0 else hidden(config.dim), hidden(config.vocabulary if last else config.dim)
