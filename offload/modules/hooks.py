"""The pair of forward hooks that a module gets, and what an output's backward tells.

One invariant: what the first hook of a call has opened, the second one closes, also where the forward raised;
neither changes an argument or an output, or adds a node to autograd's graph. A copy of the module, by
deepcopy or pickle, has hooks that do nothing: it is not offloaded.

torch.compile traces hooks together with their module. These are called and never traced: two graph breaks a
module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.compile.untraced import untraced

__all__ = ["CallUnderWay", "HookPair", "output_tensors"]

_PARTS_LOOKED_AT = 64  # of an output: a hidden state for each layer, at most


def _in_a_copy(*arguments: Any) -> None:
    """What a copy of a module has in place of a hook."""


def _copied_hook() -> Callable[..., None]:
    return _in_a_copy


class _Hook:
    """A hook that a copy of its module does not keep."""

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    @untraced
    def __call__(self, *arguments: Any) -> None:
        self._run(*arguments)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return _in_a_copy

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        return _copied_hook, ()


class HookPair:
    """Calls `enter(args, kwargs)` before each forward of `module`, and `leave(state, output, failed)` after
    it with what `enter` returned; for nested calls, innermost first.

    failed: whether the forward raised; `output` is then None, or what it had returned before another hook
    raised. Raises whatever `enter` raises; `leave` is not called then. calls: those under way, of all pairs
    that share the list.
    """

    def __init__(
        self,
        module: nn.Module,
        enter: Callable[[tuple[Any, ...], dict[str, Any]], Any],
        leave: Callable[[Any, Any, bool], None],
        calls: list[CallUnderWay],
    ) -> None:
        self._enter = enter
        self.leave = leave
        self._calls = calls
        # the first of all hooks before, so that what other hooks compute is inside as well
        before = module.register_forward_pre_hook(_Hook(self._before), prepend=True, with_kwargs=True)
        after = module.register_forward_hook(_Hook(self._after), always_call=True)
        self._handles = (before, after)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        handled = sys.exc_info()[1]
        state = self._enter(args, kwargs)
        self._calls.append(CallUnderWay(self, handled, state))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for at in reversed(range(len(self._calls))):
            call = self._calls[at]
            if call.pair is self:
                del self._calls[at]
                raised = sys.exc_info()[1]
                self.leave(call.state, output, raised is not None and raised is not call.handled)
                return
        # else the hook before raised, or was not there yet


class CallUnderWay(NamedTuple):
    """handled: the exception that was being handled when the call began. state: what `enter` returned."""

    pair: HookPair
    handled: BaseException | None
    state: Any

    def abandon(self) -> None:
        """It was interrupted, and no hook was told."""
        self.pair.leave(self.state, None, True)


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
