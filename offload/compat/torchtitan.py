"""torchtitan's configuration keys for activation offload, as one call of `offload.apply`.

    settings = torchtitan.settings(config)          # a dict, a TOML table, or the path of a TOML file
    handle = settings.apply(model)                  # any model with experts
    model = moe.MixtureGPT(shape, **settings.placement())    # or the marks of this project's own layers

One invariant: a key that asks for something is obeyed, or is an error. Keys that are not about offload are
the trainer's.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from torch import nn

from offload.apply import Applied
from offload.apply import apply as offload_apply
from offload.config import MIB, check_min_elements
from offload.modules.blocks import find_experts

GROUP_NAMES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
"""Names that `activation_offload_modules` may have."""

_EXPERT_NAMES = {"expert_fc1", "moe_act"}
_MODES = ("save_on_cpu", "checkpoint", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchtitanSettings:
    """The keys of the table `training`, by torchtitan's names. Raises ValueError for what cannot be."""

    enable_activation_offload: bool = False
    """Without it nothing is offloaded, whatever the other keys say. Alone it means expert_fc1 and moe_act."""
    activation_offload_modules: str = ""
    """Names out of GROUP_NAMES, with commas between them."""
    activation_offload_min_tensor_size: int = MIB
    """Elements; a smaller tensor stays."""
    activation_offload_mode: str | None = None
    """Of the experts. "save_on_cpu": what they and their router save leaves. "checkpoint": they are
    recomputed, and nothing leaves. "both": they are recomputed with their router, and their input leaves."""
    enable_weight_offload: bool = False
    """Weights of what `apply` hooks, the model's blocks or its experts, wait on the host. Experimental."""
    enable_cpu_offload: bool = False
    """FSDP2's own offload of parameters, gradients and optimizer state, which the trainer asks fully_shard
    for. It goes with the other keys."""

    def __post_init__(self) -> None:
        for key, kind in get_type_hints(TorchtitanSettings).items():
            value = getattr(self, key)
            if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                raise ValueError(f"{key} is {value!r}, must be {getattr(kind, '__name__', 'text')}")
        check_min_elements(self.activation_offload_min_tensor_size, "activation_offload_min_tensor_size")
        names, mode = self.names, self.activation_offload_mode
        if unknown := sorted(names - set(GROUP_NAMES)):
            raise ValueError(
                f"activation_offload_modules has {', '.join(map(repr, unknown))}; the names are "
                f"{', '.join(GROUP_NAMES)}"
            )
        if "attn_proj" in names and "core_attn" not in names:
            raise ValueError(
                "activation_offload_modules has attn_proj, which saves core_attn's output, without "
                "core_attn: name both, or leave attn_proj out"
            )
        if mode not in (None, *_MODES):
            raise ValueError(f"activation_offload_mode is {mode!r}, must be one of {', '.join(_MODES)}")
        if mode is not None and names & _EXPERT_NAMES:
            raise ValueError(
                f"activation_offload_mode = {mode!r} is about all that experts save, and "
                f"{', '.join(sorted(names & _EXPERT_NAMES))} in activation_offload_modules about a part of "
                "it: leave one of the two out"
            )

    @property
    def names(self) -> frozenset[str]:
        """The names in activation_offload_modules; with enable_activation_offload alone, the experts'."""
        given = frozenset(map(str.strip, self.activation_offload_modules.split(","))) - {""}
        alone = self.enable_activation_offload and not (given or self.activation_offload_mode)
        return frozenset(_EXPERT_NAMES) if alone else given

    def flags(self) -> dict[str, bool]:
        """Flags of a mixture of yours that marks its experts itself: offload_expert_fc1, offload_moe_act."""
        return {
            f"offload_{name}": self.enable_activation_offload and name in self.names
            for name in sorted(_EXPERT_NAMES)
        }

    def placement(self) -> dict[str, Any]:
        """Arguments of `offload.moe.MixtureGPT`, or of its `Placement`: its layers mark each name by itself.
        The training loop announces each microbatch by `offload.init_chunk_handler()`, and the end of a step
        by `offload.reset()`; the least size is min_offloaded_tensor_size of `offload.configure`."""
        if self.enable_weight_offload:
            raise ValueError(
                "enable_weight_offload = true, and a placement is about activations: leave the key out, and "
                'call offload.apply(model, weights="host") on the model'
            )
        on = self.enable_activation_offload
        return {
            "offload_modules": self.names if on else frozenset(),
            "experts_mode": self.activation_offload_mode if on else None,
        }

    def apply(self, model: nn.Module) -> Applied:
        """`offload.apply` on the experts of `model`, whoever wrote them. They are one module each, so
        expert_fc1 and moe_act leave together.

        Raises ValueError for a model without experts, and for names that such a model has no module of.
        """
        weights = "host" if self.enable_weight_offload else None
        if not self.enable_activation_offload:
            return offload_apply(model, mode=False, weights=weights)
        if self.names not in (frozenset(), _EXPERT_NAMES):
            raise ValueError(
                f"activation_offload_modules = {self.activation_offload_modules!r} on a "
                f"{type(model).__name__}: of a model without marks what experts save leaves together, so "
                "name expert_fc1 and moe_act both, and no other; for other modules use "
                "offload.apply(model, modules=[...])"
            )
        experts, mixtures = find_experts(model)
        numel = self.activation_offload_min_tensor_size
        if self.activation_offload_mode == "checkpoint":
            return offload_apply(
                model, mode="checkpoint", blocks={"experts": experts}, min_numel=numel, weights=weights
            )
        if self.activation_offload_mode == "both":
            return offload_apply(
                model, mode="hidden_states", blocks={"experts": mixtures}, min_numel=numel, weights=weights
            )
        modules = {"experts": mixtures}
        return offload_apply(model, mode="groups", modules=modules, min_numel=numel, weights=weights)


def settings(config: Mapping[str, Any] | str | os.PathLike[str]) -> TorchtitanSettings:
    """The settings of a configuration: a dict of the keys, or of tables of which one is `training`, or the
    path of a TOML file.

    Raises ValueError for a key about offload that is none of them, or is spelled almost as one.
    """
    if not isinstance(config, Mapping):
        with open(config, "rb") as file:
            config = tomllib.load(file)
    table = config.get("training", config)
    known = [field.name for field in fields(TorchtitanSettings)]
    for key in table:
        near = difflib.get_close_matches(key, known, 1, 0.0 if "offload" in key else 0.85)
        if near and key not in known:
            raise ValueError(f"{key} is no key of torchtitan's training table; the nearest is {near[0]}")
    return TorchtitanSettings(**{key: table[key] for key in known if key in table})
