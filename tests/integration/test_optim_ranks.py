"""The hybrid optimizer on two gloo ranks: the bits of torch's AdamW for replicas, FSDP2's shards and tensor
parallel.

The ranks are started once for all cases. The cases that matter most run over NCCL in
tests/gpu/test_optim_ranks.py. State dicts across ranks are in test_optim_resume.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from offload.optim.cpu_step import CpuBucket
from tests.once import run_ranks_once
from tests.optim_ranks import BAD_STEP, Case, Seen, backward, build, engine_for, hybrid, trained
from tests.ranks import run_ranks

CPU, STREAMED, BOTH = {"cpu_share": 1.0}, {"cpu_share": 0.0}, {"cpu_share": 0.5}
ALONE: dict[str, Any] = {"overlap_cpu_optimizer_d2h_h2d": False}
EARLY: dict[str, Any] = {"overlap": "backward"}

REPLICAS = {
    **{
        f"replicas{', in buckets' if view else ''}{', kept' if kept else ''}, {name}": Case(
            over="replicas", options=options, microbatches=2, bucket_view=view, kept=kept
        )
        for view in (False, True)
        for kept in (False, True)
        for name, options in {"cpu": CPU, "streamed": STREAMED, "overlap off": {**BOTH, **ALONE}}.items()
        if name == "cpu" or view == kept != (name == "streamed")
    },
    "replicas, clipped": Case(over="replicas", options=BOTH, clip="own"),
}
SHARDS = {
    **{
        f"shards, {name}{'' if reshard else ', stay gathered'}{', in bfloat16' if mixed else ''}": Case(
            over="shards", options=options, reshard=reshard, mixed=mixed, microbatches=2
        )
        for name, options in {
            "on the device": {"offload_fraction": 0.0},
            "half on the cpu": {"offload_fraction": 0.5, **CPU},
            "half streamed": {"offload_fraction": 0.5, **STREAMED},
            "cpu": CPU,
            "streamed": STREAMED,
        }.items()
        for reshard, mixed in ((True, False), (False, True))
        if reshard or name in ("half on the cpu", "streamed")
    },
    "shards, overlap off": Case(over="shards", options={**BOTH, **ALONE}),
    "shards, stepped in the backward": Case(over="shards", options={**BOTH, **EARLY}),
    # FSDP2 adds to gradients that are views of one memory: each addition was a change of all, and an error
    "shards, kept, stepped in the backward": Case(over="shards", options={**BOTH, **EARLY}, kept=True),
    "shards, fetched ahead": Case(over="shards", options=CPU, prefetch=True),
    "shards, a layer called alone": Case(over="shards", options=CPU, called_alone=True),
    "shards, a layer called alone and fetching ahead": Case(
        over="shards", options=BOTH, called_alone=True, prefetch=True
    ),
    "shards, an event for FSDP2": Case(over="shards", options=BOTH, post_optim=True),
    "shards, nothing attached": Case(over="shards", options=BOTH, attached=False),
    "shards, masters": Case(
        over="shards",
        half=True,
        options={**BOTH, "param_update_in_fp32": True},
        expected={"offload_fraction": 0.0, "param_update_in_fp32": True},
    ),
}
CLIPPED = {
    **{
        f"shards, clipped by {clip}, {fraction}, {share}": Case(
            over="shards", options={"offload_fraction": fraction, "cpu_share": share}, clip=clip
        )
        for clip, fraction, share in (("own", 0.5, 1.0), ("argument", 1.0, 0.5), ("torch", 0.0, 0.5))
    },
    # gradients that are shares of a sum: step() clipped the sums, and stepped with what it had summed before
    "tensor, clipped by argument": Case(over="tensor", options=BOTH, clip="argument", microbatches=2),
}
TENSOR = {
    f"tensor, {name}": Case(over="tensor", options=options, clip=clip, microbatches=2)
    for clip, kind in (("", ""), ("own", ", clipped"))
    for name, options in {
        f"on the device{kind}": {"offload_fraction": 0.0},
        f"half{kind}": {"offload_fraction": 0.5, **CPU},
        f"cpu{kind}": CPU,
        f"streamed{kind}": STREAMED,
        f"stepped in the backward{kind}": {**BOTH, **EARLY},
        f"overlap off{kind}": {**BOTH, **ALONE},
    }.items()
    if not clip or name.startswith(("half", "streamed"))
}
BAD = {
    f"{over}, bad on one rank, {'scaled' if scaler else 'plain'}{', clipped' if clip else ''}": Case(
        over=over, options=BOTH, scaler=scaler, clip=clip, bad=True
    )
    for over, scaler, clip in (
        ("replicas", True, ""),
        ("replicas", False, "own"),
        ("shards", True, "own"),
        ("shards", True, "torch"),
        ("shards", False, "own"),
    )
}
SAME = {**REPLICAS, **SHARDS, **CLIPPED, **TENSOR, **BAD}
BROKEN = {
    "weights back": Case(over="shards", options=CPU, without=("weights back",)),
    "weights back, a layer called alone": Case(
        over="shards", options=CPU, called_alone=True, without=("weights back",)
    ),
}
"""What must not give the bits: an edge is left out."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Seen]]:
    """By rank, by case."""
    return run_ranks_once(tmp_path_factory, "optim-ranks", trained, 2, {**SAME, **BROKEN}, "cpu")


