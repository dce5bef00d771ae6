"""order="forecast": it sees pressure coming, and fetches ahead of the reader. Times are those of a virtual
clock, compared with each other."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from offload import OffloadConfig, OffloadEngine
from offload.device.sim import SimDevice
from tests.inside import impose
from tests.unit.watermark.timed import peak_without, timed_steps
from tests.unit.watermark.training import (
    MIB,
    ROWS,
    TENSOR,
    LivingStorages,
    batch,
    blocks,
    engine_of,
    runtime_of,
    train,
)


@pytest.mark.req("S0-65")
def test_each_part_of_the_order_takes_waiting_away_and_all_of_them_all_of_it() -> None:
    """A fifth of the activations has to go: its copies fit beside the forward, and beside the backward."""
    high = peak_without() * 8 // 10
    reactive = timed_steps(high, order="reactive")[-1]
    alone = timed_steps(high, restore_ahead=False)[-1]
    both = timed_steps(high)[-1]
    assert reactive.waited_ms > alone.waited_ms > both.waited_ms == 0
    assert both.latched_bytes == 0, "the curve alone decided"


@pytest.mark.req("S0-65")
def test_the_mark_holds_but_for_what_an_operator_uses_for_itself() -> None:
    peak = peak_without()
    for tenths in (9, 7):
        high = peak * tenths // 10
        assert all(step.peak <= high + 3 * TENSOR for step in timed_steps(high)), tenths


def test_with_room_enough_nothing_moves() -> None:
    (first, second) = timed_steps(peak_without() + 1, steps=2)
    assert first.spilled == second.spilled == 0
    assert second.waited_ms == 0


def test_what_leaves_is_what_lies_above_the_mark_and_no_more() -> None:
    """Of the peak some tensors are an operator's own, which no reading sees."""
    assert 6 - 3 <= timed_steps(peak_without() - 6 * TENSOR)[-1].spilled <= 6


def test_a_step_of_another_size_follows_the_curve_by_its_scale() -> None:
    def rows(step: int) -> int:
        return (128, 96, 160, 112, 144)[step]

    high = peak_without(rows=rows, steps=5) * 8 // 10
    steps = timed_steps(high, rows=rows, steps=5)
    assert [step.forwards_lost for step in steps] == [0] * 5
    assert steps[2].spilled > steps[4].spilled > steps[3].spilled == 0
    assert sum(step.waited_ms for step in steps[1:]) == 0
    # the working set is as large as the batch
    assert all(step.peak <= high + 3 * TENSOR * rows(at) // ROWS for at, step in enumerate(steps))


def test_a_step_of_another_shape_falls_back_to_the_latch_and_holds_the_mark() -> None:
    def layers_of(step: int) -> int:
        return (6, 6, 12, 12)[step]

    high = peak_without() * 7 // 10
    steps = timed_steps(high, layers_of=layers_of, steps=4)
    assert [step.forwards_lost for step in steps] == [0, 0, 1, 0]
    assert steps[0].spilled == steps[1].spilled == 0
    assert steps[2].latched_bytes > 0, "nobody saw it coming"
    assert steps[3].latched_bytes == 0
    assert steps[2].waited_ms > steps[3].waited_ms
    assert all(step.peak <= high + 3 * TENSOR for step in steps)


def test_what_is_read_last_leaves_first() -> None:
    with runtime_of(high=8 * TENSOR, low=6 * TENSOR) as runtime:
        model = blocks(8)
        for _ in range(2):
            with runtime.managed_forward():
                loss = model(batch(0)).square().mean()
            (forward,) = runtime.scheduler.forwards
            spilled = sorted(block.slot for block in forward.spilled)
            assert spilled == list(range(len(spilled))), "the oldest, in a row"
            assert 0 < len(spilled) < len(forward.chunk.blocks)
            loss.backward()
            runtime.step_end()


def test_of_several_forwards_the_one_that_is_read_last_leaves_first() -> None:
    """As a pipeline does, the first forward's backward comes first; the step before has shown it."""
    with runtime_of(high=10 * TENSOR, low=9 * TENSOR) as runtime:
        models = [blocks(4), blocks(4)]
        sent: list[list[int]] = []
        for _ in range(3):
            losses = []
            for at, model in enumerate(models):
                with runtime.managed_forward():
                    losses.append(model(batch(at)).square().mean())
            sent.append([len(forward.spilled) for forward in runtime.scheduler.forwards])
            for loss in losses:
                loss.backward()
            del loss, losses
            runtime.step_end()
    assert sent[0][0] > 0, "nothing is known: the last forward is read first"
    assert sent[2] == [1, 8], (
        "nine of each, nine below the mark: of the second all that its operators are done with"
    )


def test_without_a_curve_the_oldest_leave_until_what_is_left_is_below_the_low_mark() -> None:
    with runtime_of(high=10 * TENSOR, low=6 * TENSOR) as runtime, runtime.managed_forward():
        sent, x = [], batch(0)
        for layer in blocks(6):
            x = layer(x)
            sent.append(runtime.scheduler.metrics.activations_spilled)
        assert sent == [0, 0, 0, 0, 5, 7], "from ten to five, and two of the next layer for its two"
        runtime.scheduler.relieve()
        metrics = runtime.scheduler.metrics
        assert metrics.activations_spilled > 7, "a full device has the rest sent"
        assert runtime.scheduler.details.latched_bytes == metrics.spill_bytes, "all of it by the latch"
        del x


def test_what_something_else_holds_leaves_after_others_in_all_later_steps() -> None:
    """Outputs of the first layers, as a skip connection keeps them: their copies free nothing."""
    with runtime_of(high=13 * TENSOR, low=13 * TENSOR) as runtime:
        model, sent = blocks(8), []
        for _ in range(4):
            held, x = [], batch(0)
            with runtime.managed_forward():
                for layer in model:
                    x = layer(x)
                    held += [x] * (len(held) < 3)
                loss = x.square().mean()
            (forward,) = runtime.scheduler.forwards
            sent.append({block.slot for block in forward.spilled})
            del x
            loss.backward()
            runtime.step_end()
    # held are the inputs of the second to the fourth layer; of the second nothing else was there to go
    assert sent == [{0, 1, 2, 3, 4}, *[{0, 1, 2, 3, 5}] * 3]


def test_what_was_fetched_ahead_is_not_dropped_for_gradients_in_later_steps() -> None:
    """Between two looks at the backward the level rises by a gradient of 128 KiB: what is fetched leaves that
    room."""
    engine, rows, width = engine_of(piece_bytes=1), 64, 512
    meter = LivingStorages(engine.device)  # type: ignore[arg-type]
    layers = [torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, 64)]
    model = torch.nn.Sequential(*[torch.nn.Sequential(*layers) for _ in range(4)])
    with meter:
        train(model, None, steps=1, rows=lambda step: rows)
        base = meter.allocated()
        meter.start_step()
        train(model, None, steps=1, rows=lambda step: rows)
        high = base + (meter.peak - base) * 8 // 10
        fetched: list[int] = []
        with runtime_of(engine=engine, high=high, low=high, memory_allocated=meter.allocated) as runtime:
            train(
                model,
                runtime,
                rows=lambda step: rows,
                after=lambda: fetched.append(engine.last_stats.restored),
            )
            assert runtime.last_metrics is not None
            assert fetched[0] > fetched[1] == fetched[2] == runtime.last_metrics.activations_restored > 0


