"""Work `lora` of bench_weights.py: adapters on frozen blocks, every block checkpointed. Rows are `nothing`,
what `weights=` is given, and peers: `trainstream`, or `trainstream:0.5` with that fraction of its blocks
paged, and `fsdp2` (its CPUOffloadPolicy).

One invariant: a peer is imported when its row starts, and driven through its public interface.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offload
from bench.run import imported
from bench.weights import TINY, Model, Shape, expand_frozen, link_gb_s, run_steps, streamed, where_of

ROWS = "nothing,host,5GB,6.8GB"


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)


def _trainstream(model: Model, device: torch.device, fraction: str) -> torch.optim.Optimizer:
    """As its README has a model that is larger than the GPU: on the CPU, wrapped once. Without param_offload
    it would find that all fits; without quantize="none" it may change weights. The blocks' inputs, which the
    checkpoints keep, stay on the device, as in the other rows."""
    paged = float(fraction) if fraction else True
    wrapped: Any = imported("trainstream").wrap(
        model,
        _optimizer(model),
        device="cuda",
        param_offload=paged,
        activation_offload=False,
        quantize="none",
    )
    found: torch.optim.Optimizer = wrapped[1]
    return found


def _fsdp2(model: Model, device: torch.device, _: str) -> torch.optim.Optimizer:
    """One rank: a block is a shard of its own, on the host between uses."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    torch.distributed.init_process_group(
        "nccl", init_method="tcp://127.0.0.1:29533", rank=0, world_size=1, device_id=device
    )
    for layer in model.layers:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    return _optimizer(model)


_PEERS: dict[str, Callable[[Model, torch.device, str], torch.optim.Optimizer]] = {
    "trainstream": _trainstream,
    "fsdp2": _fsdp2,
}


def run_row(options: argparse.Namespace, quantize: str | None = None) -> dict[str, Any]:
    """The row of this process. quantize: as apply has it; `nothing` has the expanded weights then."""
    device, dtype = where_of(options.tiny)
    shape, tokens = (TINY, 8) if options.tiny else (Shape(layers=options.layers), options.tokens)
    torch.manual_seed(0)
    rate = link_gb_s(device)
    inside = options.row.startswith("trainstream")  # its better place, weights.py
    model = Model(shape, inside=inside, device=device, dtype=dtype)
    handle = None
    peer, _, argument = options.row.partition(":")
    if peer in _PEERS:
        model = model.to("cpu")
        torch.cuda.empty_cache()
        optimizer = _PEERS[peer](model, device, argument)
    else:
        if options.row == "nothing":
            if quantize is not None:
                expand_frozen(model)
        else:
            handle = offload.apply(model, weights=options.row, quantize=quantize)
        optimizer = _optimizer(model)
    x = torch.randn(1, tokens, shape.hidden, device=device, dtype=dtype)

    def backward() -> None:
        model(x).float().square().mean().backward()

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    found = run_steps(model, backward, step, options, device)
    return found | {
        "link_gb_s": rate,
        "blocks": shape.layers,
        **streamed(handle),
    }
