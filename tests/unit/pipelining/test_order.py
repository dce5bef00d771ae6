"""What a rank is said to compute, and how many chunks that keeps alive.

That it is what really runs is shown by tests/integration/test_schedules.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import pipelining
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from offload.pipelining.stage import actions_of, peak_chunks
from parallel.schedules import SCHEDULES
from tests.parsed import parse_action


def single(kind: type[Any], *, stages: int, microbatches: int) -> Any:
    """A schedule of one stage a rank with the two numbers that its order depends on."""
    schedule = object.__new__(kind)
    schedule._num_stages, schedule._n_microbatches = stages, microbatches
    return schedule


def of_stages(name: str, *, ranks: int, microbatches: int, rank: int = 0) -> Any:
    """A schedule over stages that only have their numbers."""
    spec = SCHEDULES[name]
    local = [
        SimpleNamespace(group_size=ranks, group_rank=rank, num_stages=2 * ranks, submod=None)
        for _ in range(2)
    ]
    return spec.torch_class(local, microbatches)


def text(actions: Any) -> str:
    return " ".join(map(str, actions))


def test_gpipe_runs_all_forwards_and_then_all_backwards() -> None:
    schedule = single(ScheduleGPipe, stages=2, microbatches=3)
    assert text(actions_of(schedule, 1)) == "1F0 1F1 1F2 1B0 1B1 1B2"


@pytest.mark.parametrize(
    ("rank", "expected"), [(0, "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3"), (1, "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3")]
)
def test_one_forward_one_backward_starts_with_microbatch_zero_on_every_stage(
    rank: int, expected: str
) -> None:
    schedule = single(Schedule1F1B, stages=2, microbatches=4)
    assert text(actions_of(schedule, rank)) == expected


def test_overlapped_forward_and_backward_are_two_actions() -> None:
    schedule = of_stages("dualpipev", ranks=2, microbatches=4)
    assert any(action.sub_actions is not None for action in schedule.pipeline_order_with_comms[0])
    assert (
        sorted(actions_of(schedule, 0))[:8]
        == sorted(action for action in actions_of(schedule, 0) if action[0] in "BF")[:8]
    )
    assert {kind for kind, _, _ in actions_of(schedule, 0)} <= {"F", "B", "I", "W"}


@pytest.mark.parametrize(
    "name", ["interleaved1f1b", "loopedbfs", "interleavedzerobubble", "zbv", "dualpipev"]
)
def test_every_chunk_is_made_once_and_read_out_once(name: str) -> None:
    for rank in (0, 1):
        actions = actions_of(of_stages(name, ranks=2, microbatches=4, rank=rank), rank)
        made = [chunk for kind, *chunk in actions if kind == "F"]
        read_out = [chunk for kind, *chunk in actions if kind in ("B", "W")]
        assert len(made) == 8
        assert sorted(made) == sorted(read_out)


def test_peak_chunks_counts_a_chunk_until_its_last_backward() -> None:
    assert peak_chunks(actions_of(single(ScheduleGPipe, stages=2, microbatches=5), 0)) == 5
    assert peak_chunks(actions_of(single(Schedule1F1B, stages=4, microbatches=8), 0)) == 4
    assert peak_chunks(actions_of(single(Schedule1F1B, stages=4, microbatches=8), 3)) == 1
    assert peak_chunks([parse_action(text) for text in ("0F0", "0I0", "0F1", "0W0", "0I1", "0W1")]) == 2
    assert peak_chunks([]) == 0


def test_unknown_rank_and_unknown_schedule_are_errors_that_say_so() -> None:
    with pytest.raises(ValueError, match=r"has no rank 7, only \[0, 1\]"):
        actions_of(of_stages("zbv", ranks=2, microbatches=4), 7)
    with pytest.raises(ValueError, match="SimpleNamespace has no list of actions"):
        actions_of(SimpleNamespace(), 0)


@pytest.mark.skipif(
    not hasattr(pipelining, "PipelineActivationLiveness"), reason="torch 2.15 analyzes schedules"
)
@pytest.mark.parametrize("name", [name for name, spec in SCHEDULES.items() if spec.placement != "one"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_is_said_to_compute_keeps_alive_what_torchs_own_analysis_does(
    name: str, rank: int
) -> None:
    """torch gives when each chunk begins and ends; what is between, the engine has from the list."""
    schedule = of_stages(name, ranks=2, microbatches=4)
    actions = actions_of(schedule, rank)
    found = pipelining.analyze_pipeline_activation_liveness(
        schedule,
        pp_rank=rank,
        stage_indices=sorted({action.stage for action in actions}),
        granularity="stage_microbatch",
    )
    begins = [action.chunk for action in actions if action.kind == "F"]
    ends = [action.chunk for action in actions if action.kind in "BW"]
    lifetimes = {chunk: found.get_activation_lifetime(*chunk) for chunk in begins}
    assert begins == sorted(begins, key=lambda chunk: lifetimes[chunk][0])
    assert ends == sorted(ends, key=lambda chunk: lifetimes[chunk][1])
    # a forward that overlaps a backward is one action to torch
    assert found.num_slots - peak_chunks(actions) in ((0, 1) if name == "dualpipev" else (0,))
