"""Tensors whose storage is freed by force once their group has left, although Python still holds them.

One invariant: what is freed was copied to the host whole, by this group, and nobody but Python's references
to the listed tensors holds it: no save of any chunk, no other graph, no view.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from offload.errors import OffloadError
from offload.saved.handles import SavedGroup
from offload.sizes import bytes_text
from offload.telemetry.speaker import speaker
from offload.transfer.block import BlockState, DeviceBlock
from offload.transfer.engine import TransferEngine

logger = speaker(__name__)


def checked_tensors(tensors: object) -> list[torch.Tensor]:
    """A list of tensors to release by force; None is an empty one."""
    if tensors is None:
        return []
    listed = list(tensors) if isinstance(tensors, (list, tuple)) else None
    if listed is None or not all(isinstance(tensor, torch.Tensor) for tensor in listed):
        found = type(tensors).__name__ if listed is None else [type(item).__name__ for item in listed]
        raise ValueError(f"forced_released_tensors is {found}, must be a list of tensors, or None")
    return listed


def without_output(tensors: list[torch.Tensor], output: torch.Tensor, name: str) -> list[torch.Tensor]:
    """`tensors` but for those that share the storage of the group's output, which its caller reads next; a
    warning names them."""
    own, checked = output.untyped_storage()._cdata, checked_tensors(tensors)
    kept = [tensor for tensor in checked if tensor.untyped_storage()._cdata != own]
    if len(kept) < len(checked):
        logger.warning(
            f"group {name!r}: {len(checked) - len(kept)} tensor(s) of forced_released_tensors share the "
            f"storage of the group's output, of shape {tuple(output.shape)}, which is read after the commit: "
            "they stay; take them off the list"
        )
    return kept


def release(
    tensors: list[torch.Tensor],
    saved: SavedGroup,
    blocks: Iterable[DeviceBlock],
    transfers: TransferEngine,
) -> None:
    """Free the storage of `tensors`, where that is safe; a warning says where it is not. Compute waits for
    the copies, the host does not.

    A tensor that is freed becomes a `ReleasedTensor`: Python may still hold it, and an operator that reads it
    raises.
    saved: the group that they left with. blocks: every living one that may share a storage with them.
    """
    own = set(saved.living())
    sharing: dict[int, list[DeviceBlock]] = {}
    for block in blocks:
        for key in block.storage_keys():
            sharing.setdefault(key, []).append(block)
    listed: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            listed.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    for key, aliases in listed.items():
        sharers = sharing.get(key, [])
        if any(block in own and saved.keeps(block.slot) for block in sharers):
            continue  # the plan keeps this part of the group
        storage = aliases[0].untyped_storage()
        why = None
        if not any(block in own and block.nbytes == storage.nbytes() for block in sharers):
            why = "this group has not copied all of its storage to the host"
        elif any(block.state is BlockState.RESIDENT for block in sharers):
            why = "another save still keeps it on the device"
        else:
            for block in sharers:
                if block.transfer is not None:
                    transfers.settle_spill(block.transfer)
            if is_held(aliases):
                why = (
                    "a graph that saved it outside of the hooks, or a view that is not listed, still holds it"
                )
        if why is not None:
            logger.warning(
                f"group {saved.id}: a tensor of shape {tuple(aliases[0].shape)} "
                f"({bytes_text(storage.nbytes())} of storage) was to be released, but {why}; it stays. Save "
                "all of it inside the group, or take it off forced_released_tensors"
            )
            continue
        storage.resize_(0)
        for tensor in aliases:
            if type(tensor) is torch.Tensor:
                mark_released(tensor, f"group {saved.id}", _WITH_ITS_GROUP)


def is_held(aliases: list[torch.Tensor]) -> bool:
    """Predicate: more than Python's own references to `aliases`, of one storage, and the engine holds it."""
    known = {id(tensor): tensor for tensor in aliases}
    for tensor in aliases:
        if tensor._base is not None:
            known.setdefault(id(tensor._base), tensor._base)
    for tensor in known.values():
        expected = 1 + (tensor.is_leaf and tensor.requires_grad)  # of Python, and of AccumulateGrad
        expected += sum(other._base is tensor for other in known.values())
        if tensor._use_count() > expected:  # type: ignore[attr-defined]
            return True
    storage = aliases[0].untyped_storage()  # one reference of its own
    return torch._C._storage_Use_Count(storage._cdata) > 1 + len(known)


_WITH_ITS_GROUP = (
    "its bytes left with the group and come back for the backward only; take it off forced_released_tensors, "
    "or use it before the commit"
)


def mark_released(tensor: torch.Tensor, by: str, advice: str) -> None:
    """The tensor's storage is freed. advice: for the error of an operator on it."""
    is_parameter = isinstance(tensor, torch.nn.Parameter)
    tensor.__class__ = ReleasedTensor
    vars(tensor).update(released_by=by, advice=advice, _is_param=is_parameter)


def unmark_released(tensor: torch.Tensor) -> None:
    """It has bytes again, and torch's own class."""
    tensor.__class__ = torch.nn.Parameter if vars(tensor).pop("_is_param") else torch.Tensor
    del tensor.released_by, tensor.advice  # type: ignore[attr-defined]


class ReleasedTensor(torch.Tensor):
    """A tensor whose storage was freed by a group's commit, or by hand. What needs no bytes may be asked of
    it: its shape, its gradient, a hook. An operator on it raises OffloadError. Given other `data`, it is a
    plain tensor again."""

    released_by: str
    advice: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        if name == "__set__" or (name == "__get__" and attribute not in _ALIASES) or name in _WITHOUT_BYTES:
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **(kwargs or {}))
            if (name, attribute) == ("__set__", "data"):
                unmark_released(args[0])
            return result
        released = next((value for value in args if isinstance(value, cls)), "a released tensor")
        raise OffloadError(f"{name} on {released!r}: {getattr(released, 'advice', '')}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"a tensor of shape {tuple(self.shape)} that {self.released_by} released"


_ALIASES = frozenset(["data", "T", "mT", "H", "mH", "real", "imag"])
_ABOUT_ITSELF = ("size", "stride", "dim", "numel", "element_size", "storage_offset", "is_contiguous")
_OF_ITS_STORAGE = ("untyped_storage", "data_ptr", "get_device", "is_floating_point", "is_complex", "__hash__")
_OF_ITS_GRADIENT = ("grad", "backward", "retain_grad", "register_hook", "requires_grad_")
_WITHOUT_BYTES = frozenset((*_ABOUT_ITSELF, *_OF_ITS_STORAGE, *_OF_ITS_GRADIENT))
