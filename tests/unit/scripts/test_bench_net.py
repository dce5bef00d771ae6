"""What the net costs is measured by turns: only its constants change, and they are put back."""

from __future__ import annotations

import sys

import pytest
import torch

import bench_net
from bench.measure import Clock
from offload.checkpoint import net


def test_turns_alternate_and_leave_the_net_as_it_was() -> None:
    usual, never, seen = net._EVERY, sys.maxsize, []
    found = bench_net.turns(lambda: seen.append(net._EVERY), Clock(torch.device("cpu")), turns=2, steps=3)
    assert len(found) == 2
    assert seen == [usual] * 6 + [usual] * 3 + [never] * 6 + [usual] * 3
    assert net._FIRST_CALLS == 3
    assert usual == net._EVERY


def test_a_stack_and_a_model_run_in_tiny_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_net.main(["--tiny", "--turns", "1", "--steps", "1"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["W1", "llama"]
