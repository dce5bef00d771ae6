"""One run of a function whose saved tensors are recomputed when autograd reads the first of them.

    region = Region(again, context_fn)
    region.begin(tensors)     # what autograd saves from here on is only counted
    ...                       # the function runs
    region.end()
    ...
    again(*tensors)           # called in the backward, at the first read in each graph task

One invariant: what a read gives is what the run had saved, recomputed under the random state, autocast and
settings of the run; or an error. That the bits are the same is looked at in some runs (net.py).

The modes are the very ones of the run, whose `__enter__` is not called again; modes of tracing stay as they
are. Whatever a recompute changes of random states, autocast, modes and settings of the thread and the process
is afterwards as it was found (`Surroundings`).

torch's own non-reentrant checkpoint does the same. Where operators are small, most of what it adds is host
time for each save, so this is written for few calls a save: a layer of W5's stack at a width of 64 takes the
host 1.05 ms plain, forward and backward, 2.45 under torch's and 1.97 under a region (November 2026, a CPU,
median of three). As in torch's: the recompute stops at the last save, each graph task (or GraphExecGroup) has
a recompute of its own, of a save that nobody can read any more nothing is held, and the tensors are saved by
autograd, through whatever saved-tensor hooks are on around the run. What differs: torch's debug mode has no
effect, and a device that the run is the first to use is no error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils.checkpoint import CheckpointError, DefaultDeviceType, _StopRecomputationError

from offload.checkpoint.checksum import outside_modes
from offload.checkpoint.kept import generator_of
from offload.checkpoint.members import Given
from offload.checkpoint.net import Sample, telling
from offload.client import weakly
from offload.saved.hooks import Pair, as_it_is, pair_without_users, users_pair
from offload.versions import queue_callback

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
"""What a run is inside, and what each recompute of it is inside."""

_sequence_nr = torch._C._autograd._get_sequence_nr
_graph_task = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_exec_group = torch._C._get_graph_exec_group
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks

_NO_TASK = -1

_UNDRAWN = -1, torch.Size()
"""rrelu saves its noise, then its input of that shape, and then draws the noise, which moves no version."""

_UNLIKE = "does not do the same twice. Make it, or name the block in apply(..., no_recompute=[...])"

_Looks = tuple[torch.Size, torch.dtype, torch.device]


@lru_cache(4096)
def _noted(looks: _Looks) -> _Looks:
    """Looks as one object, however many saves have them: Python's collector walks what lives
    long."""
    return looks


class _Save:
    """The object that autograd keeps of one save. looks: shape, dtype and device. made: the tensor, from its
    recompute for `task` to its read. others: the same of tasks that were overtaken by that one."""

    __slots__ = ("__weakref__", "looks", "made", "others", "task")

    def __init__(self, looks: _Looks) -> None:
        self.looks = looks
        self.made: torch.Tensor | None = None
        self.task: object = None
        self.others: dict[object, torch.Tensor] | None = None

    def put(self, task: object, made: torch.Tensor) -> None:
        if self.made is not None and self.task != task:
            self.others = {**(self.others or {}), self.task: self.made}
        self.made, self.task = made, task

    def take(self, task: object, *, leave: bool = False) -> torch.Tensor | None:
        """The tensor that was made for this task; None once it was taken. leave: another read may come."""
        if self.task == task:
            made = self.made
            if not leave:
                self.made = None
            return made
        return None if self.others is None else self.others.pop(task, None)


class _Inputs(torch.autograd.Function):
    """A node that nothing leads to, whose saved tensors are the inputs. They live as long as its output."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> None:
        raise AssertionError("nothing leads here")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return torch.empty(0)


