"""Which parameters of a model stream, and why the others are resident.

One invariant: nothing is changed here. What cannot be streamed at all is an error before anything moves.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from offload.params.watched import Watched
from offload.transfer.block import is_dense
from offload.weights.watched import StreamedWeight
from offload.weights.weight import Weight

LEAST_NUMEL = 1 << 20
"""Elements: a smaller parameter of a block is resident. Norms and biases are many copies and few bytes."""

LEAST_EXPERT_BYTES = 1 << 20
"""Of one expert's matrix: smaller ones come with their block, because a copy of each costs the host more."""


Named = Mapping[str, nn.Module]
IsAdapter = Callable[[str], bool]
"""Whether a parameter or module of this name is an adapter's."""

_FLOATS = {torch.float32, torch.bfloat16, torch.float16}


class Choice:
    """blocks: the weights that stream, by the name of their block. resident: of all other parameters, why:
    how many, and how many bytes."""

    def __init__(self) -> None:
        self.blocks: dict[str, list[Weight]] = {}
        self.resident: dict[str, tuple[int, int]] = {}

    def keep(self, reason: str, parameter: Tensor) -> None:
        number, nbytes = self.resident.get(reason, (0, 0))
        self.resident[reason] = number + 1, nbytes + parameter.numel() * parameter.element_size()


def choose_gradients(model: nn.Module, streamed: Choice | None, least: int | None) -> list[str]:
    """Parameters whose gradients may wait on the host, by name: all large ones, or those in `streamed`.
    least: elements, as `choose` takes them.
    Raises ValueError for parameters that FSDP manages, and where none is trained."""
    if streamed is not None:
        return [weight.name for each in streamed.blocks.values() for weight in each]
    _refuse_fsdp(model, 'gradients="host"')
    for parameter in model.parameters():
        if isinstance(parameter, Watched) and not parameter.comes_and_goes:  # a step is under way
            parameter.make_ready(parameter)
    named = ((n, p) for n, p in model.named_parameters() if type(p) in (nn.Parameter, StreamedWeight))
    least = LEAST_NUMEL if least is None else max(least, 1)
    found = {name: parameter for name, parameter in named if parameter.numel() >= least}
    if not any(parameter.requires_grad for parameter in found.values()):
        trained = [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]
        raise ValueError(
            f'apply(gradients="host") finds no gradient of {type(model).__name__} that is worth a copy: '
            f"{len(trained)} parameters are trained, the largest has {max(trained, default=0):,} elements, "
            f"and {least:,} are the least; lower min_numel, or leave gradients out"
        )
    return [*found]


def choose(
    model: nn.Module, blocks: Named, is_adapter: IsAdapter, where: torch.device, least: int | None
) -> Choice:
    """blocks: by name, none inside another. where: the device that computes. least: elements; a smaller
    parameter is resident; None for LEAST_NUMEL. Raises ValueError for parameters that FSDP manages, or that
    are on another device; and where nothing streams."""
    _refuse(model, where)
    for name, block in blocks.items():
        if isinstance(block, torch.jit.ScriptModule):
            raise ValueError(
                f"apply(weights=...) on {type(model).__name__}: {name} is a module of torch.jit, whose code "
                "reads weights unseen; apply to the model that was scripted or traced, before it was"
            )
    places = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tensors, plain = (*model.parameters(), *model.buffers()), (nn.Parameter, nn.Buffer, Tensor)
    storages = Counter(
        t.untyped_storage()._cdata for t in tensors if type(t) in plain and t.layout is torch.strided
    )
    choice, inside = Choice(), set[int]()
    least = LEAST_NUMEL if least is None else max(least, 1)
    for name, block in blocks.items():
        for prefix, module in block.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                if id(parameter) in inside:
                    continue
                inside.add(id(parameter))
                full = ".".join(part for part in (name, prefix, attribute) if part)
                reason = _why_resident(full, module, parameter, is_adapter, least)
                if not reason and places[id(parameter)] > 1:
                    reason = "tied, or of a module that is used in two places"
                if not reason and storages[parameter.untyped_storage()._cdata] > 1:
                    reason = "in one storage with another parameter or buffer"
                if reason:
                    choice.keep(reason, parameter)
                else:
                    weight = Weight(parameter, full, module, attribute)
                    weight.uses = set() if _may_be_experts(module, parameter) else None
                    choice.blocks.setdefault(name, []).append(weight)
    for parameter in model.parameters():
        if id(parameter) not in inside:
            choice.keep("outside of the blocks", parameter)
    if not choice.blocks:
        reasons = "; ".join(f"{number} are {why}" for why, (number, _) in choice.resident.items())
        more = ", ..." if len(blocks) > 4 else ""
        raise ValueError(
            f"apply(weights=...) finds no weight of {type(model).__name__} that streams: {reasons}. Blocks "
            f"are {', '.join([*blocks][:4])}{more}; name others with blocks=, lower min_numel (elements), or "
            "leave weights out"
        )
    return choice


