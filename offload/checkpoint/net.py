"""A comparison, in some of the calls, of the bits that a recompute saves with those that its forward saved;
and warnings of which operators a selective checkpoint was asked to keep and were never called.

    sample = watch.sample(engine, name, kind)   # a forward of block `name` begins; None for most calls
    pack = telling(sample.add, pack)            # around the pack of its saves
    sample.ends()
    again = sample.again()                      # a recompute of it begins
    pack = telling(again.add, pack)
    again.ends()

One invariant: comparing changes neither a bit nor the order of any lane, and blocks the host only at the ends
of steps.

Compared are the first calls of each block, then one in `_EVERY` of its class; none inside a CUDA graph's
capture. Nothing of this is installed in the others. A save is reduced to one whole number on its device and
lane (checksum.py), the two are compared there, and the verdict is copied to the host, where `Net` reads it:
before an optimizer steps in the first `_EARLY_STEPS` steps of a block, else once it has arrived, at the end
of the next step at the latest.

Of a parameter it is compared which one it is. Not compared are saves of another lane than the first of that
device; and what operators leave unwritten: seeds of attention without dropout, reserves of cuDNN and oneDNN,
and noise that is drawn after it was saved.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import compress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from offload.checkpoint.checksum import checksum, outside_modes, to_host
from offload.checkpoint.kept import SharedGenerator, looks_of, shared_generators
from offload.client import Client
from offload.engine import OffloadEngine
from offload.errors import RecomputeDiffersError
from offload.saved.filters import waited
from offload.telemetry.records import StepStats
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)

_NAMED = 12  # operators that a message lists at most


@dataclass(slots=True)
class _Asked:
    """One set of operators, or one policy."""

    names: tuple[str, ...]
    matched: set[str] = field(default_factory=set)
    called: dict[str, None] = field(default_factory=dict)
    """Operators in the order of their first calls, as long as nothing matched."""
    regions: int = 0


class KeepReport:
    """One entry for each set of operators or policy, however many checkpoints of an engine use it."""

    def __init__(self) -> None:
        self._asked: dict[Hashable, _Asked] = {}
        self._said = Once()

    def region(
        self, asked: Hashable, names: Iterable[str], matched: Iterable[str], called: Iterable[str]
    ) -> None:
        """One checkpointed forward has ended. names: what was to be kept; matched: of what was; called: what
        the forward called."""
        entry = self._asked.setdefault(asked, _Asked(tuple(names)))
        entry.regions += 1
        entry.matched.update(matched)
        if not entry.matched:
            entry.called.update(dict.fromkeys(called))

    def no_chunk(self) -> None:
        if self._said.first("no chunk"):
            logger.warning(
                "a checkpoint with selective_contexts() runs while no chunk is current: what it keeps stays "
                "on the device; call init_chunk_handler() at the start of every forward"
            )

    def step_ended(self) -> None:
        """Say what a whole step of checkpoints did not call."""
        for asked, entry in self._asked.items():
            if not self._said.first(asked):
                continue
            missing = [name for name in entry.names if name not in entry.matched]
            if not entry.matched:
                logger.warning(
                    f"selective_contexts() kept nothing: {entry.regions:,} checkpointed forwards called none "
                    f"of {_listed(entry.names)}, so they are recomputed whole. They called "
                    f"{_listed(entry.called)} (what torch.compile has fused calls none). Ask for some of "
                    "those, by selective_contexts() in a checkpoint of your own; of mode='selective' the "
                    "operators are fixed, and mode='auto' keeps what pays"
                )
            elif missing:
                logger.info(
                    f"selective_contexts() keeps {_listed(sorted(entry.matched))}; not called: "
                    f"{_listed(missing)}"
                )


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (", ".join(listed[:_NAMED]) or "nothing") + more


_FIRST_CALLS = 3
_EVERY = 61
_EARLY_STEPS = 3
_MOST_REGIONS = 4096  # of a step that are told apart

_REASONS = """so gradients are wrong: something was changed between the forward and the backward or by \
the forward itself (what an attribute holds, a hook, an argument that is no tensor); or it draws \
from a generator other than torch's default ones; or an operator is not deterministic, such as index_add or \
scatter_add of floats on a GPU, or another algorithm or graph was chosen for it"""
_WAY_OUT = """Name it in apply(..., no_recompute=['NAME']), which keeps or moves what it saves; or take \
recompute_differs='warn', where such gradients will do"""
_REGIONS_WAY_OUT = """Run what differs outside of the checkpoint; where such gradients will do, use torch's \
create_selective_checkpoint_contexts, which compares nothing"""
_DRAWS = """%s draws from %s in its forward, and a recompute would draw again: blocks of its class are not \
recomputed from the next call on, and what they save is kept or moved. Name them in apply(..., \
no_recompute=[%r]), or draw from torch's default generator, which is put back"""

