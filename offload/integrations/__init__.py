"""Where people train: transformers' Trainer and TRL's, Lightning, accelerate, torchtitan, axolotl.

Each module of this package imports its framework, and is imported only by who uses it:

    from offload.integrations.transformers import OffloadCallback

One invariant: training through one of them has the bits of training without. What a step moved, stalled and
held is logged by the framework's own logging, by the names of `step_figures`.
"""

from __future__ import annotations

from offload.apply import Applied

__all__ = ["step_figures"]


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
