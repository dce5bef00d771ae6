"""One thread, and no process-wide manager left behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.unit.groups.stack import installed


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Operations this small only lose by threads, above all on a machine that does something else as well."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def no_manager_left_behind() -> Iterator[None]:
    with installed(None):
        yield
