"""The states of StageHand's blocks: whatever is asked in whatever order, only legal moves happen, an illegal
one is an error that changes nothing, and no block in use leaves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload.compat.stagehand import BlockRegistry, BlockState, ResidencyMap
from offload.errors import InvalidStateTransitionError
from tests.inside import streams_from

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


def new_map() -> ResidencyMap:
    registry = BlockRegistry()
    with streams_from(16):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        registry.build_from_model(model, [*model], torch.device("cpu"))
    return ResidencyMap(registry)


actions = st.tuples(st.sampled_from(NAMES), st.sampled_from([*BlockState, "use", "release", "step"]))


@pytest.mark.req("W-2")
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
