"""A parameter as the optimizer moves it: flat bytes on its device, the shape it has, and the gradient that
counts.

One invariant: everything here is a view of the parameter's own memory, whatever wraps it (a DTensor's local
shard) and however its dimensions are laid out, as long as its elements fill one range of memory without gaps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from offload.device import Device
from offload.errors import OffloadError

__all__ = ["Managed", "is_laid_out_as", "laid_out_as", "local_of", "same_bits", "settle_versions"]


def local_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory is this rank's: a DTensor's local shard, else the tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) else tensor


def is_laid_out_as(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether the gradient's local shard is that of the parameter, and whole: not a rank's share of a sum."""
    mine, other = getattr(parameter, "placements", None), getattr(gradient, "placements", None)
    return mine is None or other is None or mine == other


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A DTensor's gradient over the parameter's own placements, summed where each rank has a share, as
    torch's optimizers take it.

    A collective where the placements differ: every rank must ask for its gradients in the same order.
    """
    if is_laid_out_as(parameter, gradient):
        return gradient
    found: Tensor = gradient.detach().redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return found


class Managed:
    """One parameter of the optimizer, at `index` in the order of its param groups.

    device: whose lanes move it. name: for messages. Raises ValueError for a parameter whose memory has gaps
        or overlaps, or is not the
    elements: a quantized one would be stepped in a copy.
    """

    __slots__ = (
        "_address",
        "_flat",
        "device",
        "dtype",
        "index",
        "name",
        "numel",
        "parameter",
        "shape",
        "stride",
        "version",
        "where",
    )

    def __init__(self, parameter: Tensor, index: int, device: Device, name: str) -> None:
        self.parameter = parameter
        self.index = index
        self.device = device
        self.name = name
        local = local_of(parameter).detach()
        self.shape, self.stride = tuple(local.shape), tuple(local.stride())
        self.numel, self.dtype = local.numel(), local.dtype
        if type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ValueError(
                f"{self} is a {type(local).__name__}, which keeps something else than its elements; step it "
                "on the device, by an optimizer "
                "of its own, or keep the parameter in plain floating point (Megatron: fp8_param_gather=False)"
            )
        if torch.empty_like(local, device="meta").stride() != self.stride:
            raise ValueError(
                f"{self} has strides {self.stride} for shape {self.shape}, which leave gaps or overlap; make "
                "it contiguous first"
            )
        self._flat = _flat_of(local)
        self._address = local.data_ptr()
        self.where = local.device
        self.version = parameter._version

    def __str__(self) -> str:
        return (
            f"parameter {self.index} ({self.name + ', ' if self.name else ''}{self.numel:,} "
            f"elements of {self.dtype})"
        )

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def whole_numel(self) -> int:
        """Elements on all ranks together, of a DTensor: the same number everywhere."""
        return self.parameter.numel()

    def flat(self) -> Tensor:
        """The elements in the order of memory, 1-D. A write through it moves no version counter."""
        local = local_of(self.parameter)
        if local.data_ptr() != self._address:  # `p.data = ...`, or FSDP2 made its shard anew
            if local.numel() != self.numel or local.dtype != self.dtype or local.device != self.where:
                raise OffloadError(
                    f"{self} is now {local.numel():,} elements of {local.dtype} on {local.device}; build the "
                    "optimizer after moving or "
                    "converting"
                )
            self._flat = _flat_of(local.detach())
            self._address = local.data_ptr()
            self.version = -1  # other weights than the masters'
        return self._flat

    def shaped(self, flat: Tensor) -> Tensor:
        """`flat`, as many elements as the parameter has, in the parameter's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    @property
    def gradient(self) -> Tensor | None:
        """`decoupled_grad` where there is one, else `grad`."""
        decoupled = getattr(self.parameter, "decoupled_grad", None)
        return decoupled if decoupled is not None else self.parameter.grad

    def flat_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient's elements in the order of the parameter's memory, 1-D; a copy on the current lane
        where it lies otherwise.

        Raises OffloadError for a sparse one, or one of another size or device.
        """
        local = local_of(gradient).detach()
        if local.layout is not torch.strided:
            raise OffloadError(
                f"{self} has a {local.layout} gradient, and offloaded parameters take dense ones; use "
                "offload_fraction=0 or a dense "
                "gradient"
            )
        if tuple(local.shape) != self.shape or local.device != self.where:
            raise OffloadError(
                f"{self} has a gradient of shape {tuple(local.shape)} on {local.device}; the parameter's "
                f"shape is {self.shape}"
            )
        if tuple(local.stride()) != self.stride:
            local = torch.empty_strided(
                self.shape, self.stride, dtype=local.dtype, device=local.device
            ).copy_(local)
        return _flat_of(local)

    def changed_outside(self) -> bool:
        """Whether somebody but the optimizer wrote the weights since `settle_version`: a loaded state dict,
        an in-place operation."""
        self.flat()
        return self.parameter._version != self.version


def settle_versions(members: Sequence[Managed]) -> None:
    """The weights were, or will be, written: tell autograd, and remember the count."""
    parameters = [local_of(member.parameter) for member in members]
    torch.autograd.graph.increment_version(parameters)
    for member in members:
        if member.parameter is not local_of(member.parameter):
            torch.autograd.graph.increment_version(member.parameter)
        member.version = member.parameter._version


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one dtype are equal byte for byte; nan equals itself. Blocks the host where they
    are on a GPU."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _flat_of(local: Tensor) -> Tensor:
    return local.data.as_strided((local.numel(),), (1,), local.storage_offset())
