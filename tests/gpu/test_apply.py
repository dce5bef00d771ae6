"""`offload.apply` on a GPU: every mode gives the bits of the model alone, and what leaves is missing from the
peak.

The memory test has L blocks tanh(x @ w), of which each saves its input and its output: N bytes each, a
multiple of 2 MiB, so the allocator cuts every block of memory to size.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import OffloadConfig, marks
from parallel.transformer import TransformerConfig, TransformerStage
from tests.gpu.workbench import DEVICE
from tests.loops import trained

pytestmark = pytest.mark.gpu

MODES: tuple[Any, ...] = ("groups", True, "legacy", "disk", "hidden_states", "selective")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_manager_left() -> Iterator[None]:
    marks.close_manager()
    yield
    marks.close_manager()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.nn.functional.silu(self.up(self.norm(x)))))


def build(blocks: int = 4, width: int = 512) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks))).to(DEVICE, torch.bfloat16)


def train(model: nn.Module, x: Tensor, steps: int = 4) -> list[Tensor]:
    """Gradients of each step, and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1)

    def backward(step: int) -> None:
        for _ in range(2):
            model(x).float().square().mean().backward()

    return trained(model, optimizer, steps, backward)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("limit", [None, "24MB"])
def test_every_mode_has_the_bits_of_the_model_alone(mode: Any, limit: str | None, tmp_path: Path) -> None:
    x = torch.randn(2048, 512, device=DEVICE, dtype=torch.bfloat16)
    plain = train(build(), x)
    disk = {"disk_directory": str(tmp_path), "disk_ahead_bytes": 4 * MIB} if mode == "disk" else {}
    offload.configure(OffloadConfig(host_reserve_bytes=256 * MIB, **disk), print_summary=False)
    model = build()
    with offload.activations(model, mode, device_limit=limit, min_numel=1) as handle:
        ours = train(model, x)
        figures = handle.report().as_dict()
    assert all(map(torch.equal, ours, plain))
    assert figures["moved_bytes"] > 0
    # of all steps: in one of them every tensor may be read before it is written
    assert (figures["disk_out_bytes"] > 0) == (mode == "disk")


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", ["groups", "selective", "hidden_states"])
def test_the_model_of_this_project_has_its_bits(mode: Any) -> None:
    def run(mode: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = TransformerStage(
            TransformerConfig(
                dim=64, layers=4, heads=4, kv_heads=2, ffn=128, sequence=64, math_attention=True
            ),
            0,
            1,
        ).to(DEVICE)
        assert offload.apply(model, mode, min_numel=1).groups.keys() == ({"blocks"} if mode else set())
        tokens = torch.randint(0, 100, (2, 64), device=DEVICE)
        return train(model, tokens, steps=2)

    offload.configure(OffloadConfig(host_reserve_bytes=256 * MIB), print_summary=False)
    assert all(map(torch.equal, run(mode), run(False)))


class Product(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(width) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.req("S4-2")
@pytest.mark.usefixtures("clean_allocator")
def test_the_inputs_of_recomputed_blocks_are_missing_after_the_forward() -> None:
    rows, width, blocks = 16384, 1024, 10
    nbytes = rows * width * 4
    torch.manual_seed(0)
    x = torch.randn(rows, width, device=DEVICE, requires_grad=True)

    def held(mode: Any) -> int:
        model = nn.Sequential(*(Product(width) for _ in range(blocks))).to(DEVICE)
        offload.apply(model, mode, min_numel=1)
        found = 0
        for _ in range(3):
            before = torch.cuda.memory_allocated()
            loss = model(x).sum()
            torch.cuda.synchronize()
            found = torch.cuda.memory_allocated() - before
            loss.backward()
            x.grad = None
            del loss
        gc.collect()
        return found

    offload.configure(OffloadConfig(host_reserve_bytes=2 * blocks * nbytes), print_summary=False)
    # alone: the output of each block, which is the next one's input; the last is read by the sum only
    alone = held(False)
    assert alone >= blocks * nbytes
    # the first block's input is the caller's; of the others two are on their way out at most
    assert alone - held("hidden_states") >= (blocks - 3) * nbytes


@pytest.mark.parametrize("mode", ["groups", "hidden_states"])
@pytest.mark.usefixtures("deterministic")
def test_a_model_of_transformers_has_its_bits(mode: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 128}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4, use_cache=False)

    def run(mode: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16)
        offload.apply(model, mode)
        tokens = torch.randint(0, 128, (2, 2048), device=DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(4):
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    offload.configure(OffloadConfig(host_reserve_bytes=1 << 30), print_summary=False)
    assert all(map(torch.equal, run(mode), run(False)))
    assert marks.default_manager().stats.spill_bytes > 0


def test_a_share_of_the_device_is_a_limit() -> None:
    offload.apply(build(), device_limit="50%")
    total = torch.cuda.get_device_properties().total_memory
    assert marks.default_manager().engine.config.device_limit_bytes == total // 2
