"""A step that runs out of device memory, caught by the user: nothing of it stays behind, and the next step
has the right bits.

Played on the simulated device; on a GPU, with an allocator that really refuses, in
tests/gpu/test_out_of_memory.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import PipelineOffloadManager, step_end
from offload.device.sim import ExecutorName
from tests.inside import caps_of
from tests.unit.groups.stack import (
    Driver,
    Layer,
    assert_same,
    baseline,
    build_manager,
    installed,
    one_f_one_b,
)
from tests.unit.transfer.test_out_of_memory import SmallDevice

KIB = 1024
STEP = one_f_one_b(4, 2)
TURNS = 3
"""How often a step fails: each time elsewhere, and a whole step comes after it."""

CAPS: dict[str, dict[str, Any]] = {
    "windows": {"max_spilling_bytes": 2 * KIB, "max_restoring_bytes": 2 * KIB},
    "device limit": {"device_limit_bytes": 24 * KIB},
    "wait at each commit": {"max_inflight_offloads": 1},
}


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Hungry) -> Tensor:
        ctx.layer = layer
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.layer.count("backward")
        return gradients[0], None


class Hungry(nn.Module):
    """Runs out of memory in the forward or the backward whose turn it is; turns are counted from 0."""

    def __init__(self) -> None:
        super().__init__()
        self.fails_at: tuple[str, int] | None = None
        self.seen = {"forward": 0, "backward": 0}

    def count(self, kind: str) -> None:
        turn = self.seen[kind]
        self.seen[kind] += 1
        if self.fails_at == (kind, turn):
            raise torch.OutOfMemoryError(f"tried to allocate a lot in {kind} {turn}")

    def forward(self, x: Tensor) -> Tensor:
        self.count("forward")
        result: Tensor = _Fails.apply(x, self)
        return result


def build_model() -> tuple[list[nn.Module], Hungry]:
    torch.manual_seed(0)
    hungry = Hungry()
    return [nn.Sequential(Layer(), hungry, Layer())], hungry


Break = Callable[[Hungry, SmallDevice, int], None]
BREAKS: dict[str, Break] = {
    "a forward": lambda hungry, device, turn: setattr(hungry, "fails_at", ("forward", turn)),
    "a backward": lambda hungry, device, turn: setattr(hungry, "fails_at", ("backward", turn)),
    "the copies of a transfer": lambda hungry, device, turn: setattr(device, "copies_left", 7 * turn),
    "an event": lambda hungry, device, turn: setattr(device, "records_left", 40 * turn),
    "the buffers of restores": lambda hungry, device, turn: setattr(device, "capacity_bytes", turn),
}


def settled(manager: PipelineOffloadManager) -> None:
    """Nothing is held for a step, by anybody."""
    transfers, arena = manager.engine.transfers, manager.engine.arena.stats()
    assert (transfers.resident_bytes, transfers.spilling_bytes, transfers.restoring_bytes) == (0, 0, 0)
    assert transfers.in_flight() == (0, 0)
    assert not transfers._sources
    assert (arena.lent, arena.lent_bytes) == (0, 0)
    assert manager.engine.hooks.innermost() is None


@pytest.mark.parametrize("announced", [True, False], ids=["announced", "init_chunk_handler"])
@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("what", BREAKS)
def test_a_step_that_runs_out_of_memory_leaves_nothing_and_the_next_has_the_right_bits(
    what: str, caps: str, announced: bool
) -> None:
    """Each two of break, caps and announcement meet under each executor."""
    executors: tuple[ExecutorName, ...] = ("late", "random")
    executor = executors[([*BREAKS].index(what) + [*CAPS].index(caps) + announced) % 2]
    stages, _ = build_model()
    expected = baseline(stages, [STEP] * TURNS)
    stages, hungry = build_model()
    device = SmallDevice(executor)
    found: list[list[Tensor]] = []
    failures = 0
    with installed(build_manager(device=device, **CAPS[caps])) as manager:
        driver = Driver(stages, announced=announced)
        for turn in range(TURNS):
            limits = caps_of(manager.engine)
            hungry.seen = {"forward": 0, "backward": 0}
            BREAKS[what](hungry, device, turn)
            parameters = {name: value.clone() for name, value in stages[0].state_dict().items()}
            try:
                driver.step(STEP)
            except torch.OutOfMemoryError:
                failures += 1
            driver._live.clear()
            # the step once more, from the same parameters: it may have failed after their update, or not at
            # all
            driver._steps = turn
            stages[0].load_state_dict(parameters)
            stages[0].zero_grad(set_to_none=True)
            hungry.fails_at = None
            device.heal()
            step_end()
            settled(manager)
            if turn > 0:
                assert caps_of(manager.engine) == limits
            found.append(driver.step(STEP))
            settled(manager)
            limit = limits["device_limit_bytes"]
            assert limit is None or manager.stats.device_bytes_peak <= limit
        assert failures >= 2, "the test proves nothing"
        assert manager.stats.spilled > 0
        driver._live.clear()
        gc.collect()
        assert device.active_bytes() == 0
    assert_same(expected, found)
