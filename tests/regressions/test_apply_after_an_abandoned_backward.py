"""`apply` was refused for what nothing could read any more, or refused with a reason that was not its own.

A handle of mode "disk" was removed while its graph lived, and the graph dropped: the file counted as in use
until the next save, so no further `apply` went through, whatever was called. With the graph alive,
`apply(mode="checkpoint")` was refused as one with limits, which it had not. After a backward that ran out of
memory, torch's queue held the rest of its graph until the thread ran another backward, and `apply` said that
a backward was still to come.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.errors import StaleHandleError


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)])


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(16, 32)).square().mean()


def retained() -> torch.Tensor:
    """The loss of a step of a model whose handle of mode "disk" is removed: its graph lives on."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with offload.apply(model, mode="disk", min_numel=64, device_limit="3000B"):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        optimizer.step()
    return loss


def test_the_file_of_a_dropped_graph_keeps_no_apply_away() -> None:
    loss = retained()
    del loss
    gc.collect()
    assert offload.apply(build(), mode="hidden_states").blocks


def test_the_refusal_says_what_apply_would_change_and_its_way_out_works() -> None:
    loss = retained()
    change = "apply.. changes disk_directory from '.*' to None, and 10,240 saved bytes of an earlier forward"
    with pytest.raises(ValueError, match=f"{change}.* offload.step_end.. drops"):
        offload.apply(build(), mode="checkpoint")
    offload.step_end()
    assert offload.apply(build(), mode="checkpoint").blocks
    with pytest.raises(StaleHandleError):
        loss.backward()


@pytest.mark.parametrize("mode", ["groups", "hidden_states", True])
def test_a_backward_that_ran_out_of_memory_keeps_no_apply_away(mode: Any) -> None:
    def fail(_: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("out of memory")

    model = build()
    with offload.apply(model, mode=mode, min_numel=64):
        loss = loss_of(model)
        model[1][0].weight.register_hook(fail)  # type: ignore[index]
        with pytest.raises(torch.OutOfMemoryError):
            loss.backward()
    del loss, model
    gc.collect()
    model = build()
    with torch.inference_mode():
        offload.apply(model, mode=mode, min_numel=64, device_limit="64kB")
    loss_of(model).backward()
