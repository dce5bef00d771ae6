"""The releases of torch that the tests run with, and what has another name in some of them.

One invariant: another release is not refused, and not passed over in silence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import Variable, graph

from offload.telemetry.speaker import speaker

FIRST, LAST = (2, 11), (2, 15)

# public since 2.15; called in a backward, with what to call at its end
queue_callback: Any = getattr(graph, "queue_callback", None) or Variable._execution_engine.queue_callback


def untested() -> str:
    """Warning about the torch that is installed; "" for one that the tests run with."""
    if FIRST <= tuple(map(int, torch.__version__.split(".")[:2])) <= LAST:
        return ""
    first, last, after = "{}.{}".format(*FIRST), "{}.{}".format(*LAST), f"{LAST[0]}.{LAST[1] + 1}"
    return (
        f"torch {first} to {last} are tested, and this is {torch.__version__}: take a newer offload if there "
        f"is one, or pip install 'torch>={first},<{after}'"
    )


def warn_if_untested() -> None:
    if said := untested():
        speaker(__name__).warning(said)
