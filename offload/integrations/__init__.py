"""Adapters to trainers: transformers' Trainer and TRL's, Lightning, accelerate, torchtitan, axolotl.

Each module of this package imports its framework, and is imported only by who uses it:

    from offload.integrations.transformers import OffloadCallback

One invariant: training through one of them has the bits of training without. What a step moved, stalled and
held is logged by the framework's own logging, by the names of `step_figures`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from offload.apply import Applied

__all__ = ["step_figures", "with_optimizer"]


def step_figures(handle: Applied | None) -> dict[str, float]:
    """Figures of the last step that has ended, for a logger; {} before one has.

    | name | | unit |
    |---|---|---|
    | offload/to_host_bytes, offload/to_device_bytes | bytes copied, of whatever kind | bytes |
    | offload/peak_bytes | most saved tensors on the device at once | bytes |
    | offload/stall_ms | compute waited for copies, in the step before the last | ms |

    Blocks the host: never.
    """
    last = None if handle is None or handle.is_off else handle.report().last
    if last is None:
        return {}
    return {
        "offload/to_host_bytes": float(sum(kind.out_bytes for kind in last.kinds.values())),
        "offload/to_device_bytes": float(sum(kind.in_bytes for kind in last.kinds.values())),
        "offload/peak_bytes": float(last.peak_bytes),
        "offload/stall_ms": last.stall_ms,
    }


def with_optimizer(arguments: Mapping[str, Any], optimizers: Sequence[Any] = ()) -> dict[str, Any]:
    """`arguments` for `apply`: optimizer=True becomes the trainer's own, out of accelerate's wrapper.

    Raises ValueError for optimizer=True where the trainer has none or several.
    """
    found = dict(arguments)
    if found.get("optimizer") is True:
        if len(optimizers) != 1:
            raise ValueError(
                f"optimizer=True is the trainer's own, and there are {len(optimizers)}: give optimizer= the "
                "one that steps the model"
            )
        (found["optimizer"],) = optimizers
    if (optimizer := found.get("optimizer")) is not None:
        found["optimizer"] = getattr(optimizer, "optimizer", optimizer)
    return found
