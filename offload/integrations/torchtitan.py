"""torchtitan: a configuration whose model is offloaded, and whose metrics have the figures.

    def llama3_8b_offloaded():                               # in your config_registry
        config = llama3_8b()
        config.training.disable_cuda_graphs = True
        config.activation_checkpoint = None
        return offloaded(config, mode="auto", device_total="60GB")

`apply` is called once the Trainer has parallelised, initialised and compiled the model and built its
optimizers. One invariant: what torchtitan itself would do to the same tensors is refused before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

from torchtitan.trainer import Trainer

from offload.apply import Applied, apply
from offload.compat.torchtitan import settings
from offload.integrations import step_figures
from offload.modules.settings import RECOMPUTING, WITHOUT_BLOCKS
from offload.policies import without_policy


def offloaded(
    config: Trainer.Config, keys: Mapping[str, Any] | str | PathLike[str] | None = None, **arguments: Any
) -> Trainer.Config:
    """`config`, whose Trainer applies offload to its model.

    keys: those of `offload.compat.torchtitan`, such as `enable_activation_offload`, as a dict or the path
        of a TOML file, for models with experts.
    arguments: those of `offload.apply`, instead of keys; `blocks` is "layers.*" by default.

    Raises ValueError for settings of `config` that exclude offload, each with the way out.
    """
    arguments = without_policy(arguments)
    mode = arguments.get("mode", "groups")
    if keys is not None and arguments:
        raise ValueError(f"offloaded got keys and {', '.join(arguments)}: give one of the two")
    if not config.training.disable_cuda_graphs:
        raise ValueError("CUDA graphs would replay a step's copies: set training.disable_cuda_graphs = True")
    if config.parallelism.pipeline_parallel_degree > 1:
        raise ValueError("pipeline stages announce their microbatches: use offload.pipelining, and not this")
    if config.compile.enable and "model" in config.compile.components:
        raise ValueError("blocks compiled with fullgraph=True admit no hooks: compile.components = ['loss']")
    if config.activation_checkpoint is not None and (keys is not None or mode in RECOMPUTING):
        raise ValueError(
            f"{type(config.activation_checkpoint).__qualname__} recomputes layers, and so does "
            f"{'torchtitan' if keys is not None else f'mode={mode!r}'}: activation_checkpoint = None"
        )
    if keys is None and mode not in WITHOUT_BLOCKS and "modules" not in arguments:
        arguments.setdefault("blocks", "layers.*")
    spec, handles = config.model_spec, list[Applied]()

    def built(optimizers: Any, model_parts: Any, parallel_dims: Any) -> None:
        if spec.post_optimizer_build_fn is not None:
            spec.post_optimizer_build_fn(optimizers, model_parts, parallel_dims)
        model = model_parts[0]
        handles.append(apply(model, **arguments) if keys is None else settings(keys).apply(model))

    class OffloadMetrics(config.metrics._owner):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(type(config.metrics)):  # type: ignore[misc]
            pass

        def log(self, *values: Any, extra_metrics: Mapping[str, Any] | None = None, **named: Any) -> None:
            figures = step_figures(handles[-1])
            super().log(*values, extra_metrics={**(extra_metrics or {}), **figures}, **named)

    metrics = {field.name: getattr(config.metrics, field.name) for field in fields(config.metrics)}
    return replace(
        config,
        model_spec=replace(spec, post_optimizer_build_fn=built),
        metrics=OffloadMetrics.Config(**metrics),
    )
