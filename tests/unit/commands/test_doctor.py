"""`offload doctor`: its codes, its JSON, and how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from offload.commands import doctor
from offload.commands.machine import Gpu
from tests.unit.commands.machines import gpu, host

Asked = Callable[..., tuple[int, str]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Asked:
    """Its code and its answer on a machine with these GPUs."""

    def ask(*arguments: str, gpus: list[Gpu], **figures: Any) -> tuple[int, str]:
        names = [each.name for each in gpus]
        if gpus:
            monkeypatch.setattr(doctor, "_visible_gpus", lambda: (names, ("", "")))
        monkeypatch.setattr(doctor, "measure", lambda found, **_: gpus if found else [])
        monkeypatch.setattr(doctor, "read_host", lambda: host(**figures))
        return doctor.main([*arguments]), capsys.readouterr().out

    return ask


def test_the_code_says_whether_something_is_to_be_changed(asked: Asked) -> None:
    assert asked(gpus=[gpu()])[0] == 0
    code, said = asked(gpus=[gpu()], huge_pages="never")
    assert code == 1
    assert "echo madvise" in said
    assert asked(gpus=[gpu(pcie=None)])[0] == 0, "what is unknown is nothing to change"


@pytest.mark.skipif("torch.cuda.is_available()", reason="there is a GPU")
def test_without_a_gpu_the_code_is_3_and_the_reason_is_said(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(gpus=[], huge_pages="never")[0] == 3
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor._visible_gpus()[1][0] == f"torch {torch.__version__} is built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert doctor._visible_gpus()[1][0] == "torch sees none"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, said = asked("--json", gpus=[])
    (line,) = [each for each in json.loads(said)["lines"] if each["name"] == "GPUs"]
    assert code == 3
    assert line["figure"].startswith("none: CUDA_VISIBLE_DEVICES is ''; ")
    assert line["setting"].startswith("unset it")


def test_the_json_has_every_line_with_its_figures(asked: Asked) -> None:
    code, said = asked("--json", gpus=[gpu()], memlock_bytes=8 << 20)
    answer = json.loads(said)
    assert [*answer] == ["code", "seconds", "lines"]
    assert answer["code"] == code == 0
    assert 0 <= answer["seconds"] < 60
    for line in answer["lines"]:
        assert [*line] == ["name", "figure", "verdict", "setting", "values"]
        assert line["verdict"] in ("good", "change", "unknown")
        assert line["values"], line["name"]
    values = {line["name"]: line["values"] for line in answer["lines"]}
    assert values["link cuda:0"] == {
        "model": "NVIDIA H200", "memory_bytes": 150 << 30, "pcie_bytes_per_s": pytest.approx(63.008e9),
        "d2h_bytes_per_s": 55.3e9, "h2d_bytes_per_s": 55.4e9, "both_bytes_per_s": 102.5e9,
    }  # fmt: skip
    assert values["locked memory"] == {"unlimited": False, "limit_bytes": 8 << 20}
    assert values["mappings"] == {"maps": 400, "most_maps": 65530, "maps_per_gib": 2}
    assert values["PCIe cuda:0"] == dict(generation=5, width=16, most_generation=5, most_width=16)


def test_a_gpu_that_still_hangs_does_not_keep_the_process(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    stuck = gpu(error="did not answer within 45 s")
    monkeypatch.setattr(stuck, "is_alive", lambda: True)
    code, said = asked(gpus=[stuck])
    assert ended == [code] == [1]
    assert "did not answer" in said, "the answer is printed before"
