"""What a group that stays has saved: aliases, counted by the piece as they come and until all of it is
read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import PipelineOffloadManager, StepStats, init_chunk_handler
from offload.saved.store import KEPT_SHARE
from tests.unit.groups.both import run_both
from tests.unit.groups.stack import build_manager, gpipe, installed, no_pipeline

ELEMENTS = 64
NBYTES = 4 * ELEMENTS
Forward = Callable[[Tensor], Tensor]


def group(body: Forward, x: Tensor, name: str = "a", **commit: Any) -> Tensor:
    x = offload.group_start(x, name)
    with offload.offload_hooks():
        y = body(x)
    return offload.group_commit(y, name, **commit)


def step(forward: Forward, x: Tensor | None = None) -> tuple[Tensor, StepStats]:
    """One microbatch: the gradient of its input, and the step's figures."""
    init_chunk_handler(None, None, 1)
    leaf = (torch.linspace(-1, 1, ELEMENTS) if x is None else x).clone().requires_grad_()
    forward(leaf * 1).sum().backward()
    stats = offload.step_end()
    assert leaf.grad is not None
    assert stats is not None
    return leaf.grad, stats


def plain(forward: Forward, x: Tensor | None = None) -> Tensor:
    with installed(None):
        leaf = (torch.linspace(-1, 1, ELEMENTS) if x is None else x).clone().requires_grad_()
        forward(leaf * 1).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.fixture
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager(activation_offload_fraction=0.0, piece_bytes=1 << 20)) as built:
        yield built


def sines(count: int) -> Forward:
    def forward(x: Tensor) -> Tensor:
        for _ in range(count):
            x = x.sin()
        return x

    return forward


# -- counts --------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("manager")
def test_a_storage_that_is_saved_twice_in_a_group_is_counted_once() -> None:
    def forward(x: Tensor) -> Tensor:
        return group(lambda x: x.sin() + x.cos() + x * x.view(ELEMENTS), x)

    stats = [step(forward)[1] for _ in range(4)]
    assert [s.saved for s in stats] == [1] * 4
    assert [s.device_bytes_peak for s in stats] == [NBYTES] * 4


@pytest.mark.parametrize("committed", [True, False])
def test_bytes_of_a_piece_are_counted_as_they_come(committed: bool, manager: PipelineOffloadManager) -> None:
    assert manager.engine.config.piece_bytes >= 6 * NBYTES
    for _ in range(3):
        step(lambda x: group(sines(6), x))
    init_chunk_handler(None, None, 1)
    leaf = torch.ones(ELEMENTS, requires_grad=True)
    x = offload.group_start(leaf * 1, "a")
    with offload.offload_hooks():
        y = sines(2)(x)
        assert manager.engine.transfers.resident_bytes == 2 * NBYTES
        if committed:
            y = offload.group_commit(y, "a")
            assert manager.engine.transfers.resident_bytes == 2 * NBYTES
            assert manager.cur_forward_chunk().groups[0].total_offload_bytes == 2 * NBYTES  # type: ignore[union-attr]
            y = y.tanh()  # is nobody's
    if committed:
        y.sum().backward()
        del x, y
        manager.engine.transfers.reclaim_freed()
        assert manager.engine.transfers.resident_bytes == 0
    offload.step_end()
    assert manager.engine.transfers.resident_bytes == 0


# -- reads ---------------------------------------------------------------------------------------------------
# -- beside others -------------------------------------------------------------------------------------------
def last_of_five(forward: Callable[[Tensor, bool], Tensor]) -> tuple[Tensor, StepStats]:
    """The fifth step, the only one of which `forward` is told so, when the first group of each chunk stays
    and the others leave."""
    with installed(build_manager(activation_offload_fraction=1.0)) as manager:
        for number in range(5):
            for handler in manager.tracker.handlers.values():
                handler.stays = frozenset({0})
            found = step(lambda x, last=number == 4: forward(x, last))  # type: ignore[misc]
    return found


def test_a_kept_save_holds_back_the_forced_release_of_its_storage_by_another_group(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The group that leaves saves the storage of a kept save for the first time; freed by force, the other
    would read nothing."""

    def forward(x: Tensor, release: bool) -> Tensor:
        saved: list[Tensor] = []
        y = group(lambda x: saved.append(x) or x.sin(), x, "kept")  # type: ignore[func-returns-value]
        z = offload.group_start(y, "left")
        with offload.offload_hooks():
            z = z * saved[0] if release else z.cos()
        return offload.group_commit(z, "left", saved if release else None)

    expected = plain(lambda x: forward(x, True))
    with caplog.at_level(logging.WARNING, "offload"):
        gradient, _ = last_of_five(forward)
    assert torch.equal(gradient, expected)
    assert "was to be released, but" in caplog.text


def test_no_figure_depends_on_the_size_of_a_piece() -> None:
    found = []
    for piece_bytes in (1, 3 * NBYTES, 1 << 20):
        manager = build_manager(activation_offload_fraction=0.0, piece_bytes=piece_bytes)
        stats = run_both([gpipe(2)] * 3 + [no_pipeline(1)], manager, layers=1)
        found.append([(s.saved, s.kept, s.spilled, s.spill_bytes) for s in stats])
    assert found[0] == found[1] == found[2]


def test_a_piece_that_stays_is_small_beside_a_device_limit() -> None:
    limit = 4 * NBYTES * KEPT_SHARE
    with installed(build_manager(device_limit_bytes=limit, piece_bytes=1 << 20)) as manager:
        for _ in range(3):
            step(lambda x: group(sines(6), x))
        init_chunk_handler(None, None, 1)
        y = group(sines(6), torch.ones(ELEMENTS, requires_grad=True) * 1)
        assert [block.nbytes for block in manager.living_blocks()] == [4 * NBYTES, 2 * NBYTES]
        y.sum().backward()
