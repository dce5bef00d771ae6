"""Stages and microbatches: who runs which piece of the model when, and what the engine is told about it.

The package is `offload.parallel`. Its modules import each other relatively, as the folder lies beside
`offload` in a checkout (offload/packages.py).

One invariant: torch.distributed.pipelining runs the pipeline and `offload` moves the bytes; this package only
introduces them to each other, and imports nothing of `offload` but its public names. `launch` starts the
ranks, `host` pins and measures the link on all at once, `schedules` names what torch can run, `transformer`
is the model whose layers carry the marks. `dry_run` plans a job without running it, so it imports
`offload.policy` too. `stage` and `order` are names of `offload.pipelining`, which announces each chunk and
says in which order the chunks will be read.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.pipelining import OffloadPipelineStage, actions_of

__all__ = ["OffloadPipelineStage", "actions_of"]

if __name__ == "parallel":  # found at the top of a checkout: one module for both names
    sys.modules[__name__] = import_module("offload.parallel")


def __getattr__(name: str) -> object:
    # on first use: `parallel.megatron` needs no pipeline of torch's
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("offload.pipelining"), name)
