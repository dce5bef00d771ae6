"""Random models, orders of actions and marks on simulated lanes, in managed forwards: the gradients have the
bits of a run without, and a step leaves nothing on the device and nothing lent."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload import OffloadConfig, OffloadEngine
from offload.compat.stagehand.activations import ActivationRuntime
from offload.device.sim import ExecutorName, SimDevice
from tests.property.layers import NBYTES, same_bits
from tests.property.programs import Run, Step
from tests.property.speakers import Plain
from tests.property.strategies import MODELS, steps_of

MIB = 1 << 20


@dataclass(frozen=True)
class Marks:
    """high, low: tensors. host: bytes that the host has."""

    order: str
    high: int
    low: int
    restore_ahead: bool
    piece_bytes: int
    host: int
    executor: ExecutorName
    seed: int


class Watermarked(Plain):
    """Each forward is a managed one, and each step ends by hand."""

    def __init__(self, marks: Marks) -> None:
        self.device = SimDevice(executor=marks.executor, seed=marks.seed)
        config = OffloadConfig(
            min_offloaded_tensor_size=0, piece_bytes=marks.piece_bytes, host_limit_bytes=marks.host
        )
        self.engine = OffloadEngine(config, device=self.device)
        high = marks.high * NBYTES
        fields: dict[str, Any] = {"restore_ahead": marks.restore_ahead}
        if marks.order == "reactive":
            fields = {"memory_allocated": self._reactive_reading, "slabs_per_class": (8, 0, 0, 0, 0)}
        self.runtime = ActivationRuntime(
            engine=self.engine,
            order=marks.order,
            vram_high_watermark_mb=high / MIB,
            vram_low_watermark_mb=marks.low * NBYTES / MIB,
            telemetry_enabled=False,
            min_numel=1,
            **fields,
        )
        self.high = high
        self.readings = 0
        self.open: AbstractContextManager[None] | None = None
        self.seen: Counter[str] = Counter()

    def _reactive_reading(self) -> int:
        """Up and down, so that the latch turns on and off."""
        self.readings += 1
        return (self.readings % 7) * self.high // 5

    def begin(self, stage: int, microbatch: int) -> None:
        self._close()  # a forward that was left by an exception has no end
        self.open = self.runtime.managed_forward()
        self.open.__enter__()

    def end_forward(self, stage: int, microbatch: int) -> None:
        self._close()

    def _close(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
            self.open = None

    def received(self, tensor: Tensor) -> None:
        self.engine.register_external(tensor)

    def step_end(self) -> None:
        metrics = self.runtime.step_end()
        assert metrics.activations_saved == metrics.activations_kept + metrics.activations_spilled
        assert metrics.pool_hits + metrics.pool_misses == metrics.activations_spilled
        assert metrics.activations_restored <= metrics.activations_spilled
        details = self.runtime.last_details
        self.seen.update(
            spilled=metrics.activations_spilled,
            kept=metrics.activations_kept,
            restored=metrics.activations_restored,
            forecast=details.forecast_bytes,
            latched=details.latched_bytes,
            lost=details.forwards_lost,
            misses=metrics.pool_misses,
        )
        assert self.engine.transfers.device_bytes == 0
        assert self.engine.transfers.in_flight() == (0, 0)
        pool = self.runtime.pool
        if pool is None:
            assert self.engine.arena.stats().lent == 0
        else:
            assert sum(pool.free_slabs.values()) == 8


MARKS = st.builds(
    Marks,
    order=st.sampled_from(["forecast", "forecast", "forecast", "reactive"]),
    high=st.sampled_from([1, 3, 6, 12, 1000]),
    low=st.sampled_from([1, 1]),
    restore_ahead=st.booleans(),
    piece_bytes=st.sampled_from([1, NBYTES, 3 * NBYTES, 1 << 20]),
    host=st.sampled_from([1 << 28, 1 << 28, 3 * 4096]),
    executor=st.sampled_from(["late", "random", "clock", "early"]),
    seed=st.integers(0, 1 << 16),
)


@st.composite
def programs(draw: st.DrawFn) -> tuple[Any, list[Step], Marks]:
    stages = draw(MODELS)
    steps = draw(steps_of(len(stages), max_steps=2))
    steps = steps * draw(st.integers(1, 2))  # what a step was seen to do is of use to the next like it
    return stages, steps, draw(MARKS)


def play(program: tuple[Any, list[Step], Marks]) -> Counter[str]:
    """Run a program without the runtime and with it, and compare every bit after each step."""
    stages, steps, marks = program
    plain, said = Run(stages, Plain()), Watermarked(marks)
    run = Run(stages, said)
    for step in steps:
        plain.step(step)
        run.step(step)
        assert len(plain.results) == len(run.results)
        assert all(same_bits(*pair) for pair in zip(plain.results, run.results, strict=True))
        plain.results.clear()
        run.results.clear()
    del run
    said.runtime.close()
    assert said.engine.arena.held_bytes == 0
    return said.seen


CHECKS = list(HealthCheck)  # large examples are the point


def test_any_program_has_the_gradients_of_a_run_without_and_leaves_nothing() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=20, derandomize=True, suppress_health_check=CHECKS)
    @given(programs())
    def explore(program: tuple[Any, list[Step], Marks]) -> None:
        seen.update(play(program))

    explore()
    happened = ("spilled", "kept", "restored", "forecast", "latched", "lost", "misses")
    assert [name for name in happened if not seen[name]] == [], "the programs were all of one kind"


@pytest.mark.slow
@settings(max_examples=3000, suppress_health_check=CHECKS)
@given(programs())
def test_thousands_of_programs(program: tuple[Any, list[Step], Marks]) -> None:
    play(program)
