#!/usr/bin/env python3
"""A dry run: memory, time and host memory of a training job, before a GPU is rented.

    python scripts/plan.py --model llama3-70b --pp 8 --vpp 2 --tp 4 --schedule interleaved1f1b \\
        --microbatches 32 --sequence 8192 --gpu h200 --device-total-gb 120 --offload auto
    python scripts/plan.py --model path/to/config.json --pp 4 --microbatches 8 --sequence 4096 --json

It needs no GPU and takes seconds. One layer of each kind, the embedding and the head are run on the meta
device, which shows every operator call with its sizes; seconds come from measured rates of the named GPU,
the order from torch's own schedules. What the answer leaves out is its last paragraph. One invariant: it ends
with exit code 0 where the job fits, 3 where it does not, and 2 with one line where the question makes no
sense.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parent
for _folder in (str(_SCRIPTS.parent), str(_SCRIPTS)):
    if _folder not in sys.path:
        sys.path.insert(0, _folder)

import torch  # noqa: E402

from offload.planner.dry_run import dry_run  # noqa: E402
from offload.planner.job import Job  # noqa: E402
from offload.planner.models import KNOWN, ModelShape, known_model, model_from_config  # noqa: E402
from offload.planner.rank_step import MODES  # noqa: E402
from offload.planner.rates import GPUS, Gpu, gpu_named  # noqa: E402
from offload.planner.reference import Cut  # noqa: E402
from parallel.schedules import SCHEDULES  # noqa: E402
from planning import picture, report  # noqa: E402
from planning.measure import measured  # noqa: E402
from planning.orders import messages_of, orders_of  # noqa: E402

GB = 1e9
FITS, NO_QUESTION, DOES_NOT_FIT = 0, 2, 3


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        answer = dry_run(_job(given), given.offload)
        if given.plot is not None:
            picture.draw(answer, given.plot)
    except (ValueError, OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return NO_QUESTION
    print(json.dumps(report.as_json(answer), indent=1) if given.json else "\n".join(report.lines(answer)))
    return FITS if answer.fits else DOES_NOT_FIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help=f"{', '.join(KNOWN)}, or the path of a transformers config.json")
    add("--gpu", default="h200", help=f"{', '.join(GPUS)} (%(default)s)")
    add("--measure", action="store_true", help="take the rates of the GPU that is here")
    add("--pp", type=int, default=1, help="ranks of the pipeline")
    add("--vpp", "--virtual-stages", type=int, help="virtual stages of a rank; what the schedule usually has")
    add("--tp", type=int, default=1, help="ranks that share a layer, sequence parallelism included")
    add("--dp", type=int, default=1, help="replicas")
    add("--ep", type=int, default=1, help="ranks that share the experts, out of tp x dp")
    add("--zero", type=int, choices=(0, 1), default=1, help="1: optimizer state is cut over the replicas")
    add("--schedule", default="1f1b", help=f"{', '.join(SCHEDULES)} (%(default)s)")
    add("--microbatches", type=int, default=8)
    add("--sequence", type=int, required=True, help="tokens of one sequence")
    add("--batch", type=int, default=1, help="sequences of a microbatch (%(default)s)")
    add("--gradient-bytes", type=int, default=2, help="of an element; 4 where they are added up in float32")
    add("--optimizer-bytes", type=int, default=12, help="of a parameter: AdamW with float32 masters has 12")
    add("--offload", choices=list(MODES), default="none", help="; ".join(map(": ".join, MODES.items())))
    add("--device-total-gb", type=float, help="what a GPU may hold in all; what it has")
    add("--other-gb", type=float, default=0.0, help="of that, what no tensor of the model takes")
    add("--host-gb", type=float, help="what all ranks of a host may pin")
    add("--gpus-per-host", type=int, default=8)
    add("--json", action="store_true", help="all figures, in bytes and seconds")
    add("--plot", type=Path, help="draw the step to this file")
    return parser


def _job(given: argparse.Namespace) -> Job:
    for name in ("pp", "tp", "dp", "ep", "sequence", "batch", "microbatches"):
        if getattr(given, name) < 1:
            raise ValueError(f"--{name} is {getattr(given, name)}; it must be at least 1")
    counts = {"ranks": given.pp, "virtual_stages": given.vpp, "microbatches": given.microbatches}
    return Job(
        model=_model(given.model),
        gpu=_gpu(given),
        cut=Cut(sequence=given.sequence, batch=given.batch, tp=given.tp, ep=given.ep),
        orders=orders_of(given.schedule, **counts),
        messages=messages_of(given.schedule, **counts),
        dp=given.dp,
        zero=given.zero,
        gradient_bytes=given.gradient_bytes,
        optimizer_bytes=given.optimizer_bytes,
        gpus_per_host=given.gpus_per_host,
        other_bytes=_bytes(given.other_gb) or 0,
        device_total_bytes=_bytes(given.device_total_gb),
        host_bytes=_bytes(given.host_gb),
    )


def _gpu(given: argparse.Namespace) -> Gpu:
    named = gpu_named(given.gpu)
    if not given.measure:
        return named
    if not torch.cuda.is_available():
        raise ValueError("--measure needs a GPU here; without one give --gpu")
    return measured(named, torch.device("cuda"))


def _model(name: str) -> ModelShape:
    if not name.endswith(".json"):
        return known_model(name)
    path = Path(name)
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    return model_from_config(config, path.parent.name or path.name)


def _bytes(gigabytes: float | None) -> int | None:
    return None if gigabytes is None else round(gigabytes * GB)


if __name__ == "__main__":
    sys.exit(main())
