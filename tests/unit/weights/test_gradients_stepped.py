"""HybridDeviceOptimizer steps gradients that wait on the host from their bytes there, to the same bits."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import offload
from offload import HybridDeviceOptimizer
from offload.engine import OffloadEngine
from tests.inside import gradients_of, streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import ROWS, WIDTH, Model, squares, streamed

MICROBATCHES = 3
LARGE_BYTES = 13 * 2 * WIDTH * WIDTH * 4 - WIDTH * WIDTH * 4
"""Of all gradients that leave, in float32."""


def stepped(executor: Any, dtype: torch.dtype, *, writes: bool = False, **options: Any) -> tuple[int, int]:
    """Trains beside the same without gradients on the host, and compares; bytes of gradients that came to the
    device and left it in the last step. writes: gradients are changed right after each step."""
    torch.manual_seed(0)
    model = Model().to(dtype)
    plain = copy.deepcopy(model)
    with installed(build_manager(executor)) as manager, streams_from(WIDTH * WIDTH):
        handle = offload.apply(model, gradients="host")
        optimizers = [
            HybridDeviceOptimizer(
                each.parameters(), lr=1e-2, model=each, engine=engine, bucket_bytes=4096, **options
            )
            for each, engine in ((model, manager.engine), (plain, OffloadEngine()))
        ]
        for _ in range(3):
            for number in range(MICROBATCHES):
                x = torch.randn(ROWS, WIDTH, dtype=dtype)
                for each, optimizer in zip((model, plain), optimizers, strict=True):
                    optimizer.last_microbatch = number == MICROBATCHES - 1
                    squares(each, x).backward()
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                optimizer.step()
                for parameter in each.parameters() if writes else ():
                    parameter.grad.mul_(0)
                optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.synchronize_parameters()
        for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine, its), name
        figures = handle.gradients
        found = figures.in_bytes, figures.out_bytes
        for optimizer in optimizers:
            optimizer.close()
        handle.remove()
        assert manager.engine.arena.stats().lent_bytes == 0
    return found


@pytest.mark.parametrize("executor", ["late", "random"])
@pytest.mark.parametrize("share", [None, 1.0])
@pytest.mark.parametrize("overlap", ["step", "forward"])
def test_the_hosts_bytes_are_stepped_without_a_way_to_the_device_first(
    overlap: str, share: float | None, executor: str
) -> None:
    moved = stepped(executor, torch.float32, offload_fraction=1.0, overlap=overlap, cpu_share=share)
    assert moved[1] == MICROBATCHES * LARGE_BYTES
    # one pass less than backwards, and some fetched in vain where the loop turns: no pass for the step
    assert moved[0] < (MICROBATCHES - 0.5) * LARGE_BYTES


@pytest.mark.parametrize("overlap", ["step", "forward", "backward"])
@pytest.mark.parametrize("share", [None, 1.0])
def test_masters_of_bf16_weights(share: float | None, overlap: str) -> None:
    for writes in (False, overlap != "backward"):
        stepped(
            "late",
            torch.bfloat16,
            writes=writes,
            offload_fraction=1.0,
            overlap=overlap,
            cpu_share=share,
            param_update_in_fp32=True,
        )


VARIANTS: dict[str, dict[str, Any]] = {
    "clipped": {"max_grad_norm": 0.1},
    "half": {"offload_fraction": 0.5},
    "none": {"offload_fraction": 0.0, "max_grad_norm": 0.1},
    "sgd": {"cpu_optimizer_cls": torch.optim.SGD, "momentum": 0.9},
    "atomic": {"atomic_step": True},
    "waits": {"overlap_cpu_optimizer_d2h_h2d": False},
    "adafactor": {"cpu_optimizer_cls": torch.optim.Adafactor},
}


@pytest.mark.parametrize(("name", "writes"), [*itertools.product(VARIANTS, (False, True))])
def test_variants(name: str, writes: bool) -> None:
    stepped("late", torch.float32, writes=writes, **{"offload_fraction": 1.0, **VARIANTS[name]})


@pytest.mark.parametrize("executor", ["late", "early", "random"])
def test_in_the_backward_the_optimizer_takes_them_as_without(executor: str) -> None:
    stepped(executor, torch.float32, offload_fraction=1.0, overlap="backward")


def test_parameters_are_followed_from_behind_an_optimizers_hooks_and_behind_its_step() -> None:
    with streamed(gradients="host") as pair:
        for model in (pair.model, pair.plain):
            state = {key: value.clone() for key, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        pair.train(optimizers=pair.with_state_on_host("backward"))
        others = {name: each.detach() for name, each in pair.model.named_parameters()}
        functional_call(pair.model, others, torch.ones(1, WIDTH))
        pair.train(2)
    model = Model()
    with installed(build_manager("late")) as manager, streams_from(WIDTH * WIDTH):
        optimizer = HybridDeviceOptimizer(
            model.parameters(), lr=1e-2, model=model, engine=manager.engine, overlap="forward"
        )
        squares(model, torch.ones(1, WIDTH)).backward()
        optimizer.step()
        handle = offload.apply(model, gradients="host")  # the weights are on their way back
        assert len(gradients_of(handle).gradients) == 13


def test_a_reader_of_the_gradient_between_step_and_use_finds_it() -> None:
    with installed(build_manager()) as manager, streams_from(WIDTH * WIDTH):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        handle = offload.apply(model, gradients="host")
        optimizer = HybridDeviceOptimizer(
            model.parameters(), 1.0, overlap="forward", model=model, engine=manager.engine
        )
        model(torch.randn(ROWS, WIDTH)).square().sum().backward()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, its) for p, its in zip(model.parameters(), before, strict=True))
        optimizer.close()
        handle.remove()


def test_room_for_them_is_made_once_the_state_of_the_step_before_has_gone_out() -> None:
    """They left before that step, which the loop took without them."""
    with installed(build_manager("late")) as manager, streams_from(WIDTH * WIDTH):
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        handle = offload.apply(model, gradients="host")
        optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, cpu_share=0.0, engine=manager.engine)
        model(torch.randn(ROWS, WIDTH)).square().sum().backward()
        kept = [layer.weight.grad for layer in model]
        for layer in model:
            layer.weight.grad = None
        optimizer.step()
        for layer, gradient in zip(model, kept, strict=True):
            layer.weight.grad = gradient
        optimizer.step()
        optimizer.close()
        handle.remove()
