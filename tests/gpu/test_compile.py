"""torch.compile and groups on a GPU: the bits of the same compiled blocks without offload, what leaves, and
what is said.

Inductor's backward writes over the buffers that it was handed; its CUDA graphs (mode="reduce-overhead") own
what their forward saved. Reference and offloaded run call the same compiled kernels on the same values, so
the bits are the same.
"""

from __future__ import annotations

import gc
import importlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

from offload import PipelineOffloadManager, StepStats, group_commit, group_start, offload_hooks
from tests.gpu.workbench import DEVICE, Action, assert_same_bits, build_manager, installed, one_f_one_b
from tests.nets import ProductKeptOnCtx

pytestmark = pytest.mark.gpu

WIDTH, ROWS, DEPTH, STEPS = 128, 64, 2, 4
MIB = 1 << 20
GPIPE: list[Action] = [("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0)]

Layer = Callable[[Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MarkedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return group_commit(super().forward(group_start(x, "block", hooks=True)), "block")


class KeepingBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return ProductKeptOnCtx.apply(super().forward(x), self.down.weight.detach()[:, :WIDTH])


def blocks_of(kind: type[Block]) -> list[Block]:
    torch.manual_seed(0)
    return [kind().to(DEVICE) for _ in range(DEPTH)]


def in_group(layer: Layer) -> Layer:
    def grouped(x: Tensor) -> Tensor:
        x = group_start(x, "block")
        with offload_hooks():
            y = layer(x)
        return group_commit(y, "block")

    return grouped


def run(
    layers: Sequence[Layer],
    owners: Sequence[nn.Module],
    order: Sequence[Action],
    manager: PipelineOffloadManager | None,
) -> tuple[list[Tensor], list[StepStats]]:
    """The gradients and the figures of STEPS steps; gradients are copies, for a CUDA graph's next replay
    overwrites its own."""
    gradients: list[Tensor] = []
    stats: list[StepStats] = []
    with installed(manager):
        for step in range(STEPS):
            torch.compiler.cudagraph_mark_step_begin()
            inputs: dict[int, Tensor] = {}
            live: dict[int, Tensor] = {}
            for kind, stage, number in order:
                if kind == "F":
                    if manager is not None:
                        manager.begin_chunk(stage, number)
                    seed = torch.Generator().manual_seed(100 * step + number)
                    y = inputs[number] = torch.randn(ROWS, WIDTH, generator=seed).to(DEVICE).requires_grad_()
                    for layer in layers:
                        y = layer(y)
                    live[number] = y
                    if manager is not None:
                        manager.end_forward(stage, number)
                else:
                    if manager is not None:
                        manager.begin_backward(stage, number, kind)
                    live.pop(number).square().sum().backward()
                    if manager is not None:
                        manager.end_backward(stage, number, kind)
            tensors = [*inputs.values(), *(parameter for owner in owners for parameter in owner.parameters())]
            for tensor in tensors:
                assert tensor.grad is not None
                gradients.append(tensor.grad.clone())
                tensor.grad = None
            if manager is not None:
                stats.append(manager.step_end())
    return gradients, stats


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    pytest.importorskip("triton")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What the engine has warned of since the test began."""
    return lambda: [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("offload.") and record.levelno >= logging.WARNING
    ]


# -- inductor's own kernels ----------------------------------------------------------------------------------
@pytest.mark.req("S3-79")
@pytest.mark.parametrize("whole", [False, True], ids=["block in a group", "layer with its marks"])
@pytest.mark.parametrize(
    "caps",
    [
        {},
        {"max_spilling_bytes": 1, "max_restoring_bytes": 0},
        {"device_limit_bytes": MIB, "piece_bytes": 64 << 10},
    ],
    ids=["defaults", "one at a time", "device limit"],
)
def test_compiled_blocks_have_the_bits_they_have_without_offload(
    caps: dict[str, Any], whole: bool, warnings: Callable[[], list[str]]
) -> None:
    order = one_f_one_b(4, 2)
    plain = blocks_of(Block)
    expected, _ = run([torch.compile(block) for block in plain], plain, order, None)
    torch._dynamo.reset()
    counters.clear()
    blocks = blocks_of(MarkedBlock if whole else Block)
    compiled: list[Layer] = [torch.compile(block) for block in blocks]
    found, stats = run(
        compiled if whole else [in_group(layer) for layer in compiled], blocks, order, build_manager(**caps)
    )
    assert_same_bits(expected, found)
    assert all(step.refused == 0 for step in stats)
    assert stats[0].spilled == stats[0].saved > 0
    if caps:
        assert sum(step.restored for step in stats) > 0
    if "device_limit_bytes" in caps:
        assert max(step.device_bytes_peak for step in stats) <= MIB
    assert sum(counters["graph_break"].values()) == (2 if whole else 0), list(counters["graph_break"])
    assert counters["stats"]["unique_graphs"] == 1
    assert warnings() == []


@pytest.mark.usefixtures("clean_allocator")
def test_memory_of_what_compiled_functions_save_is_freed() -> None:
    """A chain of L compiled tanh holds a tensor of N bytes a link, of which with one copy out at a time at
    most four are there: a link's input and output, the one that is leaving, and the loss's."""
    nbytes, links = 16 * MIB, 12
    link: Layer = torch.compile(lambda x: torch.tanh(x))
    grouped = in_group(link)

    def peak(manager: PipelineOffloadManager | None) -> int:
        with installed(manager):
            highest = 0
            for _ in range(3):  # the first one compiles
                x = (
                    torch.randn(nbytes // 4, generator=torch.Generator().manual_seed(0))
                    .to(DEVICE)
                    .requires_grad_()
                )
                torch.cuda.synchronize()
                before = torch.cuda.memory_stats()["active_bytes.all.current"]
                torch.cuda.reset_peak_memory_stats()
                if manager is not None:
                    manager.begin_chunk(0, 0)
                y = x
                for _ in range(links):
                    y = grouped(y)
                if manager is not None:
                    manager.end_forward(0, 0)
                highest = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
                if manager is not None:
                    manager.begin_backward(0, 0, "B")
                y.backward(torch.ones_like(y))
                del y
                if manager is not None:
                    manager.end_backward(0, 0, "B")
                    manager.step_end()
            return highest

    without = peak(None)
    within = peak(
        build_manager(
            reserve_bytes=links * nbytes + 128 * MIB,
            max_spilling_bytes=1,
            max_restoring_bytes=0,
            piece_bytes=1,
        )
    )
    assert without >= links * nbytes
    assert within <= without - (links - 5) * nbytes


# -- CUDA graphs that torch.compile records ------------------------------------------------------------------
def test_memory_of_recorded_cuda_graphs_stays_and_is_said_once_and_the_bits_are_right(
    warnings: Callable[[], list[str]],
) -> None:
    """Warm-up, recording and two replays, with two microbatches whose backwards come after both forwards."""
    plain = blocks_of(Block)
    expected, _ = run([torch.compile(block, mode="reduce-overhead") for block in plain], plain, GPIPE, None)
    torch._dynamo.reset()
    gc.collect()
    counters.clear()
    blocks = blocks_of(Block)
    layers = [in_group(torch.compile(block, mode="reduce-overhead")) for block in blocks]
    found, stats = run(layers, blocks, GPIPE, build_manager(max_spilling_bytes=1, max_restoring_bytes=0))
    trees: Any = importlib.import_module("torch._inductor.cudagraph_trees")
    assert counters["inductor"].get("cudagraph_skips", 0) == 0
    assert trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False) is not None, (
        "torch recorded no graph"
    )
    assert_same_bits(expected, found)
    assert all(step.refused == 0 for step in stats)
    (message,) = warnings()
    assert re.match(
        r"group 'block' of chunk s0m0: [\d,]+ bytes \(\d+ tensors?\) of what it saves stays on the device",
        message,
    ), message
    assert 'mode="reduce-overhead"' in message


def test_group_outside_of_the_recorded_graph_still_leaves(warnings: Callable[[], list[str]]) -> None:
    """One block in a CUDA graph, the next one eager: the eager one saves the graph's output, which stays, and
    its own, which leave."""
    blocks = blocks_of(Block)
    recorded = torch.compile(blocks[0], mode="reduce-overhead")
    expected, _ = run([recorded, blocks[1]], blocks, GPIPE, None)
    torch._dynamo.reset()
    gc.collect()
    blocks = blocks_of(Block)
    recorded = torch.compile(blocks[0], mode="reduce-overhead")
    found, stats = run(
        [recorded, in_group(blocks[1])],
        blocks,
        GPIPE,
        build_manager(max_spilling_bytes=1, max_restoring_bytes=0),
    )
    assert_same_bits(expected, found)
    assert all(step.spilled > 0 for step in stats)
    # nothing waits for the copy of the first chunk before the second one is whole
    expected_texts = [
        "stays on the device, in the memory of a CUDA graph that torch.compile recorded",
        "as if none had left: copies in flight have room for all of them",
    ]
    said = warnings()
    assert [sum(text in message for message in said) for text in expected_texts] == [1, 1], said
    assert len(said) == len(expected_texts), said


# -- what is said --------------------------------------------------------------------------------------------
def test_what_a_compiled_function_keeps_beside_the_hooks_is_said_once_by_group_graph_and_bytes(
    warnings: Callable[[], list[str]],
) -> None:
    plain = blocks_of(KeepingBlock)
    expected, _ = run([torch.compile(block) for block in plain], plain, GPIPE, None)
    torch._dynamo.reset()
    blocks = blocks_of(KeepingBlock)
    found, _ = run([in_group(torch.compile(block)) for block in blocks], blocks, GPIPE, build_manager())
    assert_same_bits(expected, found)
    (message,) = warnings()
    place = r"compiled graph (\d+|\[\d+/\d+\], forward at .*test_compile\.py:\d+,)"
    amount = f"{4 * ROWS * WIDTH:,} bytes"
    assert re.match(
        rf"group 'block' of chunk s0m0: {place} keeps {amount} \(1 tensor\) beside the saved-tensor hooks",
        message,
    ), message


def test_mark_in_a_function_compiled_with_fullgraph_is_an_error_that_names_the_way_out() -> None:
    (block, *_) = blocks_of(MarkedBlock)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile without fullgraph=True"):
        run([torch.compile(block, fullgraph=True)], [block], GPIPE, build_manager())
