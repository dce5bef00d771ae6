"""The job of one rank: its stages, its schedule, its optimizer, and one step of them.

One invariant: every rank makes the same calls in the same order; a rank that cannot go on raises, and the
launcher ends the others.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from offload import HybridDeviceOptimizer, configure
from parallel.host import reserve_host_together
from parallel.launch import Rank
from parallel.order import actions_of, peak_chunks
from parallel.schedules import build_schedule, stages_of
from parallel.stage import OffloadPipelineStage
from parallel.transformer import build_stage_module, stage_examples
from training.options import Options, fraction_without_room
from training.text import Text

__all__ = ["Job", "RankFigures", "VerificationError"]


class VerificationError(RuntimeError):
    """A gradient is not, bit for bit, what it is without offload."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What one rank says about one step."""

    loss: float
    """Mean over the microbatches; nan on ranks without the last stage."""
    seconds: float
    active_bytes: int | None
    """Peak of the device's allocated memory since the start; None on a CPU."""
    reserved_bytes: int | None
    engine: dict[str, Any]
    """The engine's StepStats."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """Where the optimizer's state is, if some of it is on the host."""


class Job:
    """Everything one rank holds between steps."""

    def __init__(self, options: Options, rank: Rank, text: Text) -> None:
        self.options, self.rank, self.text = options, rank, text
        _check_same_text(text, rank)
        spec, ranks = options.schedule, rank.ranks
        self.num_stages = ranks.world * options.virtual_stages
        indices = stages_of(spec, rank=ranks.rank, ranks=ranks.world, virtual_stages=options.virtual_stages)
        self.modules = {
            index: build_stage_module(
                options.model, index, self.num_stages, device=rank.device, dtype=options.dtype
            )
            for index in indices
        }
        limits = options.offload_config(rank=ranks.rank, simulated=rank.device.type == "cpu")
        self.manager = configure(
            limits,
            device="sim" if rank.device.type == "cpu" else str(rank.device),
            store=rank.store,
            print_summary=False,
        )
        for module in self.modules.values():
            self.manager.register_parameters(module)
        self.stages = [self._stage(index, module) for index, module in self.modules.items()]
        self.schedule = build_schedule(spec, self.stages, microbatches=options.microbatches, loss_fn=_loss)
        self.actions = actions_of(self.schedule, ranks.rank)
        self.manager.set_order(self.actions)
        self.optimizer = self._new_optimizer()
        self._initial = (
            [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]
            if options.compare
            else []
        )

    def reserve_host(self) -> None:
        """Pin about what the steps will lend at once, so that the first of them finds its blocks; all ranks
        measure the link together."""
        layers = max(len(module.blocks) for module in self.modules.values())
        expected = int(
            peak_chunks(self.actions) * layers * self.options.saved_bytes_of_layer * self.options.fraction
        )
        reserve_host_together(self.manager, min(expected, _most_reserved(self.rank)), self.rank.group)

    def start_again(self) -> None:
        """Put parameters, optimizer and peaks back to where the run began, for the second arm of a
        comparison."""
        self._close_optimizer()
        with torch.no_grad():
            for parameter, initial in zip(self._parameters(), self._initial, strict=True):
                parameter.copy_(initial)
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer = self._new_optimizer()
        if self.rank.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.rank.device)

    def train(self, step: int) -> RankFigures:
        """One step of training; with --verify its gradients are made twice and compared first."""
        batch = self._batch(step)
        expected = self._without_offload(batch) if self.options.verify else None
        started = time.perf_counter()
        loss = self._forward_backward(batch)
        if expected is not None:
            self._compare(step, expected, loss)
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (step + 1) / self.options.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        active, reserved = self._device_memory()
        return RankFigures(
            loss=loss,
            seconds=time.perf_counter() - started,
            active_bytes=active,
            reserved_bytes=reserved,
            engine=self.manager.stats.to_json(),
            optimizer=self._optimizer_figures(),
        )

    def evaluate(self) -> float:
        """The mean loss on held-out text; nan on ranks without the last stage."""
        batch = self.text.held_out_batch(
            self.options.batch * self.options.microbatches, self.options.model.sequence
        )
        return self._run(self.schedule.eval, batch)

    def saved_bytes_if_all_stayed(self) -> int:
        """The peak of what the marks save when nothing may leave: one more step, whose gradients are thrown
        away."""
        limits = self.manager.engine.limits
        usual, limits.max_spilling_bytes = limits.max_spilling_bytes, 0
        self._forward_backward(self._batch(0))
        limits.max_spilling_bytes = usual
        self.optimizer.zero_grad(set_to_none=True)
        return int(self.manager.stats.device_bytes_peak)

    def gathered(self, mine: Any) -> list[Any]:
        """What each rank gives, on rank 0; elsewhere nothing. Blocks until all have given it."""
        first = self.rank.ranks.rank == 0
        everything: list[Any] | None = [None] * self.rank.ranks.world if first else None
        dist.gather_object(mine, everything, group=self.rank.group, group_dst=0)
        return everything or []

    # ---- inside a step ----

    def _forward_backward(self, batch: tuple[Tensor, Tensor]) -> float:
        loss = self._run(self.schedule.step, batch)
        self.manager.step_end()
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)
        return loss

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        options = self.options
        return self.text.batch(
            options.batch * options.microbatches, options.model.sequence, seed=options.seed, step=step
        )

    def _run(self, run: Any, batch: tuple[Tensor, Tensor]) -> float:
        tokens, targets = (part.to(self.rank.device) for part in batch)
        first, last = 0 in self.modules, self.num_stages - 1 in self.modules
        losses: list[Tensor] = []
        run(
            *([tokens] if first else []),
            target=targets if last else None,
            losses=losses if last else None,
            return_outputs=False,
        )
        return torch.stack([loss.detach().double() for loss in losses]).mean().item() if losses else math.nan

    def _without_offload(self, batch: tuple[Tensor, Tensor]) -> tuple[float, list[Tensor | None]]:
        self.manager.disable_offload()
        loss = self._forward_backward(batch)
        self.manager.enable_offload()
        grads = [parameter.grad for parameter in self._parameters()]
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grads

    def _compare(self, step: int, expected: tuple[float, list[Tensor | None]], loss: float) -> None:
        loss_off, grads_off = expected
        if loss != loss_off and not (math.isnan(loss) and math.isnan(loss_off)):
            raise VerificationError(
                f"step {step}: the loss is {loss!r} with offload and {loss_off!r} without"
            )
        for (name, parameter), off in zip(self._named_parameters(), grads_off, strict=True):
            on = parameter.grad
            if on is None or off is None:
                if on is not off:
                    raise VerificationError(
                        f"step {step}: {name} has a gradient only {'without' if on is None else 'with'} "
                        "offload"
                    )
            elif not torch.equal(_bits(on), _bits(off)):
                wrong = int((on != off).sum())
                raise VerificationError(
                    f"step {step}: the gradient of {name} differs with offload in {wrong:,} of "
                    f"{on.numel():,} elements"
                )

    def _device_memory(self) -> tuple[int | None, int | None]:
        if self.rank.device.type != "cuda":
            return None, None
        stats = torch.cuda.memory_stats(self.rank.device)
        return stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    # ---- what it is built of ----

    def _stage(self, index: int, module: nn.Module) -> OffloadPipelineStage:
        options = self.options
        inputs, outputs = stage_examples(
            options.model,
            index,
            self.num_stages,
            batch=options.batch,
            sequence=options.model.sequence,
            dtype=options.dtype,
        )
        return OffloadPipelineStage(
            module,
            index,
            self.num_stages,
            self.rank.device,
            input_args=inputs,
            output_args=outputs,
            announcer=self.manager,
            group=self.rank.group,
        )

    def _new_optimizer(self) -> torch.optim.Optimizer:
        recipe: dict[str, Any] = {"lr": self.options.lr, "betas": (0.9, 0.95), "weight_decay": 0.1}
        asked = self.options.optimizer_fraction
        if asked is None:
            return torch.optim.AdamW(self._parameters(), **recipe)
        return HybridDeviceOptimizer(
            self._parameters(),
            self._fraction_without_room() if asked == "auto" else asked,
            param_update_in_fp32=self.options.dtype is not torch.float32,
            engine=self.manager.engine,
            overlap="forward",
            model=nn.ModuleList(self.modules.values()),
            **recipe,
        )

    def _fraction_without_room(self) -> float:
        """Of the optimizer's state, given what the marks save if all of it stays. All of it where the device
        has no memory of its own."""
        if self.rank.device.type != "cuda":
            return 1.0
        numel = sum(parameter.numel() for parameter in self._parameters())
        masters = self.options.dtype is not torch.float32
        layers = max(len(module.blocks) for module in self.modules.values())
        saved = peak_chunks(self.actions) * layers * self.options.saved_bytes_of_layer
        limit = self.options.device_limit_bytes
        return fraction_without_room(
            state_bytes=(12 if masters else 8) * numel,
            other_bytes=2 * self.options.dtype.itemsize * numel
            + (saved if limit is None else min(saved, limit)),
            device_bytes=torch.cuda.get_device_properties(self.rank.device).total_memory,
        )

    def _close_optimizer(self) -> None:
        if isinstance(self.optimizer, HybridDeviceOptimizer):
            self.optimizer.close()

    def _optimizer_figures(self) -> dict[str, Any]:
        optimizer = self.optimizer
        if not isinstance(optimizer, HybridDeviceOptimizer):
            return {}
        return {
            "fraction": optimizer.offload_fraction,
            "cpu_share": optimizer.cpu_share,
            "host_bytes": optimizer.host_bytes,
        }

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named_parameters()]

    def _named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [
            (f"stage {index}'s {name}", parameter)
            for index, module in self.modules.items()
            for name, parameter in module.named_parameters()
        ]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _bits(tensor: Tensor) -> Tensor:
    """What is compared: bytes, so that even two nans must be the same one."""
    return tensor.contiguous().view(torch.uint8)


def _most_reserved(rank: Rank) -> int:
    """Bytes: this rank's share of 40% of the host's memory. Beyond it the engine grows as it goes, or leaves
    tensors where they are."""
    return int(0.4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / rank.ranks.local_world)


def _check_same_text(text: Text, rank: Rank) -> None:
    """The first stage reads the inputs and the last the targets: both from their own host's files."""
    fingerprints: list[Any] = [None] * rank.ranks.world
    dist.all_gather_object(fingerprints, text.fingerprint, group=rank.group)
    if len(set(fingerprints)) > 1:
        raise ValueError(
            f"the ranks read different text ({', '.join(map(str, fingerprints))}); give all of them the same "
            "files with --data"
        )
