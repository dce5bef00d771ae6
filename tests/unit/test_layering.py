"""The import arrows of docs/design.md, read from the source with `ast`: who may know whom, inside offload and
between the packages."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# A part imports itself and the parts of lower levels; parts of one level do not import each other.
LEVELS: list[set[str]] = [
    {"ids", "errors", "config", "sizes", "packages", "versions"},
    {"device"},
    {"memory"},
    {"disk"},
    {"transfer"},
    {"saved", "params"},
    {"client"},  # what the engine asks of features
    {"engine"},
    {"compile"},  # what torch.compile must not see: features and marks are wrapped with it
    {"groups", "checkpoint", "watermark", "optim", "weights", "streaming", "quant", "conductor"},
    {"planner"},  # measures what blocks cost, under checkpoints
    {"modules"},  # hooks on a user's modules, which open groups
    {"auto"},  # mode "auto", which chooses by real steps
    {"marks"},  # and the manager that this process has
    {"report", "plot", "park", "policies"},
    {"apply", "load"},
    {"compare"},  # tries what apply does
    {"compat", "pipelining"},  # the sources' spellings, and torch's pipelines: adapters of all the rest
    {"integrations", "spill"},  # of trainers of others, which they import; and a former name
    {"the public page"},
    {"commands"},  # the console command: a user like any other
    {"__main__"},
]
LEVEL = {part: level for level, parts in enumerate(LEVELS) for part in parts}
# any part may import these; policy imports no part, telemetry the lowest level
BESIDE = {"policy", "telemetry"}
PAGES = {"offload/__init__.py", "offload/fine_grained_activation_offload.py"}  # re-exports only
PUBLIC = {"compat", "pipelining"}  # their names are for the other packages too
DRY_RUN = "parallel/dry_run/"  # plans with the engine's plans: of what is inside offload it may import BESIDE
WITHOUT_TORCH = (
    "offload/policy/",
    "offload/planner/profile.py",
    *(f"offload/conductor/{name}.py" for name in ("phases", "budget", "adapters", "config")),
    *(f"{DRY_RUN}{name}.py" for name in ("simulate", "models", "rates")),
    "offload/telemetry/records.py",
)

KNOWN_CIRCLES: list[set[str]] = []
"""Files that import each other in a circle, to be mended. Take out what is mended; add none."""


def imported_names(source: str) -> Iterator[str]:
    """Every imported name in full, wherever it is imported: `from a.b import c` is a.b.c, a relative import
    starts with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = f"{'.' * node.level}{node.module}." if node.module else "." * node.level
            yield from (f"{module}{alias.name}" for alias in node.names)


def forbidden(path: str, name: str) -> str | None:
    """Why the file at `path`, relative to the root, may not import `name`; None if it may."""
    package, part = path.split("/")[0], path.split("/")[1].removesuffix(".py")
    target, *rest = name.split(".")
    if name.startswith("."):
        # parallel/ and moe/ have two names each: offload/packages.py
        inside = package != "offload" and not name.startswith("..")
        return None if inside else "is relative; write the full name, so that the arrow can be read"
    if package in {"parallel", "moe"} and package in name.split(".")[:2]:
        return "has one of two names of this folder; import a neighbour relatively"
    if target == "torch" and path.startswith(WITHOUT_TORCH):
        return "is torch, in a corner that takes numbers only"
    if package != "offload":
        hidden = LEVEL.keys() | BESIDE
        public = PUBLIC | BESIDE if path.startswith(DRY_RUN) else PUBLIC
        inner = (
            target == "offload" and rest and rest[0] not in public and (len(rest) > 1 or rest[0] in hidden)
        )
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


def sources(root: Path) -> dict[str, str]:
    """The text of each file of the packages, by its path relative to `root`."""
    packages = [root / package for package in ("offload", "parallel", "moe")]
    files = sorted(path for package in packages for path in package.rglob("*.py"))
    return {file.relative_to(root).as_posix(): file.read_text() for file in files}


def violations(root: Path) -> list[str]:
    found = [(path, name) for path, text in sources(root).items() for name in imported_names(text)]
    return [f"{path}: import of {name} {why}" for path, name in found if (why := forbidden(path, name))]


def circles(root: Path) -> list[set[str]]:
    """The files of which each imports, by way of others maybe, each other one, ordered by name.

    An import counts wherever it stands, under TYPE_CHECKING and in a function too.
    """
    texts = sources(root)
    file_of = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in texts}

    def imported_file(path: str, name: str) -> str | None:
        if name.startswith("."):
            name = path.rpartition("/")[0].replace("/", ".") + name
        return file_of.get(name) or file_of.get(name.rpartition(".")[0])  # a module, or a name in one

    arrows = {
        path: {file for name in imported_names(text) if (file := imported_file(path, name))} - {path}
        for path, text in texts.items()
    }

    def reachable(path: str) -> set[str]:
        seen: set[str] = set()
        ahead = [path]
        while ahead:
            new = arrows[ahead.pop()] - seen
            seen |= new
            ahead += new
        return seen

    reach = {path: reachable(path) for path in arrows}
    found = {
        frozenset(other for other in reach[path] if path in reach[other])
        for path in arrows
        if path in reach[path]
    }
    return sorted((set(circle) for circle in found), key=min)


