"""Whether a recompute saves the bits that its forward saved, compared save by save in some of the calls.

    watch = Watch()                                    # of a model whose blocks are recomputed
    sample = watch.sample(engine, name, type(block))   # None for a call that is not compared
    sample.add(number, tensor)                         # in the forward, for each save; then sample.end()
    found = []
    sample.compare(found, number, tensor)              # in a recompute, for each; then sample.judge(found)

One invariant: comparing changes neither a bit nor the order of any lane, and blocks the host only at the ends
of steps.

Compared are the first calls of each block, then one in `_EVERY` of its class; none inside a CUDA graph's
capture. A save is reduced to one whole number on its device and lane (`checksum`), the two are compared
there, and the verdict is copied to the host, where `Net` reads it: before `step()` in the first
`_EARLY_STEPS` steps of a block, else once it has arrived, at the end of the next step at the latest.

Not compared are parameters, of which the versions are (`Weights`); saves of another lane than the first of
that device; and what operators leave unwritten: seeds of attention without dropout, reserves of cuDNN, and
noise that is drawn after it was saved.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from offload.checkpoint.kept import plain_parts
from offload.client import Client
from offload.engine import OffloadEngine
from offload.errors import RecomputeDiffersError
from offload.saved.filters import is_dtensor, is_parameter
from offload.telemetry.records import StepStats

__all__ = ["Sample", "Watch", "Weights", "checksum", "to_host", "watch_of"]

logger = logging.getLogger(__name__)

_FIRST_CALLS = 3
_EVERY = 61
_EARLY_STEPS = 3

_sequence_nr = torch._C._autograd._get_sequence_nr
_COLUMNS = 1 << 16
_MIX = 0x1E3779B97F4A7C15
_LOWER_HALF = (1 << 32) - 1


class Watch:
    """The blocks of one model, or the regions of one selective context. warns: a difference is a warning,
    once a block, and no error. differing, drawing: classes whose blocks were seen to differ, or to draw from
    generators that are not put back; whoever runs their calls asks."""

    def __init__(self, *, warns: bool = False, way_out: str = "") -> None:
        self.differing: set[object] = set()
        self.drawing: set[object] = set()
        self._warns = warns
        self._way_out = way_out
        self._calls = Counter[str]()
        self._later = Counter[object]()
        self._since: dict[str, int] = {}  # by block, the step of its first call
        self._warned: set[str] = set()

    def sample(self, engine: OffloadEngine, name: str, kind: object) -> Sample | None:
        """A call of block `name`, of class `kind`, begins: what compares it, None for most."""
        number = self._calls[name]
        self._calls[name] = number + 1
        if number >= _FIRST_CALLS:
            self._later[kind] += 1
            if self._later[kind] % _EVERY:
                return None
        if engine.device.is_capturing():
            return None
        net = _net_of(engine)
        since = self._since.setdefault(name, net.step)
        is_early = net.step - since < _EARLY_STEPS
        return Sample(self, net, name, kind, is_first=number < _FIRST_CALLS, is_early=is_early)

    def differs(self, name: str, kind: object, what: str) -> None:
        """A recompute of block `name` differs: raises RecomputeDiffersError, or warns. what: begins with
        "in step"."""
        self.differing.add(kind)
        way_out = self._way_out or (
            f"Name it in apply(..., no_recompute=[{name!r}]), which keeps or moves what it saves; or take "
            "recompute_differs='warn', where such gradients will do"
        )
        text = f"the recompute of {name} gave other bits than its forward: {what}. {way_out}"
        if not self._warns:
            raise RecomputeDiffersError(text)
        if name not in self._warned:
            self._warned.add(name)
            logger.warning(text)

    def draws(self, name: str, kind: object, generators: str) -> None:
        """A forward of block `name` has drawn from `generators`: says so once for a class of blocks."""
        if kind not in self.drawing:
            self.drawing.add(kind)
            logger.warning(
                "%s draws from %s in its forward, and a recompute would draw again: blocks of its class are "
                "not recomputed from the next call on, and what they save is kept or moved. Name them in "
                "apply(..., no_recompute=[%r]), or draw from torch's own generator, which is put back",
                name,
                generators,
                name,
            )


class Weights:
    """The parameters that a forward has computed with, and their versions; taken when it is over."""

    __slots__ = ("_tensors", "_versions")

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._tensors = [
            tensor
            for owner in modules
            for tensor in owner._parameters.values()
            # no leaf: a view that FSDP puts in a parameter's place, for as long as it is gathered
            if tensor is not None and tensor.is_leaf and not tensor.is_inference() and not is_dtensor(tensor)
        ]
        self._versions = [tensor._version for tensor in self._tensors]

    def written(self) -> str:
        """What was written in place since; empty if nothing was."""
        if all(
            tensor._version == version for tensor, version in zip(self._tensors, self._versions, strict=True)
        ):
            return ""
        return next(
            _looks(tensor)
            for tensor, version in zip(self._tensors, self._versions, strict=True)
            if tensor._version != version
        )


class Sample:
    """One call that is compared. It holds no save longer than the operator runs that has saved it.

    is_first: one of the first calls of its block. is_early: a step waits for its verdict.
    """

    def __init__(
        self, watch: Watch, net: Net, name: str, kind: object, *, is_first: bool, is_early: bool
    ) -> None:
        self.watch, self.name, self.kind = watch, name, kind
        self.is_first, self.is_early = is_first, is_early
        self._net = net
        self._sums: dict[Hashable, torch.Tensor] = {}
        self._later: dict[Hashable, torch.Tensor] = {}  # of what may be written after it was saved
        self._looks: dict[Hashable, str] = {}
        self._held: list[tuple[Hashable, torch.Tensor]] = []  # that the operator of now may still write
        self._operator = -1  # autograd's number of it
        self._lanes: dict[torch.device, object] = {}
        self._tables: dict[torch.device, torch.Tensor] = {}  # while a forward or a recompute runs

    def add(self, key: Hashable, tensor: torch.Tensor) -> None:
        """The forward saves `tensor`."""
        operator = _sequence_nr()
        if operator != self._operator:
            self._look_again()
            self._operator = operator
        total = None if is_parameter(tensor) else self._checksum(tensor)
        if total is None:
            return
        self._sums[key] = total
        self._looks[key] = _looks(tensor)
        if not tensor.requires_grad and tensor.is_floating_point():
            self._held.append((key, tensor))

    def end(self) -> None:
        """The forward is over."""
        self._look_again()
        self._tables = {}

    def _look_again(self) -> None:
        """The operator that saved last has run: what it has written since cannot be compared."""
        held, self._held = self._held, []
        for key, tensor in held:
            total = self._checksum(tensor)
            if total is not None:
                self._later[key] = total

    def compare(
        self, found: list[tuple[Hashable, torch.Tensor]], key: Hashable, tensor: torch.Tensor
    ) -> None:
        """A recompute saves `tensor`. found: of this recompute."""
        before = self._sums.get(key)
        now = None if before is None else self._checksum(tensor)
        if before is None or now is None:
            return
        with _outside_modes():
            differs, later = before != now, self._later.get(key)
            found.append((key, differs if later is None else differs & (before == later)))

    def judge(self, found: list[tuple[Hashable, torch.Tensor]]) -> None:
        """A recompute is over. Blocks the host: never."""
        self._tables = {}
        for device in {differs.device for _, differs in found}:
            keys = [key for key, differs in found if differs.device == device]
            with _outside_modes():
                differs = to_host(torch.stack([one for _, one in found if one.device == device]))
            self._net.pending.append(_Verdict(self, self._net.step, keys, differs, device))

    def said(self, keys: Sequence[Hashable]) -> str:
        return (
            f"{len(keys)} of {len(self._sums)} saves that were compared, the first is {self._looks[keys[0]]}"
        )

    def _checksum(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """None for what is not compared."""
        if tensor.device.type != "cpu" and not tensor.is_meta:
            lane = torch.accelerator.current_stream(tensor.device)
            if self._lanes.setdefault(tensor.device, lane) != lane or self._net.is_capturing():
                return None
        return None if _is_unwritten(tensor) else checksum(tensor, self._tables)


class _Verdict:
    """What a recompute's comparison says, on its way to the host."""

    def __init__(
        self,
        sample: Sample,
        step: int,
        keys: Sequence[Hashable],
        differs: torch.Tensor,
        device: torch.device,
    ) -> None:
        self.sample, self.step = sample, step
        self._keys, self._differs = keys, differs
        self._event: Any = None
        if device.type != "cpu":
            self._event = torch.Event(device)
            self._event.record(torch.accelerator.current_stream(device))

    def has_arrived(self) -> bool:
        return self._event is None or bool(self._event.query())

    def read(self) -> list[Hashable]:
        """What differs. Blocks the host until the comparison has run."""
        if self._event is not None:
            self._event.synchronize()
        return [key for key, differs in zip(self._keys, self._differs.tolist(), strict=True) if differs]


