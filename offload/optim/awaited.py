"""Who may read the weights, and when: the modules of a model, replays of its captured forwards, and whoever
asks.

One invariant: nobody that is known here reads a weight that is on its way: it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from offload.engine import OffloadEngine
from offload.optim.arrival import Arrivals, parameters_outside
from offload.optim.placing import Placement
from offload.optim.ranks import several_ranks
from offload.optim.readers import Readers
from offload.optim.replayed import ReplayedReads
from offload.optim.stepping import HostedSteps

__all__ = ["AwaitedOptimizer"]


class AwaitedOptimizer(Optimizer):
    """Its weights have readers, for heirs that step them.

    _names: of parameters, by id, for errors.
    """

    _engine: OffloadEngine
    _placed: Placement
    _steps: HostedSteps
    _model: nn.Module | None
    _names: dict[int, str]
    _arrivals: Arrivals | None
    _readers: Readers
    _replayed: ReplayedReads
    _step_in_backward: bool
    _overlap_backward: bool | None

    def _refuse_replicas(self, model: nn.Module) -> None:
        """DistributedDataParallel reduces after the hooks: what had left, or been stepped, would be the
        gradients of one rank."""
        promise = (
            "step_in_backward"
            if self._step_in_backward
            else "overlap_backward"
            if self._overlap_backward
            else None
        )
        if promise is None or not several_ranks():
            return
        for name, module in model.named_modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                raise ValueError(
                    f"{promise}=True promises final gradients, and {name or 'the model'} is a "
                    "DistributedDataParallel over "
                    f"{torch.distributed.get_world_size()} ranks, which reduces them later; leave {promise} "
                    "out"
                )

    def attach(self, model: nn.Module) -> None:
        """From now on each module of `model` waits for its own weights just before its forward, and step()
        does not.

        A weight that another module reads than the one that owns it (a tied output layer that calls no
        module) is found out in the first step and waited for by step(). Who reads weights outside of a
        forward calls `synchronize_parameters()` before. What FSDP2 shards is all waited for where a forward
        begins, before its first gather.
        """
        self._refuse_replicas(model)
        if self._arrivals is not None:
            self._arrivals.close()
        self._names.update((id(parameter), name) for name, parameter in model.named_parameters())
        for member in self._placed.members:
            member.name = self._names.get(id(member.parameter), member.name)
        indices = {id(member.parameter): member.index for member in self._placed.members}
        self._arrivals = Arrivals(model, indices, self._arrive)
        if model is not self._model:
            self._readers = Readers()
        self._model = model
        self._readers.outside = frozenset(
            parameters_outside(model, [member.parameter for member in self._placed.members])
        )

    def _arrive(self, indices: Sequence[int] | None) -> None:
        """The current lane is about to read the weights of these parameters, None for all. Blocks the host
        until they are issued."""
        if indices is not None and torch.is_grad_enabled():
            self._readers.ask(indices)
        if self._engine.device.is_capturing():
            self._replayed.arrive(indices)
            return
        self._steps.arrive(indices)

    def _rest(self) -> None:
        """Bring everything to rest, after a whole step: the host may read and write weights, state and
        masters. Blocks the host."""
        self._steps.settle_host()

    def synchronize_parameters(self) -> None:
        """Let the current lane's work from here on see the new weights. Blocks the host until the step under
        way has been issued."""
        self._arrive(None)

    def _refuse_in_capture(self, what: str) -> None:
        """What workers and the host's own state have a part in; an optimizer that keeps all on the device may
        be captured."""
        if self._steps.in_order:
            self._engine.refuse_in_capture(f"the optimizer's {what}")

    def _is_met(self) -> bool:
        return self._steps.is_met
