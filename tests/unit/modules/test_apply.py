"""`offload.apply`: any model, in any training loop, with the bits that it has without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from tests.unit.modules.training import CALLS, ROWS, WIDTH, build, equal, plain_of, train, warnings_of

MODES: tuple[Any, ...] = ("groups", True, "legacy", "disk", "hidden_states", "selective")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", CALLS)
def test_gradients_and_weights_have_the_bits_of_a_run_without(
    call: str, mode: Any, manager: PipelineOffloadManager, tmp_path: Path
) -> None:
    plain = plain_of(call)
    model = build(call)
    if mode == "disk":
        manager = offload.marks.change_limits(replace(manager.engine.config, disk_directory=str(tmp_path)))
    with offload.activations(model, mode, min_numel=1):
        if call == "in place" and mode in ("hidden_states", "selective"):
            # what would be recomputed from is gone
            with pytest.raises(RuntimeError, match="that is recomputed has written to its argument"):
                train(model)
            return
        ours = train(model)
    assert equal(ours, plain)
    assert manager.stats.spill_bytes > 0
    # whether anything is written in time is the writer's: a reader that comes first calls the write off
    assert (manager.engine.transfers.disk is not None) == (mode == "disk")
    assert len(list(manager.living_blocks())) == 0


@pytest.mark.req("S4-21")
def test_legacy_waits_for_each_copy_until_it_is_removed(manager: PipelineOffloadManager) -> None:
    limits, before = manager.engine.limits, manager.engine.config
    stats = {}
    for mode in (True, "legacy"):
        model = build()
        handle = offload.apply(model, mode, min_numel=1)
        assert ((limits.max_spilling_bytes, limits.max_restoring_bytes) == (1, 0)) == (mode == "legacy")
        model(torch.randn(ROWS, WIDTH)).sum().backward()
        stats[mode] = manager.step_end()
        handle.remove()
        assert manager.engine.config == before
    # of all that leaves, the same bytes, one copy may be under way, and each read waits for its own
    assert stats["legacy"].spill_bytes == stats[True].spill_bytes > 0
    assert stats["legacy"].stall_count > stats[True].stall_count
    assert stats["legacy"].device_bytes_peak < stats[True].device_bytes_peak


@pytest.mark.req("S4-30")
def test_the_head_and_the_loss_stay(manager: PipelineOffloadManager) -> None:
    model = build(blocks=1)
    offload.apply(model, True, min_numel=1)
    hidden = torch.randn(ROWS, WIDTH)
    model(hidden).square().mean().backward()
    column, narrow = ROWS * 4, ROWS * WIDTH * 4
    # embed: its input; norm: its input, mean, deviation; fc1: its input; tanh: its output; dropout: noise;
    # fc2: its input. The head's input is the last block's output
    saved = narrow + (narrow + 2 * column) + narrow + 2 * narrow + 2 * narrow + 2 * narrow
    assert manager.step_end().spill_bytes == saved


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.second(torch.relu_(self.norm(self.first(x)))))


class Convolutional(nn.Module):
    """As torchvision's: each stage a Sequential of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.stem = nn.Conv2d(3, 8, 3)
        self.layer1 = nn.Sequential(*(Residual(8) for _ in range(2)))
        self.layer2 = nn.Sequential(*(Residual(8) for _ in range(3)))
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


@pytest.mark.parametrize("mode", MODES)
def test_a_convolutional_net_has_its_bits_and_the_running_statistics_of_one_forward(mode: Any) -> None:
    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(2, 3, 8, 8)).square().mean().backward()
            optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return [*gradients, *model.parameters(), *model.buffers()]

    model = Convolutional().to(memory_format=torch.channels_last)
    handle = offload.apply(model, mode, min_numel=1)
    assert {group: len(names) for group, names in handle.groups.items()} in ({}, {"layer1": 2, "layer2": 3})
    assert equal(run(model), run(Convolutional().to(memory_format=torch.channels_last)))
    assert offload.marks.default_manager().stats.spill_bytes > 0


def test_modules_inside_blocks_are_groups_of_their_own_and_the_rest_stays(
    manager: PipelineOffloadManager,
) -> None:
    model = build()
    handle = offload.apply(model, modules=["*.norm", "*.fc2"], min_numel=1)
    assert {group: len(names) for group, names in handle.groups.items()} == {"norm": 3, "fc2": 3}
    plain = train(build())
    assert equal(train(model), plain)
    narrow, column = ROWS * WIDTH * 4, ROWS * 4
    # three blocks, two microbatches. norm: its input, mean and deviation; fc2: its input
    assert manager.stats.saved_bytes == 2 * 3 * ((narrow + 2 * column) + 2 * narrow)


def test_a_model_inside_another_one_is_part_of_its_forwards_and_steps(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build()
            self.after = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.inner(x))

    plain, model = Outer(), Outer()
    offload.apply(model, blocks="after", min_numel=1)
    offload.apply(model.inner, "hidden_states", min_numel=1)
    plain.load_state_dict(model.state_dict())
    ours = train(model)
    assert equal(ours, train(plain))
    assert warnings_of(caplog) == []
    # one chunk a microbatch: of each block its input, of `after` the inputs of its layers and its output
    narrow, small = ROWS * WIDTH * 4, ROWS * 5 * 4
    assert manager.stats.saved_bytes == 2 * (3 * narrow + 3 * small)


def test_the_first_step_after_a_change_of_mode_keeps_nothing_by_the_plan_of_the_mode_before(
    manager: PipelineOffloadManager,
) -> None:
    model = build()
    handle = offload.apply(model, min_numel=1)
    train(model, microbatches=1)
    assert manager.stats.kept_bytes > 0
    handle.remove()
    offload.apply(model, "hidden_states", min_numel=1)
    train(model, steps=1, microbatches=1)
    assert (manager.stats.kept_bytes, manager.stats.spill_bytes) == (0, 3 * ROWS * WIDTH * 4)


def test_a_graph_that_lives_beyond_an_inferred_end_is_read_after_it() -> None:
    """An optimizer that finds no gradient steps between its forward and its backward."""

    def gradients(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        kept = model(torch.ones(ROWS, WIDTH)).square().sum()
        optimizer.step()
        model(torch.ones(ROWS, WIDTH)).square().sum().backward()
        kept.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected, model = gradients(build()), build()
    with offload.activations(model, min_numel=1):
        assert equal(gradients(model), expected)
