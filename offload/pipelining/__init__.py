"""torch's pipeline stage that announces each chunk, and the order in which a schedule reads them.

    from offload.pipelining import OffloadPipelineStage, actions_of

One invariant: nothing of `offload` imports this package, so `import offload` loads no pipeline of torch's.
The package `parallel` has the same names; who has a folder `parallel` of his own, which Python then finds
first, imports them from here.
"""

from __future__ import annotations

from offload.pipelining.stage import Announcer, OffloadPipelineStage, actions_of, peak_chunks
from offload.policy.actions import Action

__all__ = ["Action", "Announcer", "OffloadPipelineStage", "actions_of", "peak_chunks"]
