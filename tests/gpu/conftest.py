"""What every test on a GPU may ask for. Nothing here touches the GPU before a test runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch

# Read by torch when cuBLAS is first used; without it deterministic algorithms refuse matrix products. It is
# what Hopper gets anyway.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits every time; torch also fills new memory, with NaN where it can, so no
    early read goes unnoticed."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def clean_allocator() -> Iterator[None]:
    """A device allocator without cached blocks, so that blocks are cut to size, and no garbage collector:
    what ends must end by itself."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    gc.disable()
    yield
    gc.enable()
    gc.collect()
