"""Arguments that a mode goes with, and what it needs to know of a model, or to change in its settings:
compiled code, the output head, caches, adapters. Models of transformers and peft are known by their
attributes; neither is imported.

One invariant: each change is undone by `Applied.remove`, and is said once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Final

import torch
from torch import nn

from offload.config import MODES, Mode
from offload.errors import OffloadError
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

ALL_TENSORS: Final = (True, "legacy", "disk")
WITHOUT_BLOCKS: Final = (*ALL_TENSORS, "watermark")
RECOMPUTING: Final = ("checkpoint", "hidden_states", "selective", "auto")


def _all_but(*modes: Mode) -> tuple[Mode, ...]:
    return tuple(mode for mode in MODES if mode not in modes)


_TAKES_ALL = ", which takes every saved tensor of the model; leave it out, or use mode='groups'"
EXCLUDED: Final[tuple[tuple[str, tuple[Mode, ...], str], ...]] = (
    ("high", _all_but("watermark"), ": marks go with mode='watermark'; device_limit limits the other modes"),
    ("low", _all_but("watermark"), ": marks go with mode='watermark'; device_limit limits the other modes"),
    ("device_limit", ("watermark",), ", which keeps what fits below its mark; give high=, and no limit"),
    ("device_limit", ("auto",), ", which limits all memory; give device_total, of everything on the device"),
    ("device_total", _all_but("auto"), ": only mode='auto' keeps within a total; give device_limit"),
    ("blocks", WITHOUT_BLOCKS, _TAKES_ALL),
    ("modules", WITHOUT_BLOCKS, _TAKES_ALL),
    ("modules", RECOMPUTING, ", which recomputes whole blocks; give blocks=, or use mode='groups'"),
    ("modules", (False,), ", which offloads no activations; name whole blocks with blocks=, or give a mode"),
    ("no_recompute", _all_but(*RECOMPUTING), ", which recomputes nothing; leave it out"),
    ("recompute_differs", _all_but(*RECOMPUTING), ", which recomputes nothing; leave it out"),
)
"""Arguments of `apply`, the modes that each of them excludes, and why, with the next step."""

WHAT: Final[Mapping[Mode, str]] = {
    False: "no saved tensor leaves, and nothing is recomputed",
    "checkpoint": "each block is recomputed in the backward, and no saved tensor leaves",
    "hidden_states": "each block is recomputed in the backward, and its input waits on the host",
    "selective": "each block is recomputed but for matrix products and attention, and leaves as in 'groups'",
    "groups": "what blocks save leaves, as far as the plan and device_limit ask",
    True: "every saved tensor leaves, but for the output head's",
    "legacy": "every saved tensor leaves, but for the output head's, and each copy is waited for",
    "disk": "every saved tensor leaves, but for the output head's, and goes on to a file",
    "watermark": "the oldest saved tensors leave, once device memory comes to the high mark",
}
"""What becomes of saved tensors in each mode that does not choose."""

_SHARED_CACHES = {"num_kv_shared_layers": "shared_kv_states", "recurrent_kv_cache_mode": ""}
"""Settings of models whose layers share keys and values, and the argument of a forward that hands them on
beside the cache; "" where none does."""

_HEADS = ("lm_head", "output", "output_layer", "head", "embed_out", "score", "classifier")
_ADAPTER = ("lora_", "adapter")


def check_arguments(mode: Mode, given: Mapping[str, object]) -> None:
    """ValueError for an argument that excludes `mode`. given: by name; None for one that was left out."""
    for name, modes, why in EXCLUDED:
        if mode in modes and given[name] is not None:
            raise ValueError(f"{name}={given[name]!r} with mode={mode!r}{why}")


def forget_compiled(model: nn.Module) -> None:
    """Compiled code was traced with other hooks, and does not look whether they have changed. Whose code it
    is cannot be told: a function that is compiled may call the model."""
    compiler = sys.modules.get("torch._dynamo")
    if compiler is None:
        return
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None
        or isinstance(module, compiler.eval_frame.OptimizedModule)
        for module in model.modules()
    )
    if compiled or compiler.utils.counters["frames"]["total"]:
        torch.compiler.reset()
        logger.info(
            f"compiled code of this process is dropped, so that what calls {type(model).__name__} is traced "
            "again with its hooks"
        )


def heads_of(model: nn.Module) -> list[nn.Module]:
    """The output head: what it saves is read as soon as the backward begins."""
    head = call_if_there(model, "get_output_embeddings")
    if isinstance(head, nn.Module):
        return [head]
    heads: list[nn.Module] = [
        module
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _HEADS and isinstance(module, nn.Linear)
    ]
    return heads[-1:]


def refuse_shared_caches(model: nn.Module) -> None:
    """OffloadError for a model whose layers compute from what others put into the cache, if that is on."""
    for config in (getattr(module, "config", None) for module in model.modules()):
        for name, by in _SHARED_CACHES.items():
            value = getattr(config, "use_cache", None) is True and getattr(config, name, None)
            if value and not any(by in signature(type(one).forward).parameters for one in model.modules()):
                raise OffloadError(
                    f"{type(model).__name__} has {name}={value!r}: its layers share keys and values through "
                    "the cache, and recomputed without one they give another loss: use mode='groups' or "
                    "True; or set use_cache=False of its config before apply(), if that loss is wanted"
                )


def switch_caches_off(model: nn.Module, others: Sequence[Any]) -> list[Any]:
    """A block of transformers appends its keys and values to a cache, and a recompute would append them
    again. others: configs that were changed for other models. Returns those that were changed for this one,
    which may be some of them."""
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None))
    }
    shared = [config for config in configs.values() if any(config is other for other in others)]
    found = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    for config in found:
        config.use_cache = False
    if found:
        logger.warning(
            f"{type(model).__name__}: use_cache of its config is False until remove(), which sets it to True "
            "again, because its blocks are recomputed and would fill the cache twice. Results are those of "
            "use_cache=False, which set before apply() gives the same without offload; generate() has its "
            "own setting, and a config that is saved before then says so too"
        )
    return found + shared


def mind_adapters(model: nn.Module, mode: Mode) -> list[nn.Module]:
    """Warn where the mode recomputes frozen layers; where all tensors leave, switch the model's own
    checkpoints off. Returns the modules whose checkpoints were switched off."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    frozen = len(names) < len(list(model.parameters()))
    if not frozen or not any(is_adapter(name) for name in names):
        return []
    if mode in ("checkpoint", "hidden_states"):
        logger.warning(
            f"{type(model).__name__} has an adapter and frozen weights: mode={mode!r} computes the frozen "
            "layers twice. mode=True offloads instead of recomputing, which is faster where the link keeps up"
        )
    checkpoints = [module for module in model.modules() if is_checkpointing(module)]
    if mode in ALL_TENSORS and checkpoints:
        for module in checkpoints:  # what they checkpoint with stays as the user has set it
            module.gradient_checkpointing = False  # type: ignore[assignment]
        logger.warning(
            f"{type(model).__name__} has an adapter and gradient checkpointing: its checkpoints are switched "
            "off until remove(), and its saved tensors leave instead of being recomputed"
        )
        return checkpoints
    return []


