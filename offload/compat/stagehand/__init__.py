"""Both runtimes of StageHand under its names: weights by the block (here), and activations above a watermark,
whose parts are those of activations.py. Neither is on the path of `offload.apply`."""

from __future__ import annotations

from offload.compat.stagehand.activations import *  # noqa: F403 - the parts of the activation runtime
from offload.compat.stagehand.blocks import BlockEntry as BlockEntry
from offload.compat.stagehand.blocks import BlockRegistry as BlockRegistry
from offload.compat.stagehand.blocks import BlockState as BlockState
from offload.compat.stagehand.blocks import ResidencyMap as ResidencyMap
from offload.compat.stagehand.config import StagehandConfig as StagehandConfig
from offload.compat.stagehand.layers import LayerRuntime as LayerRuntime
from offload.compat.stagehand.layers import layer as layer
from offload.compat.stagehand.runtime import BlockSource as BlockSource
from offload.compat.stagehand.runtime import InMemorySource as InMemorySource
from offload.compat.stagehand.runtime import ResidentPriority as ResidentPriority
from offload.compat.stagehand.runtime import StagehandRuntime as StagehandRuntime
from offload.compat.stagehand.scheduler import StepMetrics as StepMetrics
from offload.errors import DtypeMismatchError as DtypeMismatchError
from offload.errors import InvalidStateTransitionError as InvalidStateTransitionError
from offload.errors import OffloadOOMError as OffloadOOMError

StagehandOOMError = OffloadOOMError
