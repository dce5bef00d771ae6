#!/usr/bin/env python3
"""What the conductor costs and gains: one model, steps with it and without in turn.

    python scripts/bench_conductor.py                   every work
    python scripts/bench_conductor.py --work one        adapters on streamed weights, 4,096 tokens
    python scripts/bench_conductor.py --work three      8 trained blocks and a head, 16,384 tokens: weights,
                                                        gradients, inputs of blocks and optimizer state move
    python scripts/bench_conductor.py --work conflicts  copies of several clients at once, by hand
    python scripts/bench_conductor.py --tiny            tiny blocks on the simulated device, by its clock: a
                                                        block computes for what an H200 takes for one of 7B,
                                                        and its weights take the link as long as there

A step with the conductor is compared with its neighbour without: the machine's changes are in both. `law` is
the sum over passes of what is longest there: compute with all on the device, the bytes of each direction over
55 GB/s, all bytes over 100 GB/s. Of conflicts (bench/conflicts.py) it is compared how long compute waits for
a copy that it needs. One invariant: gradients of both arms have the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import bench  # noqa: F401
import offload
from bench import gradients
from bench.conflicts import CONFLICTS, stalls_ms
from bench.options import add_options
from bench.run import Run, hardware, main_of, outcome, parser_of
from bench.table import Columns, reason_line
from bench.weights import TINY, Model, Shape, bits_of
from offload import marks
from offload.conductor import Conductor, ConductorConfig
from offload.device.sim import SimDevice
from offload.engine import OffloadEngine
from offload.groups.manager import GroupsManager

LINK_GB_S, BOTH_GB_S = 55.0, 100.0
BLOCK_WEIGHTS, TOKEN_S, SIM_GB_S = 233e6, 2 / 600e12, 50.7
"""Weights of a block of 7B, seconds of a forward a weight and token, and a simulated link each way."""
PASSES = ("forward", "backward", "optimizer")
WORKS = {"one": (4096, 28, 10), "three": (16384, 8, 4)}  # tokens, blocks, pairs of steps
CONFLICTS_COLUMNS = Columns(
    "conflict = conflict | stall ms without = without:.2f | with = with:.2f | with / without = ratio:.3f "
    "| asked = asked"
)
ASKED = {"saturated": "begins within 20 ms"}
COLUMNS = Columns(
    "work = work | ms without = without:.1f | ms with = with:.1f | with / without = ratio:.4f "
    "| law ms = law_ms:.1f | with / law = over_law:.3f | stall ms = stalls | denied = denied | bits = same"
)


class WithHead(nn.Module):
    """The blocks, and an output head that is trained."""

    def __init__(self, shape: Shape, vocabulary: int, **where: Any) -> None:
        super().__init__()
        self.blocks = Model(shape, **where)
        self.head = nn.Linear(shape.hidden, vocabulary, bias=False, **where)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.layers:
            x = block(x)
        return self.head(x[:, ::16])  # of every sixteenth token, as its logits are no part of this


class Loop:
    """A model and its steps. away: what moves is on the host. scale: bytes of a block over those of 7B.
    clock: the simulated device."""

    def __init__(self, options: argparse.Namespace, *, away: bool) -> None:
        self.device = torch.device("cpu" if options.tiny else "cuda:0")
        dtype = torch.float32 if options.tiny else torch.bfloat16
        self.three = options.work == "three"
        num_layers = options.layers or (TINY.layers if options.tiny else WORKS[options.work][1])
        shape = replace(TINY if options.tiny else Shape(), layers=num_layers)
        if self.three:
            shape = replace(shape, rank=0)  # the blocks themselves are trained
        where = {"device": self.device, "dtype": dtype}
        torch.manual_seed(0)
        self.model = (
            WithHead(shape, 64 if options.tiny else 152064, **where)
            if self.three
            else (Model(shape, **where))
        )
        tokens = WORKS[options.work][0]
        self.x = torch.randn(1, 32 if options.tiny else tokens, shape.hidden, **where)
        layers = (self.model.blocks if self.three else self.model).layers
        self.scale, self.clock = 1.0, None
        if options.tiny:
            self.scale = sum(weight.nbytes for weight in layers[0].parameters()) / (2 * BLOCK_WEIGHTS)
            self.clock = simulated(layers, BLOCK_WEIGHTS * TOKEN_S * tokens, SIM_GB_S * self.scale)
        blocks = "blocks.layers.*" if self.three else "layers.*"
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=1e-4)
        mode = "hidden_states" if self.three else False
        if away:
            given = {"optimizer": self.optimizer} if self.three else {}
            given |= {"min_numel": 1} if options.tiny and self.three else {}
            offload.apply(self.model, mode, blocks=blocks, weights="host", **given)
        elif self.three:
            offload.apply(self.model, "checkpoint", blocks=blocks)

    def loss(self) -> Tensor:
        return self.model(self.x).float().square().mean()

    def step(self, between: Callable[[str], None] = lambda name: None) -> None:
        """between: called with the name of each pass as it is over."""
        loss = self.loss()
        between("forward")
        loss.backward()
        between("backward")
        self.optimizer.step()
        self.optimizer.zero_grad()
        between("optimizer")

    def now_s(self) -> float:
        """Once the device has done what was issued."""
        if self.clock is not None:
            return self.clock.now_s
        torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self) -> float:
        begun = self.now_s()
        self.step()
        return self.now_s() - begun

    def gradient_bits(self) -> list[int]:
        with gradients.deterministic():
            self.loss().backward()
        bits = bits_of(self.model)
        self.optimizer.zero_grad()
        return bits


def simulated(layers: nn.ModuleList, forward_s: float, gb_s: float) -> SimDevice:
    """The process's device from here on: these blocks compute for so long, and twice that in a backward."""
    device = SimDevice(executor="clock", d2h_gb_s=gb_s, h2d_gb_s=gb_s)
    marks.put_manager(GroupsManager(OffloadEngine(device=device)))
    for block in layers:
        block.register_forward_pre_hook(lambda *_: device.compute_for(forward_s))
        block.register_full_backward_hook(lambda *_: device.compute_for(2 * forward_s))
    return device


