"""torch's CUDA sanitizer: what it has to be told of this engine, and what would mislead it.

It is on where its module is loaded (TORCH_CUDA_SANITIZER=1, or
torch.cuda._sanitizer.enable_cuda_sanitizer()), and ends a program at the first pair of accesses that it finds
unordered. One invariant: with the sanitizer off nothing here costs more than a look-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def sanitizing() -> bool:
    return "torch.cuda._sanitizer" in sys.modules


def polled(passed: bool, synchronize: Callable[[], None]) -> bool:
    """`passed`, the answer to a poll. The sanitizer sees no query of an event, so that a wait that is left
    out because its event had passed looks like a race to it; it does see a synchronisation, which for an
    event that has passed blocks nobody."""
    if passed and sanitizing():
        synchronize()
    return passed
