"""A dry run: memory, time and host memory of a training job, before a GPU is rented.

    offload plan --model llama3-70b --pp 8 --vpp 2 --tp 4 --schedule interleaved1f1b \\
        --microbatches 32 --sequence 8192 --gpu h200 --device-total-gb 120 --offload auto
    offload plan --model path/to/config.json --pp 4 --microbatches 8 --sequence 4096 --json
    offload plan --model path/to --sequence 4096 --gpu-gb 80 --gpu-tflops 620 --link-gbs 25

It needs no GPU and takes seconds. One layer of each kind, the embedding and the head are run on the meta
device, which shows every operator call with its sizes; seconds come from measured rates of the named GPU,
the order from torch's own schedules. It ends with the least memory and the least time of each mode, and with
the mode to take, or the ways out where none fits. One invariant: the exit code is 0 where the job fits, 3
where it does not, and 2 with one line where the question makes no sense.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from .dry_run import picture, report
from .dry_run.answer import dry_run
from .dry_run.job import Job, stages_of_job
from .dry_run.kinds import SharedPlan, plan_of_all_kinds
from .dry_run.measure import measured
from .dry_run.models import KNOWN, ModelShape, known_model, model_from_config
from .dry_run.rank_step import MODES
from .dry_run.rates import GPUS, Gpu, gpu_named, gpu_of_doctor
from .dry_run.reference import Cut
from .orders import has_one_line, messages_of, orders_of
from .schedules import SCHEDULES

GB = 1e9
_MODES_HELP = "; ".join(map(": ".join, MODES.items())) + " (%(default)s)"
FITS, NO_QUESTION, DOES_NOT_FIT = 0, 2, 3


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        if given.plot is not None:
            picture.require_matplotlib()  # said before a long job is planned
        if given.all_kinds and given.plot is not None:
            raise ValueError("--plot draws a pipeline's step, of which --all-kinds makes none: leave one out")
        if given.all_kinds and given.offload not in ("off", "auto"):
            raise ValueError(
                f"--offload {given.offload} beside --all-kinds, which is mode auto: leave one out"
            )
        job = _job(given)
        stages = stages_of_job(job)
        if given.all_kinds:
            return _all_kinds(given, job, plan_of_all_kinds(job, stages))
        answer = dry_run(job, given.offload, stages)
        answers = {
            need.mode: answer if need.mode == answer.mode else dry_run(job, need.mode, stages)
            for need in answer.modes
            if need.fits
        }
        if given.plot is not None:
            picture.draw(answer, given.plot)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return NO_QUESTION
    as_json, as_text = report.as_json(answer, answers), report.lines(answer, answers)
    print(json.dumps(as_json, indent=1) if given.json else "\n".join(as_text))
    return FITS if answer.fits else DOES_NOT_FIT


def _all_kinds(given: argparse.Namespace, job: Job, plan: SharedPlan | int) -> int:
    as_json = {"least_bytes": plan} if isinstance(plan, int) else report.kinds_json(plan)
    print(json.dumps(as_json, indent=1) if given.json else "\n".join(report.kinds_lines(job, plan)))
    return DOES_NOT_FIT if isinstance(plan, int) else FITS


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="offload plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(KNOWN)}, or a transformers config.json, or its folder")
    add("--gpu", default="h200", help=f"{', '.join(GPUS)}, or a file of offload doctor --json (%(default)s)")
    add("--gpu-gb", type=float, help="memory of another GPU; what is not given is --gpu's")
    add(
        "--gpu-tflops", type=float, help="what it reaches in bfloat16 products: about 0.7 of the data sheet's"
    )
    add("--link-gbs", type=float, help="what its link to the host carries each way, in GB/s")
    add("--measure", action="store_true", help="take the rates of the GPU that is here")
    add("--pp", type=int, default=1, help="ranks of the pipeline (%(default)s)")
    add("--vpp", "--virtual-stages", type=int, help="virtual stages of a rank; what the schedule usually has")
    add(
        "--tp",
        type=int,
        default=1,
        help="ranks that share a layer, sequence parallelism included (%(default)s)",
    )
    add("--dp", type=int, default=1, help="replicas (%(default)s)")
    add("--ep", type=int, default=1, help="ranks that share the experts, out of tp x dp (%(default)s)")
    add(
        "--zero",
        type=int,
        choices=(0, 1),
        default=1,
        help="1: optimizer state is cut over the replicas (%(default)s)",
    )
    add("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)} (%(default)s)")
    add("--microbatches", type=int, default=8, help="chunks of a step and rank (%(default)s)")
    add("--sequence", type=int, required=True, help="tokens of one sequence")
    add("--batch", type=int, default=1, help="sequences of a microbatch (%(default)s)")
    add(
        "--gradient-bytes",
        type=int,
        default=2,
        help="of an element; 4 where they are added up in float32 (%(default)s)",
    )
    add(
        "--optimizer-bytes",
        type=int,
        default=12,
        help="of a parameter: AdamW with float32 masters has 12 (%(default)s)",
    )
    add("--offload", choices=list(MODES), default="off", help=_MODES_HELP)
    add("--lora", type=int, default=0, help="rank of adapters; all else is frozen (0: all is trained)")
    add(
        "--all-kinds",
        action="store_true",
        help="weights, gradients and optimizer state share the total with activations, as "
        "apply(optimizer=) in mode auto has it; of one GPU",
    )
    add("--device-total-gb", type=float, help="what a GPU may hold in all (what it has)")
    add(
        "--other-gb", type=float, default=0.0, help="of that, what no tensor of the model takes (%(default)s)"
    )
    add("--host-gb", type=float, help="what all ranks of a host may pin (no limit)")
    add("--gpus-per-host", type=int, default=8, help="(%(default)s)")
    add("--json", action="store_true", help="all figures, in bytes and seconds")
    add("--plot", type=Path, help="draw the step to this file")
    return parser


def _job(given: argparse.Namespace) -> Job:
    for name in ("pp", "vpp", "tp", "dp", "ep", "sequence", "batch", "microbatches", "gpus_per_host"):
        _check(given, name, 1, math.inf, "")
    for name in ("optimizer_bytes", "lora"):
        _check(given, name, 0, math.inf, "")
    for name in ("gpu_gb", "gpu_tflops", "link_gbs"):
        _check(given, name, 0.001, 100_000, "")
    gpu = _gpu(given)
    has_gb = gpu.memory_bytes / GB
    _check(given, "device_total_gb", 0.001, has_gb, f"what a {gpu.name} has; --gpu-gb is for another one")
    total_gb = has_gb if given.device_total_gb is None else given.device_total_gb
    _check(given, "other_gb", 0, total_gb, "all that a GPU may hold")
    _check(given, "host_gb", 0, 1_000_000, "a petabyte")
    counts = {"ranks": given.pp, "virtual_stages": given.vpp, "microbatches": given.microbatches}
    return Job(
        model=_model(given.model),
        gpu=gpu,
        cut=Cut(sequence=given.sequence, batch=given.batch, tp=given.tp, ep=given.ep),
        orders=orders_of(given.schedule, **counts),
        messages=messages_of(given.schedule, **counts),
        one_line=has_one_line(),
        dp=given.dp,
        zero=given.zero,
        gradient_bytes=given.gradient_bytes,
        optimizer_bytes=given.optimizer_bytes,
        lora=given.lora,
        gpus_per_host=given.gpus_per_host,
        other_bytes=_bytes(given.other_gb) or 0,
        device_total_bytes=_bytes(given.device_total_gb),
        host_bytes=_bytes(given.host_gb),
    )


def _gpu(given: argparse.Namespace) -> Gpu:
    is_file = given.gpu.endswith(".json")
    found = gpu_of_doctor(_read(Path(given.gpu)), given.gpu) if is_file else gpu_named(given.gpu)
    if given.measure:
        if not torch.cuda.is_available():
            raise ValueError("--measure needs a GPU here; without one give --gpu")
        found = measured(found, torch.device("cuda"))
    return found.scaled(
        memory_bytes=_bytes(given.gpu_gb),
        matmul_flops=None if given.gpu_tflops is None else given.gpu_tflops * 1e12,
        link_rate=None if given.link_gbs is None else given.link_gbs * GB,
    )


def _check(given: argparse.Namespace, name: str, least: float, most: float, what: str) -> None:
    """Raise ValueError for a number outside of `least` and `most`. what: the latter is."""
    value = getattr(given, name)
    if value is None or least <= value <= most:  # not a number is neither
        return
    limit = f"at least {least:g}" if not value > most else f"at most {most:,.1f}" + (what and f", {what}")
    raise ValueError(f"--{name.replace('_', '-')} is {value:g}; it must be {limit}")


def _model(name: str) -> ModelShape:
    path = Path(name)
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        return known_model(name)
    config = _read(path)
    if not isinstance(config, dict):
        raise ValueError(f"{path} has a {type(config).__name__}; a model's config is an object of names")
    return model_from_config(config, path.resolve().parent.name)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * GB)
