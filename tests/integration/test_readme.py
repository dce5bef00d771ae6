"""What README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import torch

from offload import PipelineOffloadManager

README = Path(__file__).parents[2] / "README.md"


def test_the_example_in_the_readme_runs_and_offloads() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    small_limits = "device_limit_bytes=6 << 20, max_restoring_bytes=0"
    example = example.replace("device_limit_bytes=8 << 30, host_reserve_bytes=32 << 30", small_limits)
    blocks = [SimpleNamespace(attention=torch.nn.Linear(1024, 1024), mlp=torch.nn.Linear(1024, 1024)) for _ in range(3)]
    names = {
        "model": SimpleNamespace(blocks=blocks),
        "microbatches": [(torch.randn(1024, 1024, requires_grad=True), torch.randn(1024, 1024)) for _ in range(2)],
        "loss_fn": torch.nn.functional.mse_loss,
    }
    try:
        exec(compile(example, str(README), "exec"), names)
        stats = PipelineOffloadManager.get_instance().stats
        inputs = 2 * 3 * 1024 * 1024 * 4  # of each attention: all that its group saves
        assert stats.spill_bytes == inputs
        assert 0 < stats.restore_bytes <= inputs
        assert stats.device_bytes_peak <= 6 << 20
        assert all(block.attention.weight.grad is not None for block in blocks)
    finally:
        PipelineOffloadManager.reset_instance()
        PipelineOffloadManager.OFFLOAD_MGR = None
