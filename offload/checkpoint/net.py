"""Whether a recompute saves the bits that its forward saved, compared save by save in some of the calls.

    call = WatchedCall(watch, engine, name, modules)   # a forward of block `name` begins
    call.sample                                        # compares its saves; None for most calls
    call.ends()
    with call.in_place():                              # a recompute of it runs inside
        ...

One invariant: comparing changes neither a bit nor the order of any lane, and blocks the host only at the ends
of steps.

Compared are the first calls of each block, then one in `_EVERY` of its class; none inside a CUDA graph's
capture. A save is reduced to one whole number on its device and lane (checksum.py), the two are compared
there, and the verdict is copied to the host, where `Net` reads it: before `step()` in the first
`_EARLY_STEPS` steps of a block, else once it has arrived, at the end of the next step at the latest.

Of a parameter the version is compared, and which one it is. Not compared are saves of another lane than the
first of that device; and what operators leave unwritten: seeds of attention without dropout, reserves of
cuDNN and oneDNN, and noise that is drawn after it was saved.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from offload.checkpoint.checksum import checksum, outside_modes, to_host
from offload.checkpoint.draws import generator_states, put_generator_states
from offload.client import Client
from offload.engine import OffloadEngine
from offload.errors import RecomputeDiffersError
from offload.saved.filters import is_dtensor
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import speaker

__all__ = ["Found", "Sample", "Watch", "WatchedCall", "is_sharded"]

logger = speaker(__name__)

_FIRST_CALLS = 3
_EVERY = 61
_EARLY_STEPS = 3
_MOST_REGIONS = 4096  # of a step that are told apart

_REASONS = """so gradients are wrong: something was changed between the forward and the backward or by \
the forward itself (an attribute, a hook, a submodule, an argument that is no tensor); or it draws \
from a generator other than torch's default ones; or an operator is not deterministic, such as index_add or \
scatter_add of floats on a GPU, or another algorithm or graph was chosen for it"""
_WAY_OUT = """Name it in apply(..., no_recompute=['NAME']), which keeps or moves what it saves; or take \
recompute_differs='warn', where such gradients will do"""
_DRAWS = """%s draws from %s in its forward, and a recompute would draw again: blocks of its class are not \
recomputed from the next call on, and what they save is kept or moved. Name them in apply(..., \
no_recompute=[%r]), or draw from torch's default generator, which is put back"""

Found = list[tuple[Hashable, torch.Tensor]]
"""Of one recompute: by save, whether it differs."""


class Watch:
    """The blocks of one model, or the regions of one selective context.

    warns: a difference is a warning, once a block, and no error. moves: its class is refused from then on.
    never: names of blocks that are refused. way_out: for messages.
    """

    def __init__(
        self,
        *,
        warns: bool = False,
        moves: bool = False,
        never: Collection[str] = (),
        way_out: str = _WAY_OUT,
    ) -> None:
        self._warns, self._moves, self._never, self._way_out = warns, moves, never, way_out
        self._refused: set[object] = set()
        self._calls = Counter[str]()
        self._later = Counter[object]()
        self._regions = (0, 0)  # a step, and those so far in it
        self._since: dict[str, int] = {}  # by block, the step of its first call
        self._warned: set[str] = set()

    def refuses(self, name: str, module: nn.Module) -> bool:
        """Whether block `name`, `module`, is to be kept or moved instead of recomputed."""
        return name in self._never or type(module) in self._refused

    def sample(self, engine: OffloadEngine, name: str, kind: object) -> Sample | None:
        """What compares a call that begins; None for most. kind: the class of the block."""
        number = self._calls[name]
        self._calls[name] = number + 1
        if number >= _FIRST_CALLS:
            self._later[kind] += 1
            if self._later[kind] % _EVERY:
                return None
        if engine.device.is_capturing():
            return None
        net = _net_of(engine)
        is_early = net.step - self._since.setdefault(name, net.step) < _EARLY_STEPS
        return Sample(net, partial(self.differs, name, kind), is_early)

    def region(self, engine: OffloadEngine, kind: object) -> Sample | None:
        """The same for a region, of which nobody says what it is: the regions of each step are counted."""
        step = _net_of(engine).step
        self._regions = step, self._regions[1] + 1 if step == self._regions[0] else 1
        number = min(self._regions[1], _MOST_REGIONS)
        return self.sample(engine, f"region {number} of a step with selective_contexts()", kind)

    def differs(self, name: str, kind: object, what: str) -> None:
        """A recompute of block `name` differs: raises RecomputeDiffersError, or warns."""
        self.refuse(kind)
        way_out = self._way_out.replace("NAME", name)
        text = f"the recompute of {name} gave other bits than its forward: {what}. {way_out}"
        if not self._warns:
            raise RecomputeDiffersError(text)
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(text)

    def refuse(self, kind: object) -> None:
        """A block of that class has differed."""
        if self._moves:
            self._refused.add(kind)

    def draws(self, name: str, kind: object, generators: str) -> None:
        """A forward of block `name` has drawn from `generators`, which is said once for a class of blocks."""
        if kind not in self._refused:
            self._refused.add(kind)
            logger.warning(_DRAWS, name, generators, name)


