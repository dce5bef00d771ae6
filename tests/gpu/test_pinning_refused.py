"""Host memory that a GPU's driver or the system will not pin: right bits, everything counted, one warning of
it (and one of the device limit that is passed for want of it), and no error in a later kernel.

The same without a GPU, for inline and background growth and both kinds of caps, is in
tests/unit/groups/test_pinning_refused.py.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from offload.device.cuda import CudaDevice
from offload.errors import HostBudgetError
from offload.memory.arena import HostArena
from offload.memory.budget import LocalHostBudget
from tests.gpu.workbench import DEVICE, Program, assert_same_bits, build_manager
from tests.mapping import address_space
from tests.soak import small_slabs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]

MIB = 1 << 20
PINNABLE = 4 * MIB
"""Of the 24 MiB that the four microbatches of a `Program` save."""

CAPS: dict[str, dict[str, Any]] = {
    "windows": {"max_spilling_bytes": 512 << 10, "max_restoring_bytes": 512 << 10},
    "device limit": {"device_limit_bytes": 3 * MIB},
}


class StingyRuntime:
    """CUDA's runtime, which registers `left` bytes and then refuses for real: a registration of no bytes is
    an invalid one."""

    def __init__(self, left: int) -> None:
        self._real = torch.cuda.cudart()
        self.left = left
        self.refused = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:  # noqa: N802 - CUDA's name
        self.left -= nbytes
        if self.left < 0:
            self.refused += 1
            return self._real.cudaHostRegister(address, 0, flags)
        return self._real.cudaHostRegister(address, nbytes, flags)

    def cudaHostUnregister(self, address: int) -> Any:  # noqa: N802 - CUDA's name
        return self._real.cudaHostUnregister(address)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> StingyRuntime:
    made = StingyRuntime(PINNABLE)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def a_kernel_runs() -> bool:
    """And is not blamed for an earlier error."""
    return float((torch.ones(4, device=DEVICE) + 1).sum()) == 8.0


def test_a_refused_registration_is_not_blamed_on_the_next_kernel(runtime: StingyRuntime) -> None:
    """CUDA keeps the error of a refused call for its thread, and torch asks for it after every kernel
    launch."""
    device = CudaDevice()
    with pytest.raises(
        HostBudgetError,
        match=r"cudaHostRegister refused 1,048,576 bytes after 4,194,304 of 8,388,608 \(error [1-9]",
    ):
        device.host_memory(8 * MIB, MIB)
    assert a_kernel_runs()


def test_a_mapping_that_the_system_refuses_is_a_budget_error() -> None:
    device = CudaDevice()
    assert a_kernel_runs()
    arena = HostArena(device, budget=LocalHostBudget(8 << 30))
    with (
        address_space(256 * MIB),
        pytest.raises(HostBudgetError, match="the system refused 1,073,741,824 bytes of host memory"),
    ):
        arena.reserve(4 << 30)
    assert arena.held_bytes == arena.budget.used_bytes == 0
    assert a_kernel_runs()
    arena.reserve(64 * MIB)
    arena.clear()


@pytest.mark.parametrize("caps", CAPS)
@pytest.mark.parametrize("who", ["the driver", "the host limit"])
def test_steps_without_enough_host_memory_have_the_right_bits_and_say_so_once(
    who: str,
    caps: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = Program(steps=6)
    expected = program.run()
    config = dict(CAPS[caps])
    if who == "the driver":
        runtime: StingyRuntime | None = request.getfixturevalue("runtime")
    else:
        runtime = None
        config["host_limit_bytes"] = PINNABLE
    with small_slabs(monkeypatch, MIB):
        manager = build_manager(reserve_bytes=0, **config)
    found = program.run(manager)
    assert_same_bits(expected.gradients, found.gradients)
    assert all(stats.refused > 0 for stats in found.stats), [stats.refused for stats in found.stats]
    assert all(stats.saved == stats.kept + stats.spilled for stats in found.stats)
    assert all(stats.host_bytes_held <= PINNABLE for stats in found.stats)
    assert found.spilled > 0, "the thread that pins never caught up"
    assert runtime is None or runtime.refused > 0
    ours = [
        record
        for record in caplog.records
        if record.levelno >= logging.WARNING and record.name.startswith("offload")
    ]
    said = [record.getMessage() for record in ours]
    (once,) = said
    assert "found no host memory and stayed on the device, beside any device_limit: of " in once
    assert manager.engine.arena.budget.used_bytes == 0
