"""The name of `offload.pipelining`'s stage in this package."""

from offload.pipelining import Announcer, OffloadPipelineStage

__all__ = ["Announcer", "OffloadPipelineStage"]
