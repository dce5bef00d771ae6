"""Host cost of one saved tensor: through this project's hooks, kept or moved, against the bare calls that a move cannot do without.

A chain of sines saves one new storage an operation, and nothing but the graph holds it. A chain of `live` tensors is built first and
stays alive; then a probe chain is timed, forward (pack, commit, copies issued) and backward (fetch, unpack), then a short tail,
so that the groups that a plan keeps for the end of the forward are not the probe's. Costs are differences to the same chain without
marks, taken with few and with many tensors a group: from the two follow the cost of a tensor and that of a group with its marks.
One invariant: only Python calls are timed, between drained devices, and the probe is short enough for the launch queue.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.measure import Clock, median

__all__ = ["MicroCost", "measure_micro", "micro_lines"]

_PROBE = 96
_TAIL = 40
_PER_GROUP = (4, 32)
_ELEMENTS = 1 << 16
_CASES = ("small", "kept", "moved")
"""small: below the smallest size that may leave. kept: could leave, the plan keeps it (fraction 0). moved: leaves and comes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroCost:
    """Microseconds a saved tensor, and a group, over the chain without marks."""

    case: str
    live: int
    forward_us: float
    backward_us: float
    group_us: float
    """Two marks and the hooks, forward and backward."""
    moved_share: float
    """Of the saved tensors of the step, how many left."""

    @property
    def total_us(self) -> float:
        return self.forward_us + self.backward_us


