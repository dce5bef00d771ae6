"""Messages say who speaks: the package, and the rank where there are several."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import offload
from offload.telemetry.speaker import speaker
from tests.unit.groups.stack import build_manager, installed

ROOT = Path(__file__).resolve().parents[3]


def test_a_message_begins_with_the_package(caplog: pytest.LogCaptureFixture) -> None:
    """A user's log had "group 'act' moved nothing", and nobody to ask."""
    with installed(build_manager()):
        offload.group_start(torch.ones(2, requires_grad=True), "act")
    (record,) = caplog.records
    assert record.getMessage().startswith("offload: group 'act' is started while no chunk is current")
    assert record.name == "offload.groups.reports", "so that logging filters it as any other"


@pytest.mark.parametrize(("world", "prefix"), [(1, "offload: "), (4, "offload, rank 3: ")])
def test_where_there_are_ranks_it_names_its_own(
    world: int, prefix: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with caplog.at_level(logging.INFO):
        speaker("offload.somewhere").info("%s of %d", "100%", 5)
    assert caplog.messages == [f"{prefix}100% of 5"]


def test_every_module_speaks_so() -> None:
    found = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "offload").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "getLogger"
    ]
    assert found == ["offload/telemetry/speaker.py"]
