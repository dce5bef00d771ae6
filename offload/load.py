"""Weights from safetensors files, tensor by tensor to where the model has them: the pinned memory of streamed
ones, the device for what else `apply(weights=...)` has there, and else the tensor's own memory.

One invariant: names, shapes, dtypes and buffers are checked against all files before a weight changes, and
one tensor at a time is in memory twice.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.client import Client
from offload.errors import WeightFileError
from offload.marks import existing_manager
from offload.params.watched import Watched
from offload.telemetry.speaker import progress
from offload.weights.files import Stored, TensorSource, stored_tensors
from offload.weights.gradients import GradientStream
from offload.weights.stream import WeightStream
from offload.weights.watched import StreamedWeight, holder_of, owner_of
from offload.weights.weight import give_memory, written


class LoadedKeys(NamedTuple):
    """Without `strict`: names of the model that no file had, and of files that the model has not."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str] | TensorSource,
    quantize: str | None = None,
    *,
    strict: bool = True,
) -> LoadedKeys:
    """Read a model's weights from safetensors files, one tensor at a time.

        with torch.device("meta"):
            model = build()
        handle = offload.apply(model, weights="host", device="cuda")
        offload.load_weights(model, "folder")

    Each streamed weight goes from its file to pinned host memory, and every other one to the device. Before
    `apply`, what is on meta comes to the CPU, from where `apply` moves one weight after the other. All
    parameters stay the objects that they are.

    path: a file, a folder, or an index (*.safetensors.index.json); or an object with keys() and
        get_tensor(name), whose tensors, on any device, are checked as each of them comes.
    quantize: has to agree with `apply`, whose quantize="int8" reads frozen weights as INT8.
    strict: False admits files that lack names of the model, or have others, and passes over weights that have
        their values as INT8, such as those of a slab. What is on meta needs values.
    Names are those of state_dict(). Of tied weights one name is enough. Floating-point values are converted
    to the dtype of their parameter. Buffers on meta that no file has (not persistent, such as rotary
    frequencies) are computed by their module's reset_parameters(), or by the model's _init_weights
    (transformers).

    Raises WeightFileError for files that cannot be read, and for names, shapes or dtypes that do not fit;
    ValueError for buffers that nothing computes, parameters that cannot be filled, and another `quantize`;
    OffloadError for INT8 weights that have values. No weight has changed then. HostBudgetError where the host
    has no room, ValueError for INT8 of what is not finite. Blocks the host.
    """
    stored, streams = stored_tensors(path), _streams()
    state = model.state_dict(keep_vars=True)
    targets = {name: each for name, each in state.items() if isinstance(each, Tensor)}
    if not strict:
        targets = {name: target for name, target in targets.items() if not _is_int8(target)}
    _check_quantized(quantize, {streams[id(each)] for each in targets.values() if id(each) in streams})
    loaded = _matched(model, stored, targets, strict)
    for key in [key for key in stored if key in targets]:
        _check_can_be_filled(key, targets[key])
    if isinstance(path, (str, os.PathLike)):
        for _ in _fitting(stored, targets):  # views of the files, of which nothing is read
            pass
    buffers = _computed_buffers(model)
    number = sum(key in targets for key in stored) + len(buffers)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        progress("load_weights", number, "tensor") as show,
    ):
        for target, value in itertools.chain(_fitting(stored, targets), buffers):
            _place(target, value.to(target.dtype), streams.get(id(target)))
            show(1)
    for client in _clients():
        if isinstance(client, GradientStream):
            client.hook_trained()
    return loaded


def _matched(
    model: nn.Module, stored: Mapping[str, Stored], targets: Mapping[str, Tensor], strict: bool
) -> LoadedKeys:
    """Raises WeightFileError for names of one side that the other has not."""
    given = {id(targets[key]) for key in stored if key in targets}
    missing = [name for name, target in targets.items() if id(target) not in given]
    unexpected = [key for key in stored if key not in targets]
    empty = [name for name in missing if targets[name].is_meta]
    if empty or (strict and (missing or unexpected)):
        origin = next((each.origin for each in stored.values()), "no file")
        raise WeightFileError(
            f"{len(stored)} tensors of {origin} do not fit {type(model).__name__}: {_some(missing)} are "
            f"missing, of them {_some(empty)} on meta, which needs a value; {_some(unexpected)} are "
            "unexpected. Names are those of state_dict(), without adapters; strict=False takes what fits"
        )
    return LoadedKeys(missing, unexpected)


