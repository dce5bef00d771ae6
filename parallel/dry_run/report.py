"""The answer of `offload plan` in words and as JSON. GB are 1e9 bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from offload.policy.actions import Rates

from .answer import DryRun, PositionNeed
from .job import Job
from .kinds import SharedPlan
from .rank_step import Mode

GB = 1e9
_COLUMNS = (
    "rank", "layers", "weights", "grads", "optim", "saved", "warmup", "steady", "cooldown", "peak", "compute",
    "again", "stall", "bubble", "moved", "host", "fits",
)  # fmt: skip


Answers = Mapping[Mode, DryRun]
"""The same job in each mode whose least memory the device has."""


def lines(answer: DryRun, answers: Answers) -> list[str]:
    """The job, a table by position, what was left out, what fits, and which mode to take."""
    return [*_job_lines(answer), "", *_table(answer), "", *_notes(answer), "", *_verdict(answer, answers)]


def as_json(answer: DryRun, answers: Answers) -> dict[str, Any]:
    """All figures: bytes and seconds."""
    job = answer.job
    return {
        "model": asdict(job.model),
        "gpu": job.gpu.name,
        "ranks": job.ranks,
        "pp": job.pp,
        "tp": job.cut.tp,
        "dp": job.dp,
        "ep": job.cut.ep,
        "stages": job.num_stages,
        "offload": answer.mode,
        "device_total_bytes": job.limit_bytes,
        "fits": answer.fits,
        "step_s": answer.step_s,
        "pipeline_s": answer.pipeline_s,
        "plain_pipeline_s": answer.plain_s,
        "gradients_s": answer.gradients_s,
        "optimizer_s": answer.optimizer_s,
        "tokens_per_s": answer.tokens_per_s,
        "host": asdict(answer.host) | {"fits": answer.host.fits},
        "modes": [
            asdict(need) | {"step_s": answers[need.mode].step_s if need.mode in answers else None}
            for need in answer.modes
        ],
        "positions": [_position_json(answer, position) for position in answer.positions],
        "left_out": list(answer.left_out),
        "sources": dict(job.gpu.sources),
    }


def kinds_json(plan: SharedPlan) -> dict[str, Any]:
    """The shares of all kinds: bytes and seconds."""
    found = asdict(plan) | {"loads": plan.loads._asdict(), "split": plan.split._asdict()}
    return found | {"step_s": plan.step_s, "fits": True}


def kinds_lines(job: Job, plan: SharedPlan | int) -> list[str]:
    """The shares of all kinds in words. plan: the least bytes that would fit, where none does."""
    total = f"{job.limit_bytes / GB:.1f} GB"
    if isinstance(plan, int):
        return [
            f"does not fit: with all that can wait on the host, a step takes {plan / GB:.1f} of {total}; "
            "give more, or fewer tokens a microbatch, or --lora"
        ]
    loads, split = plan.loads, plan.split
    gradients = loads.gradients if split.gradients else loads.least_gradients
    state = split.state + (loads.ring if split.state < loads.state else 0)
    rows = [
        ("weights of blocks", split.weights, loads.weights),
        ("gradients", gradients, loads.gradients),
        ("optimizer's state", state, loads.state),
    ]
    inputs = "leave" if plan.moves else "stay"
    return [
        f"{job.model.name}: {plan.blocks} blocks on one {job.gpu.name}, {job.cut.tokens} tokens a microbatch",
        f"step {plan.step_s:.3f} s: compute {plan.compute_s:.3f}, recompute {plan.recompute_s:.3f}, "
        f"waits for weights {plan.waits_s:.3f}, optimizer {plan.optimizer_s:.3f}",
        *(f"{name}: {here / GB:.2f} GB on the device, of {all_of / GB:.2f}" for name, here, all_of in rows),
        f"activations: {plan.plain} of {plan.blocks} blocks plain, inputs of the others {inputs}",
        f"host: {plan.host_bytes / GB:.1f} GB pinned",
        f"fits: {plan.peak_bytes / GB:.1f} of {total}",
    ]


def _position_json(answer: DryRun, position: PositionNeed) -> dict[str, Any]:
    figures = asdict(position)
    for name in ("played", "peaks_bytes"):
        del figures[name]
    rate = position.moved_bytes / answer.pipeline_s
    return figures | {
        "peak_bytes": position.peak_bytes,
        "replicas": answer.job.dp * answer.job.cut.tp,
        "pinned_bytes_per_s": rate,
    }


def _job_lines(answer: DryRun) -> list[str]:
    job, model = answer.job, answer.job.model
    chunks = sum(action.kind == "F" for action in job.orders[0])
    return [
        f"{model.name}: {model.layers} layers, {answer.parameters / 1e9:.1f} G parameters on {job.ranks} "
        f"{job.gpu.name} (pp {job.pp} x tp {job.cut.tp} x dp {job.dp}"
        + (f", ep {job.cut.ep}" if job.cut.ep > 1 else "")
        + f"), {job.num_stages} stages, {chunks} chunks a rank and step, {job.cut.tokens} tokens each",
        f"step {answer.step_s:.3f} s: pipeline {answer.pipeline_s:.3f} "
        f"({answer.pipeline_s / answer.plain_s:.3f} of {answer.plain_s:.3f} with nothing offloaded), "
        f"gradients and weights between replicas {answer.gradients_s:.3f}, optimizer "
        f"{answer.optimizer_s:.3f}; {answer.tokens_per_s:,.0f} tokens/s",
    ]


def _table(answer: DryRun) -> list[str]:
    """Positions whose rows are equal share one."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for position in answer.positions:
        rows.setdefault(_cells(answer, position), []).append(position.rank)
    table = [_COLUMNS, *((_ranks(ranks), *cells) for cells, ranks in rows.items())]
    widths = [max(len(row[at]) for row in table) for at in range(len(_COLUMNS))]
    printed = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    replicas = answer.job.cut.tp * answer.job.dp
    return [
        *printed,
        f"GB and seconds, of one GPU; each rank of the pipeline stands for {replicas} (tp x dp). saved: if "
        "nothing left; again: computed once more",
    ]


