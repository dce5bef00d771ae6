"""The conductor of the source system: its life cycle, what it is when disabled, its config and its lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from offload import conductor
from offload.client import Phase
from offload.conductor import (
    ActStagehandConductorAdapter,
    ConductorConfig,
    ConductorRuntime,
    HeuristicPolicyBridgeV0,
    PhaseOrderError,
    Pool,
    Reservation,
    ReservationKind,
    SquareQConductorAdapter,
    StagehandConductorAdapter,
    TransferToken,
)
from offload.conductor.budget import Counts
from offload.conductor.phases import TurnsPolicyBridge
from offload.transfer.copier import DenialReason, Denied, Direction, Priority
from tests.unit.conductor.sources import activations_runtime, knobs, weights_runtime

MIB = 1 << 20


def runtime(allocated: int = 0, **fields: Any) -> ConductorRuntime:
    return ConductorRuntime(allocated=lambda: allocated, **{"telemetry_interval": 0, **fields})


# -- config --------------------------------------------------------------------------------------------------


@pytest.mark.req("S1-50")
def test_the_defaults_are_the_sources() -> None:
    config = ConductorConfig()
    assert (config.vram_soft_cap_mb, config.vram_hard_cap_mb) == (22000, 23500)
    assert (config.h2d_slots, config.d2h_slots) == (2, 2)
    assert config.telemetry_file == "conductor_telemetry.jsonl"
    assert (config.enabled, config.debug_event_trace) == (True, False)
    assert (config.soft_bytes, config.hard_bytes) == (22000 * MIB, 23500 * MIB)


@pytest.mark.req("S1-51")
def test_the_sources_json_loads_and_what_it_does_not_know_is_named(tmp_path: Path) -> None:
    fields = {"enabled": True, "vram_hard_cap_mb": 30000, "h2d_slots": 3, "debug_event_trace": True}
    whole = {"memory": {"stagehand": {"conductor_config": fields}}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(whole))
    expected = ConductorConfig(vram_hard_cap_mb=30000, h2d_slots=3, debug_event_trace=True, bridge="v0")
    assert ConductorConfig.load(path) == ConductorConfig.load(whole) == expected
    named = {"memory": {"stagehand": {"conductor_config": {"bridge": "turns"}}}}
    assert ConductorConfig.load(named) == ConductorConfig()
    fields["slots"] = 1
    with pytest.raises(ValueError, match="fields that are not known: slots; known are bridge, d2h_slots"):
        ConductorConfig.load(whole)
    with pytest.raises(ValueError, match=r"no memory\.stagehand\.conductor_config; the fields of the"):
        ConductorConfig.load({"memory": {"stagehand": {}}})


@pytest.mark.req("S1-52")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vram_soft_cap_mb": 10, "vram_hard_cap_mb": 9}, "vram_soft_cap_mb is 10 and vram_hard_cap_mb 9"),
        ({"h2d_slots": 0}, "h2d_slots is 0, must be a whole number, 1 or more"),
        ({"d2h_slots": 0}, "d2h_slots is 0, must be a whole number, 1 or more"),
        ({"d2h_slots": 1.5}, "d2h_slots is 1.5"),
        ({"vram_hard_cap_mb": -1}, "vram_hard_cap_mb is -1, must be a number of MiB above 0"),
        ({"pinned_cap_mb": "8"}, "pinned_cap_mb is '8'"),
        ({"enabled": 1}, "enabled is 1, must be True or False"),
        ({"bridge": "v1"}, "bridge is 'v1', must be 'turns' or 'v0'"),
        ({"telemetry_interval": -1}, "telemetry_interval is -1"),
        ({"telemetry_file": ""}, "telemetry_file is ''"),
    ],
)
def test_a_config_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConductorConfig(**fields)


def test_a_file_that_cannot_be_written_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written: give a file in a folder that is there, or tel"):
        runtime(telemetry_interval=1, telemetry_file=str(tmp_path / "nowhere" / "file.jsonl"))


# -- disabled ------------------------------------------------------------------------------------------------


@pytest.mark.req("S1-48", "S1-49")
def test_disabled_nothing_is_built_and_every_call_returns_at_once() -> None:
    found = ConductorRuntime(ConductorConfig(enabled=False))
    assert vars(found) == {"config": found.config, "_enabled": False}
    weights = weights_runtime(4, 3)
    adapter = StagehandConductorAdapter(weights)
    found.register(adapter)
    found.end_step()  # in any order
    found.enter_optimizer()
    found.begin_step(3)
    found.enter_backward()
    found.enter_forward()
    found.shutdown()
    found.unregister(adapter)
    assert knobs(weights) == [4, 3]
    assert found.phase is None
    assert found.acquire_transfer("a", Direction.H2D, Priority.SPECULATIVE) is None
    assert found.request("a", 1) == Denied(DenialReason.CONDUCTOR_DISABLED)
    assert vars(found) == {"config": found.config, "_enabled": False}


# -- life cycle ----------------------------------------------------------------------------------------------


@pytest.mark.req("S1-3", "S1-6", "S1-57")
def test_the_life_of_a_step_and_of_the_conductor() -> None:
    found = runtime()
    with pytest.raises(PhaseOrderError, match=r"enter_optimizer\(\) before the first begin_step"):
        found.enter_optimizer()
    found.begin_step(7)
    found.enter_forward()
    found.enter_backward()
    found.enter_optimizer()
    with pytest.raises(PhaseOrderError, match=r"begin_step\(\) in OPTIMIZER"):
        found.begin_step(9)
    assert found.step == 7
    found.end_step()
    found.begin_step()
    assert (found.step, found.phase) == (8, Phase.STEP_BEGIN)
    found.shutdown()
    found.shutdown()
    found.begin_step()
    assert found.phase is None


@pytest.mark.req("S1-13", "S1-15", "S1-17")
def test_every_request_is_counted_once_and_nothing_is_allocated_for_it() -> None:
    found = runtime(vram_soft_cap_mb=10, vram_hard_cap_mb=10)
    found.begin_step()
    found.enter_forward()
    first = found.request("a", 6 * MIB, for_phase=True)
    assert isinstance(first, Reservation)
    answers = [
        found.request("b", 6 * MIB),
        found.request("b", 6 * MIB, kind=ReservationKind.SOFT),
        found.acquire_transfer("b", Direction.H2D, Priority.REQUIRED),
        found.request("b", 1 << 60, pool=Pool.PINNED),  # more than any machine has: nothing is allocated
    ]
    assert answers[0] == Denied(DenialReason.VRAM_SOFT_CAP)
    assert found.counts == Counts(grants=3, denials=1, partials=1)
    found.enter_backward()  # the forward's promise is released by its end
    assert not found.release(first)
    assert found.budget.granted_bytes(Pool.VRAM) == 4 * MIB
    found.end_step()
    found.begin_step()
    assert found.budget.granted_bytes(Pool.VRAM) == 4 * MIB  # by hand


@pytest.mark.req("S1-28", "S1-29")
def test_hints_are_made_at_every_boundary_and_pushed_to_every_adapter() -> None:
    pushed: list[tuple[str, Phase | None, Any]] = []

    class Noting(StagehandConductorAdapter):
        def apply_hints(self, hints: Any, phase: Phase | None) -> None:
            pushed.append((self.name, phase, hints))

    class Other(Noting):
        name = "other"

    found = runtime(allocated=24000 * MIB, rules=HeuristicPolicyBridgeV0(h2d_slots=2, d2h_slots=2))
    found.register(Noting(weights_runtime()))
    found.register(Other(weights_runtime()))
    pushed.clear()
    found.begin_step()
    found.enter_forward()
    found.enter_backward()
    found.enter_optimizer()
    found.end_step()
    assert [(name, phase) for name, phase, _ in pushed] == [
        (name, phase) for phase in Phase for name in ("stagehand", "other")
    ]
    suppressed = [hints.suppress_speculative for name, _, hints in pushed if name == "other"]
    assert suppressed == [False, False, True, True, True]  # V0: until the next STEP_BEGIN
    assert [hints.max_inflight_h2d for name, _, hints in pushed if name == "other"] == [2, 2, 2, 1, 2]
    assert [hints.max_inflight_d2h for name, _, hints in pushed if name == "other"] == [2] * 5
    windows = [hints.prefetch_window_cap for name, _, hints in pushed if name == "other"]
    assert windows == [None, None, 1, 1, 1]


def test_the_config_names_the_bridge_and_the_default_starts_anew_at_each_turn() -> None:
    assert isinstance(runtime().bridge, TurnsPolicyBridge)
    assert type(runtime(bridge="v0").bridge) is HeuristicPolicyBridgeV0


@pytest.mark.req("S1-20")
def test_tokens_come_back_through_exceptions_and_a_release_after_shutdown_is_passed_over() -> None:
    found = runtime()
    found.begin_step()
    tokens = []
    for index in range(6):
        token = found.acquire_transfer("a", Direction.H2D, Priority.REQUIRED)
        assert isinstance(token, TransferToken)
        tokens.append(token)
        try:
            if index % 2:
                raise RuntimeError("the copy failed")
            found.complete_transfer(token, 1000, 0.5)
        except RuntimeError:
            pass
        finally:
            assert found.release_token(token)
    assert found.transfers.in_flight(Direction.H2D) == 0
    assert found.transfers.bytes_per_s(Direction.H2D) == pytest.approx(2e6)
    found.shutdown()
    assert not found.release_token(tokens[0])


# -- telemetry -----------------------------------------------------------------------------------------------


@pytest.mark.req("S1-53", "S1-54", "S1-56")
def test_a_line_every_n_steps_with_exactly_the_sources_fields(tmp_path: Path) -> None:
    path = tmp_path / "conductor_telemetry.jsonl"
    allocated = round(21456.3 * MIB)
    found = runtime(allocated, telemetry_interval=2, telemetry_file=str(path))
    found.register(StagehandConductorAdapter(weights_runtime(4, 3)))
    found.register(ActStagehandConductorAdapter(activations_runtime(3, 1)))
    found.register(SquareQConductorAdapter(512))
    found.request("weights", 8192 * MIB, pool=Pool.PINNED)
    for step in range(5):
        found.begin_step(step)
        found.enter_forward()
        token = found.acquire_transfer("weights", Direction.H2D, Priority.REQUIRED)
        found.acquire_transfer("activations", Direction.D2H, Priority.BACKGROUND)
        found.enter_backward()
        found.enter_optimizer()
        assert isinstance(token, TransferToken) is (step < 2)
        found.end_step()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step_id"] for line in lines] == [1, 3]
    seconds = lines[1].pop("phase_durations")
    assert list(seconds) == ["forward", "backward", "optimizer"]
    assert all(value > 0 for value in seconds.values())
    headroom = lines[1].pop("vram_headroom_mb")
    assert headroom == pytest.approx(23500 - 21456.3, abs=1e-6)  # the source's sample: 2043.7
    assert lines[1].pop("vram_allocated_mb") == pytest.approx(21456.3, abs=1e-6)
    assert lines[1] == {
        "step_id": 3,
        "pinned_granted_mb": 8192 + 512,  # the source's sample: 8704
        "h2d_inflight": 2,
        "d2h_inflight": 2,
        "grant_count": 1 + 4,
        "deny_count": 4,
        "partial_count": 0,
        "runtime_snapshots": {
            "stagehand": {"max_inflight": 2, "prefetch_window": 3},
            "activation_stagehand": {"max_d2h": 2, "max_h2d": 1},
        },
    }


@pytest.mark.req("S1-55")
def test_the_event_trace_has_phases_reservations_and_slots_and_begins_anew_with_each_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "trace.jsonl"
    found = runtime(5, telemetry_interval=1, telemetry_file=str(path), debug_event_trace=True)
    found.begin_step(0)
    found.request("a", 3, kind=ReservationKind.SOFT)
    found.acquire_transfer("a", Direction.D2H, Priority.BACKGROUND)
    found.end_step()
    found.begin_step(1)
    found.end_step()
    first, second = (json.loads(line)["events"] for line in path.read_text().splitlines())
    assert first == [
        {"event": "phase", "phase": "step_begin", "step": 0, "allocated_bytes": 5},
        {
            "event": "reservation",
            "owner": "a",
            "outcome": "granted",
            "kind": "soft",
            "pool": "vram",
            "nbytes": 3,
            "granted": 3,
        },
        {"event": "slot", "owner": "a", "outcome": "granted", "direction": "d2h", "priority": "BACKGROUND"},
        {"event": "phase", "phase": "step_end", "step": 0, "allocated_bytes": 5},
    ]
    assert [event["phase"] for event in second] == ["step_begin", "step_end"]


def test_without_the_trace_no_event_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    found = runtime(telemetry_interval=1, telemetry_file=str(path))
    found.begin_step(0)
    found.end_step()
    assert "events" not in json.loads(path.read_text())


@pytest.mark.req("S1-35", "S1-36", "S1-37", "S1-51")
def test_what_the_sources_json_asks_for_only_tightens_within_a_step() -> None:
    """Such a file got the rules that start anew at each turn: hints loosened in OPTIMIZER, and again in a
    forward after a backward."""
    allocated = [90 * MIB]
    fields = {"vram_soft_cap_mb": 90, "vram_hard_cap_mb": 100, "telemetry_interval": 0}
    config = ConductorConfig.load({"memory": {"stagehand": {"conductor_config": fields}}})
    found = ConductorRuntime(config, allocated=lambda: allocated[0])
    caps = []
    for _ in range(2):
        for enter in (
            found.begin_step,
            found.enter_forward,
            found.enter_backward,
            found.enter_forward,
            found.enter_backward,
            found.enter_optimizer,
            found.end_step,
        ):
            enter()
            caps.append((found.hints.prefetch_window_cap, found.hints.suppress_speculative))
        allocated[0] = 0
    loose, tight = (None, False), (1, True)
    assert caps == [loose] * 2 + [tight] * 5 + [loose] * 5 + [(None, True)] * 2


@pytest.mark.req("S1-57")
def test_the_parts_have_the_sources_names_in_the_package() -> None:
    parts = ["PhaseCoordinator", "BudgetManager", "TransferManager", "PolicyBridge", "TelemetryHub"]
    for name in [*parts, "ConductorRuntime", "RuntimeLimitHints", "Priority", "Direction", "DenialReason"]:
        assert getattr(conductor, name).__name__ == name
    runtime = conductor.ConductorRuntime(telemetry_interval=0, allocated=lambda: 0)
    assert type(runtime.coordinator) is conductor.PhaseCoordinator
    assert type(runtime.budget) is conductor.BudgetManager
    assert type(runtime.transfers) is conductor.TransferManager
    assert type(runtime.bridge) is TurnsPolicyBridge
    assert runtime.adapters == []
    assert type(runtime.telemetry) is conductor.TelemetryHub
