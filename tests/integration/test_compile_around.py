"""What stands around a compiled module: checkpoints, compiled autograd, a graph that is read twice, tensors
by hand, the optimizer.

Each meets the engine and the compiler at the same time; the gradients are those without the engine, bit for
bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from offload import HybridDeviceOptimizer, OffloadEngine, PipelineOffloadManager
from offload.compat.gradients import GradientOffloadHook
from offload.compat.tensors import TensorOffloader
from offload.device.sim import SimDevice
from tests.integration.compiled import (
    BACKENDS,
    DEPTH,
    LIMIT,
    ROWS,
    SAVED_BYTES,
    WIDTH,
    Block,
    Layer,
    assert_equal_bits,
    blocks_of,
    ended,
    fresh_compiler,
    in_group,
    manager_with,
    train,
)

STEPS = 3
INPUT_BYTES = 4 * ROWS * WIDTH


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


# -- checkpoints ---------------------------------------------------------------------------------------------
def _checkpoint_of_compiled(block: Block, *, use_reentrant: bool) -> Layer:
    compiled = torch.compile(block, backend="aot_eager")
    return lambda x: checkpoint(compiled, x, use_reentrant=use_reentrant)


def _compiled_checkpoint(block: Block) -> Layer:
    return torch.compile(lambda x: checkpoint(block, x, use_reentrant=False), backend="aot_eager")


@pytest.mark.parametrize(
    "layer_of",
    [
        partial(_checkpoint_of_compiled, use_reentrant=False),
        partial(_checkpoint_of_compiled, use_reentrant=True),
        _compiled_checkpoint,
    ],
    ids=["checkpoint of a compiled block", "reentrant checkpoint of a compiled block", "compiled checkpoint"],
)
def test_of_a_block_checkpointed_and_compiled_the_input_leaves_and_nothing_of_its_recompute(
    layer_of: Callable[[Block], Layer],
) -> None:
    PipelineOffloadManager.OFFLOAD_MGR = None
    blocks = blocks_of(Block)
    layers = [layer_of(block) for block in blocks]
    expected = [train(layers, blocks, step, microbatches=2) for step in range(STEPS)]
    manager = manager_with(device_limit_bytes=2 * INPUT_BYTES)  # the plan may keep some, never more
    for step in range(STEPS):
        assert_equal_bits(
            train([in_group(layer) for layer in layers], blocks, step, microbatches=2), expected[step]
        )
        stats = ended(manager)
        assert stats.saved == 2 * DEPTH
        assert stats.spill_bytes == stats.spilled * INPUT_BYTES


# -- compiled autograd ---------------------------------------------------------------------------------------
def _compiled_autograd() -> AbstractContextManager[Any]:
    return compiled_autograd._enable(torch.compile(backend="aot_eager"))


def _small(x: torch.Tensor) -> torch.Tensor:
    # two saved tensors: each read in the backward is a break of the graph that compiled autograd makes
    return x.sin().exp()


@pytest.mark.parametrize("compiled", [False, True], ids=["eager forward", "compiled forward"])
def test_under_compiled_autograd_nothing_of_the_engine_is_traced_and_no_step_after_the_first_compiles(
    compiled: bool,
) -> None:
    PipelineOffloadManager.OFFLOAD_MGR = None
    layer = torch.compile(_small, backend="aot_eager") if compiled else _small
    expected = [train([layer, layer], [], step, around_backward=_compiled_autograd) for step in range(STEPS)]
    torch._dynamo.reset()
    counters.clear()
    manager = manager_with(device_limit_bytes=2 * INPUT_BYTES)
    after_first: dict[str, int] = {}
    for step in range(STEPS):
        assert_equal_bits(
            train([in_group(layer), in_group(layer)], [], step, around_backward=_compiled_autograd),
            expected[step],
        )
        assert ended(manager).restored > 0
        after_first = after_first or dict(counters["stats"])
    assert dict(counters["stats"]) == after_first, "a later step was compiled anew"
    assert counters["graph_break"]
    for reason in counters["graph_break"]:
        assert "skip directory" in reason or "marked as skipped" in reason, (
            f"the compiler looked into the engine: {reason}"
        )
        assert "/offload/" in reason, f"the compiler looked into the engine: {reason}"


# -- a graph that is read twice ------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
@torch._functorch.config.patch(donated_buffer=False)
def test_graph_of_compiled_blocks_gives_the_same_gradients_each_time_it_is_read(backend: str) -> None:
    """As torch asks for it: compiled without buffers that a backward may overwrite. Each read fetches the
    bytes again."""
    manager = manager_with(**LIMIT)
    blocks = blocks_of(Block)
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()
    manager.begin_chunk(0, 0)
    y = x
    for block in blocks:
        y = in_group(torch.compile(block, backend=backend))(y)
    manager.end_forward(0, 0)
    manager.begin_backward(0, 0, "B")
    found = []
    for keep in (True, True, False):
        found.append(torch.autograd.grad(y.square().sum(), [x, *blocks[0].parameters()], retain_graph=keep))
    manager.end_backward(0, 0, "B")
    assert_equal_bits(list(found[1]), list(found[0]))
    assert_equal_bits(list(found[2]), list(found[0]))
    assert ended(manager).restore_bytes > DEPTH * SAVED_BYTES


@pytest.mark.parametrize("managed", [False, True], ids=["torch alone", "with the engine"])
def test_graph_that_may_be_overwritten_is_refused_a_second_reading_by_torch_itself(managed: bool) -> None:
    (block, *_) = blocks_of(Block)
    PipelineOffloadManager.OFFLOAD_MGR = None
    if managed:
        manager_with(**LIMIT)
    layer = in_group(torch.compile(block, backend="aot_eager"))
    train([layer], [block], 0)
    manager = PipelineOffloadManager.OFFLOAD_MGR
    if manager is not None:
        manager.step_end()
        manager.begin_chunk(0, 0)
    y = layer(torch.randn(ROWS, WIDTH, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match="donated buffer"):
        y.backward(retain_graph=True)


# -- by hand, and the optimizer ------------------------------------------------------------------------------
@pytest.mark.req("S3-79")
def test_outputs_and_gradients_of_a_compiled_module_come_back_bit_for_bit_when_moved_by_hand() -> None:
    manager = manager_with()
    manager.begin_chunk(0, 0)
    handler = manager.cur_forward_chunk()
    (block, *_) = blocks_of(Block)
    y = torch.compile(block, backend="aot_eager")(torch.randn(ROWS, WIDTH, requires_grad=True))
    expected = y.detach().clone()
    moved = handler.reload(handler.offload(y))
    assert torch.equal(moved, expected)
    assert moved.data_ptr() != y.data_ptr()
    offloader = TensorOffloader(engine=manager.engine)
    assert torch.equal(offloader.reload(offloader.offload(y)), expected)

    handler.on_group_start_forward("by hand")
    tag = handler.tensor_push(y)
    handler.on_group_commit_forward(name="by hand")
    assert torch.equal(handler.tensor_pop(tag), expected)

    gradients = torch.autograd.grad(y.square().sum(), list(block.parameters()), retain_graph=True)
    hook = GradientOffloadHook(offloader)
    hook.register(block.parameters())
    y.square().sum().backward()
    assert [parameter.grad for parameter in block.parameters()] == [None] * len(gradients)
    hook.reload_all()
    for parameter, gradient in zip(block.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.req("S3-79")
def test_gradients_of_compiled_blocks_leave_for_the_optimizer_and_the_weights_are_those_of_torch() -> None:
    """Saved tensors leave by groups and gradients by the optimizer's hooks, of the same compiled blocks in
    the same step."""
    expected_blocks = blocks_of(Block)
    PipelineOffloadManager.OFFLOAD_MGR = None
    compiled: list[Layer] = [torch.compile(block, backend="aot_eager") for block in expected_blocks]
    model = torch.nn.ModuleList(expected_blocks)
    plain = AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        train(compiled, [], step)
        plain.step()
        plain.zero_grad()

    torch._dynamo.reset()
    manager = manager_with(**LIMIT)
    blocks = blocks_of(Block)
    layers = [in_group(torch.compile(block, backend="aot_eager")) for block in blocks]
    model = torch.nn.ModuleList(blocks)
    gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    device = SimDevice()
    engine = OffloadEngine(device=device)
    options: dict[str, Any] = {"offload_fraction": 1.0, "cpu_share": 1.0, "lr": 1e-2, "fused": True}
    options |= {"overlap": "backward", "model": model}
    offloaded = HybridDeviceOptimizer(model.parameters(), engine=engine, **options)
    for step in range(STEPS):
        before = device.copied_bytes(device.d2h)
        offloaded.last_microbatch = True
        train(layers, [], step)
        offloaded._steps._stepper.synchronize()
        gone = device.copied_bytes(device.d2h) - before
        assert gone == 2 * gradient_bytes, "all of them in the backward, with their weights"
        offloaded.step()
        offloaded.zero_grad()
        ended(manager)
    offloaded.synchronize_parameters()
    weights = [
        [parameter.detach() for block in owners for parameter in block.parameters()]
        for owners in (blocks, expected_blocks)
    ]
    assert_equal_bits(weights[0], weights[1])
    offloaded.close()
    engine.close()
