"""A parameter as a client moves it: its bytes as one flat tensor, its shape, and the gradient to step with.

One invariant: everything here is a view of the parameter's own memory, whatever wraps it (a DTensor's local
shard) and however its dimensions are laid out, as long as its elements fill one range of memory without gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from offload.device import Device
from offload.errors import OffloadError
from offload.params.watched import Watched, home_of


def local_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory is this rank's: a DTensor's local shard, else the tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) else tensor


def inner_parts(tensor: Any) -> dict[str, Tensor]:
    """The tensors that a wrapper has its values in, by attribute: a DTensor's local shard, what a quantized
    one is made of. None of a plain tensor."""
    if (local := local_of(tensor)) is not tensor:
        return {"_local_tensor": local}
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
    return {name: getattr(tensor, name) for name in names}


def is_laid_out_as(parameter: Tensor, gradient: Tensor) -> bool:
    """Predicate: the gradient's local shard is the parameter's, and whole: not a rank's share of a sum."""
    mine, other = getattr(parameter, "placements", None), getattr(gradient, "placements", None)
    return mine is None or other is None or mine == other


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """A DTensor's gradient over the parameter's own placements, summed where each rank has a share, as
    torch's optimizers take it. A collective where the placements differ: every rank must ask for its
    gradients in the same order."""
    if is_laid_out_as(parameter, gradient):
        return gradient
    found: Tensor = gradient.detach().redistribute(parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
    return found


def _gradient_of(parameter: Tensor) -> Tensor | None:
    """`decoupled_grad` where there is one, else `grad`."""
    decoupled = getattr(parameter, "decoupled_grad", None)
    return decoupled if decoupled is not None else parameter.grad


def trains(parameter: Tensor) -> bool:
    """Predicate: an optimizer's step may step the parameter: it gets gradients, or was given one."""
    return parameter.requires_grad or _gradient_of(parameter) is not None


class ParamView:
    """One parameter, at `index` in the order in which its client met it.

    device: whose lanes move it. name: for messages. Raises ValueError for a parameter whose memory
        has gaps or overlaps, or is not the elements: a quantized one would be stepped in a copy.
    """

    def __init__(self, parameter: Tensor, index: int, device: Device, name: str) -> None:
        self.parameter = parameter
        self.index = index
        self.device = device
        self.name = name
        self.home = home_of(parameter)
        """Where its bytes are, if those on the device come and go."""
        if self.home is not None and self.home.device is not device:
            raise ValueError(
                f"{self.home.name} is streamed by apply(weights=...) on {self.home.device.name}, by another "
                f"engine than this optimizer's on {device.name}; give engine=, or leave it out of both"
            )
        self._keeper = None if self.home is None else self.home.module()  # a step may write the master
        local = self._local()
        self.shape, self.numel, self.dtype = tuple(local.shape), local.numel(), local.dtype
        self.where, self.address = local.device, 0
        if type(local).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ValueError(
                f"{self} is a {type(local).__name__}, which keeps something else than its elements; step it "
                "on the device, by an optimizer of its own, or keep the parameter in plain floating point "
                "(Megatron: fp8_param_gather=False)"
            )
        self._find(local)

    def __str__(self) -> str:
        return (
            f"parameter {self.index} ({self.name + ', ' if self.name else ''}{self.numel:,} "
            f"elements of {self.dtype})"
        )

    def _local(self) -> Tensor:
        """An alias of this rank's memory. Nobody may read or write what is not there."""
        if self.home is None:
            return local_of(self.parameter).detach()
        with torch._C.DisableTorchFunctionSubclass():
            return self.parameter.detach()

    def _find(self, local: Tensor) -> None:
        stride = tuple(local.stride())
        if torch.empty_like(local, device="meta").stride() != stride:
            raise ValueError(
                f"{self} has strides {stride} for shape {self.shape}, which leave gaps or overlap; make it "
                "contiguous first"
            )
        self.stride = stride
        if self.home is None:
            self.flat = local.data.as_strided((local.numel(),), (1,), local.storage_offset())
            self.address = local.data_ptr()
        else:
            if self.home.master.numel() != local.numel() * local.element_size():
                raise ValueError(
                    f"{self} waits on the host in INT8, which is for frozen weights: leave it out"
                )
            self.flat = self.home.master.view(self.dtype)
            self.address = self.flat.data_ptr()
        """The elements in the order of memory, 1-D; on the host where it has a home. A write through it moves
        no version counter."""

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def whole_numel(self) -> int:
        """Elements on all ranks together, of a DTensor: the same number everywhere."""
        return self.parameter.numel()

    def follow(self) -> tuple[int, ...] | None:
        """Find the parameter's memory anew: `p.data = ...`, another memory format, or FSDP2 may have moved
        it. Returns the old strides if its elements lie in another order now, else None. Raises OffloadError
        for other elements than there were."""
        if self.home is not None and not self.home.is_of(self.parameter):
            raise OffloadError(
                f"{self} was streamed by apply(weights=...) when the optimizer was built, and is not any "
                "more (remove(), or another parameter in its place): keep the optimizer's state_dict(), "
                "close() it, build another one and load that"
            )
        local = self._local()
        address = local.data_ptr() if self.home is None else self.home.master.data_ptr()
        if address == self.address and local.stride() == self.stride and local.dtype == self.dtype:
            return None
        if tuple(local.shape) != self.shape or local.dtype != self.dtype or local.device != self.where:
            raise OffloadError(
                f"{self} is now {local.numel():,} elements of {local.dtype} on {local.device}; build the "
                "optimizer after moving or converting"
            )
        before = self.stride
        self._find(local)
        return before if self.stride != before else None

    def let_go(self) -> None:
        """Hold the parameter no longer."""
        self.home = self._keeper = None
        self.parameter = self.flat = torch.empty(0, device="cpu")

    def shaped(self, flat: Tensor) -> Tensor:
        """`flat`, as many elements as the parameter has, in the parameter's shape."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset())

    @property
    def gradient(self) -> Tensor | None:
        """`decoupled_grad` where there is one, else `grad`."""
        return _gradient_of(self.parameter)

    @gradient.setter
    def gradient(self, gradient: Tensor) -> None:
        has_decoupled = getattr(self.parameter, "decoupled_grad", None) is not None
        setattr(self.parameter, "decoupled_grad" if has_decoupled else "grad", gradient)

    def write_gradient(self, values: Tensor | None) -> None:
        """Have these values in the gradient; None: there is none. One whose elements share memory, is sparse
        or is laid out otherwise stays as it is."""
        own = self.gradient
        if values is None:
            self.parameter.grad = None
        elif own is None:
            self.parameter.grad = sharded_like(self.parameter, local_of(values).to(self.where, self.dtype))
        elif is_laid_out_as(self.parameter, own) and is_writable(local_of(own)):
            local_of(own).copy_(local_of(values))

    def lent_gradient(self, gradient: Tensor, returned: Callable[[], None]) -> Tensor | None:
        """The same in host memory, of one that waits there, until `returned` is called; else None."""
        if isinstance(gradient, Watched) and (gradient.stride(), gradient.dtype) == (self.stride, self.dtype):
            return type(gradient).lend(gradient, returned)
        return None

    def flat_gradient(self, gradient: Tensor) -> Tensor:
        """The gradient's elements in the order of the parameter's memory, 1-D; a copy on the current lane
        where it lies otherwise. Raises OffloadError for a sparse one, or one of another size or device."""
        if isinstance(gradient, Watched):
            type(gradient).stay(gradient)
        local = local_of(gradient).detach()
        if local.layout is not torch.strided:
            raise OffloadError(
                f"{self} has a {local.layout} gradient, and offloaded parameters take dense ones; use "
                "offload_fraction=0 or a dense gradient"
            )
        if tuple(local.shape) != self.shape or local.device != self.where:
            raise OffloadError(
                f"{self} has a gradient of shape {tuple(local.shape)} on {local.device}; the parameter's "
                f"shape is {self.shape}"
            )
        local = laid_like(self.shaped(self.flat), local)
        return local.as_strided((local.numel(),), (1,), local.storage_offset())


def count_write(views: Sequence[ParamView]) -> None:
    """The weights were, or will be, written: tell autograd, which refuses a backward that needs the old
    ones."""
    tensors = {id(each): each for view in views for each in (view.parameter, local_of(view.parameter))}
    torch.autograd.graph.increment_version([*tensors.values()])
    for view in views:
        if view.home is not None:
            view.home.version = view.parameter._version  # no write on the device


def laid_like(tensor: Tensor, value: Tensor) -> Tensor:
    """`value` with the strides of `tensor`, of one shape: itself, or a copy. Fused kernels on the CPU look at
    no strides."""
    if value.stride() == tensor.stride() or local_of(value) is not value:
        return value
    made = torch.empty_strided(value.shape, tensor.stride(), dtype=value.dtype, device=value.device)
    return made.copy_(value)


def lay_like(tensor: Tensor, state: dict[Any, Any]) -> None:
    """State of the tensor's shape has the tensor's strides from here on."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == tensor.shape:
            state[name] = laid_like(tensor, value)


def update_master(master: Tensor, weights: Tensor, room: Tensor | None = None) -> None:
    """Where rounding an element of `master` does not give the weight's bits, somebody wrote the weight: it
    becomes the master. Elsewhere the master knows more than the weight does.

    master: float32. weights: half precision, of the same shape. room: as `master`, overwritten with the
        widened weights; None allocates it. On the current lane; blocks the host: never.
    """
    wide = weights.to(master.dtype) if room is None else room.copy_(weights)
    same = master.to(weights.dtype).view(torch.int16) == weights.view(torch.int16)
    torch.where(same, master, wide, out=master)


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """A DTensor again, where the parameter is one and the value, wherever it lies, is of its local shard's
    shape."""
    local = local_of(parameter)
    if local is parameter or local_of(value) is not value or value.shape != local.shape:
        return value
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    assert isinstance(parameter, DTensor)
    meta = TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    # from_local would move it to the mesh's device; FSDP2 keeps shards on the host in this way too
    return DTensor(value, replace(parameter._spec, tensor_meta=meta), requires_grad=False)


def is_writable(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and torch._debug_has_internal_overlap(tensor) != 1
