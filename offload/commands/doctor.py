"""Is this machine right for offload? A line each: the figure, the verdict, the setting to change.

    offload doctor
    offload doctor --json

It measures the links of all GPUs that the process sees, and pinning, in some seconds (60 at most), and reads
limits from the system; it changes nothing. Run it as the training runs: in the same container, under the same
numactl or Slurm step. One invariant: the exit code is 0 where nothing is to be changed, 1 where a line says
what, and 3 where there is no GPU to measure, whatever the other lines say. A line is computed from the
figures alone; what was not measured is "unknown" and never "good".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from shutil import get_terminal_size
from typing import Any, Literal

import torch
from tabulate import tabulate

import offload
from offload.commands.machine import UNLIMITED, Gpu, Host, measure, read_host
from offload.policy.actions import Rates
from offload.sizes import bytes_text
from offload.versions import untested

_GB = 1e9
_LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of a PCIe lane each way, by generation, after its encoding."""
_LINK_SHARE = 0.7
"""Of that; an H200 reaches 0.88 alone (55.3 of 63.0 GB/s, docs/benchmarks.md)."""
_LINK_BYTES_PER_S = 11e9
"""Where the link's generation is not known: 0.7 of 16 lanes of PCIe 3."""
_BOTH = 1.25
"""Both ways over the faster one; an H200 has 1.85, an H100 1.62."""
_TOGETHER = 0.5
"""Of a link alone, with all GPUs copying: four H100 of one host have 0.56 out and 0.69 in."""
_PINNING_BYTES_PER_S = 5e9
"""An H200's host pins 17.5 GB/s, and 1.7 without huge pages and threads."""
_SPARE_MAPS = 4096
"""For what a training process loads after this."""


@dataclass(frozen=True, slots=True)
class Line:
    """One answer. setting: what to change, or to know. values: the figures of `figure`, in bytes, seconds and
    bytes per second, None for what is unknown."""

    name: str
    figure: str
    verdict: Literal["good", "change", "unknown"]
    setting: str
    values: dict[str, Any]


def diagnose(host: Host, gpus: Sequence[Gpu], why_none: tuple[str, str] = ("", "")) -> list[Line]:
    """why_none: the reason why there are no GPUs, and the way to get one."""
    return [
        _versions(host),
        *_gpus(gpus, host, why_none),
        *_together(gpus),
        *_pinning(gpus, host),
        _memlock(host, gpus),
        _memory(host, gpus),
        _huge_pages(host),
        _maps(host, gpus),
    ]


def _line(name: str, figure: str, good: bool | None, setting: str = "", **values: Any) -> Line:
    """good: None where nothing can be said."""
    return Line(name, figure, "unknown" if good is None else "good" if good else "change", setting, values)


def _versions(host: Host) -> Line:
    values = {
        "offload": offload.__version__,
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "driver": host.driver or None,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }
    figure = ", ".join(f"{name} {version}" for name, version in values.items() if version)
    return _line("versions", figure, not untested(), untested(), **values)


def _gpus(gpus: Sequence[Gpu], host: Host, why_none: tuple[str, str]) -> Iterator[Line]:
    if not gpus:
        reason, setting = why_none
        figure = f"none: {reason}; links, pinning, PCIe and NUMA were not measured"
        yield _line("GPUs", figure, None, setting, gpus=0)
    for gpu in gpus:
        if not gpu.error:
            yield from (_link(gpu), _pcie(gpu), _numa(gpu, host))
            continue
        setting = (
            "the limits of host memory below"
            if gpu.refused
            else "nvidia-smi shows whether it answers and who fills it, dmesg has NVRM and Xid; without it: "
            "CUDA_VISIBLE_DEVICES"
        )
        yield _line(gpu.name, f"failed: {gpu.error}", False, setting, error=gpu.error)


def _link(gpu: Gpu) -> Line:
    rates, pcie = gpu.alone, gpu.pcie
    if rates is None:
        return _line(f"link {gpu.name}", "not measured", None, "free host memory: it needs 128 MiB")
    ways = (rates.d2h_bytes_per_s, rates.h2d_bytes_per_s)
    carries = 0.0 if pcie is None else _LANE_BYTES_PER_S.get(pcie.generation, 0.0) * pcie.width
    least = carries * _LINK_SHARE or _LINK_BYTES_PER_S
    setting = ""
    if min(ways) < least:
        setting = (
            f"{least / _GB:.1f} each way are to be expected: run on the GPU's NUMA node (below), with the "
            "IOMMU off or passed through (iommu=pt), and nobody else on the link"
        )
    elif rates.together_bytes_per_s < max(ways) * _BOTH:
        setting = (
            "both ways at once carry little more than one, so copies out delay copies in: bind memory to "
            "the GPU's NUMA node"
        )
    return _line(
        f"link {gpu.name}",
        f"{gpu.model}: {_rates_text([rates])}",
        not setting,
        setting,
        model=gpu.model,
        memory_bytes=gpu.memory_bytes,
        pcie_bytes_per_s=carries or None,
        **_rates([rates]),
    )