def seconds_by_pass(options: argparse.Namespace) -> dict[str, float]:
    """Of steps with all on the device, the fastest of each pass."""
    loop = Loop(options, away=False)
    found: dict[str, list[float]] = {name: [] for name in PASSES}
    for _ in range(options.warmup + (options.samples or WORKS[options.work][2])):
        begun = loop.now_s()

        def over(name: str) -> None:
            nonlocal begun
            now = loop.now_s()
            found[name].append(now - begun)
            begun = now

        loop.step(over)
    return {name: min(times[options.warmup :]) for name, times in found.items()}


@contextmanager
def bytes_by_pass(conductor: Conductor) -> Iterator[Counter[tuple[str, str]]]:
    """What is copied in each phase, by direction."""
    found: Counter[tuple[str, str]] = Counter()

    def note(direction: Any, owner: Any, nbytes: int, start: Any, end: Any) -> None:
        phase = conductor.phase
        found["forward" if phase is None else phase.value, direction.value] += nbytes

    conductor.engine.copier.watch(note)
    try:
        yield found
    finally:
        conductor.engine.copier.unwatch(note)


def law_seconds(compute: dict[str, float], moved: Counter[tuple[str, str]]) -> float:
    total = 0.0
    for name in PASSES:
        inward, out = moved[name, "h2d"] / 1e9, moved[name, "d2h"] / 1e9
        total += max(compute[name], inward / LINK_GB_S, out / LINK_GB_S, (inward + out) / BOTH_GB_S)
    return total


def run(options: argparse.Namespace) -> dict[str, Any]:
    """One work: steps with and without in turn, who goes first alternating."""
    loop = Loop(options, away=True)
    engine = offload.marks.default_manager().engine
    is_gpu = loop.device.type == "cuda"
    total = torch.cuda.get_device_properties(loop.device).total_memory if is_gpu else None
    config = ConductorConfig.of_device(total)  # as conductor=True has it
    config = replace(config, slot_mb=config.slot_mb * loop.scale)
    for _ in range(options.warmup):
        loop.seconds()
    bits = [loop.gradient_bits()]
    conductor = Conductor(config, engine=engine)
    bits.append(loop.gradient_bits())
    conductor.shutdown()
    times: dict[bool, list[float]] = {True: [], False: []}
    stalls: dict[bool, list[float]] = {True: [], False: []}
    ratios, denied = [], 0
    for sample in range(options.samples or WORKS[options.work][2]):
        for with_it in (True, False) if sample % 2 else (False, True):
            arbiter = Conductor(config, engine=engine) if with_it else None
            loop.seconds()  # the first step with other phases is none to compare
            times[with_it].append(loop.seconds())
            stats = engine.last_stats
            stalls[with_it].append(sum(client.stall_ms for client in stats.clients.values()))
            if arbiter is not None:
                denied += arbiter.counts.denials
                arbiter.shutdown()
        ratios.append(times[True][-1] / times[False][-1])
    conductor = Conductor(config, engine=engine)
    loop.step()
    with bytes_by_pass(conductor) as moved:
        loop.step()
    conductor.shutdown()
    return {
        "work": options.work,
        "without_ms": [each * 1e3 for each in times[False]],
        "with_ms": [each * 1e3 for each in times[True]],
        "ratio": statistics.median(ratios),
        "moved": {f"{name} {direction}": nbytes / loop.scale for (name, direction), nbytes in moved.items()},
        "stall_ms": {"with": statistics.median(stalls[True]), "without": statistics.median(stalls[False])},
        "denied": denied,
        "bits": bits[0] == bits[1],
    }


