"""Memory of CUDA graphs that torch.compile records: recognised by asking torch's own tree of graphs, and
never taken.

The tree here is made of torch's own nodes, whose outputs are on the CPU; what such a graph does to them is
done by hand.
"""

from __future__ import annotations

import gc
import importlib
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import OffloadConfig, OffloadEngine, PipelineOffloadManager
from offload.device.sim import SimDevice
from offload.saved.filters import ReplayedMemory

trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")


class _Manager:
    """The part of torch's CUDAGraphTreeManager that is asked."""

    def __init__(self) -> None:
        self.current_node: Any = None

    def run(self, *outputs: Tensor) -> None:
        """A graph has run after the current one, and these are its outputs."""
        function = SimpleNamespace(user_visible_output_idxs=())  # which torch asks since 2.14
        self.current_node = trees.CUDAWarmupNode(
            function, self.current_node, (0, 0), None, 0, None, None, False, 0
        )
        self.current_node.outputs_weakrefs.extend(
            [*(trees.StorageWeakRefWrapper(output) for output in outputs), None]
        )


@pytest.fixture
def tree() -> Iterator[_Manager]:
    container = trees.TreeManagerContainer(0)
    container.tree_manager = _Manager()
    trees.local.tree_manager_containers[None] = container  # the index of a CPU tensor's device
    yield container.tree_manager
    del trees.local.tree_manager_containers[None]


def holds(memory: ReplayedMemory, tensor: Tensor) -> bool:
    return memory.holds(tensor, tensor.untyped_storage())


def test_without_a_tree_no_memory_is_replayed() -> None:
    assert not holds(ReplayedMemory(), torch.ones(4))


def test_tree_that_has_run_nothing_holds_nothing(tree: _Manager) -> None:
    assert not holds(ReplayedMemory(), torch.ones(4))


def test_outputs_of_every_graph_on_the_way_are_replayed_and_so_are_their_views(tree: _Manager) -> None:
    memory = ReplayedMemory()
    first, second, third, own = (torch.ones(4, 4) for _ in range(4))
    tree.run(first)
    tree.run(second)  # two graphs between two questions
    assert holds(memory, first)
    assert holds(memory, second)
    tree.run(third)
    assert holds(memory, third.t()[1:])
    assert holds(memory, first)
    assert not holds(memory, own)


def test_each_graph_is_asked_once_for_its_outputs(tree: _Manager) -> None:
    asked = []

    class Counted(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            asked.append(self)
            return super().__iter__()

    memory, outputs = ReplayedMemory(), [torch.ones(4) for _ in range(3)]
    for output in outputs:
        tree.run(output)
        tree.current_node.outputs_weakrefs = Counted(tree.current_node.outputs_weakrefs)
        assert holds(memory, output)
    assert len(asked) == len(outputs)


def test_what_was_replayed_stays_so_when_the_run_of_graphs_has_ended(tree: _Manager) -> None:
    memory = ReplayedMemory()
    output = torch.ones(4)
    tree.run(output)
    assert holds(memory, output)
    tree.current_node = None
    assert holds(memory, output)


def test_addresses_of_a_tree_that_is_gone_are_forgotten(tree: _Manager) -> None:
    memory = ReplayedMemory()
    output = torch.ones(4)
    tree.run(output)
    assert holds(memory, output)
    trees.local.tree_manager_containers[None].tree_manager = _Manager()
    gc.collect()
    assert not holds(memory, output)


def test_what_the_memory_asks_of_torch_is_there() -> None:
    assert isinstance(trees.CUDAGraphNode.parent, property)
    assert isinstance(trees.CUDAGraphTreeManager.current_node, property)
    assert trees.local.tree_manager_containers == {}


def _manager() -> PipelineOffloadManager:
    config = OffloadConfig(min_offloaded_tensor_size=1, device_limit_bytes=64, host_reserve_bytes=1 << 20)
    return PipelineOffloadManager(OffloadEngine(config, device=SimDevice()), print_summary=False)


def test_saved_tensors_of_such_graphs_stay_and_are_said_once_and_the_others_leave(
    tree: _Manager, caplog: pytest.LogCaptureFixture
) -> None:
    manager = PipelineOffloadManager.reset_instance(_manager())
    replayed, own = torch.rand(16), torch.rand(16)  # 64 bytes each
    tree.run(replayed)
    x = torch.rand(16, requires_grad=True)
    for step in range(3):
        manager.begin_chunk(0, 0)
        with caplog.at_level(logging.WARNING, "offload"):
            y = offload.group_start(x, "block")
            with offload.offload_hooks():
                y = y * replayed * own
            y = offload.group_commit(y, "block")
        manager.end_forward(0, 0)
        manager.begin_backward(0, 0, "B")
        (gradient,) = torch.autograd.grad(y.sum(), [x])
        manager.end_backward(0, 0, "B")
        assert torch.equal(gradient, own * replayed)
        stats = manager.step_end()
        assert stats.saved == 1
        assert stats.spilled == 1 or step > 0  # after warm-up the plan keeps it, for its read comes at once
    (record,) = [record for record in caplog.records if record.name.startswith("offload.")]
    message = record.getMessage()
    assert message.startswith(
        "group 'block' of chunk s0m0: 64 bytes (1 tensor) of what it saves stays on the device"
    )
    assert 'mode="reduce-overhead"' in message
    assert '"max-autotune-no-cudagraphs"' in message
    PipelineOffloadManager.reset_instance()


@pytest.mark.parametrize(
    "asked",
    [
        True,
        pytest.param(
            False,
            marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="the next replay's bytes"),
        ),
    ],
)
def test_tree_sees_that_the_bytes_are_still_needed_and_does_not_replay_over_them(
    tree: _Manager, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch keeps an output's storage object for the next replay, and counts references to learn whether its
    bytes are still needed. A record that had let go of it would be told nothing, find the object alive, and
    read what the next replay has written."""
    if not asked:
        monkeypatch.setattr(ReplayedMemory, "holds", lambda *_: False)
    manager = PipelineOffloadManager.reset_instance(_manager())
    kept_by_torch = torch.full((16,), 2.0)
    tree.run(kept_by_torch)
    needed = tree.current_node.outputs_weakrefs[0]
    alone = torch._C._storage_Use_Count(needed.ref.cdata)
    x = torch.rand(16, requires_grad=True)
    manager.begin_chunk(0, 0)
    y = offload.group_start(x, "block")
    with offload.offload_hooks():
        y = y * kept_by_torch.detach()
    y = offload.group_commit(y, "block")
    filler = torch.rand(64, requires_grad=True)  # past the limit: whatever may leave has left
    z = offload.group_start(filler, "next")
    with offload.offload_hooks():
        z = z.exp()
    z = offload.group_commit(z, "next")
    manager.end_forward(0, 0)
    if torch._C._storage_Use_Count(needed.ref.cdata) == alone:
        kept_by_torch.numpy()[:] = 7.0  # as a replay does: no version moves
    manager.begin_backward(0, 0, "B")
    (gradient,) = torch.autograd.grad(y.sum(), [x])
    assert torch.equal(gradient, torch.full((16,), 2.0))
    torch.autograd.grad(z.sum(), [filler])
    manager.end_backward(0, 0, "B")
    manager.step_end()
    PipelineOffloadManager.reset_instance()
