"""Mode "auto": blocks that run plain need no hooks, and a model of which all fits needs one alone.

    a block that runs plain      has none, but for the last one of a model, which says that the head begins
    a model whose blocks all do  has one, before its forward, which looks whether that is longer than those
                                 that were measured, or more is on the device before it than the total leaves.
                                 Then all hooks are back, in that very forward

One invariant: what rests is counted as it ran when it was measured, and whatever changes wakes all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.compile import Unscripted, untraced
from offload.modules.hooks import HookPair
from offload.modules.root import ModelRoot, given_bytes
from offload.modules.steps import Steps


class _Hooked(NamedTuple):
    """own: of the model. blocks: by name."""

    own: HookPair
    blocks: Mapping[str, HookPair]
    steps: Steps

    @property
    def is_compiled(self) -> bool:
        """Predicate: its graphs would be recompiled without hooks."""
        modules = (pair.module for pair in (self.own, *self.blocks.values()))
        return any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)


class Rests:
    """Hooks that rest, of all models of one mode. woken: called when they are there again."""

    def __init__(self, woken: Callable[[], object]) -> None:
        self._woken = woken
        self._hooked: WeakKeyDictionary[ModelRoot, _Hooked] = WeakKeyDictionary()
        self._asleep: list[RemovableHandle] = []
        self.any = False

    def add(self, root: ModelRoot, own: HookPair, blocks: Mapping[str, HookPair], steps: Steps) -> None:
        """A model that the mode is applied to."""
        self.wake()
        self._hooked[root] = _Hooked(own, blocks, steps)

    def drop(self, root: ModelRoot) -> None:
        """The model is gone, or the mode is no longer applied to it. What is asleep of it is taken off."""
        self._hooked.pop(root, None)
        self.wake()

    def rest(
        self,
        plain: Mapping[int, frozenset[str]],
        most_bytes: float | None,
        active_bytes: Callable[[], int],
    ) -> frozenset[str]:
        """Take the hooks off. plain: by stage, blocks that run plain in each of their calls. most_bytes: on
        the device, asked of `active_bytes`, before a forward, where these are all blocks of all models; else
        None. Returns the blocks that have none now."""
        self.any = True
        found = frozenset[str]()
        for root, hooked in list(self._hooked.items()):
            if not root.runs_inside or root.has_checkpoints or hooked.is_compiled:
                continue
            names = plain.get(root.stage, frozenset()) & hooked.blocks.keys()
            is_alone = most_bytes is not None and len(self._hooked) == 1 and root.given_bytes > 0
            if not is_alone:
                names = frozenset(name for name in names if not root.is_last(name))
            for name in names:
                hooked.blocks[name].rest()
            root.resting = names
            found |= names
            if is_alone:
                self._sleep(root, hooked, lambda: active_bytes() <= (most_bytes or 0))
        return found

    def wake(self) -> None:
        """All hooks are there again."""
        if not self.any:
            return
        self.any = False
        self._woken()
        for root, hooked in self._hooked.items():
            if self._asleep:
                hooked.steps.add(root)
            hooked.own.wake()
            for pair in hooked.blocks.values():
                pair.wake()
            root.resting = frozenset()
        for handle in self._asleep:
            handle.remove()
        self._asleep.clear()

    def _sleep(self, root: ModelRoot, hooked: _Hooked, has_room: Callable[[], bool]) -> None:
        model = hooked.own.module
        if model is None:
            return
        hooked.own.rest()
        hooked.steps.discard(root)
        look = _Look(self, hooked.own, root.given_bytes, has_room)
        self._asleep.append(model.register_forward_pre_hook(look, prepend=True, with_kwargs=True))


class _Look(Unscripted):
    """The one hook of a model of which all fits."""

    def __init__(self, rests: Rests, own: HookPair, most_bytes: int, has_room: Callable[[], bool]) -> None:
        self._rests, self._own, self._most_bytes, self._has_room = rests, own, most_bytes, has_room

    @untraced
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        if given_bytes((args, kwargs)) > self._most_bytes or not self._has_room():
            self._rests.wake()
            self._own.before(module, args, kwargs)

    def __reduce__(self) -> Any:
        return _nothing, ()


def _nothing() -> Any:
    """Return what a copy of the model has in its place: a function that does nothing."""
    return lambda *_: None
