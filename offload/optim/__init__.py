"""Optimizer state on the host, stepped beside the compute."""

from offload.optim.fsdp_step import FSDPGPUOptimizerWrapper
from offload.optim.hybrid import HybridDeviceOptimizer

__all__ = ["FSDPGPUOptimizerWrapper", "HybridDeviceOptimizer"]
