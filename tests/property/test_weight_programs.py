"""Whatever a model, a mode and a loop are, weights that stream change no bit of a gradient, a weight, a
buffer or a random number, under any executor of the simulated device; and `remove` leaves nothing behind."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload
from tests.inside import exactly, streaming_of
from tests.property.apply_programs import Program, Run, programs
from tests.property.test_apply_programs import bits, change_plan
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import dequantized

pytestmark = pytest.mark.usefixtures("small_streams", "one_thread")

CHECKS = list(HealthCheck)


def compare(program: Program, weights: str, **options: Any) -> None:
    """options: of apply. With `quantize` a weight of each block, at least, is frozen, and plain torch has
    what frozen ones are expanded to."""
    plain, ours = Run(program), Run(program)
    if "quantize" in options:
        for mine, its in zip(ours.model.layers, plain.model.layers, strict=True):
            mine.up.weight.requires_grad_(False)
            its.up.weight.requires_grad_(False)
            for weight in (its.up.weight, its.down.weight):
                if not weight.requires_grad:
                    weight.data = dequantized(weight)
    plain.play()
    built = build_manager(program.executor, seed=program.seed, device_limit_bytes=program.limit)
    with installed(built) as manager:
        total: dict[str, Any] = {}
        if program.mode == "auto" and program.limit:  # with room for weights and gradients
            total = {"device_total": exactly(program.limit + (1 << 14))}
        if program.mode is False:
            handle = offload.apply(ours.model, weights=weights, **options)
        else:
            handle = offload.apply(
                ours.model, program.mode, min_numel=program.min_numel, weights=weights, **total, **options
            )
        ours.before_step = partial(change_plan, handle, program.seed)
        ours.play()
        figures = handle.weights
        assert figures.hits + figures.misses > 0 or figures.steps == 0
        stream = streaming_of(handle)
        assert not any(block.entered for block in stream.blocks)
        handle.remove()
        ours.before_step = int
        assert all(type(parameter) is torch.nn.Parameter for parameter in ours.model.parameters())
        assert len(ours.seen) == len(plain.seen)
        for number, (mine, its) in enumerate(zip(ours.seen, plain.seen, strict=True)):
            assert bits(mine) == bits(its), number
        for (name, mine), its in zip(
            ours.model.state_dict().items(), plain.model.state_dict().values(), strict=True
        ):
            assert bits(mine) == bits(its), name
        engine = manager.engine
        del stream, figures, handle, ours
        gc.collect()
        assert engine.hooks.streamed == {}


@settings(max_examples=25, suppress_health_check=CHECKS)
@given(programs(), st.sampled_from(["host", "host", "3.6kB", "4.7kB"]), st.booleans())
def test_random_programs_have_the_bits_of_plain_torch(program: Program, weights: str, alone: bool) -> None:
    compare(replace(program, mode=False) if alone else program, weights)


@pytest.mark.req("Q-3")
@settings(max_examples=16, suppress_health_check=CHECKS)
@given(programs(), st.sampled_from(["host", "host", "3.6kB", "4.7kB"]), st.booleans())
def test_random_programs_have_the_bits_of_the_expanded_weights(
    program: Program, weights: str, alone: bool
) -> None:
    compare(replace(program, mode=False) if alone else program, weights, quantize="int8")
