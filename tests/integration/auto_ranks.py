"""What each rank runs for test_auto_ranks.py: models that are spread over ranks, trained in mode "auto" under
plans that differ by rank, and compared bit by bit with the same models without."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import offload
from offload import OffloadConfig, PipelineOffloadManager, configure
from offload.auto import calls as block_calls
from offload.auto import plan as auto_plan
from offload.errors import DeviceTotalError
from offload.policy.actions import Rates
from offload.policy.menu import Block
from offload.policy.mixture import MixedPlan
from offload.policy.rule import Rule, peak_bytes
from tests.integration.apply_ranks import (
    SCHEDULES,
    SPREADS,
    TENSOR_PARALLEL,
    WIDTH,
    Pipeline,
    build,
    same,
    train,
    train_pipeline,
)
from tests.ticks import counted_time
from tests.unit.groups.stack import build_manager
from tests.unit.modules.allocated import AllocatedDevice, counting

SLOW_LINK = Rates(d2h_bytes_per_s=1e3, h2d_bytes_per_s=1e3)
"""So slow that moving what these small blocks save costs more than computing it again."""
STEPS = 11
"""Plans are made at the ends of steps 3, 6 and 9."""
PLANS = 2
LONG_S = 2.0
"""Of a message, in a training that takes so long as a whole."""
TOTALS = (900_000, 1_000_000)
INSIDE = "inside an operator"
"""A model of which an operator on DTensors communicates, where no dispatch mode sees it."""
BY_HAND = "in place"


class Normalized(nn.Module):
    """softmax over what is sharded: DTensor gathers it inside the operator."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x, -1).redistribute(placements=[Shard(-1)])  # type: ignore[attr-defined]


