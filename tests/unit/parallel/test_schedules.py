"""Names, placements and counts of the schedules, from numbers alone; each count is compared with what torch's
own constructor takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from parallel.schedules import SCHEDULES, check_counts, schedule_named, stages_of


def torch_takes(name: str, ranks: int, virtual_stages: int, microbatches: int) -> bool:
    spec = SCHEDULES[name]
    stages = ranks * virtual_stages
    local = [
        SimpleNamespace(group_size=ranks, group_rank=0, num_stages=stages, stage_index=index, submod=None)
        for index in stages_of(spec, rank=0, ranks=ranks, virtual_stages=virtual_stages)
    ]
    try:
        spec.torch_class(local[0] if spec.placement == "one" else local, microbatches)
    except ValueError:
        return False
    return True


def we_take(name: str, ranks: int, virtual_stages: int, microbatches: int) -> bool:
    try:
        check_counts(SCHEDULES[name], ranks=ranks, virtual_stages=virtual_stages, microbatches=microbatches)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
def test_exactly_the_counts_that_torch_takes_are_taken(name: str) -> None:
    virtual = SCHEDULES[name].default_virtual_stages
    for ranks in (1, 2, 4):
        for microbatches in range(1, 13):
            assert we_take(name, ranks, virtual, microbatches) == torch_takes(
                name, ranks, virtual, microbatches
            ), (ranks, microbatches)


def test_refused_count_names_counts_that_would_do() -> None:
    with pytest.raises(ValueError, match="5 on 2 ranks would be 2 unequal ones; take --microbatches 4 or 6"):
        check_counts(SCHEDULES["interleaved1f1b"], ranks=2, virtual_stages=2, microbatches=5)
    with pytest.raises(ValueError, match="3 for 4 stages; take --microbatches 4"):
        check_counts(SCHEDULES["dualpipev"], ranks=2, virtual_stages=2, microbatches=3)
    with pytest.raises(ValueError, match="zbv gives a rank two stages, one from each arm of its V, not 3"):
        check_counts(SCHEDULES["zbv"], ranks=2, virtual_stages=3, microbatches=8)
    with pytest.raises(ValueError, match="1f1b gives a rank one stage, not 2"):
        check_counts(SCHEDULES["1f1b"], ranks=2, virtual_stages=2, microbatches=8)
    with pytest.raises(ValueError, match="0 microbatches"):
        check_counts(SCHEDULES["gpipe"], ranks=2, virtual_stages=1, microbatches=0)


def test_names_are_found_in_any_case_and_an_unknown_one_lists_them() -> None:
    assert schedule_named("Interleaved1F1B") is SCHEDULES["interleaved1f1b"]
    assert schedule_named("ZBVZeroBubble") is SCHEDULES["zbv"]
    with pytest.raises(
        ValueError, match=r"no schedule is called 'pipedream'; there are gpipe, 1f1b, .*dualpipev"
    ):
        schedule_named("pipedream")


def test_stages_lie_on_ranks_in_a_loop_or_in_a_v() -> None:
    loop = [stages_of(SCHEDULES["loopedbfs"], rank=rank, ranks=2, virtual_stages=3) for rank in range(2)]
    assert loop == [(0, 2, 4), (1, 3, 5)]
    arms = [stages_of(SCHEDULES["zbv"], rank=rank, ranks=3, virtual_stages=2) for rank in range(3)]
    assert arms == [(0, 5), (1, 4), (2, 3)]
    assert stages_of(SCHEDULES["gpipe"], rank=1, ranks=2, virtual_stages=1) == (1,)
