"""`offload doctor` on real GPUs: each figure is one, and all of it takes less than a minute."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def answer() -> dict[str, Any]:
    """Of a process of its own, as a user runs it."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "offload", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert time.monotonic() - begun < 60
    assert done.returncode == found["code"] in (0, 1), done.stderr
    return found | {"values": {line["name"]: line["values"] for line in found["lines"]}}


def test_every_gpu_has_its_link_and_pinning_its_rate(answer: dict[str, Any]) -> None:
    values, count = answer["values"], torch.cuda.device_count()
    for index in range(count):
        link = values[f"link cuda:{index}"]
        assert link["model"] == torch.cuda.get_device_properties(index).name
        ways = [link["d2h_bytes_per_s"], link["h2d_bytes_per_s"]]
        assert all(1e9 < rate < 1e12 for rate in ways)
        # both ways share a link: at least what one has, within a tenth, and at most their sum, within a tenth
        assert 0.9 * min(ways) < link["both_bytes_per_s"] < 1.1 * sum(ways)
    assert 1e8 < values["pinning"]["bytes_per_s"] < 1e12
    assert values["pinning"]["bytes"] > 0
    together = values.get(f"links, {count} GPUs at once")
    assert (together is None) == (count == 1)
    if together is not None:
        alone = sum(values[f"link cuda:{index}"]["d2h_bytes_per_s"] for index in range(count))
        assert 1e9 < together["d2h_bytes_per_s"] < 1.1 * alone
        assert together["least_share"] > 0


def test_a_gpu_has_a_place_and_a_link_where_the_system_shows_them(answer: dict[str, Any]) -> None:
    values = answer["values"]
    numa, pcie = values["NUMA cuda:0"], values["PCIe cuda:0"]
    assert Path("/sys/devices/system/node").is_dir() == (numa["nodes"] >= 1)  # a sandbox may hide it
    assert bool(numa["thread_nodes"]) == (numa["nodes"] >= 1)
    assert numa["node"] is None or 0 <= numa["node"] < 64
    if pcie:  # neither nvidia-ml-py nor /sys where a sandbox hides both
        assert 1 <= pcie["generation"] <= pcie["most_generation"] <= 7
        assert pcie["width"] in (1, 2, 4, 8, 16)
    assert values["versions"]["cuda"] == torch.version.cuda


def test_what_was_pinned_is_counted_in_the_limits(answer: dict[str, Any]) -> None:
    values = answer["values"]
    assert 0 < values["host memory"]["pinnable_bytes"] <= values["host memory"]["memory_bytes"]
    maps = values["mappings"]
    if maps["most_maps"] is not None:  # a sandbox may have no such limit
        assert maps["maps_per_gib"] is not None
        assert 0 < maps["maps"] < maps["most_maps"]