@pytest.mark.req("S3-32")
@pytest.mark.parametrize("name", SAME)
def test_the_weights_have_the_bits_of_torchs_adamw_on_every_rank(
    seen: list[dict[str, Seen]], name: str
) -> None:
    for rank in seen:
        assert rank[name].differing == []
        assert rank[name].norms[0] == rank[name].norms[1]
        assert rank[name].scales[0] == rank[name].scales[1]
    assert seen[0][name].bits[1] == seen[1][name].bits[1], "the ranks have different models"
    assert seen[0][name].norms == seen[1][name].norms


@pytest.mark.parametrize("name", BROKEN)
def test_without_an_edge_it_is_a_hazard(seen: list[dict[str, Seen]], name: str) -> None:
    for rank in seen:
        assert "hazard" in rank[name].error


@pytest.mark.req("S3-28")
def test_places_are_the_same_on_every_rank_however_uneven_the_shards(seen: list[dict[str, Seen]]) -> None:
    """What has no elements on a rank needs no place there."""
    for name in ("shards, half on the cpu", "shards, half streamed", "shards, masters"):
        mine, other = (rank[name] for rank in seen)
        assert {each: place for each, place in mine.places.items() if other.sizes[each]} == {
            each: place for each, place in other.places.items() if other.sizes[each]
        }
        assert len(set(mine.places.values())) == 2


def test_a_shard_may_be_empty(seen: list[dict[str, Seen]]) -> None:
    sizes = [
        {name: rank["shards, cpu"].sizes[name] for name in ("third.weight", "third.bias")} for rank in seen
    ]
    assert sizes == [{"third.weight": 48, "third.bias": 1}, {"third.weight": 0, "third.bias": 0}]


@pytest.mark.parametrize("name", [name for name, case in BAD.items() if case.scaler])
def test_with_a_scaler_all_ranks_leave_out_the_step_that_is_bad_on_one(
    seen: list[dict[str, Seen]], name: str
) -> None:
    for rank in seen:
        scales = rank[name].scales[1]
        assert scales[BAD_STEP] < scales[BAD_STEP - 1]
        assert rank[name].bits == seen[0][name].bits


# -- refused, agreed, told -----------------------------------------------------------------------------------
REFUSED: dict[str, tuple[Case, dict[str, Any], str]] = {
    "early": (Case(over="replicas"), {"overlap": "backward"}, 'overlap="backward" promises final gradients'),
    "whole": (
        Case(over="shards"),
        {"cpu_optimizer_cls": torch.optim.Adafactor},
        r"parameter 0 .* is one rank's shard, and Adafactor may look at whole parameters; give an "
        r"elementwise optimizer",
    ),
}


def asked(rank: int, world: int) -> dict[str, Any]:
    """What the optimizer answers on this rank."""
    device, mesh = torch.device("cpu"), init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {"held": 0}
    for name, (case, options, _) in REFUSED.items():
        model, engine = build(case, mesh, device), engine_for(device)
        try:
            HybridDeviceOptimizer(model.parameters(), 1.0, engine=engine, model=model, lr=1e-2, **options)
        except ValueError as error:
            found[name] = str(error)
        found["held"] += engine.arena.held_bytes
    model = build(Case(over="replicas"), mesh, device)
    optimizer = hybrid(model, engine_for(device), overlap="backward")
    optimizer.last_microbatch = True
    backward(Case(over="replicas"), model, 0, rank)
    try:
        optimizer.step()
    except OffloadError as error:
        found["stepped early"] = str(error)
    return found


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks_once(tmp_path_factory, "optim-answers", asked, 2)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_before_anything_is_pinned(
    answers: list[dict[str, Any]], name: str
) -> None:
    for rank in answers:
        assert re.search(REFUSED[name][2], rank[name])
        assert rank["held"] == 0


def test_replicas_that_were_stepped_before_their_reduction_are_an_error(
    answers: list[dict[str, Any]],
) -> None:
    """Where the model was not given, and so could not be refused."""
    for rank in answers:
        assert re.search(
            r"the gradient of parameter \d .* changed after \d+ buckets had been stepped in the backward",
            rank["stepped early"],
        )


# -- a rank that fails ---------------------------------------------------------------------------------------
def breaks_on_rank_1(rank: int, world: int, over: Literal["replicas", "shards"]) -> None:
    """Rank 1's worker fails in the second step. Both ranks close what they have, and say what ended them."""
    case, device = Case(over=over), torch.device("cpu")
    model, engine = build(case, init_device_mesh("cpu", (world,)), device), engine_for(device)
    optimizer = hybrid(model, engine, model=model, cpu_share=1.0)
    try:
        for step in range(4):
            if step == 1 and rank == 1:
                mock.patch.object(CpuBucket, "give_back", side_effect=MemoryError("no room")).start()
            backward(case, model, step, rank)
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        optimizer.close()
        engine.close()
        raise RuntimeError(f"rank {rank} has closed after {type(error).__name__}: {error}") from None


@pytest.mark.parametrize("over", ["replicas", "shards"])
def test_a_worker_that_fails_on_one_rank_ends_the_other_and_close_does_not_hang(
    tmp_path: Path, over: str
) -> None:
    """The launcher gives the other rank seconds to end by itself, and kills it then, without a word of it in
    the error."""
    with pytest.raises(AssertionError) as error:
        run_ranks(breaks_on_rank_1, 2, tmp_path, over)
    assert "rank 1 has closed after OffloadError: a step failed on a worker (MemoryError: no room)" in str(
        error.value
    )
    assert "rank 0 has closed after" in str(error.value)
