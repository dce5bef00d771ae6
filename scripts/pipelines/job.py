"""One rank's part of a pipeline of blocks: its stages, its schedule, one step of it, and how long each action
computed.

The blocks are those of `bench_stage.py`, the schedules torch's own through `parallel/`. One invariant: two
jobs of one shape and schedule hold the same weights and do the same calculation, whatever is offloaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import Clock
from bench.ours import OurMarks
from bench.workload import Stack, StackShape
from offload.policy.actions import Action
from parallel.launch import Rank
from parallel.order import actions_of, peak_chunks
from parallel.schedules import build_schedule, schedule_named, stages_of
from parallel.stage import OffloadPipelineStage
from pipelines.requests import JobShape

VOCABULARY = 4096
LOSS_SCALE = 1e-3


class BlockStage(nn.Module):
    """The blocks of one virtual stage; on the first one behind an embedding."""

    def __init__(self, shape: StackShape, stage: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = (
            nn.Embedding(VOCABULARY, shape.hidden, device=device, dtype=dtype) if stage == 0 else None
        )
        self.stack = Stack(shape, device, dtype, seed=1234 + stage)
        if self.embedding is not None:
            with torch.no_grad():
                self.embedding.weight.normal_(
                    0.0, 1.0, generator=torch.Generator(device=device).manual_seed(99)
                )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stack(x if self.embedding is None else self.embedding(x))
        return y


class ActionClock:
    """Times each action on the compute lane, and passes what the stages announce on to the engine, if there
    is one."""

    def __init__(self, clock: Clock, inner: Any) -> None:
        self._clock, self._inner = clock, inner
        self._open: Any = None
        self._timed: list[tuple[Action, Any, Any]] = []

    def begin_chunk(self, stage: int, microbatch: int) -> None:
        if self._inner is not None:
            self._inner.begin_chunk(stage, microbatch)
        self._open = self._clock.mark()

    def end_forward(self, stage: int, microbatch: int) -> None:
        self._timed.append((("F", stage, microbatch), self._open, self._clock.mark()))
        if self._inner is not None:
            self._inner.end_forward(stage, microbatch)

    def begin_backward(self, stage: int, microbatch: int, kind: str) -> None:
        if self._inner is not None:
            self._inner.begin_backward(stage, microbatch, kind)
        self._open = self._clock.mark()

    def end_backward(self, stage: int, microbatch: int, kind: str) -> None:
        name: Any = kind
        self._timed.append(((name, stage, microbatch), self._open, self._clock.mark()))
        if self._inner is not None:
            self._inner.end_backward(stage, microbatch, kind)

    def register_external(self, tensor: Tensor) -> None:
        if self._inner is not None:
            self._inner.register_external(tensor)

    def take(self) -> list[tuple[Action, float]]:
        """The actions since the last call, each with its milliseconds, stalls included; the device must be
        drained."""
        timed, self._timed = self._timed, []
        return [(action, self._clock.ms(start, end)) for action, start, end in timed]


class PipelineJob:
    """Stages, schedule and inputs of one rank.

    layers: of this rank. manager: the engine's, or None for nothing offloaded. groups: which marks are set.
    """

    def __init__(
        self,
        shape: JobShape,
        schedule: str,
        layers: int,
        rank: Rank,
        *,
        manager: Any = None,
        groups: Sequence[str] = (),
    ) -> None:
        self.shape, self.rank, self.manager = shape, rank, manager
        self.device = rank.device
        self.clock = Clock(self.device)
        self.announcer = ActionClock(self.clock, manager)
        dtype = torch.float32 if shape.tiny else torch.bfloat16
        spec = schedule_named(schedule)
        virtual = spec.default_virtual_stages
        if layers % virtual:
            raise ValueError(
                f"{layers} layers cannot be cut into the {virtual} virtual stages of a rank under "
                f"{schedule}; give a multiple"
            )
        self.layers_of_chunk = layers // virtual
        stack = shape.stack(self.layers_of_chunk)
        num_stages = rank.ranks.world * virtual
        indices = stages_of(spec, rank=rank.ranks.rank, ranks=rank.ranks.world, virtual_stages=virtual)
        self.modules = {index: BlockStage(stack, index, self.device, dtype) for index in indices}
        self.is_first, self.is_last = 0 in indices, num_stages - 1 in indices
        self.parameters = [parameter for module in self.modules.values() for parameter in module.parameters()]
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        # no reader: it only takes the room that an optimizer's state would
        self.optimizer_state = [
            torch.empty(parameter.numel() * shape.optimizer_bytes, dtype=torch.uint8, device=self.device)
            for parameter in self.parameters
        ]
        if manager is not None:
            for module in self.modules.values():
                manager.register_parameters(module)
                module.stack.mark(OurMarks(), groups)
        self.stages = [self._stage(index, num_stages, stack, dtype) for index in indices]
        self.schedule = build_schedule(spec, self.stages, microbatches=shape.microbatches, loss_fn=_loss)
        self.actions = actions_of(self.schedule, rank.ranks.rank)
        self.live_chunks = peak_chunks(self.actions)
        if manager is not None:
            manager.set_order(self.actions)
        self.tokens = torch.randint(
            VOCABULARY,
            (shape.microbatches, shape.sequence),
            device=self.device,
            generator=torch.Generator(self.device).manual_seed(7),
        )
        # one for all microbatches: their inputs differ, so a mix-up still shows
        target = torch.randn(
            (1, shape.sequence, stack.hidden),
            device=self.device,
            dtype=dtype,
            generator=torch.Generator(self.device).manual_seed(8),
        )
        self.target = target.mul_(LOSS_SCALE).expand(shape.microbatches, -1, -1)

    @property
    def live_microbatches(self) -> float:
        """Whole microbatches of this rank's layers whose activations exist at once."""
        return self.live_chunks / len(self.stages)

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()

    def step(self) -> None:
        """Issue one step. May block in torch's schedule as any step would; nothing here waits."""
        self.schedule.step(
            *([self.tokens] if self.is_first else []),
            target=self.target if self.is_last else None,
            return_outputs=False,
        )
        if self.manager is not None:
            self.manager.step_end()

    def named_gradients(self) -> dict[str, Tensor]:
        return {
            f"stage {index} {name}": parameter.grad
            for index, module in self.modules.items()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }

    def _stage(
        self, index: int, num_stages: int, stack: StackShape, dtype: torch.dtype
    ) -> OffloadPipelineStage:
        hidden = torch.empty(1, stack.sequence, stack.hidden, dtype=dtype, device="meta", requires_grad=True)
        tokens = torch.empty(1, stack.sequence, dtype=torch.int64, device="meta")
        return OffloadPipelineStage(
            self.modules[index],
            index,
            num_stages,
            self.device,
            input_args=tokens if index == 0 else hidden,
            output_args=hidden,
            announcer=self.announcer,
            group=self.rank.group,
        )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    """Its gradient is the target: what a next stage would send."""
    return torch.sum(output * target, dtype=torch.float32)
