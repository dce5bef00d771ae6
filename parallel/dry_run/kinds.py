"""One total of device memory for activations, weights, gradients and optimizer state, on one GPU: what
`apply(model, optimizer=optimizer, mode="auto", device_total=...)` would choose, and what its step would take.

The shares, the rule of whole blocks and the plan of streamed weights are the engine's own (offload/policy).
One invariant: a step is what its blocks compute and recompute, what they wait for weights, and the
optimizer's step, whose copies take the fuller direction of the link.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import inf

from offload.policy.rule import Cost, Rule, Trace, fitting, peak_bytes
from offload.policy.splits import Loads, Split, all_of, device_bytes, least_of, shared, step_s
from offload.policy.streamed import Size, best_plans, least_window

from .job import WEIGHT_BYTES, Job, Stage, held_by

_BUCKET_BYTES, _SLOTS, _FLATS = 64 << 20, 3, 4
"""Of the optimizer's ring: a flat's bytes, slots, and flats of one: two moments, weights and gradients."""

_GRADIENT_BLOCKS = 2
"""Of gradients that wait on the host, blocks that are on the device."""

_TRIED = 8
"""Splits that are played, of those that are the shortest by their sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlan:
    """The shares that were chosen.

    loads, split: bytes of each kind, and what of them is on the device. plain: blocks that are not
    recomputed, of `blocks`. moves: inputs of the others leave. compute_s: forwards and backwards without
    recomputes; step_s: all of it. peak_bytes: active at most. host_bytes: pinned, of kinds that wait there in
    part or in whole.
    """

    loads: Loads
    split: Split
    plain: int
    blocks: int
    moves: bool
    compute_s: float
    recompute_s: float
    waits_s: float
    optimizer_s: float
    peak_bytes: int
    host_bytes: int

    @property
    def step_s(self) -> float:
        return self.compute_s + self.recompute_s + self.waits_s + self.optimizer_s


