"""`optimizer=` of `offload.apply`: an optimizer of torch's keeps its state on the host from now on, as a
HybridDeviceOptimizer, and is one of its class again afterwards.

One invariant: the object is the same one throughout, with its param groups, its state, its hooks and the
attributes that others have put there, so whoever holds it, such as a learning-rate scheduler or a
GradScaler, need not know. Where a conversion raises, it is as before.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.engine import OffloadEngine
from offload.optim.classes import is_fused_adam, state_names, steps_each_alone
from offload.optim.fsdp_step import FSDPGPUOptimizerWrapper
from offload.optim.hybrid import HybridDeviceOptimizer
from offload.optim.state import is_hooks, without_hooks
from offload.params.sections import slots_for
from offload.params.view import local_of, trains
from offload.params.watched import home_of

BUCKET_BYTES = 64 << 20
"""Of master weights: what passes through the device at once."""

_SCHEDULED = "_wrapped_by_lr_sched"
"""torch.optim.lr_scheduler puts a `step` with this attribute on the object, which counts its calls."""


def is_ours(optimizer: object) -> bool:
    """Predicate: its state was placed by name: a HybridDeviceOptimizer, or FSDPGPUOptimizerWrapper."""
    return isinstance(optimizer, (HybridDeviceOptimizer, FSDPGPUOptimizerWrapper))


def check_stepped(optimizer: object, model: nn.Module) -> None:
    """Raises ValueError for what is no optimizer, or steps nothing of the model."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__}, must be an optimizer of torch.optim, or an "
            "offload.HybridDeviceOptimizer; of a wrapper, give what it wraps"
        )
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    mine, cls = {id(parameter) for parameter in model.parameters()}, type(optimizer)
    if not any(id(parameter) in mine for parameter in stepped):
        raise ValueError(
            f"optimizer= is a {cls.__name__} of {len(stepped)} parameters, none of which is "
            f"{type(model).__name__}'s; build it with the parameters of the model that apply() gets"
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises ValueError for what `move_state_to_host` cannot take."""
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    cls = type(optimizer)
    if is_ours(optimizer):
        return
    if not steps_each_alone(cls):
        raise ValueError(
            f"optimizer= is a {cls.__module__}.{cls.__name__}, whose object does not tell its arguments: "
            "give a class of torch.optim that steps each parameter alone; or, without weights=, what "
            f"offload.HybridDeviceOptimizer(parameters, 1.0, {cls.__name__}, ...) is"
        )
    if any(parameter.is_meta for parameter in stepped):
        raise ValueError(
            "optimizer= steps parameters on meta, which have no values yet: build "
            "offload.HybridDeviceOptimizer once load_weights() has filled them"
        )
    for name, value in vars(optimizer).items():
        if callable(getattr(cls, name, None)) and not hasattr(value, _SCHEDULED):
            raise ValueError(
                f"optimizer= has a {name}() of its own in place of its class's ({value!r}); call apply() "
                "before it is put there"
            )


def host_and_device_bytes(
    optimizer: Any,
    streamed: Collection[Tensor] = (),
    waiting: Collection[Tensor] = (),
) -> tuple[int, int]:
    """Bytes of the state on the host, and of the ring on the device, after `move_state_to_host`, for torch's
    Adam and AdamW. 0 for other classes, whose state is not known before, and for one of ours, which has its
    memory already.

    streamed, waiting: parameters whose weights are on the host, and whose gradients wait there.
    """
    if is_ours(optimizer) or not is_fused_adam(type(optimizer)):
        return 0, 0
    homes, lenders = set(map(id, streamed)), {id(each) for each in waiting if each.requires_grad}
    numels, flats = Counter[tuple[torch.dtype, bool]](), set[str]()
    on_host = 0
    for group in optimizer.param_groups:
        names = state_names(group)
        flats.update(names)
        for each in group["params"]:
            if not (trains(each) or optimizer.state.get(each)):
                continue  # frozen
            local = local_of(each)
            has_home = id(each) in homes or home_of(each) is not None
            numels[local.dtype, has_home] += local.numel()  # they share their buckets
            flats |= {"weights"} if has_home else set()
            flats |= {"lent"} if id(each) in lenders else set()
            on_host += len(names) * local.numel() * local.element_size()
    buckets = [min(total, BUCKET_BYTES // dtype.itemsize) for (dtype, _), total in numels.items()]
    size = max((dtype.itemsize for dtype, _ in numels), default=0)
    slots = slots_for(numels.total(), max(buckets, default=0))
    return on_host, slots * max(buckets, default=0) * size * len(flats)


MoveBack = Callable[[], Callable[[], None]]


def move_state_to_host(optimizer: Any, engine: OffloadEngine) -> MoveBack:
    """Make it a HybridDeviceOptimizer whose state is on the host, all of it, and which steps inside step().
    Returns what undoes that, in two calls, between which no step is: the first brings the state to the
    device, or raises torch.OutOfMemoryError where it does not fit, and has changed nothing then; what it
    returns makes the object one of its class. One of ours stays as it is. Raises HostBudgetError, or
    ValueError as that class does. Blocks the host for pinning, and for what is copied."""
    if is_ours(optimizer):
        return lambda: _done
    cls, taken = type(optimizer), inspect.signature(type(optimizer)).parameters
    arguments = {name: value for name, value in optimizer.defaults.items() if name in taken}
    before, groups = dict(vars(optimizer)), [*optimizer.param_groups]
    with without_hooks(optimizer):
        packed = optimizer.state_dict() if optimizer.state else None
    vars(optimizer).clear()
    optimizer.__class__ = HybridDeviceOptimizer
    try:
        optimizer.__init__(groups, 1.0, cls, engine=engine, bucket_bytes=BUCKET_BYTES, **arguments)
        if packed is not None:
            _load(optimizer, packed)
    except BaseException:
        if optimizer._built:
            optimizer.close()
        vars(optimizer).clear()
        optimizer.__class__ = cls
        vars(optimizer).update(before)
        raise
    made, reference = {*vars(optimizer)}, weakref.ref(optimizer)
    _carry(optimizer, before)

    def undo() -> Callable[[], None]:
        found = reference()
        is_there = found is not None and type(found) is HybridDeviceOptimizer
        return _make_plain(found, cls, arguments, made) if is_there else _done

    return undo


def _make_plain(
    optimizer: Any, cls: type[Optimizer], arguments: dict[str, Any], made: Container[str]
) -> Callable[[], None]:
    """Bring the state to the device; what is returned makes the object one of the class. made: attributes
    that are the HybridDeviceOptimizer's own."""
    with without_hooks(optimizer):
        packed = optimizer.state_dict()
    state = {name: packed[name] for name in ("state", "param_groups")}
    groups = optimizer.param_groups
    plain, where = cls([{**group} for group in groups], **arguments), _devices(groups)
    _load(plain, state)

    def finish() -> None:
        if _devices(groups) != where:  # the model has left the device
            _load(plain, state)
        own = vars(optimizer)
        others = {name: value for name, value in own.items() if name not in made or is_hooks(name)}
        optimizer.close()
        own.clear()
        optimizer.__class__ = cls
        own.update(vars(plain) | {"param_groups": groups})
        _carry(optimizer, others)

    return finish


def _load(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Load a state dict without rounding. torch's load_state_dict() rounds to the parameter's dtype also what
    has a dtype of its own, such as NAdam's float32 mu_product: that is put back."""
    optimizer.load_state_dict(packed)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, entry in ((parameters[index], entry) for index, entry in packed["state"].items()):
        for name, value in entry.items():
            other = isinstance(value, Tensor) and value.is_floating_point() and value.dtype != parameter.dtype
            if other and name != "step":
                found = optimizer.state[parameter]
                found[name] = value.to(found[name].device, copy=True)


def _devices(groups: list[dict[str, Any]]) -> list[torch.device]:
    return [parameter.device for group in groups for parameter in group["params"]]


def _carry(optimizer: Any, before: dict[str, Any]) -> None:
    """Hooks, and what others have put on the object, are on it again."""
    own = vars(optimizer)
    others = {*before} - {*own, "state", "step"}
    own.update((name, value) for name, value in before.items() if is_hooks(name) or name in others)
    if "step" in before:
        reference = weakref.ref(optimizer)

        @functools.wraps(type(optimizer).step)
        def step(*arguments: Any, **named: Any) -> Any:
            found = reference()
            assert found is not None  # it is called on it
            found._opt_called = True
            return type(found).step(found, *arguments, **named)

        setattr(step, _SCHEDULED, True)
        own["step"] = step


def _done() -> None:
    """There is nothing to do: the object is gone, or was one of ours before."""
