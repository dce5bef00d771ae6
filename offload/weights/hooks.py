"""What torch, and threads beside a forward, have of streamed weights: modules have hooks of a block's forward
and of state dicts; autograd's graph keeps, instead of a weight or a view of one, which weight it is and its
layout; and other threads may read a weight while its block's forward runs.

One invariant: a copy of a module, by deepcopy or pickle, has hooks that do nothing. The graph keeps no bytes
and no alias, so a block leaves while its backward is still to come, and any read, in whatever order the
backward makes it, loads first. What torch unpacks and does not read, it gets on meta, where a read would
raise. A call of another thread that began before its block's forward ended has ended, or has stood for
`PATIENCE_S`, when the block's bytes are freed. Only threads that were seen to read or write a weight are
looked at.

Inside a block's forward its weights have torch's own class, so a call that another thread makes then is not
seen, and may go on in C++ when the block's bytes are freed. Such a thread has released the interpreter's lock
inside that call: it stands at one instruction until the call ends.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from types import CodeType, FrameType
from typing import Any, cast

import torch
from torch import Tensor, nn

from offload.errors import OffloadError
from offload.saved.handles import is_read, modified
from offload.saved.hooks import SavedTensorHooks, admits_hooks, inside_checkpoint
from offload.weights.weight import BlockHolder, BlockWeights, Close, Weight, in_backward, nobody

_COMPILED, _IN_DYNAMO = ("compile_wrapper", "_fn"), os.path.join("_dynamo", "eval_frame.py")
"""Frames in which torch runs what was compiled: of the block, or of anything around it."""


class BlockCalls:
    """The hooks of a block, as `HookPair` calls them."""

    def __init__(self, stream: BlockHolder, block: BlockWeights) -> None:
        self._stream, self._block = stream, block

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Close:
        frame: FrameType | None = sys._getframe()
        self._block.compiled = False
        while frame is not None:
            if frame.f_code.co_name in _COMPILED and frame.f_code.co_filename.endswith(_IN_DYNAMO):
                run = frame.f_locals.get("self")
                self._block.compiled |= type(run).__name__ == "OptimizeContext"
                _refuse_config(getattr(run, "compiler_config", None), self._block.name)
            frame = frame.f_back
        return self._stream.enter(self._block, args, kwargs)

    def leave(self, close: Close, output: Any, failed: bool) -> None:
        self._stream.leave(self._block, close)


def refuse_recorded_graphs(module: nn.Module, name: str) -> None:
    """Raises ValueError where the module is compiled with CUDA graphs, which read weights at one address."""
    compiled = getattr(module, "_compiled_call_impl", None) or module
    asked = getattr(compiled, "get_compiler_config", None)
    _refuse_config(asked() if callable(asked) else None, name)


def _refuse_config(config: object, name: str) -> None:
    if isinstance(config, dict) and config.get("triton.cudagraphs"):
        raise ValueError(
            f"{name} is compiled with CUDA graphs (mode='reduce-overhead', or triton.cudagraphs), which read "
            "weights at one address, and apply(weights=...) brings them to another one each time; compile it "
            "without, or leave weights= out"
        )


def refuse_without_values(model: nn.Module, args: Any) -> None:
    """A hook before the forwards of a model that was on meta at `apply`, up to the first one with all values.
    Raises OffloadError."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    if names := [name for name, tensor in tensors if tensor.is_meta]:
        raise OffloadError(
            f"{type(model).__name__} runs with {len(names)} parameters or buffers on the meta device, which "
            f"has no values (the first: {names[0]}); call offload.load_weights(model, path) first"
        )
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is refuse_without_values]:
        del model._forward_pre_hooks[key]