def _cells(answer: DryRun, position: PositionNeed) -> tuple[str, ...]:
    held, phases = position.held, position.peak_by_phase
    sizes = (held.weights, held.gradients, held.optimizer, position.saved_bytes)
    peaks = (*(phases.get(phase) for phase in ("warmup", "steady", "cooldown")), position.peak_bytes)
    seconds = (position.compute_s, position.recompute_s, position.stall_s, position.bubble_s)
    return (
        str(position.layers),
        *(f"{nbytes / GB:.2f}" for nbytes in sizes),
        *("-" if nbytes is None else f"{nbytes / GB:.2f}" for nbytes in peaks),
        *(f"{value:.3f}" for value in seconds),
        f"{position.moved_bytes / GB:.1f}",
        f"{position.host_bytes / GB:.1f}",
        "yes" if position.fits else "NO",
    )


def _ranks(ranks: list[int]) -> str:
    whole = ranks[-1] - ranks[0] + 1 == len(ranks) > 1
    return f"{ranks[0]}-{ranks[-1]}" if whole else ",".join(map(str, ranks))


def _verdict(answer: DryRun, answers: Answers) -> list[str]:
    job, host = answer.job, answer.host
    total = job.limit_bytes / GB
    fullest = max(answer.positions, key=lambda position: position.peak_bytes)
    own = next(need for need in answer.modes if need.mode == answer.mode)
    said = []
    if answer.mode == "auto":
        said.append("layers x microbatches by level")
        said += [
            f"rank {position.rank}: "
            + ", ".join(f"{count} {name}" for name, count in position.levels.items())
            for position in answer.positions
        ]
    if host.pinned_bytes or host.limit_bytes is not None:
        limit = "" if host.limit_bytes is None else f" of {host.limit_bytes / GB:.0f}"
        said.append(
            f"host: {host.pinned_bytes / GB:.0f}{limit} GB pinned by the {job.ranks_of_host} ranks of the "
            f"fullest, {host.out_bytes_per_s / GB:.1f} GB/s out and as much back"
        )
    fit = f"rank {fullest.rank} is fullest with {fullest.peak_bytes / GB:.1f} of {total:.1f} GB"
    if not all(position.fits for position in answer.positions):
        said.append(
            f"does not fit: {fit}; --offload {answer.mode} needs --device-total-gb {_up(own.device_bytes)} "
            "at least"
        )
    elif not host.fits:
        assert host.limit_bytes is not None
        said.append(
            f"does not fit: {fit}, and the fullest host would pin {_up(host.pinned_bytes)} of "
            f"{host.limit_bytes / GB:.1f} GB; raise --host-gb, or take a mode that moves less"
        )
    else:
        said.append(f"fits: {fit}")
    least = ", ".join(f"{need.mode} {_up(need.device_bytes)}" for need in answer.modes)
    said.append(f"least memory, as --device-total-gb: {least}")
    fitting = {mode: other.step_s for mode, other in answers.items() if other.fits}
    if not fitting:
        return [*said, *_ways_out(answer, answers)]
    times = ", ".join(f"{mode} {step_s:.3f}" for mode, step_s in fitting.items())
    fastest = min(fitting, key=lambda mode: (fitting[mode], mode != answer.mode))
    return [
        *said,
        f"least time, in seconds a step, of each mode that fits: {times}",
        f"take --offload {fastest}" + (", as asked" if fastest == answer.mode else ""),
    ]


