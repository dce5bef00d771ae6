"""The modes that take every saved tensor, beside the one that takes a block's input alone: which tensors, how
they overlap, and what is in flight at most."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from tests.unit.groups.stack import build_manager, installed
from tests.unit.modules.training import ROWS, WIDTH, build, train

LAYERS = 24
SAVED = 32 * 16 * 4  # of a layer: what its tanh returns, which the next one is given


def chain() -> nn.Module:
    """Each layer saves one tensor of 2 KiB."""
    return nn.Sequential(*[nn.Tanh() for _ in range(LAYERS)])


def in_flight(model: nn.Module, manager: PipelineOffloadManager) -> list[tuple[int, int]]:
    """Of a forward: bytes on their way out and copies of them, after each layer."""
    transfers = manager.engine.transfers
    found: list[tuple[int, int]] = []
    hooks = [
        module.register_forward_hook(
            lambda *_: found.append((transfers.spilling_bytes, transfers.in_flight()[0]))
        )
        for module in model.children()
    ]
    x = torch.randn(32, 16, requires_grad=True)
    model(x * 1.0).sum().backward()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.req("S4-20")
def test_every_tensor_of_a_kibibyte_leaves_beside_the_compute_and_a_smaller_one_stays(
    manager: PipelineOffloadManager,
) -> None:
    def saved(elements: int) -> int:
        model = nn.Sequential(nn.Tanh())
        with offload.activations(model, True):
            model(torch.randn(elements, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
            return manager.step_end().saved_bytes

    assert (saved(511), saved(512)) == (0, 1024)


@pytest.mark.req("S4-20", "S4-31")
@pytest.mark.parametrize("cap", [2 * SAVED, 8 * SAVED])
def test_what_is_on_its_way_out_is_bounded_in_bytes_however_many_tensors_that_are(cap: int) -> None:
    model = chain()
    with installed(build_manager(max_spilling_bytes=cap)) as manager:
        assert manager is not None
        offload.apply(model, True)
        seen = in_flight(model, manager)
        assert max(nbytes for nbytes, _ in seen) == cap
        # the forward does not wait for one before the next begins, as "legacy" does
        assert max(copies for _, copies in seen) == cap // SAVED > 1
        assert manager.step_end().spill_bytes == LAYERS * SAVED


@pytest.mark.req("S4-31")
def test_a_backlog_takes_no_more_of_the_device_than_its_limit() -> None:
    """Copies that never end by themselves: compute waits for the oldest where the limit would be passed."""
    model = chain()
    with installed(build_manager(device_limit_bytes=6 * SAVED)) as manager:
        assert manager is not None
        offload.apply(model, True)
        in_flight(model, manager)
        stats = manager.step_end()
    assert stats.spill_bytes == LAYERS * SAVED
    assert stats.device_bytes_peak <= 6 * SAVED < LAYERS * SAVED


@pytest.mark.req("S4-28")
def test_hidden_states_takes_the_inputs_of_blocks_and_nothing_of_what_takes_every_tensor() -> None:
    model = build()
    handle = offload.apply(model, "hidden_states", min_numel=1)
    train(model, steps=1, microbatches=2)
    figures = handle.report().total
    an_input: Tensor = torch.empty(ROWS, WIDTH)
    assert list(figures.groups) == ["hidden_states"]
    assert figures.saved_bytes == 2 * len(model.layers) * an_input.nbytes
