"""Is this machine right for offload? A line each: the figure, the verdict, the setting to change.

    offload doctor
    offload doctor --json

It measures the links of all GPUs that the process sees, and pinning, in some seconds (60 at most), and reads
limits from the system; it changes nothing. Run it as the training runs: in the same container, under the
same numactl or Slurm step. One invariant: the exit code is 0 where nothing is to be changed, 1 where a line
says what, and 3 where there is no GPU to measure, whatever the other lines say.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from shutil import get_terminal_size

import torch
from tabulate import tabulate

from offload.commands.gpus import measure
from offload.commands.machine import read_host
from offload.commands.verdicts import Line, diagnose

GOOD, CHANGE, NO_GPU = 0, 1, 3
_PATIENCE_S = 45.0
"""For all GPUs; the rest of a minute is torch's import."""
_PIN_BYTES = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="offload doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="all figures, in bytes and seconds")
    given = parser.parse_args(arguments)
    begun = time.perf_counter()
    names, why_none = _visible_gpus()
    host = read_host()
    pin_bytes = _PIN_BYTES if host.free_bytes is None else min(_PIN_BYTES, host.free_bytes // 4)
    gpus = measure(names, pin_bytes=pin_bytes, patience_s=_PATIENCE_S)
    lines = diagnose(host, gpus, why_none)
    to_change = any(line.verdict == "change" for line in lines)
    code = NO_GPU if not gpus else CHANGE if to_change else GOOD
    seconds = time.perf_counter() - begun
    answer = {"code": code, "seconds": seconds, "lines": [asdict(line) for line in lines]}
    print(json.dumps(answer, indent=1) if given.json else _table(lines))
    if any(gpu.is_alive() for gpu in gpus):
        sys.stdout.flush()
        os._exit(code)  # an exit in order would wait for that GPU
    return code


def _visible_gpus() -> tuple[list[str], tuple[str, str]]:
    """Their names; or none, with the reason and the way to get one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    reason = (
        "torch sees none",
        "start the container with its GPUs (docker run --gpus all), or install a driver: nvidia-smi has to "
        "list them",
    )
    if count:
        return [f"cuda:{index}" for index in range(count)], ("", "")
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA", "install torch's build for CUDA"
    elif visible is not None:
        reason = f"CUDA_VISIBLE_DEVICES is {visible!r}", "unset it, or name GPUs that nvidia-smi lists"
    elif caught:
        reason = str(caught[0].message).partition("\n")[0], "install the driver that torch's CUDA needs"
    return [], reason


def _table(lines: Sequence[Line]) -> str:
    rows = [[line.name, line.figure, line.verdict, line.setting] for line in lines]
    headers = ["", "figure", "verdict", "setting"]
    setting = max(28, get_terminal_size((120, 24)).columns - 74)  # beside the other columns
    return tabulate(rows, headers, disable_numparse=True, maxcolwidths=[None, 40, None, setting])
