"""What may never leave the device, and why.

One invariant: a tensor is offloaded only if its bytes are a value that this graph owns. Parameters, their
views and the casts that autocast keeps of them are not (FSDP2 frees and refills their storage while they are
saved); fake, functional and freed tensors have no bytes; bytes of another device are not copied. Of a frozen
parameter autocast keeps no cast: each graph makes one and owns it, and it may leave.

Storages that somebody else manages (parameters, receive buffers, tensors that the user opted out) are in one
registry. It holds every storage weakly, and while an entry lives the address in its key names no other
storage.

Memory of the CUDA graphs that torch.compile records by itself (mode="reduce-overhead", inductor's
`triton.cudagraphs`) is never taken from autograd. It belongs to the graph and is never given back, so a copy
would free nothing. And its storage object outlives its bytes: torch keeps it for the next replay, which
overwrites them, while torch counts references to know whether they are still needed. A record that released
it and then found it alive would read the bytes of another microbatch.

torch tells nobody which memory that is. Its tree of graphs is asked once for each node, when a tensor is
first saved after the node ran: addresses of a graph's outputs stay the graph's as long as the tree lives.
Source: torch/_inductor/cudagraph_trees.py, in what is asked the same from 2.11 to 2.15.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.parameter import is_lazy

from offload.device import Device
from offload.transfer.block import WeakStorage

TREES = "torch._inductor.cudagraph_trees"
"""The module that records such graphs: until it is imported there are none."""
_CONTAINERS = "tree_manager_containers"


@dataclass(slots=True)
class _Tree:
    """Nodes and addresses of one device's tree. manager: weak, for a tree that is gone takes its addresses
    with it."""

    manager: weakref.ref[Any]
    nodes: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    addresses: set[int] = field(default_factory=set)


class ReplayedMemory:
    """Which storages are outputs of such a graph."""

    def __init__(self) -> None:
        self._trees: dict[int | None, _Tree] = {}

    def holds(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Return True if `storage`, that of `tensor`, is an output of a graph that has run on the calling
        thread. For when TREES is imported. Never blocks the host."""
        device_index = tensor.device.index
        container = _containers(sys.modules[TREES]).get(device_index)
        if container is None or container.tree_manager is None:
            return False
        manager = container.tree_manager
        tree = self._trees.get(device_index)
        if tree is None or tree.manager() is not manager:
            tree = self._trees[device_index] = _Tree(weakref.ref(manager))
        node: Any = manager.current_node
        while node is not None and node not in tree.nodes:
            tree.nodes.add(node)
            tree.addresses.update(output.data_ptr() for output in node.outputs_weakrefs if output is not None)
            node = node.parent
        return storage.data_ptr() in tree.addresses


def _containers(trees: Any) -> dict[int | None, Any]:
    """torch's trees by device, of this thread: its own, or those of the thread whose backward it runs; none
    where neither compiled."""
    own: dict[int | None, Any] | None = getattr(trees.local, _CONTAINERS, None)
    if own is not None:
        return own
    return torch._C._get_obj_in_tls(_CONTAINERS) if torch._C._is_key_in_tls(_CONTAINERS) else {}


class ExternalKind(Enum):
    PARAMETER = "parameter"  # never leaves, nor do its views and its autocast casts
    OPTED_OUT = "opted out"  # never leaves: mark_not_offloadable
    # may leave, but is written from outside autograd: its version says nothing, so no save shares another's
    # copy
    BUFFER = "buffer"


_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})


