"""StageHand's weight runtime: bits, the window, eviction, residency, guards, telemetry and its end."""

from __future__ import annotations

import copy
import gc
import json
import logging
import os
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import ActivationRuntime, OffloadConfig, OffloadEngine
from offload.compat import stagehand
from offload.compat.stagehand import (
    BlockRegistry,
    BlockState,
    InMemorySource,
    LayerRuntime,
    ResidentPriority,
    StagehandConfig,
    StagehandRuntime,
)
from offload.conductor import ConductorRuntime, StagehandConductorAdapter
from offload.device.sim import ExecutorName, SimDevice
from offload.errors import DtypeMismatchError, InvalidStateTransitionError, OffloadError, OffloadOOMError
from offload.transfer.copier import Priority
from offload.weights.order import Pass
from tests.inside import streams_from, watchers_of
from tests.unit.weights.streamed import BLOCK_BYTES, ROWS, WIDTH, Model, squares

pytestmark = pytest.mark.usefixtures("small_weights_stream")

MIB = 1 << 20
BLOCKS = 8
PATTERN = r"^layers\.\d+$"


BUILT: list[StagehandRuntime] = []
"""Those of a test, which are shut down behind it."""


@pytest.fixture
def small_weights_stream() -> Iterator[None]:
    with streams_from(WIDTH * WIDTH):
        yield
        while BUILT:
            BUILT.pop().shutdown()


class Spy:
    """Runs with a runtime: what it fetched ahead, and what it dropped."""

    def __init__(self, runtime: StagehandRuntime) -> None:
        self.ahead: list[tuple[Pass, int, int]] = []  # pass, block in use, block fetched
        self.dropped: list[int] = []
        self.loads = 0
        residency, scheduler = runtime.stream.residency, runtime.scheduler
        admit, drop = scheduler.admit, residency.drop

        def admitting(block: Any, priority: Priority) -> bool:
            found = admit(block, priority)
            now = runtime.stream.order.now
            self.loads += found
            if found and priority < Priority.REQUIRED and now is not None:
                self.ahead.append((now.during, now.block, block.index))
            return found

        def dropping(block: Any) -> None:
            self.dropped.append(block.index)
            drop(block)

        scheduler.admit, residency.drop = admitting, dropping  # type: ignore[method-assign]


def engine_of(executor: ExecutorName = "late", **config: Any) -> OffloadEngine:
    return OffloadEngine(OffloadConfig(**config), device=SimDevice(executor=executor))


def build(
    model: nn.Module | None = None,
    *,
    high: float = 5,
    low: float = 3,
    window: int = 2,
    executor: ExecutorName = "late",
    engine: OffloadEngine | None = None,
    kind: Any = StagehandRuntime,
    pattern: Any = PATTERN,
    **fields: Any,
) -> tuple[Any, StagehandRuntime]:
    """high, low: in blocks."""
    model = Model(BLOCKS) if model is None else model
    given = {"telemetry_enabled": False, "strict_bf16": False, "max_inflight_transfers": 4, **fields}
    runtime = kind(
        model,
        block_pattern=pattern,
        engine=engine_of(executor) if engine is None else engine,
        vram_high_watermark_mb=high * BLOCK_BYTES / MIB,
        vram_low_watermark_mb=low * BLOCK_BYTES / MIB,
        prefetch_window_blocks=window,
        **given,
    )
    BUILT.append(runtime)
    return model, runtime


def twins(**options: Any) -> tuple[Any, Any, StagehandRuntime]:
    """A model that a runtime serves, the same without, and the runtime."""
    torch.manual_seed(0)
    model: Any = Model(BLOCKS)
    plain = copy.deepcopy(model)
    return model, plain, build(model, **options)[1]


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, seed: int = 0) -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    loss = squares(model, x)
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def frozen(model: Any) -> Any:
    for layer in model.layers:
        layer.requires_grad_(False)
    return model


def raise_mine(*anything: object) -> None:
    raise RuntimeError("mine")


