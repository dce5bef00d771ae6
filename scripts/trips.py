#!/usr/bin/env python3
"""How many Python calls of `offload`, in how many files, the paths take that run often.

    python scripts/trips.py             a table, on the simulated device
    python scripts/trips.py --json

A trip is a second one of its kind, in a process of four steps before: what is made once does not count. Calls
of `offload/device`, which the simulated device has others of, are left out. Counts and no times: they are the
same on each machine.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
if str(_ROOT) not in sys.path:
    sys.path.insert(0, str(_ROOT))

import torch  # noqa: E402
from tabulate import tabulate  # noqa: E402
from torch import nn  # noqa: E402

import offload  # noqa: E402

_FOLDER, _LEFT_OUT = str(_ROOT / "offload") + "/", str(_ROOT / "offload" / "device") + "/"
_STEPS, _WIDTH = 4, 256


class Trips:
    """Calls by the name of a trip: the file of each."""

    def __init__(self) -> None:
        self.calls: dict[str, list[str]] = {}

    def of(self, name: str, call: Callable[[], Any]) -> Any:
        """`call`, counted as the trip `name`; the last time counts."""
        files = self.calls[name] = []

        def called(frame: FrameType, event: str, _: Any) -> None:
            file = frame.f_code.co_filename
            if event == "call" and file.startswith(_FOLDER) and not file.startswith(_LEFT_OUT):
                files.append(file)

        sys.setprofile(called)
        try:
            return call()
        finally:
            sys.setprofile(None)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"trip": name, "calls": len(files), "files": len({*files})}
            for name, files in self.calls.items()
            if name != "of another"
        ]


def saved_tensors(trips: Trips) -> None:
    """A tensor that moves and one that is too small, in one group, and another group after it."""
    config = offload.OffloadConfig(min_offloaded_tensor_size=_WIDTH, device_limit_bytes=0)
    offload.configure(config, device="sim", print_summary=False)
    for _ in range(_STEPS):
        large = torch.randn(_WIDTH, _WIDTH, requires_grad=True)
        small = torch.randn(4, requires_grad=True)
        offload.init_chunk_handler()
        x = offload.group_start(large * 1, "group")
        with offload.offload_hooks():
            y = trips.of("pack of a tensor that moves", lambda x=x: torch.sin(x))
            z = trips.of("pack of a tensor that stays", lambda small=small: torch.sin(small))
        y = trips.of("commit of its group", lambda y=y: offload.group_commit(y, "group"))
        x = offload.group_start(y, "last")
        with offload.offload_hooks():
            last = torch.cos(x)
        last = offload.group_commit(last, "last")
        (gradient,) = torch.autograd.grad(last.sum(), y)
        trips.of("read that fetches", lambda y=y, gradient=gradient: y.backward(gradient))
        z.sum().backward()
        trips.of("step_end, of two groups", offload.step_end)
    offload.reset()


def streamed_weights(trips: Trips) -> None:
    offload.configure(offload.OffloadConfig(), device="sim", print_summary=False)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(4)))
    with offload.apply(model, weights="host", min_numel=1):
        for _ in range(_STEPS):
            x = torch.randn(8, _WIDTH)
            for number, block in enumerate(model):
                name = "forward of a streamed block" if number == 2 else "of another"
                x = trips.of(name, lambda x=x, block=block: block(x))
            x.sum().backward()
            offload.step_end()
    offload.reset()


def optimizer_step(trips: Trips) -> None:
    offload.configure(offload.OffloadConfig(), device="sim", print_summary=False)
    weight = nn.Parameter(torch.randn(_WIDTH, _WIDTH))
    optimizer = offload.HybridDeviceOptimizer([weight], offload_fraction=1.0, lr=1e-3)
    for _ in range(_STEPS):
        weight.grad = torch.ones_like(weight)
        trips.of("step of HybridDeviceOptimizer, one bucket", optimizer.step)
    optimizer.close()
    offload.reset()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    args = parser.parse_args(arguments)
    logging.getLogger("offload").setLevel(logging.ERROR)  # the limit that makes all leave is passed
    trips = Trips()
    for part in (saved_tensors, streamed_weights, optimizer_step):
        part(trips)
    print(json.dumps(trips.rows()) if args.json else tabulate(trips.rows(), headers="keys"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
