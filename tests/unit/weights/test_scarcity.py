"""Weights stream where an arbiter denies what is fetched ahead, and where the device runs out of memory."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import offload
from offload import OffloadEngine, PipelineOffloadManager
from offload.device.sim import SimDevice
from offload.transfer.copier import UNCOUNTED, Admission, DenialReason, Denied, Direction, Lease, Priority
from tests.inside import gradients_of, impose, streaming_of, streams_from
from tests.unit.groups.stack import installed
from tests.unit.weights.streamed import BLOCK_BYTES, BLOCKS, ROWS, WIDTH, Model, Pair, squares, streamed


class NothingAhead(Admission):
    """Denies every copy that nobody waits for."""

    def __init__(self) -> None:
        self.asked: list[Priority] = []

    def ask(self, nbytes: int, direction: Direction, owner: Any, priority: Priority) -> Lease | Denied:
        self.asked.append(priority)
        return UNCOUNTED if priority >= Priority.REQUIRED else Denied(DenialReason.H2D_SLOTS_EXHAUSTED)


def test_what_is_fetched_ahead_may_be_denied_and_is_loaded_when_it_is_used() -> None:
    admission = NothingAhead()
    engine = OffloadEngine(device=SimDevice(), admission=admission)
    with installed(PipelineOffloadManager(engine)), streams_from(WIDTH * WIDTH):
        model = Model()
        plain = copy.deepcopy(model)
        handle = offload.apply(model, weights="host")
        pair = Pair(model, plain, handle)
        pair.train(4)
        assert handle.weights.misses > 2 * BLOCKS
        assert {Priority.SPECULATIVE, Priority.REQUIRED} <= set(admission.asked)
        handle.remove()


@pytest.mark.parametrize("every", [2, 5, 7])
def test_memory_that_runs_out_now_and_then_drops_what_is_there_and_goes_on(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with streamed(weights=f"{4 * BLOCK_BYTES}B") as pair:
        device: Any = pair.stream._device
        refill, calls = device.refill, []

        def runs_out(storage: torch.UntypedStorage, nbytes: int) -> None:
            calls.append(nbytes)
            # not twice in a row: what is there is dropped, and then it fits
            if len(calls) % every == 0:
                calls.append(0)
                raise torch.OutOfMemoryError("CUDA out of memory")
            refill(storage, nbytes)

        monkeypatch.setattr(device, "refill", runs_out)
        if every > 2:
            pair.train(4)
        else:  # each block has two weights, of which one never fits
            with pytest.raises(torch.OutOfMemoryError):
                pair.train(1)
        monkeypatch.undo()
        pair.model.zero_grad()
        pair.plain.load_state_dict(pair.model.state_dict())
        pair.plain.zero_grad()
        pair.train(2)
        assert not any(block.entered for block in pair.stream.blocks)


@pytest.mark.parametrize("what", ["refill", "empty"])
def test_int8_goes_on_where_memory_runs_out_now_and_then(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(frozen=True, quantize="int8", weights=f"{3 * BLOCK_BYTES}B") as pair:
        device: Any = pair.stream.residency.device
        plainly, calls = getattr(device, what), []

        def runs_out(*arguments: Any) -> Any:
            calls.append(1)
            if len(calls) % 5 == 0:
                calls.append(1)
                raise torch.OutOfMemoryError("CUDA out of memory")
            return plainly(*arguments)

        monkeypatch.setattr(device, what, runs_out)
        pair.train(4)
        monkeypatch.undo()
        pair.train(2)
        stream = pair.stream
        staged = sum(flat.numel() for block in stream.blocks for _, flat in block.staged)
        assert stream.residency.present_bytes == pair.present_bytes + staged


@pytest.mark.parametrize("options", [{}, {"frozen": True, "quantize": "int8"}])
def test_remove_that_does_not_fit_goes_on_streaming(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with streamed(**options) as pair:
        device: Any = pair.stream._device

        def runs_out(storage: torch.UntypedStorage, nbytes: int) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        pair.train(2)
        monkeypatch.setattr(device, "refill", runs_out)
        with pytest.raises(torch.OutOfMemoryError):
            pair.handle.remove()
        monkeypatch.undo()
        pair.train(2)
        assert streaming_of(pair.handle).residency.present_bytes <= 2 * BLOCK_BYTES


def test_no_more_is_fetched_ahead_than_the_kind_may_have() -> None:
    """One block at least, however large it is."""
    with streamed(weights="21kB") as pair:
        residency, (first, second, third, *_) = pair.stream.residency, pair.stream.blocks
        for most, refused in ((None, (False, False)), (2 * BLOCK_BYTES, (False, True)), (1, (True, True))):
            impose(pair.stream._engine, kind_ahead_bytes=most)
            assert not residency.is_far_ahead(first)
            assert residency.load((first,), Priority.SPECULATIVE)
            found = [residency.is_far_ahead(second)]
            assert residency.load((second,), Priority.SPECULATIVE)
            assert (*found, residency.is_far_ahead(third)) == refused
            for block in (first, second):
                residency.drop(block)


def test_the_limits_can_lower_the_window_and_another_models_does_not() -> None:
    with streamed(weights=f"{5 * BLOCK_BYTES}B") as pair:
        residency, limits = pair.stream.residency, pair.stream._engine.limits
        assert (residency.window_bytes, limits.held_by("weights_window_bytes")) == (
            5 * BLOCK_BYTES,
            "weights",
        )
        another, share = limits.contributor("other"), limits.contributor("weights")  # identity decides
        another.bound("weights_window_bytes", 1, is_own=True)
        for most, window in ((None, 5), (4, 4), (0, 2)):  # one that computes, one that arrives
            share.bound("weights_window_bytes", most and most * BLOCK_BYTES)
            pair.stream.end_step()
            residency.present_bytes_peak = residency.present_bytes
            x = torch.randn(ROWS, WIDTH)
            assert torch.equal(pair.model(x), pair.plain(x))
            assert residency.present_bytes_peak == residency.window_bytes == window * BLOCK_BYTES
        another.end()
        assert (limits.weights_window_bytes, limits.held_by("weights_window_bytes")) == (0, "weights")
        share.end()
        pair.train(4)
        pair.handle.remove()
        assert limits.weights_window_bytes is None


def test_a_gradient_is_fetched_ahead_only_where_its_kind_may_have_more() -> None:
    found = []
    for most in (None, 1):
        with streamed(gradients="host") as pair:
            stream, ahead = gradients_of(pair.handle), [0]
            impose(pair.stream._engine, kind_ahead_bytes=most)

            def loading(
                blocks: Any,
                priority: Priority,
                stream: Any = stream,
                ahead: Any = ahead,
                load: Any = stream.residency.load,
            ) -> Any:
                loaded = load(blocks, priority)
                if priority < Priority.REQUIRED and loaded:
                    ahead.append(sum(each.present and not each.readers for each in stream.blocks))
                return loaded

            stream.residency.load = loading  # type: ignore[method-assign]
            optimizers = pair.optimizers()
            for _ in range(2):
                for _ in range(3):  # microbatches, each of which adds to them
                    x = torch.randn(ROWS, WIDTH)
                    for model in (pair.model, pair.plain):
                        squares(model, x).backward()
                pair.check_gradients()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            found.append(max(ahead))
    assert found[0] > found[1] == 1, found
