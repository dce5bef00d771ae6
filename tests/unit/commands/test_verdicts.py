"""Each verdict at its edge: the last figure that is good, and the first that is not, with its setting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.commands.doctor import Line, diagnose
from offload.commands.machine import Gpu, Host, Pcie
from tests.unit.commands.machines import gpu, host, rates

GIB = 1 << 30
LEAST = 0.7 * 16 * 3.938
"""GB/s of 16 lanes of PCIe 5 that are good."""
NODES = {0: frozenset({0, 1}), 1: frozenset({2, 3})}


def line(name: str, of: Host, gpus: list[Gpu]) -> Line:
    (found,) = [each for each in diagnose(of, gpus) if each.name == name]
    return found


def test_a_good_machine_has_nothing_to_change() -> None:
    lines = diagnose(host(), [gpu()])
    assert {each.verdict for each in lines} == {"good"}
    assert [each.name for each in lines] == [
        "versions", "link cuda:0", "PCIe cuda:0", "NUMA cuda:0", "pinning", "locked memory", "host memory",
        "huge pages", "mappings",
    ]  # fmt: skip
    assert line("link cuda:0", host(), [gpu()]).figure == (
        "NVIDIA H200: 55.3 GB/s out, 55.4 in, 102.5 both ways"
    )


def of_gpu(**figures: Any) -> tuple[Host, list[Gpu]]:
    return host(), [gpu(**figures)]


def of_host(**figures: Any) -> tuple[Host, list[Gpu]]:
    return host(**figures), [gpu()]


def beside(out: float) -> tuple[Host, list[Gpu]]:
    alone = rates(50, 50, 100)
    two = [gpu(name, alone=alone, together=rates(out, 40, 70)) for name in ("cuda:0", "cuda:1")]
    return host(), two


@pytest.mark.parametrize(
    ("name", "good", "bad", "setting"),
    [
        (
            "link cuda:0",
            of_gpu(alone=rates(LEAST + 0.01, 60, 100)),
            of_gpu(alone=rates(LEAST - 0.01, 60, 100)),
            "44.1 each way are to be expected: run on the GPU's NUMA node",
        ),
        (
            "link cuda:0",
            of_gpu(alone=rates(50, 48, 62.6)),
            of_gpu(alone=rates(50, 48, 62.4)),
            "both ways at once carry little more",
        ),
        (
            "link cuda:0",
            of_gpu(pcie=None, alone=rates(11.1, 11.1, 20)),
            of_gpu(pcie=None, alone=rates(10.9, 11.1, 20)),
            "11.0 each way",
        ),
        (
            "link cuda:0",
            of_gpu(pcie=Pcie(3, 16, 3, 16), alone=rates(11.1, 11.1, 20)),
            of_gpu(pcie=Pcie(4, 16, 4, 16), alone=rates(11.1, 11.1, 20)),
            "22.1 each way",
        ),
        ("PCIe cuda:0", of_gpu(), of_gpu(pcie=Pcie(5, 8, 5, 16)), "another slot"),
        (
            "PCIe cuda:0",
            of_gpu(pcie=Pcie(4, 16, 4, 16)),
            of_gpu(pcie=Pcie(4, 16, 5, 16)),
            "the firmware's link speed",
        ),
        ("NUMA cuda:0", of_host(), of_host(cores=frozenset({9})), "numactl --cpunodebind=0 --membind=0"),
        ("NUMA cuda:0", of_gpu(), of_gpu(node=1), "torchrun --numa-binding=node"),
        (
            "NUMA cuda:0",
            of_host(cores=frozenset({0, 9})),
            of_host(memory_nodes=frozenset({1})),
            "memory may be on node 1 only",
        ),
        (
            "NUMA cuda:0",
            of_host(nodes={0: frozenset({0})}),
            of_host(cores=frozenset()),
            "copies cross between sockets",
        ),
        ("links, 2 GPUs at once", beside(25), beside(24.9), "torchrun --numa-binding=node"),
        (
            "pinning",
            of_gpu(pinned_bytes=5 * GIB, pinning_s=GIB / 1e9),
            of_gpu(pinned_bytes=5 * GIB, pinning_s=1.001 * GIB / 1e9),
            "huge pages (below), and 8 cores: this process may use 8",
        ),
        (
            "locked memory",
            of_host(memlock_bytes=GIB - 1),
            (host(memlock_bytes=GIB), [gpu(pinned_bytes=0, refused=True, error="refused")]),
            "ulimit -l unlimited",
        ),
        (
            "host memory",
            of_host(pinnable_bytes=150 * GIB),
            of_host(pinnable_bytes=150 * GIB - 1),
            "raise the container's limit",
        ),
        ("huge pages", of_host(huge_pages="always"), of_host(huge_pages="never"), "echo madvise >"),
        (
            "mappings",
            of_host(maps=65530 - 4096 - 1600),
            of_host(maps=65530 - 4096 - 1600 + 1),
            "vm.max_map_count=262144",
        ),
    ],
)
def test_the_last_good_figure_and_the_first_to_change(
    name: str, good: tuple[Host, list[Gpu]], bad: tuple[Host, list[Gpu]], setting: str
) -> None:
    assert line(name, *good).verdict == "good"
    found = line(name, *bad)
    assert found.verdict == "change"
    assert setting in found.setting


@pytest.mark.parametrize(
    ("name", "of", "setting"),
    [
        ("link cuda:0", of_gpu(alone=None), "128 MiB"),
        ("PCIe cuda:0", of_gpu(pcie=None), "nvidia-ml-py"),
        ("NUMA cuda:0", of_gpu(node=None), "nvidia-smi topo -m"),
        ("NUMA cuda:0", of_host(nodes={}), "numactl"),
        ("pinning", of_gpu(pinned_bytes=0), "free host memory"),
        ("locked memory", of_host(memlock_bytes=GIB), "docker run --ulimit memlock=-1"),
        ("host memory", of_host(pinnable_bytes=None), "host_limit="),
        ("huge pages", of_host(huge_pages=""), "/sys/kernel"),
        ("mappings", of_host(maps=None), ""),
    ],
)
def test_what_was_not_measured_is_unknown_and_never_good(
    name: str, of: tuple[Host, list[Gpu]], setting: str
) -> None:
    found = line(name, *of)
    assert found.verdict == "unknown"
    assert setting in found.setting


def test_a_gpu_that_failed_has_one_line_and_the_others_theirs() -> None:
    gone = gpu("cuda:1", error="CUDA error: device lost", alone=None)
    lines = {each.name: each for each in diagnose(host(), [gpu(together=rates(50, 50, 90)), gone])}
    assert (lines["cuda:1"].verdict, lines["cuda:1"].figure) == ("change", "failed: CUDA error: device lost")
    assert "Xid" in lines["cuda:1"].setting
    assert "NUMA cuda:1" not in lines
    assert lines["link cuda:0"].verdict == "good"
    assert lines["links, 2 GPUs at once"].verdict == "unknown"
    assert "below" in line("cuda:0", host(), [gpu(error="no memory", refused=True)]).setting


def test_without_a_gpu_it_says_what_it_cannot_measure() -> None:
    lines = diagnose(host(), [], ("torch sees none", "nvidia-smi has to list them"))
    (none,) = [each for each in lines if each.name == "GPUs"]
    assert none.verdict == "unknown"
    assert none.figure == "none: torch sees none; links, pinning, PCIe and NUMA were not measured"
    assert not any("link " in each.name or each.name == "pinning" for each in lines)


@pytest.mark.parametrize(
    ("version", "verdict"),
    [("2.10.9", "change"), ("2.11.0+cu130", "good"), ("2.15.1", "good"), ("2.16.0a0+git1", "change")],
)
def test_only_torches_of_the_tests_are_good(
    version: str, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert line("versions", host(), []).verdict == verdict
