"""Who waits for a weight's return: the first module that uses it, just before its forward.

One invariant: a module of the model never computes with a weight that is still on its way. Whoever reads weights past the modules (a print,
a norm, a functional call) asks `synchronize_parameters()` first.

# [Order: weights back]
# hazard  RAW: `compute` reads a weight before `h2d`, or the optimizer's lane, has written it.
# edge    the bucket keeps the event of its return or step; the lane of the first user waits for it, each lane once a step.
# alive   the parameter is the model's.
# proof   tests/property/test_optim_edges.py, edge "weights back"
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from offload.optim.parameters import local_of

__all__ = ["Arrivals"]


class Arrivals:
    """Hooks on a model's modules. arrive: given the indices of parameters, makes the current lane wait for them; may block the host.

    What FSDP2 shards is read by its gathers, ahead of the module: all of that is waited for where a forward begins, at the model or at one
    of FSDP2's modules that is called alone. `FSDPModule.unshard()` begins none: it asks `synchronize_parameters()` first.
    """

    def __init__(self, model: nn.Module, indices: Mapping[int, int], arrive: Callable[[Sequence[int] | None], None]) -> None:
        """indices: of each parameter of the optimizer, by id. Hooks hold `arrive`'s owner weakly."""
        self._handles: list[Any] = []
        method = weakref.WeakMethod(arrive)
        gathering = [module for module in model.modules() if isinstance(module, FSDPModule)]
        gathered = {id(parameter) for module in gathering for parameter in module.parameters() if local_of(parameter) is not parameter}
        for module in model.modules():
            mine = [id(parameter) for parameter in module.parameters(recurse=False) if id(parameter) in indices]
            plain = [indices[key] for key in mine if key not in gathered]
            if plain:
                self._handles.append(module.register_forward_pre_hook(_hook(method, plain), prepend=True))
        sharded = [index for key, index in indices.items() if key in gathered]
        if sharded:
            self._watch_gathers(dict.fromkeys((model, *gathering)), method, sharded)
        everything = _hook(method, None)
        self._handles.append(model.register_state_dict_pre_hook(everything))
        self._handles.append(model.register_load_state_dict_pre_hook(everything))

    def _watch_gathers(self, modules: Iterable[nn.Module], method: _Arrive, sharded: Sequence[int]) -> None:
        arrives, outermost = _hook(method, sharded), _Outermost()
        for module in modules:
            begins = _begins(outermost, arrives)
            self._handles.append(module.register_forward_pre_hook(begins, prepend=True))
            self._handles.append(module.register_forward_hook(_ends(outermost), always_call=True))

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


_Arrive = weakref.WeakMethod[Callable[[Sequence[int] | None], None]]


class _Outermost:
    """How deep a forward is in modules that gather: all that their gathers read is waited for at the outermost."""

    def __init__(self) -> None:
        self.depth = 0


def _begins(outermost: _Outermost, arrives: Callable[..., None]) -> Callable[..., None]:
    def begin(module: nn.Module, *_: object) -> None:
        outermost.depth += 1
        if outermost.depth == 1:
            arrives()
        if isinstance(module, FSDPModule) and _post_optim_event(module) is not None:
            # The gathers would wait for that event alone, which may be older than the return of the weights. Without it they wait for the
            # lane that has just waited.
            module.set_post_optim_event(None)  # type: ignore[arg-type]

    untraced: Callable[..., None] = torch.compiler.disable(begin)
    return untraced


def _ends(outermost: _Outermost) -> Callable[..., None]:
    def end(*_: object) -> None:
        outermost.depth = max(0, outermost.depth - 1)  # a hook before ours may have raised: then it never began

    untraced: Callable[..., None] = torch.compiler.disable(end)
    return untraced


def _post_optim_event(module: FSDPModule) -> object:
    return module._get_fsdp_state()._state_ctx.post_optim_event


def _hook(method: _Arrive, indices: Sequence[int] | None) -> Callable[..., None]:
    def wait(*_: object, **__: object) -> None:
        arrive = method()
        if arrive is not None:
            arrive(indices)

    untraced: Callable[..., None] = torch.compiler.disable(wait)
    return untraced


def parameters_outside(model: nn.Module, parameters: Sequence[Tensor]) -> list[int]:
    """Places of the parameters that no module of the model owns."""
    owned = {id(parameter) for parameter in model.parameters()}
    return [place for place, parameter in enumerate(parameters) if id(parameter) not in owned]
