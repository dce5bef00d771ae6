"""What can be known of an optimizer class before it is used: its arguments, its defaults, and how its step
treats a tensor.

One invariant: nothing is guessed. Only torch's own Adam and AdamW, exactly, are taken apart; other classes of
torch get whole tensors of their own and their own state; a class that is not torch's is made with the
arguments that were given, and steps all of its parameters in one call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

IMPLEMENTATION_KEYS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Keys of a param group that say how a class computes, and differ between the CPU's optimizer and the
GPU's."""


def checked_class(name: str, cls: object, kwargs: Mapping[str, Any]) -> type[Optimizer]:
    """The class, if it can be made with `kwargs`. Raises ValueError that says which argument is wrong."""
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        found = f"an object of {type(cls).__name__}" if isinstance(cls, Optimizer) else repr(cls)
        raise ValueError(
            f"{name} is {found}, must be a class derived from torch.optim.Optimizer, such as "
            "torch.optim.AdamW"
        )
    signature = inspect.signature(cls)
    try:
        signature.bind([], **kwargs)
    except TypeError as error:
        known = ", ".join(key for key in signature.parameters if key != "params")
        raise ValueError(
            f"{name} {cls.__name__} cannot be made with {_written(kwargs)}: {error}; it takes {known}"
        ) from error
    return cls


def _written(kwargs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "no further arguments"


def defaults_of(cls: type[Optimizer], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults that a class of torch puts into a param group that says nothing: another class puts them there
    itself. Raises ValueError for a value that the class refuses."""
    if not steps_each_alone(cls):
        return {}
    try:
        return cls([torch.zeros(1, 1, device="cpu")], **kwargs).defaults  # Muon takes matrices only
    except (TypeError, RuntimeError) as error:
        raise ValueError(f"{cls.__name__} cannot be made with {_written(kwargs)}: {error}") from error


def is_fused_adam(cls: type[Optimizer]) -> bool:
    """Return True if the step treats each element alone, and state of this class is known by name and starts
    as zeros, so that a parameter may be cut, its state may lie in flat memory and either side may step it. A
    subclass may do anything, and is not one."""
    return cls in (torch.optim.Adam, torch.optim.AdamW)


ELEMENTWISE = {
    getattr(torch.optim, name)
    for name in "Adam AdamW SGD Adagrad RMSprop Adadelta Adamax NAdam RAdam ASGD Rprop".split()  # noqa: SIM905
}
"""Classes whose step is known to treat each element alone, so that a shard may be stepped as if it were a
whole parameter."""

_EACH_ALONE = ELEMENTWISE | {
    getattr(torch.optim, name) for name in ("Adafactor", "Muon", "SparseAdam") if hasattr(torch.optim, name)
}


def steps_each_alone(cls: type[Optimizer]) -> bool:
    """Return True if the step is known to treat each parameter alone and to write nothing into a param group,
    so that several optimizers may share the parameters. Any other class, a subclass of these too, may look at
    all parameters at once (Lamb's norm) or count in its groups (schedule-free), and is one optimizer."""
    return cls in _EACH_ALONE


def step_alone(optimizer: Optimizer, *given: Any, **named: Any) -> Any:
    """A step of an optimizer inside another: without the hooks that are for all optimizers, which the outer
    one has called (torch.optim.optimizer.register_optimizer_step_pre_hook). given, named: the arguments of
    its step."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (optimizer, *given), named)
    call = functools.partial(_sgd_step, step=step) if type(optimizer) is torch.optim.SGD else step
    found = call(optimizer, *given, **named)
    for post_hook in optimizer._optimizer_step_post_hooks.values():
        post_hook(optimizer, (optimizer, *given), named)
    return found


def _sgd_step(optimizer: Optimizer, *closure: Callable[[], Any], step: Any) -> Any:
    """A step of SGD, whose fused kernel raises a TypeError where some parameters have momentum and others
    none yet, as those of a layer that was unfrozen: these are stepped first, by a call of their own, while
    the others have no gradient. The closure is called once."""
    loss = None
    if closure:
        with torch.enable_grad():
            loss = closure[0]()
    groups = [group for group in optimizer.param_groups if group["fused"] and group["momentum"]]
    begun = {
        each: optimizer.state.get(each, {}).get("momentum_buffer") is not None
        for group in groups
        for each in group["params"]
        if each.grad is not None
    }
    if len({*begun.values()}) < 2:
        step(optimizer)
        return loss
    every = (each for group in optimizer.param_groups for each in group["params"])
    gradients = [(each, each.grad) for each in every]
    try:
        for now in (False, True):
            for each, gradient in gradients:
                each.grad = gradient if begun.get(each, True) is now else None
            step(optimizer)
    finally:
        for each, gradient in gradients:
            each.grad = gradient
    return loss


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def state_names(group: Mapping[str, Any]) -> tuple[str, ...]:
    """The moments of an Adam of torch, one number an element each, all zero before the first step."""
    return MOMENTS if group.get("amsgrad") else MOMENTS[:2]


def kernel_named(values: Mapping[str, Any]) -> str | None:
    """The kernel that arguments or a param group name: "fused", "foreach" or "loop"; None if torch is to
    choose. `fused=False`, or `foreach=False`, alone names the loop, as torch takes it."""
    said = {name: values.get(name) for name in ("fused", "foreach")}
    chosen = [name for name, value in said.items() if value]
    return chosen[0] if chosen else "loop" if any(value is not None for value in said.values()) else None


def with_kernel(cls: type[Optimizer], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs` with the fused kernel asked for, where a class of torch has one and the user named none. The
    fused step is one pass over memory and releases the interpreter's lock; the plain one is a pass for each
    operation."""
    chosen = dict(kwargs)
    asked = kernel_named(kwargs) or any(kwargs.get(key) for key in ("differentiable", "capturable"))
    if steps_each_alone(cls) and "fused" in inspect.signature(cls).parameters and not asked:
        chosen["fused"] = True
    return chosen


def may_fail_half_way(cls: type[Optimizer], kwargs: Mapping[str, Any]) -> bool:
    """Return True if a step may raise after it has written: any but torch's fused kernels, which check all
    they are given first."""
    known = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
    return not (cls in known and with_kernel(cls, kwargs).get("fused"))
