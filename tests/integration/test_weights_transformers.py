"""Weights of transformers' and peft's models stream: training, adapters merged and unmerged, generate()."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import offload
from offload.weights.weight import ExpandedLater
from tests.inside import by_expert, streaming_of, streams_from
from tests.unit.groups.stack import build_manager, installed
from tests.unit.weights.streamed import dequantized

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

LAYERS, VOCABULARY = 5, 64


@pytest.fixture(autouse=True)
def small_weights_stream() -> Iterator[None]:
    with installed(build_manager()), streams_from(512):
        yield


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=VOCABULARY,
            **options,
        )
    )


def adapted(**options: Any) -> Any:
    return peft.get_peft_model(
        llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj", "up_proj", "down_proj"], **options)
    )


def ids() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 12))


def train(model: Any, plain: Any, steps: int = 3) -> None:
    optimizers = [
        torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2)
        for each in (model, plain)
    ]
    for _ in range(steps):
        x = ids()
        for each in (model, plain):
            each(input_ids=x, labels=x).loss.backward()
        for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (mine.grad is None) == (its.grad is None), name
            assert mine.grad is None or torch.equal(mine.grad, its.grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check(model, plain)


def check(model: nn.Module, plain: nn.Module) -> None:
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


def test_a_model_trains_generates_checkpoints_and_is_saved(tmp_path: Path) -> None:
    model = llama()
    plain = copy.deepcopy(model)
    handle = offload.apply(model, weights="host")
    train(model, plain)
    x = ids()
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "attention_mask": torch.ones_like(x),
        "pad_token_id": 0,
    }
    assert torch.equal(model.generate(x, **options), plain.generate(x, **options))
    for each in (model, plain):
        each.gradient_checkpointing_enable()
        each.train()
    train(model, plain)
    model.save_pretrained(tmp_path)
    check(transformers.LlamaForCausalLM.from_pretrained(tmp_path), plain)
    stream = streaming_of(handle)
    assert stream.residency.present_bytes_peak == 2 * stream.blocks[0].nbytes
    handle.remove()
    check(model, plain)


@pytest.mark.parametrize("mode", [None, "hidden_states", "groups"])
@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_trains_and_is_merged_and_unmerged(mode: Any, dora: bool, tmp_path: Path) -> None:
    model = adapted(use_dora=dora, init_lora_weights=False)
    plain = copy.deepcopy(model)
    handle = offload.apply(model, mode, weights="host")
    assert handle.weights.resident["of an adapter"][0] == LAYERS * 4 * (3 if dora else 2)
    train(model, plain, 5)
    assert (handle.weights.misses, handle.weights.out_bytes) == (0, 0)
    x = ids()
    with torch.no_grad(), model.disable_adapter(), plain.disable_adapter():
        assert torch.equal(model(x).logits, plain(x).logits)
    for change in ("merge_adapter", "unmerge_adapter"):
        for each in (model, plain):
            getattr(each, change)()
        with torch.no_grad():
            assert torch.equal(model(x).logits, plain(x).logits)
        check(model, plain)
    model.save_pretrained(tmp_path)
    merged, its = model.merge_and_unload(), plain.merge_and_unload()
    check(merged, its)
    del model, plain, each  # what apply() was given is gone, and its layers are not
    gc.collect()
    with torch.no_grad():
        assert torch.equal(merged(x).logits, its(x).logits)
    check(merged, its)
    handle.remove()
    check(merged, its)


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_trains_on_int8_and_is_saved_without_expanding_it(dora: bool, tmp_path: Path) -> None:
    model = adapted(use_dora=dora, init_lora_weights=False)
    plain = copy.deepcopy(model)
    handle = offload.apply(model, weights="host", quantize="int8")
    for weight in streaming_of(handle).int8_weights():
        parameter = plain.get_parameter(weight.name)
        parameter.data = dequantized(parameter.data)
    train(model, plain)
    with patch.object(ExpandedLater, "touch", side_effect=AssertionError):
        model.save_pretrained(tmp_path)
    x = ids()
    for refused in ("merge_adapter", "merge_and_unload"):
        with pytest.raises(offload.OffloadError, match="is held as INT8"):
            getattr(model, refused)()
        with torch.no_grad():
            assert torch.equal(model(x).logits, plain(x).logits)
    handle.dequantize()
    for change in ("merge_adapter", "unmerge_adapter"):
        for each in (model, plain):
            getattr(each, change)()
        check(model, plain)
    handle.remove()
    check(model, plain)


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_on_meta_takes_the_shards_that_were_saved(tied: bool, tmp_path: Path) -> None:
    """Its rotary frequencies are on meta as well, and in no file."""
    plain = llama(tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len([*tmp_path.glob("*.safetensors")]) > 3
    model = on_meta(plain.config)
    handle = offload.apply(model, "hidden_states", weights="host")
    assert offload.load_weights(model, tmp_path) == ([], [])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    train(model, plain)
    for (name, mine), its in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, its), name
    handle.remove()
    check(model, plain)


@pytest.mark.parametrize("first", ["adapt", "apply"])
def test_an_adapter_is_added_once_the_values_are_there(first: str, tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    settings = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    torch.manual_seed(1)
    plain = peft.get_peft_model(llama(), peft.LoraConfig(**settings))
    model = on_meta(plain.config)
    handle = None
    if first == "apply":
        handle = offload.apply(model, weights="host")
    offload.load_weights(model, tmp_path)
    torch.manual_seed(1)
    llama()  # draws as the other one did
    model = peft.get_peft_model(model, peft.LoraConfig(**settings))
    handle = handle or offload.apply(model, weights="host")
    train(model, plain)
    handle.remove()
    check(model, plain)


def test_files_of_another_model_say_what_is_missing(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    model = on_meta(llama(tie_word_embeddings=False).config)
    with pytest.raises(offload.WeightFileError, match=r"base_model.model.* are missing") as said:
        offload.load_weights(peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])), tmp_path)
    assert "without adapters" in str(said.value)


@pytest.mark.parametrize("experts", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("checkpoints", [None, True, False])  # reentrant
def test_experts_of_mixtures_stream_by_the_expert(kind: str, experts: str, checkpoints: bool | None) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    number = {
        "mixtral": {"num_local_experts": 8},
        "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 16},
    }
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, num_hidden_layers=3, num_experts_per_tok=2, **sizes, **number[kind]
    )
    config._experts_implementation = experts
    base = transformers.AutoModelForCausalLM.from_config(config)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    if checkpoints is not None:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": checkpoints})
    plain = copy.deepcopy(model)
    handle = offload.apply(model, weights="host")
    train(model, plain, 4)
    assert len(by_expert(handle)) == 2 * 3
    figures = handle.weights
    assert figures.expert_hits + figures.expert_misses > 0
    model.eval(), plain.eval()
    x = ids()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(input_ids=x, **options), plain.generate(input_ids=x, **options))
    handle.remove()
