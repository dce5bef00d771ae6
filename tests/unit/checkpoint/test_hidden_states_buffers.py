"""Buffers of blocks that are recomputed: they end as after one forward, and the recompute starts from the
values that its forward had."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from offload import PipelineOffloadManager, RecomputeDiffersError, init_chunk_handler, step_end
from offload.checkpoint import members
from offload.checkpoint.members import BuffersBefore
from tests.unit.checkpoint.recomputed import (
    WIDTH,
    Model,
    assert_bits,
    build,
    compared,
    recomputed,
    source,
    train,
    values,
)

Manager = PipelineOffloadManager


class Normed(nn.Module):
    """A batch norm whose momentum is an average, so that each update depends on the count before."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.fc(x)).tanh()


class Spectral(nn.Module):
    """Each forward runs a power iteration on two buffers, and computes the weight from them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x).tanh()


class OldSpectral(nn.Module):
    """The same, by a forward pre-hook of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc(x).tanh()


class Replacing(nn.Module):
    """Puts a new tensor in a buffer's place, makes one at its first forward, and has one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.ones(WIDTH))
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.mask is None:
            self.mask = torch.tril(torch.ones(WIDTH, WIDTH))
        if "steps" not in self._buffers:
            self.register_buffer("steps", torch.zeros(()))
        self.steps += 1
        self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)
        y: Tensor = self.fc(x) * self.average / self.steps.clone()
        return x + (y @ self.mask).tanh()


class Shared(nn.Module):
    """Two modules have one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Normed(), Normed()
        self.second.norm.running_mean = self.first.norm.running_mean

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Normed,
    "spectral norm": Spectral,
    "spectral norm by a hook": OldSpectral,
    "replaced": Replacing,
    "shared": Shared,
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_buffers_and_gradients_are_those_of_plain_training(
    manager: Manager, kind: Callable[[], nn.Module]
) -> None:
    compared(build(kind, count=2), manager, steps=3)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_with_microbatches_in_flight_each_recompute_starts_where_its_own_forward_did(
    manager: Manager, kind: Callable[[], nn.Module]
) -> None:
    """Three forwards before the first backward, and the second backward over a retained graph."""
    model = build(kind, count=2)
    plain = copy.deepcopy(model)

    def run(module: Model, announce: bool) -> list[Tensor]:
        losses, inputs = [], []
        for microbatch in range(3):
            if announce:
                init_chunk_handler(None, None, 1)
            inputs.append(source(microbatch))
            losses.append(module(inputs[-1]).square().mean())
        losses[1].backward(retain_graph=True)
        for loss in losses:
            loss.backward()
        return [*(x.grad for x in inputs if x.grad is not None), *values(module, inputs[0])]

    for _ in range(2):
        expected = run(plain, False)
        with recomputed(list(model.blocks), manager):
            assert_bits(expected, run(model, True))
        step_end()


def test_a_block_in_evaluation_and_in_training_has_the_buffers_that_each_writes(manager: Manager) -> None:
    """The first forward is one that writes nothing: what it taught does not hold for the other."""
    model = build(Normed, count=2).eval()
    compared(model, manager)
    compared(model.train(), manager, steps=2)
    model.blocks[0].norm.eval()  # type: ignore[union-attr]
    compared(model, manager)


def test_of_large_buffers_that_no_forward_writes_no_clone_is_kept(manager: Manager) -> None:
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    block.register_buffer("mask", torch.ones(1 << 15))
    block.register_buffer("links", torch.eye(WIDTH).to_sparse())
    everything = {id(buffer) for buffer in block.buffers()}
    before = BuffersBefore(list(block.modules()))
    assert before.clones.keys() == everything
    block(source())
    before.learn()
    assert before.clones.keys() == everything - {id(block.mask)}
    assert BuffersBefore(list(block.modules())).clones.keys() == everything - {id(block.mask)}


def test_what_is_known_of_a_module_does_not_keep_it(
    manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_SMALL_BYTES", 0)
    gc.collect()
    known = len(members._writes)
    model = build(Normed, count=2)
    compared(model, manager)
    assert len(members._writes) > known
    del model
    gc.collect()
    assert len(members._writes) == known


def test_the_tensors_themselves_are_back_after_the_recompute(manager: Manager) -> None:
    """By identity, also where the recompute raises."""
    model = build(Normed, count=1)
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        y = model(source()).sum()
        own = list(model.buffers())

        def fail(*arguments: Any) -> None:
            raise KeyError("in the recompute")

        handle = model.blocks[0].norm.register_forward_hook(fail)  # type: ignore[union-attr]
        with pytest.raises(KeyError, match="in the recompute"):
            y.backward()
        assert all(one is other for one, other in zip(own, model.buffers(), strict=True))
        handle.remove()


def test_a_large_buffer_that_is_written_later_than_in_the_first_forward_is_named_once(
    manager: Manager, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_SMALL_BYTES", 0)

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(()))
            self.grows = False

        def forward(self, x: Tensor) -> Tensor:
            if self.grows:
                self.scale *= 2
            y: Tensor = self.fc(x) * self.scale.clone()
            return y.tanh()

    model = build(Late, count=1)
    compared(model, manager)
    model.blocks[0].grows = True  # type: ignore[assignment]
    with recomputed(list(model.blocks), manager):
        init_chunk_handler(None, None, 1)
        train(model)
        with pytest.raises(RecomputeDiffersError, match="float32"):
            step_end()
    assert caplog.text.count("buffer 'scale' of a Late was written in a forward that is recomputed") == 1
    # from the next one on it is right again
    compared(model, manager, steps=2)
    assert caplog.text.count("buffer 'scale'") == 1


@pytest.mark.parametrize("start", [0, 3])
def test_a_buffers_copy_lies_in_memory_as_the_buffer_does(start: int) -> None:
    """A kernel is chosen by strides and by alignment, and may sum in another order."""
    buffer = torch.arange(64.0)[start : start + 12].view(3, 4).t()
    copy = members._copy(buffer)
    assert torch.equal(copy, buffer)
    assert copy.stride() == buffer.stride()
    assert copy.storage_offset() == start
