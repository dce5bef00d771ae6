"""axolotl: a plugin that takes the YAML's keys of offload over.

    plugins: [offload.integrations.axolotl.OffloadPlugin]
    gradient_checkpointing: true
    activation_offloading: hidden_states      # as before
    offload: {min_numel: 500_000}             # other arguments of offload.apply, or all: {mode: auto, ...}

| YAML | `offload.apply` |
|---|---|
| `gradient_checkpointing: true` | `mode="checkpoint"` |
| `activation_offloading: hidden_states` | `mode="hidden_states"` |
| `activation_offloading: true` | with an adapter `mode=True`; else "hidden_states": axolotl recomputes, too |
| `activation_offloading: legacy`, `disk` | `mode="legacy"`, "disk", beside its recompute if no adapter is |
| `layer_offloading: true` | `weights="host"` |

`gradient_checkpointing: offload` and `offload_disk` are `activation_offloading: true` and `disk`.
One invariant: a key that moves tensors is switched off for axolotl, so no tensor is moved by both.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from inspect import signature
from typing import Any

from axolotl.integrations.base import BasePlugin

from offload.apply import apply
from offload.config import check_mode
from offload.integrations.transformers import OffloadCallback

_KEYS = ("gradient_checkpointing", "activation_offloading", "layer_offloading")
_FORMER: dict[Any, Any] = {"offload": True, "offload_disk": "disk"}


class OffloadPlugin(BasePlugin):  # type: ignore[misc]
    """Adds an OffloadCallback to axolotl's trainer. Raises ValueError, when the YAML is read, for keys that
    contradict each other or that `apply` does not know."""

    def register(self, cfg: MutableMapping[str, Any]) -> None:
        """Take over what the YAML says, before axolotl validates and follows it."""
        self._arguments = arguments_of(cfg)
        moves_inputs = self._arguments.get("mode") in ("legacy", "disk") and not cfg.get("adapter")
        recomputes = moves_inputs and any(cfg.get(key) for key in _KEYS[:2])
        cfg.pop("offload", None)
        cfg.update({**dict.fromkeys(_KEYS, False), "gradient_checkpointing": recomputes})

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        OffloadCallback(**self._arguments).add_to(trainer)


def arguments_of(cfg: MutableMapping[str, Any]) -> dict[str, Any]:
    """Arguments of `offload.apply` that say what the YAML `cfg` says. Raises ValueError."""
    given = cfg.get("offload") or {}
    known = signature(apply).parameters.keys() - {"model"}
    if not isinstance(given, Mapping) or not known.issuperset(given):
        raise ValueError(
            f"offload: {given!r} has what apply does not know. Write arguments of it, as in offload: "
            f"{{mode: auto}}, of {', '.join(sorted(known))}"
        )
    given = dict(given)
    checkpoints, moves, layers = (cfg.get(key) or False for key in _KEYS)
    if checkpoints not in (True, False, *_FORMER):
        raise ValueError(f"gradient_checkpointing: {checkpoints!r} beside the offload plugin: write true")
    if cfg.get("selective_checkpointing"):
        raise ValueError("selective_checkpointing beside the offload plugin: use offload: {mode: selective}")
    if given.get("mode") is not None and (checkpoints or moves):
        raise ValueError(
            f"offload: {{mode: {given['mode']}}} beside gradient_checkpointing: {checkpoints} and "
            f"activation_offloading: {moves}, which say another mode: leave those two out"
        )
    if layers:
        given.setdefault("weights", "host")
    moves = moves or _FORMER.get(checkpoints, False)
    if moves is True and not cfg.get("adapter"):
        moves = "hidden_states"
    if mode := moves or (checkpoints and "checkpoint"):
        given["mode"] = mode
    if given.get("mode") is not None:
        check_mode("activation_offloading, or mode of offload:,", given["mode"])
    if not given:
        raise ValueError("the offload plugin, and no key that says what to offload: add offload: {mode: ...}")
    return given
