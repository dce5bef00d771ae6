"""The answer of scripts/plan.py in words and as JSON. GB are 1e9 bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from offload.planner.dry_run import DryRun, PositionNeed
from offload.policy.actions import Rates

__all__ = ["as_json", "lines"]

GB = 1e9
_COLUMNS = (
    "rank", "layers", "weights", "grads", "optim", "saved", "warmup", "steady", "cooldown", "peak", "compute",
    "again", "stall", "bubble", "moved", "host", "fits",
)  # fmt: skip


def lines(answer: DryRun) -> list[str]:
    """The job, a table by position, what fits, and what was left out."""
    return [*_job_lines(answer), "", *_table(answer), "", *_verdict(answer), "", *_notes(answer)]


def as_json(answer: DryRun) -> dict[str, Any]:
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
        "modes": [asdict(mode) for mode in answer.modes],
        "positions": [_position_json(answer, position) for position in answer.positions],
        "left_out": list(answer.left_out),
        "sources": dict(job.gpu.sources),
    }


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


def _verdict(answer: DryRun) -> list[str]:
    job, host = answer.job, answer.host
    total = job.limit_bytes / GB
    fullest = max(answer.positions, key=lambda position: position.peak_bytes)
    own = next(mode for mode in answer.modes if mode.mode == answer.mode)
    if all(position.fits for position in answer.positions):
        said = [f"fits: rank {fullest.rank} is fullest with {fullest.peak_bytes / GB:.1f} of {total:.1f} GB"]
    else:
        fitting = [mode.mode for mode in answer.modes if mode.fits]
        said = [
            f"does not fit: rank {fullest.rank} needs {fullest.peak_bytes / GB:.1f} of {total:.1f} GB; "
            f"--offload {answer.mode} needs --device-total-gb {_up(own.device_bytes)} at least"
            + (f"; what fits is --offload {', '.join(fitting)}" if fitting else "; no mode fits")
        ]
    least = ", ".join(f"{mode.mode} {_up(mode.device_bytes)}" for mode in answer.modes)
    said.append(f"smallest --device-total-gb of each mode: {least}")
    if host.pinned_bytes or host.limit_bytes is not None:
        limit = "" if host.limit_bytes is None else f" of {host.limit_bytes / GB:.0f}"
        said.append(
            f"host: {host.pinned_bytes / GB:.0f}{limit} GB pinned by the {job.ranks_of_host} ranks of the "
            f"fullest, {host.out_bytes_per_s / GB:.1f} GB/s out and as much back"
            + ("" if host.fits else "; DOES NOT FIT: raise --host-gb, or take a mode that moves less")
        )
    levels = [
        f"rank {position.rank}: " + ", ".join(f"{count} {name}" for name, count in position.levels.items())
        for position in answer.positions
        if answer.mode == "auto"
    ]
    return said + (["layers x microbatches by level", *levels] if levels else [])


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
