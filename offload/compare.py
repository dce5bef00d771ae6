"""Which mode suits a model: each is tried for a few training steps, and all is as it was.

    table = offload.compare(model, step, within="24GB")     # step: a callable that does one training step
    print(table)
    offload.apply(model, **table.best)

One invariant: when it returns, or raises, weights, buffers, gradients, optimizers' state and groups, and
random states have the bits that they had, and the model has no hooks of it. What else a step changes, such as
the position of a data loader or a generator of its own, is the caller's: give what has a state_dict() as
`stateful`.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import random
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from inspect import signature
from typing import Any, Self

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from tqdm import tqdm

from offload import marks
from offload.apply import apply, is_applied
from offload.config import Mode, check_mode, naming_near
from offload.device import device_bytes
from offload.engine import OffloadEngine
from offload.errors import OffloadError
from offload.optim import HybridDeviceOptimizer
from offload.sizes import argument_bytes, bytes_text
from offload.telemetry.speaker import speaker

logger = speaker(__name__)

_LEAST_STEPS, _MOST_STEPS = 2, 12
"""Of a mode. "auto" measures in the first ones."""

_NOTHING: Mapping[str, Any] = {"mode": False}

_TIMEOUT_S = 600.0
"""The longest wait for another rank; torch's own for NCCL."""

_LEFT_S = 60.0
"""The same of a rank that has left a step, which others may not be able to end without it."""

_comparisons = itertools.count()  # alike on all ranks


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One mode, tried.

    | name | | unit |
    |---|---|---|
    | arguments | of `apply`; mode False alone is the model as it is | |
    | steps | that it took | |
    | step_ms | median of the later half of them; on several ranks that of the slowest | ms |
    | peak_bytes | most active bytes on the device in those; without a GPU, of saved tensors alone | bytes |
    | pinned_bytes | of host memory that it holds | bytes |
    | moved_bytes, stall_ms | of the last step: tensors that left, weights that came; waits | |
    | recomputes | of the last step: forwards of blocks that the backward ran again, whole or in part | |
    | why_not | why it cannot be taken; "" where it can | |
    """

    arguments: Mapping[str, Any]
    steps: int = 0
    step_ms: float = 0.0
    peak_bytes: int = 0
    pinned_bytes: int = 0
    moved_bytes: int = 0
    stall_ms: float = 0.0
    recomputes: int = 0
    why_not: str = ""

    @property
    def text(self) -> str:
        """The arguments as they are written."""
        return ", ".join(
            f"{name}={'optimizer' if isinstance(value, Optimizer) else repr(value)}"
            for name, value in self.arguments.items()
        )

    @property
    def named(self) -> dict[str, Any]:
        """The arguments as values for JSON: an optimizer is its class's name."""
        return {
            name: type(value).__name__ if isinstance(value, Optimizer) else value
            for name, value in self.arguments.items()
        }