def same_gradients(mine: nn.Module, its: nn.Module) -> None:
    for (name, one), other in zip(mine.named_parameters(), its.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name


# -- bits ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("executor", get_args(ExecutorName))
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_loop_has_the_bits_of_plain_torch(executor: ExecutorName, reentrant: bool | None) -> None:
    """Also of a frozen model with adapters, under each executor and in each kind of checkpoint."""
    torch.manual_seed(0)
    model: Any = Model(BLOCKS, reentrant=reentrant)
    if (get_args(ExecutorName).index(executor) + (None, False, True).index(reentrant)) % 2:
        frozen(model)
    plain = copy.deepcopy(model)
    _, runtime = build(model, executor=executor)
    ours, its = (torch.optim.AdamW([p for p in m.parameters() if p.requires_grad]) for m in (model, plain))
    for number in range(5):
        with runtime.forward_context(step=number):
            for micro in range(2):  # accumulation, and eviction in each backward
                assert torch.equal(step(model, seed=micro), step(plain, seed=micro))
            same_gradients(model, plain)
            for optimizer in (ours, its):
                optimizer.step()
                optimizer.zero_grad()
    assert runtime.stream.residency.present_bytes_peak <= 5 * BLOCK_BYTES
    parameters = [*model.parameters()]
    runtime.shutdown()
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    assert runtime.offload_engine.arena.stats().lent_bytes == 0


def test_any_order_of_blocks_has_the_bits_of_plain_torch() -> None:
    model, plain, runtime = twins(high=3, low=2, executor="random")
    for number, skip in enumerate([(), (1, 2), (), (5,), (0, 7), (), (3, 4, 5, 6)]):
        x = torch.randn(ROWS, WIDTH)
        with runtime.forward_context(step=number):
            for each in (model, plain):
                each(x, skip).square().sum().backward()
            with torch.no_grad():
                assert torch.equal(model(x), plain(x))
        same_gradients(model, plain)


@pytest.mark.req("S0-47")
def test_steps_nest_in_the_sources_order_with_the_activations_runtime() -> None:
    engine = engine_of("random")
    model, plain, runtime = twins(engine=engine)
    activations = ActivationRuntime(
        engine=engine,
        vram_high_watermark_mb=1024 / MIB,
        vram_low_watermark_mb=512 / MIB,
        min_numel=1,
        telemetry_enabled=False,
    )
    seen: list[str] = []

    def tell(holder: Any, name: str, said: str) -> None:
        found = getattr(holder, name)

        def told(*arguments: Any, **named: Any) -> Any:
            seen.append(said)
            return found(*arguments, **named)

        setattr(holder, name, told)

    for name in ("begin_step", "managed_forward", "managed_backward", "end_step"):
        tell(runtime, name, f"weight.{name}")
    for name in ("step_begin", "managed_forward", "step_end"):
        tell(activations, name, f"activation.{name}")
    spilled = 0
    for number in range(3):
        seen.clear()
        before = engine.step
        with runtime.forward_context(activations, number):
            seen.append("body")
            step(model)
        assert engine.step == before + 1  # the engine's step ends once
        spilled += activations.last_metrics.activations_spilled
        assert seen == [
            *("weight.begin_step", "activation.step_begin", "weight.managed_forward"),
            *("weight.managed_backward", "activation.managed_forward", "body"),
            *("activation.step_end", "weight.end_step"),
        ]
        step(plain)
        same_gradients(model, plain)
    assert spilled > 0
    activations.close()


def test_a_step_that_raises_ends_and_the_next_one_is_right() -> None:
    model, plain, runtime = twins()
    with pytest.raises(RuntimeError, match="mine"), runtime.forward_context():
        raise_mine(model(torch.randn(ROWS, WIDTH)))
    step(plain)
    with runtime.forward_context():
        step(model)
    same_gradients(model, plain)
    assert all(entry.refcount == 0 for entry in runtime.residency.entries.values())


# -- the registry ----------------------------------------------------------------------------------------
@pytest.mark.req("W-1")
def test_a_registry_comes_from_names_or_modules_and_never_changes_once_validated() -> None:
    model = Model(3)
    registry = BlockRegistry()
    registry.build_from_model(model, PATTERN, torch.device("cpu"))
    first = registry.blocks_in_order()[0]
    assert [entry.block_id for entry in registry] == ["layers.0", "layers.1", "layers.2"]
    assert (first.size_bytes, first.exec_order, first.module_ref()) == (BLOCK_BYTES, 0, model.layers[0])
    half = 2 * WIDTH * WIDTH
    assert first.param_layout == (
        ("layers.0.up.weight", torch.Size((2 * WIDTH, WIDTH)), torch.float32, 0, half),
        ("layers.0.down.weight", torch.Size((WIDTH, 2 * WIDTH)), torch.float32, 4 * half, half),
    )
    registry.validate(BLOCK_BYTES)
    with pytest.raises(OffloadError, match="was validated"):
        registry.build_from_model(model, PATTERN, torch.device("cpu"))
    with pytest.raises(AttributeError):
        first.size_bytes = 0  # type: ignore[misc]
    other = BlockRegistry()
    other.build_from_model(model, [model.layers[2], model.layers[0]], torch.device("cpu"))
    assert [entry.block_id for entry in other] == ["layers.0", "layers.2"]
    with pytest.raises(ValueError, match="names 0 of the modules inside Model, such as embed, layers"):
        BlockRegistry().build_from_model(model, "nothing", torch.device("cpu"))
    with pytest.raises(ValueError, match="names 1 of 2 modules"):
        BlockRegistry().build_from_model(model, [model.layers[0], nn.Linear(2, 2)], torch.device("cpu"))
    with pytest.raises(DtypeMismatchError, match=r"up.weight is torch.float32, .* given torch.bfloat16"):
        BlockRegistry().build_from_model(model, PATTERN, torch.device("cpu"), dtype=torch.bfloat16)


@pytest.mark.req("W-1")
def test_a_block_larger_than_the_pool_is_an_error_before_anything_moves() -> None:
    assert stagehand.StagehandOOMError is OffloadOOMError
    wide = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024))
    before = [parameter.data_ptr() for parameter in wide.parameters()]
    with pytest.raises(OffloadOOMError, match=r"block 0 has 2,099,200 bytes, and the pinned pool 1,048,576"):
        build(wide, pattern=r"^\d$", pinned_pool_mb=1, pinned_slab_mb=1)
    assert before == [parameter.data_ptr() for parameter in wide.parameters()]
    assert all(type(parameter) is nn.Parameter for parameter in wide.parameters())