def _pcie(gpu: Gpu) -> Line:
    name, pcie = f"PCIe {gpu.name}", gpu.pcie
    if pcie is None:
        setting = "pip install nvidia-ml-py (the extra `doctor`)"
        return _line(name, "neither NVIDIA's library nor /sys has it", None, setting)
    full = pcie.generation >= pcie.most_generation and pcie.width >= pcie.most_width
    setting = "" if full else "below what both ends can: another slot or riser, or the firmware's link speed"
    figure = f"generation {pcie.generation} x{pcie.width}, at most {pcie.most_generation} x{pcie.most_width}"
    return _line(name, figure, full, setting, **pcie._asdict())


def _numa(gpu: Gpu, host: Host) -> Line:
    threads = sorted(node for node, cores in host.nodes.items() if cores & host.cores)
    name, count = f"NUMA {gpu.name}", len(host.nodes)
    values: dict[str, Any] = {"node": gpu.node, "thread_nodes": threads, "nodes": count}
    if count == 1:
        return _line(name, "the machine has one node", True, **values)
    if gpu.node is None or not count:
        setting = "nvidia-smi topo -m may know it; then bind: numactl --cpunodebind=N --membind=N"
        return _line(name, "not in /sys", None, setting, **values)
    bind = f"numactl --cpunodebind={gpu.node} --membind={gpu.node}, or torchrun --numa-binding=node"
    good, setting = True, f"not bound; bind each rank: {bind}" if len(threads) > 1 else ""
    if gpu.node not in threads:
        good, setting = False, f"copies cross between sockets: {bind}"
    elif gpu.node not in host.memory_nodes:
        nodes = _listed(sorted(host.memory_nodes))
        good, setting = False, f"memory may be on node {nodes} only: the container's cpuset (--cpuset-mems)"
    figure = f"GPU on node {gpu.node}, threads on {_listed(threads)}"
    return _line(name, figure, good, setting, **values)


def _together(gpus: Sequence[Gpu]) -> Iterator[Line]:
    if len(gpus) < 2:
        return
    name = f"links, {len(gpus)} GPUs at once"
    pairs = [(gpu.alone, gpu.together) for gpu in gpus if gpu.alone is not None and gpu.together is not None]
    if len(pairs) < len(gpus):
        yield _line(name, "not measured: not every GPU was", None)
        return
    ways = ("d2h_bytes_per_s", "h2d_bytes_per_s")
    share = min(getattr(together, way) / getattr(alone, way) for alone, together in pairs for way in ways)
    setting = (
        "bind each rank to its GPU's node (torchrun --numa-binding=node). GPUs behind one switch share its "
        "link: plan with what each gets"
    )
    good, rates = share >= _TOGETHER, [together for _, together in pairs]
    figure = f"{_rates_text(rates)}; {share:.2f} of its own rate for the slowest"
    yield _line(name, figure, good, "" if good else setting, least_share=share, **_rates(rates))


def _pinning(gpus: Sequence[Gpu], host: Host) -> Iterator[Line]:
    pinned = next((gpu for gpu in gpus if gpu.pinned_bytes), None)
    if pinned is not None:
        rate = pinned.pinned_bytes / pinned.pinning_s
        good = rate >= _PINNING_BYTES_PER_S
        setting = "" if good else f"huge pages (below), and 8 cores: this process may use {len(host.cores)}"
        figure = f"{rate / _GB:.1f} GB/s, of {bytes_text(pinned.pinned_bytes)}"
        yield _line("pinning", figure, good, setting, bytes_per_s=rate, bytes=pinned.pinned_bytes)
    elif gpus:
        yield _line("pinning", "not measured", None, "free host memory, and the GPUs above")


def _memlock(host: Host, gpus: Sequence[Gpu]) -> Line:
    limit, pinned = host.memlock_bytes, sum(gpu.pinned_bytes for gpu in gpus)
    if limit == UNLIMITED:
        return _line("locked memory", "unlimited", True, unlimited=True, limit_bytes=None)
    good = True if pinned > limit else False if any(gpu.refused for gpu in gpus) else None
    setting = "ulimit -l unlimited; docker run --ulimit memlock=-1; LimitMEMLOCK=infinity of a service"
    if good:
        setting = f"{bytes_text(pinned)} were pinned all the same"
    figure = f"at most {bytes_text(limit)}"
    return _line("locked memory", figure, good, setting, unlimited=False, limit_bytes=limit)


