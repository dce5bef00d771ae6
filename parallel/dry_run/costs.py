"""A traced module on a named GPU: seconds of each call, and the levels at which it can be run.

One invariant: seconds follow from the trace and the GPU's rates alone, so the same module costs the same in
every job.

    call        a product or an attention: its flops over the rate; a collective: its bytes over the wire;
                every other call: the bytes that it reads and writes
    level       how much of the forward the backward computes once more (policy/menu.py)
    kept call   one whose outputs wait for the recompute, which then does not run it
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from offload.policy.menu import Level, Menu, convex

from .rates import Gpu
from .trace import Call, Halves, Trace

CHECKPOINT_HOST, SELECTIVE_HOST = 0.91, 0.91 * 4.9 / 1.9
"""What a checkpointed block, and one under dispatch modes, takes the host more than a plain forward and
backward, in units of these: W5 took 881 ms with every block checkpointed and 461 without, and a forward and
recompute take 2.9 and 5.9 plain forwards (one H200, November 2026)."""

_MOST_LEVELS = 8
_ATTENTION = "aten._scaled_dot_product"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A module of one rank in numbers: a layer, an embedding or a head."""

    name: str
    parameters: int
    expert_parameters: int
    """Parameters of routed experts, among `parameters`: fewer ranks share them."""
    trained: int
    """Parameters, among `parameters`, that an optimizer steps."""
    input_bytes: int
    output_bytes: int
    forward_s: float
    backward_s: float
    input_s: float
    weight_s: float
    """Seconds of the halves of a split backward: norms run in both, so these may be more than
    `backward_s`."""
    weight_bytes: int
    """Saved bytes that this W reads."""
    passed_bytes: int
    """Of these, bytes that the I does not read."""
    held_bytes: int
    """Gradients that torch keeps from the I to the W."""
    forward_host_s: float
    backward_host_s: float
    """Seconds of the host, for the calls of a plain forward and of its backward."""
    sent_bytes: int
    """What its collectives carry, forward and backward together, over the wire of this rank."""
    forward_working_bytes: int
    """The most alive in its forward of what it made, saved bytes among it."""
    checkpointed_working_bytes: int
    """Working bytes under torch's checkpoint, where nothing that is made is saved."""
    backward_working_bytes: int
    """The most alive in its backward beyond its saved bytes."""
    moving_working_bytes: int
    """What a plain backward needs beside the limit of an engine that moves saved bytes."""
    menu: Menu
    """Level 0 is the plain module, the last one torch's checkpoint. Of one that is never recomputed, level 0
    alone."""
    selective: Level | None
    """Outputs of products and attention are kept, the rest is recomputed."""

    @property
    def saved_bytes(self) -> int:
        return self.menu[0].saved_bytes

    def forward_bytes(self, level: Level) -> int:
        """The most alive in its forward at this level, its input included."""
        kept_bytes = level.saved_bytes - self.input_bytes
        recomputed_bytes = self.checkpointed_working_bytes + kept_bytes
        return self.input_bytes + min(self.forward_working_bytes, recomputed_bytes)

    def more_host_s(self, level: Level) -> float:
        """Host seconds of a step beyond those of the plain module."""
        if level == self.menu[0]:
            return 0.0
        plain_s = self.forward_host_s + self.backward_host_s
        return plain_s * (CHECKPOINT_HOST if level == self.menu[-1] else SELECTIVE_HOST)


def seconds_of(call: Call, gpu: Gpu, gpus_per_host: int) -> float:
    """What one call takes of the device. A collective is counted as if nothing ran beside it."""
    if call.ranks:
        wire = gpu.peer_rate if call.ranks <= gpus_per_host else gpu.network_rate
        return sent_bytes_of(call) / wire
    touching_s = call.touched_bytes / gpu.memory_rate
    if not call.flops:
        return touching_s
    rate = gpu.matmul_flops
    if call.operator.startswith(_ATTENTION):
        rate = gpu.attention_backward_flops if "backward" in call.operator else gpu.attention_flops
    return max(call.flops / rate, touching_s)


def sent_bytes_of(call: Call) -> int:
    """Bytes that one rank sends: of a collective by a ring, or an exchange in equal parts."""
    return call.touched_bytes * (call.ranks - 1) // call.ranks if call.ranks else 0