class HostState:
    """The module's state_dict() has the host's copy of a weight; load_state_dict(assign=True) is followed. A
    copied module's has no weight."""

    def __init__(self, weight: Weight | None = None) -> None:
        self._weight: Callable[[], Weight | None] = nobody if weight is None else weakref.ref(weight)

    def _here(self, module: nn.Module) -> tuple[Weight, BlockHolder] | None:
        weight = self._weight()
        stream = None if weight is None else cast("BlockHolder | None", weight.holder())
        return (weight, stream) if weight and stream and weight.module() is module else None

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """After state_dict(): with keep_vars the parameter itself stays."""
        if (found := self._here(module)) is not None:
            weight, stream = found
            key = prefix + weight.attribute
            mine = module._parameters.get(weight.attribute)
            has_it = mine is weight.parameter and not weight.without_values
            if has_it and state.get(key, weight.parameter) is not weight.parameter:
                state[key] = weight.expand_later() if weight.int8 else stream.host_copy(weight)

    def loading(self, module: nn.Module, *args: Any) -> None:
        """Before load_state_dict(), which may be given a state dict of this module itself."""
        if (found := self._here(module)) is not None and found[0].is_read_on_host:
            found[1].host_copy(found[0])  # which has the newest bytes then

    def loaded(self, module: nn.Module, keys: Any) -> None:
        """After load_state_dict()."""
        if (found := self._here(module)) is not None:
            found[1].adopt(found[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return HostState, ()


class _TakesNothing:
    """A scope under which saves stay as they are, but for those of streamed weights."""

    min_elements = 1 << 62

    def take(self, tensor: Tensor) -> None:
        return None

    def note_replayed(self, tensor: Tensor) -> None:
        return None


def open_saves(hooks: SavedTensorHooks) -> tuple[Close, bool]:
    """Keep no bytes of streamed weights that are saved from here on, until the returned function is called. A
    checkpoint keeps none in its forward, and in its recompute an alias. Returns also whether torch admits
    saved-tensor hooks here: the weights have to stay where it does not."""
    if hooks.sees_saves():
        return nobody, True
    if inside_checkpoint():
        return hooks.push_aliases() or nobody, True
    if admits_hooks():
        # also without gradients: they may be switched on inside
        return partial(hooks.pop, hooks.push(_TakesNothing())), True
    return nobody, not torch.is_grad_enabled()


def pack(tensor: Tensor, *, weight: Weight, expert: int | None = None) -> _WeightSave | None:
    """Return what to keep of a tensor over the weight's storage, or over that of one of its experts; None for
    one that is not its plain elements."""
    plain = tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
    return _WeightSave(tensor, weight, expert) if plain else None


class _WeightSave:
    """A save."""

    __slots__ = ("_by_expert", "_dtype", "_expert", "_generation", "_layout", "_version", "_weight")

    def __init__(self, tensor: Tensor, weight: Weight, expert: int | None) -> None:
        self._weight = weight
        self._dtype = tensor.dtype
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._expert = expert
        # saved by a Function of the user's, which goes through the weight's class; not inside torch's own
        self._by_expert = weight.experts is not None and not (weight.block.entered or tensor.requires_grad)
        self._version, self._generation = weight.parameter._version, weight.generation

    def read(self) -> Tensor:
        """Unpack as autograd unpacks a saved tensor: raises its error where the weight was written since, and
        OffloadError where it was given other memory, whose bytes torch would not have read. Blocks the host:
        never."""
        weight = self._weight
        if weight.generation != self._generation:
            raise OffloadError(
                f"{weight.name} was replaced, converted, or its .data set, between a forward that used it "
                "and that forward's backward: the bytes that the backward needs are gone; do it after the "
                "backward, or write in place"
            )
        if (found := weight.parameter._version) != self._version:
            raise modified(self._dtype, self._layout[1], found, self._version)
        (offset, *rest), experts = self._layout, weight.experts
        if not is_read(self, SavedTensorHooks):
            size, stride = rest
            return torch.empty_strided(size, stride, dtype=self._dtype, device="meta")
        if experts is not None and self._by_expert:
            view: Tensor | None = experts.view_like((self._dtype, *self._layout))
            if view is not None:
                return view
        if experts is not None and self._expert is not None:
            alias: Tensor = experts.read(self._expert)
        else:
            with torch._C.DisableTorchFunctionSubclass():
                alias = weight.parameter.detach()  # so that no other thread's use takes the bytes away
            weight.use(weight)
            each = weight.nbytes // weight.parameter.shape[0]
            offset += (self._expert or 0) * each // self._dtype.itemsize
        storage = alias.untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=storage.device).set_(storage, offset, *rest)


class CopiedSave:
    """Copy that the graph keeps of a gradient on the host, because the next backward writes the gradient, and
    clearing it gives its bytes up."""

    def __init__(self, tensor: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            own = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            self._copy = own.copy_(tensor)

    def read(self) -> Tensor:
        return self._copy


PATIENCE_S = 0.05
"""Longer than the host's part of an operator on a GPU. What stands longer waits for something else, such as
the next entry of a queue, and is not waited for again until it has been seen once more."""

_OWN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")

_BACKWARD = torch.autograd.graph._engine_run_backward.__name__

Places = dict[int, tuple[int, int]]
"""Where threads stand: by identifier of the thread, the frame and its last instruction."""


class Readers:
    """The threads that read or write weights of one model from outside of its blocks."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._waits: Places = {}
        self.waited_s = 0.0  # of the host, in `await_calls`

    def note(self) -> None:
        """The current thread reads or writes a weight from outside of its block. A backward's does so while
        the one that called it waits."""
        if not in_backward():
            mine = threading.get_ident()
            self._known.add(mine)
            self._waits.pop(mine, None)

    def places(self) -> Places:
        """Where the other threads stand that may be reading a weight unseen. One that stands in this
        package is seen, and one that has called backward() reads none while autograd's thread runs it."""
        mine = threading.get_ident()
        if not self._known - {mine}:
            return {}
        frames = sys._current_frames()
        self._known &= frames.keys()
        frames.pop(mine)  # which would hold itself, and so the others' frames, until a collection
        unseen = [thread for thread in self._known & {*frames} if not _is_seen(frames[thread].f_code)]
        return {thread: (id(frames[thread]), frames[thread].f_lasti) for thread in unseen}

    def await_calls(self, before: Places) -> None:
        """Wait until each thread has left the place where it stood before. Blocks the host, at most
        `PATIENCE_S`."""
        begun = time.monotonic()
        while before:
            now = self.places()
            before = {t: at for t, at in before.items() if now.get(t) == at != self._waits.get(t)}
            if time.monotonic() > begun + PATIENCE_S:
                self._waits |= before
                break
            time.sleep(1e-4)
        self.waited_s += time.monotonic() - begun


def _is_seen(code: CodeType) -> bool:
    return code.co_name == _BACKWARD or code.co_filename.startswith(_OWN)