# -- the window and eviction -----------------------------------------------------------------------------
@pytest.mark.req("W-4")
@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_window_runs_forward_in_the_forward_and_back_in_the_backward(window: int) -> None:
    model, runtime = build(frozen(Model(BLOCKS)), high=window + 3, low=window + 1, window=window)
    assert StagehandConfig().prefetch_window_blocks == 3
    for number in range(3):
        with runtime.forward_context(step=number):
            step(model)
    spy = Spy(runtime)
    with runtime.forward_context(step=3):
        step(model)
    runtime.telemetry.drain()
    assert (runtime.telemetry.last.prefetch_hits, runtime.telemetry.last.prefetch_misses) == (2 * BLOCKS, 0)
    seen = {each: [one[1:] for one in spy.ahead if one[0] is each] for each in (Pass.FORWARD, Pass.BACKWARD)}
    forward = [(now, index) for now, index in seen[Pass.FORWARD] if index > now]
    backward = [(now, index) for now, index in seen[Pass.BACKWARD] if index < now]
    assert forward
    assert backward
    assert all(index - now <= window for now, index in forward)
    assert all(now - index <= window for now, index in backward)
    assert max(now - index for now, index in backward) == window
    assert [index for _, index in backward] == sorted((index for _, index in backward), reverse=True)


@pytest.mark.req("W-6")
def test_the_highest_distance_times_bytes_leaves_first_until_below_the_low_mark() -> None:
    model, runtime = build(frozen(Model(BLOCKS)), high=BLOCKS, low=3, window=1)
    for _ in range(2):
        step(model)
    assert runtime.stream.residency.present_bytes == BLOCKS * BLOCK_BYTES
    scheduler = runtime.scheduler
    distance = scheduler.distances()
    assert distance == {index: index + 1 for index in range(BLOCKS)}  # the next forward's
    spy = Spy(runtime)
    in_window = scheduler.window()
    runtime.residency.entries["layers.5"].refcount = 1
    runtime.residency.protect_blocks(["layers.4"])
    scheduler.evict(BLOCK_BYTES)  # one more than the high mark
    assert in_window == {1}
    assert spy.dropped == [7, 6, 3, 2]  # 5 is used, 4 protected, 1 in the window, 0 the backward's last
    runtime.residency.unprotect_blocks(["layers.4"])
    runtime.residency.entries["layers.5"].refcount = 0
    spy.dropped.clear()
    scheduler.evict((BLOCKS - 4) * BLOCK_BYTES)  # at the high mark: nothing
    assert spy.dropped == []
    scheduler.evict((BLOCKS - 3) * BLOCK_BYTES)  # until what is there and what comes are below the low one
    assert spy.dropped == [5, 4]


def test_a_larger_block_leaves_before_a_nearer_one_of_the_same_distance() -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(x)))

    model = nn.Sequential(*(Wide(width) for width in (32, 128, 32, 32)))
    model.requires_grad_(False)
    _, runtime = build(model, pattern=r"^\d$", high=7, low=6, window=1)
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(2, WIDTH))
    spy = Spy(runtime)
    runtime.scheduler.evict(BLOCK_BYTES)
    # 2 comes later than 1 in the order from 3 on, and 1 has four times its bytes
    assert spy.dropped == [1]