def line(row: dict[str, Any]) -> str:
    without, with_it = statistics.median(row["without_ms"]), statistics.median(row["with_ms"])
    moved = Counter({tuple(name.split(" ")): nbytes for name, nbytes in row["moved"].items()})
    law_ms = law_seconds(row["compute_s"], moved) * 1e3
    found = {"without": without, "with": with_it, "law_ms": law_ms, "over_law": with_it / law_ms}
    found["stalls"] = f"{row['stall_ms']['without']:.1f} / {row['stall_ms']['with']:.1f}"
    return COLUMNS.line(row | found | {"same": "equal" if row["bits"] else "DIFFER"})


def conflicts(options: argparse.Namespace) -> list[dict[str, Any]]:
    engine = OffloadEngine(device=SimDevice(executor="clock") if options.tiny else "cuda")
    found = []
    for conflict in CONFLICTS:
        # the simulated link has a clock of its own, so one sample is all
        medians = stalls_ms(
            engine, conflict, 1 if options.tiny else options.samples or 10, 1024 if options.tiny else 1
        )
        found.append({"conflict": conflict, "stall_ms": {"with": medians[True], "without": medians[False]}})
    return found


def conflict_line(row: dict[str, Any]) -> str:
    stalls = row["stall_ms"]
    found = {"ratio": stalls["with"] / stalls["without"], "asked": ASKED.get(row["conflict"], "0.5")}
    return CONFLICTS_COLUMNS.line(row | stalls | found)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__, row_timeout_s=1800.0)
    options = f"""
    --work {"|".join(WORKS)}|conflicts  (every one)
    --layers int  (28 and 8)
    --samples int  pairs of steps (10 and 4); of a conflict (10)
    --warmup int=4  steps before them
    """
    add_options(parser, options)
    parsed = parser.parse_args(arguments)
    if parsed.tiny:
        parsed.samples, parsed.warmup = parsed.samples or 3, 3
    return parsed


def run_arm(options: argparse.Namespace) -> dict[str, Any]:
    """Steps of a work whose bytes are on the host, or, on the device, the seconds of each pass."""
    away = options.arm == "away"
    return outcome({}, lambda: run(options) if away else {"compute_s": seconds_by_pass(options)})


def run_work(bench_run: Run, work: str) -> None:
    made: dict[str, Any] = {"work": work}
    for arm in ("away", "here"):
        options = argparse.Namespace(**vars(bench_run.args) | {"work": work, "arm": arm, "label": work})
        made |= bench_run.measure(options)
        if made["status"] != "ok":
            print(reason_line([work], bench_run.keep(made)), flush=True)
            return
    print(line(bench_run.keep(made)), flush=True)


def run_works(bench_run: Run) -> None:
    args = bench_run.args
    print(*bench_run.header_lines(hardware()), sep="\n")
    works = [*WORKS, "conflicts"] if args.work is None else [args.work]
    if works != ["conflicts"]:
        print(COLUMNS.header, flush=True)
    for work in works:
        if work == "conflicts":
            print(CONFLICTS_COLUMNS.header)
            for row in conflicts(args):
                print(conflict_line(bench_run.keep({"status": "ok", **row})), flush=True)
        else:
            run_work(bench_run, work)


def main(arguments: list[str] | None = None) -> int:
    return main_of(__file__, parse(arguments), arguments, run_works, run_arm)


if __name__ == "__main__":
    sys.exit(main())