def test_imports_point_down_only() -> None:
    assert violations(ROOT) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    found = circles(ROOT)
    assert [circle for circle in found if circle not in KNOWN_CIRCLES] == []
    assert [circle for circle in KNOWN_CIRCLES if circle not in found] == [], "mended: take it off the list"


@pytest.mark.parametrize(
    ("files", "circle"),
    [
        ({"offload/groups/a.py": "import offload.groups.b", "offload/groups/b.py": "import torch"}, []),
        ({"offload/memory/a.py": "def f():\n    import offload.memory.b"}, ["a", "b"]),
        (
            {
                "offload/memory/a.py": "from offload.memory import c",
                "offload/memory/c.py": "if TYPE_CHECKING:\n    from offload.memory.b import B",
            },
            ["a", "b", "c"],
        ),
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, files: dict[str, str], circle: list[str]) -> None:
    closing = {"offload/memory/b.py": "from offload.memory.a import A"}
    for path, text in {**closing, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n")
    assert circles(tmp_path) == ([{f"offload/memory/{name}.py" for name in circle}] if circle else [])


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("offload/device/cuda.py", "from offload.memory.arena import HostArena"),
        ("offload/memory/arena.py", "def f():\n    import offload.transfer.engine"),
        ("offload/groups/chunk.py", "from offload.watermark import runtime"),
        ("offload/groups/manager.py", "from offload.planner.profile import BlockProfile"),
        ("offload/engine.py", "from offload.optim import hybrid"),
        ("offload/policy/search.py", "from offload.ids import ChunkId"),
        ("offload/policy/actions.py", "import torch"),
        ("offload/policy/watermark.py", "from offload.telemetry.records import StepStats"),
        ("offload/planner/profile.py", "from torch import nn"),
        ("parallel/dry_run/simulate.py", "from torch import nn"),
        ("parallel/dry_run/job.py", "from offload.planner.profile import BlockProfile"),
        ("parallel/dry_run/job.py", "from ..schedules import SCHEDULES"),
        ("parallel/stage.py", "from offload.policy.actions import Action"),
        ("offload/planner/profile.py", "from parallel.dry_run.rates import Gpu"),
        ("offload/telemetry/records.py", "from offload.ids import ChunkId"),
        ("offload/telemetry/hub.py", "from offload.memory.arena import HostArena"),
        ("offload/saved/hooks.py", "from offload import group_start"),
        ("offload/saved/hooks.py", "import offload"),
        ("offload/saved/hooks.py", "from .store import Store"),
        ("offload/saved/hooks.py", "from parallel.stage import OffloadPipelineStage"),
        ("offload/groups/chunk.py", "from offload.optim.hybrid import HybridDeviceOptimizer"),
        ("offload/disk/tier.py", "from offload.transfer.block import DeviceBlock"),
        ("offload/memory/arena.py", "from offload.disk.tier import DiskTier"),
        ("offload/groups/chunk.py", "from offload.compat.manager import OffloadManager"),
        ("offload/params/sections.py", "from offload.saved.store import Store"),
        ("offload/marks.py", "from offload.compat.manager import Interface"),
        ("offload/optim/hybrid.py", "from offload.marks import step_end"),
        ("offload/marks.py", "from offload.pipelining.stage import OffloadPipelineStage"),
        ("offload/newcomer.py", "from offload.ids import ChunkId"),
        ("parallel/stage.py", "from offload.groups.manager import PipelineOffloadManager"),
        ("moe/layer.py", "from offload import memory"),
        ("moe/layer.py", "from moe.router import Router"),
        ("moe/layer.py", "from offload.moe.router import Router"),
        ("moe/layer.py", "from ..parallel.stage import OffloadPipelineStage"),
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
        ("offload/optim/hybrid.py", "from offload.params.sections import Ring"),
        ("offload/marks.py", "from offload.groups.manager import PipelineOffloadManager"),
        ("offload/compat/manager.py", "from offload.marks import group_start"),
        ("offload/pipelining/stage.py", "from offload import marks"),
        ("parallel/megatron.py", "from offload.compat.manager import Interface"),
        ("parallel/dry_run/job.py", "from offload.policy.actions import Action\nfrom .costs import Piece"),
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
        ("offload/fine_grained_activation_offload.py", "from offload.marks import group_start"),
        (
            "parallel/stage.py",
            "from offload import PipelineOffloadManager\nimport offload\nfrom . import launch\n"
            "from .megatron_page import PAGE",
        ),
    ],
)
def test_an_arrow_of_the_design_is_let_through(tmp_path: Path, path: str, line: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(line + "\n")
    assert violations(tmp_path) == []
