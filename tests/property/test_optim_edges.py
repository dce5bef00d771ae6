"""Every ordering note of the optimizer: a program that needs its edge, and the same program without it, which
must fail.

One invariant, as in test_edges.py: titles in the notes, in the code and here are one set.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import offload
from offload import OffloadEngine, marks
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import HazardError, OffloadError
from offload.groups.manager import GroupsManager
from offload.optim import FSDPGPUOptimizerWrapper, HybridDeviceOptimizer
from tests.inside import streams_from
from tests.property.edges import Edge, devices, edge_titles, noted_titles
from tests.unit.optim.rig import WIDTH, assert_same_bits, backward, net, weights

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "offload" / "optim").rglob("*.py"))
STEPS = 4


def program(
    device: SimDevice,
    *,
    share: float,
    attached: bool = True,
    dtype: torch.dtype = torch.float32,
    zero_in_place: bool = False,
    last_alone: bool = False,
    **options: Any,
) -> list[Tensor]:
    """Four steps of all parameters; the weights after them. last_alone: from the second on of the last one,
    whose bucket comes back sooner than the ring's slots are used up. Raises the hazard itself if a worker met
    it."""
    model = net(dtype)
    made = {
        "lr": 1e-2,
        "cpu_share": share,
        "engine": OffloadEngine(device=device),
        "model": model,
        "overlap": "forward" if attached else "step",
        **options,
    }
    optimizer = HybridDeviceOptimizer(model.parameters(), 1.0, **made)
    try:
        for step in range(STEPS):
            backward(model, step, last_alone and step > 0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zero_in_place)
        found = weights(model, optimizer)
        optimizer.close()
        return found
    except OffloadError as error:
        raise error.__cause__ if isinstance(error.__cause__, HazardError) else error from error


def expected(last_alone: bool = False) -> list[Tensor]:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        backward(model, step, last_alone and step > 0)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model, optimizer)


def plain(share: float, *, last_alone: bool = False, **options: Any) -> Callable[[SimDevice], None]:
    def run(device: SimDevice) -> None:
        found = program(device, share=share, last_alone=last_alone, **options)
        assert_same_bits(found, expected(last_alone))

    return run


def wrapped(device: SimDevice) -> None:
    """Steps on the calling thread, which waits for no slot."""
    model = net()
    made = AdamW(model.parameters(), lr=1e-2, fused=True)
    engine = OffloadEngine(device=device)
    optimizer = FSDPGPUOptimizerWrapper(made, "cpu", engine=engine, bucket_bytes=2048)
    for step in range(STEPS):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    assert_same_bits(weights(model, made), expected())
    optimizer.close()


def streamed(device: SimDevice, weights: str = "host", *, looks: bool = False) -> None:
    """Weights that stream, or stay, one of which is written on the device before each step. looks:
    half-precision ones instead, with masters; a forward before each step fetches what is used after it."""
    models = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    options: dict[str, Any] = {"lr": 1e-2, "param_update_in_fp32": looks}
    marks.put_manager(GroupsManager(engine := OffloadEngine(device=device)))
    try:
        for model in models if looks else ():
            model.bfloat16()
        with streams_from(64):
            handle = offload.apply(models[0], weights=weights)
        ours = HybridDeviceOptimizer(models[0].parameters(), 1.0, engine=engine, **options)
        on_sim = OffloadEngine(device="sim")
        optimizers: list[Any] = [
            ours,
            HybridDeviceOptimizer(models[1].parameters(), 1.0, engine=on_sim, **options)
            if looks
            else AdamW(models[1].parameters(), lr=1e-2, fused=True),
        ]
        for step in range(STEPS):
            for model, optimizer in zip(models, optimizers, strict=True):
                backward(model, step)
                with torch.no_grad():
                    if looks:
                        model(torch.ones(1, WIDTH, dtype=torch.bfloat16))
                    else:
                        model[2].weight.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        handle.remove()
        ours.close()
    except OffloadError as error:
        raise error.__cause__ if isinstance(error.__cause__, HazardError) else error from error
    finally:
        marks.put_manager(None)
    assert_same_bits(*([p.detach() for p in model.parameters()] for model in models))


EDGES = {
    "gradients out": Edge(plain(1.0), "RAW", ("d2h", "compute")),
    "weights back": Edge(plain(1.0), "RAW", ("compute", "h2d")),
    # where buckets come in one order, the ring orders it
    "state in": Edge(plain(0.0, last_alone=True, bucket_bytes=2048), "RAW", ("state in", "d2h")),
    "ring": Edge(wrapped, "WAW", ("state in", "optimizer")),
    "master in": Edge(streamed, "RAW", ("state in", "d2h")),
    "state here": Edge(plain(0.0), "WAW", ("optimizer", "state in")),
    "gradients made": Edge(plain(0.0), "RAW", ("optimizer", "compute")),
    "whole out": Edge(plain(1.0, attached=False, atomic_step=True), "RAW", ("d2h", "compute")),
    "whole back": Edge(plain(1.0, attached=False, atomic_step=True), "RAW", ("compute", "h2d")),
    "state out": Edge(plain(0.0), "RAW", ("d2h", "optimizer")),
}
TITLES = tuple(EDGES)


@pytest.mark.req("S3-32")
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("title", TITLES)
def test_with_all_its_edges_a_step_has_no_hazard_and_the_bits_of_torchs(
    title: str, executor: ExecutorName
) -> None:
    for device in devices(executor):
        EDGES[title].check_with(title, device, executor)


@pytest.mark.parametrize("title", TITLES)
def test_without_its_edge_the_same_step_has_a_hazard_that_names_both_sides_and_the_edge(title: str) -> None:
    later, earlier = EDGES[title].sides
    message = EDGES[title].check_without(title)
    assert re.search(rf"of {later}\).*of {earlier}\)", message), message


def test_weights_that_stay_are_not_stepped_while_they_go_out() -> None:
    streamed(SimDevice(executor="late"), weights="1MB")
    with pytest.raises(HazardError, match=r"^WAR hazard .*of optimizer\).*of d2h\)"):
        streamed(SimDevice(executor="late", without={"master in"}), weights="1MB")


def test_a_master_is_not_stepped_while_its_weight_is_fetched_ahead() -> None:
    streamed(SimDevice(executor="late"), looks=True)
    with pytest.raises(HazardError, match=r"^WAR hazard .*of d2h\).*of h2d\)"):
        streamed(SimDevice(executor="late", without={"master in", "let pass"}), looks=True)


@pytest.mark.parametrize("executor", get_args(ExecutorName))
def test_state_that_stays_on_the_device_is_read_on_the_host_whole(executor: ExecutorName) -> None:
    model, device = net(), SimDevice(executor=executor)
    optimizer = HybridDeviceOptimizer(
        model.parameters(), 1.0, lr=1e-2, engine=OffloadEngine(device=device), model=model, overlap="forward"
    )
    assert optimizer.keep_on_device(1 << 20) > 0
    others = net()
    torchs = AdamW(others.parameters(), lr=1e-2, fused=True)
    for step in range(STEPS):
        for trained, stepping in ((model, optimizer), (others, torchs)):
            backward(trained, step)
            stepping.step()
            stepping.zero_grad()
        if step % 2:  # the others are stepped with what stayed
            mine, theirs = (each.state_dict()["state"] for each in (optimizer, torchs))
            assert_same_bits(*([entry["exp_avg_sq"] for entry in state.values()] for state in (mine, theirs)))
        if step == 2:
            optimizer.keep_on_device(0)
    assert_same_bits(weights(model, optimizer), weights(others, torchs))
    optimizer.close()


def test_every_edge_in_the_code_has_a_note_and_every_note_has_its_scenario() -> None:
    texts = [path.read_text() for path in SOURCES]
    noted = noted_titles(texts)
    assert noted == edge_titles(texts) == set(EDGES)
