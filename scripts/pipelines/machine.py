"""What a run asks of the machine before its first step: the link alone and shared, one block of the model.

One invariant: every rank makes the same calls in the same order, so what is measured together is together,
and what is measured alone is measured while the others wait.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench import links
from bench.measure import Clock
from bench.run import hardware
from bench.workload import Stack, probe_saved_bytes
from parallel.host import line_up
from parallel.launch import Rank
from pipelines.memory import BlockFacts
from pipelines.requests import JobShape, Request

_MESSAGES, _PRODUCTS = 9, 40
"""Timed sends of each kind; products that a busy sender goes on with."""

_SUMMED_BYTES, _SUMS, _REPEATS = 256 << 20, 10, 3
"""Bytes of one all-reduce; how many are timed at once, and how often."""


def machine_facts(request: Request, rank: Rank, min_elements: int) -> dict[str, Any]:
    """This rank's figures; `usable_bytes` is the fullest device's, the same on every rank. Blocks for some
    seconds."""
    found: dict[str, Any] = {
        "hardware": hardware(),
        "rates": [_rates_of_set(rank, members) for members in _sets(rank.ranks.world)],
        "block": asdict(_block_facts(request.shape, rank, min_elements)),
        "message_ms": _message_ms(request.shape, rank),
    }
    found["sums"] = _sums(rank, found["rates"][-1]["rates"])
    usable: list[Any] = [None] * rank.ranks.world
    dist.all_gather_object(usable, found["block"]["usable_bytes"], group=rank.group)
    found["block"]["usable_bytes"] = min(usable)
    return found


def rates_json(rates: Any) -> dict[str, Any] | None:
    return None if rates is None else asdict(rates)


def empty_device(device: torch.device) -> None:
    """Give back what nobody holds any more, cached blocks included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def _sets(world: int) -> list[list[int]]:
    """Who copies at once: each rank alone, then 2, 4 and so on, and all."""
    counts = sorted({count for count in (2, 4, 8) if count < world} | {world} - {1})
    return [[rank] for rank in range(world)] + [list(range(count)) for count in counts]


def _rates_of_set(rank: Rank, members: Sequence[int]) -> dict[str, Any]:
    me, together = rank.ranks.rank, partial(line_up, rank.group)
    mine: links.LinkRates | None = None
    if rank.device.type == "cpu":
        mine = links.SIMULATED if me in members else None
    elif me in members:
        mine = links.measure_links(together)
    else:
        for _ in range(links.LINE_UPS):
            together()
    return {"ranks": list(members), "rates": rates_json(mine)}


def _block_facts(shape: JobShape, rank: Rank, min_elements: int) -> BlockFacts:
    """One block's bytes, and the least time of three forwards and backwards; all ranks at once, as in a
    step."""
    dtype = torch.float32 if shape.tiny else torch.bfloat16
    device, clock = rank.device, Clock(rank.device)
    _exchange_once(rank)
    empty_device(device)
    usable = int(torch.cuda.mem_get_info(device)[0]) if clock.cuda else 0
    stack = Stack(shape.stack(1), device, dtype)
    for parameter in stack.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn((1, shape.sequence, stack.shape.hidden), device=device, dtype=dtype).requires_grad_()
    groups = probe_saved_bytes(stack, x * 1, min_elements)
    saved = sum(group.nbytes for group in groups.values())
    clock.drain()
    times, working = [], 0
    for _ in range(3):
        before = int(torch.cuda.memory_stats()["active_bytes.all.current"]) if clock.cuda else 0
        clock.reset_peaks()
        start = clock.mark()
        y = stack(x * 1)
        middle = clock.mark()
        y.backward(torch.ones_like(y))
        end = clock.mark()
        clock.drain()
        del y
        working = max(0, clock.memory()["active_peak"] - before - saved)
        times.append((clock.ms(start, middle), clock.ms(middle, end)))
    return BlockFacts(
        usable_bytes=usable,
        parameters=sum(parameter.numel() for parameter in stack.parameters()),
        saved_bytes=saved,
        working_bytes=working,
        output_bytes=x.numel() * x.element_size(),
        forward_ms=min(forward for forward, _ in times),
        backward_ms=min(backward for _, backward in times),
        groups={
            name: {"nbytes": group.nbytes, "movable_bytes": group.movable_bytes}
            for name, group in groups.items()
        },
    )


