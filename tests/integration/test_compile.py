"""torch.compile and the marks: a compiled block inside a group, a whole compiled layer with the marks inside,
and what is said of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import offload
from tests.integration.compiled import (
    BACKENDS,
    DEPTH,
    LIMIT,
    ROWS,
    SAVED_BYTES,
    WIDTH,
    Block,
    KeepingBlock,
    Layer,
    MarkedBlock,
    MarkedKeepingBlock,
    assert_equal_bits,
    blocks_of,
    ended,
    fresh_compiler,
    in_group,
    manager_with,
    reference,
    train,
)

STEPS = 3

Warnings = Callable[[], list[str]]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Warnings:
    """What the engine has warned of since the test began."""
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("offload.")]


def _grouped(blocks: Sequence[Block], backend: str) -> list[Layer]:
    return [in_group(torch.compile(block, backend=backend)) for block in blocks]


# -- a compiled block inside a group -------------------------------------------------------------------------
@pytest.mark.req("S3-79")
@pytest.mark.parametrize("config", [LIMIT, {}], ids=["all leaves", "a margin stays"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_block_inside_a_group_has_the_same_gradients_and_all_it_saves_leaves(
    backend: str, config: dict[str, Any], warnings: Warnings
) -> None:
    """Two microbatches, so that graphs run twice before what they saved is read. What the plan keeps is
    overwritten in place, too."""
    expected = reference(backend, steps=STEPS, microbatches=2)
    manager = manager_with(**config)
    blocks = blocks_of(Block)
    layers = _grouped(blocks, backend)
    for step in range(STEPS):
        assert_equal_bits(train(layers, blocks, step, microbatches=2), expected[step])
        stats = ended(manager)
        stayed = config == {} and step > 0  # the last block of the microbatch whose backward comes first
        assert stats.spill_bytes == (2 * DEPTH - stayed) * SAVED_BYTES
        assert (stats.kept == 0) != stayed
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    # without a limit, copies in flight have room for all that so small a model saves, which is said
    assert [said for said in warnings() if "as if none had left" not in said] == []


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_that_a_compiled_backward_may_overwrite_are_among_what_leaves(backend: str) -> None:
    manager = manager_with(**LIMIT)
    (block, *_) = blocks_of(Block)
    nodes: list[Any] = []

    def noting(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = compiled(x)
        nodes.append(y.grad_fn)
        return y

    compiled = torch.compile(block, backend=backend)
    train([in_group(noting)], [block], 0)
    metadata = nodes[0]._forward_cls.metadata
    assert metadata.bw_donated_idxs, "this block no longer shows what it was made for"
    assert metadata.num_tensors_saved_with_no_vc_check == 0
    assert ended(manager).spill_bytes == SAVED_BYTES


@pytest.mark.parametrize("kind", [Block, MarkedBlock])
def test_new_shapes_compile_one_more_graph_and_then_none(kind: type[Block]) -> None:
    rows = (8, 8, 12, 16, 24)
    expected = reference("aot_eager", steps=len(rows), rows=rows)
    manager = manager_with()
    blocks = blocks_of(kind)
    compiled: list[Layer] = [torch.compile(block, backend="aot_eager") for block in blocks]
    layers = compiled if kind is MarkedBlock else [in_group(layer) for layer in compiled]
    graphs = []
    for step, number in enumerate(rows):
        assert_equal_bits(train(layers, blocks, step, rows=number), expected[step])
        ended(manager)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 2, 2, 2]


# -- a layer that is compiled whole --------------------------------------------------------------------------
@pytest.mark.req("S3-79")
@pytest.mark.parametrize("backend", BACKENDS)
def test_layer_compiled_whole_breaks_at_its_two_marks_and_is_compiled_once(
    backend: str, warnings: Warnings
) -> None:
    expected = reference(backend, steps=5)
    manager = manager_with(**LIMIT)
    blocks = blocks_of(MarkedBlock)
    layers = [torch.compile(block, backend=backend) for block in blocks]
    after_first: dict[str, int] = {}
    for step in range(5):
        assert_equal_bits(train(layers, blocks, step), expected[step])
        assert ended(manager).spill_bytes == DEPTH * SAVED_BYTES
        after_first = after_first or dict(counters["stats"])
    assert sum(counters["graph_break"].values()) == 2, list(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1
    assert dict(counters["stats"]) == after_first, "a later step was compiled anew"
    assert warnings() == []


def test_with_block_inside_a_compiled_layer_makes_it_eager_and_stays_exact() -> None:
    expected = reference("aot_eager", steps=STEPS)
    manager = manager_with(**LIMIT)

    class Layer(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return in_group(super().forward)(x)

    blocks = blocks_of(Layer)
    layers = [torch.compile(block, backend="aot_eager") for block in blocks]
    for step in range(STEPS):
        assert_equal_bits(train(layers, blocks, step), expected[step])
        ended(manager)


def test_mark_in_a_function_compiled_with_fullgraph_is_an_error_that_names_the_way_out() -> None:
    manager_with()
    (block, *_) = blocks_of(MarkedBlock)
    with pytest.raises(torch._dynamo.exc.Unsupported) as error:
        train([torch.compile(block, backend="aot_eager", fullgraph=True)], [block], 0)
    message = str(error.value)
    assert "group_start" in message
    assert "compile without fullgraph=True" in message
    assert "outside of the compiled function" in message


# -- what cannot leave is said -------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [KeepingBlock, MarkedKeepingBlock])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_compiled_function_keeps_beside_the_hooks_is_said_once_by_group_graph_and_bytes(
    backend: str, kind: type[Block], warnings: Warnings
) -> None:
    expected = reference(backend, KeepingBlock, steps=STEPS, microbatches=2)
    manager = manager_with(**LIMIT)
    blocks = blocks_of(kind)
    compiled: list[Layer] = [torch.compile(block, backend=backend) for block in blocks]
    layers = compiled if kind is MarkedKeepingBlock else [in_group(layer) for layer in compiled]
    for step in range(STEPS):
        assert_equal_bits(train(layers, blocks, step, microbatches=2), expected[step])
        ended(manager)
    (message,) = warnings()
    assert message.startswith("group 'block' of chunk s0m0: compiled graph ")
    if torch.__version__ >= (2, 13):  # torch 2.11 has only a number for it
        assert "compiled.py:" in message, "the compiled function is named by its file"
    assert f"keeps {4 * ROWS * WIDTH:,} bytes (1 tensor) beside the saved-tensor hooks" in message
    assert "ctx.save_for_backward" in message


def test_two_regions_of_one_group_are_two_warnings(warnings: Warnings) -> None:
    manager = manager_with(**LIMIT)
    first, second, _ = blocks_of(KeepingBlock)
    one, other = (
        torch.compile(first, backend="aot_eager"),
        torch.compile(lambda x: second(x).cos(), backend="aot_eager"),
    )
    for step in range(2):
        train([in_group(lambda x: other(one(x)))], [first, second], step)
        ended(manager)
    assert len(warnings()) == len(set(warnings())) == 2


def test_region_before_the_group_is_not_said_to_be_in_it(warnings: Warnings) -> None:
    manager = manager_with(**LIMIT)
    first, second, _ = blocks_of(KeepingBlock)
    compiled = torch.compile(first, backend="aot_eager")
    plain = Block.forward

    def around(x: torch.Tensor) -> torch.Tensor:
        before = compiled(x)
        # reaches what came before past its start mark, too
        return in_group(lambda y: plain(second, y) + before)(before)

    train([around], [first], 0)
    ended(manager)
    assert warnings() == []


def test_what_is_too_small_to_leave_is_not_said(warnings: Warnings) -> None:
    manager = manager_with(min_offloaded_tensor_size=ROWS * WIDTH + 1)
    (block, *_) = blocks_of(KeepingBlock)
    train(_grouped([block], "aot_eager"), [block], 0)
    ended(manager)
    assert warnings() == []


# -- marks without a compiler --------------------------------------------------------------------------------
def test_hooks_of_a_mark_end_with_its_commit_or_after_an_exception_with_the_step() -> None:
    manager = manager_with(**LIMIT)
    manager.begin_chunk(0, 0)
    x = torch.randn(8, WIDTH, requires_grad=True)
    y = offload.group_start(x, "outer", hooks=True)
    y = offload.group_start(y, "inner", hooks=True)
    y = offload.group_commit(torch.sin(y), "inner")
    assert manager.engine.hooks.innermost() is not None
    y = offload.group_commit(torch.sin(y), "outer")
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None

    offload.group_start(y, "outer", hooks=True)  # its commit is never reached
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    manager.step_end()
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
