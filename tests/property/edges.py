"""What the files of ordering notes share: a note's scenario, its hazard, and the titles that are in the code.

One invariant of those files: the titles in the notes, the titles of the edges in the code and the titles
tested are one set; an edge that nobody needs, or that nothing proves, does not stay unnoticed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from offload.device.sim import ExecutorName, SimDevice
from offload.errors import HazardError


@dataclass(frozen=True)
class Edge:
    """One note. hazard: its kind, as the error says it without the edge; sides: what the error says of the
    two operations, as patterns."""

    run: Callable[[SimDevice], None]
    hazard: str
    sides: tuple[str, str]
    executor: ExecutorName = "late"

    def check_with(self, title: str, device: SimDevice, executor: ExecutorName) -> None:
        """The program runs, and has used the edge of this title where it shows."""
        self.run(device)
        assert device.waits[title] > 0 or executor != self.executor, "the scenario does not use its edge"

    def check_without(self, title: str) -> str:
        """The hazard that the program meets: its message says its kind and sides and names the edge of
        this title as left out."""
        with pytest.raises(HazardError) as caught:
            self.run(SimDevice(executor=self.executor, without={title}))
        message = str(caught.value)
        assert message.startswith(f"{self.hazard} hazard on bytes "), message
        assert f"'{title}'" in message.split("edges left out of ", 1)[1], message
        assert all(re.search(side, message) for side in self.sides), message
        return message


def devices(executor: ExecutorName, seeds: int = 5) -> Iterator[SimDevice]:
    """A device of this executor; of "random" one of each seed."""
    return (SimDevice(executor=executor, seed=seed) for seed in range(seeds if executor == "random" else 1))


def noted_titles(texts: list[str]) -> set[str]:
    """Titles of the notes in these sources; each is noted once."""
    noted = [title for text in texts for title in re.findall(r"^ *# \[Order: (.+)\]$", text, re.MULTILINE)]
    assert sorted(noted) == sorted(set(noted)), "two notes of one title"
    return set(noted)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def edge_titles(sources: list[str]) -> set[str]:
    """The constants given as an edge's title: to `wait(lane, event, title)`, and to functions that pass a
    parameter of theirs on to it."""
    passing = {"wait"}
    trees = [ast.parse(source) for source in sources]
    titles: set[str] = set()
    while True:
        found = set(passing)
        for function in (function for tree in trees for function in functions(tree)):
            parameters = {argument.arg for argument in function.args.args}
            for call in (
                node
                for node in ast.walk(function)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            ):
                if call.func.attr not in passing or not call.args:  # type: ignore[attr-defined]
                    continue
                title = call.args[-1]
                if isinstance(title, ast.Constant) and isinstance(title.value, str):
                    titles.add(title.value)
                elif isinstance(title, ast.Name) and title.id in parameters and len(call.args) > 1:
                    found.add(function.name)
        if found == passing:
            return titles
        passing = found