@pytest.mark.req("S0-67")
def test_host_memory_is_not_a_fixed_pool_it_grows_to_what_is_spilled() -> None:
    engine = engine_of()
    with runtime_of(engine=engine, high=8 * TENSOR, low=6 * TENSOR) as runtime:
        train(blocks(8), runtime)
        metrics = runtime.last_metrics
        assert runtime.pool is None
        assert (metrics.pool_hits, metrics.pool_misses) == (metrics.activations_spilled, 0)
        assert metrics.activations_spilled > 0


def test_a_host_that_has_no_memory_left_is_said_once_and_tensors_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    plain = train(blocks(8), None)
    with runtime_of(
        engine=engine_of(host_limit_bytes=2 * TENSOR), high=8 * TENSOR, low=6 * TENSOR
    ) as runtime:
        assert train(blocks(8), runtime) == plain
        metrics = runtime.last_metrics
        assert metrics.activations_spilled <= 2
        assert runtime.last_details.times_over > 0
        assert runtime.last_details.forecast_bytes == 2 * TENSOR, (
            "what there is leaves ahead, in later steps too"
        )
    messages = [record.getMessage() for record in caplog.records if "high mark" in record.getMessage()]
    assert len(messages) == 1
    assert "the host has no memory for 32.77 kB that should leave" in messages[0]


def test_a_mark_that_cannot_hold_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with runtime_of(high=4 * TENSOR, low=TENSOR, memory_allocated=lambda: 9 * TENSOR) as runtime:
        train(blocks(4), runtime, steps=2)
        assert runtime.last_details.times_over > 0
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "294.91 kB of the device are allocated, the high mark is 131.07 kB, and no more saved tensors can "
        "leave: the rest is weights"
    )


@pytest.mark.parametrize(("before", "calls"), [(1, 64), (60, 8)])
def test_memory_that_nobody_saves_is_seen_after_so_many_saves_at_the_latest(before: int, calls: int) -> None:
    """An eighth of the room below the mark is far more than what is saved here. Then something else takes all
    of it."""
    allocated, engine = before * TENSOR, engine_of(piece_bytes=32 * MIB)
    fields: dict[str, Any] = {"high": 100 * TENSOR, "low": 90 * TENSOR, "memory_allocated": lambda: allocated}
    with runtime_of(engine=engine, **fields) as runtime, runtime.managed_forward():
        x, spilled = batch(0, 8).requires_grad_(), []
        for _ in range(calls + 2):
            x = x.sigmoid()
            allocated = 100 * TENSOR
            spilled.append(runtime.scheduler.metrics.activations_spilled)
        del x
    assert next(at for at, number in enumerate(spilled) if number) == calls, "after the first save's look"


