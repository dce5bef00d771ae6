"""Whatever a caller does in the middle of a step, gradients are those without offload: switches, exceptions,
second reads, delays.

Every comparison is bitwise, against the same program run with no manager at all.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload import PipelineOffloadManager, init_chunk_handler, step_end
from tests.unit.groups.both import assert_nothing_is_left, between_marks
from tests.unit.groups.stack import (
    NAMES,
    ROWS,
    WIDTH,
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    gpipe,
    installed,
    one_f_one_b,
)


@pytest.mark.req("S2-37", "S2-53", "S2-87")
def test_switch_may_flip_at_any_point_of_a_step() -> None:
    points = 0

    def count() -> None:
        nonlocal points
        points += 1

    steps = [gpipe(2)] * 2
    with between_marks(count):
        expected = baseline(build_stages(1, 1), steps)
    assert points == 2 * 2 * len(NAMES) * 8
    for flipped in range(1, points + 1, 3):
        seen = 0

        def flip(flipped: int = flipped) -> None:
            nonlocal seen
            seen += 1
            manager = PipelineOffloadManager.get_instance()
            if seen == flipped:
                manager.disable_offload()
            elif seen == flipped + 7:
                manager.enable_offload()

        with between_marks(flip), installed(build_manager("random", seed=flipped)) as manager:
            driver = Driver(build_stages(1, 1), announced=bool(flipped % 2))
            for expected_step, actions in zip(expected, steps, strict=True):
                assert_same([expected_step], [driver.step(actions)])
                assert_nothing_is_left(manager)


class BrokenLayerError(Exception):
    pass


@pytest.mark.parametrize("announced", [False, True])
def test_exception_at_any_point_of_a_forward_and_then_the_step_is_run_again(announced: bool) -> None:
    steps = [gpipe(2)] * 2
    expected = baseline(build_stages(1, 1), steps)
    for broken in range(1, 8 * len(NAMES) + 1, 3):
        seen = 0

        def fail(broken: int = broken) -> None:
            nonlocal seen
            seen += 1
            if seen == broken:
                raise BrokenLayerError

        with installed(build_manager("random", seed=broken)) as manager:
            driver = Driver(build_stages(1, 1), announced=announced)
            with between_marks(fail), pytest.raises(BrokenLayerError):
                driver.forward(0, 0)
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            found = []
            for actions in steps:
                found.append(driver.step(actions))
                assert_nothing_is_left(manager)
            assert_same(expected, found)
            assert manager.stats.spilled > 0


def test_exception_in_a_backward_and_then_the_next_step() -> None:
    expected = baseline(build_stages(), [gpipe(2)])
    with installed(build_manager("random", seed=11)) as manager:
        module = build_stages()[0]

        def fail(grad: Tensor) -> Tensor:
            raise BrokenLayerError

        init_chunk_handler(None, None, 1)
        middle = module[0](torch.randn(ROWS, WIDTH))
        middle.register_hook(fail)
        with pytest.raises(BrokenLayerError):
            module[1](middle).sum().backward()
        module.zero_grad()
        step_end()
        assert_nothing_is_left(manager)
        assert_same(expected, [Driver([module]).step(gpipe(2))])


@pytest.mark.req("S2-32", "S2-86")
@pytest.mark.parametrize("flush", [True, False])
def test_delayed_commits_with_a_flush_after_each_forward_or_never(flush: bool) -> None:
    steps = [one_f_one_b(4, 2)] * 3
    expected = baseline(build_stages(), steps)
    with installed(build_manager("random", seed=14)) as manager:

        class Flushing(Driver):
            def forward(self, stage: int, microbatch: int) -> None:
                super().forward(stage, microbatch)
                assert manager is not None
                if flush:
                    manager.flush_delayed_groups()

        driver = Flushing(build_stages(delay=True))
        found = []
        for actions in steps:
            found.append(driver.step(actions))
            assert_nothing_is_left(manager)
        assert_same(expected, found)
        if flush:
            assert manager.stats.spilled > 0
