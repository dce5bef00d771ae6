"""Random states, autocast, modes and settings of the thread and the process, which choose what an operator
computes beside its inputs: read at a run, and put back around its recompute.

One invariant: a recompute runs under the very modes of its run, whose `__enter__` is not called again, and
whatever it changes of all these is afterwards as it was found. Modes of tracing stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import DefaultDeviceType

from offload.checkpoint.checksum import outside_modes
from offload.checkpoint.kept import generator_of

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