def _memory(host: Host, gpus: Sequence[Gpu]) -> Line:
    values = {
        "memory_bytes": host.memory_bytes,
        "container_bytes": host.container_bytes,
        "free_bytes": host.free_bytes,
        "pinnable_bytes": host.pinnable_bytes,
    }
    if host.memory_bytes is None or host.free_bytes is None or host.pinnable_bytes is None:
        return _line("host memory", "not in /proc", None, "give host_limit= to offload.apply", **values)
    limit = (
        "no limit of a container"
        if host.container_bytes is None
        else f"the container's limit is {bytes_text(host.container_bytes)}"
    )
    wanted = sum(gpu.memory_bytes for gpu in gpus)
    good = host.pinnable_bytes >= wanted
    setting = (
        f"less than the {bytes_text(wanted)} of the GPUs: raise the container's limit (docker --memory, "
        "Slurm --mem, Kubernetes resources.limits.memory), or expect less to be offloaded"
    )
    figure = f"{bytes_text(host.memory_bytes)}, {limit}, {bytes_text(host.free_bytes)} free; "
    figure += f"{bytes_text(host.pinnable_bytes)} are pinned at most by default"
    return _line("host memory", figure, good, "" if good else setting, **values)


def _huge_pages(host: Host) -> Line:
    pages = host.huge_pages
    setting = "pinning is faster with them: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    good = pages != "never" if pages else None
    return _line("huge pages", pages or "not in /sys", good, "" if good else setting, enabled=pages or None)


def _maps(host: Host, gpus: Sequence[Gpu]) -> Line:
    if host.maps is None or host.most_maps is None:
        return _line(
            "mappings", "not in /proc", None, maps=host.maps, most_maps=host.most_maps, maps_per_gib=None
        )
    figure, needed, each = f"{host.maps:,} of {host.most_maps:,}", host.maps + _SPARE_MAPS, None
    pinned = next((gpu for gpu in gpus if gpu.pinned_bytes and gpu.pinned_maps is not None), None)
    if pinned is not None:
        each = max(0, pinned.pinned_maps or 0) * (1 << 30) / pinned.pinned_bytes
        figure += f", {each:.0f} a GiB that is pinned"
        needed += round(each * (host.pinnable_bytes or 0) / (1 << 30))
    good = needed <= host.most_maps
    setting = "" if good else f"sysctl -w vm.max_map_count={max(1 << 18, 2 * needed)}"
    return _line(
        "mappings", figure, good, setting, maps=host.maps, most_maps=host.most_maps, maps_per_gib=each
    )


def _rates(rates: Sequence[Rates]) -> dict[str, float]:
    """Sums over the links."""
    return {
        "d2h_bytes_per_s": sum(each.d2h_bytes_per_s for each in rates),
        "h2d_bytes_per_s": sum(each.h2d_bytes_per_s for each in rates),
        "both_bytes_per_s": sum(each.together_bytes_per_s for each in rates),
    }


def _rates_text(rates: Sequence[Rates]) -> str:
    out, back, both = (rate / _GB for rate in _rates(rates).values())
    return f"{out:.1f} GB/s out, {back:.1f} in, {both:.1f} both ways"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


GOOD, CHANGE, NO_GPU = 0, 1, 3
_PATIENCE_S = 45.0
"""For all GPUs; the rest of a minute is torch's import."""
_PIN_BYTES = 1 << 30


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="offload doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="all figures, in bytes and seconds")
    given = parser.parse_args(arguments)
    begun = time.perf_counter()
    names, why_none = _visible_gpus()
    host = read_host()
    pin_bytes = _PIN_BYTES if host.free_bytes is None else min(_PIN_BYTES, host.free_bytes // 4)
    gpus = measure(names, pin_bytes=pin_bytes, patience_s=_PATIENCE_S)
    lines = diagnose(host, gpus, why_none)
    to_change = any(line.verdict == "change" for line in lines)
    code = NO_GPU if not gpus else CHANGE if to_change else GOOD
    seconds = time.perf_counter() - begun
    answer = {"code": code, "seconds": seconds, "lines": [asdict(line) for line in lines]}
    print(json.dumps(answer, indent=1) if given.json else _table(lines))
    if any(gpu.is_alive() for gpu in gpus):
        sys.stdout.flush()
        os._exit(code)  # an exit in order would wait for that GPU
    return code


def _visible_gpus() -> tuple[list[str], tuple[str, str]]:
    """Their names; or none, with the reason and the way to get one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    reason = (
        "torch sees none",
        "start the container with its GPUs (docker run --gpus all), or install a driver: nvidia-smi has to "
        "list them",
    )
    if count:
        return [f"cuda:{index}" for index in range(count)], ("", "")
    if torch.version.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA", "install torch's build for CUDA"
    elif visible is not None:
        reason = f"CUDA_VISIBLE_DEVICES is {visible!r}", "unset it, or name GPUs that nvidia-smi lists"
    elif caught:
        reason = str(caught[0].message).partition("\n")[0], "install the driver that torch's CUDA needs"
    return [], reason


def _table(lines: Sequence[Line]) -> str:
    rows = [[line.name, line.figure, line.verdict, line.setting] for line in lines]
    headers = ["", "figure", "verdict", "setting"]
    setting = max(28, get_terminal_size((120, 24)).columns - 74)  # beside the other columns
    return tabulate(rows, headers, disable_numparse=True, maxcolwidths=[None, 40, None, setting])
