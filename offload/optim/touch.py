"""Weights of a step that is still under way: the first use of one waits for it, through a module or not.

While a weight is on its way its class is a subclass of Parameter whose `__torch_function__` waits, makes it a
plain Parameter again, and then does what was asked; its gradient, which the step still reads, likewise. The
modules of a model do the same just before their forward, so that what they pass to C++ is plain. One
invariant: between `step()` and the wait, nothing in Python computes with the weight or its gradient.

Reads that cannot be seen are listed at HybridDeviceOptimizer's `overlap`; code with such reads calls
`synchronize_parameters()` before them. A graph that is replayed calls no Python. If it was captured in a
region of the engine, each replay waits first. After a capture elsewhere, or a compiled forward, `step()`
itself waits for all weights.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.client import weakly
from offload.compile import Unscripted, untraced
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.optim.stepping import HostedSteps
from offload.params.watched import Watched, accessors, home_of, untouched, watched_in
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_GET_DATA, _SET_DATA = accessors("data", "__get__"), accessors("data", "__set__")
_OWNER = "_offload_step"  # attribute of what is awaited: (steps, index)


class _Awaited(Watched):
    """Waits at the first touch. Never made, only put in place of a tensor's class."""

    @classmethod
    def touch(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        await_all((args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def make_ready(cls, found: Any) -> None:
        await_all(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        await_all(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        await_all(self)
        return self.__reduce_ex__(protocol)


class AwaitedGradient(_Awaited, Tensor):
    """A gradient that the step still reads, or another tensor whose copy is in flight."""


class SteppedGradient(AwaitedGradient, Tensor):
    """A gradient that was stepped in the backward. step() looks at its version, which its `.data` shares; who
    writes it before that and moves no version is as one who touches the weight."""

    @classmethod
    def touch(cls, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = str(getattr(func, "__name__", ""))
        # the last ones of DTensors
        silent = "fused" in name or "_amp_" in name or ("_foreach_" in name and name.endswith("_"))
        if silent or func in _SET_DATA or cls.of_collectives(func):
            await_all((args, kwargs))
        return untouched(Tensor.detach if func in _GET_DATA else func, args, kwargs)


class AwaitedWeight(_Awaited, nn.Parameter):
    """A weight on its way."""


class SpentGradient(Watched):
    """A streamed weight's gradient that was stepped in the backward: its memory is given back behind that."""

    @classmethod
    def make_ready(cls, found: Any) -> None:
        for tensor in watched_in(found, cls):
            raise OffloadError(
                f"the gradient of {vars(tensor)[_OWNER]} was stepped in the backward, and its memory is free "
                'since: use overlap="forward" or "step" to read, clip or keep gradients of streamed weights, '
                "and clear them after step() with zero_grad(set_to_none=True)"
            )

    @classmethod
    def spend(cls, tensor: Tensor, name: str) -> None:
        """From now on nobody may touch it."""
        vars(tensor)[_OWNER] = name
        tensor.__class__ = cls


class Awaits(Protocol):
    """Who issues the wait for what is on its way."""

    def await_weights(self, indices: Sequence[int]) -> None: ...


def watch(tensor: Tensor, owner: Awaits, index: int = 0, *, stepped: bool = False) -> None:
    """Whoever touches the tensor, torch's own Tensor or Parameter, has `owner` wait first; who writes it,
    where it is a gradient that was stepped."""
    vars(tensor)[_OWNER] = (owner, index)
    kind: type[_Awaited] = AwaitedWeight if isinstance(tensor, nn.Parameter) else AwaitedGradient
    tensor.__class__ = _stepped(type(tensor)) if stepped else kind


@functools.cache
def _stepped(kind: Any) -> Any:
    """Class of a stepped gradient that is a tensor of torch's, or a DTensor."""
    plain = SteppedGradient if kind is Tensor else kind
    return plain if issubclass(plain, SteppedGradient) else type("SteppedShard", (SteppedGradient, kind), {})


@untraced
def await_all(found: Any) -> None:
    """Have the current lane wait for what is awaited among `found`, in tuples, lists and dictionaries too; it
    is plain after this. Blocks the host until the step's part is issued."""
    for tensor in watched_in(found, _Awaited):
        if (owner := vars(tensor).get(_OWNER)) is not None:
            steps, index = owner
            steps.await_weights((index,))
        if isinstance(tensor, _Awaited):  # its step ended with others, or failed
            _make_plain(tensor)


def _make_plain(tensor: Tensor) -> None:
    kind = type(tensor)  # once: another thread may make it plain meanwhile
    vars(tensor).pop(_OWNER, None)
    if issubclass(kind, _Awaited):
        tensor.__class__ = kind.__bases__[-1]


_READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read the weights of modules below them without a call, by a way of their own."""


class WeightWatch:
    """The weights of one optimizer while they are on their way. Held by the optimizer; what it registers
    holds it weakly."""

    def __init__(self, engine: OffloadEngine, steps: HostedSteps) -> None:
        self._engine = engine
        self._steps = steps
        self._watched: dict[int, Tensor] = {}  # parameters, by index
        self._handles: list[Any] = []
        self.replays_unseen = False
        """A graph may be replayed, or a compiled forward run, that tells nobody: step() waits for all."""
        steps.when_waited = weakly(self._waited)

    def attach(self, model: nn.Module, indices: Mapping[int, int]) -> None:
        """Each module of `model` waits for its own weights just before its forward. indices: of the
        parameters, by id."""
        self.close()
        reference = weakref.ref(self)
        for module in model.modules():
            below = isinstance(module, _READ_BELOW)
            mine = [indices[key] for p in module.parameters(recurse=below) if (key := id(p)) in indices]
            if mine:
                hook = _Hook(reference, mine)
                self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        for parameter in model.parameters():
            if (index := indices.get(id(parameter))) is not None and parameter.requires_grad:
                # a backward of a forward before step() adds to the gradient in C++
                self._handles.append(parameter.register_hook(_Hook(reference, [index])))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(self, index: int, parameter: Tensor, *, gradient: bool) -> bool:
        """From now on whoever touches the parameter, or with `gradient` its gradient, waits first. False,
        and nothing, where its class could not be put back: it is not torch's own Parameter with a plain
        gradient. What FSDP2 shards is read by its gathers past Python. A weight that has a home keeps its
        class: who streams it waits before each use."""
        found, streams = parameter.grad, home_of(parameter) is not None
        if isinstance(found, SpentGradient) or (isinstance(found, Watched) and found.comes_and_goes):
            found = None  # nobody may touch it, or its owner waits before it changes
        is_plain = found is None or type(found) is Tensor or isinstance(found, AwaitedGradient)
        if not (is_plain and (streams or type(parameter) in (nn.Parameter, AwaitedWeight))):
            return False
        if found is not None and found._is_view():
            return False
        self._watched[index] = parameter
        if gradient and found is not None:
            watch(found, self._steps, index)
        if not streams:
            watch(parameter, self._steps, index)
        return True

    def _waited(self, index: int) -> None:
        if (parameter := self._watched.pop(index, None)) is not None:
            for tensor in (parameter, parameter.grad):
                if isinstance(tensor, _Awaited):
                    _make_plain(tensor)

    def before_forward(self, indices: Sequence[int] | None) -> None:
        """A module is about to read these weights; None: a compiled forward is about to read weights, and its
        modules' hooks will not say again which."""
        if indices is None:
            self._warn("a compiled forward reads the optimizer's weights")
        elif self._engine.device.is_capturing() and self._engine.transfers.capture is None:
            self._warn("a forward is captured outside of a region of the optimizer's engine")
        self._steps.await_weights(indices)

    def _warn(self, why: str) -> None:
        if not self.replays_unseen:
            self.replays_unseen = True
            logger.warning(
                f"{why}: when it runs again cannot be told from other work, so from now on step() waits for "
                'all weights, as overlap="step" does'
            )


class _Hook(Unscripted):
    """Before a module's forward. A copy of the module, or what is read from a pickle of it, has its own
    weights and nothing to wait for."""

    __slots__ = ("_indices", "_watch")

    def __init__(self, watch: Callable[[], WeightWatch | None], indices: Sequence[int]) -> None:
        self._watch = watch
        self._indices = indices

    def __call__(self, *_: object, **__: object) -> None:
        if torch.compiler.is_compiling():
            self._wait_untraced()
        elif (watch := self._watch()) is not None:
            watch.before_forward(self._indices)

    @untraced
    def _wait_untraced(self) -> None:
        if (watch := self._watch()) is not None:
            watch.before_forward(None)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_no_watch, ())


def _no_watch() -> None:
    """The watch of a copied hook: none."""