class FullDevice(SimDevice):
    """A device whose allocator fails for the engine while `full`."""

    full = False

    def empty(self, nbytes: int) -> torch.Tensor:
        if self.full:
            raise torch.OutOfMemoryError("the device is full")
        return super().empty(nbytes)


def test_an_allocation_of_the_engine_that_fails_makes_room_and_is_tried_once_more() -> None:
    device = FullDevice(executor="late")
    engine = OffloadEngine(OffloadConfig(piece_bytes=TENSOR), device=device)
    with runtime_of(engine=engine, high=8 * TENSOR, low=6 * TENSOR, restore_ahead=False) as runtime:
        spilled_before: list[int] = []
        relieve = runtime.scheduler.relieve

        def relieved() -> None:
            spilled_before.append(runtime.scheduler.metrics.activations_spilled)
            relieve()
            device.full = False  # what was kept has been sent, and made room

        runtime.scheduler.relieve = relieved  # type: ignore[method-assign]
        model = blocks(8)
        with runtime.managed_forward():
            loss = model(batch(0)).square().mean()
        device.full = True
        loss.backward()
        spilled = runtime.scheduler.metrics.activations_spilled
        assert len(spilled_before) == 1
        found = [parameter.grad for parameter in model.parameters()]
        runtime.step_end()
        assert runtime.last_details.retries == 1
        assert spilled >= spilled_before[0]
    wanted = train(blocks(8), None, steps=1)
    assert [grad.numpy().tobytes() for grad in found if grad is not None] == wanted[: len(found)]


def test_growing_gradients_are_seen_in_the_backward_and_the_mark_holds() -> None:
    """Weights that are wider than the activations: their gradients come on top while the backward runs."""
    engine = engine_of()
    meter = LivingStorages(engine.device)  # type: ignore[arg-type]
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(24)])
    rows = 16  # 4 KiB a tensor beside gradients of 16 KiB
    with meter:
        train(model, None, steps=1, rows=lambda step: rows)
        meter.start_step()
        weights = 24 * 4 * 64 * 64
        high = 2 * weights + 8 * 4 * 64 * rows
        with runtime_of(engine=engine, high=high, low=high, memory_allocated=meter.allocated) as runtime:
            train(model, runtime, rows=lambda step: rows)
        assert meter.peak <= high + 4 * (4 * 64 * 64)


def test_where_nothing_may_leave_as_much_of_what_was_fetched_ahead_is_dropped_as_is_short() -> None:
    """Amid a backward something else saves, and is one byte of a tensor above the mark. What a forward finds
    taken is free then, so much is on its way back."""
    engine, extra, high = engine_of(), 0, 24 * TENSOR
    meter = LivingStorages(engine.device)  # type: ignore[arg-type]
    fetched: list[tuple[int, int]] = []
    fields: dict[str, Any] = {"high": high, "memory_allocated": lambda: meter.allocated() + extra}
    with meter, runtime_of(engine=engine, low=20 * TENSOR, **fields) as runtime:

        def look() -> None:
            fetched.append((engine.transfers.restoring_bytes, runtime.scheduler.details.times_over))

        def saved_elsewhere(_: torch.Tensor) -> None:
            nonlocal extra
            impose(engine, max_spilling_bytes=0)
            look()
            extra = high - meter.allocated() + TENSOR - 1
            runtime.scheduler.saved_elsewhere(2 * MIB)
            look()

        model = blocks(12)
        for step in range(2):
            extra = 10 * TENSOR
            with runtime.managed_forward():
                x = model[:8](batch(0))
                if step:
                    x.register_hook(saved_elsewhere)
                loss = model[8:](x).square().mean()
            extra = 0
            loss.backward()
            del x, loss
            runtime.step_end()
    (before, times_over), after = fetched
    assert before > 2 * TENSOR
    assert after == (before - TENSOR, times_over)


def test_a_forward_that_begins_after_a_backward_makes_no_room_for_it() -> None:
    """Gradient accumulation: forward and backward in turn. Each forward's own tensors leave ahead."""
    with runtime_of(high=6 * TENSOR, low=4 * TENSOR) as runtime:
        model = blocks(8)
        for _ in range(3):
            for at in range(2):
                with runtime.managed_forward():
                    loss = model(batch(at)).square().mean()
                loss.backward()
                del loss
            runtime.step_end()
        assert runtime.last_details.latched_bytes == 0
        assert runtime.last_details.forecast_bytes >= 2 * 11 * TENSOR, "of 17 each, six stay below the mark"