@dataclass(frozen=True)
class Comparison:
    """Results of `compare`, in the order in which they were tried. within_bytes: None for no limit. link:
    what times mean without a GPU."""

    rows: tuple[Compared, ...]
    within_bytes: int | None = None
    link: str = ""

    @property
    def best(self) -> dict[str, Any]:
        """The arguments of the fastest that fits. Raises ValueError where none does."""
        return dict(self.best_row.arguments)

    @property
    def best_row(self) -> Compared:
        """Row of `best`: of the fastest that fits. Raises ValueError where none does."""
        able = [row for row in self.rows if not row.why_not]
        if not able:
            raise ValueError(f"no mode can be taken:\n{self}")
        return min(able, key=lambda row: row.step_ms)

    def as_dict(self) -> dict[str, Any]:
        """By name, as plain values for JSON."""
        rows = [vars(row) | {"arguments": row.named} for row in self.rows]
        return {"rows": rows, "within_bytes": self.within_bytes}

    def __str__(self) -> str:
        base = next((row.step_ms for row in self.rows if row.arguments == _NOTHING and row.step_ms), 0.0)
        cells = [
            [
                row.text,
                f"{row.step_ms:.1f} ms" if row.steps else "",
                f"{row.step_ms / base:.2f}" if row.steps and base else "",
                bytes_text(row.peak_bytes) if row.peak_bytes else "",
                bytes_text(row.pinned_bytes) if row.steps else "",
                bytes_text(row.moved_bytes) if row.steps else "",
                f"{row.recomputes} blocks" if row.steps else "",
                f"{row.stall_ms:.1f} ms" if row.steps else "",
                row.why_not,
            ]
            for row in self.rows
        ]
        headers = ["apply(model, ...)", "step", "/ off", "peak", "pinned", "moved"]
        headers += ["recomputed", "stalls", "why not"]
        widths = [None] * (len(headers) - 1) + [60]
        table = tabulate(cells, headers, disable_numparse=True, maxcolwidths=widths)
        within = "" if self.within_bytes is None else f"within {bytes_text(self.within_bytes)}"
        return "\n".join(line for line in (within, self.link, table) if line)


@naming_near
def compare(
    model: nn.Module,
    step: Callable[[], object],
    within: float | str | None = None,
    modes: Sequence[Mode | Mapping[str, Any]] | None = None,
    *,
    stateful: Sequence[Any] = (),
    budget_s: float = 120.0,
) -> Comparison:
    """Try modes of `apply` on this model, one after the other, and say which is the fastest that fits.

    step: does one whole training step, forward to zero_grad, on what it likes; it takes no argument.
    within: most active bytes on the device, weights and all, as bytes, text such as "24GB" or a share of the
        GPU. Mode "auto" plans for it.
    modes: names of modes, or arguments of `apply` as dictionaries, such as {"mode": "groups", "device_limit":
        "8GB"}. None: "off", "checkpoint", "hidden_states", "selective", "groups", "auto", "auto" for all
        kinds where one optimizer steps the model (else name it, as {"mode": "auto", "optimizer":
        optimizer}), and "hidden_states" with weights on the host.
    stateful: what else a step changes and has state_dict() and load_state_dict(): schedulers, a GradScaler.
    budget_s: seconds for all of them. Each takes 2 to 12 steps; one that was begun takes 2.

    A mode that runs out of memory, that `apply` refuses, or in which a step raises an OffloadError, is a row
    that says so. Optimizers of the model's parameters are found, others when they step; what they step
    besides is put back as well. With several ranks all must call, with the same modes; times and peaks are
    those of the worst rank, so that all find the same best. Where one raises, so do all, with an OffloadError
    that names it. A rank that leaves a step amid a collective leaves the others waiting in it, as in any
    step: out of memory, it waits 60 s for them, and raises, so that its process can end and theirs with it.
    Raises ValueError for a model that has a handle already, a size or a mode that is none, and whatever
    `step` raises, but for these. Blocks the host after each step.
    """
    with _Ranks() as ranks:
        return _compared(ranks, model, step, within, modes, stateful, budget_s)


