"""Where the host sets the pace, a block that stays whole under the plan of mode "auto", and saves what it
saved in the step before, is counted with its first save, and the host looks at none of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import PipelineOffloadManager
from offload.modules import peak
from offload.planner.profile import BlockProfile
from tests.unit.modules.test_auto import SLOW_LINK
from tests.unit.modules.training import ROWS, WIDTH, Model, build, equal, train

LAYERS = 3


@pytest.fixture
def settled(manager: PipelineOffloadManager) -> Iterator[Callable[[], Model]]:
    """A model whose plan keeps all of it."""
    manager.engine.rates = SLOW_LINK
    handles = []

    def make() -> Model:
        model = build(blocks=LAYERS)
        for layer in model.layers:
            layer.drop.p = 0.0
        handles.append(offload.apply(model, "auto", min_numel=1, device_total="1000000B"))
        train(model, steps=5, microbatches=1)
        return model

    yield make
    for handle in handles:
        handle.remove()


def saves_of(manager: PipelineOffloadManager, model: Model, rows: int = ROWS) -> tuple[int, int]:
    model(torch.randn(rows, WIDTH)).sum().backward()
    stats = manager.step_end()
    return stats.saved, stats.device_bytes_peak


def test_the_host_looks_at_one_save_a_block_and_counts_the_bytes_of_all(
    settled: Callable[[], Model], manager: PipelineOffloadManager
) -> None:
    model = settled()
    loss = model(torch.randn(ROWS, WIDTH)).sum()
    counted = manager.engine.transfers.device_bytes
    loss.backward(retain_graph=True)
    assert manager.engine.transfers.device_bytes == counted  # a second backward reads the same
    loss.backward()
    del loss
    assert manager.step_end().saved == LAYERS
    # another number of rows, then the first one again: what a block saves is looked at anew
    shorter = saves_of(manager, model, rows=ROWS // 2)
    again = saves_of(manager, model)
    assert shorter[0] == again[0] > 4 * LAYERS
    assert again[1] == counted
    assert saves_of(manager, model) == (LAYERS, counted)


def test_a_training_has_the_bits_of_a_run_without(
    settled: Callable[[], Model], manager: PipelineOffloadManager
) -> None:
    plain = build(blocks=LAYERS)
    for layer in plain.layers:
        layer.drop.p = 0.0
    train(plain, steps=5, microbatches=1)
    model = settled()
    assert equal(train(model, steps=3), train(plain, steps=3))
    assert len(list(manager.living_blocks())) == 0


def test_a_pair_of_hooks_around_the_model_is_shown_every_save(
    settled: Callable[[], Model], manager: PipelineOffloadManager
) -> None:
    model = settled()
    shown: list[Tensor] = []

    def pack(tensor: Tensor) -> Any:
        shown.append(tensor)
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed):
        saved, _ = saves_of(manager, model)
    assert saved > 4 * LAYERS
    assert any(tensor.shape == (ROWS, 2 * WIDTH) for tensor in shown)  # of a block's inside, too


def test_a_forward_that_raises_leaves_no_hooks(
    settled: Callable[[], Model], manager: PipelineOffloadManager
) -> None:
    model = settled()

    def fail(*arguments: object) -> None:
        raise KeyError

    hook = model.layers[1].fc2.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        model(torch.randn(ROWS, WIDTH))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert manager.engine.hooks.innermost() is None
    hook.remove()
    manager.step_end()
    # of the block that raised nothing was known, of those before it all
    assert saves_of(manager, model)[0] > LAYERS
    assert saves_of(manager, model)[0] == LAYERS


def test_where_the_device_sets_the_pace_each_save_is_looked_at(
    settled: Callable[[], Model], manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockProfile, "is_host_bound", False)
    assert saves_of(manager, settled())[0] > 4 * LAYERS


def test_so_it_is_on_a_device_whose_peak_is_watched_where_no_optimizer_of_torch_steps(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peak, "device_peak_bytes", lambda: 1000)
    manager.engine.rates = SLOW_LINK
    model = build(blocks=LAYERS)
    with offload.activations(model, "auto", min_numel=1, device_total="1000000B"):
        saved = [saves_of(manager, model)[0] for _ in range(16)]
    assert saved[-1] == LAYERS
