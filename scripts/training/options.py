"""What the command line asks for, complete and checked.

One invariant: an `Options` that exists can be run. Files are there, names are known, the schedule takes the
microbatches, the layers fill the stages; all of that is found out from numbers and names, before a process
group or a GPU is touched.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from offload import OffloadConfig
from parallel.launch import Ranks
from parallel.schedules import SCHEDULES, ScheduleSpec, check_counts, schedule_named
from parallel.transformer import (
    GROUP_NAMES,
    PRESETS,
    TransformerConfig,
    group_names,
    layers_of_stage,
    saved_bytes_of_layer,
)

__all__ = ["Options", "fraction_without_room", "read_options"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MB = 1 << 20


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
    "small": Recipe(batch=1, microbatches=8, lr=1e-3, warmup=10, min_elements=1 << 16),
    "medium": Recipe(batch=1, microbatches=8, lr=3e-4, warmup=50, min_elements=1 << 20),
    "large": Recipe(batch=1, microbatches=8, lr=1e-4, warmup=50, min_elements=1 << 20),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One training run."""

    preset: str
    model: TransformerConfig
    schedule: ScheduleSpec
    virtual_stages: int
    microbatches: int
    batch: int
    steps: int
    lr: float
    warmup: int
    dtype: torch.dtype
    device: str
    seed: int
    data: tuple[Path, ...]
    min_elements: int
    fraction: float
    device_limit_bytes: int | None
    optimizer_fraction: float | Literal["auto"] | None
    """Share of the optimizer's state that lives on the host; None is torch's own optimizer, on the device."""
    verify: bool
    compare: bool
    telemetry: Path | None
    eval_every: int
    timeout: float

    @property
    def offloads(self) -> bool:
        """Whether any mark is set."""
        return bool(self.model.offload_modules)

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.batch * self.microbatches * self.model.sequence

    @property
    def saved_bytes_of_layer(self) -> int:
        """About what the marks of one layer save for one microbatch."""
        return saved_bytes_of_layer(
            self.model, batch=self.batch, sequence=self.model.sequence, dtype=self.dtype
        )

    def offload_config(self, *, rank: int = 0, simulated: bool = False) -> OffloadConfig:
        """The engine's limits.

        On the simulated device no time passes, so a copy is done when something waits for it. A layer's worth
        in flight, and not the default gigabyte, makes the bytes of a small model leave all the same.
        """
        in_flight = max(1, self.saved_bytes_of_layer) if simulated else None
        return OffloadConfig(
            min_offloaded_tensor_size=self.min_elements,
            activation_offload_fraction=self.fraction,
            device_limit_bytes=self.device_limit_bytes,
            pp_rank=rank,
            max_spilling_bytes=in_flight,
            max_restoring_bytes=in_flight,
        )


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage, so that several ranks say one line together."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (--help lists the options)")