class WatchedCall:
    """One call of a block that is recomputed. modules: it, and all inside. sample: compares its saves; None
    for most calls."""

    __slots__ = ("_modules", "_states", "_versions", "_watch", "_whose", "sample")

    def __init__(self, watch: Watch, engine: OffloadEngine, name: str, modules: Sequence[nn.Module]) -> None:
        self._watch, self._whose = watch, (name, type(modules[0]))
        self.sample = watch.sample(engine, *self._whose)
        self._states = {} if self.sample is None else self.sample.generator_states()
        self._modules = modules
        self._versions: list[tuple[torch.Tensor, int]] = []

    def ends(self) -> None:
        """The forward is over."""
        modules, self._modules = self._modules, ()
        if not is_sharded(modules):
            self._versions = [
                (tensor, tensor._version)
                for owner in modules
                for tensor in owner._parameters.values()
                # no leaf: a view that FSDP puts in a parameter's place while it is gathered
                if tensor is not None and tensor.is_leaf and not (tensor.is_inference() or is_dtensor(tensor))
            ]
        if self._states and self.sample is not None:
            now = self.sample.generator_states()
            self._states = {name: state for name, state in self._states.items() if now[name] != state}
        if self._states:
            self._watch.draws(*self._whose, " and ".join(self._states))

    @property
    def host_s(self) -> float:
        """As of `Sample`."""
        return 0.0 if self.sample is None else self.sample.host_s

    def refuse(self) -> None:
        """A recompute saved other tensors than the forward, in number or in shape."""
        self._watch.refuse(self._whose[1])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The recompute runs inside. Raises RecomputeDiffersError if a parameter was written since."""
        for tensor, version in self._versions:
            if tensor._version != version:
                what = f"parameter {_looks(tensor)} was written in place after the forward"
                self._watch.differs(*self._whose, f"{what}, as by an optimizer's step")
        found = generator_states() if self._states else {}
        try:
            put_generator_states(self._states)
            yield
        finally:
            put_generator_states({name: found[name] for name in self._states})


class Sample:
    """Compares the saves of one call. It holds none of them.

    report: told what differs. is_early: a step waits for the verdict. host_s: seconds of the host that
    comparing took, for who measures what the call takes.
    """

    def __init__(self, net: Net, report: Callable[[str], None], is_early: bool) -> None:
        self.host_s = 0.0
        self._net, self._report, self._is_early = net, report, is_early
        self._sums: dict[Hashable, torch.Tensor] = {}
        self._parameters: dict[Hashable, tuple[nn.Parameter, int]] = {}
        self._looks: dict[Hashable, str] = {}
        self._lanes: dict[torch.device, object] = {}

    def add(self, key: Hashable, tensor: torch.Tensor) -> None:
        """The forward saves `tensor`."""
        if (parameter := _parameter_of(tensor)) is not None:
            self._parameters[key], self._looks[key] = (
                (parameter, int(tensor.storage_offset())),
                _looks(tensor),
            )
        elif (total := self._checksum(tensor)) is not None:
            self._sums[key], self._looks[key] = total, _looks(tensor)

    def forget(self, key: Hashable) -> None:
        """That save is not compared."""
        self._sums.pop(key, None)

    def compare(self, found: Found, key: Hashable, tensor: torch.Tensor) -> None:
        """A recompute saves `tensor`."""
        with outside_modes():
            if key in self._parameters:
                parameter, offset = self._parameters[key]
                is_same = _parameter_of(tensor) is parameter or _shares_bytes(tensor, parameter)
                found.append((key, torch.tensor(not is_same or tensor.storage_offset() != offset)))
            elif key in self._sums and (now := self._checksum(tensor)) is not None:
                found.append((key, now != self._sums[key]))

    def judge(self, found: Found) -> None:
        """A recompute is over. Blocks the host: never."""
        for device in {differs.device for _, differs in found}:
            keys = [key for key, differs in found if differs.device == device]
            with outside_modes():
                differs = to_host(torch.stack([one for _, one in found if one.device == device]))
            event = None if device.type == "cpu" else torch.Event(device)
            if event is not None:
                event.record(torch.accelerator.current_stream(device))
            looks = [self._looks[key] for key in keys]
            verdict = _Verdict(self._report, self._is_early, self._net.step, looks, differs, event)
            self._net.pending.append(verdict)

    def generator_states(self) -> dict[str, bytes]:
        with self._counted():
            return generator_states()

    def _checksum(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """None for what is not compared."""
        with self._counted():
            return checksum(tensor) if self._is_compared(tensor) else None

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What runs inside is none of the call's own."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self.host_s += time.perf_counter() - began_s

    def _is_compared(self, tensor: torch.Tensor) -> bool:
        if tensor.dtype is torch.uint8 and tensor.dim() == 1:
            return False  # a library's reserve
        if not tensor.is_cpu and not tensor.is_meta:
            lane = torch.accelerator.current_stream(tensor.device)
            is_seed = tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() <= 2
            is_elsewhere = self._lanes.setdefault(tensor.device, lane) != lane
            if is_seed or is_elsewhere or self._net.is_capturing():
                return False
        return True


class _Verdict(NamedTuple):
    """What the comparison of a recompute in `step` says. differs: on its way to the host, there once `event`
    has passed. looks: of the saves that it is about."""

    report: Callable[[str], None]
    is_early: bool
    step: int
    looks: Sequence[str]
    differs: torch.Tensor
    event: Any


class Net(Client):
    """The verdicts of one engine. step: ends of steps so far."""

    name = "checkpoint"
    listens_only = True

    def __init__(self, engine: OffloadEngine) -> None:
        self.step = 0
        self.pending: deque[_Verdict] = deque()
        self.is_capturing = engine.device.is_capturing

    def step_ended(self, stats: StepStats) -> None:
        """As Client. Raises RecomputeDiffersError. Blocks the host: for verdicts of a block's first steps,
        and of the step before."""
        self.step += 1
        self.look(before=self.step - 1)

    def look(self, *, before: int | None = None) -> None:
        """Read early verdicts, waiting for them; with `before` also what has arrived, and all of steps before
        that one."""
        raised: list[RecomputeDiffersError] = []
        for _ in range(len(self.pending)):
            verdict = self.pending.popleft()
            event = verdict.event
            is_late = before is not None and (verdict.step < before or event is None or event.query())
            if not (verdict.is_early or is_late):
                self.pending.append(verdict)
                continue
            if event is not None:
                event.synchronize()
            looks = [
                one for one, differs in zip(verdict.looks, verdict.differs.tolist(), strict=True) if differs
            ]
            if looks:
                count = f"{len(looks)} of {len(verdict.looks)} saves that were compared"
                try:
                    verdict.report(
                        f"in step {verdict.step + 1}, {count}, the first is {looks[0]}, {_REASONS}"
                    )
                except RecomputeDiffersError as error:
                    raised.append(error)
        if raised:
            raise raised[0]


_nets: WeakKeyDictionary[OffloadEngine, Net] = WeakKeyDictionary()
_hooks: list[Any] = []


def _net_of(engine: OffloadEngine) -> Net:
    """That of an engine, attached to it as a client on first use."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
    if engine not in _nets:
        _nets[engine] = Net(engine)
        engine.attach(_nets[engine])
    return _nets[engine]


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raises RecomputeDiffersError before weights are stepped by gradients that are known to be wrong."""
    for engine, net in list(_nets.items()):
        if not engine.closed:
            net.look()  # the others wait for the step's end: an optimizer inside another has its thread


def is_sharded(modules: Sequence[nn.Module]) -> bool:
    """Whether FSDP2 gathers parameters of theirs for each recompute: they are gone with the recompute's end,
    so nothing that was saved of them may be read later."""
    return any(hasattr(type(inner), "_get_fsdp_state") for inner in modules)


def _parameter_of(tensor: torch.Tensor) -> nn.Parameter | None:
    """The parameter that it is, or is a view of."""
    for found in (tensor, tensor._base):
        if found is not None and type(found) is not torch.Tensor and isinstance(found, nn.Parameter):
            return found
    return None


def _shares_bytes(tensor: torch.Tensor, parameter: nn.Parameter) -> bool:
    return bool(tensor.untyped_storage()._cdata == parameter.untyped_storage()._cdata)


def _looks(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
