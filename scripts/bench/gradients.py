"""Are a row's gradients those of the row without offload? Told from fingerprints, so that no process keeps
another's gradients.

A fingerprint is a sum over all elements of (bits x a weight that depends on the position), modulo 2^64: equal
tensors have equal fingerprints, and a change of any element changes it. A strided sample of each gradient
gives the size of a difference. One invariant: the step that is compared runs under torch's deterministic
algorithms, and it is never one of the timed steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.measure import CUBLAS_WORKSPACE, Clock, clear_gradients, run_step
from bench.rows import Row

_CHUNK = 1 << 22
_SAMPLE = 2048
# 0x9E3779B97F4A7C15 as a signed word: an odd multiplier spreads positions over all bits
_ODD = -7046029254386353131
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """A 0-dim int64 tensor on the tensor's device, equal for equal bits."""
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK].to(torch.int64)
        weights = (
            torch.arange(start + 1, start + 1 + part.numel(), dtype=torch.int64, device=tensor.device) * _ODD
        )
        weights ^= weights >> 29
        total += (part * (weights | 1)).sum()
    return total


@contextmanager
def deterministic() -> Iterator[None]:
    """torch's deterministic algorithms, without filling fresh memory. cuBLAS's setting ends with it."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS_WORKSPACE
    settings: Any = torch.utils.deterministic
    before, fill = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)  # [The setting that costs host time], measure.py
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill


def gradient_prints(row: Row, clock: Clock) -> dict[str, Any]:
    """One deterministic step; the fingerprint and the sample of every gradient."""
    context = row.context
    clear_gradients(context.stack, context.inputs, context.workload.keep_gradients)
    with deterministic():
        run_step(row, clock)
        clock.drain()
    named = {name: parameter.grad for name, parameter in context.stack.named_parameters()}
    named["input"] = context.inputs.source.grad
    missing = [name for name, grad in named.items() if grad is None]
    if missing:
        raise RuntimeError(f"{len(missing)} of {len(named)} tensors got no gradient, first {missing[0]}")
    return prints_of({name: grad for name, grad in named.items() if grad is not None})


def prints_of(grads: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The fingerprint and the sample of each."""
    prints = torch.stack([fingerprint(grad) for grad in grads.values()]).tolist()
    samples = [
        grad.detach().flatten()[:: max(1, grad.numel() // _SAMPLE)].float().cpu() for grad in grads.values()
    ]
    return {
        "prints": dict(zip(grads, prints, strict=True)),
        "samples": dict(zip(grads, samples, strict=True)),
    }


def save(path: Path, prints: dict[str, Any]) -> None:
    torch.save(prints, path)


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def judged(
    path: Path, prints: Callable[[], dict[str, Any]], *, is_reference: bool, repeat: bool = False
) -> dict[str, Any]:
    """The row's gradients beside the reference's in the file, which the reference row writes.

    prints: makes a deterministic step and returns its prints.
    repeat: of the reference: make the step twice, and say whether they have the same bits.
    """
    made = prints()
    if not is_reference:
        return compare(load(path), made) if path.exists() else {"verdict": "no reference"}
    save(path, made)
    if not repeat:
        return {"verdict": "reference"}
    again = compare(made, prints())
    same = again["verdict"] == "bitwise"
    return again | {"verdict": "reference" if same else f"not repeatable: {again['verdict']}"}


def compare(reference: dict[str, Any], mine: dict[str, Any]) -> dict[str, Any]:
    """verdict: "bitwise", "differs R" (the largest difference in the samples over the largest gradient), or
    "not finite"."""
    equal = [name for name, value in reference["prints"].items() if mine["prints"].get(name) == value]
    largest = worst = 0.0
    finite = True
    for name, expected in reference["samples"].items():
        sample = mine["samples"][name]
        finite = finite and bool(torch.isfinite(sample).all()) and bool(torch.isfinite(expected).all())
        largest = max(largest, float(expected.abs().max()))
        worst = max(worst, float((sample - expected).abs().max()))
    verdict = (
        "bitwise"
        if len(equal) == len(reference["prints"])
        else f"differs {worst / largest if largest else worst:.1e}"
    )
    return {
        "verdict": verdict if finite else "not finite",
        "tensors": len(reference["prints"]),
        "equal": len(equal),
        "max_difference": worst,
        "max_gradient": largest,
    }