def _message_ms(shape: JobShape, rank: Rank) -> dict[str, float]:
    """Median milliseconds of one stage's hidden states from rank 0 to rank 1, as rank 1 waits for them: from
    an idle sender, and from one that goes on with a block's products, as it does in a step. {} elsewhere."""
    device, clock, me = rank.device, Clock(rank.device), rank.ranks.rank
    dtype = torch.float32 if shape.tiny else torch.bfloat16
    hidden = shape.stack(1).hidden
    rows = torch.zeros((shape.sequence, hidden), device=device, dtype=dtype)
    weight = torch.zeros((hidden, hidden), device=device, dtype=dtype)
    found: dict[str, float] = {}
    for name, products in (("alone", 0), ("beside products", _PRODUCTS)):
        times = []
        for _ in range(_MESSAGES):
            clock.drain()
            line_up(rank.group)
            if me > 1:
                continue
            start = clock.mark()
            kind = dist.isend if me == 0 else dist.irecv
            sent = dist.batch_isend_irecv([dist.P2POp(kind, rows, group=rank.group, group_peer=1 - me)])
            for _ in range(products if me == 0 else 0):
                rows @ weight
            for work in sent:
                work.wait()
            end = clock.mark()
            clock.drain()
            times.append(clock.ms(start, end))
        if me == 1:
            found[name] = statistics.median(times)
    return found


def _sums(rank: Rank, rates: dict[str, Any]) -> dict[str, float]:
    """Bus bytes per second of an all-reduce over all ranks, alone and beside whole copies both ways on every
    rank, and what these reach beside it. rates: of the link, when all ranks copy. {} for one rank."""
    world, clock = rank.ranks.world, Clock(rank.device)
    if world == 1:
        return {}
    summed = torch.zeros((_SUMMED_BYTES if clock.cuda else 1 << 16) // 4, device=rank.device)
    copies = links.Copies(partial(line_up, rank.group)) if clock.cuda else None
    span: list[Any] = []

    def issue(count: int) -> None:
        start = clock.mark()
        for _ in range(count):
            dist.all_reduce(summed, group=rank.group)
        span[:] = start, clock.mark()

    def seconds(count: int) -> float:
        clock.drain()
        return clock.ms(*span) * 1e-3 / count

    def beside(count: int) -> list[float]:
        """What the copies reach: out, back."""
        if copies is not None:
            return copies.rates_beside(partial(issue, count))
        issue(count)
        return [links.SIMULATED.duplex_d2h, links.SIMULATED.duplex_h2d]

    issue(1)
    alone = []
    for _ in range(_REPEATS):
        clock.drain()
        line_up(rank.group)
        issue(_SUMS)
        alone.append(seconds(_SUMS))
    everybody: list[Any] = [None] * world
    mine = statistics.median(alone), links.LinkRates(**rates).duplex_s if clock.cuda else 0.0
    dist.all_gather_object(everybody, mine, group=rank.group)
    sum_s, copies_s = (max(each) for each in zip(*everybody, strict=True))
    # sums that end before the copies do are beside them all the time, and the other way round
    few, many = max(1, int(0.4 * copies_s / sum_s)), max(1, math.ceil(2 * copies_s / sum_s))
    busy, reached = [], []
    for _ in range(_REPEATS):
        beside(few)
        busy.append(seconds(few))
        reached.append(beside(many))
    out, back = (statistics.median(each) for each in zip(*reached, strict=True))
    bus_bytes = summed.nbytes * 2 * (world - 1) / world
    return {
        "nbytes": summed.nbytes,
        "alone": bus_bytes / mine[0],
        "beside_copies": bus_bytes / statistics.median(busy),
        "copies_d2h": out,
        "copies_h2d": back,
    }


def _exchange_once(rank: Rank) -> None:
    """A message up the line and one down, alone and batched, so that what NCCL allocates for neighbours is
    not counted as usable."""
    world, me = rank.ranks.world, rank.ranks.rank
    buffer = torch.zeros(1, device=rank.device)
    # pairs (0, 1), (2, 3), then (1, 2), (3, 4): NCCL makes a pair's communicator with both at it, so nobody
    # may wait in a ring
    for parity in (0, 1):
        lower = me % 2 == parity
        peer = me + 1 if lower else me - 1
        if not 0 <= peer < world:
            continue
        for send in (lower, not lower):
            alone = (
                dist.isend(buffer, group=rank.group, group_dst=peer)
                if send
                else dist.irecv(buffer, group=rank.group, group_src=peer)
            )
            assert alone is not None, "both are of this group"
            alone.wait()
        for send in (lower, not lower):
            operation = dist.P2POp(
                dist.isend if send else dist.irecv, buffer, group=rank.group, group_peer=peer
            )
            for work in dist.batch_isend_irecv([operation]):
                work.wait()
