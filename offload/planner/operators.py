"""What is known of an operator by itself: whether its output may be kept, what it writes, whether it
communicates.

One invariant: what is not known to be safe is not kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from offload.checkpoint.decisions import IN_PLACE
from offload.checkpoint.kept import is_collective

_DIFFERING = {
    "bincount",
    "cumsum",
    "histc",
    "index_add",
    "index_copy",
    "index_put",
    "index_reduce",
    "kthvalue",
    "nll_loss2d_forward",
    "put",
    "scatter_add",
    "scatter_reduce",
}
_ATTENTION = ("attention", "attn")


def communicates_in_place(operator: Any) -> bool:
    return isinstance(operator, OpOverload) and (
        operator.namespace == IN_PLACE or (is_collective(operator) and operator._schema.is_mutable)
    )


def collective_groups(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    """Names of the process groups that a call communicates in."""
    if not isinstance(operator, OpOverload):
        return
    for at, argument in enumerate(operator._schema.arguments):
        value = args[at] if at < len(args) else kwargs.get(argument.name)
        if argument.name == "group_name" and isinstance(value, str):
            yield value
        elif argument.name == "process_group":
            group = ProcessGroup.unbox(value) if isinstance(value, torch.ScriptObject) else value
            yield str(getattr(group, "group_name", group))


def may_differ(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a second call on the same inputs may give other bits: what torch.use_deterministic_algorithms
    refuses in a forward on a GPU."""
    name = getattr(operator, "_schema", None) and operator._schema.name.removeprefix("aten::").rstrip("_")
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
    return name in _DIFFERING and any(tensor.device.type != "cpu" for tensor in tensors)


def writes_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    if not isinstance(operator, OpOverload):
        return
    everything = operator.namespace == IN_PLACE  # its schema does not say which
    given = {
        argument.name: args[at] if at < len(args) else kwargs.get(argument.name)
        for at, argument in enumerate(operator._schema.arguments)
    }
    # nor that of a batch norm: an instance norm gives it copies that it has made of its statistics
    hidden = ("running_mean", "running_var") if given.get("training") else ()
    for argument in operator._schema.arguments:
        said = argument.alias_info is not None and argument.alias_info.is_write
        if everything or said or argument.name in hidden:
            value = given[argument.name]
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def draws_by_itself(operator: Any, kwargs: dict[str, Any]) -> bool:
    """Whether it draws random numbers from a generator that it is given, whose state no checkpoint keeps."""
    return isinstance(operator, OpOverload) and kwargs.get("generator") is not None


def is_attention(operator: Any) -> bool:
    """Whether its time grows with the square of a sequence."""
    name = str(operator)
    return any(part in name for part in _ATTENTION)