def _compared(
    ranks: _Ranks,
    model: nn.Module,
    step: Callable[[], object],
    within: float | str | None,
    modes: Sequence[Mode | Mapping[str, Any]] | None,
    stateful: Sequence[Any],
    budget_s: float,
) -> Comparison:
    within_bytes = argument_bytes(within, name="within", of_bytes=device_bytes())
    if not isinstance(model, nn.Module) or not callable(step):
        given = f"a {type(model).__name__} and a {type(step).__name__}"
        raise ValueError(
            f"compare() got {given}, must be an nn.Module and a callable that does one training step"
        )
    if is_applied(model):
        raise ValueError(f"compare() of a {type(model).__name__} that is offloaded; call remove() first")
    if budget_s <= 0:
        raise ValueError(f"budget_s is {budget_s!r}; give the seconds that all modes may take together")
    if isinstance(modes, str | Mapping):
        raise ValueError(f"modes is {modes!r}, must be a list of modes, as in modes=[{modes!r}]")
    given = [
        dict(each) if isinstance(each, Mapping) else {"mode": check_mode("a mode of modes=", each)}
        for each in (_modes(within_bytes, _one_optimizer(model)) if modes is None else modes)
    ]
    unknown = {name for arguments in given for name in arguments} - signature(apply).parameters.keys()
    if unknown:
        raise ValueError(f"modes= has {', '.join(sorted(unknown))}, which are no arguments of apply")
    engine = marks.default_manager().engine
    config, ends = engine.config, time.monotonic() + budget_s
    is_simulated = engine.device.torch_device.type != "cuda"
    rows: list[Compared] = []
    with (
        _kept(model, stateful) as (put_back, optimizers),
        tqdm(given, "offload.compare", leave=False, disable=None) as bar,
    ):
        for index, arguments in enumerate(bar):
            bar.set_postfix_str(str(arguments))
            seconds = (ends - time.monotonic()) / (len(given) - index)
            written = _versions_of(model)
            try:
                row = _tried(ranks, model, step, arguments, seconds)
                idle = arguments == _NOTHING and row.steps and not optimizers.stepped
                if idle and _versions_of(model) == written:
                    logger.warning(
                        f"compare(): in {row.steps} steps no optimizer stepped, and no weight of "
                        f"{type(model).__name__} was written, so the table is not that of training; a step "
                        "does all from forward to zero_grad()"
                    )
            finally:
                _clear(engine, config, put_back)
            row = _agreed(row, ranks.tell(vars(row) | {"arguments": None}))
            over = within_bytes is not None and row.peak_bytes > within_bytes
            if over and not row.why_not:
                row = replace(row, why_not=f"its peak is above {bytes_text(within_bytes or 0)}")
            elif within_bytes is not None and is_simulated and arguments == _NOTHING and not row.peak_bytes:
                row = replace(row, why_not="without a GPU its peak is not known")
            rows.append(row)
    link = "on the simulated device: times say nothing of a GPU, and a peak is of saved tensors alone"
    return Comparison(tuple(rows), within_bytes, link if is_simulated else "")


def _versions_of(model: nn.Module) -> list[int]:
    return [each._version for each in model.parameters() if not each.is_inference()]


def _one_optimizer(model: nn.Module) -> Optimizer | None:
    """The only one that steps the model's parameters; None where several do, none does yet, or it places its
    state itself."""
    found = _optimizers_of({*model.parameters()})
    return found[0] if len(found) == 1 and not isinstance(found[0], HybridDeviceOptimizer) else None


def _modes(within_bytes: int | None, optimizer: Optimizer | None) -> list[dict[str, Any]]:
    total = {} if within_bytes is None else {"device_total": within_bytes}
    names = ("checkpoint", "hidden_states", "selective", "groups")
    return [
        dict(_NOTHING),
        *({"mode": name} for name in names),
        {"mode": "auto", **total},
        *([] if optimizer is None else [{"mode": "auto", "optimizer": optimizer, **total}]),
        {"mode": "hidden_states", "weights": "host"},
    ]


