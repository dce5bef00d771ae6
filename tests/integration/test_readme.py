"""What README shows runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import checkpoint

import offload
from offload import PipelineOffloadManager

README = Path(__file__).parents[2] / "README.md"


def python_examples() -> list[str]:
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_the_example_in_the_readme_runs_and_offloads() -> None:
    example = python_examples()[0]
    small_limits = "device_limit_bytes=6 << 20, max_restoring_bytes=0"
    example = example.replace("device_limit_bytes=8 << 30, host_reserve_bytes=8 << 30", small_limits)
    blocks = [
        SimpleNamespace(attention=torch.nn.Linear(1024, 1024), mlp=torch.nn.Linear(1024, 1024))
        for _ in range(3)
    ]
    names = {
        "model": SimpleNamespace(blocks=blocks),
        "microbatches": [
            (torch.randn(1024, 1024, requires_grad=True), torch.randn(1024, 1024)) for _ in range(2)
        ],
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


def test_the_example_of_selective_checkpoints_runs_and_what_is_kept_leaves() -> None:
    example = next(example for example in python_examples() if "selective_contexts" in example)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(1024, 1024, bias=False) for _ in range(2)]
    block = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh())
    source = torch.randn(1024, 1024)
    block(source).square().mean().backward()
    expected = [layer.weight.grad for layer in layers]
    block.zero_grad()
    names = {
        "torch": torch,
        "offload": offload,
        "checkpoint": checkpoint,
        "block": block,
        "x": source.clone().requires_grad_(),
        **{name: getattr(offload, name) for name in ("group_start", "group_commit", "offload_hooks")},
    }
    try:
        manager = offload.configure(
            offload.OffloadConfig(max_spilling_bytes=1), device="sim", print_summary=False
        )
        offload.init_chunk_handler()
        exec(compile(example, str(README), "exec"), names)
        names["y"].square().mean().backward()  # type: ignore[attr-defined]
        offload.step_end()
        assert manager.stats.spilled >= 2, "the input, and a product that the recompute reads"
        assert all(
            torch.equal(layer.weight.grad, wanted) for layer, wanted in zip(layers, expected, strict=True)
        )
    finally:
        PipelineOffloadManager.reset_instance()
        PipelineOffloadManager.OFFLOAD_MGR = None


def test_the_example_of_the_optimizer_runs_and_steps() -> None:
    example = next(example for example in python_examples() if "HybridDeviceOptimizer" in example)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    names = {"offload": offload, "model": model, "loss": model(torch.randn(8, 64)).square().mean()}
    exec(compile(example, str(README), "exec"), names)
    optimizer = names["optimizer"]
    assert isinstance(optimizer, offload.HybridDeviceOptimizer)
    optimizer.synchronize_parameters()
    assert not torch.equal(model.weight, before)
    optimizer.close()
