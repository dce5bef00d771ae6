"""The queue by the name of its source; the tracker of groups has it."""

from offload.groups.chunk import VirtualPipelineQueue as VirtualPipelineQueue
