"""What is known of other ranks without asking them. With real ranks:
tests/integration/test_optim_ranks.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from offload.errors import OffloadError
from offload.optim import parts
from offload.params.view import is_laid_out_as
from tests.unit.optim.rig import hybrid


def test_without_a_process_group_there_is_one_rank() -> None:
    assert not parts.several_ranks()


@pytest.mark.usefixtures("one_rank")
def test_a_group_of_one_is_one_rank() -> None:
    assert not parts.several_ranks()


def test_a_view_of_somebody_elses_buffer_is_not_trusted_where_there_are_several_ranks() -> None:
    own, view = torch.ones(4), torch.ones(8)[:4]
    assert not parts.may_be_reduced_in_place(view)
    with mock.patch.object(parts, "several_ranks", return_value=True):
        assert parts.may_be_reduced_in_place(view)
        assert not parts.may_be_reduced_in_place(own)


def test_a_split_parameter_is_one_over_several_ranks() -> None:
    assert not parts.is_split(torch.ones(3))
    mesh = SimpleNamespace(size=lambda dim: (2, 1)[dim])
    for placements, split in (
        ((Replicate(), Replicate()), False),
        ((Shard(0), Replicate()), True),
        ((Replicate(), Shard(1)), False),
    ):
        assert (
            parts.is_split(
                SimpleNamespace(_local_tensor=torch.ones(2), device_mesh=mesh, placements=placements)
            )
            is split
        )  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_rank")
def test_a_gradient_laid_out_otherwise_is_seen() -> None:
    mesh = init_device_mesh("cpu", (1,))
    sharded, replicated = (
        distribute_tensor(torch.ones(4), mesh, [place]) for place in (Shard(0), Replicate())
    )
    assert is_laid_out_as(sharded, sharded)
    assert not is_laid_out_as(sharded, replicated)
    assert is_laid_out_as(torch.ones(4), torch.ones(4))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("how", ["its local tensor", "clipped", "unscaled", "data"])
def test_a_shard_that_is_written_past_its_gradient_breaks_the_promise(how: str) -> None:
    """The local tensor counts its own writes: the DTensor's counter stays. Calls with lists of DTensors, as
    clipping and a GradScaler make, move none of the two."""
    mesh, model = init_device_mesh("cpu", (1,)), nn.Linear(64, 64, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Replicate()]))
    optimizer = hybrid(model, offload_fraction=0.5, model=model, overlap="backward")
    optimizer.last_microbatch = True
    model(distribute_tensor(torch.ones(8, 64), mesh, [Replicate()])).sum().backward()
    gradient: Any = model.weight.grad
    assert isinstance(gradient, DTensor)
    assert gradient.full_tensor().sum() == 8 * 64 * 64
    before = gradient._version
    match = r"the gradient of parameter 0 .* changed after"
    if how == "its local tensor":
        gradient._local_tensor.mul_(2)
        assert gradient._version == before
    elif how == "data":
        gradient.data.mul_(2)
    else:
        scaler, match = torch.amp.GradScaler("cpu"), "parameter 0 .*, or its gradient was written"
        scaler.scale(torch.ones(()))
        with pytest.raises(OffloadError, match=match):
            scaler.unscale_(optimizer) if how == "unscaled" else nn.utils.clip_grad_norm_(model.weight, 0.1)
    with pytest.raises(OffloadError, match=match):
        optimizer.step()
