"""StageHand's weight runtime: random programs have the bits of plain torch. Of its states: whatever is asked
in whatever order, only legal moves happen, an illegal one is an error that changes nothing, and no block in
use leaves."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from offload.compat.stagehand import BlockRegistry, BlockState, ResidencyMap, StagehandRuntime
from offload.errors import InvalidStateTransitionError
from tests.inside import streams_from
from tests.property.apply_programs import Program, Run, programs
from tests.property.test_apply_programs import bits
from tests.unit.groups.stack import build_manager, installed

LEGAL = {
    ("unloaded", "host_staged"),
    ("host_staged", "prefetching"),
    ("prefetching", "gpu_ready"),
    ("gpu_ready", "evicting"),
    ("gpu_ready", "gpu_freeing"),
    ("evicting", "host_staged"),
    ("evicting", "unloaded"),
    ("gpu_freeing", "unloaded"),
}
NAMES = ["0", "1"]
LIFE = [BlockState(to) for to in ("host_staged", "prefetching", "gpu_ready", "evicting")]


def new_map() -> ResidencyMap:
    registry = BlockRegistry()
    with streams_from(16):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        registry.build_from_model(model, [*model], torch.device("cpu"))
    return ResidencyMap(registry)


actions = st.tuples(st.sampled_from(NAMES), st.sampled_from([*BlockState, "use", "release", "step"]))


def from_each_state_to_each(test: Any) -> Any:
    """Beside what is drawn."""
    ways = [*(LIFE[:length] for length in range(len(LIFE) + 1)), [*LIFE[:3], BlockState.GPU_FREEING]]
    for way in ways:
        for to in BlockState:
            test = example([("0", state) for state in (*way, to)])(test)
    return test


@pytest.mark.req("W-2")
@from_each_state_to_each
@given(st.lists(actions, max_size=60))
def test_only_legal_moves_happen_and_what_is_used_does_not_leave(
    asked: list[tuple[str, BlockState | str]],
) -> None:
    found = new_map()
    model = {name: ["unloaded", 0] for name in NAMES}
    path = iter(["host_staged", "prefetching", "gpu_ready", "gpu_freeing", "unloaded"] * 60)
    for name, action in asked:
        state, users = model[name]
        if action == "step":  # the next of a valid life, where it is one: random moves alone come nowhere
            action = BlockState(next((to for to in path if (state, to) in LEGAL), "unloaded"))
        if isinstance(action, BlockState):
            legal = (state, action.value) in LEGAL and not (
                users and action.value in ("evicting", "gpu_freeing")
            )
            after = [action.value, users]
        elif action == "use":
            legal, after = state == "gpu_ready", [state, users + 1]
        else:
            legal, after = users > 0, [state, users - 1]
        said = ""
        try:
            if isinstance(action, BlockState):
                found.transition(name, action)
            elif action == "use":
                found.increment_refcount(name)
            else:
                found.decrement_refcount(name)
            model[name] = after
        except InvalidStateTransitionError as error:
            said = str(error)
        assert legal == (said == ""), (name, action, model)
        assert legal or f"block {name} is {state}, used {users} times" in said
        for each, (state, users) in model.items():
            entry = found.entries[each]
            assert [entry.state.value, entry.refcount] == [state, users]
            able = state in ("gpu_ready", "prefetching") and not users
            assert (each in found.eviction_candidates(0, 0)) == able


marks = st.sampled_from([(0.002, 0.001), (0.004, 0.003), (0.006, 0.002), (0.02, 0.01), (1, 1)])


@settings(max_examples=12, suppress_health_check=[*HealthCheck])
@given(programs(), marks, st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_random_programs_have_the_bits_of_plain_torch(
    program: Program, marks: tuple[float, float], window: int, in_flight: int, announced: bool
) -> None:
    plain = Run(program)
    plain.play()
    ours = Run(program)
    with streams_from(64), installed(build_manager(program.executor, seed=program.seed)) as manager:
        runtime = StagehandRuntime(
            ours.model,
            engine=manager.engine,
            vram_high_watermark_mb=marks[0],
            vram_low_watermark_mb=marks[1],
            prefetch_window_blocks=window,
            max_inflight_transfers=in_flight,
            strict_bf16=False,
            fail_on_dtype_promotion=False,
            telemetry_enabled=False,
        )
        if announced:
            ours.before_step = runtime.begin_step
        ours.play()
        states = runtime.states()
        for block in runtime.stream.blocks:
            assert not block.entered
            assert runtime.residency.entries[block.name].refcount == 0
            assert block.present == (states[block.name] in (BlockState.GPU_READY, BlockState.PREFETCHING))
        runtime.shutdown_keep_pool()
        assert [*map(bits, ours.seen)] == [*map(bits, plain.seen)]
        state = plain.model.state_dict()
        assert all(bits(mine) == bits(state[name]) for name, mine in ours.model.state_dict().items())
        del runtime, block
        gc.collect()
        assert manager.engine.hooks.streamed == {}
