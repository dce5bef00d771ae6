"""What each rank runs for test_gradient_ranks.py: gradients on the host where ranks reduce them, beside the
same without."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offload
from offload import OffloadConfig, PipelineOffloadManager, configure
from offload.compare import Compared
from offload.errors import OffloadError
from offload.weights.watched import StreamedWeight
from tests.inside import gradients_of, streams_from
from tests.unit.weights.streamed import ROWS, WIDTH, Model

Build = Callable[[nn.Module], tuple[Any, Any]]


def around(model: nn.Module, **options: Any) -> tuple[nn.Module, Any]:
    """Applied to what DDP has, or will have."""
    handle = offload.apply(model, gradients="host")
    return DistributedDataParallel(model, **options), handle


def outside(model: nn.Module) -> tuple[nn.Module, Any]:
    replicas = DistributedDataParallel(model)
    return replicas, offload.apply(replicas, gradients="host")


def streamed(model: nn.Module) -> tuple[nn.Module, Any]:
    replicas = DistributedDataParallel(model)
    return replicas, offload.apply(model, weights="host")


BUILDS: dict[str, Build] = {
    "applied first": lambda model: around(model),
    "applied to it": outside,
    "weights, too": streamed,
    "unused": lambda model: around(model, find_unused_parameters=True),
    "bucket views": lambda model: around(model, gradient_as_bucket_view=True),
}


def reduced_by_hand(model: nn.Module) -> tuple[nn.Module, Any]:
    return model, offload.apply(model, gradients="host")


def trained(rank: int, model: Any, *, name: str) -> list[torch.Tensor]:
    """Norms, gradients and weights of two steps of three microbatches, of which the last is reduced."""
    by_hand, skip = name == "by hand", (2,) if name == "unused" else ()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(2):
        for number in range(3):
            x = torch.randn(
                ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * number + rank)
            )
            with nullcontext() if by_hand or number == 2 else model.no_sync():
                model(x, skip=skip if number == 2 else ()).square().sum().backward()
        for parameter in model.parameters() if by_hand else ():
            dist.all_reduce(parameter.grad)
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        found += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():  # all ranks have the same
                dist.all_reduce(parameter)
            for parameter in model.parameters():  # the first ones have left by now
                parameter.div_(dist.get_world_size())
                spread(parameter)
    return [*found, *(parameter.detach().clone() for parameter in model.parameters())]


def spread(parameter: torch.Tensor) -> None:
    """Rank 0's value to all. torch 2.11's broadcast tells no class of its tensor, so there it is refused."""
    if torch.__version__ >= (2, 12):
        dist.broadcast(parameter, 0)
        return
    value = parameter.detach().clone()
    dist.broadcast(value, 0)
    parameter.copy_(value)
    if type(parameter) is StreamedWeight:
        with pytest.raises(OffloadError, match=r"to C\+\+, where"):
            dist.broadcast(parameter, 0)


def said(model: nn.Module) -> str:
    """Of an asynchronous collective on a streamed weight, by its error; no rank sends anything then."""
    weight = next(parameter for parameter in model.parameters() if type(parameter) is StreamedWeight)
    try:
        dist.all_reduce(weight, async_op=True)
    except OffloadError as error:
        return str(error)
    return ""


def compared(rank: int) -> tuple[Compared, ...]:
    """By ranks of which one is slower, and refuses a mode."""
    model = Model()
    replicas = DistributedDataParallel(model)

    def step() -> None:
        time.sleep(0.004 * rank)
        replicas(torch.randn(ROWS, WIDTH)).sum().backward()
        model.zero_grad()

    refused = {"mode": "groups"} | ({"blocks": "absent.*"} if rank else {})
    before, optimizer = copy.deepcopy(model.state_dict()), torch.optim.SGD(model.parameters(), lr=0.1)

    def breaks() -> None:
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        optimizer.step()
        if rank:
            raise KeyboardInterrupt

    raised, words = (KeyboardInterrupt, "") if rank else (OffloadError, "rank 1 raised KeyboardInterrupt")
    with pytest.raises(raised, match=words):
        offload.compare(model, breaks, modes=["checkpoint"])
    with pytest.raises((ValueError, OffloadError), match="'grops', must be one of"):
        offload.compare(model, step, modes=["grops" if rank else "groups"])
    # a FileStore counts whole seconds
    impatient = patch.object(sys.modules["offload.compare"], "_TIMEOUT_S", 0.2)
    with impatient, pytest.raises(OffloadError, match=r"waited 0.2 s for ranks \[\d\]"):
        offload.compare(model, lambda: time.sleep(1.7 * (1 - rank)), modes=["groups"])

    def leaves() -> None:
        """Rank 0 waits for rank 1, which runs out of memory, raises, and ends."""
        if rank:
            raise torch.OutOfMemoryError("full")
        time.sleep(1.7)
        raise RuntimeError("Connection closed by peer")

    impatient = patch.object(sys.modules["offload.compare"], "_LEFT_S", 0.2)
    words = r"rank 1 waited 0.2 s for ranks \[0\].* has left \(the device ran out of memory\)"
    with impatient, pytest.raises(OffloadError, match=words):
        offload.compare(model, leaves, modes=["checkpoint"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return offload.compare(model, step, modes=[False, refused, "checkpoint"], budget_s=0.1).rows


def rank_main(rank: int, world: int) -> dict[str, Any]:
    cases: dict[str, Any] = {}
    for name, build in [*BUILDS.items(), ("by hand", reduced_by_hand)]:
        torch.manual_seed(0)
        model, by_hand = Model(), name == "by hand"
        plain: Any = copy.deepcopy(model)
        if not by_hand:
            plain = DistributedDataParallel(
                plain, gradient_as_bucket_view=name == "bucket views", find_unused_parameters=name == "unused"
            )
        expected = trained(rank, plain, name=name)
        configure(OffloadConfig(min_offloaded_tensor_size=1), device="sim")
        with streams_from(WIDTH * WIDTH):
            whole, handle = build(model)
            found = trained(rank, whole, name=name)
            cases[name] = {
                "bitwise": len(found) == len(expected) and all(map(torch.equal, found, expected)),
                "out_bytes": handle.gradients.out_bytes,
                "host_bytes": handle.gradients.host_bytes,
                "present_bytes": gradients_of(handle).residency.present_bytes,
            }
            if name == "weights, too":
                cases["refused"] = said(model)
            handle.remove()
        PipelineOffloadManager.close_instance()
    cases["compared"] = compared(rank)
    PipelineOffloadManager.close_instance()
    return cases
