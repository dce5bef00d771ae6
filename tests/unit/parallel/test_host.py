"""Ranks that pin and measure together: real gloo ranks, and engines that only write down what was asked of
them."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from offload import HostBudgetError, PipelineOffloadManager
from parallel import host
from parallel.host import reserve_host_together
from tests.once import run_ranks_once


class Case(NamedTuple):
    """By rank, "y" or "n": whether it may not pin, and whether it can measure the link."""

    refused: str = "nn"
    able: str = "yy"
    backends: str = "cuda:nccl"
    """What a group's have to have for collectives beside the copies."""


class Engine:
    def __init__(self, said: list[str], able: bool) -> None:
        self.can_measure_link = able
        self.device = SimpleNamespace(torch_device=torch.device("cpu"))
        self._said = said

    def measure_link(self, line_up: Any) -> None:
        self._said.append("alone" if line_up is None else "together")
        if line_up is not None:
            for _ in range(3):
                line_up()
                self._said.append("lined up")


class Manager:
    def __init__(self, said: list[str], *, refused: bool, able: bool) -> None:
        self.engine = Engine(said, able)
        self._said = said
        self._refused = refused

    def reserve_host(self, nbytes: int, *, measure: bool) -> None:
        self._said.append(f"pin {nbytes} {measure}")
        if self._refused:
            raise HostBudgetError(f"no room for {nbytes:,} bytes")


def asked(rank: int, world: int, cases: dict[str, Case]) -> dict[str, tuple[list[str], list[str]]]:
    """By case: what the rank's engine was asked, and what it logged."""
    found = {}
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, group: Any, async_op: bool = False) -> Any:
        if async_op:
            said.append("summed")
        return all_reduce(tensor, group=group, async_op=async_op)

    for name, case in cases.items():
        said: list[str] = []
        logged: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, logged=logged: logged.append(record.getMessage())  # type: ignore[method-assign, misc]
        logging.getLogger("offload.parallel").addHandler(handler)
        manager = Manager(said, refused=case.refused[rank] == "y", able=case.able[rank] == "y")
        host._NCCL, host._SUMMED_BYTES, host._COLLECTIVES = case.backends, 64, 2
        try:
            with patch.object(dist, "all_reduce", counted):
                reserve_host_together(
                    cast(PipelineOffloadManager, manager), 1000 * (rank + 1), dist.group.WORLD
                )
        except HostBudgetError as error:
            said.append(str(error))
        logging.getLogger("offload.parallel").removeHandler(handler)
        dist.barrier()  # what the next case asks is its own
        found[name] = said, logged
    return found


CASES = {
    "collectives": Case(backends="cpu:gloo"),
    "one alone": Case(able="yn", backends="cpu:gloo"),
    "all can": Case(),
    "one may not pin": Case(refused="ny"),
    "one cannot measure": Case(able="yn"),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[list[str], list[str]]]]:
    """By rank."""
    return run_ranks_once(tmp_path_factory, "host", asked, 2, CASES)


def test_ranks_pin_their_own_bytes_and_line_up_before_each_measurement(ranks: list[dict[str, Any]]) -> None:
    said = [rank["all can"][0] for rank in ranks]
    assert said == [
        [f"pin {nbytes} False", "together", "lined up", "lined up", "lined up"] for nbytes in (1000, 2000)
    ]


def test_collectives_of_the_ranks_run_beside_each_measurement(ranks: list[dict[str, Any]]) -> None:
    for rank, nbytes in zip(ranks, (1000, 2000), strict=True):
        together = ["summed", "summed", "lined up"] * 3
        assert rank["collectives"][0] == [f"pin {nbytes} False", "together", *together]
    assert ranks[0]["one alone"][0] == ["pin 1000 False", "alone"], (
        "nobody sums with those that do not measure"
    )


def test_rank_that_may_not_pin_is_heard_by_all_and_nobody_waits_for_it(ranks: list[dict[str, Any]]) -> None:
    said = [rank["one may not pin"][0] for rank in ranks]
    assert said == [
        [f"pin {nbytes} False", "1 of 2 ranks could not pin: rank 1: no room for 2,000 bytes"]
        for nbytes in (1000, 2000)
    ]


def test_rank_that_cannot_measure_leaves_the_other_to_measure_alone_with_a_warning(
    ranks: list[dict[str, Any]],
) -> None:
    said = [rank["one cannot measure"][0] for rank in ranks]
    assert said == [["pin 1000 False", "alone"], ["pin 2000 False"]]
    (warning,) = ranks[0]["one cannot measure"][1]
    assert "ranks 1 of 2 hold too little host memory to measure the link with" in warning