def test_knobs_are_plain_attributes_that_bound_the_engines_limits_and_end_with_the_runtime() -> None:
    model, runtime = build(window=3, max_inflight_transfers=2)
    limits = runtime.offload_engine.limits
    assert (limits.weights_ahead_bytes, limits.weights_in_flight_bytes) == (3 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    assert limits.held_by("weights_ahead_bytes") == "stagehand"
    for number in range(3):
        with runtime.forward_context(step=number):
            step(model)
    spy = Spy(runtime)
    runtime.scheduler.policy.prefetch_window = 0
    with runtime.forward_context():
        step(model)
    assert spy.ahead == []
    runtime.scheduler.policy.prefetch_window = 2
    runtime.engine._max_inflight = 0
    with runtime.forward_context():
        step(model)
    assert spy.ahead == []
    runtime.engine._max_inflight = None
    with runtime.forward_context():
        step(model)
    assert spy.ahead
    assert (limits.weights_ahead_bytes, limits.weights_in_flight_bytes) == (2 * BLOCK_BYTES, None)
    runtime.engine._max_inflight = 1
    runtime.shutdown()
    assert (limits.weights_ahead_bytes, limits.weights_in_flight_bytes) == (None, None)


def test_an_arbiter_tightens_both_knobs_and_puts_them_back() -> None:
    model, runtime = build(window=3, max_inflight_transfers=4)
    limits = runtime.offload_engine.limits
    arbiter = ConductorRuntime(
        allocated=lambda: 90 * MIB, vram_soft_cap_mb=100, vram_hard_cap_mb=100, telemetry_interval=0
    )
    adapter = StagehandConductorAdapter(runtime)
    arbiter.register(adapter)
    for call in (arbiter.begin_step, arbiter.enter_forward, arbiter.enter_backward):
        call()
    assert (runtime.engine._max_inflight, runtime.scheduler.policy.prefetch_window) == (2, 1)
    assert (limits.weights_ahead_bytes, limits.weights_in_flight_bytes) == (BLOCK_BYTES, 2 * BLOCK_BYTES)
    with runtime.forward_context():
        step(model)
    arbiter.unregister(adapter)
    assert (runtime.engine._max_inflight, runtime.scheduler.policy.prefetch_window) == (4, 3)
    assert (limits.weights_ahead_bytes, limits.weights_in_flight_bytes) == (3 * BLOCK_BYTES, 4 * BLOCK_BYTES)


def test_a_runtime_that_is_dropped_with_its_model_leaves_nothing_behind() -> None:
    engine = engine_of()
    model, runtime = build(engine=engine, telemetry_enabled=True, telemetry_file=os.devnull)
    with runtime.forward_context():
        step(model)
    gone = weakref.ref(runtime)
    BUILT.clear()
    del model, runtime
    gc.collect()
    assert gone() is None
    assert engine.hooks.streamed == {}
    assert engine.limits.weights_ahead_bytes is None
    assert watchers_of(engine) == ()
    assert engine.arena.stats().lent_bytes == 0


# -- states ----------------------------------------------------------------------------------------------
@pytest.mark.req("W-2")
def test_states_follow_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runtime = build(high=3, low=2, window=1, executor="late")
    assert set(runtime.states().values()) == {BlockState.UNLOADED}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for number in range(3):
        with runtime.forward_context(step=number):
            step(model, optimizer)
    device = runtime.offload_engine.device
    for lane in (device.h2d, device.d2h):
        device.synchronize(device.record(lane))
    block = next(block for block in runtime.stream.blocks if block.present)
    assert runtime.states()[block.name] is BlockState.GPU_READY
    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(device, "poll", lambda event: False)
        block.weights[0].parameter.mul_(2)
        runtime.stream.residency.drop(block)
        assert runtime.states()[block.name] is BlockState.EVICTING  # written, and on its way back
    assert runtime.states()[block.name] is BlockState.HOST_STAGED
    here = {block.name for block in runtime.stream.blocks if block.present}
    assert {name for name, state in runtime.states().items() if state is BlockState.GPU_READY} == here


@pytest.mark.req("W-2")
def test_a_block_is_used_between_before_block_and_after_block() -> None:
    model, runtime = build(frozen(Model(BLOCKS)), high=2, low=1, window=0)
    runtime.before_block("layers.3")
    assert runtime.residency.entries["layers.3"].refcount == 1
    with pytest.raises(InvalidStateTransitionError, match="cannot leave before after_block"):
        runtime.residency.transition("layers.3", BlockState.GPU_FREEING)
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        model(x)  # everything else passes
    assert runtime.states()["layers.3"] is BlockState.GPU_READY
    with pytest.raises(ValueError, match="inside a forward"):
        runtime.shutdown()
    runtime.after_block("layers.3", x)
    with pytest.raises(InvalidStateTransitionError, match=r"layers.3 .* released without before_block"):
        runtime.after_block("layers.3")
    with pytest.raises(ValueError, match=r"'layers.99' is none of the 8 blocks: layers.0"):
        runtime.before_block("layers.99")


# -- layer mode ------------------------------------------------------------------------------------------
@pytest.mark.req("W-13")
def test_layer_mode_traces_a_step_and_schedules_from_the_next() -> None:
    torch.manual_seed(0)

    class Backwards(nn.Module):
        """Runs its layers in another order than it has them."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))

        def forward(self, x: Tensor) -> Tensor:
            for layer in reversed(self.layers):
                x = torch.relu(layer(x))
            return x

    model = Backwards()
    plain = copy.deepcopy(model)
    layer_bytes = 4 * WIDTH * WIDTH
    runtime = LayerRuntime(
        model,
        engine=engine_of(),
        vram_budget=f"{8 * layer_bytes}B",
        prefetch_k=2,
        telemetry=False,
        strict_bf16=False,
    )
    assert runtime.config.pinned_pool_mb == (2 + 4) * runtime.config.pinned_slab_mb
    spy = Spy(runtime)
    for number in range(4):
        x = torch.randn(ROWS, WIDTH)
        for each in (model, plain):
            each.zero_grad()
        mine, its = model(x), plain(x)
        if number == 0:
            assert spy.ahead == []
            assert runtime.scheduler.policy.prefetch_window == 0
        assert torch.equal(mine, its)
        for each in (mine, its):
            each.square().sum().backward()
        same_gradients(model, plain)
    assert spy.ahead
    names = [f"layers.{number}" for number in reversed(range(BLOCKS))]
    assert [entry.block_id for entry in runtime.registry] == names
    assert [entry.exec_order for entry in runtime.registry] == [*range(BLOCKS)]
    runtime.telemetry.drain()
    assert [each.step for each in runtime.telemetry.history] == [0, 1, 2]
    assert runtime.telemetry.last.prefetch_misses == 0
    runtime.shutdown()


def test_a_model_with_a_layer_runtime_can_be_copied() -> None:
    model: Any = stagehand.layer(Model(2), engine=engine_of(), telemetry=False, strict_bf16=False)
    copied: Any = copy.deepcopy(model)
    assert copied._stagehand_layer_runtime is None
    assert pickle.loads(pickle.dumps(model._stagehand_layer_runtime)) is None
    x = torch.randn(ROWS, WIDTH)
    assert torch.equal(model(x), copied(x))
    model._stagehand_layer_runtime.shutdown()


# -- residency -------------------------------------------------------------------------------------------
@pytest.mark.req("W-11")
def test_what_is_kept_resident_does_not_leave_and_leaves_again_afterwards() -> None:
    model, runtime = build(frozen(Model(BLOCKS)), high=BLOCKS + 1, low=2)
    _, other = build(frozen(Model(2)), engine=runtime.offload_engine)
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    spy = Spy(runtime)
    with pytest.raises(RuntimeError, match="mine"), other.keep_resident(runtime), runtime.keep_resident():
        raise_mine(runtime.scheduler.evict(2 * BLOCK_BYTES))
    assert spy.dropped == []
    assert not any(runtime.residency.protection(name) for name in runtime.residency.entries)
    runtime.scheduler.evict(2 * BLOCK_BYTES)
    assert spy.dropped


@pytest.mark.req("W-11")
def test_as_a_last_resort_protected_blocks_leave_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model, plain, runtime = twins(high=3, low=2, window=1)
    with caplog.at_level(logging.WARNING), runtime.keep_resident():
        for number in range(2):
            with runtime.forward_context(step=number):
                step(model)
            step(plain)
        same_gradients(model, plain)
    assert [record.getMessage() for record in caplog.records if "is protected" in record.getMessage()] != []
    assert sum("is protected" in record.getMessage() for record in caplog.records) == 1
    assert runtime.stream.residency.present_bytes_peak <= 3 * BLOCK_BYTES


@pytest.mark.req("W-11")
def test_secondary_blocks_leave_before_primary_ones() -> None:
    model, runtime = build(frozen(Model(4)), high=BLOCKS, low=1)
    with torch.no_grad():
        model(torch.randn(ROWS, WIDTH))
    residency = runtime.residency
    residency.protect_blocks(["layers.0", "layers.1"], ResidentPriority.PRIMARY.value)
    residency.protect_blocks(["layers.2", "layers.3"], ResidentPriority.SECONDARY.value)
    assert residency.protected_eviction_candidates() == ["layers.2", "layers.3", "layers.0", "layers.1"]


@pytest.mark.req("W-11")
def test_reservations_count_for_guests_and_are_released_once() -> None:
    high = 1100 * MIB / BLOCK_BYTES
    _, runtime = build(frozen(Model(4)), high=high, low=1, window=3)
    _, guest = build(frozen(Model(2)), engine=runtime.offload_engine)
    runtime.release_reservation()  # there is none
    runtime.reserve_for_resident()
    runtime.reserve_for_resident(priority=ResidentPriority.SECONDARY)  # in its place
    assert runtime.budget.reserved_bytes == 4 * BLOCK_BYTES
    assert runtime.residency.protection("layers.0") == ResidentPriority.SECONDARY.value
    with runtime.as_guest(guest):
        assert runtime.budget.reserved_bytes == 6 * BLOCK_BYTES
        assert runtime.scheduler.policy.prefetch_window == 3
        step(guest.registry["layers.0"].module_ref())
        assert guest.stream.residency.present_bytes > 0
    assert guest.stream.residency.present_bytes == 0
    assert runtime.budget.can_guest_allocate(599 * MIB)
    assert not runtime.budget.can_guest_allocate(600 * MIB)
    runtime.budget.reserve_bytes(600 * MIB)
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="mine"), runtime.as_guest(guest):
        raise_mine(seen.append(runtime.scheduler.policy.prefetch_window))
    assert seen == [1]
    assert runtime.scheduler.policy.prefetch_window == 3
    for _ in range(2):
        runtime.release_reservation()
        assert runtime.budget.reserved_bytes == 600 * MIB
    runtime.budget.release_reserved_bytes(1 << 40)
    assert runtime.budget.reserved_bytes == 0
    assert runtime.residency.protection("layers.0") == 0


# -- sources ---------------------------------------------------------------------------------------------
@pytest.mark.req("W-15")
def test_weights_may_come_from_a_source() -> None:
    torch.manual_seed(0)
    plain: Any = Model(3)
    torch.manual_seed(1)
    model: Any = Model(3)
    streamed = {f"layers.{number}.{part}.weight" for number in range(3) for part in ("up", "down")}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name not in streamed:
                parameter.copy_(plain.get_parameter(name))
    kept = copy.deepcopy(model)
    with pytest.raises(
        ValueError, match=r"the source has nothing for layers.0.up.weight, must have \(32, 16\)"
    ):
        build(model, source=InMemorySource({}))
    assert all(map(torch.equal, model.parameters(), kept.parameters()))

    class Doubled:
        def read(self, name: str, into: Tensor) -> None:
            into.copy_(plain.get_parameter(name).detach() * 2)

    for source, factor in ((InMemorySource(plain.state_dict()), 1), (Doubled(), 2)):
        mine = copy.deepcopy(model)
        _, runtime = build(mine, source=source)
        its = copy.deepcopy(plain)
        with torch.no_grad():
            for name in streamed:
                its.get_parameter(name).mul_(factor)
        step(mine)
        step(its)
        same_gradients(mine, its)
        runtime.shutdown()


# -- guards ----------------------------------------------------------------------------------------------
def test_outputs_of_another_dtype_are_errors_or_counted() -> None:
    class Casts(nn.Module):
        def __init__(self, to: torch.dtype) -> None:
            super().__init__()
            self.linear, self.to_dtype = nn.Linear(WIDTH, WIDTH), to

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.to(self.linear.weight.dtype)).to(self.to_dtype)

    def run(to: torch.dtype, **fields: Any) -> StagehandRuntime:
        model = nn.Sequential(Casts(to), Casts(to)).to(torch.bfloat16)
        _, runtime = build(model, pattern=r"^\d$", **fields)
        with runtime.forward_context():
            model(torch.randn(2, WIDTH))
        runtime.telemetry.drain()
        return runtime

    with pytest.raises(
        DtypeMismatchError, match=r"block 0 has weights in torch.bfloat16 and an output in torch"
    ):
        run(torch.float32)
    with pytest.raises(DtypeMismatchError, match="float16"):
        run(torch.float16, strict_bf16=True)
    assert run(torch.bfloat16, strict_bf16=True).telemetry.last.dtype_promotions == 0  # type: ignore[union-attr]
    assert run(torch.float16).telemetry.last.dtype_promotions == 0  # type: ignore[union-attr]
    counted = run(torch.float32, fail_on_dtype_promotion=False)
    assert counted.telemetry.last.dtype_promotions == 2  # type: ignore[union-attr]


@pytest.mark.parametrize("checks", [True, False])
def test_nan_and_inf_are_counted_and_the_first_block_is_said_once(
    checks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x.view(-1)[0], x.view(-1)[1] = float("nan"), float("inf")
            return x

    model: Any = Model(4, reentrant=False)
    model.layers[2] = nn.Sequential(model.layers[2], Breaks())
    _, runtime = build(model, nan_inf_check=checks)
    for number in range(2):
        with runtime.forward_context(step=number):
            step(model)
    with torch.inference_mode(), runtime.forward_context():
        model(torch.randn(ROWS, WIDTH))
    with caplog.at_level(logging.WARNING):
        runtime.telemetry.drain()
    found = [(each.nan_count, each.inf_count) for each in runtime.telemetry.history]
    # block 2 has one of each, and the residual stream of block 3 is NaN in the same row
    assert all((nan > 1, inf == 1) == (checks, checks) for nan, inf in found)
    said = [record.getMessage() for record in caplog.records if "layers.2 had 1 NaN" in record.getMessage()]
    assert len(said) == checks


# -- telemetry -------------------------------------------------------------------------------------------
FIELDS = [
    *("step", "h2d_bytes", "d2h_bytes", "copy_time_ms", "compute_time_ms", "stall_time_ms", "stall_count"),
    *("evictions", "prefetch_hits", "prefetch_misses", "vram_used_mb", "vram_reserved_mb", "host_pool_free"),
    *("host_pool_in_use", "dtype_promotions", "nan_count", "inf_count"),
]


@pytest.mark.req("W-12")
def test_each_step_appends_one_line_with_exactly_the_sources_fields(tmp_path: Path) -> None:
    path = tmp_path / "stagehand_telemetry.jsonl"
    model, runtime = build(high=3, low=2, telemetry_enabled=True, telemetry_file=str(path))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    for number in range(4):
        with runtime.forward_context(step=10 + number):
            step(model, optimizer)
    residency = runtime.stream.residency
    moved, present = (residency.in_bytes, residency.out_bytes), residency.present_bytes
    runtime.shutdown()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [10, 11, 12, 13]
    assert all([*line] == FIELDS for line in lines)
    assert sum(line["h2d_bytes"] for line in lines) == moved[0]
    assert sum(line["d2h_bytes"] for line in lines) == moved[1]
    last = lines[-1]
    assert last["prefetch_hits"] + last["prefetch_misses"] == 3 * BLOCKS
    assert last["evictions"] * BLOCK_BYTES >= last["h2d_bytes"] - 3 * BLOCK_BYTES
    assert last["d2h_bytes"] == BLOCKS * BLOCK_BYTES
    assert all(line["copy_time_ms"] > 0 for line in lines)
    assert last["host_pool_in_use"] == 1
    assert last["vram_used_mb"] * MIB == present
    assert StagehandConfig().telemetry_file == path.name


@pytest.mark.req("W-12")
def test_rolling_figures_are_of_a_hundred_steps() -> None:
    _, runtime = build()
    telemetry = runtime.telemetry
    assert (telemetry.hit_rate(), telemetry.mean_stall_ms(), telemetry.max_stall_ms()) == (0, 0, 0)
    for number in range(150):
        used = 0.0 if number < 100 else 60.0
        telemetry.history.append(
            stagehand.StepMetrics(
                step=number, prefetch_hits=3, prefetch_misses=1, stall_time_ms=number, vram_used_mb=used
            )
        )
    assert len(telemetry.history) == 100
    assert telemetry.hit_rate() == 0.75
    assert telemetry.max_stall_ms() == 149
    assert telemetry.mean_stall_ms() == sum(range(50, 150)) / 100
    assert telemetry.vram_trend() == "growing"
    telemetry.history.reverse()
    assert telemetry.vram_trend() == "shrinking"
    for each in telemetry.history:
        each.vram_used_mb = min(each.vram_used_mb, 50)
    assert telemetry.vram_trend() == "stable"


@pytest.mark.req("W-12")
def test_defaults_are_the_sources() -> None:
    config = StagehandConfig()
    assert (config.pinned_pool_mb, config.pinned_slab_mb, config.pinned_slab_alignment) == (8192, 256, 512)
    assert (config.vram_high_watermark_mb, config.vram_low_watermark_mb) == (22000, 18000)
    assert (config.max_inflight_transfers, config.copy_stream_priority, config.policy) == (2, -1, "static")
    assert (config.prefetch_window_blocks, config.eviction_cooldown_steps) == (3, 2)
    assert config.strict_bf16
    assert config.fail_on_dtype_promotion
    assert config.nan_inf_check
    assert (config.telemetry_enabled, config.telemetry_interval_steps) == (True, 10)


@pytest.mark.parametrize(
    "fields",
    [
        {"vram_low_watermark_mb": 23000},
        {"vram_low_watermark_mb": 0},
        {"pinned_pool_mb": 128},
        {"pinned_slab_alignment": 1024},
        {"pinned_slab_alignment": 24},
        {"policy": "dynamic"},
        {"copy_stream_priority": -5},
        {"max_inflight_transfers": 0},
        {"prefetch_window_blocks": -1},
        {"nan_inf_check": 1},
        {"telemetry_file": ""},
        {"telemetry_file": "/nowhere/at/all.jsonl"},
    ],
)
def test_what_cannot_be_is_an_error_before_anything_moves(fields: dict[str, Any]) -> None:
    model = Model(2)
    with pytest.raises(ValueError, match=next(iter(fields))):
        StagehandRuntime(model, block_pattern=PATTERN, engine=engine_of(), **fields)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


# -- the end ---------------------------------------------------------------------------------------------
@pytest.mark.req("W-14")
def test_shutdown_gives_everything_back_and_may_be_called_again() -> None:
    model, runtime = build()
    step(model)
    runtime.reserve_for_resident()
    for _ in range(2):
        runtime.shutdown()
    assert runtime.offload_engine.closed
    assert runtime.offload_engine.arena.stats().held_bytes == 0
    assert runtime.offload_engine.hooks.streamed == {}
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    with pytest.raises(OffloadError, match="was shut down"):
        runtime.begin_step()
    with pytest.raises(OffloadError, match="was shut down"), runtime.managed_forward():
        pass
    step(model)


@pytest.mark.req("W-14")
def test_a_pool_is_used_again() -> None:
    model, runtime = build()
    step(model)
    engine = runtime.offload_engine
    held = engine.arena.stats().held_bytes
    pool = runtime.shutdown_keep_pool()
    assert pool is engine.arena
    assert (pool.stats().held_bytes, pool.stats().lent_bytes) == (held, 0)
    with pytest.raises(ValueError, match="pool is of another engine"):
        build(pool=pool)
    _, second = build(model, engine=engine, pool=pool)
    step(model)
    assert pool.stats().held_bytes == held
    second.shutdown()
    assert pool.stats().held_bytes == 0
    runtime.shutdown()  # does nothing to the second one


@pytest.mark.req("W-14")
def test_fifty_steps_hold_no_more_memory_than_five() -> None:
    model, runtime = build(executor="random")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    seen = []
    for number in range(50):
        with runtime.forward_context(step=number):
            step(model, optimizer, number)
            model.eval()
            with torch.no_grad():
                model(torch.randn(ROWS, WIDTH))
            model.train()
        stats, residency = runtime.offload_engine.arena.stats(), runtime.stream.residency
        seen.append((stats.held_bytes, stats.lent_bytes, residency.present_bytes_peak))
    assert seen[4] == seen[49]


def test_switched_off_it_does_nothing() -> None:
    model = Model(2)
    runtime = StagehandRuntime(model, block_pattern=PATTERN, stagehand_enabled=False)
    with runtime.forward_context(step=0):
        runtime.before_block("layers.0")
        step(model)
        runtime.after_block("layers.0")
    with runtime.keep_resident(), runtime.as_guest(runtime):
        runtime.reserve_for_resident()
        runtime.release_reservation()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(not module._forward_hooks for module in model.modules())
    runtime.shutdown()
    runtime.shutdown()


@contextmanager
def installed_as_default(engine: OffloadEngine) -> Iterator[None]:
    manager = offload.PipelineOffloadManager(engine)
    offload.PipelineOffloadManager.OFFLOAD_MGR = manager
    try:
        yield
    finally:
        offload.PipelineOffloadManager.OFFLOAD_MGR = None


@pytest.mark.req("S0-48")
@pytest.mark.parametrize("mode", ["groups", "hidden_states", "watermark", None])
def test_activations_leave_beside_it(mode: Any) -> None:
    engine = engine_of("random", min_offloaded_tensor_size=1)
    with installed_as_default(engine):
        model, plain, runtime = twins(engine=engine)
        marks = {"high": "2048B", "low": "1024B"} if mode == "watermark" else {}
        handle = None if mode is None else offload.apply(model, mode=mode, min_numel=1, **marks)
        for number in range(4):
            with nullcontext() if number % 2 else runtime.forward_context(step=number):
                for each in (model, plain):
                    each.zero_grad()
                    step(each)
            same_gradients(model, plain)
        if handle is not None:
            assert handle.report().total.moved_bytes > 0
            handle.remove()
        runtime.shutdown()
