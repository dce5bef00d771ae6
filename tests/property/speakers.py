"""How a random program speaks to the engine: not at all, or by marks, announcements and switches of a manager
of its own.

One invariant: `Offloaded` changes no value: what it returns in place of a tensor has the tensor's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import offload
from offload import OffloadConfig, OffloadEngine, PipelineOffloadManager
from offload.device.sim import ExecutorName, SimDevice, SimGraph
from offload.policy.actions import Rates
from tests.property.disk_steps import DiskMode, step_disk
from tests.property.layers import KEEP_OPS, NBYTES, ActionKey
from tests.property.watch import Watch


class Tick(torch.autograd.Function):
    """An identity whose backward takes virtual time."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: SimDevice, seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, seconds
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.device.compute_for(ctx.seconds)
        return grads[0], None, None


class Plain:
    """Says nothing to anybody."""

    def begin(self, stage: int, microbatch: int) -> None: ...
    def end_forward(self, stage: int, microbatch: int) -> None: ...
    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None: ...
    def end_backward(self, stage: int, microbatch: int, kind: str) -> None: ...
    def received(self, tensor: Tensor) -> None: ...
    def foretell(self, actions: tuple[ActionKey, ...] | None) -> None: ...
    def say(self, what: str) -> None: ...
    def between(self) -> None: ...
    def step_end(self) -> None: ...

    def computed(self, tensor: Tensor) -> Tensor:
        return tensor

    def start(self, tensor: Tensor, name: str) -> Tensor:
        return tensor

    def commit(self, tensor: Tensor, name: str, delay: bool) -> Tensor:
        return tensor

    def hooks(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def region(self, body: Callable[..., Tensor], *values: Any) -> Tensor:
        return checkpoint(body, *values, use_reentrant=False)

    def lane_of(self, microbatch: int) -> int:
        return 0

    def lane(self, microbatch: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def captures(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def capture(self) -> AbstractContextManager[Any]:
        return nullcontext()


@dataclass(frozen=True)
class Settings:
    """One engine, its device and how it is driven."""

    executor: ExecutorName = "late"
    seed: int = 0
    gb_s: float = 50.0
    compute_s: float = 1e-8  # announced an operation
    lanes: int = 1
    announced: bool = True
    # of the link as it was measured: with a device limit, plans are timed and tried
    rates: Rates | None = None
    config: OffloadConfig = field(default_factory=OffloadConfig)
    # how the disk's jobs run, where the config has one; None: on its threads
    disk: DiskMode | None = None


class Offloaded(Plain):
    """Marks groups and announces chunks to a manager of its own, which is the process-wide one until
    `close`."""

    def __init__(self, settings: Settings, stages: int) -> None:
        self.settings = settings
        self.device = SimDevice(
            executor=settings.executor, seed=settings.seed, d2h_gb_s=settings.gb_s, h2d_gb_s=settings.gb_s
        )
        self.engine = OffloadEngine(settings.config, device=self.device)
        self.engine.rates = settings.rates
        if settings.disk is not None:
            step_disk(self.engine, settings.disk, settings.seed)
        self.manager = PipelineOffloadManager(self.engine, print_summary=False)
        self.watch = Watch(self.engine, declare=settings.lanes > 1)
        self.stages = stages
        self.lanes = [
            self.device.compute,
            *(self.device.new_compute_lane(f"lane {i}") for i in range(1, settings.lanes)),
        ]

    def begin(self, stage: int, microbatch: int) -> None:
        if self.settings.announced:
            self.manager.begin_chunk(stage, microbatch)
        else:
            self.manager.init_model_chunk_offload_handler(
                self.stages, stage, self.settings.config.min_offloaded_tensor_size
            )

    def end_forward(self, stage: int, microbatch: int) -> None:
        if self.settings.announced:
            self.manager.end_forward(stage, microbatch)

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        if self.settings.announced:
            self.manager.begin_backward(stage, microbatch, kind)

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        if self.settings.announced:
            self.manager.end_backward(stage, microbatch, kind)

    def received(self, tensor: Tensor) -> None:
        self.manager.register_external(tensor)

    def computed(self, tensor: Tensor) -> Tensor:
        self.device.compute_for(self.settings.compute_s)
        return Tick.apply(tensor, self.device, 2 * self.settings.compute_s)

    def foretell(self, actions: tuple[ActionKey, ...] | None) -> None:
        self.manager.set_order(actions)

    def say(self, what: str) -> None:
        {"on": offload.enable_offload, "off": offload.disable_offload, "flush": offload.flush_delayed_groups}[
            what
        ]()

    def between(self) -> None:
        self.watch.check_counts()

    def step_end(self) -> None:
        for lane in self.lanes[1:]:
            self.device.wait(self.lanes[0], self.device.record(lane), "step")
        self.manager.step_end()
        self.watch.check_step_end(self.manager.stats)

    def start(self, tensor: Tensor, name: str) -> Tensor:
        return offload.group_start(tensor, name)

    def commit(self, tensor: Tensor, name: str, delay: bool) -> Tensor:
        return offload.group_commit(tensor, name, delay_offload=delay)

    def hooks(self) -> AbstractContextManager[Any]:
        return offload.offload_hooks()

    def region(self, body: Callable[..., Tensor], *values: Any) -> Tensor:
        return checkpoint(body, *values, use_reentrant=False, context_fn=offload.selective_contexts(KEEP_OPS))

    def lane_of(self, microbatch: int) -> int:
        return microbatch % len(self.lanes)

    def lane(self, microbatch: int) -> AbstractContextManager[Any]:
        return self.device.use_lane(self.lanes[self.lane_of(microbatch)])

    @contextmanager
    def captures(self) -> Iterator[None]:
        """What is captured inside is replayed three times, and its host blocks are given back. Host memory is
        there if the limit allows."""
        self.engine.arena.reserve_later(self.engine.arena.lent_bytes + 64 * NBYTES)
        with offload.capturing() as region:
            self.graphs: list[SimGraph] = []
            yield
        for _ in range(3):
            for graph in self.graphs:
                graph.replay()
        self.watch.seen.update(replayed=region.replays)
        region.release()

    @contextmanager
    def capture(self) -> Iterator[None]:
        with self.device.capture() as graph:
            yield
        self.graphs.append(graph)

    def __enter__(self) -> Offloaded:
        PipelineOffloadManager.reset_instance(self.manager)
        return self

    def __exit__(self, failure: object, *rest: object) -> None:
        PipelineOffloadManager.OFFLOAD_MGR = None
        if failure is None:
            self.manager.close()
            assert self.engine.arena.held_bytes == 0
