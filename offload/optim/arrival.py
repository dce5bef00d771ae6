"""Who waits for a weight's return: the first module that uses it, just before its forward.

One invariant: a module of the model never computes with a weight that is still on its way. Whoever reads
weights outside of a forward (a print, a norm, a moving average) asks `synchronize_parameters()` first; a
forward that reads them past their modules is readers.py's.

# [Order: weights back]
# hazard  RAW: `compute` reads a weight before `h2d`, or the optimizer's lane, has written it.
# edge    the bucket keeps the event of its return or step; the lane of the first user waits for it, each lane
#         once a step. Of a captured forward every replay is a user: replayed.py.
# alive   the parameter is the model's.
# proof   tests/property/test_optim_edges.py, edge "weights back"
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from offload.optim.parameters import local_of

__all__ = ["Arrivals"]


class Arrivals:
    """Hooks on a model's modules. arrive: given the indices of parameters, makes the current lane wait for
    them; may block the host.

    What FSDP2 shards is read by its gathers, ahead of the module: all of that is waited for where a forward
    begins, at the model or at one of FSDP2's modules that is called alone; where a backward runs a forward
    again, what is below that module. `FSDPModule.unshard()` begins
    none: it asks `synchronize_parameters()` first.
    """

    def __init__(
        self, model: nn.Module, indices: Mapping[int, int], arrive: Callable[[Sequence[int] | None], None]
    ) -> None:
        """indices: of each parameter of the optimizer, by id. Hooks hold `arrive`'s owner weakly."""
        self._handles: list[Any] = []
        method = weakref.WeakMethod(arrive)
        gathering = _gathering(model)
        gathered = {
            id(parameter)
            for module in gathering
            for parameter in module.parameters()
            if local_of(parameter) is not parameter
        }
        for module in model.modules():
            below = isinstance(module, _READ_BELOW)
            mine = [
                id(parameter) for parameter in module.parameters(recurse=below) if id(parameter) in indices
            ]
            plain = [indices[key] for key in mine if key not in gathered]
            if plain:
                self._handles.append(
                    module.register_forward_pre_hook(_Wait(method, plain, module), prepend=True)
                )
        sharded = {key: index for key, index in indices.items() if key in gathered}
        if sharded:
            self._watch_gathers(model, gathering, method, sharded)
        everything = _Wait(method, None)
        self._handles.append(model.register_state_dict_pre_hook(everything))
        self._handles.append(model.register_load_state_dict_pre_hook(everything))

    def _watch_gathers(
        self, model: nn.Module, gathering: Sequence[nn.Module], method: _Arrive, sharded: Mapping[int, int]
    ) -> None:
        below = {
            id(module): _Wait(
                method,
                [sharded[id(parameter)] for parameter in module.parameters() if id(parameter) in sharded],
            )
            for module in (model, *gathering)
        }
        outermost = _Outermost(_Wait(method, list(sharded.values())), below)
        begin, end = torch.compiler.disable(outermost.begin), torch.compiler.disable(outermost.end)
        for module in dict.fromkeys((model, *gathering)):
            self._handles.append(module.register_forward_pre_hook(begin, prepend=True))
            self._handles.append(module.register_forward_hook(end, always_call=True))
        for module in gathering:
            self._handles.append(
                module.register_forward_pre_hook(torch.compiler.disable(_forget_event), prepend=True)
            )

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


_Arrive = weakref.WeakMethod[Callable[[Sequence[int] | None], None]]

_READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch that read the weights of modules below them without a call: `out_proj`, and in evaluation
a whole layer."""


class _Outermost:
    """Waits at the outermost forward among modules that gather, for all that their gathers read.

    below: by module's id, for a forward that a backward runs again: it reads no further.
    """

    def __init__(self, arrives: Callable[..., None], below: Mapping[int, Callable[..., None]]) -> None:
        self._arrives = arrives
        self._below = below
        self._depth = 0

    def begin(self, module: nn.Module, *_: object) -> None:
        self._depth += 1
        if self._depth == 1:
            again = torch._C._current_graph_task_id() != -1
            (self._below[id(module)] if again else self._arrives)()

    def end(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)  # a hook before ours may have raised: then it never began


def _gathering(model: nn.Module) -> list[nn.Module]:
    """FSDP2's modules."""
    if all(local_of(parameter) is parameter for parameter in model.parameters()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _forget_event(module: Any, *_: object) -> None:
    """With an event FSDP2's gathers wait for it alone, and it may be older than the weights' return. Without
    one they wait for the lane that the forward is on, which has just waited for the weights."""
    if module._get_fsdp_state()._state_ctx.post_optim_event is not None:
        module.set_post_optim_event(None)


class _Wait:
    """A hook that waits. Of `module`'s copy, or of what a pickle of it is read into, it does nothing: its
    weights are its own.

    A copy reads weights like a forward, and no call of it can be hooked but this one's: it waits for all of
    them. What the module owns has been copied by then, and is copied again.
    """

    __slots__ = ("_arrive", "_indices", "_module", "_run")

    def __init__(
        self, arrive: _Arrive, indices: Sequence[int] | None, module: nn.Module | None = None
    ) -> None:
        self._arrive = arrive
        self._indices = indices
        self._module = None if module is None else weakref.ref(module)
        self._run = torch.compiler.disable(self._wait)

    def __call__(self, *_: object, **__: object) -> None:
        self._run(self._indices)

    def _wait(self, indices: Sequence[int] | None) -> None:
        arrive = self._arrive()
        if arrive is not None:
            arrive(indices)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Nothing:
        self._wait(None)
        module = None if self._module is None else self._module()
        with torch.no_grad():
            for parameter in module.parameters(recurse=False) if module is not None else ():
                if isinstance(copy := memo.get(id(parameter)), Tensor):
                    local_of(copy).copy_(local_of(parameter))
        return _Nothing()

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        self._wait(None)
        return _Nothing, ()


class _Nothing:
    """What a hook is in a copy of its module."""

    def __call__(self, *_: object, **__: object) -> None:
        pass


def parameters_outside(model: nn.Module, parameters: Sequence[Tensor]) -> list[int]:
    """Places of the parameters that no module of the model owns."""
    owned = {id(parameter) for parameter in model.parameters()}
    return [place for place, parameter in enumerate(parameters) if id(parameter) not in owned]
