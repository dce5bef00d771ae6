"""On a GPU what lies in a file comes back with its bits, from pinned memory that O_DIRECT reads into, and
captures go on beside the disk's threads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from offload import capturing, group_commit, group_start, init_chunk_handler, offload_hooks, step_end
from tests.gpu.workbench import DEVICE, Program, assert_same_bits, build_manager, installed, one_f_one_b

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]


@pytest.mark.parametrize("ahead", [None, 0, 1 << 20])
@pytest.mark.parametrize("host_limit", [1 << 28, 8 << 20])
def test_gradients_over_a_disk_have_the_bits_of_those_without_offload(
    ahead: int | None, host_limit: int, tmp_path: Path
) -> None:
    """Four microbatches save 18 MiB; the smaller host memory holds less than half of them."""
    program = Program(dtype=torch.bfloat16, order=one_f_one_b(4, 4), steps=4)
    manager = build_manager(
        reserve_bytes=8 << 20,
        disk_directory=str(tmp_path),
        disk_ahead_bytes=ahead,
        host_limit_bytes=host_limit,
        max_spilling_bytes=256 << 10,
        max_restoring_bytes=256 << 10,
        piece_bytes=64 << 10,
    )
    found = program.run(manager)
    assert_same_bits(program.run().gradients, found.gradients)
    assert sum(stats.disk_write_bytes for stats in found.stats) > 0
    assert sum(stats.disk_read_bytes for stats in found.stats) > 0
    assert [*tmp_path.iterdir()] == []


def test_a_capture_begins_while_the_disk_has_work_and_its_groups_stay_in_host_memory(tmp_path: Path) -> None:
    manager = build_manager(disk_directory=str(tmp_path), max_spilling_bytes=1, max_restoring_bytes=0)
    with installed(manager):
        weight = torch.ones(1 << 16, device=DEVICE, requires_grad=True)
        x = torch.full((1 << 16,), 2.0, device=DEVICE)

        def layer(weight: torch.Tensor) -> torch.Tensor:
            y = group_start(weight * x, "act")
            with offload_hooks():
                y = torch.sin(y * 1.0)
            return group_commit(y, "act")

        init_chunk_handler(1, 0, 1)
        (expected,) = torch.autograd.grad(layer(weight).sum(), weight)
        init_chunk_handler(1, 0, 1)
        before = layer(weight)  # its write may be under way when the capture begins
        init_chunk_handler(1, 0, 1)
        # a living graph has the gradient's node of its weight on the stream that it ran on
        captured = weight.detach().clone().requires_grad_()
        with capturing() as region:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                (grad,) = torch.autograd.grad(layer(captured).sum(), captured)
        disk = manager.engine.transfers.disk
        assert disk is not None
        disk.drain()
        written = disk.copies.writes.nbytes
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        disk.drain()
        assert disk.copies.writes.nbytes == written
        assert_same_bits([expected], [grad])
        assert_same_bits([expected], [*torch.autograd.grad(before.sum(), weight)])
        region.release()
        step_end()
