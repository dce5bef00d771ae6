"""Host cost of one saved tensor: through this project's hooks, kept or moved, against the bare calls that a
move cannot do without.

A chain of sines saves one new storage an operation, and nothing but the graph holds it. A step builds four
chains, each on a leaf of its
own: `live` tensors that stay alive, a probe with many tensors a group, a probe with few, and a tail, which
has the group that a plan keeps for the end of the forward and the bytes that are still on their way when it
ends. Then it runs their backwards, the last chain first. From the two probes follow the cost of a tensor and
that of a group with its marks. Both caps in flight are a few dozen tensors: where the probes begin, in either
direction, spills are settled and restores are fetched at the rate at which tensors come, whatever is alive.

What is timed: the Python calls of each probe's forward (marks, hooks, operators, pack, commit, copies issued)
and of its backward (the engine's call, unpack, restores issued, marks), each from a drained device, and less
what Python's cyclic collector took meanwhile. Next to every marked step the same step is run without marks,
hooks or manager. A tensor's own cost is the median, over such pairs, of their
difference: what disturbs a host adds to few of the steps, and a pair is over before the host's speed has
    drifted.

Where a collection lands is chance, and a full one in the middle of a probe would be charged to its few
tensors; its cost is no chance. So the collector is timed by its own callbacks over whole steps, and what the
marked steps have more of is divided by all their
tensors: a mean, because collections are rare and each belongs to the tensors of many steps. The total is own
    and collector together.

One invariant: only Python calls are timed, between drained devices, and a probe is short enough for the
launch queue, so that no call waits for the device.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.measure import Clock, Collector, median

_FEW, _MANY = 4, 32
"""Tensors a group."""

_PROBE = 128
"""Tensors. In a moved probe's backward each has two kernels, a copy and a share of its piece's events and
waits: about 5 launches, of the 1,000 or so that CUDA queues before a launch waits."""

_WINDOW = 32
"""Tensors in flight in either direction, at most."""

_TAIL = 2 * _MANY
_WARMUP = 4  # steps: one shows the groups, one is noted where they stay, and torch's own caches are filled
_PAIRS = (7, 48)  # at least and at most, of a case and a number of live tensors
_PAIRS_S = 4.0  # no pair is begun after so many seconds, but for the least
_CASES = ("small", "kept", "moved")
"""small: below the smallest size that may leave. kept: could leave, the plan keeps it (fraction 0). moved:
leaves and comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bench:
    """What all steps share. probe: tensors of each probe; elements: of each tensor."""

    device: torch.device
    clock: Clock
    collector: Collector
    probe: int
    elements: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.clock.cuda else torch.float32

    @property
    def tensor_bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(slots=True)
class _StepCost:
    """Microseconds a tensor of the two probes without the collector's; seconds of the collector's in the
    whole step."""

    forward_us: dict[int, float] = field(default_factory=dict)  # by tensors a group
    backward_us: dict[int, float] = field(default_factory=dict)
    collector_s: float = 0.0
    full_collections: int = 0

    def tensor_us(self, plain: _StepCost) -> tuple[float, float]:
        """(forward, backward) of a tensor over the plain step: with n tensors a group it is tensor + group /
        n."""
        forward, backward = (
            (_MANY * (marked[_MANY] - bare[_MANY]) - _FEW * (marked[_FEW] - bare[_FEW])) / (_MANY - _FEW)
            for marked, bare in ((self.forward_us, plain.forward_us), (self.backward_us, plain.backward_us))
        )
        return forward, backward

    def group_us(self, plain: _StepCost) -> float:
        few = (
            self.forward_us[_FEW] - plain.forward_us[_FEW] + self.backward_us[_FEW] - plain.backward_us[_FEW]
        )
        return _FEW * (few - sum(self.tensor_us(plain)))


