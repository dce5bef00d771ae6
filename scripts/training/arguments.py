"""The command line of scripts/train.py: what can be given, and the values that are refused by themselves.

One invariant: arguments that were read destroy no file and are numbers that the run can use. Paths are
looked at here, before a process group or a GPU is touched.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import moe
from bench.options import RaisingParser, add_options
from offload.telemetry.drawing import require_matplotlib
from parallel.schedules import SCHEDULES
from parallel.transformer import GROUP_NAMES
from training.models import MIXTURE, MIXTURE_OPTIONS, PRESETS

__all__ = ["DTYPES", "read_arguments"]

DTYPES = ("bfloat16", "float32")
TELEMETRY_BEGINS = b'{"step": '
"""How a file of --telemetry begins; the only files that are written over."""
PICTURE_BEGINS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
"""The same of --plot, by the suffixes that it takes."""

MOST = 2**31 - 1
RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("layers", "dim", "heads", "kv_heads", "ffn", "sequence"), (1, MOST)),
    **dict.fromkeys(("steps", "batch", "microbatches", "virtual_stages"), (1, MOST)),
    **dict.fromkeys(("experts", "top_k", "expert_parallel"), (1, MOST)),
    "check_end": (0, MOST),
    "seed": (0, 2**32 - 1),  # a batch is drawn from (seed << 32) + step, which torch takes as 64 bits
    "device_limit_mib": (1, MOST),
    "min_offloaded_tensor_size": (0, 2**63 - 1),
    "timeout": (1, 1e6),  # seconds; torch counts nanoseconds in 64 bits
}


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse, and refuse what cannot be used. Raises ValueError or an OSError that names the remedy."""
    given = _parser().parse_args(arguments)
    for name, (least, most) in RANGES.items():
        value = getattr(given, name)
        if value is not None and not least <= value <= most:  # so that nan is refused too
            raise ValueError(
                f"--{name.replace('_', '-')} is {value}; it must be at least {least:,} and at most {most:,}"
            )
    _check_marks(given)
    if given.experts_mode is not None and given.offload != "groups":
        raise ValueError(f"--experts-mode {given.experts_mode} goes with --offload groups")
    if given.preset != MIXTURE:
        for name in MIXTURE_OPTIONS:
            if getattr(given, name) is not None:
                option = name.replace("_", "-")
                raise ValueError(f"--{option} is of a mixture; give --preset {MIXTURE}, or leave it out")
    if given.lr is not None and not 0 < given.lr < 10:
        raise ValueError(f"--lr is {given.lr}; it must be above 0, and usually is below 0.01")
    if not given.offload_modules.replace(",", " ").strip():
        raise ValueError(
            f"--offload-modules {given.offload_modules!r} names no mark; give all, none, or some of "
            f"{', '.join(moe.GROUP_NAMES if given.preset == MIXTURE else GROUP_NAMES)}"
        )
    if given.weights is not None:
        others = {
            "--compare": given.compare,
            "--check-end": given.check_end,
            "--optimizer-offload-fraction": given.optimizer_offload_fraction is not None,
            f"--offload {given.offload}": given.offload != "groups",
        }
        if beside := [option for option, is_given in others.items() if is_given]:
            raise ValueError(
                f"--weights does not go with {' or '.join(beside)}: weights begin to stream anew in each "
                "arm; time a run with it and one without"
            )
    if given.compare == 1:
        raise ValueError("--compare 1 would show no spread; give at least 2 runs of each arm")
    if given.verify and given.compare:
        raise ValueError(
            "--verify runs every step twice, so --compare would have nothing to time; run them one after the "
            "other"
        )
    for path in given.data:
        _check_readable(path)
    if given.telemetry is not None:
        _check_writable("--telemetry", given.telemetry, given.data, TELEMETRY_BEGINS, "telemetry")
    if given.plot is not None:
        _check_plot(given.plot, given.data)
    return given


def _check_marks(given: argparse.Namespace) -> None:
    total = given.device_total_gb
    if total is not None and given.offload != "auto":
        raise ValueError(f"--device-total-gb {total} goes with --offload auto")
    if total is not None and not 0 < total < 1e6:
        raise ValueError(f"--device-total-gb is {total}; it must be above 0, in GB of 1e9 bytes")
    if given.offload != "watermark":
        for option, value in (("--high-gb", given.high_gb), ("--low-gb", given.low_gb)):
            if value is not None:
                raise ValueError(f"{option} {value} goes with --offload watermark")
    elif given.high_gb is None:
        raise ValueError("--offload watermark needs --high-gb, in GB of 1e9 bytes")
    elif not 0 < (given.high_gb if given.low_gb is None else given.low_gb) <= given.high_gb:
        raise ValueError(
            f"--high-gb {given.high_gb} and --low-gb {given.low_gb}: the low mark must be above 0, and not "
            "above the high one"
        )


def _check_plot(path: Path, data: list[Path]) -> None:
    """Refuse what cannot be drawn: before the run, not after it."""
    begins = PICTURE_BEGINS.get(path.suffix)
    if begins is None:
        raise ValueError(f"--plot {path} must end in {', '.join(PICTURE_BEGINS)}, which says what is drawn")
    _check_writable("--plot", path, data, begins, f"a {path.suffix[1:]} picture")
    try:
        require_matplotlib()
    except ImportError as error:
        raise ValueError(f"--plot {path}: {error}") from None


