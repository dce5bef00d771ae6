"""Random training programs: whatever a user does between, around and inside of steps, in whatever split and
under whatever executor, the bits are torch's.

One invariant: a program is run twice, and only the optimizer differs. In `overlap="step"` and `"forward"`
every bit that was seen is equal. In `"backward"` it is, or there is an error, wherever a break of the promise
can be seen.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from offload import OffloadEngine
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import OffloadError
from tests.optim_pair import EXECUTORS, Overlap, hybrid, torchs
from tests.property.optim_actions import Kind, of_kind, play
from tests.property.optim_world import Mastered, World

MANY = int(os.environ.get("OPTIM_PROGRAMS", "0"))
"""Programs of each test: thousands for a night; 0 is few, and the same ones every time."""

RECIPES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "AdamW": (AdamW, {}),
    "amsgrad": (AdamW, {"amsgrad": True, "weight_decay": 0.1}),
    "Adam": (Adam, {"weight_decay": 0.1, "eps": 1e-3}),
    "momentum": (SGD, {"momentum": 0.9, "nesterov": True}),
}
PLACES = {
    "streamed": (1.0, 0.0),
    "streamed, of which some stays": (1.0, 0.0),
    "stepped by the CPU": (1.0, 1.0),
    "mixed": (0.7, 0.5),
}

Program = list[tuple[str, int]]


@dataclass(frozen=True)
class Setup:
    """How both optimizers are made, and what only the hybrid one has."""

    recipe: str = "AdamW"
    place: str = "streamed"
    dtype: torch.dtype = torch.float32
    masters: bool = False
    optimizers: str = "one"
    executor: ExecutorName = "late"
    seed: int = 0
    bucket_bytes: int = 1024
    inline: bool = False

    def torchs(self, _: nn.Module, parameters: Any) -> Optimizer:
        cls, options = RECIPES[self.recipe]
        if self.masters:
            return Mastered(parameters, cls, lr=1e-2, fused=True, **options)
        optimizer = torchs(parameters, cls, **options)
        # a momentum that nobody wrote, if a scaler skips the first step of torch's fused SGD: its other way
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return optimizer

    def hybrid(self, overlap: Overlap, engine: OffloadEngine, made: weakref.WeakSet[Any]) -> Any:
        cls, options = RECIPES[self.recipe]
        fraction, share = PLACES[self.place]
        share = 1.0 if cls is SGD else share

        def make(model: nn.Module, parameters: Any) -> Optimizer:
            optimizer = hybrid(
                parameters,
                cls,
                overlap=overlap,
                fraction=fraction,
                model=model,
                cpu_share=share,
                engine=engine,
                bucket_bytes=self.bucket_bytes,
                param_update_in_fp32=self.masters,
                overlap_cpu_optimizer_d2h_h2d=not self.inline,
                **options,
            )
            if "stays" in self.place:
                optimizer.keep_on_device(8 << 10)
            made.add(optimizer)
            return optimizer

        return make


def setups(*, inline: bool = False, sharing: bool = True) -> st.SearchStrategy[Setup]:
    return st.builds(
        Setup,
        recipe=st.sampled_from(list(RECIPES)),
        place=st.sampled_from(list(PLACES)),
        dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
        masters=st.booleans(),
        optimizers=st.sampled_from(["one", "one", "groups", "disjoint", *(["sharing"] if sharing else [])]),
        executor=st.sampled_from(EXECUTORS),
        seed=st.integers(0, 1000),
        bucket_bytes=st.sampled_from([1024, 4096, 1 << 20]),
        inline=st.booleans() if inline else st.just(False),
    ).map(lambda setup: replace(setup, masters=setup.masters and setup.dtype is torch.bfloat16))


def programs(*kinds: Kind) -> st.SearchStrategy[Program]:
    common = ["train", "train", "step_and_zero", "step_and_zero", "step_all", "zero"]
    names = st.one_of(st.sampled_from(common), st.sampled_from(of_kind(*kinds)))
    return st.lists(st.tuples(names, st.integers(0, 20)), min_size=3, max_size=24)


def in_a_row(rounds: list[tuple[Program, tuple[str, int]]]) -> Program:
    return [act for before, backward in rounds for act in (*before, backward, ("step_and_zero", 0))]


ROUNDS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(of_kind("between")), st.integers(0, 20)), max_size=4),
        st.tuples(st.sampled_from(of_kind("backward")), st.integers(0, 20)),
    ),
    min_size=2,
    max_size=8,
).map(in_a_row)
"""Programs that keep the promise of "backward": only step() comes between the backward and zero_grad()."""


def compare(program: Program, setup: Setup, overlap: Overlap) -> None:
    """Raises AssertionError at the first bit that differs, and what the hybrid optimizer raised."""
    if setup.place == "mixed" and not setup.masters:  # torch steps the resident ones: see optim_pair.py
        layouts = ("channels_last", "gradients_of_another_layout", "expanded_gradients")
        program = [act for act in program if act[0] not in layouts]
    try:
        expected = play(program, World(setup.torchs, setup.dtype, setup.optimizers))
    except (RuntimeError, ValueError, KeyError, AssertionError, TypeError):
        assume(False)  # no program: torch refuses it
    engine = OffloadEngine(device=SimDevice(executor=setup.executor, seed=setup.seed))
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    try:
        world = World(setup.hybrid(overlap, engine, made), setup.dtype, setup.optimizers)
        found = play(program, world)
    finally:
        for optimizer in list(made):
            optimizer.close()
    for (name, mine), (other_name, theirs) in zip(found, expected, strict=False):
        assert name == other_name, f"{name} for {other_name}"
        assert mine.shape == theirs.shape, f"{name}: shape {mine.shape} for {theirs.shape}"
        assert mine.dtype == theirs.dtype, f"{name}: {mine.dtype} for {theirs.dtype}"
        if mine.is_floating_point():  # of a step that has diverged: which bits a NaN has, no kernel promises
            mine, theirs = (each.masked_fill(mine.isnan() & theirs.isnan(), 0) for each in (mine, theirs))
        same = torch.equal(mine.reshape(-1).view(torch.uint8), theirs.reshape(-1).view(torch.uint8))
        assert same, f"{name}: differs by {(mine.double() - theirs.double()).abs().max():.3g}"
    assert len(found) == len(expected)
    assert engine.arena.stats().lent_bytes == 0


COMMON: dict[str, Any] = {
    "max_examples": MANY or 40,
    "derandomize": not MANY,
    "database": None,
    "phases": [Phase.generate, *([Phase.shrink] if MANY else [])],
    "report_multiple_bugs": False,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
}
ANYTHING: tuple[Kind, ...] = ("backward", "again", "gradients", "hidden", "step", "zero", "between")


@pytest.mark.req("S3-32")
@settings(**COMMON)
@given(program=programs(*ANYTHING, "view"), setup=setups(inline=True))
def test_any_program_has_torchs_bits(program: Program, setup: Setup) -> None:
    compare(program, setup, "step")


@settings(**COMMON)
@given(program=programs(*ANYTHING), setup=setups())
def test_any_program_has_torchs_bits_while_weights_return_beside_the_next_forward(
    program: Program, setup: Setup
) -> None:
    compare(program, setup, "forward")


@settings(**COMMON)
@given(program=ROUNDS, setup=setups(sharing=False))
def test_a_program_that_keeps_its_promise_has_torchs_bits_while_gradients_leave_beside_the_backward(
    program: Program, setup: Setup
) -> None:
    compare(program, setup, "backward")


@settings(**COMMON)
@given(program=programs("backward", "again", "gradients", "step", "zero"), setup=setups(sharing=False))
def test_a_program_that_may_break_its_promise_has_torchs_bits_or_an_error(
    program: Program, setup: Setup
) -> None:
    try:
        compare(program, setup, "backward")
    except OffloadError:
        return


# -- what random programs found ------------------------------------------------------------------------------
ROUND: Program = [("train", 0), ("step_and_zero", 0)]
MASTERS: dict[str, Any] = {"dtype": torch.bfloat16, "masters": True, "bucket_bytes": 1 << 20}
FOUND: dict[str, tuple[Overlap, Setup, Program]] = {
    "a resident master lies as its weight did when the optimizer was built": (
        "step",
        Setup(place="mixed", **MASTERS),
        [("channels_last", 1), *ROUND],
    ),
    "a resident master takes a gradient that lies otherwise": (
        "step",
        Setup(place="mixed", **MASTERS),
        [("train", 0), ("gradients_of_another_layout", 0), ("step_and_zero", 0)],
    ),
    "gradients are views of a buffer, which is written after step()": (
        "forward",
        Setup(executor="random", bucket_bytes=1 << 20),
        [("train", 0), ("gradients_in_one_buffer", 0), ("step_all", 1), ("write_the_buffer", 0)],
    ),
    "two parameters of one memory are stepped one after the other": (
        "step",
        Setup(bucket_bytes=1 << 20),
        [("tie_by_data", 0), *ROUND],
    ),
    "an optimizer was dropped, and its hooks outlive it": (
        "backward",
        Setup(bucket_bytes=1 << 20),
        [*ROUND, ("another_optimizer", 0), *ROUND],
    ),
    "a momentum lies as its weight did when it was made": (
        "step",
        Setup(recipe="momentum", bucket_bytes=1 << 20),
        [*ROUND, ("channels_last", 1), *ROUND],
    ),
    "a parameter of no elements has a gradient, and a master": (
        "step",
        Setup(**MASTERS),
        [("train_with_penalty", 0), ("step_and_zero", 0)],
    ),
    "a parameter was taken out of its group, and has a gradient": (
        "backward",
        Setup(),
        [("take_out_of_a_group", 0), *ROUND, *ROUND],
    ),
    "a parameter was taken out of the second of two groups": (
        "backward",
        Setup(optimizers="groups", place="mixed"),
        [("take_out_of_a_group", 2), *ROUND, *ROUND],
    ),
}


@pytest.mark.parametrize("story", list(FOUND))
def test_a_program_that_was_wrong_once_has_torchs_bits(story: str) -> None:
    overlap, setup, program = FOUND[story]
    compare(program, setup, overlap)


@pytest.mark.parametrize("inline", [False, True])
def test_two_parameters_of_one_memory_are_refused_where_the_cpu_steps_them(inline: bool) -> None:
    setup = Setup(place="stepped by the CPU", bucket_bytes=1 << 20, inline=inline)
    with pytest.raises(OffloadError, match=r"pair.0.*and.*pair.1.* share memory"):
        compare([*ROUND, ("tie_by_data", 0), *ROUND], setup, "step")


@pytest.mark.parametrize("inline", [False, True])
def test_parameters_inside_of_another_ones_memory_are_refused_where_the_cpu_steps_them(inline: bool) -> None:
    """Only neighbours by address were compared: what lies behind a parameter inside of a larger one was not
    seen."""
    memory = torch.arange(64.0)
    whole, frozen, inner = (nn.Parameter(each) for each in (memory[:48], memory[4:8], memory[16:24]))
    other = nn.Parameter(memory[48:])
    frozen.requires_grad_(False)
    setup = Setup(place="stepped by the CPU", inline=inline)
    make = setup.hybrid("step", OffloadEngine(device=SimDevice()), weakref.WeakSet())
    optimizer = make(nn.Module(), [whole, frozen, inner, other])
    for parameter in (whole, inner, other):
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(OffloadError, match=r"parameter 0 .*and parameter 2 .* share memory"):
        optimizer.step()
    inner.requires_grad_(False)
    inner.grad = None
    optimizer.step()
    optimizer.close()
