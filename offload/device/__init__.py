"""Devices: the CUDA one, and a simulated one that proves every ordering on a machine without a GPU."""

from __future__ import annotations

import torch

from offload.device.base import CaptureWatcher as CaptureWatcher
from offload.device.base import CopyPair as CopyPair
from offload.device.base import Device as Device
from offload.device.base import Event as Event
from offload.device.base import Graph as Graph
from offload.device.base import HostMemory as HostMemory
from offload.device.base import Lane as Lane


def device_bytes(device: torch.device | None = None) -> int | None:
    """Memory of a GPU, without an argument of the current one; None of the simulated device."""
    is_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return torch.cuda.get_device_properties(device).total_memory if is_gpu else None


def usable_bytes() -> int | None:
    """Bytes of the current GPU's memory that the process has, or may have; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    from offload.device.cuda import usable_bytes as of_gpu

    return of_gpu()


def device_name(name: str | None = None) -> str:
    """The device that `select_device(name)` takes, in full: "sim", or "cuda:N"."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "sim"
    return f"cuda:{torch.cuda.current_device()}" if name == "cuda" and torch.cuda.is_available() else name


def select_device(name: str | None = None) -> Device:
    """The device called `name`: "cuda", "cuda:1" or "sim"; None takes CUDA where there is a GPU, else the
    simulated device.

    Raises ValueError for another name, or for "cuda" on a machine without a GPU: a simulated run is never a
    silent fallback.
    """
    name = device_name(name)
    if name == "sim":
        from offload.device.sim import SimDevice

        return SimDevice()
    if name == "cuda" or name.startswith("cuda:"):
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {name!r} was asked for, but torch {torch.__version__} sees no GPU; use 'sim' or "
                "install a driver"
            )
        from offload.device.cuda import CudaDevice

        return CudaDevice(torch.device(name))
    raise ValueError(
        f"unknown device {name!r}; known: 'cuda', 'cuda:N', 'sim', or None to choose by the machine"
    )
