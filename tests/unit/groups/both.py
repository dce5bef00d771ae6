"""A program with a manager and without: what the tests of whole steps share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from offload import PipelineOffloadManager, StepStats
from tests.unit.groups import stack
from tests.unit.groups.stack import Action, Driver, assert_same, baseline, build_stages, installed


def assert_nothing_is_left(manager: PipelineOffloadManager) -> None:
    transfers = manager.engine.transfers
    assert (transfers.device_bytes, transfers.in_flight()) == (0, (0, 0))
    assert manager.engine.arena.stats().lent == 0
    assert manager.engine.hooks.innermost() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def run_both(
    steps: Sequence[Sequence[Action]],
    manager: PipelineOffloadManager,
    *,
    announced: bool = False,
    **build: Any,
) -> list[StepStats]:
    """The steps without a manager and with this one: the same gradients, and nothing left after any step.
    Returns each step's figures."""
    expected = baseline(build_stages(**build), steps)
    with installed(manager):
        driver = Driver(build_stages(**build), announced=announced)
        found, stats = [], []
        for actions in steps:
            found.append(driver.step(actions))
            stats.append(manager.stats)
            assert_nothing_is_left(manager)
    assert_same(expected, found)
    return stats


@contextmanager
def between_marks(call: Callable[[], None]) -> Iterator[None]:
    """`call()` before and after every mark and at both ends of every hook scope of `stack.Layer`."""
    start, commit, hooks = stack.group_start, stack.group_commit, stack.offload_hooks

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **keywords: Any) -> Any:
            call()
            result = function(*args, **keywords)
            call()
            return result

        return called

    @contextmanager
    def around_hooks() -> Iterator[None]:
        call()
        with hooks():
            call()
            yield
            call()
        call()

    vars(stack).update(group_start=around(start), group_commit=around(commit), offload_hooks=around_hooks)
    try:
        yield
    finally:
        vars(stack).update(group_start=start, group_commit=commit, offload_hooks=hooks)
