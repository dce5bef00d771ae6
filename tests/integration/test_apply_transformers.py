"""`offload.apply` on models of transformers, with random weights: nothing is downloaded.

Gradients are compared bitwise with the model alone; where blocks are recomputed, with the model without its
cache of keys and values, as its own gradient checkpointing has it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import PipelineOffloadManager
from tests.loops import trained

pytestmark = pytest.mark.usefixtures("one_thread")

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}
MOE = {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
PICTURE = {"image_size": 16, "patch_size": 4, "num_labels": 5}

MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SIZES, {"model.layers": 3}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SIZES, "head_dim": 8}, {"model.layers": 3}),
    "qwen3 moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SIZES, **MOE}, {"model.layers": 3}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**SIZES, "num_local_experts": 4},
        {"model.layers": 3},
    ),
    "gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", {**SIZES, "head_dim": 8}, {"model.layers": 3}),
    "gpt-2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 61, "bos_token_id": 0, "eos_token_id": 0},
        {"transformer.h": 3},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {**SMALL_T5, "vocab_size": 61, "decoder_start_token_id": 0},
        {"encoder.block": 3, "decoder.block": 2},
    ),
    "vit": (
        "ViTConfig",
        "ViTForImageClassification",
        {**{name: SIZES[name] for name in list(SIZES)[:4]}, **PICTURE},
        {"vit.layers": 3},
    ),
}
MODES: tuple[Any, ...] = ("groups", True, "hidden_states", "selective")
RECOMPUTING = ("hidden_states", "selective")


def build(name: str) -> nn.Module:
    config, model, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**sizes)).train()


def batch(name: str) -> dict[str, Tensor]:
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(0, 5, (2,))}
    return {"input_ids": torch.randint(0, 61, (2, 16)), "labels": torch.randint(0, 61, (2, 16))}


def train(model: nn.Module, name: str, steps: int = 2) -> list[Tensor]:
    """Gradients of each step, weights and buffers at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(5)

    def backward(step: int) -> None:
        for _ in range(2):
            model(**batch(name)).loss.backward()

    return trained(model, optimizer, steps, backward)


def check(
    name: str, mode: Any, manager: PipelineOffloadManager, prepare: Callable[[nn.Module], object] = id
) -> offload.Applied:
    plain, model = build(name), build(name)
    if mode in RECOMPUTING:
        for part in plain.modules():
            if hasattr(config := getattr(part, "config", None), "use_cache"):
                config.use_cache = False
    prepare(plain)
    handle = offload.apply(model, mode, min_numel=1)
    prepare(model)
    expected, found = train(plain, name), train(model, name)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    assert manager.stats.spill_bytes > 0
    return handle


@pytest.mark.req("S4-1")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["groups", "hidden_states"])
def test_a_model_of_transformers_has_the_bits_that_it_has_alone(
    name: str, mode: str, manager: PipelineOffloadManager
) -> None:
    handle = check(name, mode, manager)
    assert {group: len(names) for group, names in handle.groups.items()} == MODELS[name][3]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_inputs_leave_where_the_model_checkpoints_its_blocks_itself(
    mode: Any, reentrant: bool, manager: PipelineOffloadManager
) -> None:
    def checkpointed(model: Any) -> None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()

    check("llama", mode, manager, checkpointed)
    inputs = 2 * 3 * (2 * 16 * 32 * 4)  # microbatches, blocks, (batch, length, width) in float32
    # everything: the final norm's as well, and its statistics and positions
    extra = 2 * (5 * 2 * 16 * 32 * 4) if mode is True else 2 * 512
    assert inputs - manager.stats.kept_bytes <= manager.stats.spill_bytes <= inputs + extra


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [*MODES, "legacy", "disk"])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_every_model_in_every_mode(
    name: str, mode: Any, reentrant: bool | None, manager: PipelineOffloadManager
) -> None:
    def prepare(model: Any) -> None:
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant and name != "vit":
                model.enable_input_require_grads()

    check(name, mode, manager, prepare)


def test_caches_are_off_only_while_blocks_are_recomputed(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = build("t5")
    handle = offload.apply(model, "hidden_states", min_numel=1)
    assert not model.config.use_cache
    assert not model.encoder.config.use_cache or not model.decoder.config.use_cache
    assert any("use_cache of its config is False until remove()" in text for text in caplog.messages)
    prompt = torch.randint(0, 61, (1, 5))
    generated = model.eval().generate(prompt, max_new_tokens=4)
    handle.remove()
    assert model.config.use_cache
    assert model.decoder.config.use_cache
    assert torch.equal(model.generate(prompt, max_new_tokens=4), generated)


def test_generation_and_evaluation_pass_through(manager: PipelineOffloadManager) -> None:
    model: Any = build("llama")
    expected = copy.deepcopy(model).eval().generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=5)
    offload.apply(model, min_numel=1)
    train(model, "llama")
    saved = manager.engine.step
    model.load_state_dict(build("llama").state_dict())
    model.eval()
    assert torch.equal(model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=5), expected)
    with torch.no_grad():
        assert model(**batch("llama")).loss.grad_fn is None
    assert manager.engine.step == saved
    assert next(manager.living_blocks(), None) is None


@pytest.mark.req("S4-27")
@pytest.mark.parametrize("mode", ["groups", True, "hidden_states"])
def test_an_adapter_trains_with_the_bits_that_it_has_alone(
    mode: Any, manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    def adapted() -> Any:
        model = build("qwen3")
        if mode == "hidden_states":
            model.config.use_cache = False
        torch.manual_seed(1)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=4))

    plain, model = adapted(), adapted()
    handle = offload.apply(model, mode, min_numel=1)
    assert all(map(torch.equal, train(model, "qwen3"), train(plain, "qwen3")))
    assert manager.stats.spill_bytes > 0
    warned = [text for text in caplog.messages if "has an adapter and frozen weights" in text]
    assert len(warned) == (mode == "hidden_states")
    assert "base_model.model.model.layers" in handle.groups or mode is True


@pytest.mark.req("S4-24")
@pytest.mark.req("S4-40")
def test_with_an_adapter_all_tensors_leave_instead_of_being_recomputed(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    def saved_by(model: Any) -> int:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        handle = offload.apply(model, True, min_numel=1)
        train(model, "llama", steps=1)
        handle.remove()
        assert model.is_gradient_checkpointing
        return manager.stats.saved

    whole = saved_by(build("llama"))
    said = [record.getMessage() for record in caplog.records if record.name.startswith("offload")]
    assert ["runs its layers in checkpoints of its own" in text for text in said] == [True]
    adapter = saved_by(peft.get_peft_model(build("llama"), peft.LoraConfig(target_modules=["q_proj"], r=4)))
    assert adapter > 3 * whole
    assert any("its checkpoints are switched off until remove()" in text for text in caplog.messages)
