"""The modes and process-wide settings that choose what an operator computes: read at a run, and put back
around its recompute.

One invariant: a recompute runs under the very modes of its run, whose `__enter__` is not called again, and
leaves those that it found. Modes of tracing stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch

__all__ = ["Surroundings"]

_NAMES = (
    "blas_preferred_backend",
    "cublas_allow_bf16_reduced_precision_reduction",
    "cublas_allow_fp16_accumulation",
    "cublas_allow_fp16_reduced_precision_reduction",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_enabled",
    "linalg_preferred_backend",
    "math_sdp_allow_fp16_bf16_reduction",
    "mkldnn_deterministic",
    "mkldnn_enabled",
    "nnpack_enabled",
    "sdp_priority_order",
)
_ATTENTIONS = ("cudnn", "fa3", "flash", "math", "mem_efficient", "overrideable")
_PRECISIONS = [(backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn")]


def _determinism() -> tuple[bool, bool]:
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def _put_determinism(value: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(value[0], warn_only=value[1])


def _settings() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """How to read and to write each that this torch has."""
    c: Any = torch._C
    yield torch.get_default_dtype, c._set_default_dtype
    yield _determinism, _put_determinism
    names = [(f"_get_{name}", f"_set_{name}") for name in _NAMES]
    names += [(f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _ATTENTIONS]
    for get, put in names:
        if hasattr(c, get) and hasattr(c, put):
            yield getattr(c, get), getattr(c, put)
    for place in _PRECISIONS:
        yield partial(c._get_fp32_precision_getter, *place), partial(c._set_fp32_precision_setter, *place)


_READ, _WRITE = zip(*_settings(), strict=True)


class _Stack(NamedTuple):
    """One of a thread's stacks of modes."""

    length: Callable[[], int]
    at: Callable[[int], Any]
    pop: Callable[[], Any]
    push: Callable[[Any], object]

    def read(self) -> list[Any]:
        return [self.at(place) for place in range(self.length())]

    def put(self, modes: Sequence[Any]) -> None:
        for _ in range(self.length()):
            self.pop()
        for mode in modes:
            self.push(mode)


_STACKS = (
    _Stack(
        torch._C._len_torch_function_stack,
        torch._C._get_function_stack_at,
        torch._C._pop_torch_function_stack,
        torch._C._push_on_torch_function_stack,
    ),
    _Stack(
        torch._C._len_torch_dispatch_stack,
        torch._C._get_dispatch_stack_at,
        partial(torch._C._pop_torch_dispatch_stack, None),
        torch._C._push_on_torch_dispatch_stack,
    ),
)


class Surroundings:
    """Those of the calling thread and process, as they are when this is built."""

    __slots__ = ("_modes", "_settings")

    def __init__(self) -> None:
        self._modes = [stack.read() for stack in _STACKS]
        self._settings = [read() for read in _READ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        now = Surroundings()
        self._put(now)
        try:
            yield
        finally:
            now._put(self)

    def _put(self, other: Surroundings) -> None:
        """Change what is as in `other`."""
        for put, mine, its in zip(_WRITE, self._settings, other._settings, strict=True):
            if mine != its:
                put(mine)
        for stack, modes, found in zip(_STACKS, self._modes, other._modes, strict=True):
            same = len(modes) == len(found) and all(map(is_, modes, found))
            if not same and not any(getattr(mode, "_mode_key", None) for mode in (*modes, *found)):
                stack.put(modes)
