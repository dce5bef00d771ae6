"""The pair of forward hooks that a module gets, and what an output's backward tells.

One invariant: what the first hook of a call has opened, the second one closes, also where the forward raised;
neither changes an argument or an output, or adds a node to autograd's graph. A copy of the module, by
deepcopy or pickle, has hooks that do nothing: it is not offloaded.

An exception that is no Exception (KeyboardInterrupt) passes by `always_call`, and no hook is told. So a call
under way knows the frame that called its module. The thread's next hook, of any root, finds it off the stack,
and closes what the call had opened; so does `end_interrupted`.

torch.compile traces hooks together with their module. These are called and never traced: two graph breaks a
module.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.compile import Unscripted, untraced

_PARTS_LOOKED_AT = 64  # of an output: a hidden state for each layer, at most


INTERRUPTED: Final = object()
"""The output of a forward that was left by an exception that hooks are not told of."""

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_MODULE_CALL = nn.Module._call_impl.__code__


def _in_a_copy(*arguments: Any) -> None:
    """The hook that a copy of a module has."""


def _copied_hook() -> Callable[..., None]:
    return _in_a_copy


class _Hook(Unscripted):
    """A hook that a copy of its module does not keep."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    @untraced
    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _copied_hook, ()


class HookPair:
    """Calls `enter(module, args, kwargs)` before each forward of `module`, and `leave(state, output, failed)`
    after it with what `enter` returned; for nested calls, innermost first.

    failed: whether the forward raised; `output` is then None, what it had returned before another hook
    raised, or INTERRUPTED. Raises whatever `enter` raises; `leave` is not called then. calls: of all pairs of
    one root. `enter` is given the module that is called: copy.copy(module) has the same hooks.
    """

    def __init__(
        self,
        module: nn.Module,
        enter: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any],
        leave: Callable[[Any, Any, bool], None],
        calls: CallsUnderWay,
    ) -> None:
        self._enter = enter
        self.leave = leave
        self.calls = calls
        self._module = weakref.ref(module)
        self._handles: tuple[RemovableHandle, ...] = ()
        self._is_removed = False
        self.wake()

    def wake(self) -> None:
        """Register the hooks, unless they are, or were removed."""
        module = self.module
        if module is not None and not self._handles and not self._is_removed:
            # the first of all hooks before, so that what other hooks compute is inside as well
            before = module.register_forward_pre_hook(_Hook(self.before), prepend=True, with_kwargs=True)
            after = module.register_forward_hook(_Hook(self._after), always_call=True)
            self._handles = (before, after)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def rest(self) -> None:
        """Take the hooks off until `wake`."""
        handles, self._handles = self._handles, ()
        for handle in handles:
            handle.remove()

    def remove(self) -> None:
        self._is_removed = True
        self.rest()

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        frame = _module_call(sys._getframe())
        self.calls.end_interrupted(frame)
        handled = sys.exc_info()[1]
        state = self._enter(module, args, kwargs)
        _thread.innermost_last.append(_CallUnderWay(self, handled, state, frame, _top_hooks(True)))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls = _thread.innermost_last
        for at in reversed(range(len(calls))):
            call = calls[at]
            if call.pair is self:
                del calls[at]
                raised = sys.exc_info()[1]
                self.leave(call.state, output, raised is not None and raised is not call.handled)
                return
        # else the hook before raised, or was not there yet


class _CallUnderWay(NamedTuple):
    """handled: the exception that was being handled when the call began. state: what `enter` returned. frame:
    that called the module; None where it cannot be told. top: the innermost saved-tensor hooks from then
    on."""

    pair: HookPair
    handled: BaseException | None
    state: Any
    frame: FrameType | None
    top: Any


class _Thread(threading.local):
    """The calls that have begun and not ended, of each thread its own: hooks of autograd are a thread's,
    whoever installs them."""

    def __init__(self) -> None:
        self.innermost_last: list[_CallUnderWay] = []


_thread = _Thread()


class CallsUnderWay:
    """Calls of one root's modules in this thread."""

    def __bool__(self) -> bool:
        return any(call.pair.calls is self for call in _thread.innermost_last)

    @staticmethod
    def end_interrupted(frame: FrameType | None) -> None:
        """Leave the calls, of any root, whose frame is neither `frame` nor outside of it. In a backward, at
        whose end the thread has the hooks of its begin again, none."""
        calls = [] if torch._C._current_graph_task_id() != -1 else _thread.innermost_last
        while calls and calls[-1].frame is not None and not _encloses(calls[-1].frame, frame):
            call = calls.pop()
            with _up_to(call.top):
                call.pair.leave(call.state, INTERRUPTED, True)


@contextmanager
def _up_to(pair: Any) -> Iterator[None]:
    """Inside, these saved-tensor hooks are the innermost: those that came on top, as of a checkpoint around
    the next forward, are set aside. None, or hooks that are gone: nothing is."""
    above = []
    while pair is not None and (top := _top_hooks(True)) not in (pair, None):
        above.append(top)
        _pop_hooks()
    if above and _top_hooks(True) is None:
        _push_all(above)
    try:
        yield
    finally:
        _push_all(above)


def _push_all(pairs: list[Any]) -> None:
    while pairs:
        _push_hooks(*pairs.pop())


def _module_call(frame: FrameType | None) -> FrameType | None:
    """The innermost call of a module."""
    while frame is not None and frame.f_code is not _MODULE_CALL:
        frame = frame.f_back
    return frame


def _encloses(outer: FrameType, frame: FrameType | None) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is outer


def output_tensors(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of an output that have a backward. output: a tensor, or tuples, lists, mappings and
    dataclasses of such."""
    left = _PARTS_LOOKED_AT
    waiting = [output]
    while waiting and left:
        left -= 1
        part = waiting.pop(0)
        if isinstance(part, torch.Tensor):
            if part.grad_fn is not None:
                yield part
        elif isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, (tuple, list)):
            waiting += part
        elif is_dataclass(part) and not isinstance(part, type):
            waiting += (getattr(part, field.name) for field in fields(part))
