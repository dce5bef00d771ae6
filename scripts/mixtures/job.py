"""A user's loop over a mixture: the model with what its row changes, the engine beside it, and the steps.

A step is forwards and backwards as the work has them, and an optimizer's step that changes nothing. One
invariant: a step's losses and gradients depend on the work and the step's number, never on the row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

import moe
import offload
from bench.run import SkippedError
from mixtures.rows import ROWS, RowSpec, wrap_by_torch
from mixtures.work import Work, tokens_of, zipf_gates
from offload.sizes import bytes_text

__all__ = ["Job", "MixtureRequest"]

_IN_FLIGHT = ("max_spilling_bytes", "max_restoring_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureRequest:
    """What the parent asks of one process.

    kept: share of saved bytes that stays, for a row with `kept`. total_bytes: for mode auto.
    reference: the file of the gradients' fingerprints, written by the row nothing and read by the others.
    """

    row: str
    work: Work
    samples: int
    kept: float = 1.0
    total_bytes: int | None = None
    host_limit_bytes: int
    reference: str
    gradients: bool = True
    tiny: bool = False


class Job:
    """A user's loop over the microbatches of one batch. The optimizer's step changes no weight, so that all
    rows have the same ones in every step."""

    def __init__(self, request: MixtureRequest, device: torch.device) -> None:
        self.request, self.work, self.device = request, request.work, device
        self.spec: RowSpec = ROWS[request.row]
        self.model = moe.build_stage_module(
            self.work.config,
            device=device,
            dtype=torch.float32 if request.tiny else torch.bfloat16,
            **self.spec.placement,
        )
        self.model.train()
        self.gates = zipf_gates(self.model) if self.work.zipf else []
        if self.spec.by_torch:
            wrap_by_torch(self.model, self.spec.by_torch, pinned=device.type == "cuda")
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.batch = [tokens_of(self.work, number, device) for number in range(self.work.microbatches)]
        self.manager = self._configured(None) if self.spec.is_ours else None
        self.saved_bytes, stays_bytes = self._probed()
        self.limit_bytes = self._limit(stays_bytes)
        if self.limit_bytes is not None:
            self.manager = self._configured(self.limit_bytes)
        self.handle = self._applied()

    def step(self, number: int, after_action: Callable[[], None] | None = None) -> None:
        """The step of this number. Nothing here waits, but for what `after_action` does."""
        manager = None if self.handle is not None else self.manager
        length = self.work.length(number)
        losses: dict[int, torch.Tensor] = {}
        if manager is not None:
            manager.set_order(self.work.actions)
        for kind, _, microbatch in self.work.actions:
            if kind == "F":
                for gate in self.gates:
                    gate.drawn = number * self.work.microbatches + microbatch
                with _announced(manager, microbatch, "F"):
                    losses[microbatch] = self._loss(microbatch, length)
            else:
                with _announced(manager, microbatch, "B"):
                    losses.pop(microbatch).backward()
            if after_action is not None:
                after_action()
        if manager is not None:
            manager.step_end()
        self.optimizer.step()

    def named_gradients(self) -> dict[str, torch.Tensor]:
        named = {name: one.grad for name, one in self.model.named_parameters()}
        if missing := [name for name, grad in named.items() if grad is None]:
            raise RuntimeError(
                f"{len(missing)} of {len(named)} parameters got no gradient, first {missing[0]}"
            )
        return {name: grad for name, grad in named.items() if grad is not None}

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def figures(self) -> dict[str, Any]:
        """Of the step that ended last: pinned bytes, and what the engine says."""
        if self.handle is not None:
            last = self.handle.report().last_step
            return {
                "held": last["host_bytes"],
                "lent": last["host_lent_bytes"],
                "spill_bytes": last["moved_bytes"],
                "stall_ms": last["stall_ms"],
            }
        if self.manager is not None:
            stats = self.manager.stats
            return {
                "held": stats.host_bytes_held,
                "lent": stats.host_bytes_lent_peak,
                "spill_bytes": stats.spill_bytes,
                "stall_ms": stats.stall_ms,
            }
        if self.device.type != "cuda" or not hasattr(torch.cuda, "host_memory_stats"):
            return {"held": 0, "lent": 0}
        pinned = torch.cuda.host_memory_stats()
        return {
            "held": int(pinned.get("allocated_bytes.current", 0)),
            "lent": int(pinned.get("active_bytes.peak", 0)),
        }

    @property
    def is_final(self) -> bool:
        """Whether further steps will do what the last one did, as far as that is known."""
        return self.handle is None or self.handle.explain().is_final

    def close(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        if self.manager is not None:
            offload.PipelineOffloadManager.close_instance()

    def _loss(self, microbatch: int, length: int) -> torch.Tensor:
        tokens, targets = (part[:, :length] for part in self.batch[microbatch])
        logits = self.model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def _configured(self, limit_bytes: int | None) -> Any:
        small: dict[str, Any] = {"min_offloaded_tensor_size": 1}
        small |= {} if limit_bytes is not None else dict.fromkeys(_IN_FLIGHT, 1 << 14)
        limits: dict[str, Any] = {"device_limit_bytes": limit_bytes}
        limits |= small if self.request.tiny else self.spec.limits
        config = offload.OffloadConfig(host_limit_bytes=self.request.host_limit_bytes, **limits)
        manager = offload.configure(
            config, device="sim" if self.device.type == "cpu" else "cuda", print_summary=False
        )
        manager.register_parameters(self.model)
        return manager

    def _applied(self) -> offload.Applied | None:
        if self.spec.total is None:
            return None
        smallest: dict[str, Any] = {"min_numel": 1} if self.request.tiny else {}
        total = f"{self.request.total_bytes}B"
        return offload.apply(self.model, mode="auto", blocks="blocks.*", device_total=total, **smallest)

    def _probed(self) -> tuple[int, int]:
        """Bytes that a microbatch's forward saves for the backward, and those of them that no mark takes."""
        if self.manager is None or self.spec.total is not None:
            saved = self._seen(0)
            return saved, saved
        self.manager.disable_offload()
        with _announced(self.manager, 0, "F"):
            saved = self._seen(0)
        self.manager.enable_offload()
        with _announced(self.manager, 0, "F"):
            self._loss(0, self.work.sequence)  # its graph ends here
        return saved, saved - int(self.manager.step_end().saved_bytes)

    def _seen(self, microbatch: int) -> int:
        """Distinct bytes, of no parameter, that a forward shows to hooks around it."""
        parameters = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        seen: dict[int, torch.UntypedStorage] = {}  # held: the address of a freed one could be another's

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in parameters:
                seen[storage.data_ptr()] = storage
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
            self._loss(microbatch, self.work.sequence)
        return sum(storage.nbytes() for storage in seen.values())

    def _limit(self, stays_bytes: int) -> int | None:
        """Of the engine: of the bytes that may be kept, what is left beside those that no mark takes."""
        if not self.spec.kept:
            return None
        kept = round(self.request.kept * self.saved_bytes)
        if kept <= stays_bytes:
            stay = bytes_text(stays_bytes)
            raise SkippedError(f"{stay} are of no mark, and --kept leaves {bytes_text(kept)}")
        return kept - stays_bytes


@contextmanager
def _announced(manager: Any, microbatch: int, kind: str) -> Iterator[None]:
    """Tell the engine that a forward or backward begins and ends, as a pipeline's stage does."""
    if manager is None:
        yield
    elif kind == "F":
        manager.begin_chunk(0, microbatch)
        yield
        manager.end_forward(0, microbatch)
    else:
        manager.begin_backward(0, microbatch, kind)
        yield
        manager.end_backward(0, microbatch, kind)
