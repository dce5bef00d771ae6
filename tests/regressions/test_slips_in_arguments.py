"""What one argument of `apply` refused, its siblings took, and what it could not do it ignored.

`device_limit=17` was refused, and `device_total=17`, `"0GB"`, `high=70` and `host_limit="1kB"` were not: the
warnings came steps later and blamed the plan. `modules=` made `blocks=` have no effect. mypy let a mode that
is no mode pass.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from tests.unit.modules.training import build, train

SIZES = ("device_limit", "host_limit", "device_total", "high", "low", "host_reserve")


def applied(argument: str, value: Any) -> offload.Applied:
    mode = {"device_total": "auto", "high": "watermark", "low": "watermark"}.get(argument, "groups")
    beside = {"high": "8GB"} if argument == "low" else {}
    return offload.apply(build(), mode, **{argument: value, **beside})  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", SIZES)
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (17, r"is 17, which is 17 bytes; write '17GB', or '17B' if so few are meant"),
        (999_999, r"is 999999, which is 999,999 bytes; write '999999GB', or '999999B'"),
        (True, r"is True, must be a whole number of bytes"),
        (-1, r"is -1, must be a whole number of bytes"),
        ("8", r"is '8', must be a whole number of bytes"),
        (1.5, r"is 1.5, must be a whole number of bytes"),
        ("50%", r"is '50%', but the size that it is a share of is not known here; write bytes"),
    ],
)
def test_each_size_refuses_the_same_slips(
    argument: str, value: object, said: str, manager: PipelineOffloadManager
) -> None:
    config = manager.engine.config
    with pytest.raises(ValueError, match=f"{argument} {said}"):
        applied(argument, value)
    assert manager.engine.config == config


@pytest.mark.parametrize("argument", ["host_limit", "device_total", "high", "low"])
@pytest.mark.parametrize("nothing", [0, "0GB", "0B"])
@pytest.mark.usefixtures("manager")
def test_nothing_is_no_size_of_what_is_needed(argument: str, nothing: object) -> None:
    with pytest.raises(ValueError, match=f"{argument} is {nothing!r}, must be .* (1|4,096) or more"):
        applied(argument, nothing)


@pytest.mark.parametrize("less", ["1kB", "4095B"])
def test_less_than_a_page_is_no_host_memory(less: str, manager: PipelineOffloadManager) -> None:
    with pytest.raises(ValueError, match=f"host_limit is '{less}', must be .* 4,096 or more"):
        applied("host_limit", less)


@pytest.mark.parametrize("argument", ["device_limit", "device_total", "high", "low"])
@pytest.mark.usefixtures("manager")
def test_more_than_the_gpu_has_is_refused(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    gpu = SimpleNamespace(total_memory=80 * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    with pytest.raises(
        ValueError, match=f"{argument} is 5,000,000,000,000 bytes and the GPU has 80,000,000,000; give less"
    ):
        applied(argument, "5000GB")


def test_so_few_bytes_may_be_meant(manager: PipelineOffloadManager) -> None:
    offload.apply(build(), device_limit="17B")
    assert offload.report().device_limit_bytes == 17


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(6, 6), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x))  # type: ignore[no-any-return]


def test_modules_are_those_inside_the_named_blocks(manager: PipelineOffloadManager) -> None:
    model = nn.Sequential(*(Halves() for _ in range(4)))
    handle = offload.apply(model, modules=["*.up"], blocks=["0", "1"])
    assert handle.blocks == ("0.up", "1.up")
    handle.remove()
    assert offload.apply(model, modules="*.up").blocks == ("0.up", "1.up", "2.up", "3.up")


def test_modules_that_no_named_block_has_are_an_error_with_both(manager: PipelineOffloadManager) -> None:
    model = nn.Sequential(*(Halves() for _ in range(4)), nn.Sequential(nn.Linear(6, 6)))
    with pytest.raises(ValueError, match=r"modules=\['\*.act', '4.\*'\] matches no module inside blocks='0'"):
        offload.apply(model, modules=["*.act", "4.*"], blocks="0")
    offload.apply(model, modules=["*.act", "4.*"])  # nothing of the first try is left


def test_host_memory_can_be_reserved_with_the_same_call(manager: PipelineOffloadManager) -> None:
    """`host_reserve_bytes` is for every GPU, and only `configure` had it, which no example calls."""
    offload.apply(build(), host_reserve="4MB")
    assert manager.engine.arena.held_bytes >= 4_000_000
    assert manager.engine.config.host_reserve_bytes == 4_000_000


def test_a_handle_goes_on_reporting_after_configure(manager: PipelineOffloadManager) -> None:
    """It said that its figures end there, although the model's blocks went on to move."""
    model = build()
    handle = offload.apply(model, min_numel=1)
    train(model, steps=2)
    offload.configure(offload.OffloadConfig(host_limit_bytes="1GB"), device="sim", print_summary=False)
    train(model, steps=3)
    assert (handle.report().total.steps, offload.report().total.steps) == (5, 3)
    assert handle.report().remark == ""
    offload.apply(build(), host_limit="2GB")  # of another model
    train(model, steps=1)
    assert handle.report().total.steps == 6


def test_a_type_checker_finds_a_mode_that_is_none(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    program.write_text(
        "import offload\n"
        "from torch import nn\n"
        "offload.apply(nn.Linear(1, 1), 'hidden_states')\n"
        "offload.apply(nn.Linear(1, 1), 'hiden_states')\n"
        "with offload.activations(nn.Linear(1, 1), 'groups', device_limit='8GB'): pass\n"
        "with offload.activations(nn.Linear(1, 1), 'groups', divice_limit='8GB'): pass\n"
        "offload.OffloadConfig(activation_offloading='group')\n"
    )
    mypy = [sys.executable, "-m", "mypy", "--strict", str(program)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(mypy, cwd=root, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "error:" in line]
    assert [int(line.split(":")[1]) for line in lines] == [4, 6, 7], done.stdout
