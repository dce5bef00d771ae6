"""Layer mode: every Linear, Conv2d and Embedding is a block, of any model, in one line.

    model = layer(model, vram_budget="4GB")

One invariant: the first step traces the order of use, and fetches nothing ahead; what comes after is
scheduled by it. A step begins with each run of the first layer of the order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.compat.stagehand.runtime import StagehandRuntime
from offload.config import MIB
from offload.device import device_bytes
from offload.sizes import argument_bytes
from offload.weights.weight import BlockWeights

_HIGH, _LOW = 0.8, 0.6
_SLABS_BESIDE = 4


class LayerRuntime(StagehandRuntime):
    """A runtime of a model's layers.

    vram_budget: device memory of which 80% and 60% are the marks, in bytes or text; None: of the GPU's, or
        the config's defaults where there is none. prefetch_k: layers fetched ahead once the order is traced.
        telemetry: whether lines are written. options: of StagehandRuntime, by name. Raises ValueError for a
        model without layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        vram_budget: float | str | None = None,
        prefetch_k: int = 3,
        telemetry: bool = True,
        **options: Any,
    ) -> None:
        layers = [each for each in model.modules() if isinstance(each, (nn.Linear, nn.Conv2d, nn.Embedding))]
        if not layers:
            raise ValueError(f"{type(model).__name__} has no Linear, Conv2d or Embedding: name other blocks")
        largest = max(sum(p.numel() * p.element_size() for p in each.parameters()) for each in layers)
        slab_mb = 1 << max(0, -(-largest // MIB) - 1).bit_length()  # the next power of two
        given: dict[str, Any] = {"telemetry_enabled": telemetry, "prefetch_window_blocks": prefetch_k}
        given |= {"pinned_slab_mb": slab_mb, "pinned_pool_mb": slab_mb * (prefetch_k + _SLABS_BESIDE)}
        budget = argument_bytes(vram_budget, name="vram_budget", of_bytes=device_bytes()) or device_bytes()
        if budget:
            given["vram_high_watermark_mb"] = budget * _HIGH / MIB
            given["vram_low_watermark_mb"] = budget * _LOW / MIB
        super().__init__(model, block_pattern=layers, group="layers", **given | options)
        self.traced = False
        self._prefetch_k = self.config.prefetch_window_blocks
        if self.config.stagehand_enabled:
            self.scheduler.policy.prefetch_window = 0

    def _before(self, block: BlockWeights) -> None:
        trace = self.scheduler.trace
        again = block.name == next(iter(trace), None) and torch._C._current_graph_task_id() == -1
        if not again or self.residency.entries[block.name].refcount:
            return
        if not self.traced:
            self.traced = True
            self.registry = self.registry.in_order([*trace])
            self.scheduler.policy.prefetch_window = self._prefetch_k
        if not self._announced:
            self._finish_step()
            with self.offload_engine.lock:
                self._start_step(self.scheduler.step)


def layer(model: nn.Module, **options: Any) -> nn.Module:
    """The model, whose layers stream from here on. options: of LayerRuntime, which is its attribute
    `_stagehand_layer_runtime`."""
    model._stagehand_layer_runtime = LayerRuntime(model, **options)  # type: ignore[assignment]
    return model
