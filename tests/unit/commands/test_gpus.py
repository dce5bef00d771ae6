"""Links measured on simulated devices, whose rates are known: alone, together, and where one of them fails,
is refused host memory, or never answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from offload.commands import machine
from offload.commands.machine import measure
from offload.device.sim import SimDevice
from offload.engine import OffloadEngine
from offload.memory.budget import LocalHostBudget
from offload.policy.actions import Rates
from offload.transfer import copier

MIB = 1 << 20
RATES = {"sim:0": (40.0, 20.0), "sim:1": (10.0, 30.0)}
"""GB/s out and in."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "_COPY_BYTES", MIB)
    monkeypatch.setattr(machine, "LINK_TEST_BYTES", 2 * MIB)
    monkeypatch.setattr(machine, "_GRACE_S", 0.2)


@pytest.fixture
def forever() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def simulated(name: str) -> OffloadEngine:
    out, back = RATES[name]
    device = SimDevice(executor="clock", d2h_gb_s=out, h2d_gb_s=back)
    return OffloadEngine(device=device, budget=LocalHostBudget(16 * MIB))


def test_each_link_is_measured_alone_and_all_at_once_and_pinning_once() -> None:
    engines: list[OffloadEngine] = []
    order: list[str] = []

    def kept(name: str) -> OffloadEngine:
        engine = simulated(name)
        copier = engine.measure_link

        def seen(line_up: Callable[[], None] | None = None) -> Rates | None:
            order.extend([name] if line_up is None else [])
            return copier(line_up)

        engine.measure_link = seen  # type: ignore[method-assign]
        engines.append(engine)
        order.append(name)
        time.sleep(0.05)
        return engine

    found = measure([*RATES], pin_bytes=4 * MIB, patience_s=30, make=kept)
    assert [gpu.error for gpu in found] == ["", ""]
    assert order[0] == order[1] != order[2] == order[3], "nobody begins while another is alone"
    for gpu in found:
        for rates in (gpu.alone, gpu.together):
            out, back = (each / 1e9 for each in (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s))
            assert (out, back) == pytest.approx(RATES[gpu.name])
    assert [gpu.pinned_bytes for gpu in found] == [4 * MIB, 0]
    assert found[0].pinning_s > 0
    assert [engine.arena.held_bytes for engine in engines] == [0, 0], "what was pinned is given back"


def test_one_gpu_has_nobody_to_line_up_with() -> None:
    (found,) = measure(["sim:0"], pin_bytes=0, patience_s=30, make=simulated)
    assert found.alone is not None
    assert found.together is None
    assert found.pinned_bytes == 0


@pytest.mark.parametrize("when", ["first", "together"])
def test_a_gpu_that_vanishes_is_an_error_and_the_other_has_its_figures(when: str) -> None:
    def make(name: str) -> OffloadEngine:
        engine = simulated(name)
        if name == "sim:1":
            if when == "first":
                raise RuntimeError("CUDA error: unspecified launch failure\nCompile with ...")
            copier, calls = engine.measure_link, []

            def second_fails(line_up: object = None) -> object:
                calls.append(1)
                if len(calls) > 1:
                    raise RuntimeError("CUDA error: device lost")
                return copier()

            engine.measure_link = second_fails  # type: ignore[method-assign, assignment]
        return engine

    begun = time.monotonic()
    good, bad = measure([*RATES], pin_bytes=MIB, patience_s=60, make=make)
    assert time.monotonic() - begun < 40, "the other one waits for it no longer"
    assert bad.error.startswith("CUDA error: ")
    assert "\n" not in bad.error
    assert not bad.refused
    assert (good.error, good.together) == ("", None)
    assert good.alone is not None


def test_host_memory_that_is_refused_is_told_apart() -> None:
    def small(name: str) -> OffloadEngine:
        return OffloadEngine(device=SimDevice(), budget=LocalHostBudget(MIB))

    (found,) = measure(["sim:0"], pin_bytes=MIB, patience_s=30, make=small)
    assert found.refused
    assert "bytes" in found.error


@pytest.mark.parametrize("stuck", [*RATES])
def test_a_gpu_that_never_answers_is_left_behind(stuck: str, forever: threading.Event) -> None:
    def make(name: str) -> OffloadEngine:
        if name == stuck:
            forever.wait()
        return simulated(name)

    begun = time.monotonic()
    found = {gpu.name: gpu for gpu in measure([*RATES], pin_bytes=MIB, patience_s=2.0, make=make)}
    assert time.monotonic() - begun < 20, "it waits for its patience, and not for the GPU"
    assert found[stuck].error.startswith("did not answer within 2 s")
    assert found[stuck].is_alive()
    if stuck == "sim:1":  # the one before it had its turn
        assert found["sim:0"].error == ""
        assert found["sim:0"].alone is not None