class _Work:
    """A job of one GPU in the terms of the policies. Raises ValueError for another one."""

    def __init__(self, job: Job, stages: Sequence[Stage]) -> None:
        if job.ranks > 1 or len(stages) > 1:
            raise ValueError(
                f"--all-kinds is of one GPU and one stage, not of {job.ranks} ranks and {len(stages)} "
                "stages: leave --pp, --vpp, --tp and --dp out"
            )
        (stage,) = stages
        self.job, self.pieces = job, stage.pieces
        self.layers = [piece for piece in stage.pieces if len(piece.menu) > 1]
        self.others = [piece for piece in stage.pieces if len(piece.menu) == 1]
        self.microbatches = sum(action.kind == "F" for action in job.orders[0])
        self.sizes = [Size(nbytes, nbytes) for nbytes in (WEIGHT_BYTES * p.parameters for p in self.layers)]
        self.rates, _ = job.gpu.link(1)
        trained = sum(piece.trained for piece in self.layers)
        largest = max(job.gradient_bytes * piece.trained for piece in self.pieces)
        self.both = self.rates.h2d_bytes_per_s, self.rates.d2h_bytes_per_s
        held, weights = held_by(job, stages), sum(size.used for size in self.sizes)
        ring = _SLOTS * _BUCKET_BYTES * _FLATS
        state, ring = (held.optimizer, ring) if held.optimizer > ring else (0, 0)
        self.loads = Loads(
            weights=weights,
            least_weights=least_window(self.sizes),
            trained_weights=WEIGHT_BYTES * trained,
            gradients=held.gradients,
            least_gradients=min(_GRADIENT_BLOCKS * largest, held.gradients),
            state=state,
            ring=ring,
            resident=held.total - weights - held.gradients - state,
        )
        self.costs: dict[Hashable, Cost] = {
            piece.name: Cost(
                piece.saved_bytes - piece.input_bytes,
                piece.input_bytes,
                max(piece.menu[-1].recompute_s, piece.more_host_s(piece.menu[-1])),
            )
            for piece in self.layers
        }

    @property
    def compute_s(self) -> float:
        device = sum(piece.forward_s + piece.backward_s for piece in self.pieces)
        host = sum(piece.forward_host_s + piece.backward_host_s for piece in self.pieces)
        return self.microbatches * max(device, host)

    @property
    def blocks_s(self) -> float:
        """That plain blocks compute."""
        return self.microbatches * sum(piece.forward_s + piece.backward_s for piece in self.layers)

    def trace(self, resident_bytes: int) -> Trace:
        """Of one microbatch whose blocks are all recomputed, while their inputs leave."""
        found = Trace(True, resident_bytes)
        chunk = (0, 0)
        found.kinds[chunk] = [piece.name for piece in self.layers]
        for place in range(len(self.layers)):
            found.forward_ended(chunk, place)
        for place, piece in reversed([*enumerate(self.layers)]):
            found.backward_reads(chunk, place, resident_bytes + piece.saved_bytes)
        beside = max(piece.backward_working_bytes for piece in self.layers)
        saved = max(piece.saved_bytes for piece in self.layers)
        head = self.others[-1]
        found.peak_bytes = resident_bytes + saved + beside
        found.head_bytes = resident_bytes + max(
            head.forward_working_bytes, head.saved_bytes + head.backward_working_bytes
        )
        return found

    def rule(self, resident_bytes: int) -> Rule | None:
        """As many blocks plain as fit beside these bytes; None where none fits."""
        trace, total = self.trace(resident_bytes), self.job.limit_bytes
        if peak_bytes(trace, self.costs, Rule(moves=True)) > total:
            return None
        stays = peak_bytes(trace, self.costs, Rule(moves=False)) <= total
        return fitting(trace, self.costs, total, moves=not stays)

    def host_bytes(self, split: Split) -> int:
        """A kind that waits there in part has a place there for all of it, but for gradients' window."""
        loads = self.loads
        weights = loads.weights if split.weights < loads.weights else 0
        state = loads.state if split.state < loads.state else 0
        return weights + state + (0 if split.gradients else loads.gradients)

    def recompute_s(self, rule: Rule) -> float:
        """Of all blocks that the rule recomputes."""
        return self.microbatches * sum(
            self.costs[piece.name].again_s
            for place, piece in enumerate(self.layers)
            if not rule.is_plain((0, 0), place)
        )

    def weights_at(
        self, limits: Sequence[int], longer: float = 1.0, rule: Rule | None = None
    ) -> list[tuple[float, int]]:
        """Seconds of a step that compute waits for weights within each limit, and their bytes, where blocks
        compute `longer` times as long. rule: the others are recomputed, which the link has more time beside;
        None: all are."""
        forward = [(place, piece.forward_s * longer) for place, piece in enumerate(self.layers)]
        backward = [
            (
                place,
                longer * (piece.backward_s + (0 if rule and rule.is_plain((0, 0), place) else again_s)),
            )
            for place, piece in enumerate(self.layers)
            for again_s in (self.costs[piece.name].again_s,)
        ]
        uses = [*forward, *reversed(backward)]
        compute_s = sum(seconds for _, seconds in uses)
        found = best_plans(uses, self.sizes, limits, self.rates.h2d_bytes_per_s)
        return [
            (max(0.0, took_s - compute_s) * self.microbatches, plan.device_bytes(self.sizes))
            for plan, took_s in found
        ]

    def plan_of(self, split: Split) -> SharedPlan | None:
        """What a step under this split takes; None where it does not fit."""
        nbytes = device_bytes(self.loads, split)
        if (rule := self.rule(nbytes)) is None:
            return None
        ((waits_s, _),) = self.weights_at([max(split.weights, self.loads.least_weights)], rule=rule)
        inputs = sum(piece.input_bytes for piece in self.layers) if rule.moves else 0
        kernels_s = sum(piece.trained for piece in self.pieces) / self.job.gpu.optimizer_rate
        return SharedPlan(
            loads=self.loads,
            split=split,
            plain=rule.num_plain,
            blocks=len(self.layers),
            moves=rule.moves,
            compute_s=self.compute_s,
            recompute_s=self.recompute_s(rule),
            waits_s=waits_s if split.weights < self.loads.weights else 0.0,
            optimizer_s=max(kernels_s, step_s(self.loads, split, self.both)),
            peak_bytes=round(peak_bytes(self.trace(nbytes), self.costs, rule)),
            host_bytes=self.host_bytes(split) + inputs,
        )


def plan_of_all_kinds(job: Job, stages: Sequence[Stage]) -> SharedPlan | int:
    """The split and the rule with the shortest step within the job's total; where nothing fits the device,
    the least bytes that would. Raises ValueError for more than one GPU, and where the host has too little."""
    work = _Work(job, stages)
    least_bytes = device_bytes(work.loads, least_of(work.loads))

    def recompute_s(more: int) -> float | None:
        rule = work.rule(least_bytes + more)
        return None if rule is None else work.recompute_s(rule)

    all_again_s = work.recompute_s(Rule())
    longer = 1.0
    if (again_s := recompute_s(0)) is not None:  # what weights_at takes as 1.0 recomputes every block
        longer = (work.blocks_s + again_s) / (work.blocks_s + all_again_s)
    found = shared(
        work.loads,
        least_of(work.loads),
        work.both,
        lambda limits, times: work.weights_at(limits, longer * times),
        recompute_s,
        work.blocks_s + (again_s or 0.0),
    )
    every = (
        plan for split in (all_of(work.loads), *(each for _, each in found)) if (plan := work.plan_of(split))
    )
    plans, least_host = list[SharedPlan](), inf
    for plan in every:
        least_host = min(least_host, plan.host_bytes)
        if job.host_bytes is None or plan.host_bytes <= job.host_bytes:
            plans.append(plan)
        if len(plans) > _TRIED:
            break
    if plans:
        return min(plans, key=lambda plan: (plan.step_s, plan.peak_bytes))
    if least_host < inf:
        raise ValueError(
            f"--host-gb is {(job.host_bytes or 0) / 1e9:g}, and the shares that fit the device pin at least "
            f"{least_host / 1e9:.1f} GB"
        )
    return round(peak_bytes(work.trace(least_bytes), work.costs, Rule(moves=True)))