def read_options(arguments: list[str], ranks: Ranks) -> Options:
    """Parse and check. Raises ValueError or an OSError that says what to give instead."""
    given = _parser().parse_args(arguments)
    recipe = RECIPES[given.preset]
    model = _model(given)
    schedule = schedule_named(given.schedule)
    virtual_stages = (
        given.virtual_stages if given.virtual_stages is not None else schedule.default_virtual_stages
    )
    microbatches = (
        given.microbatches
        if given.microbatches is not None
        else _enough(schedule, recipe.microbatches, ranks.world * virtual_stages)
    )
    check_counts(schedule, ranks=ranks.world, virtual_stages=virtual_stages, microbatches=microbatches)
    layers_of_stage(model, 0, ranks.world * virtual_stages)
    _check(given, model)
    options = Options(
        preset=given.preset,
        model=model,
        schedule=schedule,
        virtual_stages=virtual_stages,
        microbatches=microbatches,
        batch=_or(given.batch, recipe.batch),
        steps=given.steps,
        lr=_or(given.lr, recipe.lr),
        warmup=recipe.warmup,
        dtype=DTYPES[given.dtype],
        device=given.device,
        seed=given.seed,
        data=tuple(given.data),
        min_elements=_or(given.min_offloaded_tensor_size, recipe.min_elements),
        fraction=given.offload_fraction,
        device_limit_bytes=None if given.device_limit_mb is None else given.device_limit_mb * MB,
        optimizer_fraction=given.optimizer_offload_fraction,
        verify=given.verify,
        compare=given.compare,
        telemetry=given.telemetry,
        eval_every=given.eval_every,
        timeout=given.timeout,
    )
    options.offload_config()  # has checks of its own
    return options


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="train.py",
        description=(
            "Train a small GPT on text, byte by byte, over pipeline ranks; its saved "
            "activations travel to host memory and back."
        ),
        epilog=(
            "Start several ranks with torchrun: torchrun --nproc-per-node 2 scripts/train.py "
            "--preset tiny --steps 20"
        ),
    )
    model = parser.add_argument_group("model")
    model.add_argument(
        "--preset", choices=sorted(RECIPES), default="tiny", help="sizes below, unless given (default: tiny)"
    )
    for name, meaning in (
        ("layers", "transformer layers"),
        ("dim", "width of the residual stream"),
        ("heads", "query heads"),
        ("kv-heads", "key and value heads"),
        ("ffn", "width inside the MLP"),
        ("sequence", "tokens of a sequence"),
    ):
        model.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    model.add_argument(
        "--dtype",
        choices=sorted(DTYPES),
        default="float32",
        help="of parameters and activations (default: float32)",
    )

    training = parser.add_argument_group("training")
    training.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="text to learn (default: Python's own standard library)",
    )
    training.add_argument("--steps", type=int, default=20, metavar="N", help="default: 20")
    training.add_argument("--batch", type=int, metavar="N", help="sequences a microbatch")
    training.add_argument("--microbatches", type=int, metavar="N", help="microbatches a step")
    training.add_argument("--lr", type=float, help="learning rate of AdamW")
    training.add_argument("--seed", type=int, default=0, help="of parameters and batches (default: 0)")
    training.add_argument(
        "--eval-every",
        type=int,
        default=0,
        metavar="N",
        help="loss on held-out text every N steps (default: never)",
    )

    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument(
        "--schedule", default="1f1b", metavar="NAME", help=f"one of {', '.join(SCHEDULES)} (default: 1f1b)"
    )
    pipeline.add_argument(
        "--virtual-stages",
        type=int,
        metavar="N",
        help="stages a rank (default: 1, or 2 where the schedule interleaves)",
    )
    pipeline.add_argument(
        "--device",
        choices=["auto", "cuda", "cpu"],
        default="auto",
        help="auto takes GPUs where there are any",
    )
    pipeline.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds to wait for another rank (default: 300)",
    )

    offload = parser.add_argument_group("offload")
    offload.add_argument(
        "--offload-modules",
        default="all",
        metavar="A,B",
        help=f"all, none, or some of {', '.join(GROUP_NAMES)} (default: all)",
    )
    offload.add_argument(
        "--min-offloaded-tensor-size", type=int, metavar="N", help="elements; smaller saved tensors stay"
    )
    offload.add_argument(
        "--offload-fraction",
        type=float,
        default=1.0,
        metavar="F",
        help="share of the groups that leaves, 0 to 1 (default: 1)",
    )
    offload.add_argument(
        "--device-limit-mb", type=int, metavar="MB", help="saved activations on the device at once, at most"
    )

    offload.add_argument(
        "--optimizer-offload-fraction",
        type=_fraction_or_auto,
        metavar="F",
        help=(
            "share of the optimizer's state on the host, 0 to 1; auto: what finds no room on "
            "the device (default: all stays)"
        ),
    )

    proof = parser.add_argument_group("proof")
    proof.add_argument(
        "--verify",
        action="store_true",
        help="compare every step's gradients with those without offload, bit for bit",
    )
    proof.add_argument(
        "--compare",
        action="store_true",
        help="run the same steps without offload first, and show time and memory side by side",
    )
    proof.add_argument("--telemetry", type=Path, metavar="FILE", help="write one line of JSON a step")
    return parser


def _model(given: argparse.Namespace) -> TransformerConfig:
    sizes = {name: getattr(given, name) for name in ("layers", "dim", "heads", "kv_heads", "ffn", "sequence")}
    changes: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None}
    return PRESETS[given.preset].with_(
        **changes, seed=given.seed, offload_modules=group_names(given.offload_modules)
    )


def _fraction_or_auto(text: str) -> float | str:
    if text == "auto":
        return text
    try:
        fraction = float(text)
    except ValueError:
        fraction = -1.0
    if not 0 <= fraction <= 1:
        raise argparse.ArgumentTypeError(f"{text} must be a number from 0 to 1, or auto")
    return fraction


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


def _check(given: argparse.Namespace, model: TransformerConfig) -> None:
    for name, least in (
        ("steps", 1),
        ("batch", 1),
        ("eval_every", 0),
        ("device_limit_mb", 1),
        ("timeout", 1),
    ):
        value = getattr(given, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if given.lr is not None and not 0 < given.lr < 10:
        raise ValueError(f"--lr is {given.lr}; it must be above 0, and usually is below 0.01")
    for path in given.data:
        if not path.is_file():
            raise FileNotFoundError(
                f"--data {path}: there is no such file; give the path of a text file, or leave --data out"
            )
    if given.telemetry is not None and not given.telemetry.absolute().parent.is_dir():
        raise FileNotFoundError(
            f"--telemetry {given.telemetry}: there is no folder {given.telemetry.absolute().parent}; make it "
            "first"
        )
    if given.verify and given.compare:
        raise ValueError(
            "--verify runs every step twice, so --compare would have nothing to time; run them one after the "
            "other"
        )
    if (given.verify or given.compare) and not model.offload_modules:
        raise ValueError(
            f"--{'verify' if given.verify else 'compare'} needs something that is offloaded; "
            "--offload-modules is none"
        )