def _check_readable(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(
            f"--data {path}: there is no such file; give the path of a text file, or leave --data out"
        )
    if not os.access(path, os.R_OK):
        raise PermissionError(f"--data {path}: this user may not read it")


def _check_writable(option: str, path: Path, data: list[Path], begins: bytes, what: str) -> None:
    """Refuse what cannot be written, and any file that holds something other than what an earlier run wrote.

    begins: how such a file begins. what: it holds.
    """
    said = f"{option} {path}"
    if path.is_dir():
        raise IsADirectoryError(f"{said} is a folder; give the name of a file in it")
    folder = path.resolve().parent  # of the file itself, where the path is a link
    if not folder.is_dir():
        raise FileNotFoundError(f"{said}: there is no folder {folder}; make it first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise PermissionError(f"{said}: this user may not write it")
    if not path.is_file():
        return
    if same := [other for other in data if path.samefile(other)]:
        raise ValueError(f"{said} is the same file as --data {same[0]}, which it would destroy; give another")
    with path.open("rb") as file:
        found = file.read(len(begins))
    if found not in (b"", begins):
        raise FileExistsError(
            f"{said} holds something else than {what}; give another name, or remove the file"
        )


def _parser() -> argparse.ArgumentParser:
    parser = RaisingParser(
        prog="train.py",
        description="Train a small GPT on text, byte by byte, over pipeline ranks; its saved activations "
        "travel to host memory and back.",
        epilog="Start several ranks with torchrun: torchrun --nproc-per-node 2 scripts/train.py --preset "
        "tiny --steps 20. MiB is 1,048,576 bytes. MB and GB are 10**6 and 10**9, here and in the engine's "
        "table, report and warnings.",
    )
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        add_options(group, options, host_or_gb=_host_or_gb, fraction_or_auto=_fraction_or_auto)
        if title == "training":
            learned = "text to learn (default: Python's own standard library)"
            group.add_argument("--data", type=Path, nargs="+", default=[], metavar="FILE", help=learned)
        if title == "proof":
            pairs = (
                "run the steps once without offload and once with it, for memory, and N - 1 times with each "
            )
            pairs += (
                "step made both ways, one after the other, for time; show both arms side by side (3 where N "
            )
            pairs += "is left out)"
            group.add_argument("--compare", type=int, nargs="?", const=3, default=0, metavar="N", help=pairs)
    return parser


_OPTIONS = {
    "model": f"""
        --preset {"|".join(sorted(PRESETS))}=tiny  sizes below, unless given
        --layers int  transformer layers
        --dim int  width of the residual stream
        --heads int  query heads
        --kv-heads int  key and value heads
        --ffn int  width inside the MLP, or inside an expert
        --sequence int  tokens of a sequence
        --experts int  of a mixture: experts of a layer
        --top-k int  of a mixture: experts that each token goes to
        --dtype {"|".join(DTYPES)}=float32  of parameters and activations
        """,
    "training": """
        --steps int=20  of the optimizer
        --batch int  sequences a microbatch
        --microbatches int  microbatches a step
        --lr float  learning rate of AdamW
        --seed int=0  of parameters and batches
        """,
    "pipeline": f"""
        --schedule text=1f1b  one of {", ".join(SCHEDULES)}
        --virtual-stages int  stages a rank (default: 1, or 2 where the schedule interleaves)
        --expert-parallel int  of a mixture: ranks that have the same stages and share their experts
            (default: 1)
        --device auto|cuda|cpu=auto  auto takes GPUs where there are any
        --timeout float=300  seconds to wait for another rank
        """,
    "offload": f"""
        --offload groups|auto|watermark=groups  groups: what marks name; auto: each block is kept, moved or
            recomputed, within --device-total-gb; watermark: what has to leave, above --high-gb
        --device-total-gb float  active device memory of a step's forwards and backwards, weights and
            gradients included (default: what makes a step at most a hundredth longer)
        --high-gb float  allocated device memory at which tensors begin to leave
        --low-gb float  below which they stop (default: 15/16 of --high-gb)
        --offload-modules text=all  all, none, or some of {", ".join(GROUP_NAMES)}; of a mixture:
            {", ".join(moe.GROUP_NAMES)}
        --experts-mode save_on_cpu|checkpoint|both  of a mixture: what the experts save leaves, or is
            recomputed, or is recomputed from inputs that leave
        --min-offloaded-tensor-size int  elements; smaller saved tensors stay
        --device-limit-mib int  saved activations on the device at once, in MiB of 1,048,576 bytes
        --weights host_or_gb  so much of a rank's weights stays or passes on the device, and all of its
            blocks' wait on the host; host: two blocks of each stage are on the device (default: all stay)
        --optimizer-offload-fraction fraction_or_auto  share of the optimizer's state on the host, 0 to 1;
            auto: what finds no room on the device (default: all stays)
        """,
    "proof": """
        --verify  compare every step's gradients with those without offload, bit for bit
        --check-end int=0  make the last step's forward and backward N times more without offload and N
            times with it, by turns: compare all gradients bit for bit, and show the ratio of the times
        --plot path  draw rank 0's last step: memory with and without offload, and what its lanes did; needs
            the extra `plot`
        --telemetry path  write one line of JSON a step
        """,
}


def _host_or_gb(text: str) -> str:
    try:
        if text == "host" or 0 < float(text) < MOST:
            return text
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text} must be a number of GB above 0, or host")


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