def _tried(
    ranks: _Ranks, model: nn.Module, step: Callable[[], object], arguments: dict[str, Any], seconds: float
) -> Compared:
    """Take steps for so many seconds, two at least, under these arguments. Ranks go on together: the steps of
    one that went on alone would wait for the others."""
    handle, times, peaks = None, list[float](), list[int]()
    ends, why_not, more, before = time.monotonic() + seconds, "", True, 0
    try:
        while more and not why_not:
            try:
                if handle is None and arguments != _NOTHING:
                    handle = apply(model, **arguments)
                else:
                    before = 0 if handle is None else handle.recomputes
                    _take(step, times, peaks, saved=handle is not None)
            except torch.OutOfMemoryError:
                why_not = "the device ran out of memory"
            except (ValueError, OffloadError) as error:
                if arguments == _NOTHING or not (handle is None or isinstance(error, OffloadError)):
                    raise  # of the step
                why_not = f"{'refused' if handle is None else 'fails'}: {error}"
            more = len(times) < _LEAST_STEPS or (len(times) < _MOST_STEPS and time.monotonic() < ends)
            took = handle is not None or arguments == _NOTHING
            found = ranks.tell((why_not, more), left=why_not if took else "")
            why_not, more = max(why for why, _ in found), all(each for _, each in found)
        if why_not:
            return Compared(arguments=arguments, why_not=why_not)
        if handle is None and not any(peaks):  # no allocator: counted as the other modes' are
            with suppress(ValueError):  # no blocks are found
                handle = apply(model, "groups", device_limit=1 << 60, min_numel=1)
                _take(step, [], peaks, saved=True)
                handle.remove()  # what it moved is none of this row's
                handle = None
        figures = {} if handle is None else handle.report().last_step
        weights = None if handle is None else handle.weights
        return Compared(
            arguments=arguments,
            steps=len(times),
            step_ms=statistics.median(times[len(times) // 2 :]),
            peak_bytes=max(peaks[len(times) // 2 :]),
            pinned_bytes=0 if handle is None else marks.default_manager().engine.arena.held_bytes,
            moved_bytes=figures.get("moved_bytes", 0) + (weights.in_bytes if weights else 0),
            recomputes=0 if handle is None else handle.recomputes - before,
            stall_ms=figures.get("stall_ms", 0.0) + (weights.stall_ms if weights else 0.0),
        )
    finally:
        if handle is not None:
            handle.remove()


def _take(step: Callable[[], object], times: list[float], peaks: list[int], *, saved: bool) -> None:
    """One step, timed. saved: whether an engine without an allocator knows the peak of saved tensors."""
    engine = marks.default_manager().engine
    engine.device.reset_allocator_peak()
    begun = time.perf_counter()
    step()
    engine.device.synchronize(engine.device.record(engine.device.compute))
    times.append((time.perf_counter() - begun) * 1e3)
    seen = engine.device.allocator_bytes()
    peaks.append((engine.last_stats.device_bytes_peak if saved else 0) if seen is None else seen[1])


def _clear(engine: OffloadEngine, config: Any, put_back: Callable[[], None]) -> None:
    """Nothing of the mode before is left, on the device or in host memory."""
    gc.collect()  # a step that ran out of memory left a graph in its exception
    manager = marks.default_manager()
    manager.engine.end_step()
    if manager.engine.config != config:
        marks.change_limits(config)
    engine.arena.trim(config.host_reserve_bytes)
    put_back()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class _Ranks:
    """Exchange of values between ranks, in the job's store: a collective would meet one of the step's, of a
    rank that is still in it. An error that ends the `with` is told, too, and the others raise it. `tell`
    blocks the host until all have told as much, at most `_TIMEOUT_S`, or `_LEFT_S`."""

    def __init__(self) -> None:
        self._told, self._store = 0, None
        if dist.is_available() and dist.is_initialized():
            self._rank, prefix = dist.get_rank(), f"offload/compare/{next(_comparisons)}"
            self._store = c10d.PrefixStore(prefix, c10d._get_default_store())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._store is not None:
            self._set(self._store, (None, f"{type(error).__name__}: {error}"))
            if isinstance(error, RuntimeError):  # gloo's, where a rank that has left the step has raised
                others = [f"{self._told}/{rank}" for rank in range(dist.get_world_size())]
                self._found(self._store, [key for key in others if self._store.check([key])], error)

    def tell(self, mine: Any, *, left: str = "") -> list[Any]:
        """Return what each rank tells, by rank, once all have. left: why this one has left a step. Raises
        OffloadError where one has raised."""
        if self._store is None:
            return [mine]
        keys = [f"{self._told}/{rank}" for rank in range(dist.get_world_size())]
        self._set(self._store, (mine, ""))
        wait_s = _LEFT_S if left else _TIMEOUT_S
        try:
            self._store.wait(keys, timedelta(seconds=wait_s))
        except RuntimeError as error:  # dist.DistError, but of a FileStore
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise OffloadError(
                f"compare(): rank {self._rank} waited {wait_s:g} s for ranks {missing}, which are in a step, "
                f"perhaps in a collective that this rank has left{left and f' ({left})'}; leave the mode out "
                "of modes="
            ) from error
        return [told for told, _ in self._found(self._store, keys)]

    def _found(
        self, store: Any, keys: Sequence[str], error: BaseException | None = None
    ) -> list[tuple[Any, str]]:
        found = [pickle.loads(store.get(key)) for key in keys]
        for key, (_, raised) in zip(keys, found, strict=True):
            if raised:
                rank = key.partition("/")[2]
                raise OffloadError(
                    f"compare() ends on all ranks, since rank {rank} raised {raised}"
                ) from error
        return found

    def _set(self, store: Any, told: tuple[Any, str]) -> None:
        store.set(f"{self._told}/{self._rank}", pickle.dumps(told))
        self._told += 1


def _agreed(row: Compared, found: Sequence[Mapping[str, Any]]) -> Compared:
    """The worst of all ranks."""
    worst = {name: max(each[name] for each in found) for name in found[0].keys() - {"arguments"}}
    return Compared(arguments=row.arguments, **worst)


# -- what is put back ----------------------------------------------------------------------------------------
class _Tensors:
    """Tensors and their bytes, on the host."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept = [(each, _on_host(each)) for each in tensors if not each.is_meta]

    def put_back(self) -> None:
        for tensor, values in self._kept:
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                _once(tensor).copy_(_once(values, tensor))


def _once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Without the elements that an expanded tensor repeats. like: the expanded one; None for itself."""
    shape = tensor if like is None else like
    if shape.layout is torch.strided:
        for dim, stride in enumerate(shape.stride()):
            tensor = tensor if stride else tensor.narrow(dim, 0, min(1, tensor.shape[dim]))
    return tensor


class _OptimizerState:
    """An optimizer as it was. Its tensors stay the objects that they are, and their bytes are kept on the
    host, where they are in no figure of the device."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [
            (group, [*group["params"]], _Nested({**group, "params": None}))
            for group in optimizer.param_groups
        ]
        self._state = [(of, entry, _Nested(entry)) for of, entry in optimizer.state.items()]

    def put_back(self) -> None:
        for group, parameters, values in self._groups:
            group.clear()
            group.update(values.put_back(), params=parameters)
        self._optimizer.param_groups[:] = [group for group, _, _ in self._groups]
        self._optimizer.state.clear()
        for of, entry, values in self._state:
            before = values.put_back()
            if isinstance(entry, dict):
                entry.clear()
                entry.update(before)
            self._optimizer.state[of] = entry if isinstance(entry, dict) else before


class _HybridState:
    """Its state is where its workers have it, who wait for whoever holds a tensor of it."""

    def __init__(self, optimizer: HybridDeviceOptimizer) -> None:
        self._optimizer, self._state = optimizer, tree_map(_on_host, optimizer.state_dict())

    def put_back(self) -> None:
        self._optimizer.load_state_dict(copy.deepcopy(self._state))
        if not self._state["state"]:  # float32 masters begin at the weights
            self._optimizer.update_fp32_param_by_new_param()


def _on_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value


class _Nested:
    """A value with tensors in it, such as a dictionary of lists."""

    def __init__(self, value: Any) -> None:
        self._leaves, self._form = tree_flatten(value)
        self._tensors = _Tensors(leaf for leaf in self._leaves if isinstance(leaf, Tensor))
        self._others = copy.deepcopy([None if isinstance(leaf, Tensor) else leaf for leaf in self._leaves])

    def put_back(self) -> Any:
        self._tensors.put_back()
        others = copy.deepcopy(self._others)
        leaves = [
            leaf if isinstance(leaf, Tensor) else other
            for leaf, other in zip(self._leaves, others, strict=True)
        ]
        return tree_unflatten(leaves, self._form)


class _Optimizers:
    """Optimizers that step parameters of a model, and whatever they step besides."""

    def __init__(self, parameters: Collection[Tensor]) -> None:
        self._kept: dict[int, _OptimizerState | _HybridState] = {}
        self._parameters = set(parameters)
        self._besides: list[_Tensors] = []  # parameters that are not the model's
        self._hybrids: list[HybridDeviceOptimizer] = []
        for optimizer in _optimizers_of(self._parameters):
            with suppress(OffloadError, AttributeError):  # closed or failed: it steps no more
                self.see(optimizer)
        self.stepped = False
        self._seeing = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.stepped = True
        self.see(optimizer)

    def see(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._kept or any(optimizer in each.sub_optimizers for each in self._hybrids):
            return
        if isinstance(optimizer, HybridDeviceOptimizer):
            self._kept[id(optimizer)] = _HybridState(optimizer)
            self._hybrids.append(optimizer)
        else:
            self._kept[id(optimizer)] = _OptimizerState(optimizer)
        besides = set(_parameters_of(optimizer)) - self._parameters
        self._parameters |= besides
        self._besides.append(_Tensors(besides))

    def put_back(self) -> None:
        for kept in (*self._besides, *self._kept.values()):
            kept.put_back()

    def close(self) -> None:
        self._seeing.remove()


def _optimizers_of(parameters: Collection[Tensor]) -> list[Optimizer]:
    """Optimizers that step some of these, hybrid ones before those inside."""
    every = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
    every.sort(key=lambda each: not issubclass(type(each), HybridDeviceOptimizer))
    found = []
    for optimizer in every:
        with suppress(OffloadError, AttributeError):  # closed, failed, or never built: it steps no more
            if not {*parameters}.isdisjoint(_parameters_of(optimizer)):
                found.append(optimizer)
    return found


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]


@contextmanager
def _kept(model: nn.Module, stateful: Sequence[Any]) -> Iterator[tuple[Callable[[], None], _Optimizers]]:
    """Inside, the first value puts everything back; at the end it is put back, too."""
    parameters = {parameter: parameter.requires_grad for parameter in model.parameters()}
    modules = [
        (module, dict(module._buffers), dict(module._parameters), module.training)
        for module in model.modules()
    ]
    tensors = _Tensors([*parameters, *model.buffers()])
    grads = {parameter: parameter.grad for parameter in parameters}
    gradients = _Tensors(each for each in grads.values() if each is not None)
    others = [(each, copy.deepcopy(each.state_dict())) for each in stateful]
    drawn = torch.get_rng_state(), random.getstate()
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    numpy: Any = sys.modules.get("numpy")
    of_numpy = None if numpy is None else numpy.random.get_state()
    optimizers = _Optimizers(parameters)

    def put_back() -> None:
        for module, named, weights, training in modules:
            module._buffers.clear()
            module._buffers.update(named)
            changed = {*weights.values()} ^ {*module._parameters.values()}
            if all(type(each) in (nn.Parameter, type(None)) for each in changed):  # FSDP exchanges its own
                module._parameters.clear()
                module._parameters.update(weights)
            module.training = training
        tensors.put_back()
        for parameter, requires_grad in parameters.items():
            parameter.requires_grad = requires_grad
            parameter.grad = grads[parameter]
        gradients.put_back()
        optimizers.put_back()
        for each, state in others:
            each.load_state_dict(copy.deepcopy(state))
        torch.set_rng_state(drawn[0])
        random.setstate(drawn[1])
        if on_gpu:
            torch.cuda.set_rng_state_all(on_gpu)
        if of_numpy is not None:
            numpy.random.set_state(of_numpy)

    try:
        yield put_back, optimizers
    finally:
        optimizers.close()
        put_back()
