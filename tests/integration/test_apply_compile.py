"""`offload.apply` and torch.compile: around the model, around its blocks, before and after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import OffloadError, PipelineOffloadManager
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import ROWS, WIDTH, Model, build, equal, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def manager() -> Iterator[PipelineOffloadManager]:
    torch.compiler.reset()
    with installed(build_manager()) as built:
        yield built


def whole(model: Model) -> nn.Module:
    model.compile(backend="aot_eager")
    return model


def wrapped(model: Model) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def each(model: Model) -> nn.Module:
    for block in model.layers:
        block.compile(backend="aot_eager")
    return model


def replaced(model: Model) -> nn.Module:
    for place, block in enumerate(model.layers):
        model.layers[place] = torch.compile(block, backend="aot_eager")
    return model


Compile = Callable[[Model], nn.Module]


def run(compile_it: Compile, mode: Any, *, apply_first: bool = False, has_run: bool = False) -> list[Any]:
    """The gradients of a compiled model. mode: False for one without offload."""
    torch.compiler.reset()
    model = build()
    handle = offload.apply(model, mode, min_numel=1) if apply_first else None
    compiled = compile_it(model)
    if has_run:
        compiled(torch.ones(ROWS, WIDTH)).sum().backward()
        compiled.zero_grad()
    if handle is None:
        handle = offload.apply(compiled, mode, min_numel=1)
    return train(compiled, steps=2)


@pytest.mark.parametrize(
    ("compile_it", "mode", "arguments"),
    [
        (whole, "groups", {"apply_first": True}),
        (whole, True, {}),
        (whole, "groups", {"has_run": True}),
        (wrapped, "groups", {"has_run": True}),
        (each, "hidden_states", {"apply_first": True}),
        (replaced, "selective", {}),
    ],
)
def test_a_compiled_model_has_the_bits_that_it_has_without_offload(
    compile_it: Compile, mode: Any, arguments: dict[str, bool], manager: PipelineOffloadManager
) -> None:
    assert equal(run(compile_it, mode, **arguments), run(compile_it, False, has_run=True))
    assert manager.stats.spill_bytes > 0


@pytest.mark.parametrize("compiles", [False, True])
def test_compiled_code_is_dropped_where_there_may_be_some(
    compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._dynamo.utils.counters.clear()
    dropped: list[None] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: dropped.append(None))
    model = build()
    if compiles:
        model.compile(backend="aot_eager")
    offload.apply(model, min_numel=1)
    assert bool(dropped) is compiles


def test_fullgraph_is_refused_by_name() -> None:
    model = build()
    offload.apply(model, min_numel=1)
    model.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"a hook of offload\.apply, moves tensors.*without fullgraph=True"):
        model(torch.ones(ROWS, WIDTH))


@pytest.mark.parametrize("mode", ["hidden_states", "selective"])
def test_a_recompute_inside_a_compiled_model_is_refused_with_the_way_out(mode: str) -> None:
    model = build()
    offload.apply(model, mode, min_numel=1)
    with pytest.raises(OffloadError, match=r"block layers\.0 is recomputed .* compile the blocks, block"):
        whole(model)(torch.ones(ROWS, WIDTH))


def test_the_breaks_at_its_hooks_leave_a_block_one_graph_that_all_blocks_share() -> None:
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    model = build().eval()
    offload.apply(model, min_numel=1)
    model.compile(backend=count)
    model(torch.ones(ROWS, WIDTH))
    # norm, fc1, tanh, dropout, fc2, and the sum; the loop over the blocks runs as it is written
    assert graphs == [6]