class Region:
    """One run. again: computes what it saved once more, from the tensors given to `begin` (members.py).

    context_fn: of what the run and each recompute are inside, asked at `begin`; None for nothing.
    sample: compares this run with its recomputes; None where nobody does. unlike: called with the error
        where a recompute raises, or saves other tensors, in number or in shape.
    `begin` and `end` are called in one thread, and hooks that are put on in between are taken off in between.
    """

    def __init__(
        self,
        again: Callable[..., object],
        context_fn: Callable[[], Contexts] | None = None,
        sample: Sample | None = None,
        unlike: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._again = again
        self._sample = sample
        self._unlike = unlike
        self._context_fn = context_fn
        self._context: Contexts | None = None
        self._saves: list[weakref.ref[_Save]] = []
        self._stops = True
        self._noise: tuple[int, torch.Size] | None = None  # a save that may be one
        self._has_ended = False
        self._tasks: set[object] = set()  # that had their recompute
        self._users: Pair | None = None  # the user's own hooks around the run

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """The function begins, with gradients enabled. tensors: what it computes from. Blocks the host:
        never."""
        self._surroundings = Surroundings(tensors)
        self._stops = torch_checkpoint._enable_checkpoint_early_stop is not False
        context = None if self._context_fn is None else self._context_fn()
        self._given = Given(tensors)
        anchor = torch.empty(0, requires_grad=True)
        self._users = users_pair()
        if self._users is not None:  # it would be shown the inputs, which the recompute needs as they are
            _push_hooks(*pair_without_users())
        try:
            self._inputs: torch.Tensor = _Inputs.apply(anchor, *tensors)  # type: ignore[no-untyped-call]
        finally:
            if self._users is not None:
                _pop_hooks()
        pack = self._pack
        _push_hooks(pack if self._sample is None else telling(self._sample.add, pack), self._unpack)
        if context is not None:
            try:
                context[0].__enter__()
            except BaseException:
                _pop_hooks()
                raise
            self._context = context

    def end(self, *exception: Any) -> None:
        """It has returned, or raised. exception: as of a context's end."""
        self._has_ended = True
        self._stops &= self._noise is not _UNDRAWN  # else a recompute has to come past its drawing
        try:
            if self._context is not None:
                self._context[0].__exit__(*(exception or (None, None, None)))
        finally:
            _pop_hooks()
        self._surroundings.learn()
        if self._sample is not None:
            self._sample.ends()
            self._surroundings.generators += self._sample.generators

    # -- the pair --------------------------------------------------------------------------------------------
    def _pack(self, tensor: torch.Tensor) -> _Save:
        if not tensor.requires_grad:
            self._noise = _sequence_nr(), tensor.shape
        elif self._noise is not None:
            self._noise = _UNDRAWN if self._noise == (_sequence_nr(), tensor.shape) else None
        looks = (tensor.shape, tensor.dtype, tensor.device)
        try:
            save = _Save(_noted(looks))
        except TypeError:  # a size that is a symbol, where somebody traces this
            save = _Save(looks)
        self._saves.append(weakref.ref(save))
        return save

    def _unpack(self, save: _Save) -> torch.Tensor:
        task: object = _exec_group()
        is_backward = task is None and _graph_task() != _NO_TASK
        if task is None:
            task = _graph_task()
        # of a graph that is not retained autograd drops the save as soon as its node has run
        leave = is_backward and not _keeps_graph()
        made = save.take(task, leave=leave) if task in self._tasks else None
        if made is None:  # also where a node of a graph that is retained reads it once more
            self._compute_again(task)
            if is_backward and task not in self._tasks:  # of some saves nothing may be read in this backward
                queue_callback(partial(weakly(self._let_go), task))
            self._tasks.add(task)
            made = save.take(task, leave=leave)
        if task == _NO_TASK:  # the next read outside of a backward is one by itself
            self._let_go(task)
        assert made is not None  # else the recompute had raised
        if self._users is None:
            return made
        with torch.no_grad():  # as autograd packs
            packed = self._users[0](made)
        theirs: torch.Tensor = self._users[1](packed)
        return theirs

    def _compute_again(self, task: object) -> None:
        # `pack` lives as long as any node of the recompute, and what the region keeps may hold one: so it
        # holds no region and no save
        saves, num_saves = self._saves, len(self._saves)
        stops, has_ended = self._stops, self._has_ended
        detaches = self._users is None  # theirs may look for parameters
        came = 0
        compared = None if self._sample is None else self._sample.again()
        differing: list[str] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal came
            number = came
            came += 1
            # an alias of a parameter whose bytes come and go shows its owner that somebody will read them
            if detaches and (tensor.requires_grad or type(tensor) is torch.nn.Parameter):
                tensor = tensor.detach()
            if number >= num_saves:
                if has_ended:
                    raise CheckpointError(
                        f"a recompute saves more tensors than its forward, which saved {num_saves}: the "
                        f"function {_UNLIKE}"
                    )
                return tensor  # the run itself reads what it had saved so far
            save = saves[number]()
            if save is not None:
                looks = (tensor.shape, tensor.dtype, tensor.device)
                if save.looks != looks:
                    differing.append(f"save {number}: {save.looks} in the forward, {looks} in the recompute")
                save.put(task, tensor)
            if stops and came == num_saves:
                raise _StopRecomputationError
            return tensor

        node: Any = self._inputs.grad_fn
        context = None if self._context is None else self._context[1]
        try:
            inputs = node.saved_tensors
            _push_hooks(pack if compared is None else telling(compared.add, pack), as_it_is)
            try:
                given = self._given.again(inputs)
                with self._surroundings.in_place(context), torch.enable_grad(), given as tensors:
                    self._again(*tensors)
            except _StopRecomputationError:
                pass
            finally:
                _pop_hooks()
            self._check(num_saves, came, differing)
            if compared is not None:
                compared.ends()
        except BaseException as error:
            if not isinstance(error, (KeyboardInterrupt, torch.OutOfMemoryError)):
                self._unlike(error)
            self._let_go(task)
            raise

    @staticmethod
    def _check(num_saves: int, came: int, differing: Sequence[str]) -> None:
        if came < num_saves:
            raise CheckpointError(
                f"a different number of tensors was saved in a forward, {num_saves}, and in its recompute, "
                f"{came}: the function {_UNLIKE}"
            )
        if differing:
            more = "; ..." if len(differing) > 4 else ""
            raise CheckpointError(
                "tensors with different metadata were saved in a forward and in its recompute: "
                f"{'; '.join(differing[:4])}{more}. The function {_UNLIKE}"
            )

    def _let_go(self, task: object) -> None:
        """Tensors that were made for this task go."""
        self._tasks.discard(task)
        for reference in self._saves:
            save = reference()
            if save is not None:
                save.take(task)


_c: Any = torch._C

_LIBRARIES = ("cudnn", "mkldnn", "nnpack")
_REDUCTIONS = [f"cublas_allow_{dtype}_reduced_precision_reduction" for dtype in ("bf16", "fp16")]
_NAMES = [
    *(f"{name}_{what}" for name in _LIBRARIES for what in ("benchmark", "deterministic", "enabled")),
    *("blas_preferred_backend", "linalg_preferred_backend", "cublas_allow_fp16_accumulation", *_REDUCTIONS),
    *("math_sdp_allow_fp16_bf16_reduction", "sdp_priority_order"),
]
_ATTENTIONS = ("cudnn", "fa3", "flash", "math", "mem_efficient", "overrideable")
_PRECISIONS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]

