"""Optimizer state on the host, stepped beside the compute."""

from offload.optim.hybrid import HybridDeviceOptimizer

__all__ = ["HybridDeviceOptimizer"]
