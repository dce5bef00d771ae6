"""Training whose phases generate: TRL's GRPOTrainer, verl's engines, and transformers' Trainer by itself.
With park and wake, and with what `apply` does beside it, weights after some steps have the bits of those
without.

TRL and verl are not installed by scripts/env.sh: test_trainers_wheels.py runs these tests with their wheels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

import offload
from offload import PipelineOffloadManager
from offload.errors import OffloadError
from tests.unit.groups.stack import build_manager, installed
from tests.unit.park.states import WIDTH, Net, train

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from offload.integrations.transformers import OffloadCallback  # noqa: E402
from tests.integration.test_integrations import State, llama, settings  # noqa: E402


@pytest.fixture(autouse=True)
def manager() -> Iterator[PipelineOffloadManager]:
    with installed(build_manager()) as built, patch.dict(os.environ):
        yield built


def test_gradients_and_state_wait_while_a_trainers_model_generates(tmp_path: Path) -> None:
    seen: list[tuple[str, ...]] = []

    class Generates(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            inputs["labels"] = inputs["input_ids"] = model.generate(
                inputs["input_ids"][:, :4], max_new_tokens=4, do_sample=True, min_new_tokens=4
            )
            return super().training_step(model, inputs, *args)

    class Looks(transformers.LogitsProcessor):  # type: ignore[misc]
        def __call__(self, rows: Tensor, scores: Tensor) -> Tensor:
            return scores

    def trained(callback: OffloadCallback | None) -> State:
        torch.manual_seed(0)
        model, rows = llama(), torch.randint(5, 61, (16, 8), generator=torch.Generator().manual_seed(1))
        data = [{"input_ids": row, "labels": row} for row in rows]
        arguments = transformers.TrainingArguments(**settings(tmp_path, max_steps=5))
        trainer = Generates(model=model, args=arguments, train_dataset=data)
        if callback is not None:
            callback.add_to(trainer)
            forward = model.model.forward

            def look(*args: Any, **kwargs: Any) -> Any:
                handle = callback_handle()
                seen.append(() if handle is None else handle.parked)
                return forward(*args, **kwargs)

            def callback_handle() -> Any:
                from offload.park.parked import _known

                return _known.get(model)

            model.model.forward = look
        trainer.train()
        assert "generate" not in vars(model)
        return dict(trainer.model.state_dict())

    plain, callback = trained(None), OffloadCallback(park_while_generating=True)
    found = trained(callback)
    assert all(torch.equal(found[name], wanted) for name, wanted in plain.items())
    assert callback.handle is None
    assert {("gradients", "optimizer"), ()} == {*seen}


def grpo(tmp_path: Path, callback: OffloadCallback | None, **named: Any) -> State:
    trl = pytest.importorskip("trl", reason="test_trainers_wheels.py installs TRL")
    peft = pytest.importorskip("peft")
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    data = Dataset.from_dict({"prompt": [f"w{i} w{i + 7} w{i + 9}" for i in range(5, 25)]})
    lora = named.pop("lora", False)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len({*each.split()})) for each in completions]

    llama().save_pretrained(tmp_path / "model")  # of which TRL makes the reference model
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    evaluates = named.pop("evaluates", False)
    arguments = settings(tmp_path, max_steps=5, learning_rate=1e-2, gradient_checkpointing=False, **named)
    arguments |= {"num_generations": 2, "max_completion_length": 6, "per_device_eval_batch_size": 2}
    arguments |= {"eval_strategy": "steps", "eval_steps": 2} if evaluates else {}
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=trl.GRPOConfig(**arguments),
        train_dataset=data,
        eval_dataset=data.select(range(2)),
        processing_class=tokenizer,
        peft_config=peft.LoraConfig(target_modules=["q_proj"], r=2) if lora else None,
    )
    if callback is not None:
        callback.add_to(trainer)
    trainer.train()
    return dict(trainer.model.state_dict())


@pytest.mark.parametrize("named", [{}, {"lora": True}, {"beta": 0.1, "evaluates": True}], ids=str)
def test_trls_grpo_has_the_same_bits_with_parking_and_with_every_mode(
    tmp_path: Path, named: dict[str, Any]
) -> None:
    plain = grpo(tmp_path, None, **named)
    callbacks: list[dict[str, Any]] = [
        {"park_while_generating": True},
        {"mode": "hidden_states"},
        {"mode": "groups", "park_while_generating": True},
    ]
    for options in callbacks:
        found = grpo(tmp_path, OffloadCallback(**options), **named)
        assert all(torch.equal(found[name], wanted) for name, wanted in plain.items()), options


def test_verls_engine_parks_and_wakes_as_its_workers_ask(manager: PipelineOffloadManager) -> None:
    base = pytest.importorskip("verl.workers.engine.base", reason="test_trainers_wheels.py installs verl")
    from offload.integrations.verl import register

    class Config:
        param_offload = optimizer_offload = True

    class Tiny(base.BaseEngine):  # type: ignore[misc]
        """As verl's engine for FSDP2, where it moves nothing itself."""

        def __init__(self) -> None:
            self._is_offload_param, self._is_offload_optimizer = (
                Config.param_offload,
                Config.optimizer_offload,
            )

        is_param_offload_enabled = property(lambda self: self._is_offload_param)
        is_optimizer_offload_enabled = property(lambda self: self._is_offload_optimizer)

        def initialize(self) -> None:
            self.module: nn.Module = Net()
            self.optimizer = AdamW(self.module.parameters(), lr=1e-2)
            self.to("cpu", self._is_offload_param, self._is_offload_optimizer, self._is_offload_param)

        def get_per_tensor_param(self) -> Any:
            return iter(self.module.state_dict().items()), None

        def save_checkpoint(self, *_: Any) -> Any:
            return [each.sum().item() for each in self.module.parameters()]

    base.EngineRegistry.register("language_model", "tiny", device="cpu")(Tiny)
    register("tiny_parked", "tiny", ["language_model"], "cpu")
    with patch.dict(os.environ, {"VERL_ENGINE_DEVICE": "cpu"}):
        engine = base.EngineRegistry.new("language_model", "tiny_parked")
    engine.initialize()
    plain = Net()
    other = AdamW(plain.parameters(), lr=1e-2)
    for step in range(3):
        with pytest.raises(OffloadError, match="wake"):
            engine.module(torch.ones(1, WIDTH))
        with patch.object(base, "get_device_name", lambda: "cuda"):
            with base.BaseEngineCtx(engine, "eval"):
                engine.module(torch.ones(1, WIDTH))
                assert engine._parked.parked == ("gradients", "optimizer")
            assert engine.save_checkpoint() == [each.sum().item() for each in plain.parameters()]
            assert engine._parked.parked == ("weights", "gradients", "optimizer")
            with base.BaseEngineCtx(engine, "train"):
                train(engine.module, engine.optimizer, 1, step)
        train(plain, other, 1, step)
        synced = dict(engine.get_per_tensor_param()[0])
        assert engine._parked.parked == ("gradients", "optimizer")
        assert all(torch.equal(synced[name], value) for name, value in plain.state_dict().items())
        engine.to("cpu", model=True, optimizer=False, grad=False)
    assert offload.park(engine.module).parked == ("weights", "gradients", "optimizer", "extra")
