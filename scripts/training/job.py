"""The job of one rank: its stages, its schedule, its optimizer, and one step of them.

One invariant: every rank makes the same calls in the same order; a rank that cannot go on raises, and the
launcher ends the others.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from moe import names_of_this_rank
from offload import Applied, HybridDeviceOptimizer, Report, Trace, apply, configure, report, tracing
from parallel.host import reserve_host_together
from parallel.launch import Rank
from parallel.order import actions_of, peak_chunks
from parallel.schedules import build_schedule, stages_of
from parallel.stage import OffloadPipelineStage
from training.figures import EndCheck, RankFigures
from training.options import Options, fraction_without_room
from training.text import Text

__all__ = ["Job", "VerificationError"]


class VerificationError(RuntimeError):
    """A gradient is not, bit for bit, what it is without offload."""


class Job:
    """Everything one rank holds between steps."""

    def __init__(self, options: Options, rank: Rank, text: Text) -> None:
        self.options, self.rank, self.text = options, rank, text
        _check_same_text(text, rank)
        spec = options.schedule
        place, pipeline = dist.get_rank(rank.group), dist.get_world_size(rank.group)
        self.num_stages = pipeline * options.virtual_stages
        indices = stages_of(spec, rank=place, ranks=pipeline, virtual_stages=options.virtual_stages)
        self.modules = {
            index: options.model.build(
                index, self.num_stages, device=rank.device, dtype=options.dtype, experts=rank.experts
            )
            for index in indices
        }
        limits = options.offload_config(rank=place, simulated=rank.device.type == "cpu")
        self.manager = configure(
            limits,
            device="sim" if rank.device.type == "cpu" else str(rank.device),
            store=rank.store,
            print_summary=False,
        )
        for module in self.modules.values():
            self.manager.register_parameters(module)
        if options.marks is not None:
            high, low = (None if mark is None else f"{mark}B" for mark in options.marks)
            for module in self.modules.values():
                apply(module, mode="watermark", high=high, low=low, min_numel=options.min_elements)
        self.stages = [self._stage(index, module) for index, module in self.modules.items()]
        self.schedule = build_schedule(spec, self.stages, microbatches=options.microbatches, loss_fn=_loss)
        self.actions = actions_of(self.schedule, place)
        self.manager.set_order(self.actions)
        self.optimizer = self._new_optimizer()
        self._streams: list[Applied] = []
        """The handle of each stage, while its weights stream."""
        self._is_planned = False
        """Mode auto has been applied."""
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        """While mode auto's hooks are off: each module's dictionaries of hooks, and what was in them."""
        self.switch(not options.compare)
        self.trace: Trace | None = None
        """Of a step that was asked to be traced."""
        self.report: Report | None = None
        """The engine's, when the last step had been made or its check began."""
        self._initial = (
            [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]
            if options.compare
            else []
        )

    def reserve_host(self) -> None:
        """Pin about what the steps will lend at once, so that the first of them finds its blocks; all ranks
        measure the link together."""
        layers = max(len(module.blocks) for module in self.modules.values())
        expected = int(peak_chunks(self.actions) * layers * self.options.saved_bytes_of_layer)
        reserve_host_together(self.manager, min(expected, _most_reserved(self.rank)), self.rank.everyone)

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

    def train(self, step: int, *, trace: bool = False, check: int = 0) -> tuple[RankFigures, EndCheck | None]:
        """One step of training; with --verify its gradients are made twice and compared first.

        trace: record its forward and backward. check: make them so many times more without offload and with
            it, by turns, and compare all gradients, before the optimizer takes them.
        """
        batch = self._batch(step)
        expected = None
        if self.options.verify:
            expected = self._gradients(batch, offloads=False)
            self.switch(True)
        started = time.perf_counter()
        with tracing() if trace else nullcontext() as recorded:
            loss = self._forward_backward(batch)
        seconds = time.perf_counter() - started
        self.trace = recorded if recorded is not None else self.trace
        figures = self.manager.stats.to_json()
        if expected is not None:
            self._compare(step, expected, (loss, self._grads()))
        checked = self._check(step, batch, check) if check else None
        return self._figures(loss, seconds + self._update(step), figures), checked

    def train_arms(self, step: int, arms: Sequence[bool]) -> list[RankFigures]:
        """One step of training whose forward and backward are made in each arm, one after the other.

        arms: in order, whether offload is on. The optimizer steps once; its time is part of each arm's.
        """
        batch = self._batch(step)
        made = []
        for offloads in arms:
            self.optimizer.zero_grad(set_to_none=True)
            self.switch(offloads)
            started = time.perf_counter()
            loss = self._forward_backward(batch)
            made.append((loss, time.perf_counter() - started, self.manager.stats.to_json()))
        update_s = self._update(step)
        return [self._figures(loss, seconds + update_s, figures) for loss, seconds, figures in made]

    def take_report(self) -> None:
        """The engine's report of all ranks, unless it was taken before. Blocks until all ranks call."""
        if self.report is None:
            self.report = report(gather=True, process_group=self.rank.everyone)

    def gathered(self, mine: Any) -> list[Any]:
        """What each rank gives, on rank 0; elsewhere nothing. Blocks until all have given it."""
        first = self.rank.ranks.rank == 0
        everything: list[Any] | None = [None] * self.rank.ranks.world if first else None
        dist.gather_object(mine, everything, group=self.rank.everyone, group_dst=0)
        return everything or []

    # ---- inside a step ----

    def _forward_backward(self, batch: tuple[Tensor, Tensor]) -> float:
        loss = self._run(self.schedule.step, batch)
        self.manager.step_end()
        self._average_gradients()
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)
        return loss

    def _average_gradients(self) -> None:
        """Of all weights but the experts', whose gradients are those of all ranks' tokens already."""
        group = self.rank.experts
        if group is None:
            return
        for module in self.modules.values():
            own = set(names_of_this_rank(module))
            for name, parameter in module.named_parameters():
                if name not in own and parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= group.size()

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        options = self.options
        batch = self.text.batch(self._sequences, options.model.sequence, seed=options.seed, step=step)
        return self._mine(batch)

    @property
    def _sequences(self) -> int:
        """Of a step, on all ranks."""
        return self.options.batch * self.options.microbatches * self.options.expert_parallel

    def _mine(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Of a batch, the sequences of this rank's pipeline: ranks that share experts have tokens of their
        own."""
        group = self.rank.experts
        if group is None:
            return batch
        tokens, targets = (part.chunk(group.size())[group.rank()] for part in batch)
        return tokens, targets

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

    def switch(self, offloads: bool) -> None:
        """Turn offload on or off. Without it all weights are on the device, and no block is recomputed: while
        only the manager is off, mode auto recomputes them all."""
        (self.manager.enable_offload if offloads else self.manager.disable_offload)()
        if not offloads:
            while self._streams:
                self._streams.pop().remove()
            if self._is_planned and not self._hooks:
                self._hooks = [pair for module in self.modules.values() for pair in _take_hooks(module)]
            return
        while self._hooks:
            hooks, kept = self._hooks.pop()
            hooks.update(kept)
        if self.options.auto and not self._is_planned:
            total = self.options.device_total_bytes
            for module in self.modules.values():
                # named: a stage of one layer has no neighbours to find it by
                apply(
                    module,
                    mode="auto",
                    blocks="blocks.*",
                    device_total=None if total is None else f"{total}B",
                    min_numel=self.options.min_elements,
                )
            self._is_planned = True
        if self.options.weights is not None and not self._streams:
            asked, stages = self.options.weights, len(self.modules)
            size = asked if asked == "host" else f"{int(float(asked) * 1e9 / stages)}B"
            self._streams = [
                apply(module, weights=size, blocks="blocks.*") for module in self.modules.values()
            ]

    def _update(self, step: int) -> float:
        """The optimizer's part of a step; its seconds."""
        started = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.lr * min(1.0, (step + 1) / self.options.warmup)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started

    def _figures(self, loss: float, seconds: float, engine: dict[str, Any]) -> RankFigures:
        active, reserved = self._device_memory()
        return RankFigures(
            loss=loss,
            seconds=seconds,
            active_bytes=active,
            reserved_bytes=reserved,
            engine=engine,
            optimizer=self._optimizer_figures(),
        )

    def _grads(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self._parameters()]

    def _gradients(
        self, batch: tuple[Tensor, Tensor], *, offloads: bool
    ) -> tuple[float, list[Tensor | None]]:
        """Loss and gradients of one arm, which are taken off the parameters."""
        self.switch(offloads)
        loss = self._forward_backward(batch)
        grads = self._grads()
        self.optimizer.zero_grad(set_to_none=True)
        return loss, grads

    def _check(self, step: int, batch: tuple[Tensor, Tensor], pairs: int) -> EndCheck:
        """The forward and backward of a step that was made, again: pairs of arms that take turns at going
        first. The gradients of the parameters are put back."""
        self.take_report()
        kept = self._grads()
        self.optimizer.zero_grad(set_to_none=True)
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(pairs):
            made = {}
            for offloads in (False, True) if pair % 2 == 0 else (True, False):
                started = time.perf_counter()
                made[offloads] = self._gradients(batch, offloads=offloads)
                seconds[offloads].append(time.perf_counter() - started)
            self._compare(step, made[False], made[True])
        self.switch(True)
        for parameter, grad in zip(self._parameters(), kept, strict=True):
            parameter.grad = grad
        return EndCheck(gradients=len(kept), off_seconds=seconds[False], on_seconds=seconds[True])

    def _compare(
        self, step: int, off: tuple[float, list[Tensor | None]], on: tuple[float, list[Tensor | None]]
    ) -> None:
        """Raise VerificationError unless losses and gradients have the same bits."""
        (loss_off, grads_off), (loss, grads_on) = off, on
        if loss != loss_off and not (math.isnan(loss) and math.isnan(loss_off)):
            raise VerificationError(
                f"step {step}: the loss is {loss!r} with offload and {loss_off!r} without"
            )
        for (name, _), without, with_ in zip(self._named_parameters(), grads_off, grads_on, strict=True):
            if with_ is None or without is None:
                if with_ is not without:
                    raise VerificationError(
                        f"step {step}: {name} has a gradient only {'without' if with_ is None else 'with'} "
                        "offload"
                    )
            elif not torch.equal(_bits(with_), _bits(without)):
                wrong = int((with_ != without).sum())
                raise VerificationError(
                    f"step {step}: the gradient of {name} differs with offload in {wrong:,} of "
                    f"{with_.numel():,} elements"
                )

    def _device_memory(self) -> tuple[int | None, int | None]:
        if self.rank.device.type != "cuda":
            return None, None
        stats = torch.cuda.memory_stats(self.rank.device)
        return stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]

    # ---- what it is built of ----

    def _stage(self, index: int, module: nn.Module) -> OffloadPipelineStage:
        options = self.options
        inputs, outputs = options.model.examples(
            index, self.num_stages, batch=options.batch, dtype=options.dtype
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
    dist.all_gather_object(fingerprints, text.fingerprint, group=rank.everyone)
    if len(set(fingerprints)) > 1:
        raise ValueError(
            f"the ranks read different text ({', '.join(map(str, fingerprints))}); give all of them the same "
            "files with --data"
        )


def _take_hooks(model: nn.Module) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Empty each module's dictionaries of hooks. Returns them, with what was in them."""
    found = [hooks for each in model.modules() for hooks in (each._forward_pre_hooks, each._forward_hooks)]
    taken = [(hooks, dict(hooks)) for hooks in found if hooks]
    for hooks, _ in taken:
        hooks.clear()
    return taken