class _Chain:
    """A leaf, a chain of sines on it, and the cost of its two passes."""

    def __init__(self, device: torch.device, length: int, offload: Any | None, per_group: int) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._leaf = torch.rand(_ELEMENTS, device=device, dtype=dtype).requires_grad_()
        self._length = length
        self._per_group = per_group
        self._offload = offload
        self._out: torch.Tensor | None = None

    def forward(self) -> float:
        """Seconds of the calls."""
        offload = self._offload
        x = self._leaf * 1.0  # the first saved tensor is an intermediate, like all others
        began = time.perf_counter()
        for _ in range(self._length // self._per_group):
            if offload is not None:
                x = offload.group_start(x, "probe")
            with offload.offload_hooks() if offload is not None else nullcontext():
                for _ in range(self._per_group):
                    x = torch.sin(x)
            if offload is not None:
                x = offload.group_commit(x, "probe")
        spent = time.perf_counter() - began
        self._out = x
        return spent

    def backward(self) -> float:
        assert self._out is not None
        out, self._out = self._out, None
        grad = torch.ones_like(out)
        began = time.perf_counter()
        out.backward(grad)
        spent = time.perf_counter() - began
        self._leaf.grad = None
        return spent


def _once(device: torch.device, live: int, clock: Clock, manager: Any | None, per_group: int) -> tuple[float, float]:
    """One step: (forward, backward) microseconds a tensor of the probe."""
    offload: Any = None
    if manager is not None:
        import offload as module

        offload = module
        manager.set_order([("F", 0, 0), ("B", 0, 0)])
        manager.begin_chunk(0, 0)
    chains = [_Chain(device, length, offload, per_group) for length in (live, _PROBE, _TAIL)]
    spent = []
    for chain in chains:
        clock.drain()
        spent.append(chain.forward())
    if manager is not None:
        manager.end_forward(0, 0)
        manager.begin_backward(0, 0, "B")
    clock.drain()
    backward = chains[1].backward()
    clock.drain()
    chains[2].backward()
    chains[0].backward()
    if manager is not None:
        manager.end_backward(0, 0, "B")
        manager.step_end()
    clock.drain()
    return spent[1] / _PROBE * 1e6, backward / _PROBE * 1e6


def _median_pair(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return median([pair[0] for pair in pairs]), median([pair[1] for pair in pairs])


def _bare_us(device: torch.device, clock: Clock) -> float:
    """The calls that moving a tensor takes at least: two copies, one allocation, and a group's share of two events and two waits."""
    source = torch.rand(_ELEMENTS, device=device, dtype=torch.bfloat16)
    host = torch.empty(_PROBE, _ELEMENTS, dtype=torch.bfloat16, pin_memory=device.type == "cuda")
    rounds = []
    for _ in range(5):
        clock.drain()
        fresh = []
        began = time.perf_counter()
        for at in range(_PROBE):
            host[at].copy_(source, non_blocking=True)
            back = torch.empty_like(source)
            back.copy_(host[at], non_blocking=True)
            fresh.append(back)
            if at % _PER_GROUP[0] == 0 and clock.cuda:
                for _ in range(2):
                    event = torch.cuda.Event()
                    event.record()
                    torch.cuda.current_stream().wait_event(event)
        rounds.append((time.perf_counter() - began) / _PROBE * 1e6)
        clock.drain()
    return median(rounds)


def measure_micro(lives: Sequence[int], *, tiny: bool, repeats: int = 5, collector: bool = True) -> dict[str, Any]:
    """Costs for each case and number of live tensors. collector: whether Python looks for cycles meanwhile, which costs by live objects."""
    was_enabled = gc.isenabled()
    try:
        if not collector:
            gc.disable()
        return _measure(lives, tiny=tiny, repeats=repeats) | {"collector": collector}
    finally:
        if was_enabled:
            gc.enable()


def _measure(lives: Sequence[int], *, tiny: bool, repeats: int) -> dict[str, Any]:
    import offload

    device = torch.device("cpu" if tiny else "cuda")
    clock = Clock(device)
    costs: list[MicroCost] = []
    for live in lives:
        plain = _median_pair([_once(device, live, clock, None, _PER_GROUP[0]) for _ in range(2 + repeats)][2:])
        for case in _CASES:
            moved_bytes = (live + _PROBE + _TAIL) * _ELEMENTS * (4 if tiny else 2)
            config = offload.OffloadConfig(
                min_offloaded_tensor_size=1 << 40 if case == "small" else 1,
                activation_offload_fraction=1.0 if case == "moved" else 0.0,
                host_reserve_bytes=moved_bytes * 5 // 4 if case == "moved" else 0,
                host_limit_bytes=64 << 30,
            )
            over: list[tuple[float, float]] = []
            for per_group in _PER_GROUP:
                manager = offload.configure(config, device="sim" if tiny else "cuda", print_summary=False)
                ours = _median_pair([_once(device, live, clock, manager, per_group) for _ in range(2 + repeats)][2:])
                over.append((ours[0] - plain[0], ours[1] - plain[1]))
                stats = manager.stats
                share = stats.spilled / stats.saved if stats.saved else 0.0
                offload.PipelineOffloadManager.reset_instance()
            costs.append(_cost(case, live, over, share))
    return {
        "bare_us": _bare_us(device, clock),
        "elements": _ELEMENTS,
        "costs": [asdict(cost) | {"total_us": cost.total_us} for cost in costs],
    }


def _cost(case: str, live: int, over: Sequence[tuple[float, float]], share: float) -> MicroCost:
    """From the costs a tensor with few and with many tensors a group: c = tensor + group / tensors."""
    few, many = _PER_GROUP
    forward, backward = ((many * large - few * small) / (many - few) for small, large in zip(*over, strict=True))
    group_us = few * (sum(over[0]) - forward - backward)
    return MicroCost(case=case, live=live, forward_us=forward, backward_us=backward, group_us=group_us, moved_share=share)


def micro_lines(result: dict[str, Any]) -> list[str]:
    """A line for each case and number of live tensors."""
    lines = [f"host cost a saved tensor over the same chain without marks; bare copies, allocation and events {result['bare_us']:.1f} us"]
    if not result["collector"]:
        lines[0] += "; without Python's garbage collector"
    for cost in result["costs"]:
        over = f"  (bare {cost['total_us'] - result['bare_us']:+.1f})" if cost["case"] == "moved" else ""
        lines.append(
            f"  {cost['case']:<6} {cost['live']:>6} live: forward {cost['forward_us']:6.1f} backward {cost['backward_us']:6.1f} "
            f"total {cost['total_us']:6.1f} us, a group {cost['group_us']:6.1f} us, {100 * cost['moved_share']:.0f}% left{over}"
        )
    return lines
