"""What a training job would need and take on GPUs that nobody has rented yet.

Each position of the pipeline is planned and played alone, then all together: a wait for another rank gives
copies time, and a stall delays the ranks that wait for it. So waits and stalls are played in turn until the
step's time moves no more. One invariant: a figure is either derived from the trace of a module, the schedule
and a rate with a source, or named in `left_out`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offload.policy.actions import Action, Rates

from .job import Held, Job, Stage, held_by, stages_of_job
from .rank_plan import LAST_LEVEL, MOVING, plan_rank
from .rank_step import MODES, Mode, RankPlan, RankStep, StepPlay
from .simulate import Played, RankTimes, play_pipeline
from .together import play_together, sends_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionNeed:
    """One rank of the pipeline, and all its replicas."""

    rank: int
    layers: int
    stages: tuple[int, ...]
    held: Held
    saved_bytes: int
    """The most saved bytes that would be alive if none left and none were recomputed."""
    peak_by_phase: Mapping[str, int]
    """Device bytes: warmup to the first backward, cooldown from the last forward, steady between."""
    compute_s: float
    """Seconds of the plain step, collectives of tensor and expert parallelism included."""
    recompute_s: float
    stall_s: float
    bubble_s: float
    """Waiting for other ranks."""
    moved_bytes: int
    host_bytes: int
    """Pinned, the most at once."""
    levels: Mapping[str, int]
    """How many layers of how many microbatches run at which level."""
    rates: Rates
    """Rates of its link, beside the other GPUs of its host that copy."""
    fits: bool
    played: tuple[Played, ...]
    peaks_bytes: tuple[int, ...]
    """During each action, all included."""

    @property
    def peak_bytes(self) -> int:
        return max(self.peak_by_phase.values())


@dataclass(frozen=True, slots=True)
class HostNeed:
    """The fullest host."""

    pinned_bytes: int
    limit_bytes: int | None
    out_bytes_per_s: float
    """Bytes a second of all its GPUs together, over the step."""

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.pinned_bytes <= self.limit_bytes


@dataclass(frozen=True, slots=True)
class ModeNeed:
    """The least device that a mode can run on. A mode that moves needs `host_bytes` of the fullest host for
    that."""

    mode: Mode
    device_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The answer."""

    job: Job
    mode: Mode
    parameters: int
    """Parameters of the whole model."""
    positions: tuple[PositionNeed, ...]
    pipeline_s: float
    """From the first forward to the last backward."""
    plain_s: float
    """Seconds of the step with nothing offloaded or recomputed, whether it fits or not."""
    gradients_s: float
    """Sums over replicas and the return of weights, on the slowest rank: counted after the last backward."""
    optimizer_s: float
    host: HostNeed
    modes: tuple[ModeNeed, ...]
    left_out: tuple[str, ...]

    @property
    def step_s(self) -> float:
        return self.pipeline_s + self.gradients_s + self.optimizer_s

    @property
    def fits(self) -> bool:
        return self.host.fits and all(position.fits for position in self.positions)

    @property
    def tokens_per_s(self) -> float:
        microbatches = sum(
            action.kind == "F" and action.stage == 0 for order in self.job.orders for action in order
        )
        return self.job.dp * microbatches * self.job.cut.tokens / self.step_s


def dry_run(job: Job, mode: Mode, stages: Sequence[Stage] | None = None) -> DryRun:
    """Trace, plan and play one step. stages: of another run of this job, which are not traced again. Takes
    seconds of host time and no GPU. Raises ValueError for a job that cannot be."""
    stages = stages_of_job(job) if stages is None else stages
    own = [{stage: stages[stage] for stage in {action.stage for action in order}} for order in job.orders]
    held = [held_by(job, [*mine.values()]) for mine in own]
    positions = range(job.pp)

    def step_of(rank: int, wanted: Mode, rates: Rates) -> RankStep:
        return RankStep(job.orders[rank], own[rank], rates, wanted)

    def planned(rank: int, rates: Rates) -> tuple[RankStep, RankPlan]:
        step = step_of(rank, mode, rates)
        return step, plan_rank(job, mode, step, held[rank].total)

    all_copy, said = job.gpu.link(job.ranks_of_host)
    together = play_together(job, planned, moves=mode in MOVING)
    pairs, plays, times = together.pairs, together.plays, together.times
    plain = play_pipeline(
        job.orders,
        [step.compute_s(step.uniform(0)) for step, _ in pairs],
        send_s=sends_of(job),
        messages=job.messages,
    )
    found = tuple(
        _position(
            job,
            rank,
            own[rank],
            held[rank],
            *pairs[rank],
            plays[rank],
            times[rank],
            step_of(rank, "off", all_copy),
        )
        for rank in positions
    )
    gradients_s, optimizer_s = _after_backward(job, held)
    step_s = times[0].step_s + gradients_s + optimizer_s
    return DryRun(
        job=job,
        mode=mode,
        parameters=sum(_parameters(job, stage) for stage in stages),
        positions=found,
        pipeline_s=times[0].step_s,
        plain_s=plain[0].step_s,
        gradients_s=gradients_s,
        optimizer_s=optimizer_s,
        host=_host(job, found, step_s),
        modes=tuple(
            _least(job, wanted, [step_of(rank, wanted, all_copy) for rank in positions], held)
            for wanted in MODES
        ),
        left_out=_left_out(job, said),
    )


