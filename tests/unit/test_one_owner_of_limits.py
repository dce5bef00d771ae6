"""Only offload/transfer/limits.py writes caps: read from the source with `ast`, like the import arrows.

Some 20 writes to the limits, to the engine's config and to the prefetch stood in six files. Which of two
clients held a cap was a question of who wrote last, and the end of one could undo what the other needed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from offload.transfer.limits import Cap

ROOT = Path(__file__).resolve().parents[2]
OWNER = "offload/transfer/limits.py"
FOLDERS = ("offload", "parallel", "moe", "scripts")

CAPS = {*get_args(Cap), "claimed_bytes", "most_bytes"}
"""Attributes that nobody else writes, whatever the object is called."""
WATCHERS = {"on_save", "room", "relieve"}
"""What only the limits ask of a watcher, so that all are asked: `limits.relieve()` asks them all."""
CONFIG_WRITERS = {"offload/engine.py"}
"""Files that give an engine its config."""


def _written(node: ast.AST) -> Iterator[ast.expr]:
    """The targets that a statement writes or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            waiting = [*targets]
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target) | ast.For(target=target):
            waiting = [target]
        case ast.withitem(optional_vars=ast.expr() as target):
            waiting = [target]
        case ast.NamedExpr(target=target):
            waiting = [target]
        case _:
            return
    while waiting:
        found = waiting.pop()
        if isinstance(found, (ast.Tuple, ast.List)):
            waiting += found.elts
        elif isinstance(found, ast.Starred):
            waiting.append(found.value)
        else:
            yield found


def _is(node: ast.expr, name: str) -> bool:
    """Whether an expression ends in this name: `limits`, `self._limits`, `engine.limits`."""
    found = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return found.lstrip("_") == name


def other_writers(path: str, source: str) -> list[str]:
    """What a file writes that is the limits' own."""
    if path == OWNER:
        return []
    found = []
    for node in ast.walk(ast.parse(source)):
        for target in _written(node):
            if not isinstance(target, ast.Attribute):
                continue
            of_limits = target.attr in CAPS or _is(target.value, "limits")
            of_config = target.attr == "config" and _is(target.value, "engine")
            if of_limits or of_config:
                found.append(ast.unparse(target))
        if isinstance(node, ast.Call):
            called, first = node.func, node.args[0] if node.args else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if isinstance(called, ast.Attribute) and _is(called.value, "limits"):
                private = name.startswith("_") or (name == "follow" and path not in CONFIG_WRITERS)
                found += [ast.unparse(called)] if private else []
            asks = isinstance(called, ast.Attribute) and name in WATCHERS
            if asks and not _is(called.value, "limits") and not path.startswith("offload/watermark/"):
                found.append(ast.unparse(called))
            if name in {"setattr", "delattr", "__setattr__"} and first is not None and _is(first, "limits"):
                found.append(ast.unparse(node))
    return found


def test_nobody_else_writes_a_cap() -> None:
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    assert len(files) > 200
    found = {
        (name, what)
        for path in files
        for name in [path.relative_to(ROOT).as_posix()]
        for what in other_writers(name, path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "engine.limits.device_limit_bytes = 1",
        "self._engine.limits.kept_limit_bytes = max(0, most_bytes)",
        "usual, limits.max_spilling_bytes = limits.max_spilling_bytes, 0",
        "limits.max_restoring_bytes += 1",
        "limits.bounded_elsewhere: bool = True",
        "transfers.limits.again_room_bytes = None",
        "del self.limits.half_room_bytes",
        "prefetch.most_bytes = 5",
        "share.limits.watchers = ()",
        "setattr(engine.limits, 'kept_limit_bytes', 1)",
        "object.__setattr__(engine.limits, name, 1)",
        "engine.limits._change(who, {})",
        "engine.limits.follow(config)",
        "self._transfers.claimed_bytes += block.nbytes",
        "limits.spills_in_flight = 0",
        "watcher.relieve()",
        "fits = [watcher.room() for watcher in found]",
        "engine.config = replace(engine.config, device_limit_bytes=1)",
        "for engine.limits.max_spilling_bytes in (1, 2): pass",
    ],
)
def test_a_planted_writer_is_found(line: str) -> None:
    assert len(other_writers("offload/auto/plan.py", line)) == 1


@pytest.mark.parametrize(
    "line",
    [
        "limit = engine.limits.device_limit_bytes",
        "limits.relieve()",
        "limits.claim_more(3)",
        "share = engine.limits.contributor('weights')",
        "share.bound('device_limit_bytes', 1)",
        "config = replace(config, device_limit_bytes=1)",
        "limits, before = manager.engine.limits, manager.engine.config",
    ],
)
def test_a_reader_or_contributor_is_let_through(line: str) -> None:
    assert other_writers("offload/auto/plan.py", line) == []
