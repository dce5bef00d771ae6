"""What modes switch in a model, and models that are not like the first: each raised, or stayed changed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from tests.regressions.beside import RECOMPUTING, WIDTH, differing, run, wide


@pytest.mark.parametrize("mode", RECOMPUTING)
def test_lazy_modules_in_blocks_are_made_by_the_first_forward(mode: Any) -> None:
    """Their buffers have no shape before: a copy of them raised."""
    model = nn.Sequential(*[nn.Sequential(nn.LazyLinear(WIDTH), nn.LazyBatchNorm1d()) for _ in range(3)])
    with offload.activations(model, mode, min_numel=1):
        for _ in range(3):
            model(wide()).sum().backward()
    assert all(buffer == 3 for name, buffer in model.named_buffers() if name.endswith("tracked"))


class Early(nn.Module):
    """depth: of the blocks, those that run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))

    def forward(self, x: Tensor, depth: int) -> list[Tensor]:
        seen = [x]
        for block in list(self.blocks)[:depth]:
            seen.append(block(seen[-1]))
        return seen


def test_a_forward_may_end_earlier_than_the_one_before_under_a_watermark() -> None:
    """Of a step whose activations somebody held, the curve named saves that the shorter forward did not
    have: IndexError out of loss.backward()."""

    def step(model: nn.Module, number: int) -> Tensor:
        seen: list[Tensor] = model(torch.randn(64, 32), (6, 6, 6, 3, 6, 2)[number])
        seen[-1].square().mean().backward()
        return seen[-1].detach()

    plain = run(Early, step, steps=6)
    ours = run(Early, step, "watermark", steps=6, high="20B")
    assert differing(plain, ours) == []


class Config:
    use_cache = True


class Layered(nn.Module):
    """As a model of transformers: a config, and layers that would checkpoint themselves."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.gradient_checkpointing = False
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_models_that_share_a_config_switch_its_cache_on_with_the_last_of_them() -> None:
    """Removing the first handle switched it on under the second, whose next step blamed the user."""
    config = Config()
    one, other = Layered(config), Layered(config)
    handles = [offload.apply(model, "hidden_states", min_numel=1) for model in (one, other)]
    handles[0].remove()
    assert config.use_cache is False
    handles[1].remove()
    assert config.use_cache is True


@pytest.mark.parametrize("mode", [True, "legacy", "disk", "groups", "watermark"])
def test_checkpoints_that_a_trainer_switches_on_are_named_beside_a_mode_that_moves(
    mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers ran twice, and what was to leave did not: silently."""
    model = Layered(Config())
    marks = {"high": "1000000B"} if mode == "watermark" else {}
    with caplog.at_level(logging.WARNING), offload.activations(model, mode, min_numel=1, **marks):
        model.gradient_checkpointing = True
        for _ in range(2):
            model(wide()).sum().backward()
    assert caplog.text.count("runs its layers in checkpoints of its own: they run twice") == 1
    for _ in range(2):
        offload.step_end()
    offload.reset()


def test_checkpointing_that_a_mode_switched_off_comes_back_with_its_arguments() -> None:
    """It came back with those of the default: another kind of checkpoint from then on."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=8
    )
    model = transformers.LlamaForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.lora_A = nn.Parameter(torch.zeros(1))
    offload.apply(model, True).remove()
    assert model.is_gradient_checkpointing
    arguments = [layer._gradient_checkpointing_func.keywords for layer in model.model.layers]
    assert arguments == [{"use_reentrant": True}] * 2
