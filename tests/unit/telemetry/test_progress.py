"""Long work has a bar on a terminal, short work and any other output have none."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

import offload
from offload.device.sim import SimDevice
from offload.memory import growth
from offload.memory.arena import HostArena
from offload.memory.budget import LocalHostBudget
from offload.telemetry import speaker


class Output(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_pinning_of_much_and_loading_show_that_they_go_on(
    terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Output(terminal)
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(speaker, "_MOMENT_S", 0.0)
    monkeypatch.setattr(growth, "_SHOWN_BYTES", 2 << 20)
    device, mib = SimDevice(), 1 << 20
    arena = HostArena(device, budget=LocalHostBudget(1 << 30), slab_bytes=mib, registration_bytes=mib)
    arena.reserve(1 << 20)
    assert not out.getvalue(), "little"
    arena.reserve(5 << 20)
    arena.close()
    model = nn.Linear(4, 4)
    save_file(dict(model.state_dict()), tmp_path / "model.safetensors")
    offload.load_weights(model, tmp_path)
    shown = out.getvalue()
    for said in ("offload: pinning host memory:", "/4.19M [", "offload: load_weights:", "/2.00 ["):
        assert (said in shown) is terminal, shown
