"""Whatever a model, a mode and a loop are, `offload.apply` changes no bit of a gradient, a weight, a buffer
or a random number, and leaves nothing behind."""

from __future__ import annotations

from collections import Counter
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings

import offload
from offload.planner.profile import MOST_LEVELS
from tests.inside import exactly
from tests.property.apply_programs import MODES, Program, Run, programs
from tests.unit.groups.stack import build_manager, installed

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKS = list(HealthCheck)  # large examples are the point


def bits(tensor: torch.Tensor | None) -> bytes | None:
    return None if tensor is None else tensor.contiguous().numpy().tobytes()


class AnyLevels(dict[Any, tuple[int, ...]]):
    """A plan of mode "auto" whose every forward runs each block at a level drawn anew."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def __contains__(self, chunk: object) -> bool:
        return True

    def __getitem__(self, chunk: Any) -> tuple[int, ...]:
        return tuple(self._random.randrange(MOST_LEVELS) for _ in range(4))


def change_plan(handle: offload.Applied, seed: int) -> None:
    """From here on, as soon as there could be a plan."""
    auto = handle._auto
    if auto is not None and auto.calls.profiles and auto.memory.is_known:
        auto.calls.levels = AnyLevels(seed)


def compare(program: Program) -> Counter[str]:
    """Run it twice. Returns what happened."""
    plain = Run(program)
    plain.play()
    ours = Run(program)
    built = build_manager(program.executor, seed=program.seed, device_limit_bytes=program.limit)
    with installed(built) as manager:
        before = manager.engine.config
        limit = 1 if program.limit == 0 else program.limit
        total = {"device_total": exactly(limit)} if program.mode == "auto" else {}
        handle = offload.apply(ours.model, program.mode, min_numel=program.min_numel, **total)
        ours.before_step = partial(change_plan, handle, program.seed)
        ours.play()
        figures = handle.report().total
        handle.remove()
        ours.before_step = int
        assert program.mode == "disk" or manager.engine.config == before
        assert len(ours.seen) == len(plain.seen)
        for number, (mine, its) in enumerate(zip(ours.seen, plain.seen, strict=True)):
            assert bits(mine) == bits(its), number
        del ours, handle
        for _ in range(2):  # the first one of all ends nothing that an inferred end has ended
            offload.step_end()
        transfers = manager.engine.transfers
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert (transfers.device_bytes, transfers.in_flight()) == (0, (0, 0))
        if program.mode != "disk":  # whose threads end what they have begun, in their time
            assert manager.engine.arena.lent_bytes == 0
    assert figures.saved_bytes == figures.moved_bytes + figures.kept_bytes
    happened = Counter[str]()
    if figures.moved_bytes:
        happened[f"moved by {program.mode}"] += 1
        happened[f"moved beside checkpoints of {program.checkpoints}"] += 1
    return happened


def test_any_program_has_the_bits_of_a_run_without_and_leaves_nothing() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=50, derandomize=True, suppress_health_check=CHECKS)
    @given(programs())
    def explore(program: Program) -> None:
        seen.update(compare(program))

    explore()
    wanted = [f"moved by {mode}" for mode in MODES]
    wanted += [f"moved beside checkpoints of {where}" for where in ("none", "blocks", "blocks, reentrant")]
    assert [name for name in wanted if not seen[name]] == [], "the programs were all of one kind"


@pytest.mark.slow
@settings(max_examples=5000, suppress_health_check=CHECKS)
@given(programs())
def test_thousands_of_programs(program: Program) -> None:
    compare(program)
