"""Ranks whose blocks communicate follow one plan: who takes part, which profile is everyone's, and what is
said when a rank does not come. Ranks are threads here, with the store of a job between them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from offload.auto.ranks import Agreement, Room, common_profile, is_point
from offload.errors import OffloadError
from offload.planner.profile import BlockProfile, SeenCall


def call(operator: Any, number: int = 0, **numbers: Any) -> SeenCall:
    return SeenCall(operator, number, **{"nbytes": 100, "device_s": 1.0, "saved_bytes": 100, **numbers})


def profile(*calls: SeenCall, plain_bytes: int = 1000, **numbers: Any) -> BlockProfile:
    return BlockProfile.build(
        calls=calls,
        input_bytes=10,
        plain_bytes=plain_bytes,
        given_bytes=10,
        forward_s=float(sum(one.device_s for one in calls)),
        **{"collectives": frozenset({"tp"}), **numbers},
    )


def together(*ranks: Callable[[Agreement], Any], timeout_s: float = 20.0, store: Any = None) -> list[Any]:
    """What each rank returns, or the error that it raised."""
    store = store or dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return ranks[rank](Agreement(store, rank, timeout_s))
        except OffloadError as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


def test_ranks_that_are_connected_by_way_of_another_are_members_together() -> None:
    def rank(*peers: int) -> Callable[[Agreement], Any]:
        def run(agreement: Agreement) -> Any:
            agreement.profiles(1, frozenset(peers), [])
            return agreement.members

        return run

    found = together(rank(1), rank(0, 2), rank(1), rank(4), rank(3))
    assert found == [{0, 1, 2}] * 3 + [{3, 4}] * 2


def test_every_member_has_the_profile_of_the_one_that_saves_most() -> None:
    """With its own operators, which are another object in each process."""
    operators = [[f"mm of rank {rank}", f"add of rank {rank}"] for rank in range(2)]

    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

        def __str__(self) -> str:
            return self.name.partition(" ")[0]

    own = [
        profile(*(call(Named(name)) for name in names), plain_bytes=1000 + rank)
        for rank, names in enumerate(operators)
    ]

    def run(rank: int) -> Callable[[Agreement], Any]:
        return lambda agreement: agreement.profiles(1, frozenset({1 - rank}), [(own[rank], 7 + rank)])

    found = together(run(0), run(1))
    for rank in range(2):
        ((common, input_bytes),) = found[rank]
        assert (common.plain_bytes, input_bytes) == (1001, 8)
        assert [one.operator.name for one in common.calls] == operators[rank]
    assert found[0][0][0].menu == found[1][0][0].menu


def test_a_block_that_one_rank_has_not_run_yet_has_no_common_profile() -> None:
    own = profile(call("mm"))
    found = together(
        lambda agreement: agreement.profiles(1, frozenset({1}), [(own, 1), (own, 1)]),
        lambda agreement: agreement.profiles(1, frozenset({0}), [(own, 1)]),
    )
    assert [[one is not None for one in ours] for ours in found] == [[True, False], [True]]


def test_what_one_rank_may_not_keep_none_keeps_and_what_one_must_all_do() -> None:
    ours = [
        profile(call("mm", why_not="written later"), call("sum"), call("add")),
        profile(call("mm"), call("sum", must=True)),
    ]
    common, at = common_profile(ours[0], ours)
    assert at == 0
    assert [one.why_not for one in common.calls] == [
        "written later",
        "",
        "not every rank that follows this plan calls it",
    ]
    assert [keep for keep in common.keeps if keep is not None] == [frozenset({("sum", 0)})]


def test_a_block_that_may_not_be_recomputed_on_one_rank_is_plain_on_all() -> None:
    ours = [profile(call("mm")), profile(call("mm"), only="it writes to its input")]
    assert common_profile(ours[0], ours)[0].keeps == (None,)


def test_each_member_hears_the_room_of_all_and_the_plan_of_one() -> None:
    def run(agreement: Agreement) -> Any:
        rank = 1 if agreement.hears == {0} else 0
        rooms = agreement.rooms(Room("shape", 10 - rank))
        plan: Any = agreement.tell_plan(lambda: None) if rank == 1 else agreement.hear_plan(1)
        return rooms, plan

    def rank(peer: int) -> Callable[[Agreement], Any]:
        def both(agreement: Agreement) -> Any:
            agreement.profiles(1, frozenset({peer}), [])
            return run(agreement)

        return both

    assert together(rank(1), rank(0)) == [({0: Room("shape", 10), 1: Room("shape", 9)}, None)] * 2


def test_a_planner_that_fails_is_told_to_the_others() -> None:
    def fails() -> Any:
        raise OffloadError("no program here")

    def plans(agreement: Agreement) -> Any:
        agreement.profiles(1, frozenset({1}), [])
        return agreement.tell_plan(fails)

    def hears(agreement: Agreement) -> Any:
        agreement.profiles(1, frozenset({0}), [])
        return agreement.hear_plan(0)

    ours, other = together(plans, hears)
    assert str(ours) == "no program here"
    assert "rank 0 plans for ranks [0, 1], whose blocks communicate, and it failed" in str(other)
    assert "OffloadError: no program here" in str(other)


@pytest.mark.parametrize("store", [dist.HashStore, dist.FileStore])
def test_a_rank_that_does_not_come_is_named_and_nobody_waits_for_ever(store: Any, tmp_path: Path) -> None:
    """A FileStore, which counts whole seconds, raises another error than the rest."""
    ours, _, _ = together(
        lambda agreement: agreement.profiles(3, frozenset({1, 2}), []),
        lambda agreement: None,
        lambda agreement: None,
        timeout_s=0.2,
        store=store(str(tmp_path / "store")) if store is dist.FileStore else store(),
    )
    assert "rank 0 waited 0.2 s at the end of its step 3 for ranks [1, 2]" in str(ours)
    assert "an exception, or a step that was skipped on some ranks only" in str(ours)


def test_what_was_told_is_taken_back_once_all_have_read_it() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:

        def run(rank: int) -> None:
            agreement = Agreement(store, rank, 20.0)
            for end in range(1, 6):
                agreement.profiles(end, frozenset({1 - rank}), [])
                agreement.rooms(None)

        list(pool.map(run, range(2)))
    assert store.num_keys() == 2 * 2  # of the last end, by two ranks


def test_ranks_agree_at_each_of_the_first_ends_and_seldom_later() -> None:
    assert [end for end in range(1, 50) if is_point(end)] == [*range(1, 17), 32, 48]