def _may_be_experts(module: nn.Module, parameter: Tensor) -> bool:
    """Predicate: the parameter is some matrices, one after the other, of a module that is none of torch's."""
    if parameter.dim() != 3 or type(module).__module__.startswith("torch.nn"):
        return False
    number, each = parameter.shape[0], parameter.stride(0)
    is_large = each * parameter.element_size() >= LEAST_EXPERT_BYTES
    return number > 1 and each * number == parameter.numel() and is_large


def quantize(choice: Choice, model: nn.Module) -> None:
    """Frozen weights of two dimensions, and of three, which are experts', are INT8 from here on. Raises
    ValueError where there are none."""
    weights = [weight for found in choice.blocks.values() for weight in found]
    for weight in weights:
        parameter = weight.parameter
        weight.int8 = not parameter.requires_grad and parameter.dim() in (2, 3) and parameter.dtype in _FLOATS
        if isinstance(weight.module(), _ConvNd) or weight.link_bytes >= weight.nbytes:
            weight.int8 = False  # no expert's, or rows that are shorter than their scale
        weight.uses = None if weight.int8 else weight.uses
    if not any(weight.int8 for weight in weights):
        raise ValueError(
            f"apply(quantize=...) finds no frozen float32, bfloat16 or float16 weight of 2 or 3 dimensions "
            f"among the {len(weights)} that stream of {type(model).__name__}, of which "
            f"{sum(not weight.parameter.requires_grad for weight in weights)} are frozen and which are of "
            f"{', '.join(sorted({str(weight.parameter.dtype) for weight in weights}))}; freeze them with "
            "requires_grad_(False) before, cast them, or leave quantize out"
        )


def _refuse_fsdp(model: nn.Module, asked: str) -> None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            raise ValueError(
                f"apply({asked}) on {type(model).__name__}, whose parameters FSDP manages "
                f"({name or 'the model itself'}): it frees and refills them itself. Keep its shards on the "
                "host with fully_shard(..., offload_policy=CPUOffloadPolicy()), stepped by "
                "FSDPGPUOptimizerWrapper; and offload activations with apply(mode=...)"
            )


def _refuse(model: nn.Module, where: torch.device) -> None:
    _refuse_fsdp(model, "weights=...")
    for name, module in model.named_modules():
        hook: Any = getattr(module, "_hf_hook", None)
        if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
            raise ValueError(
                f"apply(weights=...): accelerate has offloaded {name!r}, and fills it in each forward; load "
                "without device_map, or call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
            )
    for name, parameter in model.named_parameters():
        if parameter.device.type not in ("cpu", "meta") and parameter.device != where:
            raise ValueError(
                f"apply(weights=...) on {type(model).__name__}: {name} is on {parameter.device}, and the "
                f"engine copies to {where}; move the model, or give device={str(parameter.device)!r}"
            )


def _why_resident(name: str, module: nn.Module, parameter: Tensor, is_adapter: IsAdapter, least: int) -> str:
    if is_adapter(name):
        return "of an adapter"
    if isinstance(module, torch.jit.ScriptModule):
        return "of a module of torch.jit"
    if type(parameter) is not nn.Parameter:
        return f"of a tensor subclass ({type(parameter).__name__})"
    if parameter.numel() < least:
        return f"smaller than {least:,} elements"
    if parameter.is_inference():
        return "made under torch.inference_mode(): clone() them outside of it"
    return "" if is_dense(parameter) else "not dense in memory"