class Net(Client):
    """The verdicts of one engine. step: ends of steps so far."""

    name = "checkpoint"
    listens_only = True

    def __init__(self, engine: OffloadEngine) -> None:
        self.step = 0
        self.pending: deque[_Verdict] = deque()
        self.watches: dict[object, Watch] = {}  # of regions, by what they keep
        self.is_capturing = engine.device.is_capturing

    def step_ended(self, stats: StepStats) -> None:
        """As Client. Raises RecomputeDiffersError. Blocks the host: for a verdict of a step before, or of a
        block's first steps."""
        self.step += 1
        self.look(before=self.step - 1)

    def look(self, *, before: int) -> None:
        """Read what has arrived, and wait for early verdicts and for those of steps before `before`."""
        differing: tuple[_Verdict, list[Hashable]] | None = None
        for _ in range(len(self.pending)):
            verdict = self.pending.popleft()
            if not (verdict.sample.is_early or verdict.step < before or verdict.has_arrived()):
                self.pending.append(verdict)
                continue
            keys = verdict.read()
            if keys:
                verdict.sample.watch.differing.add(verdict.sample.kind)
                differing = differing or (verdict, keys)
        if differing is not None:
            verdict, keys = differing
            verdict.sample.watch.differs(
                verdict.sample.name,
                verdict.sample.kind,
                f"in step {verdict.step + 1}, {verdict.sample.said(keys)}, so gradients are wrong. Either "
                "something was changed between the forward and the backward (an attribute, a hook, a "
                "submodule, a buffer, an argument that is no tensor); or it draws from a generator that is "
                "not torch's own; or an operator is not deterministic, such as index_add or scatter_add of "
                "floats on a GPU, or another algorithm or graph was chosen for it",
            )