class _Chain:
    """A leaf, a chain of sines on it, and the seconds of its two passes, but for the collector's."""

    def __init__(self, bench: _Bench, length: int, per_group: int, offload: Any | None) -> None:
        self._leaf = torch.rand(bench.elements, device=bench.device, dtype=bench.dtype).requires_grad_()
        self._bench = bench
        self._length = length
        self.per_group = per_group
        self._offload = offload
        self._out: torch.Tensor | None = None

    def forward(self) -> float:
        offload, collector = self._offload, self._bench.collector
        x = self._leaf * 1.0  # the first saved tensor is an intermediate, like all others
        self._bench.clock.drain()
        began, collected = time.perf_counter(), collector.seconds
        for first in range(0, self._length, self.per_group):
            if offload is not None:
                x = offload.group_start(x, "probe")
            with offload.offload_hooks() if offload is not None else nullcontext():
                for _ in range(min(self.per_group, self._length - first)):
                    x = torch.sin(x)
            if offload is not None:
                x = offload.group_commit(x, "probe")
        spent = time.perf_counter() - began - (collector.seconds - collected)
        self._out = x
        return spent

    def backward(self) -> float:
        assert self._out is not None
        out, self._out = self._out, None
        grad = torch.ones_like(out)
        collector = self._bench.collector
        self._bench.clock.drain()
        began, collected = time.perf_counter(), collector.seconds
        out.backward(grad)
        spent = time.perf_counter() - began - (collector.seconds - collected)
        self._leaf.grad = None
        return spent


def _step(bench: _Bench, live: int, manager: Any | None) -> _StepCost:
    """One step, marked where there is a manager."""
    offload: Any = None
    if manager is not None:
        import offload as module

        offload = module
    collector, cost = bench.collector, _StepCost()
    collected, full = collector.seconds, collector.full
    if manager is not None:
        manager.set_order([("F", 0, 0), ("B", 0, 0)])
        manager.begin_chunk(0, 0)
    lengths = ((live, _FEW), (bench.probe, _MANY), (bench.probe, _FEW), (_TAIL, _MANY))
    chains = [_Chain(bench, length, per_group, offload) for length, per_group in lengths]
    held, *probes, tail = chains
    held.forward()
    for probe in probes:
        cost.forward_us[probe.per_group] = probe.forward() / bench.probe * 1e6
    tail.forward()
    if manager is not None:
        manager.end_forward(0, 0)
        manager.begin_backward(0, 0, "B")
    tail.backward()
    for probe in reversed(probes):
        cost.backward_us[probe.per_group] = probe.backward() / bench.probe * 1e6
    held.backward()
    if manager is not None:
        manager.end_backward(0, 0, "B")
        manager.step_end()
    bench.clock.drain()
    cost.collector_s, cost.full_collections = collector.seconds - collected, collector.full - full
    return cost


class _BareCalls:
    """The calls that moving a tensor takes at least: two copies, one allocation, and a group's share of two
    events and two waits."""

    def __init__(self, bench: _Bench) -> None:
        self._bench = bench
        self._source = torch.rand(bench.elements, device=bench.device, dtype=bench.dtype)
        self._host = torch.empty(
            bench.probe, bench.elements, dtype=bench.dtype, pin_memory=bench.clock.cuda
        ).unbind()

    def us(self) -> float:
        """Microseconds a tensor, once."""
        collector, source, cuda = self._bench.collector, self._source, self._bench.clock.cuda
        self._bench.clock.drain()
        fresh = []
        began, collected = time.perf_counter(), collector.seconds
        for at, host in enumerate(self._host):
            host.copy_(source, non_blocking=True)
            back = torch.empty_like(source)
            back.copy_(host, non_blocking=True)
            fresh.append(back)
            if at % _FEW == 0 and cuda:
                for _ in range(2):
                    event = torch.cuda.Event()
                    event.record()
                    torch.cuda.current_stream().wait_event(event)
        spent = time.perf_counter() - began - (collector.seconds - collected)
        self._bench.clock.drain()
        return spent / len(self._host) * 1e6


def measure_micro(lives: Sequence[int], *, tiny: bool) -> dict[str, Any]:
    """Costs for each case and number of live tensors, with Python's collector as the process has it. tiny: on
    the simulated device."""
    device = torch.device("cpu" if tiny else "cuda")
    seconds = {"set-up": 0.0, "steps": 0.0}
    costs: list[dict[str, Any]] = []
    with Collector() as collector:
        bench = _Bench(
            device=device,
            clock=Clock(device),
            collector=collector,
            probe=_MANY if tiny else _PROBE,
            elements=1 << 10 if tiny else 1 << 16,
        )
        bare = _BareCalls(bench)
        for live in lives:
            for case in _CASES:
                costs.append(_measure_case(bench, case, live, bare, seconds, tiny=tiny))
    return {
        "elements": bench.elements,
        "seconds": seconds,
        "costs": costs,
    }


