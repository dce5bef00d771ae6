"""Mixtures of transformers under `offload.apply` on a GPU, in bfloat16 and with torch's grouped products. The
router says something else in each recompute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import marks
from offload.checkpoint.selective import CallMode
from tests.gpu.workbench import DEVICE

pytest.importorskip("transformers")

import transformers

from tests.integration.test_apply_experts import equal, other_logits_in_a_recompute
from tests.loops import trained

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "use_cache": False,
}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}


@pytest.fixture(autouse=True)
def no_manager_left() -> Iterator[None]:
    marks.close_manager()
    yield
    marks.close_manager()


def build(name: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **sizes})
    return getattr(transformers, f"{name}ForCausalLM")(config).to(DEVICE, torch.bfloat16).train()


def train(model: Any, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    torch.manual_seed(1)

    def backward(step: int) -> None:
        for length in (1024, 640):
            tokens = torch.randint(0, 512, (2, 2, length), device=DEVICE)
            model(input_ids=tokens[0], labels=tokens[1]).loss.backward()

    return trained(model, optimizer, steps, backward)


def mixture() -> tuple[Any, list[int]]:
    model = build("Qwen3Moe", **EXPERTS)
    model.set_experts_implementation("grouped_mm")
    return model, other_logits_in_a_recompute(model, -2.2)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("mode", ["checkpoint", "hidden_states", "selective", "auto"])
def test_a_recompute_has_the_rows_and_the_bits_of_its_forward(mode: Any) -> None:
    expected = train(mixture()[0])
    model, recomputed = mixture()
    handle = offload.apply(model, mode=mode, min_numel=1)
    assert equal(train(model), expected)
    assert recomputed
    handle.remove()


def test_a_dense_layer_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the seeds of its attention, nor by the masks of its dropouts."""
    entered: list[str] = []
    enter = CallMode.__enter__

    def noted(self: CallMode) -> Any:
        entered.append(type(self).__name__)
        return enter(self)

    monkeypatch.setattr(CallMode, "__enter__", noted)
    model = build("Llama", attention_dropout=0.1)
    offload.apply(model, mode="hidden_states", min_numel=1)
    train(model, steps=1)
    first = SIZES["num_hidden_layers"]
    assert entered.count("_FirstMode") == first
    assert entered.count("_RecomputeMode") == first
    del entered[:]
    train(model, steps=1)
    assert entered == []
