"""What is this rank's own in a model whose experts are shared by a group: for whoever wraps the rest.

own = names_of_this_rank(model)
DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, own)
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .layer import Mixture


def expert_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """The weights of experts that other ranks of their group do not have. Where a group's experts are on
    several groups of ranks, their gradients are averaged over those, by the caller."""
    for module in model.modules():
        if isinstance(module, Mixture) and module.group is not None:
            yield from module.experts.parameters()


def names_of_this_rank(model: nn.Module) -> list[str]:
    """Names, in `model`, of `expert_parameters`: what DistributedDataParallel has to leave alone."""
    own = {id(parameter) for parameter in expert_parameters(model)}
    return [name for name, parameter in model.named_parameters() if id(parameter) in own]
