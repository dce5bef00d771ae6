"""The import arrows of docs/design.md, read from the source with `ast`: who may know whom, inside offload and
between the packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A part imports itself and the parts of lower levels. Features share a level: they do not import each other.
LEVELS: list[set[str]] = [
    {"ids", "errors", "config"},
    {"device"},
    {"memory"},
    {"transfer"},
    {"saved"},
    {"engine"},
    {"groups", "spill", "checkpoint", "params", "streaming", "quant", "optim", "conductor", "planner"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# any part may import these; policy imports no part, telemetry the lowest level
BESIDE = {"policy", "telemetry"}
PAGES = {"offload/__init__.py", "offload/fine_grained_activation_offload.py"}  # re-exports only
WITHOUT_TORCH = ("offload/policy/", "offload/planner/simulate.py", "offload/telemetry/records.py")


def imported_names(source: str) -> Iterator[str]:
    """Every imported name in full, wherever it is imported: `from a.b import c` is a.b.c, a relative import
    starts with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def forbidden(path: str, name: str) -> str | None:
    """Why the file at `path`, relative to the root, may not import `name`; None if it may."""
    package, part = path.split("/")[0], path.split("/")[1].removesuffix(".py")
    target, *rest = name.split(".")
    if name.startswith("."):
        return "is relative; write the full name, so that the arrow can be read"
    if target == "torch" and path.startswith(WITHOUT_TORCH):
        return "is torch, in a corner that takes numbers only"
    if package != "offload":
        inner = target == "offload" and (len(rest) > 1 or (rest and rest[0] in LEVEL.keys() | BESIDE))
        return "is inside offload; import a public name of offload" if inner else None
    if target in {"parallel", "moe"}:
        return "points up, out of offload"
    if target != "offload" or path in PAGES:
        return None
    if part not in LEVEL.keys() | BESIDE:
        return f"is made by a part, {part}, that has no place in LEVELS; give it one"
    other = rest[0] if rest else "the public page"
    if path == "offload/telemetry/records.py":
        return "is made by telemetry.records, which imports nothing of the rest"
    if other == part or (other in BESIDE and part != "policy"):
        return None
    reach = {"policy": 0, "telemetry": 1}.get(part, LEVEL.get(part, 0))
    same_base = part in LEVELS[0] and other in LEVELS[0]
    return (
        None
        if same_base or LEVEL.get(other, len(LEVELS)) < reach
        else f"is an arrow {part} -> {other}, which the design does not have"
    )


def violations(root: Path) -> list[str]:
    files = sorted(
        path for package in ("offload", "parallel", "moe") for path in (root / package).rglob("*.py")
    )
    found = [
        (file.relative_to(root).as_posix(), name)
        for file in files
        for name in imported_names(file.read_text())
    ]
    return [f"{path}: import of {name} {why}" for path, name in found if (why := forbidden(path, name))]


def test_imports_point_down_only() -> None:
    assert violations(ROOT) == []


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("offload/device/cuda.py", "from offload.memory.arena import HostArena"),
        ("offload/memory/arena.py", "def f():\n    import offload.transfer.engine"),
        ("offload/groups/chunk.py", "from offload.spill import runtime"),
        ("offload/planner/plan.py", "from offload.groups.manager import PipelineOffloadManager"),
        ("offload/engine.py", "from offload.optim import hybrid"),
        ("offload/policy/plan.py", "from offload.ids import ChunkId"),
        ("offload/policy/lookahead.py", "import torch"),
        ("offload/policy/watermark.py", "from offload.telemetry.records import StepStats"),
        ("offload/planner/simulate.py", "from torch import nn"),
        ("offload/telemetry/records.py", "from offload.ids import ChunkId"),
        ("offload/telemetry/hub.py", "from offload.memory.arena import HostArena"),
        ("offload/saved/hooks.py", "from offload import group_start"),
        ("offload/saved/hooks.py", "import offload"),
        ("offload/saved/hooks.py", "from .store import Store"),
        ("offload/saved/hooks.py", "from parallel.stage import OffloadPipelineStage"),
        ("offload/newcomer.py", "from offload.ids import ChunkId"),
        ("parallel/stage.py", "from offload.groups.manager import PipelineOffloadManager"),
        ("moe/layer.py", "from offload import memory"),
    ],
)
def test_a_planted_wrong_arrow_is_found(tmp_path: Path, path: str, line: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert [found.split(": ")[0] for found in violations(tmp_path)] == [path]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("offload/config.py", "from offload.errors import OffloadError"),
        ("offload/engine.py", "from offload.saved.store import Store"),
        (
            "offload/groups/manager.py",
            "from offload.policy import plan\nfrom offload.telemetry.summary import "
            "print_offload_summary_table",
        ),
        ("offload/device/cuda.py", "from offload.device.base import Device\nimport torch"),
        (
            "offload/telemetry/hub.py",
            "from offload.errors import OffloadError\nfrom offload.telemetry.records import StepStats",
        ),
        ("offload/fine_grained_activation_offload.py", "from offload.groups.interface import group_start"),
        (
            "parallel/stage.py",
            "from offload import PipelineOffloadManager\nimport offload\nfrom parallel import launch",
        ),
    ],
)
def test_an_arrow_of_the_design_is_let_through(tmp_path: Path, path: str, line: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert violations(tmp_path) == []