def is_adapter(name: str) -> bool:
    """Predicate: a parameter's name says that an adapter made it."""
    return any(part in name.lower() for part in _ADAPTER)


def is_checkpointing(module: nn.Module) -> bool:
    """Predicate: the module is one of transformers that runs its own forward, or its layers, in checkpoints.
    Asked of all modules of a model each step, and a torch module is slow to say that it has no such thing."""
    name, kind = "gradient_checkpointing", type(module)
    is_plain = kind.__getattr__ is nn.Module.__getattr__ and not hasattr(kind, name)
    return (vars(module).get(name) if is_plain else getattr(module, name, None)) is True


def checkpoints_off(model: nn.Module) -> str:
    """Text that says how to switch a model's own checkpoints off, by the names of the library that it is
    from."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):  # since transformers 5.23, before
        if any(hasattr(module, f"{name}_disable") for module in model.modules()):
            return f"{name}_disable() on the model before apply(), or {name}=False of a Trainer's arguments"
    return "gradient_checkpointing = False on each module that has it, before apply()"


def call_if_there(model: nn.Module, method: str) -> Any:
    """The result of a method of transformers' models; None for a model that has no such thing."""
    found = getattr(model, method, None)
    try:
        return found() if callable(found) else None
    except (AttributeError, NotImplementedError):
        return None  # of a wrapper whose model has no such thing
