"""One forward and one backward of a module, call by call: what each computes and touches, what autograd
saves, and the most bytes that are alive.

On the meta device nothing is computed and no byte is taken: memory is what storages would hold, from the call
that makes one to the moment when its last reference goes. That moment is Python's and autograd's, as on a
GPU, so the peaks are those of eager training but for what kernels allocate inside, of which the fused
attention's is known. One invariant: what is counted is what ran, nothing is taken from a list of layers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_GRANULE = 512
"""Torch's allocator counts active bytes in these."""

_WITHOUT_KERNEL = frozenset(
    f"aten.{name}" for name in ("empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One operator call that runs a kernel or a collective."""

    operator: str
    """Name that torch prints: aten.mm.default."""
    number: int
    """Among the calls of this operator, from 0; the backward counts on its own."""
    flops: int
    touched_bytes: int
    """Bytes of its inputs and outputs; of a collective, the larger of both."""
    made_bytes: int
    """Bytes of new storages among its outputs: what keeping them keeps."""
    saved_bytes: int = 0
    """Bytes that autograd saves, of `made_bytes`."""
    ranks: int = 0
    """Ranks that take part in a collective; 0 for every other call."""
    group: str = ""
    """Process group of a collective."""

    @property
    def key(self) -> tuple[str, int]:
        return (self.operator, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one forward and one backward of a module were seen to do."""

    forward: tuple[Call, ...]
    backward: tuple[Call, ...]
    """With the recompute's calls, where there was one."""
    parameters: int
    """Elements."""
    input_bytes: int
    """Bytes of the input, where autograd saves it; 0 if it does not."""
    saved_bytes: int
    """Distinct storages that autograd saves, the input's included; parameters and buffers are not."""
    output_bytes: int
    last_saving_call: int
    """Index of the last forward call that makes something saved, with which a recompute ends; -1 for none."""
    forward_working_bytes: int
    """The most that the forward had alive of what it made."""
    backward_working_bytes: int
    """The most that was alive in the backward beyond what was when it began: gradients, the output's
    included, and what was made again."""
    moving_working_bytes: int
    """The most of what the backward made, and of the saved bytes that its node read. To an engine that moves
    saved bytes what was read is gone, and its room filled, before the node has run."""


def trace(
    module: nn.Module,
    make_input: Callable[[], Tensor],
    *,
    recompute: bool = False,
    context_fn: ContextFn | None = None,
) -> Trace:
    """Run the module once each way, on whatever device it is on.

    make_input: a new input; it gets a gradient if its type can have one.
    recompute: under torch's checkpoint, with `context_fn` if that is given.
    """
    for parameter in (own for own in module.parameters() if own.requires_grad):
        # the first microbatch of a step makes them, what comes after adds
        parameter.grad = torch.zeros_like(parameter)
    x = make_input()
    if x.is_floating_point():
        x.requires_grad_()
    seen = _Seen([*module.parameters(), *module.buffers()], x)
    with seen, saved_tensors_hooks(seen.pack, seen.unpack):
        if not recompute:
            y = module(x)
        elif context_fn is None:
            y = checkpoint(module, x, use_reentrant=False)
        else:
            y = checkpoint(module, x, use_reentrant=False, context_fn=context_fn)
    forward, forward_peak = seen.calls(), seen.peak_bytes
    output_bytes = y.untyped_storage().nbytes()
    gradient = torch.empty_like(y)
    edge = get_gradient_edge(y) if y.requires_grad else None  # an embedding that is frozen has none
    # what follows in the backward has let it go
    del y
    seen.begin_backward()
    with seen:
        seen.alive([gradient])
        if edge is not None:
            torch.autograd.backward(edge, gradient)
    return Trace(
        forward=forward,
        backward=seen.calls(),
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        input_bytes=seen.input_bytes,
        saved_bytes=seen.saved_bytes,
        output_bytes=output_bytes,
        last_saving_call=max((at for at, call in enumerate(forward) if call.saved_bytes), default=-1),
        forward_working_bytes=forward_peak,
        backward_working_bytes=seen.peak_bytes - seen.began_bytes,
        moving_working_bytes=seen.moving_peak_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """What the two halves of a backward that torch's schedules split were seen to do."""

    input: tuple[Call, ...]
    weight: tuple[Call, ...]
    read_bytes: int
    """Bytes that the weight half reads, of what autograd saves."""
    passed_bytes: int
    """Of these, bytes that the input half does not read."""
    held_bytes: int
    """Gradients of products' outputs, which torch keeps from the input half to the weight half."""


def trace_halves(module: nn.Module, make_input: Callable[[], Tensor]) -> Halves:
    """Run the module forward, and backward in two halves, as `trace` does. make_input: must require gradients
    of its type."""
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = make_input().requires_grad_()
    seen = _Seen([*module.parameters(), *module.buffers()], x)
    with seen, saved_tensors_hooks(seen.pack, seen.unpack):
        y = module(x)
    seen.begin_backward()
    seen.read.clear()
    with seen:
        groups = stage_backward_input([y], [torch.empty_like(y)], [x], iter(module.parameters()))[1]
    x.grad = None  # has been sent
    del y
    held_bytes, calls = seen.made_bytes, seen.calls()
    seen.begin_backward()
    read, seen.read = seen.read, {}
    with seen:
        stage_backward_weight(iter(module.parameters()), groups)
    return Halves(
        input=calls,
        weight=seen.calls(),
        read_bytes=sum(seen.read.values()),
        passed_bytes=sum(nbytes for key, nbytes in seen.read.items() if key not in read),
        held_bytes=held_bytes,
    )


class _Seen(TorchDispatchMode):
    """The calls so far, and the storages that are alive."""

    def __init__(self, still: Iterable[Tensor], x: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no annotations
        self.live_bytes = self.peak_bytes = self.began_bytes = 0
        self.saved_bytes = self.input_bytes = 0
        self.made_bytes = self.moving_peak_bytes = 0  # of the pass that runs
        self._still = {tensor.untyped_storage()._cdata for tensor in still}
        self._input = x.untyped_storage()._cdata
        self._alive: dict[int, int] = {}  # address of a storage -> index of the call that made it
        self._saved: set[int] = set()
        self._calls: list[Call] = []
        self._numbers: Counter[str] = Counter()
        self._first = 0  # of the pass that runs
        self._reading: dict[int, int] = {}  # by storage: what the node that runs has read
        self.read: dict[int, int] = {}  # by storage: saved bytes that kernels have read
        self._reads_on = False  # no kernel has run since the last read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given, made = _tensors((args, kwargs)), _tensors(out)
        if str(func._overloadpacket) in _WITHOUT_KERNEL:
            self.alive(made)
            return out
        known = {tensor.untyped_storage()._cdata for tensor in given}
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in known]
        if not new and not func._schema.is_mutable:
            return out  # a view
        for storage in (tensor.untyped_storage() for tensor in given):
            if storage._cdata in self._saved:
                self.read[storage._cdata] = storage.nbytes()
        self._note(func, args, kwargs, given, made, new, out)
        self.alive(new, _workspace_bytes(func, args))
        return out

    def _note(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], made: list[Tensor], new: Any, out: Any
    ) -> None:
        self._reads_on = False
        name = str(func)
        read, written = (sum(map(_nbytes, tensors)) for tensors in (given, made))
        collective = "c10d" in func.namespace
        values = _arguments(func, args, kwargs)
        counted = flop_registry.get(func._overloadpacket)
        flops = 0 if counted is None else _flops(counted, args, kwargs, out)
        self._calls.append(
            Call(
                operator=name,
                number=self._numbers[name],
                # the counter knows no mask: half of what it counts lies above the diagonal
                flops=flops // 2 if values.get("is_causal") else flops,
                touched_bytes=max(read, written) if collective else read + written,
                made_bytes=sum(
                    {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in new}.values()
                ),
                ranks=_ranks(values) if collective else 0,
                group=str(values.get("group_name", "")) if collective else "",
            )
        )
        self._numbers[name] += 1

    def alive(self, tensors: Iterable[Tensor], workspace_bytes: int = 0) -> None:
        """Count storages that are new, from now to their ends; and what a kernel needs while it runs."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, nbytes = storage._cdata, _rounded(storage.nbytes())
            if key in self._alive or key in self._still or key == self._input:
                continue
            self._alive[key] = len(self._calls) - 1
            self.live_bytes += nbytes
            self.made_bytes += nbytes
            weakref.finalize(storage, self._ended, key, nbytes, self._first)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace_bytes)
        here_bytes = self.made_bytes + sum(self._reading.values()) + workspace_bytes
        self.moving_peak_bytes = max(self.moving_peak_bytes, here_bytes)

    def _ended(self, key: int, nbytes: int, first: int) -> None:
        del self._alive[key]
        self._saved.discard(key)  # another storage may come to be there
        self.live_bytes -= nbytes
        if first == self._first:
            self.made_bytes -= nbytes

    def pack(self, tensor: Tensor) -> Tensor:
        """autograd saves this."""
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if not nbytes or key in self._still or key in self._saved:
            return tensor
        self._saved.add(key)
        self.saved_bytes += nbytes
        if key == self._input:
            self.input_bytes = nbytes
        elif key in self._alive:
            at = self._alive[key]
            call = self._calls[at]
            self._calls[at] = replace(call, saved_bytes=call.saved_bytes + nbytes)
        return tensor

    def unpack(self, tensor: Tensor) -> Tensor:
        """A node of the backward asks for this: for all that it saved, and then it runs."""
        storage = tensor.untyped_storage()
        if not self._reads_on:
            self._reading.clear()
            self._reads_on = True
        if storage._cdata in self._saved:
            self._reading[storage._cdata] = storage.nbytes()
        return tensor

    def calls(self) -> tuple[Call, ...]:
        return tuple(self._calls[self._first :])

    def begin_backward(self) -> None:
        self._first = len(self._calls)
        self._numbers.clear()
        self.made_bytes = self.moving_peak_bytes = 0
        self.peak_bytes = self.began_bytes = self.live_bytes


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRANULE) * _GRANULE


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _ranks(values: dict[str, Any]) -> int:
    """Ranks of a functional collective; an exchange names a part for each."""
    parts = values.get("output_split_sizes")
    return int(values.get("group_size", 0)) if parts is None else len(parts)


def _workspace_bytes(func: Any, args: Any) -> int:
    """What a kernel allocates inside and frees at its end. The fused attention's backward adds up the
    queries' gradients in float32, and key and value gradients for each query head where heads share them (the
    source of FlashAttention 2, `mha_bwd`)."""
    if str(func._overloadpacket) != "aten._scaled_dot_product_flash_attention_backward":
        return 0
    query, key = args[1], args[2]
    shared = query.shape[1] != key.shape[1]
    return 4 * int(query.numel()) + (2 * _nbytes(query) if shared else 0)


def _flops(counted: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """What torch's counter counts of a call. That of torch 2.11 knows no attention whose keys have fewer
    heads than its queries: it is given as many, which the kernel computes, too."""
    try:
        return int(counted(*args, **kwargs, out_val=out))
    except AssertionError:
        heads = max(each.shape[1] for each in args if isinstance(each, Tensor) and each.dim() == 4)
        args = tuple(
            torch.empty(each.shape[0], heads, *each.shape[2:], device="meta")
            if isinstance(each, Tensor) and each.dim() == 4
            else each
            for each in args
        )
        return int(counted(*args, **kwargs, out_val=out))
