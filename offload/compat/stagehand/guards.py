"""What the outputs of blocks are looked at for: their dtype, and NaN or Inf in them.

One invariant: the host never waits for a count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from offload.compat.stagehand.blocks import BlockEntry, BlockRegistry
from offload.compat.stagehand.config import StagehandConfig
from offload.errors import DtypeMismatchError
from offload.telemetry.speaker import Once, speaker

logger = speaker(__name__)


class NumericGuard:
    """Looks at the outputs of a registry's blocks. where: the device that they are on."""

    def __init__(self, config: StagehandConfig, registry: BlockRegistry, where: torch.device) -> None:
        self._config = config
        self._rows = {entry.block_id: row for row, entry in enumerate(registry)}
        with torch.inference_mode(False):
            self._counts = torch.zeros(len(self._rows), 2, dtype=torch.int64, device=where)
        self._said = Once()

    def check(self, entry: BlockEntry, output: Any) -> int:
        """Look at an output of a block; how many tensors of it are wider than its weights. Raises
        DtypeMismatchError as the config says. Inside a transform of torch.func nothing is looked at."""
        config, promotions = self._config, 0
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return 0
        for found in tree_leaves(output):
            if not (isinstance(found, Tensor) and found.is_floating_point()):
                continue
            wider = all(found.dtype.itemsize > dtype.itemsize for dtype in entry.dtypes)
            other = entry.dtypes == {torch.bfloat16} and found.dtype != torch.bfloat16
            if (wider and config.fail_on_dtype_promotion) or (other and config.strict_bf16):
                raise DtypeMismatchError(
                    f"block {entry.block_id} has weights in {', '.join(map(str, entry.dtypes))} and an "
                    f"output in {found.dtype}: cast it in the block, or give fail_on_dtype_promotion=False "
                    "and strict_bf16=False"
                )
            promotions += wider
            if config.nan_inf_check and found.device == self._counts.device:
                with torch.no_grad():
                    counts = torch.stack((found.isnan().sum(), found.isinf().sum()))
                    self._counts[self._rows[entry.block_id]] += counts
        return promotions

    def take(self) -> Tensor:
        """Counts since the last call, a row a block, NaN and Inf: on the host once the current lane has got
        here."""
        with torch.inference_mode(False):
            found = self._counts.to("cpu", non_blocking=True, copy=True)
            self._counts.zero_()
        return found

    def total(self, counts: Tensor) -> tuple[int, int]:
        """NaN and Inf of all blocks, which are on the host by now; the first block that has any is said
        once."""
        for name, (nan, inf) in zip(self._rows, counts.tolist(), strict=True):
            if (nan or inf) and self._said.first("not finite"):
                logger.warning(
                    "an output of block %s had %d NaN and %d infinite elements in a step: the first block, "
                    "in their order, that had any. Look at its input, its weights and the learning rate; "
                    "nan_inf_check=False counts none",
                    *(name, nan, inf),
                )
        nan, inf = counts.sum(0).tolist()
        return nan, inf
