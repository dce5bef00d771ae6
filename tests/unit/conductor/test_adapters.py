"""Adapters: which attribute a hint becomes, who writes it, and that it is put back."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from offload.client import Phase
from offload.conductor import (
    ActStagehandConductorAdapter,
    ConductorAdapter,
    ConductorRuntime,
    Pool,
    SquareQConductorAdapter,
    StagehandConductorAdapter,
    TransferToken,
)
from offload.transfer.copier import DenialReason, Denied, Direction
from tests.unit.conductor.sources import activations_runtime, knobs, weights_runtime
from tests.unit.watermark.training import batch, blocks, runtime_of

MIB = 1 << 20


def conductor(allocated: int = 0, **fields: Any) -> ConductorRuntime:
    fields = {"vram_soft_cap_mb": 100, "vram_hard_cap_mb": 100, "telemetry_interval": 0, **fields}
    return ConductorRuntime(allocated=lambda: allocated, **fields)


def enter(found: ConductorRuntime, phase: Phase) -> None:
    """Begin a step and go as far as this phase."""
    calls = [found.begin_step, found.enter_forward, found.enter_backward, found.enter_optimizer]
    for call in calls[: list(Phase).index(phase) + 1]:
        call()


@pytest.mark.req("S1-39", "S1-41", "S1-45")
def test_weights_keep_to_the_slots_to_the_device_and_to_the_window() -> None:
    runtime = weights_runtime()
    found = conductor(allocated=81 * MIB)
    found.register(StagehandConductorAdapter(runtime))
    assert knobs(runtime) == [2, 3]  # the less of 4 and two slots; no cap on the window
    enter(found, Phase.BACKWARD)
    assert knobs(runtime) == [2, 1]  # rule 1
    found.end_step()
    found.begin_step()
    assert knobs(runtime) == [2, 3]


@pytest.mark.req("S1-40", "S1-42", "S1-45")
def test_activations_send_nothing_in_the_optimizer_and_weights_fetch_one_ahead() -> None:
    weights, activations = weights_runtime(), activations_runtime()
    found = conductor()
    found.register(StagehandConductorAdapter(weights))
    found.register(ActStagehandConductorAdapter(activations))
    enter(found, Phase.BACKWARD)
    assert knobs(weights, activations) == [2, 3, 2, 2]
    found.enter_optimizer()
    assert knobs(weights, activations) == [1, 1, 0, 1]


@pytest.mark.req("S1-42")
def test_suppressed_in_the_backward_activations_still_leave() -> None:
    runtime = activations_runtime()
    found = conductor(allocated=99 * MIB)
    found.register(ActStagehandConductorAdapter(runtime))
    enter(found, Phase.BACKWARD)
    assert found.hints.suppress_speculative
    assert knobs(runtime) == [2, 2]


def test_rule_3_reaches_the_runtimes_between_two_boundaries() -> None:
    runtime = weights_runtime(prefetch_window=3)
    found = conductor(h2d_slots=1, d2h_slots=1)
    weights = StagehandConductorAdapter(runtime)
    activations = ActStagehandConductorAdapter(activations_runtime())
    found.register(weights)
    found.register(activations)
    enter(found, Phase.FORWARD)
    weights.request_block_load()
    activations.request_spill()
    windows = []
    for _ in range(6):
        weights.request_prefetch()
        windows.append(runtime.scheduler.policy.prefetch_window)
    assert windows == [3, 3, 3, 2, 1, 1]


@pytest.mark.req("S1-44")
@pytest.mark.parametrize("ends", ["unregister", "shutdown"])
def test_what_was_found_is_put_back_exactly(ends: str) -> None:
    weights, activations = weights_runtime(7, 5), activations_runtime(None, 9)
    found = conductor(allocated=99 * MIB)
    adapters = [StagehandConductorAdapter(weights), ActStagehandConductorAdapter(activations)]
    for adapter in adapters:
        found.register(adapter)
    enter(found, Phase.OPTIMIZER)
    assert knobs(weights, activations) == [1, 1, 0, 1]
    if ends == "shutdown":
        found.shutdown()
    for adapter in adapters:
        found.unregister(adapter)
        found.unregister(adapter)
    assert knobs(weights, activations) == [7, 5, None, 9]
    assert [adapter.request_prefetch() for adapter in adapters[:1]] == [None]


def test_a_bound_that_is_tighter_than_the_hint_stays() -> None:
    weights, activations = weights_runtime(1, 1), activations_runtime(1, 1)
    found = conductor()
    found.register(StagehandConductorAdapter(weights))
    found.register(ActStagehandConductorAdapter(activations))
    enter(found, Phase.BACKWARD)
    assert knobs(weights, activations) == [1, 1, 1, 1]


@pytest.mark.req("S1-43")
def test_attributes_are_written_on_the_thread_that_announces_the_phase_and_plainly() -> None:
    writers: list[tuple[str, int]] = []

    class Noting(SimpleNamespace):
        def __setattr__(self, name: str, value: Any) -> None:
            writers.append((name, threading.get_ident()))
            super().__setattr__(name, value)

    runtime = SimpleNamespace(
        engine=Noting(_max_inflight=4), scheduler=SimpleNamespace(policy=Noting(prefetch_window=3))
    )
    found = conductor()
    found.register(StagehandConductorAdapter(runtime))
    enter(found, Phase.OPTIMIZER)
    found.end_step()
    found.shutdown()
    assert {name for name, _ in writers} == {"_max_inflight", "prefetch_window"}
    assert {thread for _, thread in writers} == {threading.get_ident()}


@pytest.mark.req("S1-40", "S1-47")
@pytest.mark.parametrize(("order", "found"), [("reactive", [1, 1]), ("forecast", [None, None])])
def test_the_watermark_runtime_has_the_attributes_and_keeps_what_it_may_not_send(
    order: str, found: list[int | None]
) -> None:
    """At the mark from its first save on: outside of the optimizer's step everything leaves, in it nothing,
    and nobody waits for room."""
    with runtime_of(order=order, high=2, low=1, memory_allocated=lambda: 2) as runtime:
        arbiter = conductor()
        arbiter.register(ActStagehandConductorAdapter(runtime))
        assert knobs(runtime) == found
        kept = {}
        for phase in (Phase.FORWARD, Phase.OPTIMIZER):
            enter(arbiter, phase)
            for _ in range(3):
                with runtime.managed_forward():
                    loss = blocks(3)(batch(0)).sum()
                loss.backward()
            metrics = runtime.step_end()
            kept[phase] = metrics.activations_spilled == 0
            assert metrics.activations_saved > 0
            if phase is Phase.OPTIMIZER:
                assert knobs(runtime)[0] == 0
                assert metrics.stall_count == 0
            arbiter.end_step()
        assert kept == {Phase.FORWARD: False, Phase.OPTIMIZER: True}
        arbiter.shutdown()
        assert knobs(runtime) == found


@pytest.mark.req("S1-45", "Q-5")
def test_slabs_report_their_pinned_memory_and_have_nothing_to_write() -> None:
    found = conductor()
    adapter = SquareQConductorAdapter()
    found.register(adapter)
    assert found.budget.granted_bytes(Pool.PINNED) == 256 * MIB
    assert adapter.snapshot() == {}
    adapter.report_pinned(3 * MIB)
    assert found.budget.granted_bytes(Pool.PINNED) == 3 * MIB
    enter(found, Phase.OPTIMIZER)
    found.unregister(adapter)
    assert found.budget.granted_bytes(Pool.PINNED) == 0


@pytest.mark.req("S1-27", "Q-5")
def test_runtimes_ask_by_their_entry_points_and_none_means_that_nobody_arbitrates() -> None:
    weights = StagehandConductorAdapter(weights_runtime())
    activations = ActStagehandConductorAdapter(activations_runtime())
    slabs = SquareQConductorAdapter()
    required = [weights.request_block_load, activations.request_restore, slabs.request_slab_load]
    optional = [weights.request_prefetch, slabs.request_lookahead]
    asks = [*required, *optional, activations.request_spill]
    assert [ask() for ask in asks] == [None] * 6  # registered with nobody
    found = conductor(h2d_slots=5)
    for adapter in (weights, activations, slabs):
        found.register(adapter)
    enter(found, Phase.FORWARD)
    tokens = [ask() for ask in asks]
    assert all(isinstance(token, TransferToken) for token in tokens)
    assert [token.direction for token in tokens if isinstance(token, TransferToken)] == [
        *[Direction.H2D] * 5,
        Direction.D2H,
    ]
    full = Denied(DenialReason.H2D_SLOTS_EXHAUSTED)
    assert [ask() for ask in [*required, *optional]] == [full] * 5
    enter_rest = [found.enter_backward, found.enter_optimizer]
    for call in enter_rest:
        call()
    suppressed = Denied(DenialReason.PHASE_RULE_SUPPRESSED_SPECULATIVE)
    assert [ask() for ask in optional] == [suppressed] * 2
    found.shutdown()
    assert [ask() for ask in asks] == [None] * 6


@pytest.mark.req("S1-46")
@pytest.mark.parametrize("chosen", list(itertools.product([False, True], repeat=3)))
def test_any_subset_of_runtimes_works(chosen: tuple[bool, bool, bool]) -> None:
    weights, activations = weights_runtime(), activations_runtime()
    made = [
        StagehandConductorAdapter(weights),
        ActStagehandConductorAdapter(activations),
        SquareQConductorAdapter(),
    ]
    found = conductor()
    for adapter, is_chosen in zip(made, chosen, strict=True):
        if is_chosen:
            found.register(adapter)
    for _ in range(2):
        enter(found, Phase.OPTIMIZER)
        assert knobs(weights) == ([1, 1] if chosen[0] else [4, 3])
        assert knobs(activations) == ([0, 1] if chosen[1] else [3, 3])
        found.end_step()
    names = ["stagehand", "activation_stagehand"]
    assert list(found.snapshots()) == [
        name for name, is_chosen in zip(names, chosen, strict=False) if is_chosen
    ]
    found.shutdown()


@pytest.mark.req("S1-2")
def test_each_adapter_is_told_of_each_transition_once_in_the_order_of_registration() -> None:
    told: list[tuple[str, Phase]] = []

    class Listening(ConductorAdapter):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def on_phase(self, phase: Phase) -> None:
            told.append((self.name, phase))

    found = conductor()
    for name in ("first", "second", "third"):
        found.register(Listening(name))
    enter(found, Phase.OPTIMIZER)
    found.end_step()
    assert told == [(name, phase) for phase in Phase for name in ("first", "second", "third")]


def test_an_adapter_of_another_conductor_is_refused_and_a_runtime_without_the_attributes_too() -> None:
    adapter = StagehandConductorAdapter(weights_runtime())
    conductor().register(adapter)
    with pytest.raises(ValueError, match="'stagehand' is registered already; unregister it there first"):
        conductor().register(adapter)
    found = conductor()
    with pytest.raises(AttributeError, match="_max_d2h"):
        found.register(ActStagehandConductorAdapter(SimpleNamespace(transfer=SimpleNamespace())))
    assert found.adapters == []