_sequence_nr = torch._C._autograd._get_sequence_nr


def telling(saved: Callable[[torch.Tensor], None], pack: Callable[[torch.Tensor], Any]) -> Any:
    """A pack once more, which calls `saved` before each tensor that it is given."""

    @wraps(pack)  # still whose it is, to whoever looks at the innermost pair
    def told(tensor: torch.Tensor) -> Any:
        saved(tensor)
        return pack(tensor)

    return told


class Watch:
    """The blocks of one model, or the regions of one engine.

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
        self._since: dict[str, int] = {}  # by block, the step of its first call
        self._said = Once()
        self.recomputes = 0  # of all its calls, so far
        if not _hooks:  # now: a first forward may come in an optimizer's closure
            _hooks.append(register_optimizer_step_pre_hook(_before_step))

    def refuses(self, name: str, module: nn.Module) -> bool:
        """Predicate: the saves of block `name`, `module`, are to be kept or moved instead of recomputed."""
        return name in self._never or type(module) in self._refused

    def sample(self, engine: OffloadEngine, name: str, kind: object) -> Sample | None:
        """Sample that compares a call which begins; None for most. kind: the class of the block."""
        number = self._calls[name]
        self._calls[name] = number + 1
        if number >= _FIRST_CALLS:
            self._later[kind] += 1
            if self._later[kind] % _EVERY:
                return None
        if engine.device.is_capturing():
            return None
        net = net_of(engine)
        is_early = net.step - self._since.setdefault(name, net.step) < _EARLY_STEPS
        return Sample(net, self, name, kind, is_early)

    def differs(self, name: str, kind: object, what: str) -> None:
        """A recompute of block `name` differs: raises RecomputeDiffersError, or warns."""
        self.refuse(kind)
        way_out = self._way_out.replace("NAME", name)
        text = f"the recompute of {name} gave other bits than its forward: {what}. {way_out}"
        if not self._warns:
            raise RecomputeDiffersError(text)
        if self._said.first(name):
            logger.warning(text)

    def refuse(self, kind: object) -> None:
        """A block of that class has differed."""
        if self._moves:
            self._refused.add(kind)

    def failed(self, name: str, kind: object, error: BaseException) -> None:
        """The recompute of block `name` has raised, or saved other tensors."""
        self.refuse(kind)
        error.add_note(
            f"raised while {name} was recomputed for its backward: what its forward read may have changed "
            "since; leave the block out with no_recompute="
        )

    def draws(self, name: str, kind: object, generators: str) -> None:
        """A forward of block `name` has drawn from `generators`, which is said once for a class of blocks."""
        if kind not in self._refused:
            self._refused.add(kind)
            logger.warning(_DRAWS, name, generators, name)


class Sample:
    """Compares the saves of one call with those of its recomputes, and holds none of them.

    is_early: an optimizer's step waits for the verdict. generators: Python's and numpy's that the call has
    moved, once it has ended, with their states before it.
    """

    def __init__(self, net: Net, watch: Watch, name: str, kind: object, is_early: bool) -> None:
        self.saves: list[_Saved] = []
        self.generators: list[tuple[SharedGenerator, bytes]] = [
            (generator, generator.get_state()) for generator in shared_generators()
        ]
        self._net, self._watch, self._whose, self._is_early = net, watch, (name, kind), is_early
        self._noise: tuple[int, torch.Size] | None = None  # a save that may be one
        self._lanes: dict[torch.device, object] = {}

    def add(self, tensor: torch.Tensor) -> None:
        """The forward saves `tensor`."""
        parameter = _parameter_of(tensor)
        total = self.checksum(tensor) if parameter is None else _number(tensor.storage_offset())
        if tensor.requires_grad:
            if self._noise == (_sequence_nr(), tensor.shape):  # as of rrelu, see region.py
                self.saves[-1] = self.saves[-1]._replace(total=None)
            self._noise = None
        else:
            self._noise = _sequence_nr(), tensor.shape
        self.saves.append(_Saved(looks_of(tensor), total, parameter))

    def ends(self) -> None:
        """The forward is over."""
        moved = self.generators = [one for one in self.generators if one[0].get_state() != one[1]]
        if moved:
            self._watch.draws(*self._whose, " and ".join(generator.name for generator, _ in moved))

    def again(self) -> Comparison:
        return Comparison(self)

    def judge(self, looks: Sequence[str], differs: torch.Tensor) -> None:
        """differs: of saves that look so."""
        device = differs.device
        differs = to_host(differs)
        event = None if device.type == "cpu" else torch.Event(device)
        if event is not None:
            event.record(torch.accelerator.current_stream(device))
        report = partial(self._watch.differs, *self._whose)
        self._net.pending.append(_Verdict(report, self._is_early, self._net.step, looks, differs, event))

    def checksum(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """None for what is not compared."""
        with outside_modes():
            return checksum(waited(tensor)) if self._is_compared(tensor) else None

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


class Comparison:
    """One recompute of a call of which a sample is taken."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample
        self._saves = iter(sample.saves)
        self._pairs = defaultdict[torch.device, list[tuple[str, torch.Tensor, torch.Tensor]]](list)

    def add(self, tensor: torch.Tensor) -> None:
        """The recompute saves `tensor`."""
        saved = next(self._saves, None)
        if saved is None:
            return
        parameter, now = saved.parameter, None
        if parameter is not None:
            is_same = _parameter_of(tensor) is parameter or _shares_bytes(tensor, parameter)
            now = _number(tensor.storage_offset() if is_same else -1)
        elif saved.total is not None:
            now = self._sample.checksum(tensor)
        if saved.total is not None and now is not None:
            self._pairs[now.device].append((saved.looks, saved.total, now))

    def ends(self) -> None:
        """The recompute is over. Blocks the host: never."""
        with outside_modes():
            for pairs in self._pairs.values():
                looks, before, now = zip(*pairs, strict=True)
                self._sample.judge(looks, torch.stack(before) != torch.stack(now))