_ReadWrite = tuple[Callable[[], Any], Callable[[Any], object]]


def _settings() -> Iterator[_ReadWrite]:
    """How to read and to write each that this torch has."""
    yield torch.get_default_dtype, _c._set_default_dtype
    yield (
        lambda: (_c._get_deterministic_algorithms(), _c._get_deterministic_algorithms_warn_only()),
        lambda value: _c._set_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    names = [(f"_get_{name}", f"_set_{name}") for name in _NAMES]
    names += [(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _ATTENTIONS]
    for get, put in names:
        if hasattr(_c, get) and hasattr(_c, put):
            yield getattr(_c, get), getattr(_c, put)
    for place in _PRECISIONS:
        yield partial(_c._get_fp32_precision_getter, *place), partial(_c._set_fp32_precision_setter, *place)
    yield _stack("function")
    yield _stack("dispatch", None)


def _stack(kind: str, *key: None) -> _ReadWrite:
    """One of a thread's stacks of modes. key: what its pop is given."""
    length, at = getattr(_c, f"_len_torch_{kind}_stack"), getattr(_c, f"_get_{kind}_stack_at")
    pop, push = getattr(_c, f"_pop_torch_{kind}_stack"), getattr(_c, f"_push_on_torch_{kind}_stack")

    def read() -> list[Any]:
        return [at(place) for place in range(length())]

    def write(modes: Sequence[Any]) -> None:
        if not any(getattr(mode, "_mode_key", None) for mode in (*modes, *read())):
            for _ in range(length()):
                pop(*key)
            for mode in modes:
                push(mode)

    return read, write


_READ, _WRITE = zip(*_settings(), strict=True)

_attention_chosen: set[torch.device] = set()


def _choose_attention(device: torch.device) -> None:
    """Have torch set its order of attention kernels, which the first attention of a process does: a first
    forward would begin under another order than it ends with, and its recompute would take another kernel."""
    if device.type in ("cuda", "xpu") and device not in _attention_chosen:
        _attention_chosen.add(device)
        with outside_modes():
            few = torch.empty(1, 1, 8, 8, dtype=torch.float16, device=device)
            torch._fused_sdp_choice(few, few, few)


_rewound = threading.RLock()
"""Held while a recompute has set the process's random states back: backwards may run in several threads."""


class Surroundings:
    """Surroundings of this moment. tensors: whose devices' random states count, beside the CPU's.

    generators: that the run has moved, once `learn` was called, with their states before it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        away = [device for device in devices if device.type not in ("cpu", "meta")]
        generators: list[Any] = [torch.default_generator, *map(generator_of, away)]
        self.generators = [(generator, generator.get_state()) for generator in generators]
        for device in away:
            _choose_attention(device)
        kinds = {device.type for device in away} or {DefaultDeviceType.get_device_type()}
        self._autocast = [
            _autocast_of(kind) for kind in {"cpu", *kinds} if torch.amp.is_autocast_available(kind)
        ]
        self._settings = [read() for read in _READ]

    def learn(self) -> None:
        """The run is over: one that drew nothing needs no random state. In a capture nothing shows it."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        now = [generator.get_state() for generator, _ in self.generators]
        with outside_modes():
            self.generators = [
                one for one, state in zip(self.generators, now, strict=True) if not torch.equal(one[1], state)
            ]

    @contextmanager
    def in_place(self, context: AbstractContextManager[Any] | None) -> Iterator[None]:
        """Inside all is as before the run, and `context` is entered last."""
        with _rewound if self.generators else nullcontext(), ExitStack() as stack:
            for generator, state in self.generators:
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            found = [read() for read in _READ]
            if found != self._settings:
                stack.callback(_change, self._settings, found)
                _change(found, self._settings)
            for was in self._autocast:
                if was != _autocast_of(was["device_type"]):
                    stack.enter_context(torch.autocast(**was))
            if context is not None:
                stack.enter_context(context)
            yield


def _change(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    for write, one, other in zip(_WRITE, found, wanted, strict=True):
        if one != other:
            write(other)


def _autocast_of(device_type: str) -> dict[str, Any]:
    """Arguments of torch.autocast. While it is off its dtype counts too: it is the one of an autocast
    inside that names none."""
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