_nets: WeakKeyDictionary[OffloadEngine, Net] = WeakKeyDictionary()


def _net_of(engine: OffloadEngine) -> Net:
    net = _nets.get(engine)
    if net is None:
        if not _nets:
            hooks.append(register_optimizer_step_pre_hook(_before_step))
        net = _nets[engine] = Net(engine)
        engine.attach(net)
    return net


def watch_of(engine: OffloadEngine, asked: object) -> Watch:
    """That of all regions of torch's checkpoints for which `asked` is kept."""
    way_out = (
        "Run what differs outside of the checkpoint. Where such gradients will do, use torch's "
        "create_selective_checkpoint_contexts, which compares nothing"
    )
    return _net_of(engine).watches.setdefault(asked, Watch(way_out=way_out))


hooks: list[Any] = []


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    """Raises RecomputeDiffersError before weights are stepped by gradients that are known to be wrong."""
    for engine, net in list(_nets.items()):
        if not engine.closed:
            net.look(before=net.step)


def _looks(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


# -- checksums -----------------------------------------------------------------------------------------------
def checksum(
    tensor: torch.Tensor, tables: dict[torch.device, torch.Tensor] | None = None
) -> torch.Tensor | None:
    """One whole number for all bits of a tensor and for where they stand, on its device; None where there are
    no bits: of a wrapper, those of its parts count. tables: of weights, for calls in a row. Blocks the host:
    never."""
    parts = [part for part in plain_parts(tensor) if not part.is_meta and _has_bytes(part)]
    if not parts:
        return None
    tables = {} if tables is None else tables
    with _outside_modes():
        total = _sum_of(parts[0], tables)
        for part in parts[1:]:
            total = total * _MIX + _sum_of(part, tables)
        return total


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy on the host, there where an event recorded after this has passed."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


@contextmanager
def _outside_modes() -> Iterator[None]:
    """What runs inside is seen by no mode, no subclass, no autograd and no forward AD."""
    guards = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
    with guards[0], guards[1], torch._C._AutoDispatchBelowAutograd():
        yield


def _has_bytes(tensor: torch.Tensor) -> bool:
    return tensor.numel() > 0 and not tensor.is_quantized and tensor.untyped_storage().nbytes() > 0


def _is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether an operator may leave bits of it as it found them: attention without dropout its seed and
    offset, cuDNN parts of its reserve."""
    is_seed = tensor.dtype in (torch.int64, torch.uint64) and tensor.numel() <= 2
    return not tensor.is_cpu and (is_seed or (tensor.dtype is torch.uint8 and tensor.dim() == 1))


def _sum_of(tensor: torch.Tensor, tables: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    """Sums of columns and of rows, each times a weight of its own: two bytes that change places move one of
    them. Without a temporary of the tensor's size, unless its elements have gaps between them."""
    words = _words(tensor)
    rows = words.numel() // _COLUMNS
    table, needed = tables.get(tensor.device), max(rows, min(words.numel(), _COLUMNS))
    if table is None or table.numel() < needed:
        table = tables[tensor.device] = _weights(needed, tensor.device)
    total = _weighted(words[rows * _COLUMNS :], table)
    if rows:
        cells = words[: rows * _COLUMNS].view(rows, _COLUMNS)
        for sums in (cells.sum(dim, dtype=torch.int64) for dim in (0, 1)):
            total = total * _MIX + _weighted(sums, table)
    return total


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes as whole numbers, in the order of memory. An expanded dimension counts once."""
    tensor = tensor.resolve_conj().resolve_neg()
    strides = tensor.stride()
    for dim, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    flat = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim])).contiguous().view(-1)
    itemsize = flat.dtype.itemsize
    if flat.numel() * itemsize % 8 == 0:
        if flat.data_ptr() % 8 or flat.storage_offset() * itemsize % 8:
            flat = flat.clone()
        itemsize = 8
    if flat.is_complex():
        flat = torch.view_as_real(flat).view(-1)
    return flat.view(_WHOLE[itemsize])


_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _weighted(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Their sum, each times its weight. The halves are mixed first: of an upper bit a product keeps only the
    weight's lower bits."""
    if values.dtype is torch.int64:
        values = (values & _LOWER_HALF) + (values >> 32) * _MIX
    return (values * table[: values.numel()]).sum()


def _weights(count: int, device: torch.device) -> torch.Tensor:
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device).mul_(_MIX)
    return mixed.bitwise_xor_(mixed >> 32)
