"""Work `int8` of bench_weights.py: as `lora`, with frozen weights in INT8.

One invariant: `nothing` has, on the device, the weights that they are expanded to, so all rows have its bits.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench import weights_lora

ROWS = "nothing,host,5GB"


def run_row(options: argparse.Namespace) -> dict[str, Any]:
    """The row of this process."""
    return weights_lora.run_row(options, quantize="int8")
