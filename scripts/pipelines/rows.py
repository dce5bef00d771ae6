"""Each kind of row, as one rank measures it: the link, steps with and without offload, equal gradients.

One invariant: a row starts from an empty device; what the one before held is given back first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from bench.gradients import deterministic, fingerprint
from bench.measure import median
from bench.ours import STAT_FIELDS
from bench.workload import GROUPS
from offload import OffloadConfig, PipelineOffloadManager, apply, configure
from offload.apply import Applied
from offload.policy.actions import Action
from offload.weights import choose
from parallel.host import line_up, reserve_host_together
from parallel.launch import Rank
from parallel.schedules import schedule_named
from pipelines.job import PipelineJob
from pipelines.machine import empty_device, machine_facts, rates_json
from pipelines.memory import BlockFacts
from pipelines.requests import LEAST_STREAMED_LAYERS, Request, RowRequest

_AUTO_WARMUP, _MOST_AUTO_WARMUP = 14, 44
"""Untimed steps of mode auto: two without a plan, then its plans, each searched for beside a few steps, and
what stays under each. From the first number on they end once all ranks are settled."""


class Bench:
    """One rank's side of every row.

    The request's facts are what `links` measured; without them only that row can run.
    """

    def __init__(self, request: Request, rank: Rank) -> None:
        self.request, self.rank = request, rank
        self.simulated = rank.device.type == "cpu"
        self.min_elements = 1 if request.shape.tiny else 1 << 20

    def measure(self, row: RowRequest) -> dict[str, Any]:
        """This rank's figures of one row."""
        empty_device(self.rank.device)
        kinds = {
            "links": self._links,
            "nothing": self._nothing,
            "ours": self._ours,
            "weights": self._weights,
            "auto": self._auto,
            "verify": self._verify,
        }
        return kinds[row.kind](row)

    def _links(self, row: RowRequest) -> dict[str, Any]:
        return machine_facts(self.request, self.rank, self.min_elements)

    # -- steps -----------------------------------------------------------------------------------------------
    def _nothing(self, row: RowRequest) -> dict[str, Any]:
        job = PipelineJob(self.request.shape, row.schedule, self._layers, self.rank)
        # nothing is planned and nothing trimmed: one step to warm up tells all
        return self._timed(job, warmup=min(1, self.request.shape.warmup))

    def _ours(self, row: RowRequest) -> dict[str, Any]:
        with self._offloading(row.schedule, GROUPS, device_limit_bytes=self._limit_bytes(row)) as job:
            return self._timed(job)

    def _weights(self, row: RowRequest) -> dict[str, Any]:
        with self._offloading(row.schedule, ()) as job, self._streaming(job) as handles:
            found = self._timed(job)
            return {**found, "weights": [handle.weights.as_dict() for handle in handles if handle.weights]}

    def _auto(self, row: RowRequest) -> dict[str, Any]:
        with self._offloading(row.schedule, ()) as job:
            handles = [
                apply(module.stack, mode="auto", device_total=f"{row.saved_limit_bytes}B")
                for module in job.modules.values()
            ]
            # the plan is made anew from what was measured under the one before
            found = self._timed(job, warmup=_AUTO_WARMUP, settles=lambda: handles[0].explain().is_final)
            explained = handles[0].explain()  # of all stages of the rank
            for handle in handles:
                handle.remove()
            return {
                **found,
                "explained": str(explained),
                "predicted_ms": None if explained.plan is None else explained.plan.predicted_step_s * 1e3,
            }

    def _timed(
        self, job: PipelineJob, warmup: int | None = None, settles: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """First step, warm-up and samples; what one rank saw of each. settles: whether this rank needs no
        more warm-up."""
        shape = self.request.shape
        first, _ = self._step(job)
        steps = 0
        while steps < (shape.warmup if warmup is None else warmup) or (
            settles is not None and steps < _MOST_AUTO_WARMUP and not self._all_say(settles())
        ):
            self._step(job)
            steps += 1
        timed = [self._step(job) for _ in range(shape.samples)]
        samples = [sample for sample, _ in timed]
        reserve = (
            {}
            if job.manager is None
            else {"reserve_bytes": self._reserved_bytes, "reserve_ms": self._reserve_ms}
        )
        return {
            "first_ms": first["wall_ms"],
            "warmup": steps,
            "walls_ms": [sample["wall_ms"] for sample in samples],
            "host_ms": median([sample["host_ms"] for sample in samples]),
            "active_bytes": max(sample["memory"]["active_peak"] for sample in samples),
            "reserved_bytes": max(sample["memory"]["reserved_peak"] for sample in samples),
            "first_active_bytes": first["memory"]["active_peak"],
            "engine": {
                name: median([float(sample["engine"][name]) for sample in samples])
                for name in first["engine"]
            },
            "actions": [list(action) for action, _ in timed[-1][1]],
            "action_ms": [
                median(column)
                for column in zip(*([ms for _, ms in actions] for _, actions in timed), strict=True)
            ],
            "live_microbatches": job.live_microbatches,
            "layers": self._layers,
            "rates": None if job.manager is None else rates_json(job.manager.engine.rates),
            "samples": samples,
            **reserve,
        }

    def _all_say(self, yes: bool) -> bool:
        """Whether every rank does."""
        answers: list[Any] = [None] * self.rank.ranks.world
        dist.all_gather_object(answers, yes, group=self.rank.group)
        return all(answers)

    def _step(self, job: PipelineJob) -> tuple[dict[str, Any], list[tuple[Action, float]]]:
        """One step from a drained device to a drained device, all ranks starting together: its cost, and what
        each action computed."""
        job.clear_gradients()
        job.clock.drain()
        job.clock.reset_peaks()
        line_up(self.rank.group)
        began = time.perf_counter()
        job.step()
        issued = time.perf_counter()
        job.clock.drain()
        ended = time.perf_counter()
        stats = None if job.manager is None else job.manager.stats
        cost = {
            "wall_ms": (ended - began) * 1e3,
            "host_ms": (issued - began) * 1e3,
            "memory": job.clock.memory(),
            "engine": {} if stats is None else {name: getattr(stats, name) for name in STAT_FIELDS},
        }
        return cost, job.announcer.take()

    # -- gradients -------------------------------------------------------------------------------------------
    def _verify(self, row: RowRequest) -> dict[str, Any]:
        """Every gradient of several steps with offload, beside those without: a model small enough for both,
        deterministic kernels."""
        shape = replace(self.request.shape, optimizer_bytes=0)
        virtual = schedule_named(row.schedule).default_virtual_stages
        layers = virtual * max(shape.verify_layers, LEAST_STREAMED_LAYERS if row.streamed else 0)
        with deterministic():
            job = PipelineJob(shape, row.schedule, layers, self.rank)
            expected, again = self._prints(job), self._prints(job)
            live_bytes = round(job.live_chunks * job.layers_of_chunk * self._movable_bytes(GROUPS))
            del job
            empty_device(self.rank.device)
            wrong, left = self._with_activations(row.schedule, layers, live_bytes // 2, expected)
            came: dict[str, int] = {}
            for kind in row.streamed:
                empty_device(self.rank.device)
                more, came[kind] = self._with_weights(row.schedule, layers, expected)
                wrong += [f"{kind}, {name}" for name in more]
        return {
            "tensors": len(expected),
            "steps": shape.verify_steps,
            "wrong": wrong[:20],
            "num_wrong": len(wrong),
            "left": left,
            "came": came,
            "repeatable": expected == again,
        }

    def _with_activations(
        self, schedule: str, layers: int, limit_bytes: int, expected: dict[str, int]
    ) -> tuple[list[str], int]:
        with self._offloading(schedule, GROUPS, layers=layers, device_limit_bytes=limit_bytes) as job:
            manager = job.manager
            return self._compared(job, expected, lambda: manager.stats.spilled)

    def _with_weights(self, schedule: str, layers: int, expected: dict[str, int]) -> tuple[list[str], int]:
        with (
            self._offloading(schedule, (), layers=layers) as job,
            self._streaming(job) as handles,
        ):
            figures = [handle.weights for handle in handles if handle.weights]
            return self._compared(job, expected, lambda: sum(each.in_bytes for each in figures))

    def _compared(
        self, job: PipelineJob, expected: dict[str, int], moved: Callable[[], int]
    ) -> tuple[list[str], int]:
        """Gradients of the steps that differ, and what moved in all. moved: in the last step."""
        wrong: list[str] = []
        total = 0
        for step in range(self.request.shape.verify_steps):
            found = self._prints(job)
            wrong += [f"step {step}: {name}" for name, value in expected.items() if found.get(name) != value]
            total += moved()
        return wrong, total

    def _prints(self, job: PipelineJob) -> dict[str, int]:
        job.clear_gradients()
        job.step()
        job.clock.drain()
        gradients = job.named_gradients()
        prints = torch.stack([fingerprint(gradient) for gradient in gradients.values()]).tolist()
        return dict(zip(gradients, prints, strict=True))

    # -- what rows share -------------------------------------------------------------------------------------
    @contextmanager
    def _offloading(
        self, schedule: str, groups: Sequence[str], *, layers: int | None = None, **settings: Any
    ) -> Iterator[PipelineJob]:
        """A job whose groups leave, with host memory pinned for all that is live at once. After an exception
        nothing is closed: whoever catches it ends the process."""
        shape, ranks = self.request.shape, self.rank.ranks
        given: dict[str, Any] = {
            "min_offloaded_tensor_size": self.min_elements,
            "host_limit_bytes": self.request.host_limit_bytes,
        }
        # no time passes there: only small caps make bytes leave, see scripts/training/options.py
        if self.simulated:
            window = self._block.saved_bytes // 8
            given |= {"max_spilling_bytes": window, "max_restoring_bytes": window, "piece_bytes": window // 4}
        manager = self._manager(OffloadConfig(**(given | settings), pp_rank=ranks.rank))
        job = PipelineJob(
            shape,
            schedule,
            self._layers if layers is None else layers,
            self.rank,
            manager=manager,
            groups=groups,
        )
        self._reserve(job, groups)
        yield job
        for module in job.modules.values():
            module.stack.mark(None, ())
        PipelineOffloadManager.close_instance()

    @contextmanager
    def _streaming(self, job: PipelineJob) -> Iterator[list[Applied]]:
        """Half of the weights of each stage's blocks are on the device at most. One handle a stage."""
        with patch.object(choose, "LEAST_NUMEL", self.min_elements):  # what is tiny streams, too
            handles = []
            for module in job.modules.values():
                parameters = [*module.stack.blocks.parameters()]
                nbytes = sum(each.nbytes for each in parameters if each.numel() >= self.min_elements)
                handles.append(apply(module.stack, weights=f"{nbytes // 2}B", gradients="device"))
        yield handles
        for handle in handles:
            handle.remove()

    def _manager(self, config: OffloadConfig) -> PipelineOffloadManager:
        device = "sim" if self.simulated else str(self.rank.device)
        return configure(config, device=device, store=self.rank.store, print_summary=False)

    def _reserve(self, job: PipelineJob, groups: Sequence[str]) -> None:
        """Pin what is live at once, since the first step sends everything; each rank its share where the host
        has less."""
        wanted = job.live_chunks * job.layers_of_chunk * self._movable_bytes(groups)
        everybody: list[Any] = [None] * self.rank.ranks.world
        dist.all_gather_object(everybody, wanted, group=self.rank.group)
        assert job.manager is not None
        # each rank pins whole registrations
        rounding = len(everybody) * job.manager.engine.arena.registration_bytes
        share = min(1.0, max(0, self.request.host_limit_bytes - rounding) / max(1, sum(everybody)))
        reserved = int(wanted * share)
        began = time.perf_counter()
        reserve_host_together(job.manager, reserved, self.rank.group)
        self._reserved_bytes, self._reserve_ms = reserved, (time.perf_counter() - began) * 1e3

    def _movable_bytes(self, groups: Sequence[str]) -> int:
        return sum(self._block.groups[name]["movable_bytes"] for name in groups)

    def _limit_bytes(self, row: RowRequest) -> int:
        if row.saved_limit_bytes is None:
            raise ValueError(f"{row.label} has no limit in bytes: shares are turned into bytes first")
        return row.saved_limit_bytes

    @property
    def _block(self) -> BlockFacts:
        assert self.request.facts is not None
        return BlockFacts(**self.request.facts["block"])

    @property
    def _layers(self) -> int:
        layers = self.request.shape.layers
        assert layers is not None, "derived before the first row that needs it"
        return layers