class ExternalStorages:
    """Storages by kind. A storage registered twice keeps the stricter kind (the first that is not BUFFER).

    kinds: by the storage's key, for whoever sees one to read. replayed: those of torch's own CUDA graphs,
    which nobody registers.
    """

    def __init__(self) -> None:
        self.kinds: dict[int, ExternalKind] = {}
        self._storages: dict[int, WeakStorage] = {}
        self.replayed = ReplayedMemory()

    def register(self, tensor: torch.Tensor, kind: ExternalKind) -> None:
        for part in _plain_parts(tensor):
            with torch._C.DisableTorchFunctionSubclass():  # a weight may be watched
                storage = part.untyped_storage()
            if self.kinds.get(storage._cdata, ExternalKind.BUFFER) is ExternalKind.BUFFER:
                self._storages[storage._cdata] = WeakStorage(storage)
                self.kinds[storage._cdata] = kind

    def register_parameters(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            self.register(parameter, ExternalKind.PARAMETER)

    def forget_dead(self) -> None:
        """Drop entries whose storage is gone. Once a step: the dictionary stays as large as what lives."""
        for key in [key for key, weak in self._storages.items() if weak.storage() is None]:
            del self._storages[key], self.kinds[key]


def _plain_parts(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The tensors with storages of their own behind a wrapper subclass (a DTensor's local shard) or a sparse
    tensor, or the tensor itself; none of a lazy module's parameter that has no shape yet."""
    if is_lazy(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.Tensor:
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            member = getattr(tensor, name)
            if isinstance(member, torch.Tensor):  # a DTensor also names its mesh
                yield from _plain_parts(member)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield tensor.values()
    elif tensor.layout is torch.strided:
        yield tensor


# views and casts between a parameter and what an op saves of it: weight.t() under autocast is T <- ToCopy <-
# AccumulateGrad
_SHAPING = (
    "T",
    "Transpose",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Expand",
    "Permute",
    "Unsqueeze",
    "Squeeze",
)
_OTHERS = ("ToCopy", "Alias", "Detach", "Slice", "Split", "Select")
_PASSING_NODES = frozenset(f"{name}Backward0" for name in _SHAPING + _OTHERS)
_LONGEST_CHAIN = 6
_ACCUMULATE = "AccumulateGrad"


class Verdict(Enum):
    """ELIGIBLE leaves if its group does; every other value says why a tensor stays where it is."""

    ELIGIBLE = "eligible"
    SMALL = "smaller than min_numel (min_offloaded_tensor_size)"
    PARAMETER = "a parameter, or a view or a cast of one"
    OPTED_OUT = "marked not offloadable"
    ARGUMENT = "an argument of a recomputed block, of which one leaves"
    ELSEWHERE = "on another device"
    NO_BYTES = "its storage is freed, fake or functional"
    LAYOUT = "not a strided tensor of plain bytes"
    SUBCLASS = "of a tensor subclass that does not say what it is made of"
    INFERENCE = "an inference tensor"
    REPLAYED = "in the memory of a CUDA graph that torch.compile recorded"


def is_plain(tensor: torch.Tensor) -> bool:
    """A torch.Tensor or Parameter with its bytes in its own storage, as nearly all are."""
    return type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter


def is_wrapper(tensor: torch.Tensor) -> bool:
    """A wrapper subclass whose bytes are in inner tensors, such as DTensor or a float8 tensor."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, FakeTensor)


def is_dtensor(value: object) -> bool:
    """Return True for a DTensor; there is none before its module is imported, which takes a second."""
    return isinstance(value, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def waited(tensor: torch.Tensor) -> torch.Tensor:
    """The result of an asynchronous collective, waited for on the compute lane; any other tensor
    unchanged."""
    return tensor.trigger_wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def is_parameter(tensor: torch.Tensor) -> bool:
    """Recognised without the registry: the tensor, its view base, or the leaf at the end of a chain of views
    and casts."""
    # asked by type first: Parameter's own instance check looks for an attribute that a plain tensor does not
    # have, 1 to 2 microseconds
    base = tensor._base
    for found in (tensor, base):
        if found is not None and type(found) is not torch.Tensor and isinstance(found, torch.nn.Parameter):
            return True
    # a view's own nodes lead to what its base leads to
    node: Any = tensor.grad_fn if base is None else base.grad_fn
    for _ in range(_LONGEST_CHAIN):
        # not node.name(): on a Function's node that is whatever its forward stored in ctx.name
        name = None if node is None else type(node).__name__
        if name == _ACCUMULATE:
            variable = getattr(node, "variable", None)
            return type(variable) is not torch.Tensor and isinstance(variable, torch.nn.Parameter)
        if name not in _PASSING_NODES:
            return False
        node = node.next_functions[0][0]
    return False


def judge(tensor: torch.Tensor, device: Device, externals: ExternalStorages, min_elements: int) -> Verdict:
    """Judge if a plain tensor that autograd saves may leave. Looks only at metadata; never blocks the host.

    Asked for every saved tensor, so what nearly all are is found out without a further call.
    """
    if tensor.numel() < (min_elements or 1):
        return Verdict.SMALL
    # `is_parameter`, where the first look answers
    base = tensor._base
    node = tensor.grad_fn if base is None else base.grad_fn
    if (
        type(tensor) is not torch.Tensor
        or (base is not None and type(base) is not torch.Tensor)
        or (node is not None and type(node).__name__ in _LEADS_ON)
    ) and is_parameter(tensor):
        return Verdict.PARAMETER
    keys = _dispatch_keys(tensor).raw_repr()
    if type(tensor) is not torch.Tensor or keys not in _PLAIN_KEYS:
        verdict = _judge_kind(tensor)
        if verdict is not Verdict.ELIGIBLE:
            return verdict
        _PLAIN_KEYS.add(keys)
    if not device.owns(tensor):
        return Verdict.ELSEWHERE
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return Verdict.NO_BYTES
    kind = externals.kinds.get(storage._cdata)
    if kind is ExternalKind.PARAMETER:
        return Verdict.PARAMETER
    if kind is ExternalKind.OPTED_OUT:
        return Verdict.OPTED_OUT
    if TREES in sys.modules and externals.replayed.holds(tensor, storage):
        return Verdict.REPLAYED
    return Verdict.ELIGIBLE


_LEADS_ON = _PASSING_NODES | {_ACCUMULATE}
_PLAIN_KEYS: set[int] = set()
"""Dispatch keys of tensors that were looked at and found plain: all that `_judge_kind` asks of a plain
torch.Tensor is in them."""
_dispatch_keys = torch._C._dispatch_keys


def _judge_kind(tensor: torch.Tensor) -> Verdict:
    """Judge whether the tensor's bytes are its storage's, and will be when it is read; ELIGIBLE if so."""
    if torch._is_functional_tensor(tensor):
        return Verdict.NO_BYTES
    if not is_plain(tensor):
        return Verdict.NO_BYTES if isinstance(tensor, FakeTensor) else Verdict.SUBCLASS
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return Verdict.LAYOUT
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
        return Verdict.LAYOUT
    return Verdict.INFERENCE if tensor.is_inference() else Verdict.ELIGIBLE
