"""What the command line asks for, complete and checked.

One invariant: an `Options` that exists can be run. Names are known, the schedule takes the microbatches, the
layers fill the stages; all of that is found out from numbers and names, before a process group or a GPU is
touched.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from offload import OffloadConfig
from parallel.launch import Ranks
from parallel.schedules import ScheduleSpec, check_counts, schedule_named
from training.arguments import read_arguments
from training.models import MIXTURE, MIXTURE_OPTIONS, Dense, Mixture, Model

__all__ = ["Options", "fraction_without_room", "read_options"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a preset is trained unless told otherwise."""

    batch: int
    """Sequences a microbatch."""
    microbatches: int
    lr: float
    warmup: int
    """Steps in which the learning rate rises to its value."""
    min_elements: int
    """Saved tensors with fewer elements stay on the device; small enough that the preset's own activations
    leave."""


RECIPES = {
    "tiny": Recipe(batch=4, microbatches=4, lr=3e-3, warmup=1, min_elements=4096),
    "moe": Recipe(batch=4, microbatches=4, lr=3e-3, warmup=1, min_elements=4096),
    "small": Recipe(batch=1, microbatches=8, lr=1e-3, warmup=10, min_elements=1 << 16),
    "medium": Recipe(batch=1, microbatches=8, lr=3e-4, warmup=50, min_elements=1 << 20),
    "large": Recipe(batch=1, microbatches=8, lr=1e-4, warmup=50, min_elements=1 << 20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One training run."""

    preset: str
    model: Model
    schedule: ScheduleSpec
    virtual_stages: int
    microbatches: int
    batch: int
    expert_parallel: int
    """Ranks that share each layer's experts, each with sequences of its own."""
    steps: int
    lr: float
    warmup: int
    dtype: torch.dtype
    device: str
    seed: int
    data: tuple[Path, ...]
    min_elements: int
    device_limit_bytes: int | None
    marks: tuple[int, int | None] | None
    """High and low mark in bytes, None for the low one to be derived; None without --offload watermark."""
    auto: bool
    """--offload auto."""
    device_total_bytes: int | None
    """Of --offload auto; None for what costs little."""
    weights: str | None
    """What `apply` is given for a rank's blocks: "host", or GB for all of its stages; None leaves them on the
    device."""
    optimizer_fraction: float | Literal["auto"] | None
    """Share of the optimizer's state that lives on the host; None is torch's own optimizer, on the device."""
    verify: bool
    compare: int
    """Runs of each arm, without offload and with it; 0 compares nothing."""
    check_end: int
    """Pairs of runs of the last step that are compared; 0 compares none."""
    plot: Path | None
    telemetry: Path | None
    timeout: float

    @property
    def offloads(self) -> bool:
        """Whether anything may leave."""
        return bool(self.model.offload_modules or self.marks or self.auto or self.weights)

    @property
    def tokens(self) -> int:
        """Tokens a step, on all ranks."""
        return self.batch * self.microbatches * self.model.sequence * self.expert_parallel

    @property
    def saved_bytes_of_layer(self) -> int:
        """About what the marks of one layer save for one microbatch."""
        return self.model.saved_bytes_of_layer(batch=self.batch, dtype=self.dtype)

    def offload_config(self, *, rank: int = 0, simulated: bool = False) -> OffloadConfig:
        """The engine's limits.

        On the simulated device no time passes, so a copy is done when something waits for it. A layer's worth
        in flight, and not the default gigabyte, makes the bytes of a small model leave all the same.
        """
        in_flight = max(1, self.saved_bytes_of_layer) if simulated else None
        return OffloadConfig(
            min_offloaded_tensor_size=self.min_elements,
            device_limit_bytes=self.device_limit_bytes,
            pp_rank=rank,
            max_spilling_bytes=in_flight,
            max_restoring_bytes=in_flight,
        )


def read_options(arguments: list[str], ranks: Ranks) -> Options:
    """Parse and check. Raises ValueError or an OSError that says what to give instead."""
    given = read_arguments(arguments)
    recipe = RECIPES[given.preset]
    model = _model(given)
    schedule = schedule_named(given.schedule)
    pipeline = _pipeline_ranks(given, ranks)
    virtual_stages = _or(given.virtual_stages, schedule.default_virtual_stages)
    enough = _enough(schedule, recipe.microbatches, pipeline * virtual_stages)
    microbatches = _or(given.microbatches, enough)
    check_counts(schedule, ranks=pipeline, virtual_stages=virtual_stages, microbatches=microbatches)
    model.check_stages(pipeline * virtual_stages)
    for name in ("verify", "plot"):
        if getattr(given, name) and not (model.offload_modules or given.offload != "groups" or given.weights):
            raise ValueError(f"--{name} needs something that is offloaded; --offload-modules is none")
    as_given = "preset steps device seed weights verify compare check_end plot telemetry timeout"
    options = Options(
        **{name: getattr(given, name) for name in as_given.split()},
        model=model,
        schedule=schedule,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        batch=_or(given.batch, recipe.batch),
        expert_parallel=_or(given.expert_parallel, 1),
        lr=_or(given.lr, recipe.lr),
        warmup=recipe.warmup,
        dtype=getattr(torch, given.dtype),
        data=tuple(given.data),
        min_elements=_or(given.min_offloaded_tensor_size, recipe.min_elements),
        device_limit_bytes=None if given.device_limit_mib is None else given.device_limit_mib * MIB,
        marks=None if given.high_gb is None else (int(given.high_gb * 1e9), _bytes(given.low_gb)),
        auto=given.offload == "auto",
        device_total_bytes=_bytes(given.device_total_gb),
        optimizer_fraction=given.optimizer_offload_fraction,
    )
    options.offload_config()  # has checks of its own
    return options


def _model(given: argparse.Namespace) -> Model:
    sizes = {name: getattr(given, name) for name in ("layers", "dim", "heads", "kv_heads", "ffn", "sequence")}
    changes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    modules = given.offload_modules if given.offload == "groups" else "none"
    if given.preset == MIXTURE:
        return Mixture.of(
            changes, given.seed, modules, {name: getattr(given, name) for name in MIXTURE_OPTIONS}
        )
    return Dense.of(given.preset, changes, given.seed, modules)


def _pipeline_ranks(given: argparse.Namespace, ranks: Ranks) -> int:
    """Of one pipeline: all of them, or a share where some have the same stages."""
    shared = _or(given.expert_parallel, 1)
    if ranks.world % shared:
        raise ValueError(
            f"--expert-parallel {shared} does not divide {ranks.world} ranks, which make pipelines of equal "
            "length; take a divisor, or start another number of ranks"
        )
    return ranks.world // shared


def fraction_without_room(*, state_bytes: int, other_bytes: int, device_bytes: int) -> float:
    """The share of the optimizer's state for which a device has no room, with a tenth of its memory kept
    free; in steps of 0.05, upwards.

    other_bytes: weights, gradients, and activations at their peak.
    """
    room = max(0.0, 0.9 * device_bytes - other_bytes)
    missing = 1 - room / state_bytes if state_bytes else 0.0
    return min(1.0, math.ceil(max(0.0, missing) * 20 - 1e-9) / 20)


def _enough(schedule: ScheduleSpec, usual: int, stages: int) -> int:
    """The recipe's microbatches, or as many as there are stages where the schedule needs them."""
    return max(usual, stages) if schedule.needs == "as many as stages" else usual


def _or(given: Any, usual: Any) -> Any:
    return usual if given is None else given


def _bytes(gb: float | None) -> int | None:
    return None if gb is None else int(gb * 1e9)