def _some(names: list[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' * (len(names) > 3)})" if names else "none"


def _fitting(stored: Mapping[str, Stored], targets: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of the model with its value, as it is stored. Raises WeightFileError."""
    firsts: dict[int, str] = {}  # of tied weights: the key that came first
    for key in [key for key in stored if key in targets]:
        target, origin, value = targets[key], stored[key].origin, stored[key].source.get_tensor(key)
        if value.shape != target.shape:
            shapes = tuple(value.shape), tuple(target.shape)
            raise WeightFileError(f"{key} is {shapes[0]} in {origin}, and {shapes[1]} in the model")
        ours, its = target.dtype, value.dtype
        if its != ours and not (its.is_floating_point and ours.is_floating_point and its.itemsize > 1):
            raise WeightFileError(
                f"{key} is {its} in {origin}, and {ours} in the model: no conversion number by number; build "
                "the model with that dtype, or save the weights dequantised"
            )
        first = firsts.setdefault(id(target), key)
        if first != key and not torch.equal(stored[first].source.get_tensor(first), value):
            raise WeightFileError(
                f"{first} and {key} are one weight in the model, and differ in {origin}; build it untied"
            )
        yield target, value


def _is_int8(target: Tensor) -> bool:
    """Return True if it is a streamed weight that has its values, as INT8."""
    return isinstance(target, StreamedWeight) and owner_of(target).int8


def _check_quantized(quantize: str | None, streams: Collection[WeightStream]) -> None:
    if quantize is not None and not (quantize == "int8" and any(each.figures.int8_bytes for each in streams)):
        raise ValueError(
            f"quantize={quantize!r} has to be what apply() was given: call apply(model, weights=..., "
            'quantize="int8") first, whose frozen weights are then read as INT8; or leave it out'
        )


def _check_can_be_filled(name: str, target: Tensor) -> None:
    if type(target) not in (Tensor, nn.Parameter) and not isinstance(target, Watched):
        raise ValueError(
            f"{name} is a {type(target).__name__}, which load_weights() does not fill: a DTensor is loaded "
            "by torch.distributed.checkpoint, and a quantised parameter is made after loading"
        )
    if _is_int8(target):
        raise written(owner_of(target))
    hooks = target._backward_hooks or getattr(target, "_post_accumulate_grad_hooks", None)
    held = weakref.getweakrefs(target) or target._use_count() > 1  # type: ignore[attr-defined]
    if target.is_meta and (hooks or held):
        raise ValueError(
            f"{name} is on the meta device, and a hook, a weak reference or a graph holds it, so torch gives "
            "it no memory; load before hooks are registered and the model is wrapped"
        )


def _clients() -> list[Client]:
    manager = existing_manager()
    return [] if manager is None else manager.engine.clients


def _streams() -> dict[int, WeightStream]:
    """By the id of a tensor: what `apply(weights=...)` made of its model."""
    found: dict[int, WeightStream] = {}
    for client in _clients():
        if isinstance(client, WeightStream) and (model := client.model()) is not None:
            found.update((id(tensor), client) for tensor in (*model.parameters(), *model.buffers()))
    return found


def _place(target: Tensor, value: Tensor, stream: WeightStream | None) -> None:
    if isinstance(target, StreamedWeight):
        weight = owner_of(target)
        holder_of(weight).host_copy(weight).copy_(value)  # seen, as any write to it
    elif stream is not None and target.is_meta:
        stream.parameters.fill(target, value)
    elif target.is_meta:
        give_memory(target, torch.empty_like(target, device="cpu").copy_(value))
    else:
        target.copy_(value)


def _computed_buffers(model: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Buffers on meta that no file has, each with its value. Raises ValueError where nothing computes it."""
    found: list[tuple[Tensor, Tensor]] = []
    for name, module in model.named_modules():
        names, buffers = module._non_persistent_buffers_set, module._buffers
        empty = {each: old for each in names if (old := buffers.get(each)) is not None and old.is_meta}
        fresh = {each: torch.empty_like(old, device="cpu") for each, old in empty.items()}
        buffers.update(fresh)
        try:
            if empty:
                _initialise(model, name, module)
            values: dict[str, Any] = {each: buffers[each] for each in empty}
        finally:
            buffers.update(empty)
        for each, value in values.items():
            if value.is_meta or (value is fresh[each] and not value._version):
                raise ValueError(
                    f"{name}.{each} of {type(model).__name__} is a buffer on meta and in no file, and "
                    "neither reset_parameters() of its module nor _init_weights() of the model computes it; "
                    'build its module under torch.device("cpu")'
                )
            found.append((empty[each], value))
    return found


def _initialise(model: nn.Module, name: str, module: nn.Module) -> None:
    """Have the module compute its buffers, where it has no weight of its own with values."""
    if not all(parameter.is_meta for parameter in module.parameters(recurse=False)):
        return
    initialise: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    while name and initialise is None:
        name = name.rpartition(".")[0]
        found = getattr(model.get_submodule(name), "_init_weights", None)
        initialise = None if found is None else partial(found, module)
    if initialise is not None:
        initialise()
