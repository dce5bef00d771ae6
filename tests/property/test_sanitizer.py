"""torch's CUDA sanitizer has nothing to say of the engine, and finds the edges that it can see when they are
left out.

Which reports to expect on a GPU, and what the sanitizer cannot see, is in scripts/sanitize.py, which runs it
there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.property.sanitized import SanitizedDevice, sanitized
from tests.unit.groups.stack import (
    Driver,
    assert_same,
    baseline,
    build_manager,
    build_stages,
    installed,
    one_f_one_b,
)
from tests.unit.saved.rig import Rig
from tests.unit.saved.test_views import keep

STEPS = [one_f_one_b(4, 2)] * 3
CAPS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "windows": {"max_spilling_bytes": 2048, "max_restoring_bytes": 2048},
    "device limit": {"device_limit_bytes": 8192},
}
SEEN = ("spill", "allocate", "read")
"""Edges between kernels on device memory that is alive."""
UNSEEN = ("restore", "reuse")
"""Edges over host memory, which the sanitizer does not follow. Nor does it follow bytes through the allocator
("settle", "abandon"): on a GPU it forgets an address when its block is freed. Both are the simulated device's
own to prove: tests/property/test_edges.py."""


@pytest.mark.parametrize("executor", ["late", "early"])
@pytest.mark.parametrize("caps", CAPS)
def test_a_pipeline_step_raises_no_report(caps: str, executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run of it found two false alarms: a poll that says that an event has passed is seen by
    nobody, and making a tensor over bytes that are there (`set_`) counted as a kernel that writes them."""
    expected = baseline(build_stages(), STEPS)
    device = SanitizedDevice(executor=executor, seed=5)
    with installed(build_manager(device=device, **CAPS[caps])):
        driver = Driver(build_stages(), announced=True)
        with sanitized(device, monkeypatch):
            found = [driver.step(actions) for actions in STEPS]
        assert device.copies(device.d2h) > 0
    assert_same(expected, found)


def run_once(device: SanitizedDevice, patch: pytest.MonkeyPatch) -> None:
    rig = Rig(device=device, host_limit_bytes=1 << 20)
    with sanitized(device, patch):
        for _ in range(2):
            found: list[Tensor] = []
            with rig.group():
                y = keep(found, torch.randn(256) * 2, torch.randn(256) * 2)
            rig.leave()
            y.backward()
            assert [value.numel() for value in found if (value * 3).numel()] == [256, 256]
            del y
    rig.end()


@pytest.mark.parametrize("order", SEEN)
def test_an_edge_between_kernels_that_is_left_out_is_reported(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.cuda._sanitizer import CUDASanitizerErrors

    with pytest.raises(CUDASanitizerErrors):
        run_once(SanitizedDevice(without={order}, check=False), monkeypatch)


@pytest.mark.parametrize("order", UNSEEN)
def test_an_edge_over_host_memory_that_is_left_out_is_not_reported(
    order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_once(SanitizedDevice(without={order}, check=False), monkeypatch)