class _Saved(NamedTuple):
    """One save of a forward. total: its checksum, of a parameter its place in the storage; None for what is
    not compared."""

    looks: str
    total: torch.Tensor | None
    parameter: nn.Parameter | None


class _Verdict(NamedTuple):
    """Result of comparing a recompute in `step`. differs: on its way to the host, there once `event` has
    passed. looks: of the saves that it is about."""

    report: Callable[[str], None]
    is_early: bool
    step: int
    looks: Sequence[str]
    differs: torch.Tensor
    event: Any


class Net(Client):
    """The verdicts of one engine. step: ends of steps so far. num_regions: with selective_contexts() in this
    one, which a watch of its own compares. keeps: what is said of those."""

    name = "checkpoint"
    listens_only = True

    def __init__(self, engine: OffloadEngine) -> None:
        self.step = self.num_regions = 0
        self.keeps = KeepReport()
        self._regions = Watch(way_out=_REGIONS_WAY_OUT)
        self.pending: deque[_Verdict] = deque()
        self.is_capturing = engine.device.is_capturing

    def step_ended(self, stats: StepStats) -> None:
        """Read verdicts. Raises RecomputeDiffersError. Blocks the host: for those of a block's first steps,
        and of the step before."""
        self.step += 1
        self.num_regions = 0
        self.keeps.step_ended()
        self.look(before=self.step - 1)

    def region_sample(self, engine: OffloadEngine, kind: object) -> Sample | None:
        """Sample that compares a region with selective_contexts() which begins; None for most. Nobody says
        which one it is: the regions of each step are counted. kind: what it keeps."""
        self.num_regions = min(self.num_regions + 1, _MOST_REGIONS)
        name = f"region {self.num_regions} of a step with selective_contexts()"
        return self._regions.sample(engine, name, kind)

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
            looks = list(compress(verdict.looks, verdict.differs.tolist()))
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


def net_of(engine: OffloadEngine) -> Net:
    """The net of an engine, attached to it as a client on first use."""
    if engine not in _nets:
        _nets[engine] = Net(engine)
        engine.attach(_nets[engine])
    return _nets[engine]


def _before_step(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> Any:
    """Raises RecomputeDiffersError before weights are stepped by gradients that are known to be wrong; of a
    closure, which computes them inside `step()`, as it returns."""
    _look_early()
    if len(args) > 1 and callable(args[1]):
        return (args[0], _looking(args[1]), *args[2:]), kwargs
    if callable(kwargs.get("closure")):
        return args, {**kwargs, "closure": _looking(kwargs["closure"])}
    return None


def _looking(closure: Callable[[], Any]) -> Callable[[], Any]:
    @wraps(closure)
    def looking() -> Any:
        loss = closure()
        _look_early()
        return loss

    return looking


def _look_early() -> None:
    for engine, net in list(_nets.items()):
        if not engine.closed:
            net.look()  # the others wait for the step's end: an optimizer inside another has its thread


def _number(value: int | torch.SymInt) -> torch.Tensor:
    with outside_modes():
        return torch.tensor(value)


def _parameter_of(tensor: torch.Tensor) -> nn.Parameter | None:
    """The parameter that it is, or is a view of."""
    for found in (tensor, tensor._base):
        if found is not None and type(found) is not torch.Tensor and isinstance(found, nn.Parameter):
            return found
    return None


def _shares_bytes(tensor: torch.Tensor, parameter: nn.Parameter) -> bool:
    with torch._C.DisableTorchFunctionSubclass():  # a streamed weight tells nobody its address
        return bool(tensor.untyped_storage()._cdata == parameter.untyped_storage()._cdata)
