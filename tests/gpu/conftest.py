"""What every test on a GPU may ask for. Nothing here touches the GPU before a test runs."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
import torch

import offload
from offload import OffloadConfig
from tests.inside import streams_from

# Read by torch when cuBLAS is first used; without it deterministic algorithms refuse matrix products. It is
# what Hopper gets anyway.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Inductor times some kernels' variants, which sum in other orders, and keeps the fastest in files. Workers of
# pytest-xdist that share them can find another one at their second compilation than at their first.
if _WORKER := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"inductor-of-{_WORKER}")


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


@pytest.fixture
def engine_of_the_gpu() -> Iterator[None]:
    """The process's engine is on the GPU, and every weight matrix streams."""
    offload.configure(OffloadConfig(), device="cuda")
    with streams_from(1 << 16):
        yield
