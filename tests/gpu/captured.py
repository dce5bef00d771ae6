"""A model captured into CUDA graphs by hand, and replayed like a function of its input and its output's
gradient.

One invariant: `run` gives what an eager forward and backward of the same model would, [output, the input's
gradient, the parameters'].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload import backward_record, forward_record
from parallel.transformer import TransformerConfig, TransformerStage, build_stage_module
from tests.gpu.workbench import DEVICE, NAMES, SEQUENCES, TOKENS, WIDTH

SHAPE = (SEQUENCES, TOKENS, WIDTH)

Model = Callable[[Tensor], Tensor]


def stages(
    count: int = 1, *, names: Sequence[str] = NAMES, dtype: torch.dtype = torch.float32
) -> list[TransformerStage]:
    """So many layers, each a stage of its own with hidden states in and out; the same parameters every
    time."""
    config = TransformerConfig(
        dim=WIDTH,
        layers=count + 2,
        heads=4,
        kv_heads=2,
        ffn=352,
        sequence=TOKENS,
        offload_modules=frozenset(names),
        math_attention=True,
    )
    return [
        build_stage_module(config, stage, count + 2, device=DEVICE, dtype=dtype)
        for stage in range(1, count + 1)
    ]


def parameters_of(model: Model | Sequence[Model]) -> list[Tensor]:
    parts = model if isinstance(model, Sequence) else [model]
    return [parameter for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()]


def numbers(seed: int, shape: Sequence[int] = SHAPE, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def eager(model: Model, x: Tensor, gradient: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    y = model(x)
    return [y.detach().clone(), *torch.autograd.grad(y, (x, *parameters), gradient)]


@dataclass
class ByHand:
    """One graph of forward and backward, or one of each. Its tensors are the graphs' own, and replays read
    the model's parameters."""

    model: Model
    x: Tensor
    gradient: Tensor
    found: list[Tensor]
    graphs: list[torch.cuda.CUDAGraph]
    events: tuple[torch.cuda.Event, ...] = ()

    @classmethod
    def capture(
        cls,
        model: Model,
        *,
        shape: Sequence[int] = SHAPE,
        dtype: torch.dtype = torch.float32,
        one_graph: bool = False,
        record: bool = False,
    ) -> ByHand:
        """record: end forward and backward with an external event each."""
        x = torch.zeros(shape, dtype=dtype, device=DEVICE).requires_grad_()
        gradient = torch.ones_like(x)
        inputs = (x, *parameters_of(model))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                torch.autograd.grad(model(x), inputs, gradient)
        torch.cuda.current_stream().wait_stream(side)
        events = tuple(torch.cuda.Event(external=True) for _ in range(2)) if record else ()
        graphs = [torch.cuda.CUDAGraph() for _ in range(1 if one_graph else 2)]
        gradients: Any = ()
        with torch.cuda.graph(graphs[0]):
            y = model(backward_record(x, events[1])) if record else model(x)
            if record:
                forward_record(events[0])
            if one_graph:
                gradients = torch.autograd.grad(y, inputs, gradient)
        if not one_graph:
            with torch.cuda.graph(graphs[1], pool=graphs[0].pool()):
                gradients = torch.autograd.grad(y, inputs, gradient)
        return cls(model, x, gradient, [y.detach(), *gradients], graphs, events)

    def run(self, x: Tensor, gradient: Tensor, *, stream: torch.cuda.Stream | None = None) -> list[Tensor]:
        """stream: replay there, and wait for the events only."""
        with torch.no_grad():
            self.x.copy_(x)
            self.gradient.copy_(gradient)
        for number, graph in enumerate(self.graphs):
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                graph.replay()
            if stream is not None:
                torch.cuda.current_stream().wait_event(self.events[number])
        return [tensor.clone() for tensor in self.found]


def pool_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Device memory of the graph's private pool, used or not."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == graph.pool()
    )
