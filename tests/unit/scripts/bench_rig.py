"""Rows of the benchmark, small and on the CPU: what its tests share."""

from __future__ import annotations

from typing import Any

import torch

from bench import gradients, rows
from bench.measure import Clock, clear_gradients
from bench.rows import RowContext, RowOptions
from bench.workload import Inputs, Stack, probe_saved_bytes, tiny

CPU = torch.device("cpu")
LINK = {"d2h": 50e9, "h2d": 50e9, "duplex_d2h": 50e9, "duplex_h2d": 50e9}


def context_of(name: str, **options: Any) -> RowContext:
    work = tiny(name)
    stack, inputs = Stack(work.shape, CPU, torch.float32), Inputs(work.shape, CPU, torch.float32)
    clear_gradients(stack, inputs, work.keep_gradients)
    layer_bytes = probe_saved_bytes(stack, inputs.of(0), 1)
    return RowContext(
        workload=work,
        stack=stack,
        inputs=inputs,
        device=CPU,
        options=RowOptions(**options),
        layer_bytes=layer_bytes,
        resident_bytes=0,
    )


def prints_of(row: rows.Row) -> dict[str, Any]:
    return gradients.gradient_prints(row, Clock(CPU))