def _measure_case(
    bench: _Bench, case: str, live: int, bare: _BareCalls, seconds: dict[str, float], *, tiny: bool
) -> dict[str, Any]:
    """Pairs of a marked and a plain step with a manager of their own. seconds: added to, by what they went
    into."""
    import offload

    num_tensors = live + 2 * bench.probe + _TAIL
    began = time.perf_counter()
    config = offload.OffloadConfig(
        min_offloaded_tensor_size=1 << 40 if case == "small" else 1,
        activation_offload_fraction=1.0 if case == "moved" else 0.0,
        max_spilling_bytes=_WINDOW * bench.tensor_bytes,
        max_restoring_bytes=_WINDOW * bench.tensor_bytes,
        host_reserve_bytes=num_tensors * bench.tensor_bytes * 5 // 4 if case == "moved" else 0,
        host_limit_bytes=64 << 30,
    )
    manager = offload.configure(config, device="sim" if tiny else "cuda", print_summary=False)
    try:
        ready = time.perf_counter()
        for _ in range(1 if tiny else _WARMUP):
            _step(bench, live, manager)
        _step(bench, live, None)
        least, most = (2, 2) if tiny else _PAIRS
        pairs: list[tuple[_StepCost, _StepCost]] = []
        bare_us: list[float] = []
        first = time.perf_counter()
        while len(pairs) < least or (len(pairs) < most and time.perf_counter() - first < _PAIRS_S):
            pairs.append((_step(bench, live, manager), _step(bench, live, None)))
            bare_us.append(bare.us())
        stats = manager.stats
        done = time.perf_counter()
    finally:
        offload.PipelineOffloadManager.close_instance()
    seconds["steps"] += done - ready
    seconds["set-up"] += ready - began + time.perf_counter() - done
    return _cost_of(
        case, live, num_tensors, pairs, median(bare_us), stats.spilled / stats.saved if stats.saved else 0.0
    )


def _cost_of(
    case: str,
    live: int,
    num_tensors: int,
    pairs: Sequence[tuple[_StepCost, _StepCost]],
    bare_us: float,
    moved_share: float,
) -> dict[str, Any]:
    """Microseconds a saved tensor over the chain without marks, and a group (two marks and the hooks, forward
    and backward). spread: between the quartiles of the pairs' own costs. moved_share: of the saved tensors of
    the last step, how many left."""
    tensor_us = [marked.tensor_us(plain) for marked, plain in pairs]
    low, _, high = statistics.quantiles([sum(both) for both in tensor_us], n=4)
    collector_s = sum(marked.collector_s - plain.collector_s for marked, plain in pairs)
    forward_us, backward_us = (median(passes) for passes in zip(*tensor_us, strict=True))
    collector_us = collector_s / len(pairs) / num_tensors * 1e6
    own_us = forward_us + backward_us
    return {
        "case": case,
        "live": live,
        "pairs": len(pairs),
        "forward_us": forward_us,
        "backward_us": backward_us,
        "own_us": own_us,
        "spread_us": high - low,
        "collector_us": collector_us,
        "total_us": own_us + collector_us,
        "full_collections": sum(marked.full_collections for marked, _ in pairs),
        "group_us": median([marked.group_us(plain) for marked, plain in pairs]),
        "bare_us": bare_us,
        "over_bare_us": own_us + collector_us - bare_us,
        "moved_share": moved_share,
    }


def micro_lines(result: dict[str, Any]) -> list[str]:
    """A line for each case and number of live tensors."""
    seconds = result["seconds"]
    lines = [
        f"host cost a saved tensor over the same chain without marks; set-up {seconds['set-up']:.0f} s, "
        f"steps {seconds['steps']:.0f} s" + ("" if gc.isenabled() else "; Python's cyclic collector is off")
    ]
    for cost in result["costs"]:
        full = f"{cost['full_collections']} full in {cost['pairs']} steps"
        over = (
            f"; bare calls {cost['bare_us']:.1f}, over them {cost['over_bare_us']:+.1f}"
            if cost["case"] == "moved"
            else ""
        )
        lines.append(
            f"  {cost['case']:<6} {cost['live']:>6} live: forward {cost['forward_us']:5.1f} backward "
            f"{cost['backward_us']:5.1f} "
            f"(quartiles {cost['spread_us']:.1f} apart) collector {cost['collector_us']:4.1f} ({full}) total "
            f"{cost['total_us']:5.1f} us, "
            f"a group {cost['group_us']:5.1f} us, {100 * cost['moved_share']:.0f}% left{over}"
        )
    return lines
