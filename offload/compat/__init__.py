"""Names of other projects, as adapters over the engine: of Megatron-core (requirements S2), of an engine for
torchtitan (S3) and of the watermark runtime (S0). Nothing of the engine imports them, and `offload` only
where it is asked for one of the names below."""

from __future__ import annotations

from offload.compat.gradients import GradientOffloadHook as GradientOffloadHook
from offload.compat.handler import ChunkOffloadHandler as ChunkOffloadHandler
from offload.compat.handler import OffloadTensorGroup as OffloadTensorGroup
from offload.compat.hidden_states import hidden_states_offload as hidden_states_offload
from offload.compat.hidden_states import patch_hidden_states_offload as patch_hidden_states_offload
from offload.compat.hidden_states import unpatch_hidden_states_offload as unpatch_hidden_states_offload
from offload.compat.manager import ActivationOffloadContext as ActivationOffloadContext
from offload.compat.manager import (
    FineGrainedActivationOffloadingInterface as FineGrainedActivationOffloadingInterface,
)
from offload.compat.manager import (
    FineGrainedOffloadingGroupCommitFunction as FineGrainedOffloadingGroupCommitFunction,
)
from offload.compat.manager import (
    FineGrainedOffloadingGroupStartFunction as FineGrainedOffloadingGroupStartFunction,
)
from offload.compat.manager import OffloadManager as OffloadManager
from offload.compat.manager import PipelineOffloadManager as PipelineOffloadManager
from offload.compat.stagehand.activations import ActivationConfig as ActivationConfig
from offload.compat.stagehand.activations import ActivationRuntime as ActivationRuntime
from offload.compat.stagehand.activations import CPUSpillBackend as CPUSpillBackend
from offload.compat.tensor_pool import GPUTensorPool as GPUTensorPool
from offload.compat.tensor_pool import TensorPool as TensorPool
from offload.compat.tensors import TensorOffloader as TensorOffloader
from offload.compat.weights import WeightOffloadHook as WeightOffloadHook
from offload.groups.chunk import VirtualPipelineQueue as VirtualPipelineQueue