def piece_of(
    name: str,
    seen: Trace,
    checkpointed: Trace | None,
    gpu: Gpu,
    *,
    gpus_per_host: int,
    expert_parameters: int = 0,
    trained: int | None = None,
    halves: Halves | None = None,
) -> Piece:
    """checkpointed: the same module under torch's checkpoint; None for one that is no block of the engine, so
    never recomputed or moved. halves: of its backward; None where that is never split."""
    is_layer = checkpointed is not None
    forward = [seconds_of(call, gpu, gpus_per_host) for call in seen.forward]
    backward = [seconds_of(call, gpu, gpus_per_host) for call in seen.backward]
    by_input, by_weight = (
        sum(seconds_of(call, gpu, gpus_per_host) for call in calls)
        for calls in (((), ()) if halves is None else (halves.input, halves.weight))
    )
    forward_host_s, backward_host_s = (gpu.call_s * len(calls) for calls in (seen.forward, seen.backward))
    plain = Level("plain", seen.saved_bytes, 0.0)
    return Piece(
        name=name,
        parameters=seen.parameters,
        expert_parameters=expert_parameters,
        trained=seen.parameters if trained is None else trained,
        input_bytes=seen.input_bytes,
        output_bytes=seen.output_bytes,
        forward_s=sum(forward),
        backward_s=sum(backward),
        input_s=by_input,
        weight_s=by_weight,
        weight_bytes=0 if halves is None else halves.read_bytes,
        passed_bytes=0 if halves is None else halves.passed_bytes,
        held_bytes=0 if halves is None else halves.held_bytes,
        forward_host_s=forward_host_s,
        backward_host_s=backward_host_s,
        sent_bytes=sum(map(sent_bytes_of, (*seen.forward, *seen.backward))),
        forward_working_bytes=seen.forward_working_bytes,
        checkpointed_working_bytes=(checkpointed or seen).forward_working_bytes,
        backward_working_bytes=seen.backward_working_bytes,
        moving_working_bytes=seen.moving_working_bytes,
        menu=_menu(seen, forward) if is_layer else (plain,),
        selective=_selective(seen, forward) if is_layer else None,
    )


def _level(name: str, seen: Trace, seconds: Sequence[float], kept: Collection[int]) -> Level:
    """The recompute runs every call up to the last that makes something saved, but for those kept, by their
    places."""
    again = range(seen.last_saving_call + 1)
    kept_calls = [seen.forward[at] for at in kept]
    here_bytes = seen.input_bytes + sum(call.saved_bytes for call in kept_calls)
    return Level(
        name,
        saved_bytes=seen.input_bytes + sum(call.made_bytes for call in kept_calls),
        recompute_s=sum(seconds[at] for at in again if at not in kept),
        made_again_bytes=seen.saved_bytes - here_bytes,
    )


def _menu(seen: Trace, seconds: Sequence[float]) -> Menu:
    """Plain; then ever fewer calls kept, those that save the most seconds a byte the longest; then none.
    Collectives are kept but at the last level, where a recompute runs them again."""
    again = range(seen.last_saving_call + 1)
    collectives = {at for at in again if seen.forward[at].ranks}
    by_worth = sorted(
        (at for at in again if at not in collectives and seen.forward[at].made_bytes),
        key=lambda at: seconds[at] / seen.forward[at].made_bytes,
        reverse=True,
    )
    levels = [Level("plain", seen.saved_bytes, 0.0), _level("checkpoint", seen, seconds, ())]
    for count in range(1, len(by_worth)):
        kept = collectives.union(by_worth[:count])
        levels.append(_level(f"keep {len(kept)} calls", seen, seconds, kept))
    found = convex(levels)
    if len(found) > _MOST_LEVELS:
        # evenly by what they save, the first and the last among them
        places = [round(at * (len(found) - 1) / (_MOST_LEVELS - 1)) for at in range(_MOST_LEVELS)]
        found = tuple(found[at] for at in places)
    return found


def _selective(seen: Trace, seconds: Sequence[float]) -> Level:
    kept = {at for at in range(seen.last_saving_call + 1) if seen.forward[at].flops}
    return _level("selective", seen, seconds, kept)