def _ways_out(answer: DryRun, answers: Answers) -> list[str]:
    """What to do where no mode fits: where the device has the least of a mode, the host is short."""
    if answers:
        short = min(answers.values(), key=lambda other: other.host.pinned_bytes)
        return [
            f"no mode fits: --offload {short.mode} pins least, and needs --host-gb "
            f"{_up(short.host.pinned_bytes)} at least"
        ]
    job = answer.job
    need = min(answer.modes, key=lambda need: need.device_bytes)
    held = max((position.held for position in answer.positions), key=lambda held: held.total)
    limit, state = job.limit_bytes, held.optimizer
    said = [
        f"no mode fits {limit / GB:.1f} GB: --offload {need.mode} needs {_up(need.device_bytes)} at least"
    ]
    if state:
        said.append(
            f"- {state / GB:.1f} GB of it are optimizer state. With HybridDeviceOptimizer it is on the host: "
            f"{_up(need.device_bytes - state)} are needed then (--optimizer-bytes 0 plans that)"
        )
    beside = need.device_bytes - state
    if state and beside < limit:
        replicas = -(-state * (job.dp if job.zero else 1) // (limit - beside))
        said.append(f"- --zero 1 with --dp {replicas} or more cuts that state over the replicas")
    said.append(
        f'- offload.apply(model, weights="host") has the {held.weights / GB:.1f} GB of weights on the host, '
        "but for a few blocks (not planned here)"
    )
    said.append(
        f"- FSDP2 cuts weights, gradients and state ({held.total / GB:.1f} GB) over its ranks, and --tp and "
        "--pp do"
    )
    said.append(
        "- LoRA has next to no gradients and state: about "
        f"{_up(need.device_bytes - state - held.gradients)} GB are needed then"
    )
    return said


def _up(nbytes: int) -> str:
    """GB, rounded up, so that the figure itself fits."""
    return f"{-(-nbytes // 100_000_000) / 10:.1f}"


def _notes(answer: DryRun) -> list[str]:
    return [
        *_links(answer),
        "not counted, or taken for granted:",
        *(f"- {text}" for text in answer.left_out),
    ]


def _links(answer: DryRun) -> list[str]:
    """Rates of the GPUs that copy."""
    ranks_of: dict[Rates, list[int]] = {}
    for position in answer.positions:
        if position.moved_bytes:
            ranks_of.setdefault(position.rates, []).append(position.rank)
    said = []
    for rates, ranks in ranks_of.items():
        out, back, both = (
            rate / GB for rate in (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s, rates.together_bytes_per_s)
        )
        said.append(
            f"link of rank {_ranks(ranks)}, beside what else copies on its host: {out:.1f} out, {back:.1f} "
            f"in, {both:.1f} GB/s both"
        )
    return said
