"""Weights of a step that is still under way: the first use of one waits for it, through a module or not.

While a weight is on its way its class is a subclass of Parameter whose `__torch_function__` waits, makes it a
plain Parameter again, and then does what was asked; its gradient, which the step still reads, likewise. The
modules of a model do the same just before their forward, so that what they pass to C++ is plain. One
invariant: between `step()` and the wait, nothing in Python computes with the weight or its gradient.

What cannot be seen: a view that was taken before `step()` and is read after it; a functional transform
(torch.func) that is given a weight itself, and wraps it in C++; C++ that reads a weight past torch's
functions (a TorchScript module, a bare collective); a lane that was ordered behind the step's before that
lane waited, and reads beside it. Who does so calls `synchronize_parameters()` there. A graph that is replayed
calls no Python: in a region of the engine each replay waits before it; after a capture elsewhere, or a
compiled forward, `step()` itself waits for all.

    step()                         watch: a subclass becomes the class of each weight that is stepped
    a touch, a module's forward    arrive: wait, then the weight is a plain Parameter again
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.compile.untraced import untraced
from offload.engine import Client, OffloadEngine
from offload.optim.stepping import HostedSteps

__all__ = ["AwaitedGradient", "AwaitedWeight", "WeightWatch", "arrived"]

logger = logging.getLogger(__name__)

_OWNER = "_offload_step"  # attribute of what is awaited: (steps, index)

_T: Any = Tensor
_LOOKS = {
    *(getattr(_T.grad, accessor) for accessor in ("__get__", "__set__", "__delete__")),
    *(
        getattr(_T, name).__get__
        for name in ("requires_grad", "is_leaf", "grad_fn", "shape", "ndim", "dtype", "device", "layout")
    ),
    _T._version.__get__,
    *(
        getattr(_T, name)
        for name in ("size", "stride", "numel", "dim", "element_size", "is_contiguous", "is_floating_point")
    ),
}
"""What reads and writes no element, and so need not wait."""


class _Awaited(Tensor):
    """Waits at the first touch. Never made, only put in place of a tensor's class."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        arrived((args, kwargs))
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        arrived(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        arrived(self)
        return self.__reduce_ex__(protocol)


class AwaitedGradient(_Awaited):
    """A gradient that the step still reads."""


class AwaitedWeight(_Awaited, nn.Parameter):
    """A weight on its way."""


@untraced
def arrived(found: Any) -> None:
    """Have the current lane wait for what is awaited among `found`, in tuples, lists and dictionaries too; it
    is plain after this. Blocks the host until the step's part is issued."""
    for tensor in _awaited_in(found):
        owner = vars(tensor).get(_OWNER)
        if owner is not None:
            steps, index = owner
            steps.arrive((index,))
        if isinstance(tensor, _Awaited):  # its step ended with others, or failed
            _make_plain(tensor)


def _awaited_in(found: Any) -> Iterator[Tensor]:
    if isinstance(found, _Awaited):
        yield found
    elif isinstance(found, (tuple, list)):
        for each in found:
            yield from _awaited_in(each)
    elif isinstance(found, dict):
        for each in found.values():
            yield from _awaited_in(each)


def _make_plain(tensor: Tensor) -> None:
    vars(tensor).pop(_OWNER, None)
    tensor.__class__ = nn.Parameter if type(tensor) is AwaitedWeight else Tensor


_READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read the weights of modules below them without a call, by a way of their own."""


class WeightWatch(Client):
    """The weights of one optimizer while they are on their way; the engine's client "optim".

    steps: whose. parameters: by index. Held by the optimizer; what it registers holds it weakly.
    """

    name = "optim"

    def __init__(self, engine: OffloadEngine, steps: HostedSteps) -> None:
        self._engine = engine
        self._steps = steps
        self._watched: dict[int, Tensor] = {}
        self._handles: list[Any] = []
        self.replays_unseen = False
        """A graph may be replayed, or a compiled forward run, that tells nobody: step() waits for all."""
        steps.when_waited = self._waited
        engine.attach(self)

    def attach(self, model: nn.Module, indices: Mapping[int, int]) -> None:
        """Each module of `model` waits for its own weights just before its forward. indices: of the
        parameters, by id."""
        self.detach()
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

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @staticmethod
    def can_watch(parameter: Tensor) -> bool:
        """Whether its class can be put back: torch's own Parameter, whose gradient is a plain tensor. What
        FSDP2 shards is read by its gathers past Python."""
        return type(parameter) in (nn.Parameter, AwaitedWeight) and (
            (gradient := parameter.grad) is None
            or (type(gradient) in (Tensor, AwaitedGradient) and not gradient._is_view())
        )

    def watch(self, index: int, parameter: Tensor, *, gradient: bool) -> None:
        """From now on whoever touches the parameter, or with `gradient` its gradient, waits first."""
        self._watched[index] = parameter
        if gradient and (found := parameter.grad) is not None:
            self._await(found, AwaitedGradient, index)
        self._await(parameter, AwaitedWeight, index)

    def _await(self, tensor: Tensor, cls: type[_Awaited], index: int) -> None:
        vars(tensor)[_OWNER] = (self._steps, index)
        tensor.__class__ = cls

    def _waited(self, index: int) -> None:
        parameter = self._watched.pop(index, None)
        if parameter is None:
            return
        if isinstance(parameter, AwaitedWeight):
            _make_plain(parameter)
        if isinstance(gradient := parameter.grad, AwaitedGradient):
            _make_plain(gradient)

    # -- graphs ----------------------------------------------------------------------------------------------
    def capture_begins(self) -> None:
        """As Client: nothing in flight may be waited for in the capture."""
        self._steps.settle_host()

    def capture_ends(self) -> None:
        """As Client: each replay of the graph waits for the step before it."""
        capture = self._engine.transfers.capture
        if capture is not None:
            reference = weakref.ref(self)
            capture.before_replay.append(lambda: _arrive(reference))

    def before_forward(self, indices: Sequence[int]) -> None:
        """A module is about to read these weights."""
        if self._engine.device.is_capturing() and self._engine.transfers.capture is None:
            self._tell("a forward is captured outside of a region of the optimizer's engine")
        self._steps.arrive(indices)

    @untraced
    def before_compiled(self) -> None:
        """A compiled forward is about to read weights: which, its module's hooks will not say again."""
        self._tell("a compiled forward reads the optimizer's weights")
        self._steps.arrive(None)

    def _tell(self, why: str) -> None:
        if not self.replays_unseen:
            self.replays_unseen = True
            logger.warning(
                "%s: when it runs again cannot be told from other work, so from now on step() waits for all "
                'weights, as overlap="step" does',
                why,
            )

    def close(self) -> None:
        self._engine.detach(self)
        self.detach()


class _Hook:
    """Before a module's forward. A copy of the module, or what is read from a pickle of it, has its own
    weights and nothing to wait for."""

    __slots__ = ("_indices", "_watch")

    def __init__(self, watch: weakref.ref[WeightWatch], indices: Sequence[int]) -> None:
        self._watch = watch
        self._indices = indices

    def __call__(self, *_: object, **__: object) -> None:
        if torch.compiler.is_compiling():
            self._compiled()
            return
        watch = self._watch()
        if watch is not None:
            watch.before_forward(self._indices)

    @untraced
    def _compiled(self) -> None:
        watch = self._watch()
        if watch is not None:
            watch.before_compiled()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        return _Nothing()

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    """What a hook is in a copy of its module."""

    def __call__(self, *_: object, **__: object) -> None:
        pass


def _arrive(reference: weakref.ref[WeightWatch]) -> None:
    """A graph may outlive the optimizer."""
    watch = reference()
    if watch is not None:
        watch._steps.arrive(None)