def _parameters(job: Job, stage: Stage) -> int:
    experts = stage.expert_parameters
    shared_by = job.cut.ep if job.cut.ep > 1 else job.cut.tp
    return (stage.parameters - experts) * job.cut.tp + experts * shared_by


def _position(
    job: Job,
    rank: int,
    stages: Mapping[int, Stage],
    held: Held,
    step: RankStep,
    plan: RankPlan,
    play: StepPlay,
    times: RankTimes,
    plain: RankStep,
) -> PositionNeed:
    peaks = tuple(held.total + nbytes for nbytes in play.peaks_bytes)
    peak_by_phase = _peak_by_phase(step.order, peaks)
    result = play.result
    names = Counter(
        block.menu[at].name
        for chunk, own in plan.levels.items()
        for block, at in zip(step.blocks[chunk], own, strict=True)
    )
    return PositionNeed(
        rank=rank,
        layers=sum(stage.layers for stage in stages.values()),
        stages=tuple(sorted(stages)),
        held=held,
        saved_bytes=max(
            saved + fixed
            for saved, fixed in zip(
                plain.play(plain.keep_all(0)).result.peaks_bytes, plain.fixed_bytes, strict=True
            )
        ),
        peak_by_phase=peak_by_phase,
        compute_s=sum(step.compute_s(step.uniform(0))),
        recompute_s=result.recompute_s,
        stall_s=result.stall_s,
        bubble_s=times.bubble_s,
        moved_bytes=result.moved_bytes,
        host_bytes=result.host_peak_bytes,
        levels=dict(names),
        rates=step.rates,
        fits=max(peaks) <= job.limit_bytes,
        played=times.played,
        peaks_bytes=peaks,
    )


def _peak_by_phase(order: Sequence[Action], peaks: Sequence[int]) -> dict[str, int]:
    first_backward = next(at for at, action in enumerate(order) if action.kind != "F")
    last_forward = max(at for at, action in enumerate(order) if action.kind == "F")
    cuts = {
        "warmup": peaks[:first_backward],
        "steady": peaks[first_backward : last_forward + 1],
        "cooldown": peaks[max(first_backward, last_forward + 1) :],
    }
    return {phase: max(own) for phase, own in cuts.items() if own}


def _least(job: Job, mode: Mode, steps: Sequence[RankStep], held: Sequence[Held]) -> ModeNeed:
    """The least device on which every position can run: for a mode that moves, with all of it moved; auto at
    the last level."""
    level = 0 if mode in ("off", "groups") else LAST_LEVEL
    most_bytes = 0
    for step, own in zip(steps, held, strict=True):
        plan = step.move_all(level) if mode in MOVING else step.keep_all(level)
        most_bytes = max(most_bytes, own.total + max(step.play(plan).peaks_bytes))
    return ModeNeed(mode, most_bytes, most_bytes <= job.limit_bytes)


def _after_backward(job: Job, held: Sequence[Held]) -> tuple[float, float]:
    """(seconds of the sums over replicas, of the optimizer), on the rank with most parameters."""
    most = max(held, key=lambda own: own.weights)
    near = job.dp * job.cut.tp <= job.gpus_per_host
    wire = job.gpu.peer_rate if near else job.gpu.network_rate
    sent = (most.gradients + (most.weights if job.zero else most.gradients)) * (job.dp - 1) / job.dp
    parameters = most.optimizer / job.optimizer_bytes if job.optimizer_bytes else 0.0
    return sent / wire, parameters / job.gpu.optimizer_rate


def _host(job: Job, positions: Sequence[PositionNeed], step_s: float) -> HostNeed:
    pinned, rate = 0, 0.0
    for position in positions:
        counts = job.positions_of_host(position.rank)
        pinned = max(pinned, sum(positions[rank].host_bytes * count for rank, count in counts.items()))
        rate = max(rate, sum(positions[rank].moved_bytes * count for rank, count in counts.items()) / step_s)
    return HostNeed(pinned, job.host_bytes, rate)


def _left_out(job: Job, said: str) -> tuple[str, ...]:
    found = [*job.model.left_out, *job.gpu.assumed]
    if said:
        found.append(said)
    if job.cut.tp > 1 or job.cut.ep > 1:
        found.append("no collective of a layer runs beside its compute")
    if job.dp > 1:
        found.append("sums over replicas run after the last backward, not beside it")
    if job.cut.ep > 1:
        found.append("each expert gets as many tokens as any other")
    if not job.other_bytes:
        found.append("CUDA's context, buffers of collectives and fragmentation take no device memory")
    return tuple(found)