def _operators_communicate(model: Any, mesh: DeviceMesh) -> nn.Module:
    for block in model.layers:
        block.up = nn.Sequential(block.up, Normalized())
        plan = {"up.0": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
    return model


class Combined(nn.Module):
    """A block of which each rank has a half, summed by a Function that communicates in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        half = self.down(torch.tanh(self.up(x)))
        return x + torch.tanh(all_reduce(half))


def _summed_by_hand(model: Any, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(mesh.get_rank())
    model.layers = nn.ModuleList(Combined() for _ in model.layers)
    return model  # type: ignore[no-any-return]


SPREAD: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    **SPREADS,
    INSIDE: _operators_communicate,
    BY_HAND: _summed_by_hand,
}
COMMUNICATING = (TENSOR_PARALLEL, INSIDE, BY_HAND)


@contextmanager
def new_manager() -> Iterator[PipelineOffloadManager]:
    manager = configure(OffloadConfig(min_offloaded_tensor_size=1), device="sim")
    manager.engine.rates = SLOW_LINK
    try:
        yield manager
    finally:
        PipelineOffloadManager.close_instance()


@contextmanager
def forced(rank: int, *, alone: bool = False) -> Iterator[list[Any]]:
    """Each plan of a rank takes other levels than the other rank's, and than its own before. alone: ranks do
    not agree, and all is kept on one and recomputed on the other. Yields what this rank chose, by plan."""
    chosen: list[Any] = []
    original = auto_plan.choose_mixture, block_calls.peers_of

    def choose(actions: Any, blocks: Any, *arguments: Any, **options: Any) -> MixedPlan:
        plan = original[0](actions, blocks, *arguments, **options, max_trials=1)
        number = len(chosen) + 1 - rank

        def level(block: Block) -> int:
            last = len(block.menu) - 1
            return number % 2 * last if alone else number % (last + 1)

        levels = {chunk: tuple(map(level, own)) for chunk, own in blocks.items()}
        chosen.append(levels)
        return replace(plan, levels=levels)

    auto_plan.choose_mixture = choose  # type: ignore[attr-defined]
    if alone:
        block_calls.peers_of = lambda groups: frozenset()  # type: ignore[attr-defined]
    try:
        yield chosen
    finally:
        auto_plan.choose_mixture, block_calls.peers_of = original  # type: ignore[attr-defined]


def _spread(spread: str, rank: int, mesh: DeviceMesh, *, alone: bool = False) -> dict[str, Any]:
    seed = 0 if spread in COMMUNICATING else rank  # whose ranks work on one batch
    plain = train(SPREAD[spread](build(), mesh), seed, steps=STEPS)
    with new_manager(), forced(rank, alone=alone) as chosen:
        model = SPREAD[spread](build(), mesh)
        handle = offload.apply(model, "auto", min_numel=1, device_total=f"{1_000_000 - rank}B")
        ours = train(model, seed, steps=STEPS)
        plan = handle.explain().plan
        # a model's chunks are numbered after those of models that are alive, and when a dropped one is
        # collected differs by rank
        handle.remove()
        return {
            "bitwise": same(ours, plain),
            "chosen": chosen,
            "followed": None if plan is None else plan.levels,
        }


def _by_rule(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    """On a device with an allocator, where all fits on the first rank and not on the others. The weights are
    those that a run of which all fits ends with. At last nothing fits on the others."""
    found: dict[str, Any] = {}
    total_bytes = 1_000_000_000
    for case in ("all fits", "rule", "nothing fits"):
        device = AllocatedDevice()
        manager = PipelineOffloadManager.OFFLOAD_MGR = build_manager(device=device, piece_bytes=512)
        manager.engine.rates = SLOW_LINK
        try:
            with counting(device, manager.engine.at_work):
                model = SPREAD[TENSOR_PARALLEL](build(), mesh)
                handle = offload.apply(model, "auto", min_numel=1, device_total=f"{total_bytes}B")
                assert handle._auto is not None
                if case == "nothing fits":
                    try:
                        train(model, 0, steps=STEPS, keeps=False)
                    except DeviceTotalError as error:
                        found["refused"] = str(error)
                    handle.remove()
                    break
                weights = train(model, 0, steps=STEPS, keeps=False)
                ladder = handle._auto.ladder
                assert ladder is not None
                handle.remove()
        finally:
            PipelineOffloadManager.close_instance()
        if case == "all fits":
            assert ladder.trace is not None
            rules = (ladder.rule, Rule(moves=False))
            most_bytes, least_bytes = (peak_bytes(ladder.trace, ladder.costs, rule) for rule in rules)
            plain, total_bytes = weights, round((least_bytes + most_bytes) / 2) if rank else total_bytes
        elif rank:
            assert ladder.trace is not None
            total_bytes = round(0.97 * peak_bytes(ladder.trace, ladder.costs, Rule(moves=True)))
        found[case] = ladder.rule.num_plain
    return found | {"state": ladder.state.name, "bitwise": same(weights, plain)}


def _pipelines(name: str, rank: int, ranks: int) -> dict[str, Any]:
    """By class of stage."""
    plain, _ = train_pipeline(Pipeline(name, rank, ranks, mode=None, ours=False), steps=STEPS)
    return {
        f"{name} {'ours' if ours else 'torch'}": _pipeline(name, rank, ranks, plain, ours=ours)
        for ours in (False, True)
    }


def _pipeline(name: str, rank: int, ranks: int, plain: list[Tensor], *, ours: bool) -> dict[str, Any]:
    with new_manager() as manager, forced(rank) as chosen:
        pipeline = Pipeline(name, rank, ranks, mode="auto", ours=ours, device_total=f"{TOTALS[rank]}B")
        got, _ = train_pipeline(pipeline, steps=STEPS)
        limit = manager.engine.limits.device_limit_bytes
        for handle in pipeline.handles:
            handle.remove()
        return {
            "bitwise": same(got, plain),
            "plans": len(chosen),
            "stages planned": sorted({stage for levels in chosen for stage, _ in levels}),
            "stages": len(pipeline.stages),
            "limit": limit,
            "alive": len(list(manager.living_blocks())),
        }


def rank_main(rank: int, ranks: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    with counted_time():
        found: dict[str, Any] = {spread: _spread(spread, rank, mesh) for spread in SPREAD}
        for name in SCHEDULES:
            found |= _pipelines(name, rank, ranks)
        found["by rule"] = _by_rule(rank, mesh)
        found["alone"] = _alone(rank, ranks)
    return found


def _alone(rank: int, ranks: int) -> str:
    """What happens where ranks that communicate do not agree. Last: the group is of no use afterwards."""
    group = dist.new_group(range(ranks), timeout=timedelta(seconds=LONG_S))
    mesh = DeviceMesh.from_group(group, "cpu")
    found: list[str] = []

    def run() -> None:
        try:
            found.append("right" if _spread(INSIDE, rank, mesh, alone=True)["bitwise"] else "wrong")
        except RuntimeError:
            found.append("raised")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30 * LONG_S)
    return found[0] if found else "waits for ever"
