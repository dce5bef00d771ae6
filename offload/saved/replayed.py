"""Memory of the CUDA graphs that torch.compile records by itself (mode="reduce-overhead", inductor's
`triton.cudagraphs`).

One invariant: a tensor whose bytes lie there is never taken from autograd. Its memory belongs to the graph
and is never given back, so a copy would free nothing. And its storage object outlives its bytes: torch keeps
it for the next replay, which overwrites them, while torch counts references to know whether they are still
needed. A record that released it and then found it alive would read the bytes of another microbatch.

torch tells nobody which memory that is. Its tree of graphs is asked once for each node, when a tensor is
first saved after the node ran: addresses of a graph's outputs stay the graph's as long as the tree lives.
Source: torch/_inductor/cudagraph_trees.py, in what is asked the same from 2.11 to 2.15.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

TREES = "torch._inductor.cudagraph_trees"
"""The module that records such graphs: until it is imported there are none."""
_CONTAINERS = "tree_manager_containers"


@dataclass(slots=True)
class _Tree:
    """What is known of one device's tree. manager: weak, for a tree that is gone takes its addresses with
    it."""

    manager: weakref.ref[Any]
    nodes: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    addresses: set[int] = field(default_factory=set)


class ReplayedMemory:
    """Which storages are outputs of such a graph."""

    def __init__(self) -> None:
        self._trees: dict[int | None, _Tree] = {}

    def holds(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether `storage`, that of `tensor`, is an output of a graph that has run on the calling thread.
        For when TREES is imported. Never blocks the host."""
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
