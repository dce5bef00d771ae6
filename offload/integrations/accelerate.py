"""accelerate: `apply` on a model before or after `accelerator.prepare`, and figures in its trackers.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    handle = apply(accelerator, model, mode="groups", device_limit="20GB")
    for step, batch in enumerate(loader):
        with accelerator.accumulate(model):
            ...                                          # as without
        log(accelerator, handle, step=step)

One invariant: the module that is hooked is the user's own, whatever `prepare` has put around it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from torch import nn

from offload.apply import Applied
from offload.apply import apply as offload_apply
from offload.integrations import step_figures, with_optimizer


def apply(accelerator: Accelerator, model: nn.Module, **arguments: Any) -> Applied:
    """`offload.apply` on the model inside what `prepare` has made of it (DDP, a compiled module), so that
    names of blocks are the model's own.

    arguments: those of `offload.apply`; `optimizer` may be what `prepare` has made of it. With `weights=` and
        more than one process, call it after `prepare`.
    Raises ValueError for what `apply` refuses, and where accelerate's FSDP plugin offloads the inputs of
    checkpointed layers itself. Blocks the host: as `apply` does.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if getattr(plugin, "activation_checkpointing_offload", False):
        raise ValueError(
            "activation_checkpointing_offload=True of the FSDP plugin moves the same inputs: leave it out"
        )
    model = accelerator.unwrap_model(model, keep_torch_compile=False)
    return offload_apply(model, **with_optimizer(arguments))


def log(
    accelerator: Accelerator, handle: Applied, step: int | None = None, values: Mapping[str, Any] = {}
) -> None:
    """Give the figures of the last step, and `values` with them, to the trackers of `accelerator`."""
    accelerator.log({**values, **step_figures(handle)}, step=step)
