"""Products of groups of rows, each with its expert's matrix: torch's grouped_mm, and a loop over experts
elsewhere.

One invariant: rows are sorted by expert and there is no padding, so every row of a result is written.
grouped_mm takes what tests/unit/moe/test_products.py lists: bfloat16, float16 and float32, sizes that are
multiples of 16 bytes, and, before torch 2.13, CUDA alone. The loop takes everything, and on a GPU waits
for the row counts; a warning says so.

Legend: R rows, X and Y widths, E experts.
"""

from __future__ import annotations

import functools
import itertools
import logging

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from offload import read_numbers

logger = logging.getLogger(__name__)


def grouped_product(x_RX: Tensor, w_EXY: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the matrix of its expert: (R, Y), of the dtype of both.

    ends_E: int32, where the rows of each expert end; the last is R. An expert may have none. Blocks the host:
    where the loop runs on a device of its own.
    """
    if x_RX.shape[0] == 0:
        return x_RX.new_zeros(0, w_EXY.shape[2])
    if _is_grouped(x_RX, w_EXY.shape[2]):
        return functional.grouped_mm(x_RX, w_EXY, offs=ends_E)
    return torch.cat([x_RX[rows] @ w_XY for rows, w_XY in zip(_slices(ends_E), w_EXY, strict=True)])


def grouped_outer(x_RX: Tensor, y_RY: Tensor, ends_E: Tensor) -> Tensor:
    """Sums over the rows of each expert of x outer y: (E, X, Y); 0 for one that has none."""
    if x_RX.shape[0] == 0:
        return x_RX.new_zeros(ends_E.numel(), x_RX.shape[1], y_RY.shape[1])
    if _is_grouped(x_RX, y_RY.shape[1]):
        sums_EXY = functional.grouped_mm(x_RX.t(), y_RY, offs=ends_E)
        if x_RX.is_cuda and torch.cuda.get_device_capability(x_RX.device)[0] != 9:
            # not written for an expert without rows on some GPUs: pytorch issues 172439 and 174314
            empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
            sums_EXY.masked_fill_(empty_E[:, None, None], 0.0)
        return sums_EXY
    return torch.stack([x_RX[rows].t() @ y_RY[rows] for rows in _slices(ends_E)])


def _slices(ends_E: Tensor) -> list[slice]:
    return [slice(*pair) for pair in itertools.pairwise([0, *read_numbers(ends_E)])]


def _is_grouped(x_RX: Tensor, other: int) -> bool:
    """Whether grouped_mm takes rows of these two widths."""
    width = x_RX.shape[1]
    aligned = width * x_RX.itemsize % 16 == 0 and other * x_RX.itemsize % 16 == 0
    if torch.compiler.is_compiling():  # a graph takes no other; the loop runs eagerly
        return aligned and x_RX.dtype is torch.bfloat16 and x_RX.is_cuda
    return _takes(x_RX.device.type, x_RX.dtype, aligned)


@functools.cache
def _takes(device: str, dtype: torch.dtype, aligned: bool) -> bool:
    """Whether grouped_mm does both products there: tried once."""
    takes = aligned and dtype in (torch.bfloat16, torch.float16, torch.float32)
    why = f"{dtype}" if aligned else "a width that is no multiple of 16 bytes"
    if takes:
        try:
            with _disable_current_modes():  # a selective checkpoint would count the trial, and once only
                ends = torch.tensor([16, 32], dtype=torch.int32, device=device)
                x = torch.zeros(32, 16, device=device, dtype=dtype)
                functional.grouped_mm(x, x.view(2, 16, 16), offs=ends)
                functional.grouped_mm(x.t(), x, offs=ends)
        except (AttributeError, NotImplementedError, RuntimeError) as error:
            takes, why = False, str(error).split("\n")[0]
    if not takes and device != "cpu":
        logger.warning(
            "the experts' products run one by one, and the host waits for their row counts: torch's "
            "grouped_mm does not take %s on %s; use bfloat16 and widths that are multiples of 8",
            why,
            device,
        )
    return takes
